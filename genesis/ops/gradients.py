"""Ops between backward and the optimizer step: the sum of gradients over ranks, their norm, and the clip factor."""

from __future__ import annotations

import math

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.dtypes import BOOL, float8_e4m3fn, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import BLOCK, upcast

NORM_ROW = 1 << 12  # elements whose squares are added in their own dtype; rows are added in float64
NORM_SPAN = 1 << 15  # elements whose squares one GPU program adds


def square_rows(x: np.ndarray) -> np.ndarray:
    """Return Σ x² of each row of `NORM_ROW` elements, and of the remainder, in float32 or wider."""
    flat = np.ascontiguousarray(x).reshape(-1)
    full_rows = flat.size // NORM_ROW
    matrix, tail = flat[: full_rows * NORM_ROW].reshape(full_rows, NORM_ROW), upcast(flat[full_rows * NORM_ROW :])
    sums = np.empty(full_rows + bool(tail.size), tail.dtype)

    def sum_squares(start: int, stop: int) -> None:
        for a in range(start, stop, BLOCK // NORM_ROW):
            rows = upcast(matrix[a : min(a + BLOCK // NORM_ROW, stop)])
            np.vecdot(rows, rows, out=sums[a : a + rows.shape[0]])

    if full_rows:
        parallel(sum_squares, full_rows, flat.size // 64)  # the pass is light: threads pay off only if it is long
    if tail.size:
        sums[full_rows] = np.dot(tail, tail)
    return sums


def sum_of_rows(sums: np.ndarray, size: int) -> float:
    """Return Σ x² of `size` elements from their `square_rows`, added in float64."""
    full_rows = size // NORM_ROW
    return float(sums[:full_rows].sum(dtype=np.float64)) + float(sums[full_rows:].sum())


def square_sum(x: np.ndarray) -> float:
    """Return Σ x²: each row in float32 or wider, the sum of the rows in float64."""
    return sum_of_rows(square_rows(x), x.size)


def _norm_infer(*arrays: Array, ord: float) -> Spec:
    if not ord > 0:
        raise ShapeError(f"total_norm: order {ord} is not positive")
    for x in arrays:
        if not x.dtype.is_floating_point:
            raise DTypeError(f"total_norm takes float tensors, got {x.dtype}")
    return Spec((), float64 if any(x.dtype is float64 for x in arrays) else float32)


@op("total_norm", _norm_infer, flops=lambda inputs, outputs, attrs: 2 * sum(x.size for x in inputs))
def total_norm(out: np.ndarray, *arrays: np.ndarray, ord: float) -> None:
    """(Σ |x|^ord)^(1/ord) over all elements of all arrays; the largest |x| if ord is infinite; 0 without arrays."""
    arrays = tuple(x for x in arrays if x.size)
    if ord == 2:
        out[...] = math.sqrt(sum(square_sum(x) for x in arrays))
    elif ord == math.inf:
        out[...] = np.max([np.abs(upcast(x)).max() for x in arrays], initial=0)
    else:
        sums = [np.power(np.abs(upcast(x)), ord).sum(dtype=np.float64) for x in arrays]
        out[...] = np.sum(sums, dtype=np.float64) ** (1 / ord)


def _check_report(report: Array) -> None:
    if report.shape != (4,) or report.dtype is not float32:
        raise ShapeError(f"clip_factor takes a float32 report of 4 numbers, got {report.dtype} {report.shape}")


def _factor_infer(report: Array, loss: Array, *arrays: Array, max_norm: float | None) -> tuple[Spec, ...]:
    _norm_infer(*arrays, ord=2.0)
    _check_report(report)
    if loss.shape != () or not loss.dtype.is_floating_point:
        raise ShapeError(f"clip_factor takes a float loss of one number, got {loss.dtype} {loss.shape}")
    return ()


@op(
    "clip_factor", _factor_infer, mutates=(0,), flops=lambda inputs, outputs, attrs: 2 * sum(x.size for x in inputs[2:])
)
def clip_factor(
    out: tuple[()], report: np.ndarray, loss: np.ndarray, *arrays: np.ndarray, max_norm: float | None
) -> None:
    """Compute a training step's report (loss, norm, factor, mark) in place; the factor scales the step's gradients.

    The mark is 0 until a loss or norm is not finite, and NaN from then on. The factor is min(1, max_norm / (norm +
    1e-6)), torch's clip coefficient, or 1 if `max_norm` is None; the mark is added to it, because an optimizer step
    with a scale of NaN is skipped.
    """
    norm = np.empty((), np.float32)
    total_norm.reference(norm, *arrays, ord=2.0)
    _report(report, loss.astype(np.float32), np.float32(norm), max_norm)


def _report(report: np.ndarray, loss: np.ndarray, norm: np.float32, max_norm: float | None) -> None:
    with np.errstate(all="ignore"):
        mark = report[3] + (loss + norm) * np.float32(0)
        limit = 1.0 if max_norm is None else np.minimum(1.0, max_norm / (float(norm) + 1e-6))
        report[...] = (loss, norm, np.float32(limit) + mark, mark)


# --- The same in two parts, between which the ranks add their partial sums --------------------------------------------


def _spans_infer(x: Array, *, of: int) -> Spec:
    _norm_infer(x, ord=2.0)
    if x.ndim != 1 or x.size > of:
        raise ShapeError(f"square_spans takes a part of {of} elements in one dimension, got {x.shape}")
    return Spec((-(-x.size // NORM_SPAN),), float64)


@op("square_spans", _spans_infer, flops=lambda inputs, outputs, attrs: 2 * inputs[0].size)
def square_spans(out: np.ndarray, x: np.ndarray, *, of: int) -> None:
    """Σ x² of each `NORM_SPAN` elements and of the remainder: partial sums of the norm of `of` elements.

    x is a part of those elements that begins at a multiple of `NORM_SPAN`.
    """
    for number in range(out.size):
        out[number] = square_sum(x[number * NORM_SPAN : (number + 1) * NORM_SPAN])


def _ranks_infer(report: Array, figures: Array, *, losses: int, max_norm: float | None) -> tuple[Spec, ...]:
    _check_report(report)
    if figures.ndim != 1 or figures.dtype is not float64 or not 0 < losses <= figures.size:
        what = f"{losses} losses and sums of squares in float64, got {figures.dtype} {figures.shape}"
        raise ShapeError(f"clip_factor_of_ranks takes {what}")
    return ()


@op("clip_factor_of_ranks", _ranks_infer, mutates=(0,), flops=lambda inputs, outputs, attrs: inputs[1].size)
def clip_factor_of_ranks(
    out: tuple[()], report: np.ndarray, figures: np.ndarray, *, losses: int, max_norm: float | None
) -> None:
    """`clip_factor` from summed figures of all ranks.

    The loss is the sum of the first `losses` figures, added in float32 and in their order. The other figures are sums
    of squares of all gradients.
    """
    loss = figures[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for rank_loss in figures[1:losses].astype(np.float32):
            loss = loss + rank_loss
    _report(report, loss, np.float32(math.sqrt(figures[losses:].sum())), max_norm)


# --- The sum over the ranks of a group --------------------------------------------------------------------------------


def _rank_sum_infer(total: Array, own: Array, others: Array, *, rank: int, adds: bool) -> tuple[()]:
    if own.ndim != 1 or total.shape != own.shape or others.ndim != 2 or others.shape[1:] != own.shape:
        shapes = f"{total.shape}, {own.shape} and {others.shape}"
        raise ShapeError(f"rank_sum takes a total [n], own values [n] and others' [ranks - 1, n], got {shapes}")
    if not (total.is_contiguous and own.is_contiguous and (own.size == 0 or others.strides[1] == 1)):
        raise ShapeError("rank_sum takes contiguous values", next="call .contiguous() on them")
    if not 0 <= rank <= others.shape[0]:
        raise ShapeError(f"rank_sum: rank {rank} does not exist among {others.shape[0] + 1} ranks")
    if own.dtype.category == BOOL or own.dtype is float8_e4m3fn or others.dtype is not own.dtype:
        raise DTypeError(f"rank_sum takes values of one dtype that can be added, got {own.dtype} and {others.dtype}")
    is_wider = total.dtype is float32 and own.dtype.is_floating_point and own.dtype.itemsize < 4
    if total.dtype is not own.dtype and not is_wider:
        raise DTypeError(f"rank_sum: a sum of {own.dtype} cannot be stored in {total.dtype}")
    return ()


@op("rank_sum", _rank_sum_infer, mutates=(0,), flops=lambda inputs, outputs, attrs: inputs[1].size + inputs[2].size)
def rank_sum(out: tuple[()], total: np.ndarray, own: np.ndarray, others: np.ndarray, *, rank: int, adds: bool) -> None:
    """Set `total` [n] to the sum of all ranks' values, added in float32 or wider in rank order, and rounded once.

    Args:
        total: in the values' dtype, or in float32 for narrower floats; may share the memory of `own`.
        own: this rank's values [n].
        others: values of the other ranks in rank order, [ranks - 1, n]; rows are contiguous.
        rank: this rank's number.
        adds: also add the values that `total` holds.
    """
    is_narrow = own.itemsize == 2 and not np.issubdtype(own.dtype, np.integer)
    work = np.dtype(np.float32) if is_narrow else own.dtype
    rows = [*others[:rank], own, *others[rank:]]
    if adds:
        rows.insert(0, total)
    with np.errstate(over="ignore", invalid="ignore"):
        result = rows[0].astype(work)
        for row in rows[1:]:
            result += row.astype(work, copy=False)
        total[...] = result.astype(total.dtype, copy=False)
