"""The rows of hidden states that have a label, in chunks: the head computes no others.

Prompts and padding have no labels. One program lists the other rows in ascending order and counts those of each chunk.
The host never reads the counts: it launches every chunk with the same sizes, and kernels read from the device how many
rows there are. GEMMs do, too (`linalg.Limit`). Rows are copied to dense memory, which TMA can load, and their gradients
are copied back. GEMMs read whole tiles, so zeros follow the rows of a chunk up to a multiple of PAD.

Arguments of several kernels:

    p_numbers     numbers of a chunk's rows
    p_row_labels  their labels
    p_total       number of rows with a label
    p_limit       rows of the chunk that GEMMs compute; None if they compute all, and zeros follow up to the last
    first         number of rows in earlier chunks
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of, faults
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import is_describable
from genesis.dtypes import int32
from genesis.kernels.elements import converted, row_slice
from genesis.kernels.gemm.linalg import Limit
from genesis.kernels.index.segment import report_fault

# Bytes of logits per chunk: 2816 tokens × 152k classes in 2 bytes. With less memory dW is accumulated more often.
WORKSPACE = 832 << 20
MANY = 16384  # tokens above which the workspace grows with their number, like other activations
MIN_ROWS = 256  # the fewest rows per chunk; with fewer, accumulating dW would cost more than the GEMM
PAD = tl.constexpr(128)
LINE = tl.constexpr(4)  # counts are 16 bytes apart, so that one kernel works for all chunks
LIST_BLOCK, ROW_WIDTH = 4096, 1024  # labels, and elements of a row, per load


@triton.jit(do_not_specialize=["n", "rows", "chunks", "length", "shift", "step_row", "step", "ignore", "classes",
                               "site"])  # fmt: skip
def list_rows_kernel(p_numbers, p_row_labels, p_counts, p_labels, p_fault, n, rows, chunks, length, shift, step_row,
                     step, ignore, classes, site, BLOCK: tl.constexpr):  # fmt: skip
    """Store numbers and labels of the rows with a label, their number, and the limit of each chunk of `rows`. The first
    limit is at least 1, so that a GEMM always stores a sum.

    Row b·length + t has the label labels[b, t + shift]. A label out of range is reported as a fault and ignored.
    """
    total = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        i = (start + tl.arange(0, BLOCK)).to(tl.int64)  # [BLOCK]
        at = i % length + shift
        m_i = (i < n) & (at < length)
        label = tl.load(p_labels + i // length * step_row + at * step, mask=m_i, other=0).to(tl.int64)  # [BLOCK]
        m_i = m_i & (label != ignore)
        inside = (label >= 0) & (label < classes)
        report_fault(p_fault, site, label, m_i & (inside == 0))
        m_i = m_i & inside
        place = total + tl.cumsum(m_i.to(tl.int32), 0) - 1  # [BLOCK]
        tl.store(p_numbers + place, i.to(tl.int32), mask=m_i)
        tl.store(p_row_labels + place, label.to(tl.int32), mask=m_i)
        total += tl.sum(m_i.to(tl.int32), 0)
    tl.store(p_counts, total)
    tl.store(p_counts + LINE, tl.minimum(tl.maximum(total, 1), rows))
    for i_chunk in range(1, chunks):
        limit = tl.minimum(tl.maximum(total - i_chunk * rows, 0), rows)
        tl.store(p_counts + (1 + i_chunk) * LINE, limit)


@triton.jit
def copy_row(p_y, p_x, factor, read, width, BLOCK: tl.constexpr):
    """Store `read` elements of a row, times a factor if given, then zeros. A factor of 0 gives zeros, also for NaN."""
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(p_x + i, mask=i < read, other=0)  # [BLOCK]
        if factor is not None:
            x = converted(tl.where(factor == 0, 0.0, converted(x, tl.float32) * factor), p_y.dtype.element_ty)
        tl.store(p_y + i, x, mask=i < width)


@triton.jit
def first_top(p_x, count, BLOCK: tl.constexpr):
    """Return the maximum of the first `count` elements of a row, -∞ of none."""
    top = tl.full((), -float("inf"), p_x.dtype.element_ty)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        top = tl.maximum(top, tl.max(tl.load(p_x + i, mask=i < count, other=-float("inf")), 0))
    return top


@triton.jit
def begins_padding(i_row, p_limit):
    """Return whether row i_row of a chunk and all that follow are not read."""
    return i_row >= (tl.num_programs(0) if p_limit is None else tl.cdiv(tl.load(p_limit), PAD) * PAD)


@triton.jit(do_not_specialize=["first"])
def copy_rows_kernel(p_y, p_x, p_numbers, p_row_labels, p_total, p_limit, first, p_factors, width, sx, sy,
                     SCATTER: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy rows of x to a chunk and store zeros behind them, or with SCATTER, copy a chunk to rows of y."""
    i_row = tl.program_id(0).to(tl.int64)
    is_there = first + i_row < tl.load(p_total)
    if SCATTER:
        if is_there:
            copy_row(p_y + tl.load(p_numbers + i_row).to(tl.int64) * sy, p_x + i_row * sx, None, width, width, BLOCK)
    elif begins_padding(i_row, p_limit) == 0:
        i_x = tl.load(p_numbers + i_row, mask=is_there, other=0).to(tl.int64)
        factor = None if p_factors is None else tl.load(p_factors + i_row, mask=is_there, other=0)
        copy_row(p_y + i_row * sy, p_x + i_x * sx, factor, tl.where(is_there, width, 0), width, BLOCK)


# --- Launching them ---------------------------------------------------------------------------------------------------


class Labels(NamedTuple):
    """Labels in the form that kernels expect, and the settings of the loss."""

    array: Array  # `[N]` or `[B, T]`
    shift: int  # row t of T has the label t + shift
    ignore: int  # the label of rows to ignore
    classes: int  # number of classes
    op: str = "linear_cross_entropy"
    temperature: float = 1.0  # by which the logits are divided
    weights: Array | None = None  # `[N]` factors of the rows' gradients

    @property
    def site(self) -> int:
        """The number of the op and its labels in reports of faults."""
        return faults.site(self.op, 1 if self.weights is None else 3, self.classes)

    @property
    def values(self) -> tuple[int, ...]:
        """The kernel arguments length, shift, step_row, step, ignore and classes."""
        step_row = self.array.strides[0] if self.array.ndim == 2 else 0
        return (
            max(self.array.shape[-1], 1), self.shift, step_row, self.array.strides[-1], self.ignore, self.classes
        )  # fmt: skip


def chunk_rows(tokens: int, row: int, workspace: int) -> int:
    """Return the tokens per chunk, for `row` bytes per token and a workspace that grows above `MANY` tokens."""
    room = workspace * max(tokens, MANY) // MANY
    most = max(MIN_ROWS, room // max(row, 1) // MIN_ROWS * MIN_ROWS)
    even = -(-tokens // -(-tokens // most)) if tokens else 0
    return min(tokens, -(-even // 128) * 128)


def can_limit(weight: Array) -> bool:
    """Return whether GEMMs of dense rows with this weight take a `Limit`."""
    is_aligned = weight.dtype.itemsize == 2 and weight.shape[1] % 8 == 0
    has_tma = backend_of(weight.device).driver.properties.capability >= (9, 0)
    return is_aligned and has_tma and is_describable(weight, weight.shape, weight.strides)


class LabelledRows:
    """The rows with a label, in chunks of up to `rows`.

    Args:
        is_limited: whether GEMMs compute only rows with a label; see `can_limit`.

    Attributes:
        settings: the labels as given.
        numbers: numbers of these rows, `[tokens]` int32; the rest is undefined.
        labels: their labels, `[tokens]` int32.
        total: their number, `[1, 4]` int32.
    """

    def __init__(self, labels: Labels, tokens: int, rows: int, *, is_limited: bool) -> None:
        self.settings, self.rows, self.is_limited, device = labels, rows, is_limited, labels.array.device
        self.chunks = triton.cdiv(tokens, max(rows, 1))
        self.numbers, self.labels = (empty((tokens,), int32, device) for _ in range(2))
        self._counts = empty((1 + max(self.chunks, 1), LINE.value), int32, device)
        self.total = row_slice(self._counts, 0, 1)
        block = min(LIST_BLOCK, max(16, triton.next_power_of_2(tokens)))
        launch(
            list_rows_kernel, 1, self.numbers, self.labels, self._counts, labels.array, faults.flag(device), tokens,
            rows, self.chunks, *labels.values, labels.site, BLOCK=block, num_warps=max(1, block // 512),
        )  # fmt: skip

    def arguments(self, chunk: int) -> tuple[Array | int | None, ...]:
        """Return the kernel arguments numbers, labels, total, limit and first of a chunk."""
        first, count = chunk * self.rows, min(self.rows, self.numbers.shape[0] - chunk * self.rows)
        parts = (row_slice(each, first, count) for each in (self.numbers, self.labels))
        return *parts, self.total, row_slice(self._counts, 1 + chunk, 1) if self.is_limited else None, first

    def limit(self, size: str, chunk: int) -> Limit | None:
        """Return the limit of a size of a chunk's GEMM."""
        return Limit(size, row_slice(self._counts, 1 + chunk, 1)) if self.is_limited else None

    def gather(self, y: Array, x: Array, chunk: int, factors: Array | None = None) -> None:
        """Store a chunk's rows of x in `y` `[rows, width]`, times `factors` `[rows]`, and zeros behind them."""
        self._copy(y, x, chunk, factors, SCATTER=False)

    def scatter(self, y: Array, x: Array, chunk: int) -> None:
        """Store the rows of a chunk's `x` at their places in `y`."""
        self._copy(y, x, chunk, None, SCATTER=True)

    def _copy(self, y: Array, x: Array, chunk: int, factors: Array | None, *, SCATTER: bool) -> None:
        width = x.shape[1]
        launch(
            copy_rows_kernel, self.rows, y, x, *self.arguments(chunk), factors, width, x.strides[0], y.strides[0],
            SCATTER=SCATTER, BLOCK=min(ROW_WIDTH, triton.next_power_of_2(width)), num_warps=1 if width <= 512 else 4,
        )  # fmt: skip
