"""The head of a language model in bfloat16: x·weightᵀ whose epilogue leaves exponentials in the place of logits.

Each row has a reference c that is known before the product: the logit of its label, a product of its own in float32.
The epilogue stores e^(x - c) in bfloat16, which is right to half a unit at any scale, since the type has float32's
exponents; for each column tile it leaves the maximum of x and Σ e^(x - c), float32 from the float32 sums: nothing else
of the logits goes to memory. With S the whole sum, the loss is log S, and the gradient of the logits is e^(x - c) / S
but for the label's. A row's gradients add up to 0, so the label's is minus the sum of the others, which keeps its
precision where the label's probability is near 1. `finish_rows` puts that sum in the label's place. So diag(1 / S)·E is
the gradient, and nobody multiplies it out: 1 / S goes to the rows of E·weight, and to those of x in Eᵀ·x.

A row whose largest logit is too far from c is lost: its exponentials might overflow. `finish_rows` gives it that logit
as its reference and marks its block of rows; a second pass of both kernels computes marked blocks again, and leaves at
once where there are none. It is always launched, for the host never learns of it. Rows that do not count have the
reference ∞, and e^-∞ = 0.

float16 has too few exponents for that: S of a loss of 12, and 1 / S, are beyond it. `loss.py` takes it the long way,
and has the op that calls the launches here chunk by chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of, faults
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import bfloat16, float32, int32
from genesis.kernels.gemm.gemm import place
from genesis.kernels.gemm.tiles import Tile, fitted, pieces
from genesis.kernels.index.segment import report
from genesis.kernels.loss.chunks import COLUMNS, GRAIN
from genesis.kernels.types import TRITON, converted

__all__ = ["Head", "Labels", "is_headed", "rows_of", "shifted_label"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# How many powers of 2 a logit may be above its row's reference: S of 2^24 words is then below 2^104, and of the 2^127
# of float32 and bfloat16 23 powers are left for the weight in E·weight, and for an x below 1 in x / S.
LIMIT = tl.constexpr(80)
ROW_TILES = 2048  # statistics of a row that are read at once
ROW_WIDTH = 1024  # elements of x and of a row of the weight that are read at once


# --- Rows -------------------------------------------------------------------------------------------------------------


@triton.jit
def shifted_label(p_labels, p_fault, i_row, length, shift, step_row, step, ignore, classes, site):
    """The label of row i_row = b·length + t, which is labels[b, t + shift], and whether it counts.

    One that is out of range is reported.
    """
    at = i_row % length + shift
    label = tl.load(p_labels + i_row // length * step_row + at * step, mask=at < length, other=0).to(tl.int64)
    kept = (at < length) & (label != ignore)
    inside = (label >= 0) & (label < classes)
    report(p_fault, site, label, kept & (inside == 0))
    return label, kept & inside


@triton.jit
def row_product(p_x, p_w, width, BLOCK: tl.constexpr):
    """The product of two rows in float32."""
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x, w = tl.load(p_x + i, mask=i < width, other=0), tl.load(p_w + i, mask=i < width, other=0)
        acc += converted(x, tl.float32) * converted(w, tl.float32)
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["rows", "line", "length", "shift", "step_row", "step", "ignore", "classes", "site"])
def references(p_words, p_logits, p_bases, p_lost, p_x, p_w, p_labels, p_fault, rows, line, width, sx, sw, length,
               shift, step_row, step, ignore, classes, site, BM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """For each row its label (-1 where it does not count), the label's logit, and the reference in powers of 2.

    Clears the marks of lost rows, a line for each chunk of `rows`: one for the chunk, then one for each BM rows.
    """
    i_row = tl.program_id(0).to(tl.int64)
    label, kept = shifted_label(p_labels, p_fault, i_row, length, shift, step_row, step, ignore, classes, site)
    logit = row_product(p_x + i_row * sx, p_w + tl.where(kept, label, 0) * sw, width, WIDTH)
    tl.store(p_words + i_row, tl.where(kept, label, -1).to(tl.int32))
    tl.store(p_logits + i_row, logit)
    tl.store(p_bases + i_row, tl.where(kept, logit * LOG2_E, float("inf")))
    p_lost += i_row // rows * line
    tl.store(p_lost, 0)
    tl.store(p_lost + 1 + i_row % rows // BM, 0)


# --- The product ------------------------------------------------------------------------------------------------------


@triton.jit
def logits(d_x, d_w, o_m, o_n, steps, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The tile of x·weightᵀ at (o_m, o_n)."""
    b_x = tl.zeros((BM, BN), tl.float32)
    for i_k in range(steps):
        b_a, b_b = d_x.load([o_m, i_k * BK]), d_w.load([o_n, i_k * BK])
        b_x = tl.dot(converted(b_a, DOT), converted(b_b.T, DOT), b_x, input_precision="ieee")
    return b_x


@triton.jit
def stored(b_e, d_e, o_m, o_n, BM: tl.constexpr, BN: tl.constexpr, PIECES: tl.constexpr):
    """Store [BM, BN] at (o_m, o_n) in PIECES parts along n, one after the other: less shared memory."""
    if PIECES == 1:
        d_e.store([o_m, o_n], converted(b_e, tl.bfloat16))
    else:
        HALF: tl.constexpr = BN // 2
        b_left, b_right = tl.split(tl.permute(tl.reshape(b_e, (BM, 2, HALF)), (0, 2, 1)))
        stored(b_left, d_e, o_m, o_n, BM, HALF, PIECES // 2)
        stored(b_right, d_e, o_m, o_n + HALF, BM, HALF, PIECES // 2)


@triton.jit
def taken_apart(b_x, d_e, p_tops, p_sums, p_bases, i_m, i_n, tiles_n, m, n, EVEN: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """Statistics and exponentials of a tile of logits."""
    o_m = i_m * BM + tl.arange(0, BM)
    base = tl.load(p_bases + o_m, mask=o_m < m, other=0)
    if not EVEN:
        b_x = tl.where((i_n * BN + tl.arange(0, BN) < n)[None, :], b_x, -float("inf"))
    b_e = tl.exp2(b_x * LOG2_E - base[:, None])
    o_s = o_m.to(tl.int64) * tiles_n + i_n
    tl.store(p_tops + o_s, tl.max(b_x, 1), mask=o_m < m)
    tl.store(p_sums + o_s, tl.sum(b_e, 1), mask=o_m < m)
    if d_e is not None:
        stored(b_e, d_e, i_m * BM, i_n * BN, BM, BN, PIECES)


@triton.jit(do_not_specialize=["m", "n", "k"])
def exponentials(d_x, d_w, d_e, p_tops, p_sums, p_bases, p_lost, m, n, k, DOT: tl.constexpr, EVEN: tl.constexpr,
                 AGAIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                 PIECES: tl.constexpr):  # fmt: skip
    """Tile by tile of x·weightᵀ: its maximum of each row and Σ e^(x - c), both [m, tiles], and e^(x - c) where `d_e`
    is given. AGAIN: only tiles with lost rows. EVEN says that BN divides n.
    """
    start, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    if AGAIN:
        marked = tl.load(p_lost)
        if marked == 0:
            return
        for i_tile in tl.range(start, tiles_m * tiles_n, programs):
            _, i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP, "one")
            if tl.load(p_lost + 1 + i_m) != 0:
                b_x = logits(d_x, d_w, i_m * BM, i_n * BN, steps, DOT, BM, BN, BK)
                taken_apart(b_x, d_e, p_tops, p_sums, p_bases, i_m, i_n, tiles_n, m, n, EVEN, BM, BN, PIECES)
    else:
        # The epilogue counts tiles itself: one number for both would tie the loads of the next tile to this one's store
        i_stored = start - programs
        for i_tile in tl.range(start, tiles_m * tiles_n, programs, flatten=True):
            _, i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP, "one")
            b_x = logits(d_x, d_w, i_m * BM, i_n * BN, steps, DOT, BM, BN, BK)
            i_stored += programs
            _, i_m, i_n = place(i_stored, tiles_m, tiles_n, GROUP, "one")
            taken_apart(b_x, d_e, p_tops, p_sums, p_bases, i_m, i_n, tiles_n, m, n, EVEN, BM, BN, PIECES)


# --- What follows it --------------------------------------------------------------------------------------------------


@triton.jit
def joined(p_tops, p_sums, i_own, tiles, BLOCK: tl.constexpr):
    """Over the tiles of a row: the maximum, and the sums of tile i_own and of all others."""
    tops, sums = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(p_tops + i, mask=i < tiles, other=-float("inf")))
        sums += tl.load(p_sums + i, mask=(i < tiles) & (i != i_own), other=0)
    return tl.max(tops, 0), tl.load(p_sums + i_own), tl.sum(sums, 0)


@triton.jit
def balanced(p_e, others, word, i_own, classes, BN: tl.constexpr):
    """Put minus the sum of a row's other exponentials in its label's place; `others` are those of other tiles.

    S - 1 would lose what is beside a probability near 1, the more so as the product rounds the label's logit otherwise
    than `row_product`. In the label's tile what is stored counts, for that is what the others are multiplied by.
    """
    i = i_own * BN + tl.arange(0, BN)
    b_e = converted(tl.load(p_e + i, mask=(i < classes) & (i != word), other=0), tl.float32)
    tl.store(p_e + word, converted(-(others + tl.sum(b_e, 0)), tl.bfloat16))


@triton.jit
def scaled(p_y, p_x, factor, width, BLOCK: tl.constexpr):
    """A row times its factor; zeros for a factor of 0, also of ∞ and NaN."""
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = converted(tl.load(p_x + i, mask=i < width, other=0), tl.float32)
        tl.store(p_y + i, converted(tl.where(factor == 0, 0.0, x * factor), tl.bfloat16), mask=i < width)


@triton.jit(do_not_specialize=["tiles", "classes"])
def finish_rows(p_losses, p_factors, p_bases, p_logits, p_words, p_lost, p_tops, p_sums, p_e, p_x, p_y, tiles, classes,
                width, se, sx, sy, AGAIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """The loss of a row and, where `p_e` is given, what its gradients take: 1 / S, its label's element of E, and x / S
    in `p_y`. Marks a lost row, and AGAIN finishes rows only of blocks that have one.
    """
    i_row = tl.program_id(0).to(tl.int64)
    p_mark = p_lost + 1 + i_row // BM
    if AGAIN:
        marked = tl.load(p_mark)
        if marked == 0:
            return
    word, base = tl.load(p_words + i_row), tl.load(p_bases + i_row)
    kept = word >= 0
    i_own = tl.where(kept, word, 0) // BN
    top, own, others = joined(p_tops + i_row * tiles, p_sums + i_row * tiles, i_own, tiles, BLOCK)
    total = own + others

    # What follows is wrong for a lost row, and is written over when the row comes again.
    infinite = tl.abs(top) == float("inf")  # the reference has NaN there
    lost = kept & (tl.abs(top * LOG2_E - base) > LIMIT) & (infinite == 0)
    tl.store(p_bases + i_row, top * LOG2_E, mask=lost)
    tl.store(p_lost, 1, mask=lost)
    tl.store(p_mark, 1, mask=lost)

    # The label's own exponent, as the product's epilogue computes it: 0 but for rounding, unless the row was lost.
    exponent = (tl.load(p_logits + i_row) * LOG2_E - base) * LN_2
    loss = tl.where(infinite, float("nan"), tl.log(total) - exponent)
    tl.store(p_losses + i_row, tl.where(kept, loss, 0.0))
    if p_e is not None:
        factor = tl.where(kept, tl.where(infinite, float("nan"), 1 / total), 0.0)
        tl.store(p_factors + i_row, factor)
        scaled(p_y + i_row * sy, p_x + i_row * sx, factor, width, WIDTH)
        p_e += i_row * se
        if kept:
            balanced(p_e, others, word, i_own, classes, BN)
        elif total != 0:  # infinite logits of a row that does not count
            for start in range(0, classes, BLOCK):
                i = start + tl.arange(0, BLOCK)
                tl.store(p_e + i, tl.zeros((BLOCK,), tl.bfloat16), mask=i < classes)


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
    """Whether the kernels here take these: bfloat16 that TMA can fetch, on a device that has one."""
    return (
        x.dtype is bfloat16
        and backend_of(x.device).driver.properties.capability >= (9, 0)
        and is_describable(x, x.shape, x.strides)
        and is_describable(weight, weight.shape, weight.strides)
        and weight.shape[0] < 1 << 24
    )


def tile_of(rows: int) -> Tile:
    """Two programs an SM: one's exponentials run beside the other's products."""
    return Tile(64 if rows <= 64 else 128, COLUMNS, 64, 4, 3, resident=2)


def rows_of(x: Array, first: int, count: int) -> Array:
    """Rows `first` … `first` + `count` - 1."""
    return x.view((count, *x.shape[1:]), x.strides, x.offset + first * x.strides[0])


class Head:
    """The memory of all rows and of a chunk of up to `rows` of them, and the launches that fill it.

    Attributes:
        losses: `[tokens]` float32, of all chunks.
        factors, bases: `[tokens]` float32: 1 / S, and the reference in powers of 2.
        logits, words: `[tokens]`: the label's logit, float32, and the label, or -1 where the row does not count.
        lost: int32 `[chunks, 1 + blocks]`: whether a row is lost of a chunk, and of each of its blocks of rows.
        tops, sums: `[rows, tiles]` float32.
        memory: `[rows, classes]` in x's type, with gaps between rows; None where no gradients are wanted.
    """

    def __init__(self, x: Array, weight: Array, labels: Labels, rows: int, with_grads: bool) -> None:
        self.x, self.weight, self.labels, self.rows = x, weight, labels, rows
        self.properties = backend_of(x.device).driver.properties
        self.tile = fitted(tile_of(rows), x.dtype.itemsize, self.properties.shared_memory)
        self.tiles = triton.cdiv(weight.shape[0], self.tile.bn)
        tokens, device = x.shape[0], x.device
        self.losses, self.factors, self.bases, self.logits = (empty((tokens,), float32, device) for _ in range(4))
        self.words = empty((tokens,), int32, device)
        line = -(-(1 + triton.cdiv(rows, self.tile.bm)) // 4) * 4  # 16 bytes: one kernel serves all chunks
        self.lost = empty((triton.cdiv(tokens, rows), line), int32, device)
        self.tops, self.sums = (empty((rows, self.tiles), float32, device) for _ in range(2))
        step = -(-weight.shape[0] // GRAIN) * GRAIN
        self.memory = empty((rows, step), x.dtype, device) if with_grads else None

    def begin(self) -> None:
        """The references of all rows."""
        x, w, classes = self.x, self.weight, self.labels.classes
        launch(
            references, x.shape[0], self.words, self.logits, self.bases, self.lost, x, w, self.labels.array,
            faults.flag(x.device), self.rows, self.lost.shape[1], w.shape[1], x.strides[0], w.strides[0],
            *self.labels.values, faults.site("linear_cross_entropy", 1, classes), BM=self.tile.bm, WIDTH=self._width,
            num_warps=4,
        )  # fmt: skip

    def forward(self, first: int, count: int, y: Array | None) -> None:
        """Losses of rows `first` … `first` + `count` - 1; where gradients are wanted also their exponentials, and x / S
        in `y` `[count, width]`.
        """
        for again in (False, True):
            self._multiply(first, count, again)
            self._finish(first, count, y, again)

    def _multiply(self, first: int, count: int, again: bool) -> None:
        x, w, t, memory = rows_of(self.x, first, count), self.weight, self.tile, self.memory
        width, classes = w.shape[1], w.shape[0]
        columns = t.bn // pieces(t, x.dtype.itemsize)
        target = memory and Descriptor(memory, (count, classes), memory.strides, (t.bm, columns))
        dot = float32 if is_interpreted() else bfloat16  # which the interpreter cannot multiply
        launch(
            exponentials, min(self.properties.sm_count * t.resident, triton.cdiv(count, t.bm) * self.tiles),
            Descriptor(x, x.shape, x.strides, (t.bm, t.bk)), Descriptor(w, w.shape, w.strides, (t.bn, t.bk)), target,
            self.tops, self.sums, rows_of(self.bases, first, count), rows_of(self.lost, first // self.rows, 1), count,
            classes, width, DOT=TRITON[dot.name], EVEN=classes % t.bn == 0, AGAIN=again, BM=t.bm, BN=t.bn, BK=t.bk,
            GROUP=t.group, PIECES=t.bn // columns, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip

    def _finish(self, first: int, count: int, y: Array | None, again: bool) -> None:
        memory, x = self.memory, rows_of(self.x, first, count)
        of_rows = (rows_of(a, first, count) for a in (self.losses, self.factors, self.bases, self.logits, self.words))
        launch(
            finish_rows, count, *of_rows, rows_of(self.lost, first // self.rows, 1), self.tops, self.sums, memory, x, y,
            self.tiles, self.labels.classes, x.shape[1], 0 if memory is None else memory.strides[0], x.strides[0],
            0 if y is None else y.strides[0], AGAIN=again, BM=self.tile.bm, BN=self.tile.bn,
            BLOCK=min(ROW_TILES, triton.next_power_of_2(self.tiles)), WIDTH=self._width, num_warps=4,
        )  # fmt: skip

    @property
    def _width(self) -> int:
        return min(ROW_WIDTH, triton.next_power_of_2(self.x.shape[1]))

    def gradients(self, count: int) -> Array:
        """`[count, classes]`: the gradients of the last rows' logits, times S."""
        assert self.memory is not None
        return self.memory.view((count, self.labels.classes), self.memory.strides)
