"""The head of a language model in 2-byte floats: x·weightᵀ whose epilogue takes the softmax apart, tile by tile.

For each row and column tile of the logits the product leaves the tile's maximum t and Σ e^(x - t), both float32 from
the float32 sums, and stores e^(x - t) itself in the narrow type: nothing else of the logits goes to memory. What stands
there is right to half a unit however large the logits are, and where it matters most, at a row's largest logit, it is
exactly 1. `finish_rows` joins the tiles of a row to its log-sum-exp l, and `gradient_tiles` only scales in place by
e^(t - l): no exponential is computed twice. The logit of a row's label is a product of its own, in float32.

Here are the kernels and their launches; the op that calls them chunk by chunk is in `loss.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of, faults
from genesis.backend.cuda.descriptor import Descriptor, is_describable
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import bfloat16, float32
from genesis.kernels.chunks import COLUMNS, GRAIN
from genesis.kernels.linalg import place
from genesis.kernels.matmul_tiles import Tile, fitted, pieces
from genesis.kernels.segment import report
from genesis.kernels.types import TRITON, converted

__all__ = ["Head", "Labels", "is_headed", "log_sum", "shifted_label"]

LOG2_E = tl.constexpr(1.4426950408889634)
ROW_TILES = 2048  # statistics of a row that are read at once
ROW_WIDTH = 1024  # elements of x and of a row of the weight, for the label's logit
GRADIENT = 4096  # elements of a program of `gradient_tiles`


# --- Rows -------------------------------------------------------------------------------------------------------------


@triton.jit
def shifted_label(p_labels, p_fault, i_row, length, shift, step_row, step, ignore, classes, site):
    """The label of row i_row = b·length + t, which is labels[b, t + shift], and whether it counts.

    One that is out of range is reported, unless `p_fault` is None.
    """
    at = i_row % length + shift
    label = tl.load(p_labels + i_row // length * step_row + at * step, mask=at < length, other=0).to(tl.int64)
    kept = (at < length) & (label != ignore)
    inside = (label >= 0) & (label < classes)
    if p_fault is not None:
        report(p_fault, site, label, kept & (inside == 0))
    return label, kept & inside


@triton.jit
def log_sum(top, sums):
    """log Σ e^x; NaN where all of x are infinite, as the reference has it."""
    return tl.where(tl.abs(top) == float("inf"), float("nan"), top + tl.log(sums))


# --- The product ------------------------------------------------------------------------------------------------------


@triton.jit
def stored_exponentials(b_e, d_e, o_m, o_n, TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                        PIECES: tl.constexpr):  # fmt: skip
    """Store [BM, BN] at (o_m, o_n) in PIECES parts along n, one after the other: less shared memory."""
    if PIECES == 1:
        d_e.store([o_m, o_n], converted(b_e, TYPE))
    else:
        HALF: tl.constexpr = BN // 2
        b_left, b_right = tl.split(tl.permute(tl.reshape(b_e, (BM, 2, HALF)), (0, 2, 1)))
        stored_exponentials(b_left, d_e, o_m, o_n, TYPE, BM, HALF, PIECES // 2)
        stored_exponentials(b_right, d_e, o_m, o_n + HALF, TYPE, BM, HALF, PIECES // 2)


@triton.jit(do_not_specialize=["m", "n", "k"])
def exponentials(d_x, d_w, d_e, p_tops, p_sums, m, n, k, DOT: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                 PIECES: tl.constexpr):  # fmt: skip
    """Tile by tile of x·weightᵀ: its maximum t of each row and Σ e^(x - t), both [m, tiles], and e^(x - t) where `d_e`
    is given. EVEN says that BN divides n.
    """
    programs = tl.num_programs(0)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    # The epilogue counts tiles itself: one number for both would tie the loads of the next tile to this one's store.
    i_stored = tl.program_id(0) - programs
    for i_tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        _, i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP, "one")
        b_x = tl.zeros((BM, BN), tl.float32)
        for i_k in range(steps):
            b_a, b_b = d_x.load([i_m * BM, i_k * BK]), d_w.load([i_n * BN, i_k * BK])
            b_x = tl.dot(converted(b_a, DOT), converted(b_b.T, DOT), b_x, input_precision="ieee")
        i_stored += programs
        _, i_m, i_n = place(i_stored, tiles_m, tiles_n, GROUP, "one")
        if not EVEN:
            b_x = tl.where((i_n * BN + tl.arange(0, BN) < n)[None, :], b_x, -float("inf"))
        b_top = tl.max(b_x, 1)
        base = tl.where(b_top == -float("inf"), 0.0, b_top) * LOG2_E  # nothing but -inf: terms are 0, not NaN
        b_e = tl.exp2(b_x * LOG2_E - base[:, None])
        o_m = i_m * BM + tl.arange(0, BM)
        o_s = o_m.to(tl.int64) * tiles_n + i_n
        tl.store(p_tops + o_s, b_top, mask=o_m < m)
        tl.store(p_sums + o_s, tl.sum(b_e, 1), mask=o_m < m)
        if d_e is not None:
            stored_exponentials(b_e, d_e, i_m * BM, i_n * BN, TYPE, BM, BN, PIECES)


@triton.jit
def label_logit(p_x, p_w, width, BLOCK: tl.constexpr):
    """The product of two rows in float32."""
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x, w = tl.load(p_x + i, mask=i < width, other=0), tl.load(p_w + i, mask=i < width, other=0)
        acc += converted(x, tl.float32) * converted(w, tl.float32)
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["first", "tiles", "length", "shift", "step_row", "step", "ignore", "classes", "site"])
def finish_rows(p_losses, p_tops, p_sums, p_x, p_w, p_labels, p_fault, first, tiles, width, sx, sw, length, shift,
                step_row, step, ignore, classes, site, GRADS: tl.constexpr, BLOCK: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """The loss of a row from the statistics of its tiles; with GRADS their maxima t become e^(t - l)."""
    i_local = tl.program_id(0).to(tl.int64)
    i_row = i_local + first
    label, kept = shifted_label(p_labels, p_fault, i_row, length, shift, step_row, step, ignore, classes, site)
    p_top, p_sum = p_tops + i_local * tiles, p_sums + i_local * tiles
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(p_top + i, mask=i < tiles, other=-float("inf")))
    top = tl.max(tops, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        b_top = tl.load(p_top + i, mask=i < tiles, other=-float("inf"))
        b_sum = tl.load(p_sum + i, mask=i < tiles, other=0)
        sums += tl.where(b_top == -float("inf"), 0.0, b_sum * tl.exp(b_top - top))
    total = tl.sum(sums, 0)
    logit = label_logit(p_x + i_row * sx, p_w + tl.where(kept, label, 0) * sw, width, WIDTH)
    tl.store(p_losses + i_row, tl.where(kept, log_sum(top, total) - logit, 0.0))
    if GRADS:
        for start in range(0, tiles, BLOCK):
            i = start + tl.arange(0, BLOCK)
            b_top = tl.load(p_top + i, mask=i < tiles, other=0)
            tl.store(p_top + i, tl.where(kept, tl.exp(b_top - top) / total, 0.0), mask=i < tiles)


@triton.jit(do_not_specialize=["first", "tiles", "blocks", "length", "shift", "step_row", "step", "ignore", "classes"])
def gradient_tiles(p_d, p_factors, p_labels, first, tiles, blocks, sd, length, shift, step_row, step, ignore, classes,
                   BN: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """T tiles of a row: e·factor - onehot over e. The mask takes in the gap behind a row, which nobody reads, because
    its end is a multiple of what a thread moves at once.
    """
    i_local, i_block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i_row = i_local + first
    label, kept = shifted_label(p_labels, None, i_row, length, shift, step_row, step, ignore, classes, 0)
    o_t = i_block * T + tl.arange(0, T)
    o_c = o_t[:, None] * BN + tl.arange(0, BN)[None, :]
    p_e = p_d + i_local * sd + o_c
    m = o_c < sd
    factor = tl.load(p_factors + i_local * tiles + o_t, mask=o_t < tiles, other=0)[:, None]
    e = converted(tl.load(p_e, mask=m, other=0), tl.float32)
    d = tl.where(factor == 0, 0.0, e * factor)  # a row that does not count has no NaN, either
    d -= tl.where((o_c == label) & kept, 1.0, 0.0)
    tl.store(p_e, converted(d, p_d.dtype.element_ty), mask=m)


# --- Launching them ---------------------------------------------------------------------------------------------------


class Labels(NamedTuple):
    """Labels as kernels take them.

    Attributes:
        array: `[N]` or `[B, T]`.
        shift: row t of T has the label t + shift.
        ignore: the label that counts for nothing.
        classes: labels are below it.
    """

    array: Array
    shift: int
    ignore: int
    classes: int

    @property
    def values(self) -> tuple[int, ...]:
        """length, shift, step_row, step, ignore and classes of the kernels."""
        step_row = self.array.strides[0] if self.array.ndim == 2 else 0
        return (
            max(self.array.shape[-1], 1), self.shift, step_row, self.array.strides[-1], self.ignore, self.classes
        )  # fmt: skip


def is_headed(x: Array, weight: Array) -> bool:
    """Whether the kernels here take these: 2-byte floats that the copy engine can fetch, on a device that has one."""
    return (
        x.dtype.itemsize == 2
        and backend_of(x.device).driver.properties.capability >= (9, 0)
        and is_describable(x, x.shape, x.strides)
        and is_describable(weight, weight.shape, weight.strides)
        and weight.shape[0] < 1 << 24
    )


def tile_of(rows: int) -> Tile:
    """Two programs a processor: one's exponentials run beside the other's products."""
    return Tile(64 if rows <= 64 else 128, COLUMNS, 64, 4, 3, resident=2)


class Head:
    """The memory of one chunk of up to `rows` rows, and the launches that fill it.

    Attributes:
        losses: `[tokens]` float32, of all chunks.
        tops, sums: `[rows, tiles]` float32.
        memory: `[rows, classes]` in x's type, with gaps between rows; None where no gradients are wanted.
    """

    def __init__(self, x: Array, weight: Array, labels: Labels, rows: int, with_grads: bool) -> None:
        self.x, self.weight, self.labels = x, weight, labels
        self.properties = backend_of(x.device).driver.properties
        self.tile = fitted(tile_of(rows), x.dtype.itemsize, self.properties.shared_memory)
        self.tiles = triton.cdiv(weight.shape[0], self.tile.bn)
        self.losses = empty(x.shape[:1], float32, x.device)
        self.tops, self.sums = (empty((rows, self.tiles), float32, x.device) for _ in range(2))
        step = -(-weight.shape[0] // GRAIN) * GRAIN
        self.memory = empty((rows, step), x.dtype, x.device) if with_grads else None

    def forward(self, first: int, count: int) -> None:
        """Exponentials, statistics and losses of rows `first` … `first` + `count` - 1."""
        x, w, t, memory = self.x, self.weight, self.tile, self.memory
        width, classes = w.shape[1], w.shape[0]
        columns = t.bn // pieces(t, x.dtype.itemsize)
        chunk = x.view((count, width), x.strides, x.offset + first * x.strides[0])
        target = memory and Descriptor(memory, (count, classes), memory.strides, (t.bm, columns))
        dot = float32 if is_interpreted() and x.dtype is bfloat16 else x.dtype  # which it cannot multiply
        launch(
            exponentials, min(self.properties.processors * t.resident, triton.cdiv(count, t.bm) * self.tiles),
            Descriptor(chunk, chunk.shape, chunk.strides, (t.bm, t.bk)),
            Descriptor(w, w.shape, w.strides, (t.bn, t.bk)), target, self.tops, self.sums, count, classes, width,
            DOT=TRITON[dot.name], TYPE=TRITON[x.dtype.name], EVEN=classes % t.bn == 0, BM=t.bm, BN=t.bn, BK=t.bk,
            GROUP=t.group, PIECES=t.bn // columns, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        launch(
            finish_rows, count, self.losses, self.tops, self.sums, x, w, self.labels.array,
            faults.flag(x.device), first, self.tiles, width, x.strides[0], w.strides[0], *self.labels.values,
            faults.site("linear_cross_entropy", 1, classes), GRADS=memory is not None,
            BLOCK=min(ROW_TILES, triton.next_power_of_2(self.tiles)),
            WIDTH=min(ROW_WIDTH, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip

    def gradients(self, first: int, count: int) -> Array:
        """The gradients `[count, classes]` of the rows' logits, over their exponentials."""
        assert self.memory is not None
        together = max(1, GRADIENT // self.tile.bn)
        blocks, step = triton.cdiv(self.tiles, together), self.memory.strides[0]
        launch(
            gradient_tiles, count * blocks, self.memory, self.tops, self.labels.array, first, self.tiles,
            blocks, step, *self.labels.values, BN=self.tile.bn, T=together, num_warps=4,
        )  # fmt: skip
        return self.memory.view((count, self.labels.classes), (step, 1))
