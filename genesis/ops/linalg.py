"""Matmuls. 2-byte floats multiply in float32 and are rounded once at the store; integers wrap around.

Gradients multiply transposed views, which BLAS reads without a copy. In the formulas, g is the gradient of the result.
The matmuls of linear layers are in linear.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import is_split, one_blas_thread, parallel, scratch
from genesis.dtypes import DType, bool_, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Context, Grads, op
from genesis.ops.blocks import as_type, is_narrow
from genesis.ops.elementwise import add
from genesis.ops.reduce import sum_to_shape
from genesis.ops.shape import reshaped
from genesis.shapes import broadcast_shapes, numel

# Columns per unit of work. BLAS sums a column by its position in a small block, so threads split at multiples of it.
COLUMNS = 64


# --- How numpy multiplies ---------------------------------------------------------------------------------------------


def _for_blas(x: np.ndarray) -> np.ndarray:
    """Return x, copied if its matrices have no unit stride, because numpy multiplies those without BLAS."""
    if x.ndim < 2 or x.size == 0:
        return x
    (rows, columns), (down, right), item = x.shape[-2:], x.strides[-2:], x.itemsize
    by_row = (right == item or columns == 1) and (down >= columns * item or rows == 1) and down % item == 0
    by_column = (down == item or rows == 1) and (right >= rows * item or columns == 1) and right % item == 0
    return x if by_row or by_column else np.ascontiguousarray(x)


def is_wide_enough(fp8: int, columns: int) -> bool:
    """Whether an op's attribute `fp8` selects 8-bit floats for a matmul whose result has this many columns."""
    return 0 < fp8 <= columns


def multiply(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Set out = x @ y, in float32 for 2-byte floats; a batch times one matrix is one matmul `[B·T, in] x [in, out]`."""
    if is_narrow(out.dtype):
        with scratch(out.shape, np.float32) as wide:
            multiply(as_type(x, wide.dtype), as_type(y, wide.dtype), wide)
            np.copyto(out, wide, casting="unsafe")
        return
    if x.ndim > 2 and y.ndim == 2 and x.size and out.size and out.flags.c_contiguous:
        x = x.reshape(-1, x.shape[-1])
        out = out.reshape(-1, out.shape[-1])
    x, y = _for_blas(x), _for_blas(y)
    if x.ndim == y.ndim == 2 and x.shape[0] == 1 and is_split(y.size):
        _multiply_row(x, y, out)
    else:
        np.matmul(x, y, out=out)


def _multiply_row(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Multiply one row by a large matrix, as in generation: our threads split the columns faster than BLAS's do."""

    def piece(start: int, stop: int) -> None:
        mine = slice(start * COLUMNS, stop * COLUMNS)
        np.matmul(x, y[:, mine], out=out[:, mine])

    with one_blas_thread():
        parallel(piece, -(-y.shape[1] // COLUMNS), y.size)


def same_type(name: str, *arrays: Array) -> None:
    """Raise DTypeError unless all arrays have the same dtype, and it is not bool."""
    first = arrays[0].dtype
    if any(a.dtype is not first for a in arrays):
        listed = " and ".join(a.dtype.name for a in arrays)
        raise DTypeError(f"{name} takes one dtype, got {listed}", next="cast with .to(dtype)")
    if first is bool_:
        raise DTypeError(f"{name} does not take bool tensors", next="cast to an integer or float type with .to(...)")


def transposed(x: Array) -> Array:
    """Return a view with the last two dimensions swapped."""
    (rows, columns), (down, right) = x.shape[-2:], x.strides[-2:]
    return x.view((*x.shape[:-2], columns, rows), (*x.strides[:-2], right, down))


# --- matmul -----------------------------------------------------------------------------------------------------------


def matmul_spec(x: Array, y: Array) -> Spec:
    """Return the spec of `matmul`'s result."""
    if not x.shape or not y.shape:
        raise ShapeError(f"matmul: shapes {x.shape} and {y.shape}: both need at least 1 dimension", next="use mul")
    inner = y.shape[-2] if y.ndim > 1 else y.shape[0]
    if x.shape[-1] != inner:
        raise ShapeError(f"matmul: shapes {x.shape} and {y.shape}: the inner sizes {x.shape[-1]} and {inner} differ")
    same_type("matmul", x, y)
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return Spec((*batch, *x.shape[-2:-1], *(y.shape[-1:] if y.ndim > 1 else ())), x.dtype)


def matmul_flops(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    """Return 2·n·k·m: a multiplication and an addition for each term."""
    return 2 * outputs[0].size * int(inputs[0].shape[-1])


def _matmul_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·yᵀ, dy = xᵀ·g, summed over the batch dimensions that were repeated."""
    x, y = ctx.inputs
    dx = dy = None
    rows = x if x.ndim > 1 else reshaped(x, (1, *x.shape))
    columns = y if y.ndim > 1 else reshaped(y, (*y.shape, 1))
    if x.ndim == 1:
        g = reshaped(g, (*g.shape[: g.ndim - (y.ndim > 1)], 1, *g.shape[g.ndim - (y.ndim > 1) :]))
    if y.ndim == 1:
        g = reshaped(g, (*g.shape, 1))
    if ctx.needs[0]:
        dx = _reduced(matmul(g, transposed(columns)), x)
    if ctx.needs[1]:
        if columns.ndim == 2 and rows.ndim > 2:  # one matmul over all rows of the batch
            rows = reshaped(rows, (numel(rows.shape[:-1]), rows.shape[-1]))
            g = reshaped(g, (rows.shape[0], g.shape[-1]))
        dy = _reduced(matmul(transposed(rows), g), y)
    return dx, dy


def _reduced(grad: Array, x: Array) -> Array:
    """Return the gradient of matrices `[..., n, m]` in x's shape, summed over repeated batch dimensions."""
    shape = (*x.shape[:-2], *grad.shape[-2:])
    return reshaped(sum_to_shape(grad, shape=shape) if grad.shape != shape else grad, x.shape)


@op(
    "matmul",
    matmul_spec,
    vjp=_matmul_vjp,
    saves=(0, 1),
    flops=matmul_flops,
    autocast="low_precision",
    torch="torch.matmul",
)
def matmul(out: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """y = x @ y: `[..., n, k]` with `[..., k, m]`; batch dimensions broadcast.

    A vector counts as a row on the left and as a column on the right; that dimension is dropped from the result.
    """
    multiply(x, y, out)


# --- Matmuls of two dtypes --------------------------------------------------------------------------------------------


def _mixed_infer(x: Array, y: Array, *, dtype: DType, alpha: float = 1.0) -> Spec:
    if x.ndim < 2 or x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-2]:
        raise ShapeError(f"mixed_matmul takes matrices [..., n, k] and [..., k, m], got {x.shape} and {y.shape}")
    types = {x.dtype, y.dtype, dtype}
    if not all(t.is_floating_point for t in types) or (float64 in types and len(types) > 1):
        raise DTypeError(f"mixed_matmul takes floats, float64 only with float64, got {x.dtype}, {y.dtype} to {dtype}")
    if x.dtype is not y.dtype and float32 not in (x.dtype, y.dtype):
        raise DTypeError(f"mixed_matmul: one of {x.dtype} and {y.dtype} must be float32")
    return Spec((*x.shape[:-1], y.shape[-1]), dtype)


def _mixed_vjp(ctx: Context, g: Array) -> Grads:
    """dx = α·g·yᵀ in x's dtype, dy = α·xᵀ·g in y's."""
    (x, y), alpha = ctx.inputs, ctx.attrs.get("alpha", 1.0)
    dx = mixed_matmul(g, transposed(y), dtype=x.dtype, alpha=alpha) if ctx.needs[0] else None
    dy = mixed_matmul(transposed(x), g, dtype=y.dtype, alpha=alpha) if ctx.needs[1] else None
    return dx, dy


@op("mixed_matmul", _mixed_infer, vjp=_mixed_vjp, saves=(0, 1), flops=matmul_flops)
def mixed_matmul(out: np.ndarray, x: np.ndarray, y: np.ndarray, dtype: DType, alpha: float = 1.0) -> None:
    """α·x @ y for `[..., n, k]` and `[..., k, m]` with equal batches, summed in float32, rounded once to `dtype`.

    One operand may be float32 and the other a 2-byte float. A GPU rounds the float32 operand to the 2-byte dtype first,
    because its matrix units take no wider operands; the CPU does not. A float32 result avoids rounding before a later
    sum or exponential.
    """
    work = np.dtype(np.float32) if x.itemsize < 8 else x.dtype
    with scratch(out.shape if out.dtype != work else (0,), work) as workspace:
        result = out if out.dtype == work else workspace
        multiply(as_type(x, work), as_type(y, work), result)
        result *= work.type(alpha)
        if result is not out:
            np.copyto(out, result, casting="unsafe")


# --- Matmuls with an addend -------------------------------------------------------------------------------------------


def plus_spec(name: str, x: Array, y: Array, addend: Array) -> Spec:
    """Return the spec of a matmul with an addend."""
    spec = matmul_spec(x, y)
    if addend.shape != spec.shape:
        raise ShapeError(f"{name}: the product of {x.shape} and {y.shape} has shape {spec.shape}, not {addend.shape}")
    same_type(name, x, addend)
    return spec


@op(
    "matmul_add",
    lambda x, y, addend: plus_spec("matmul_add", x, y, addend),
    flops=matmul_flops,
    plain=lambda x, y, addend: add(matmul(x, y), addend),
)
def matmul_add(out: np.ndarray, x: np.ndarray, y: np.ndarray, addend: np.ndarray) -> None:
    """x @ y + addend, rounded once. No gradient: backward passes use it to accumulate gradients."""
    if is_narrow(out.dtype):
        with scratch(out.shape, np.float32) as wide:
            multiply(as_type(x, wide.dtype), as_type(y, wide.dtype), wide)
            np.add(wide, addend, out=wide)
            np.copyto(out, wide, casting="unsafe")
        return
    multiply(x, y, out)
    np.add(out, addend, out=out)


def _add_infer(target: Array, x: Array, y: Array) -> tuple[Spec, ...]:
    plus_spec("add_matmul", x, y, target)
    return ()


@op(
    "add_matmul",
    _add_infer,
    mutates=(0,),
    flops=lambda i, o, a: 2 * i[1].size * int(i[2].shape[-1] if i[2].ndim > 1 else 1),
)
def add_matmul(out: tuple[()], target: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """target += x @ y, rounded once."""
    with scratch(target.shape, np.float32 if is_narrow(target.dtype) else target.dtype) as product:
        multiply(as_type(x, product.dtype), as_type(y, product.dtype), product)
        np.add(target, product, out=target, casting="unsafe")
