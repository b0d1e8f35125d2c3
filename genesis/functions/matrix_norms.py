"""Norms and products of matrices of `genesis.linalg`, with torch's names and semantics."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from genesis.dtypes import bfloat16, float16, float64, int64
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import elementwise, reduce
from genesis.functions import factorizations as lapack
from genesis.functions.create import eye, full
from genesis.functions.linalg import matmul as matmul_of
from genesis.functions.matrices import inv_ex, lapack_inverse, linalg, matrix_function, svdvals
from genesis.functions.shape import diagonal as diagonal_of
from genesis.functions.shape import movedim, stack
from genesis.functions.surface import Dims, DTypeLike, Tensor, array_of
from genesis.shapes import normalize_axis

# --- Products ---------------------------------------------------------------------------------------------------------

linalg["matmul"] = matmul_of


@matrix_function()
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Return the dot products of vectors along `dim`; shapes broadcast."""
    array_of(x, "linalg.vecdot"), array_of(y, "linalg.vecdot")
    x, y = (movedim(t, dim, -1) for t in (x, y))
    return (x.unsqueeze(-2) @ y.unsqueeze(-1)).squeeze(-1).squeeze(-1)


@matrix_function()
def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """Return the product of two or more matrices, in the cheapest order; the first and last may be vectors."""
    if len(tensors) < 2:
        raise UsageError(f"linalg.multi_dot needs at least two tensors, got {len(tensors)}")
    parts = list(tensors)
    is_row, is_column = parts[0].ndim == 1, parts[-1].ndim == 1
    parts[0] = parts[0].unsqueeze(0) if is_row else parts[0]
    parts[-1] = parts[-1].unsqueeze(1) if is_column else parts[-1]
    for part in parts:
        if part.ndim != 2:
            raise ShapeError(f"linalg.multi_dot takes matrices between the first and the last, got {tuple(part.shape)}")
    sizes = [parts[0].shape[0], *(p.shape[1] for p in parts)]

    @functools.cache
    def cost(i: int, j: int) -> tuple[int, int]:
        if i == j:
            return 0, i
        return min((cost(i, k)[0] + cost(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))

    def product(i: int, j: int) -> Any:
        return parts[i] if i == j else product(i, cost(i, j)[1]) @ product(cost(i, j)[1] + 1, j)

    found = product(0, len(parts) - 1)
    found = found.squeeze(0) if is_row else found
    return found.squeeze(-1) if is_column else found


@matrix_function(top=("matrix_power",))
def matrix_power(A: Tensor, n: int) -> Tensor:
    """Return the n-th power of square matrices; a negative n inverts them first."""
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ShapeError(f"linalg.matrix_power takes square matrices, got the shape {tuple(A.shape)}")
    if n < 0:
        return matrix_power(lapack_inverse(A, "linalg.matrix_power"), -n)
    if n == 0:
        one = eye(A.shape[-1], dtype=A.dtype, device=A.device)
        return elementwise.where(full(A.shape, True, device=A.device), one, A)
    result: Any = None
    while n:
        if n % 2:
            result = A if result is None else result @ A
        n //= 2
        A = A @ A if n else A
    return result.clone() if result is A else result


# Coefficients of the Padé approximant of degree 13 (Higham, 2005).
_PADE = (
    64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800, 129060195264000, 10559470521600,
    670442572800, 33522128640, 1323241920, 40840800, 960960, 16380, 182, 1,
)  # fmt: skip


@matrix_function(top=("matrix_exp",), out=False)
def matrix_exp(A: Tensor) -> Tensor:
    """Return the matrix exponential, by scaling and squaring in float64; the host reads the largest norm."""
    if A.dtype in (bfloat16, float16):
        return matrix_exp(A.float()).to(A.dtype)
    lapack.check_square("linalg.matrix_exp", A)
    if not A.numel():
        return A.clone()
    kind, A = A.dtype, A.to(float64)
    norm = float(A.detach().abs().sum(-2).max())
    squarings = max(0, math.ceil(math.log2(norm / 4.25))) if 0 < norm < math.inf else 0
    x = A * 0.5**squarings
    one = eye(A.shape[-1], dtype=A.dtype, device=A.device)
    b = [c / _PADE[0] for c in _PADE]
    x2 = x @ x
    x4 = x2 @ x2
    x6 = x4 @ x2
    odd = x @ (x6 @ (x6 * b[13] + x4 * b[11] + x2 * b[9]) + x6 * b[7] + x4 * b[5] + x2 * b[3] + one * b[1])
    even = x6 @ (x6 * b[12] + x4 * b[10] + x2 * b[8]) + x6 * b[6] + x4 * b[4] + x2 * b[2] + one * b[0]
    result = lapack.solve_square(even - odd, even + odd)
    for _ in range(squarings):
        result = result @ result
    return result.to(kind)


@matrix_function()
def cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """Return the cross products of vectors with three elements along `dim`; shapes broadcast."""
    if input.ndim != other.ndim:
        raise ShapeError(f"linalg.cross: the operands have {input.ndim} and {other.ndim} dimensions")
    if any(t.shape[normalize_axis(dim, t.ndim)] != 3 for t in (input, other)):
        raise ShapeError(f"linalg.cross takes 3 elements along dim {dim}")
    a, b = ([movedim(t, dim, -1)[..., i] for i in range(3)] for t in (input, other))
    parts = [a[i] * b[j] - a[j] * b[i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return movedim(stack(parts, -1), -1, dim)


@matrix_function(out=False)
def diagonal(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Return the diagonals of matrices, a view."""
    return diagonal_of(A, offset, dim1, dim2)


@matrix_function(out=False)
def vander(x: Tensor, N: int | None = None) -> Tensor:
    """Return Vandermonde matrices: the powers 0 … N-1 (default: as many as elements) of the elements of x."""
    if N is not None and N <= 1:
        raise UsageError(f"linalg.vander: N is {N}, and must be greater than 1")
    count = x.shape[-1] if N is None else N
    x = (x if x.is_floating_point() else x.to(int64)).reshape(x.shape or (1,))
    columns = [x.new_ones(x.shape)]
    for _ in range(count - 1):
        columns.append(columns[-1] * x)
    return stack(columns[:count], -1)


@matrix_function(top=("chain_matmul",), only_top=True, method=False)
def chain_matmul(*matrices: Tensor) -> Tensor:
    """Return the product of matrices; see `linalg.multi_dot`."""
    return matrices[0] if len(matrices) == 1 else multi_dot(matrices)


# --- Norms ------------------------------------------------------------------------------------------------------------


def _dims(x: Any, dim: Any) -> list[int]:
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [normalize_axis(d, x.ndim) for d in dims]


def _float(x: Any, dtype: Any, name: str) -> Any:
    array_of(x, name)
    if not x.is_floating_point() and not getattr(x, "is_complex", lambda: False)():
        raise DTypeError(f"{name} takes floats, not {x.dtype.name}", next="convert with .float()")
    return x if dtype is None else x.to(dtype)


@matrix_function()
def vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None
) -> Tensor:
    """Return (Σ |x|^ord)^(1/ord) over `dim` (default: all); `ord` may be ±infinity, or 0 to count nonzeros."""
    x = _float(x, dtype, "linalg.vector_norm")
    return reduce.norm(x, ord, None if dim == () or dim == [] else dim, keepdim)


def _pair(x: Any, dim: Any, name: str) -> tuple[int, int]:
    dims = _dims(x, dim)
    if len(dims) != 2 or dims[0] == dims[1]:
        raise ShapeError(f"{name} takes two different dimensions, got {dim}")
    return dims[0], dims[1]


def _extreme(x: Any, dim: int, order: float) -> Any:
    """Return the largest or, for a negative order, the smallest element along `dim`; the largest of none is 0."""
    if not x.shape[dim] and order > 0:
        return x.sum(dim, keepdim=True)
    return (reduce.amax if order > 0 else reduce.amin)(x, dim, True)


@matrix_function()
def matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: DTypeLike = None
) -> Tensor:
    """Return the norms of matrices in two dimensions: "fro", "nuc", ±infinity, ±1 or ±2."""
    x = _float(A, dtype, "linalg.matrix_norm")
    if x.ndim < 2:
        raise ShapeError(f"linalg.matrix_norm takes at least 2 dimensions, got the shape {tuple(x.shape)}")
    rows, columns = _pair(x, dim, "linalg.matrix_norm")
    if ord == "fro":
        return reduce.norm(x, 2, (rows, columns), keepdim)
    if ord in (1, -1, math.inf, -math.inf):
        summed, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = x.abs().sum(summed, keepdim=True)
        found = _extreme(sums, other, ord)
    elif ord in ("nuc", 2, -2):
        values = svdvals(movedim(x, (rows, columns), (-2, -1)))
        found = values.sum(-1) if ord == "nuc" else _extreme(values, -1, ord).squeeze(-1)
        for d in sorted((rows, columns)):
            found = found.unsqueeze(d)
    else:
        raise UsageError(f"linalg.matrix_norm has no order {ord!r}", next='use "fro", "nuc", inf, -inf, 1, -1, 2 or -2')
    if keepdim:
        return found
    return found.squeeze(max(rows, columns)).squeeze(min(rows, columns))


@matrix_function()
def norm(A: Tensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None) -> Tensor:
    """Return the matrix norm over two dimensions if `ord` is given, else the vector norm; see those functions."""
    if ord is None:
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    count = A.ndim if dim is None else 1 if isinstance(dim, int) else len(dim)
    if isinstance(ord, str) or count == 2:
        if count != 2:
            raise ShapeError(f"linalg.norm: order {ord!r} needs two dimensions, got {count}", next="pass dim=")
        return matrix_norm(A, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype)
    if dim is None and A.ndim > 2:
        raise ShapeError("linalg.norm: with an order and without dim, the tensor must have 1 or 2 dimensions")
    return vector_norm(A, ord, dim, keepdim, dtype=dtype)


@matrix_function()
def cond(A: Tensor, p: Any = None) -> Tensor:
    """Return the condition numbers of matrices in the norm `p`; None means 2."""
    if p in (None, 2, -2):
        values = svdvals(A)
        return values[..., 0] / values[..., -1] if p != -2 else values[..., -1] / values[..., 0]
    lapack.check_square("linalg.cond", A)
    inverted, info = inv_ex(A)
    singular = (info != 0).unsqueeze(-1).unsqueeze(-1)
    return matrix_norm(A, p) * matrix_norm(inverted.masked_fill(singular, math.inf), p)
