"""What stands between backward and the update: the sum of gradients over ranks, their norm, and the factor that clips
them.
"""

from __future__ import annotations

import math

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.dtypes import BOOL, float8_e4m3fn, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import BLOCK, upcast

NORM_ROW = 1 << 12  # elements of which squares are added in their own type; rows are added in float64
NORM_SPAN = 1 << 15  # elements of which a program on a GPU adds the squares


def square_rows(x: np.ndarray) -> np.ndarray:
    """Σ x² of each row of `NORM_ROW` elements and of what is left, in float32 or wider: cut by position alone."""
    flat = np.ascontiguousarray(x).reshape(-1)
    whole = flat.size // NORM_ROW
    matrix, rest = flat[: whole * NORM_ROW].reshape(whole, NORM_ROW), upcast(flat[whole * NORM_ROW :])
    sums = np.empty(whole + bool(rest.size), rest.dtype)

    def some(start: int, stop: int) -> None:
        for a in range(start, stop, BLOCK // NORM_ROW):
            rows = upcast(matrix[a : min(a + BLOCK // NORM_ROW, stop)])
            np.vecdot(rows, rows, out=sums[a : a + rows.shape[0]])

    if whole:
        parallel(some, whole, flat.size // 64)  # so light a pass is worth threads only when it is long
    if rest.size:
        sums[whole] = np.dot(rest, rest)
    return sums


def sum_of_rows(sums: np.ndarray, size: int) -> float:
    """Σ x² of `size` elements from their `square_rows`, added in float64."""
    whole = size // NORM_ROW
    return float(sums[:whole].sum(dtype=np.float64)) + float(sums[whole:].sum())


def square_sum(x: np.ndarray) -> float:
    """Σ x²: rows in float32 or wider, then the rows in float64."""
    return sum_of_rows(square_rows(x), x.size)


def _norm_infer(*arrays: Array, ord: float) -> Spec:
    if not ord > 0:
        raise ShapeError(f"total_norm of order {ord}: the order must be positive")
    for x in arrays:
        if not x.dtype.is_floating_point:
            raise DTypeError(f"total_norm takes float tensors, got {x.dtype}")
    return Spec((), float64 if any(x.dtype is float64 for x in arrays) else float32)


@op("total_norm", _norm_infer, flops=lambda inputs, outputs, attrs: 2 * sum(x.size for x in inputs))
def total_norm(out: np.ndarray, *arrays: np.ndarray, ord: float) -> None:
    """(Σ |x|^ord)^(1/ord) over all elements of all arrays, the largest |x| for an infinite order; 0 for no arrays."""
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
    """What a training step reports, and the factor on its gradients: report = (loss, norm, factor, mark), in place.

    The mark is 0 until a loss or norm is not finite, and NaN from then on. The factor is min(1, max_norm / (norm +
    1e-6)), torch's clip coefficient, or 1 where `max_norm` is None; plus the mark, since an optimizer step with a scale
    of NaN is left out.
    """
    found = np.empty((), np.float32)
    total_norm.reference(found, *arrays, ord=2.0)
    _report(report, loss.astype(np.float32), np.float32(found), max_norm)


def _report(report: np.ndarray, loss: np.ndarray, norm: np.float32, max_norm: float | None) -> None:
    with np.errstate(all="ignore"):
        mark = report[3] + (loss + norm) * np.float32(0)
        limit = 1.0 if max_norm is None else np.minimum(1.0, max_norm / (float(norm) + 1e-6))
        report[...] = (loss, norm, np.float32(limit) + mark, mark)


# --- The same in two parts, between which ranks add up what each of them has ------------------------------------------


def _spans_infer(x: Array, *, of: int) -> Spec:
    _norm_infer(x, ord=2.0)
    if x.ndim != 1 or x.size > of:
        raise ShapeError(f"square_spans takes a part of {of} elements in one dimension, got {x.shape}")
    return Spec((-(-x.size // NORM_SPAN),), float64)


@op("square_spans", _spans_infer, flops=lambda inputs, outputs, attrs: 2 * inputs[0].size)
def square_spans(out: np.ndarray, x: np.ndarray, *, of: int) -> None:
    """Σ x² of each `NORM_SPAN` elements and of what is left: partial sums of the norm of `of` elements, of which x is a
    part that begins at a multiple of `NORM_SPAN`.
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
    """`clip_factor` where the loss is the sum of the first `losses` figures, in float32 and in their order, and the
    others are sums of squares of all gradients.
    """
    loss = figures[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for each in figures[1:losses].astype(np.float32):
            loss = loss + each
    _report(report, loss, np.float32(math.sqrt(figures[losses:].sum())), max_norm)


# --- The sum over the ranks of a group --------------------------------------------------------------------------------


def _rank_sum_infer(total: Array, own: Array, others: Array, *, rank: int, adds: bool) -> tuple[()]:
    if own.ndim != 1 or total.shape != own.shape or others.ndim != 2 or others.shape[1:] != own.shape:
        shapes = f"{total.shape}, {own.shape} and {others.shape}"
        raise ShapeError(f"rank_sum takes a total [n], own values [n] and others' [ranks - 1, n], got {shapes}")
    if not (total.is_contiguous and own.is_contiguous and (own.size == 0 or others.strides[1] == 1)):
        raise ShapeError("rank_sum takes values that are contiguous", next="call .contiguous() on them")
    if not 0 <= rank <= others.shape[0]:
        raise ShapeError(f"rank_sum: there is no rank {rank} among {others.shape[0] + 1}")
    if own.dtype.category == BOOL or own.dtype is float8_e4m3fn or others.dtype is not own.dtype:
        raise DTypeError(f"rank_sum takes values of one dtype that can be added, got {own.dtype} and {others.dtype}")
    is_wider = total.dtype is float32 and own.dtype.is_floating_point and own.dtype.itemsize < 4
    if total.dtype is not own.dtype and not is_wider:
        raise DTypeError(f"rank_sum: a sum of {own.dtype} does not go to {total.dtype}")
    return ()


@op("rank_sum", _rank_sum_infer, mutates=(0,), flops=lambda inputs, outputs, attrs: inputs[1].size + inputs[2].size)
def rank_sum(out: tuple[()], total: np.ndarray, own: np.ndarray, others: np.ndarray, *, rank: int, adds: bool) -> None:
    """Set `total` [n] to Σ of all ranks' values: in float32 or wider, in the order of the ranks, rounded once.

    Args:
        total: of the values' dtype, or float32 where that is a narrower float; it may be the memory of `own`.
        own: this rank's values [n].
        others: those of the other ranks in their order, [ranks - 1, n]; the rows are contiguous.
        rank: which of them this is.
        adds: start from what is in `total`.
    """
    is_narrow = own.itemsize == 2 and not np.issubdtype(own.dtype, np.integer)
    work = np.dtype(np.float32) if is_narrow else own.dtype
    rows = [*others[:rank], own, *others[rank:]]
    if adds:
        rows.insert(0, total)
    with np.errstate(over="ignore", invalid="ignore"):
        found = rows[0].astype(work)
        for row in rows[1:]:
            found += row.astype(work, copy=False)
        total[...] = found.astype(total.dtype, copy=False)
