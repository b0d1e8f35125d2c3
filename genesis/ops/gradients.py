"""The norm of many gradients at once, and the factor that clips them: what stands between backward and the update."""

from __future__ import annotations

import math

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import parallel
from genesis.dtypes import float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Spec, op
from genesis.ops.blocks import BLOCK, upcast

__all__ = ["NORM_ROW", "clip_factor", "square_rows", "square_sum", "sum_of_rows", "total_norm"]

NORM_ROW = 1 << 12  # elements of which squares are added in their own type; rows are added in float64


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


def _factor_infer(report: Array, loss: Array, *arrays: Array, max_norm: float | None) -> tuple[Spec, ...]:
    _norm_infer(*arrays, ord=2.0)
    if report.shape != (4,) or report.dtype is not float32:
        raise ShapeError(f"clip_factor takes a float32 report of 4 numbers, got {report.dtype} {report.shape}")
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
    norm = np.float32(found)
    with np.errstate(all="ignore"):
        mark = report[3] + (loss.astype(np.float32) + norm) * np.float32(0)
        limit = 1.0 if max_norm is None else np.minimum(1.0, max_norm / (float(norm) + 1e-6))
        report[...] = (loss, norm, np.float32(limit) + mark, mark)
