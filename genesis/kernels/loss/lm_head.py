"""The language model head in bfloat16: x·weightᵀ with an epilogue that stores exponentials instead of logits.

Reference: `genesis/ops/loss.py`: linear_cross_entropy, linear_token_log_probs and its backward. `loss.py` has the ops,
which launch these kernels chunk by chunk.

Below, x is a logit divided by the temperature, and `scale` is log2(e) divided by the temperature.

Each row has a reference c that is computed before the GEMM: the logit of its label, a separate dot product in float32.
The epilogue stores e^(x - c) in bfloat16. This is accurate to half an ulp at any scale, since bfloat16 has the
exponents of float32. For each column tile the epilogue also stores the maximum of x and Σ e^(x - c), both computed from
the float32 accumulator. Nothing else of the logits reaches memory.

Let S be the sum over all tiles. The loss is log S, and the gradient of the logits is e^(x - c) / S except at the label.
The gradients of a row add up to 0, so the label's gradient is minus the sum of the others. This sum is precise even if
the label's probability is near 1, and `finish_rows_kernel` stores it at the label. The gradient of the logits is then
diag(1 / S)·E. It is never computed: 1 / S scales the rows of E·weight, and the rows of x in Eᵀ·x.

A row overflows if its largest logit is too far from c. `finish_rows_kernel` then makes that logit the reference and
flags the row's block. A second pass of both kernels recomputes flagged blocks, or returns at once. It is always
launched, because the host never reads the flags. Rows without a label are left out (`labelled.py`).

float16 has too few exponents for this method: S for a loss of 12, and 1 / S, are out of its range. For that type
`loss.py` computes logits in float32.

Inside `genesis.exact` the loss is summed in one order, which a sampler can follow before it knows a label. A tile's
statistics are relative to its own maximum (`tile_statistics`), `row_lse` combines them, and `log_prob` gives the loss.
The label's logit is then an element of the accumulator, stored by its tile. The gradients keep the reference c.

Tiles: BM rows x BN classes, BK elements along the width; one row in steps of BLOCK tiles or WIDTH elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor
from genesis.dtypes import bfloat16, float32, int32
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, converted
from genesis.kernels.gemm.gemm import accumulate, grouped_tile
from genesis.kernels.gemm.tiles import GemmTile, epilogue_slices, fitted
from genesis.kernels.loss.labelled import ROW_WIDTH, LabelledRows, begins_padding, can_limit, copy_row, first_top

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
# The most powers of 2 by which a logit may differ from its row's reference. S over 2^24 classes is then below 2^104.
# float32 and bfloat16 reach 2^127, so 23 powers remain for the weight in E·weight, and for an x below 1 in x / S.
LIMIT = tl.constexpr(80)
COLUMNS = 128  # columns of a tile of 2-byte logits, which stores two statistics per row
OF_X, OF_W = tl.constexpr((False, ())), tl.constexpr((True, ()))  # layouts of the operands in `accumulate`
GRAIN = 64  # divides the row stride of a chunk's logits, so that TMA supports any vocabulary
ROW_TILES = 2048  # statistics of a row per load


# --- Rows -------------------------------------------------------------------------------------------------------------


@triton.jit
def row_dot(p_x, p_w, width, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)  # [BLOCK]
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        x, w = tl.load(p_x + i, mask=i < width, other=0), tl.load(p_w + i, mask=i < width, other=0)  # [BLOCK] each
        acc += converted(x, tl.float32) * converted(w, tl.float32)  # [BLOCK]
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["first"])
def references_kernel(p_x, p_logits, p_references, p_overflow, p_rows, p_numbers, p_row_labels, p_total, p_limit, first,
                      p_w, width, sr, sw, scale, BM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Copy a chunk's rows from `p_rows` to `p_x`, and store the logit of each row's label and the reference in powers
    of 2. Rows behind them are zeros with the reference ∞.

    Also clear the overflow flags: one for the chunk, then one per BM rows.
    """
    i_row = tl.program_id(0).to(tl.int64)
    tl.store(p_overflow, 0)
    tl.store(p_overflow + 1 + i_row // BM, 0)
    if begins_padding(i_row, p_limit) == 0:
        is_there = first + i_row < tl.load(p_total)
        p_row = p_rows + tl.load(p_numbers + i_row, mask=is_there, other=0).to(tl.int64) * sr
        read = tl.where(is_there, width, 0)
        copy_row(p_x + i_row * width, p_row, None, read, width, WIDTH)
        label = tl.load(p_row_labels + i_row, mask=is_there, other=0).to(tl.int64)
        logit = row_dot(p_row, p_w + label * sw, read, WIDTH)
        tl.store(p_logits + i_row, logit)
        tl.store(p_references + i_row, tl.where(is_there, logit * scale, float("inf")))


# --- Statistics in one order (docs/decisions/0014-exact.md) -----------------------------------------------------------


@triton.jit
def tile_statistics(b_x, scale):
    """Return each row's maximum [BM], b_e = 2^((x - maximum)·scale) [BM, 128], and the sums of b_e [BM], for a tile of
    logits [BM, 128] in the accumulator's layout with 16 rows per warp.
    """
    b_top = tl.max(b_x, 1)  # [BM]
    b_e = tl.exp2((b_x - b_top[:, None]) * scale)  # [BM, 128]
    return b_top, b_e, tl.sum(b_e, 1)


UNIT = tl.constexpr(2.0**40)  # a row's sum is at least 1, and at most 128 per tile


@triton.jit
def row_lse(p_maxima, p_sums, i_own, tiles, scale, BLOCK: tl.constexpr):
    """Return the maximum M over the tiles of a row, S = Σ sum·2^((maximum - M)·scale), and the part of S from all tiles
    except i_own. S is added in integers, so its bits do not depend on the order.
    """
    maxima = tl.full((BLOCK,), -float("inf"), tl.float32)  # [BLOCK]
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        maxima = tl.maximum(maxima, tl.load(p_maxima + i, mask=i < tiles, other=-float("inf")))
    maximum = tl.max(maxima, 0)
    units, others = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float32)  # [BLOCK] each
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        top = tl.load(p_maxima + i, mask=i < tiles, other=-float("inf"))  # [BLOCK]
        terms = tl.load(p_sums + i, mask=i < tiles, other=0) * tl.exp2((top - maximum) * scale)  # [BLOCK]
        units += (terms * UNIT).to(tl.int64)
        others += tl.where(i == i_own, 0.0, terms)
    others = tl.sum(others, 0)
    total = tl.sum(units, 0).to(tl.float32) * (1 / UNIT)
    return maximum, tl.where(others == others, total, others), others  # NaN has no integer


@triton.jit
def log_prob(logit, maximum, total, scale):
    """Return the log-probability of a class, given its logit and the results of `row_lse`."""
    return maths.rounded_product((logit - maximum) * scale, tl.zeros_like(logit) + LN_2) - tl.log(total)


# --- The GEMM ---------------------------------------------------------------------------------------------------------


@triton.jit
def store_pieces(b_e, d_e, o_m, o_n, BM: tl.constexpr, BN: tl.constexpr, PIECES: tl.constexpr):
    """Store b_e [BM, BN] at (o_m, o_n) in PIECES parts along n, one after the other, to save shared memory."""
    if PIECES == 1:
        d_e.store([o_m, o_n], converted(b_e, tl.bfloat16))
    else:
        HALF: tl.constexpr = BN // 2
        b_left, b_right = tl.split(tl.permute(tl.reshape(b_e, (BM, 2, HALF)), (0, 2, 1)))  # [BM, HALF]
        store_pieces(b_left, d_e, o_m, o_n, BM, HALF, PIECES // 2)
        store_pieces(b_right, d_e, o_m, o_n + HALF, BM, HALF, PIECES // 2)


@triton.jit
def exp_epilogue(b_x, d_e, p_maxima, p_sums, p_references, p_labels, p_logits, p_own, i_m, i_n, tiles_n, m, n, scale,
                 EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """Store the statistics of a tile of logits b_x [BM, BN], and its exponentials if `d_e` is given. With p_logits, the
    statistics are those of `tile_statistics`, and the logits of the labels in this tile are stored. With p_own, those
    logits are stored there if no class before the label in this tile has as large a logit, otherwise NaN.
    """
    o_m = i_m * BM + tl.arange(0, BM)  # [BM]
    reference = tl.load(p_references + o_m, mask=o_m < m, other=float("inf"))  # [BM]
    if not EVEN:
        b_x = tl.where((i_n * BN + tl.arange(0, BN) < n)[None, :], b_x, -float("inf"))
    o_s = o_m.to(tl.int64) * tiles_n + i_n  # [BM]
    if p_labels is not None:
        o_n = tl.arange(0, BN)[None, :]  # [1, BN]
        b_label = tl.load(p_labels + o_m, mask=o_m < m, other=-1) - i_n * BN  # [BM]
        b_logit = tl.sum(tl.where(o_n == b_label[:, None], b_x, 0.0), 1)  # [BM]
        m_label = (b_label >= 0) & (b_label < BN)  # [BM]
        if p_own is not None:
            b_before = tl.max(tl.where(o_n < b_label[:, None], b_x, -float("inf")), 1)  # [BM]
            tl.store(p_own + o_m, tl.where(b_before < b_logit, b_logit, float("nan")), mask=m_label)
    if p_logits is None:
        b_e = tl.exp2(b_x * scale - reference[:, None])  # [BM, BN]
        b_top, b_sum = tl.max(b_x, 1), tl.sum(b_e, 1)  # [BM] each
    else:
        tl.store(p_logits + o_m, b_logit, mask=m_label)
        b_top, b_e, b_sum = tile_statistics(b_x, scale)
        if d_e is not None:
            b_e = b_e * tl.exp2(b_top * scale - reference)[:, None]  # [BM, BN]
    tl.store(p_maxima + o_s, b_top, mask=o_m < m)
    tl.store(p_sums + o_s, b_sum, mask=o_m < m)
    if d_e is not None:
        store_pieces(b_e, d_e, i_m * BM, i_n * BN, BM, BN, PIECES)


@triton.jit(do_not_specialize=["n", "k"])
def lm_head_exp_kernel(d_x, d_w, d_e, p_maxima, p_sums, p_references, p_overflow, p_labels, p_logits, p_own, p_limit, n,
                       k, scale, DOT: tl.constexpr, EVEN: tl.constexpr, RECOMPUTE: tl.constexpr, TILE: tl.constexpr,
                       PIECES: tl.constexpr):  # fmt: skip
    """Store for each tile of x·weightᵀ the maximum and Σ e^(x - c) of each row, [m, tiles], and e^(x - c) if `d_e` is
    given. The number m is at `p_limit`.

    Args:
        p_labels: labels of the rows, if p_logits or p_own is given; see `exp_epilogue`.
        DOT, TILE: as for `accumulate`.
        EVEN: BN divides n.
        RECOMPUTE: compute only blocks with overflowed rows.
    """
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    start, programs, m = tl.program_id(0), tl.num_programs(0), tl.load(p_limit)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, TILE[2])
    if RECOMPUTE:
        flagged = tl.load(p_overflow)
        if flagged == 0:
            return
        for i_tile in tl.range(start, tiles_m * tiles_n, programs):
            _, i_m, i_n = grouped_tile(i_tile, tiles_m, tiles_n, "one")
            if tl.load(p_overflow + 1 + i_m) != 0:
                b_x = accumulate(d_x, d_w, 0, (), i_m * BM, i_n * BN, 0, steps, OF_X, OF_W, DOT, TILE)  # [BM, BN]
                exp_epilogue(b_x, d_e, p_maxima, p_sums, p_references, p_labels, p_logits, p_own, i_m, i_n, tiles_n, m,
                             n, scale, EVEN, BM, BN, PIECES)  # fmt: skip
    else:
        # The epilogue has its own tile counter. With a shared one, loads of the next tile would wait for this store.
        i_stored = start - programs
        for i_tile in tl.range(start, tiles_m * tiles_n, programs, flatten=True):
            _, i_m, i_n = grouped_tile(i_tile, tiles_m, tiles_n, "one")
            b_x = accumulate(d_x, d_w, 0, (), i_m * BM, i_n * BN, 0, steps, OF_X, OF_W, DOT, TILE)  # [BM, BN]
            i_stored += programs
            _, i_m, i_n = grouped_tile(i_stored, tiles_m, tiles_n, "one")
            exp_epilogue(b_x, d_e, p_maxima, p_sums, p_references, p_labels, p_logits, p_own, i_m, i_n, tiles_n, m, n,
                         scale, EVEN, BM, BN, PIECES)  # fmt: skip


# --- Loss and gradients -----------------------------------------------------------------------------------------------


@triton.jit
def row_statistics(p_maxima, p_sums, i_own, tiles, BLOCK: tl.constexpr):
    """Return over the tiles of a row: the maximum, the sum of tile i_own, and the sum of all other tiles."""
    maxima, sums = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)  # [BLOCK] each
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        maxima = tl.maximum(maxima, tl.load(p_maxima + i, mask=i < tiles, other=-float("inf")))
        sums += tl.load(p_sums + i, mask=(i < tiles) & (i != i_own), other=0)
    return tl.max(maxima, 0), tl.load(p_sums + i_own), tl.sum(sums, 0)


@triton.jit
def store_label_gradient(p_e, others, label, i_own, classes, BN: tl.constexpr):
    """Store minus the sum of a row's other exponentials at the label. `others` is the sum over the other tiles.

    S - 1 would cancel when the label's probability is near 1, also because the GEMM and `row_dot` round the label's
    logit differently. In the label's tile the stored bfloat16 values are added, because they enter the gradients.
    """
    i = i_own * BN + tl.arange(0, BN)  # [BN]
    b_e = converted(tl.load(p_e + i, mask=(i < classes) & (i != label), other=0), tl.float32)  # [BN]
    tl.store(p_e + label, converted(-(others + tl.sum(b_e, 0)), tl.bfloat16))


@triton.jit(do_not_specialize=["first", "tiles", "classes"])
def finish_rows_kernel(p_losses, p_hits, p_own, p_factors, p_references, p_logits, p_numbers, p_row_labels, p_total,
                       p_limit, first, p_overflow, p_maxima, p_sums, p_e, p_g, tiles, classes, se, sg, scale,
                       RECOMPUTE: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Store the loss of a row at its place, and flag the row if it overflowed. In `p_hits`, if given, store whether the
    label is the first class with the largest logit and the loss is not NaN. If `p_e` is given, also store g / S (g is 1
    without `p_g`) and the label's element of E, for the gradients. With RECOMPUTE skip rows of unflagged blocks.

    Args:
        EXACT: the statistics are those of `tile_statistics`.
        TILE: (BM, BN).
    """
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    i_row = tl.program_id(0).to(tl.int64)
    p_flag = p_overflow + 1 + i_row // BM
    is_finished = first + i_row >= tl.load(p_total)
    if RECOMPUTE:
        is_finished = is_finished | (tl.load(p_flag) == 0)
    if is_finished:
        return
    i_place = tl.load(p_numbers + i_row).to(tl.int64)
    label, reference = tl.load(p_row_labels + i_row), tl.load(p_references + i_row)
    i_own = label // BN
    p_maxima, p_sums = p_maxima + i_row * tiles, p_sums + i_row * tiles
    if EXACT:
        maximum, exact_total, others = row_lse(p_maxima, p_sums, i_own, tiles, scale, BLOCK)
        shift = tl.exp2(maximum * scale - reference)
        total, others = exact_total * shift, others * shift
    else:
        maximum, own, others = row_statistics(p_maxima, p_sums, i_own, tiles, BLOCK)
        total = own + others

    # Results of an overflowed row are wrong until the row is recomputed.
    infinite = tl.abs(maximum) == float("inf")  # the plain reference gives NaN
    overflow = (tl.abs(maximum * scale - reference) > LIMIT) & (infinite == 0)
    tl.store(p_references + i_row, maximum * scale, mask=overflow)
    tl.store(p_overflow, 1, mask=overflow)
    tl.store(p_flag, 1, mask=overflow)

    if EXACT:
        loss = -log_prob(tl.load(p_logits + i_row), maximum, exact_total, scale)
    else:  # compute the label's exponent like the epilogue: it is 0 up to rounding unless the row overflowed
        loss = tl.log(total) - (tl.load(p_logits + i_row) * scale - reference) * LN_2
    loss = tl.where(infinite, float("nan"), loss)
    tl.store(p_losses + i_place, loss)
    if p_hits is not None:
        is_hit = (tl.load(p_own + i_row) == maximum) & (first_top(p_maxima, i_own, BLOCK) < maximum)
        tl.store(p_hits + i_place, converted(is_hit & (loss == loss), tl.float32))
    if p_e is not None:
        factor = tl.where(infinite, float("nan"), 1 / total)
        if p_g is not None:
            factor *= converted(tl.load(p_g + i_place * sg), tl.float32)
        tl.store(p_factors + i_row, factor)
        store_label_gradient(p_e + i_row * se, others, label, i_own, classes, BN)


# --- Launching them ---------------------------------------------------------------------------------------------------


def is_supported(x: Array, weight: Array) -> bool:
    """Return whether this file's kernels support x and weight: bfloat16 that TMA can load, on a device with TMA."""
    return x.dtype is bfloat16 and can_limit(weight) and weight.shape[0] < 1 << 24


def tile_of(rows: int) -> GemmTile:
    """Return a tile with two programs per SM, so that the epilogue of one overlaps the GEMM of the other."""
    return GemmTile(64 if rows <= 64 else 128, COLUMNS, 64, 4, 3, ctas_per_sm=2)


class Head:
    """Buffers for a chunk of rows of x, and the launches that fill them.

    Attributes:
        losses, hits: of all rows, `[tokens]` float32; those without a label are not written.
        dense: the chunk's rows of x, `[rows, width]`.
        factors: g / S, `[rows]` float32; g is the weight of a row's gradient.
        references: references in powers of 2, `[rows]` float32.
        logits: logits of the labels, `[rows]` float32.
        overflow: flags for the chunk and for each of its blocks of rows, `[1 + blocks]` int32.
        maxima: maximum logit per tile, `[rows, tiles]` float32.
        sums: sum of exponentials per tile, `[rows, tiles]` float32.
        memory: exponentials `[rows, classes]` in x's type, with padded rows; None without gradients.
    """

    def __init__(
        self, losses: Array, x: Array, weight: Array, chosen: LabelledRows, with_grads: bool, hits: Array | None = None
    ) -> None:
        self.losses, self.x, self.weight, self.chosen, rows, device = losses, x, weight, chosen, chosen.rows, x.device
        self.tile = fitted(tile_of(rows), x.dtype.itemsize, backend_of(device).driver.properties.shared_memory)
        self.tiles = triton.cdiv(weight.shape[0], self.tile.bn)
        self.scale, self.exact = LOG2_E / chosen.settings.temperature, mode.exact
        self.dense = empty((rows, x.shape[1]), x.dtype, device)
        self.factors, self.references, self.logits = (empty((rows,), float32, device) for _ in range(3))
        self.hits, self.own = hits, hits and empty((rows,), float32, device)
        self.overflow = empty((1 + triton.cdiv(rows, self.tile.bm),), int32, device)
        self.maxima, self.sums = (empty((rows, self.tiles), float32, device) for _ in range(2))
        step = -(-weight.shape[0] // GRAIN) * GRAIN
        memory = empty((rows, step), x.dtype, device) if with_grads else None
        self.memory = memory and memory.view((rows, weight.shape[0]), memory.strides)

    def begin(self, chunk: int) -> None:
        """Copy a chunk's rows and compute their references."""
        x, w, width = self.x, self.weight, self.x.shape[1]
        launch(
            references_kernel, self.chosen.rows, self.dense, self.logits, self.references, self.overflow, x,
            *self.chosen.arguments(chunk), w, width, x.strides[0], w.strides[0], self.scale, BM=self.tile.bm,
            WIDTH=min(ROW_WIDTH, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip

    def forward(self, chunk: int) -> None:
        """Compute the losses of a chunk, and with gradients the exponentials, labels' elements, and factors."""
        for recompute in (False, True):
            self._multiply(chunk, recompute)
            self._finish(chunk, recompute)

    def _multiply(self, chunk: int, recompute: bool) -> None:
        x, w, t, memory = self.dense, self.weight, self.tile, self.memory
        _, labels, _, limit, _ = self.chosen.arguments(chunk)
        classes, width = w.shape
        columns = t.bn // epilogue_slices(t, x.dtype.itemsize)
        dot = float32 if is_interpreted() else bfloat16  # the interpreter cannot multiply bfloat16
        programs = backend_of(x.device).persistent_programs(t.ctas_per_sm)
        launch(
            lm_head_exp_kernel, min(programs, triton.cdiv(x.shape[0], t.bm) * self.tiles),
            Descriptor(x, x.shape, x.strides, (t.bm, t.bk)), Descriptor(w, w.shape, w.strides, (t.bn, t.bk)),
            memory and Descriptor(memory, memory.shape, memory.strides, (t.bm, columns)), self.maxima, self.sums,
            self.references, self.overflow, labels if self.exact or self.own else None,
            self.logits if self.exact else None, self.own, limit, classes, width, self.scale,
            DOT=(TRITON[dot.name], "ieee", None), EVEN=classes % t.bn == 0, RECOMPUTE=recompute,
            TILE=(t.bm, t.bn, t.bk), PIECES=t.bn // columns, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip

    def _finish(self, chunk: int, recompute: bool) -> None:
        memory, chosen, g = self.memory, self.chosen, self.chosen.settings.weights
        se, sg = (0 if a is None else a.strides[0] for a in (memory, g))
        launch(
            finish_rows_kernel, chosen.rows, self.losses, self.hits, self.own, self.factors, self.references,
            self.logits, *chosen.arguments(chunk), self.overflow, self.maxima, self.sums, memory, g, self.tiles,
            chosen.settings.classes, se, sg, self.scale, RECOMPUTE=recompute, EXACT=self.exact,
            TILE=(self.tile.bm, self.tile.bn), BLOCK=self._block, num_warps=4,
        )  # fmt: skip

    @property
    def _block(self) -> int:
        """The statistics of a row per load. Triton gives tiles of one size the same layout, and that of elements of E
        would add the statistics in another order than a pass without gradients, so their size is not used.
        """
        block = min(ROW_TILES, triton.next_power_of_2(self.tiles))
        return block * (1 + (block == self.tile.bn))
