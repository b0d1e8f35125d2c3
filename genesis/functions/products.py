"""Products and distances of tensors made of matmul and elementwise ops, with torch's names and semantics."""

from __future__ import annotations

import builtins
from typing import Any

from genesis.autograd.record import TensorBase
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions import reduce
from genesis.functions.create import arange, zeros
from genesis.functions.elementwise import add, div, pow, sub, where
from genesis.functions.linalg import _scaled_sum, bmm, dot, matmul, outer
from genesis.functions.shape import expand, permute, reshape, roll, unsqueeze
from genesis.functions.surface import Tensor, array_of, public
from genesis.shapes import broadcast_shapes, normalize_axis, numel


@public(out=True)
def inner(x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of products over the last dimensions of x and y; a number scales the other."""
    a, b = array_of(x, "inner").shape, array_of(y, "inner").shape
    if not a or not b:
        return pw.mul(x, y)
    if a[-1] != b[-1]:
        raise ShapeError(f"inner: the last dimensions of {a} and {b} differ")
    return tensordot(x, y, ([-1], [-1]))


@public(out=True)
def vdot(x: Tensor, y: Tensor) -> Tensor:
    """Return the dot product of two vectors."""
    return dot(x, y)


def _sum(x: Any, dim: int) -> Any:
    return reduce.sum(x, dim, keepdim=True, dtype=x.array.dtype)


@public(method=False, out=True)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Return the product of two tensors summed over pairs of dimensions.

    Args:
        dims: a number n: the last n of `a` and the first n of `b`; or two lists of dimensions.
    """
    shapes = array_of(a, "tensordot").shape, array_of(b, "tensordot").shape
    if isinstance(dims, TensorBase):
        dims = dims.array.numpy().tolist()
    if not isinstance(dims, (list, tuple)):
        count = int(dims)
        if not 0 <= count <= builtins.min(len(shapes[0]), len(shapes[1])):
            raise UsageError(f"tensordot: dims is {count} for shapes {shapes[0]} and {shapes[1]}")
        dims = (range(len(shapes[0]) - count, len(shapes[0])), range(count))
    left, right = ([normalize_axis(d, len(s)) for d in v] for v, s in zip(dims, shapes, strict=True))
    if len(left) == len(right):  # a dimension of size 1 broadcasts, so sum the other one
        for i, j in zip(left, right, strict=True):
            if 1 in (shapes[0][i], shapes[1][j]) and shapes[0][i] != shapes[1][j]:
                a, b = (a, _sum(b, j)) if shapes[0][i] == 1 else (_sum(a, i), b)
        shapes = a.array.shape, b.array.shape
    if len(left) != len(right) or any(shapes[0][i] != shapes[1][j] for i, j in zip(left, right, strict=True)):
        raise ShapeError(f"tensordot: dimensions {left} of {shapes[0]} and {right} of {shapes[1]} do not match")
    rest = [[d for d in range(len(s)) if d not in used] for s, used in zip(shapes, (left, right), strict=True)]
    inner_size = numel([shapes[0][d] for d in left])
    outer_sizes = [[s[d] for d in kept] for s, kept in zip(shapes, rest, strict=True)]
    x = reshape(permute(a, *rest[0], *left), numel(outer_sizes[0]), inner_size)
    y = reshape(permute(b, *right, *rest[1]), inner_size, numel(outer_sizes[1]))
    return reshape(matmul(x, y), (*outer_sizes[0], *outer_sizes[1]))


@public(out=True)
def kron(x: Tensor, y: Tensor) -> Tensor:
    """Return the Kronecker product: x with each element replaced by its product with y."""
    a, b = array_of(x, "kron").shape, array_of(y, "kron").shape
    ndim = builtins.max(len(a), len(b))
    a, b = (1,) * (ndim - len(a)) + a, (1,) * (ndim - len(b)) + b
    left = reshape(x, *(v for s in a for v in (s, 1))) if ndim else x
    right = reshape(y, *(v for s in b for v in (1, s))) if ndim else y
    return reshape(pw.mul(left, right), tuple(s * r for s, r in zip(a, b, strict=True)))


@public(out=True)
def cross(x: Tensor, y: Tensor, dim: int | None = None) -> Tensor:
    """Return cross products along `dim` of size 3, by default the first such dimension."""
    shape = broadcast_shapes(array_of(x, "cross").shape, array_of(y, "cross").shape)
    if dim is None:
        found = [d for d, s in enumerate(shape) if s == 3]
        if not found:
            raise ShapeError(f"cross: no dimension of {shape} has size 3")
        dim = found[0]
    dim = normalize_axis(dim, len(shape))
    x, y = expand(x, shape), expand(y, shape)
    if shape[dim] != 3:
        raise ShapeError(f"cross: dimension {dim} of {shape} does not have size 3")
    return sub(
        pw.mul(roll(x, -1, dim), roll(y, -2, dim)),
        pw.mul(roll(x, -2, dim), roll(y, -1, dim)),
    )


@public(out=True, in_place=True)
def addr(x: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta·x + alpha·(vec1 ⊗ vec2); with beta = 0, x is not read."""
    product = outer(vec1, vec2)
    if float in (type(beta), type(alpha)) and not product.array.dtype.is_floating_point:
        raise DTypeError(f"addr of {product.array.dtype.name} takes no float factors", next="pass integers")
    return _scaled_sum(x, product, beta, alpha)


@public(out=True, in_place=True)
def addbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta·x + alpha·Σ batch1 @ batch2 over the batch; with beta = 0, x is not read."""
    return _scaled_sum(x, reduce.sum(bmm(batch1, batch2), 0, dtype=batch1.array.dtype), beta, alpha)


@public(method=False)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """Return the p-norm distances `[..., n, m]` between rows of x1 `[..., n, k]` and x2 `[..., m, k]`.

    Differences are computed directly in every mode: `[..., n, m, k]` of them are stored.
    """
    if array_of(x1, "cdist").ndim < 2 or array_of(x2, "cdist").ndim < 2 or x1.array.shape[-1] != x2.array.shape[-1]:
        raise ShapeError(f"cdist: rows of {x1.array.shape} and {x2.array.shape} do not match")
    if not (x1.array.dtype.is_floating_point and x2.array.dtype.is_floating_point):
        raise DTypeError(f"cdist takes floats, got {x1.array.dtype} and {x2.array.dtype}", next="cast with .to(...)")
    if p < 0:
        raise UsageError(f"cdist: p is {p}, expected at least 0")
    if not x1.array.shape[-1]:
        shape = (*broadcast_shapes(x1.array.shape[:-2], x2.array.shape[:-2]), x1.array.shape[-2], x2.array.shape[-2])
        return zeros(*shape, dtype=x1.array.dtype, device=x1.array.device)
    return reduce.norm(sub(unsqueeze(x1, -2), unsqueeze(x2, -3)), p, -1)


@public(out=True, in_place=True)
def renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Return x with each slice along `dim` scaled so that its p-norm is at most `maxnorm`."""
    ndim = array_of(x, "renorm").ndim
    if ndim < 2:
        raise ShapeError(f"renorm needs at least 2 dimensions, got shape {x.array.shape}")
    dim = normalize_axis(dim, ndim)
    norms = reduce.norm(x, p, tuple(d for d in range(ndim) if d != dim), keepdim=True)
    return pw.mul(x, where(pw.gt(norms, maxnorm), div(maxnorm, add(norms, 1e-7)), 1.0))


@public(method=False)
def vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    """Return the Vandermonde matrix of a vector, with N columns (default: square) of decreasing powers."""
    if array_of(x, "vander").ndim != 1:
        raise ShapeError(f"vander takes a vector, got shape {x.array.shape}")
    count = x.array.size if N is None else N
    powers = arange(count, device=x.array.device)
    powers = powers if increasing else powers.flip(0)
    return pow(unsqueeze(x, 1), powers)
