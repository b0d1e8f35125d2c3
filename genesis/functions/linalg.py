"""Linear algebra on tensors, with torch's names and semantics: products of matrices and vectors, and einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from genesis.autograd.record import apply, in_low_precision
from genesis.dtypes import INTEGER, int64
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import elementwise, pointwise
from genesis.functions.elementwise import to_dtype
from genesis.functions.shape import diagonal, expand, permute, reshape, unsqueeze
from genesis.functions.surface import Tensor, array_of, public
from genesis.ops import linalg as ops
from genesis.ops import linear as linear_ops
from genesis.ops import low_rank as low_rank_ops
from genesis.ops.low_rank import LowRank, Pair
from genesis.ops.reduce import sum_to_shape
from genesis.random import default_generator
from genesis.shapes import Shape, numel


def _need(name: str, ndims: tuple[int, ...], *tensors: Any) -> None:
    """Raise ShapeError unless each operand has the expected number of dimensions."""
    shapes = [array_of(t, name).shape for t in tensors]
    if any(len(s) != n for s, n in zip(shapes, ndims, strict=True)):
        listed = " and ".join(str(s) for s in shapes)
        wanted = " and ".join(str(n) for n in ndims)
        raise ShapeError(f"{name}: shapes {listed} must have {wanted} dimensions", next="use matmul, which broadcasts")


@public
def matmul(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x @ y: matrices in the last two dimensions, batches broadcast; a vector is a row (x) or a column (y)."""
    array_of(x, "matmul"), array_of(y, "matmul")
    return apply(ops.matmul, x, y, out=out)


@public(keywords={"mat2": "y"})
def mm(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[n, k]` @ y `[k, m]`."""
    _need("mm", (2, 2), x, y)
    return apply(ops.matmul, x, y, out=out)


@public(keywords={"mat2": "y"})
def bmm(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[b, n, k]` @ y `[b, k, m]`, without broadcasting."""
    _need("bmm", (3, 3), x, y)
    if x.array.shape[0] != y.array.shape[0]:
        raise ShapeError(
            f"bmm: the batch sizes are {x.array.shape[0]} and {y.array.shape[0]}", next="use matmul to broadcast"
        )
    return apply(ops.matmul, x, y, out=out)


@public(keywords={"vec": "y"})
def mv(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x `[n, k]` @ y `[k]`."""
    _need("mv", (2, 1), x, y)
    return apply(ops.matmul, x, y, out=out)


@public(keywords={"tensor": "y"})
def dot(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the dot product of two vectors."""
    _need("dot", (1, 1), x, y)
    return apply(ops.matmul, x, y, out=out)


@public(keywords={"vec2": "y"})
def outer(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the outer product `[n, m]` of vectors `[n]` and `[m]`."""
    _need("outer", (1, 1), x, y)
    return pointwise.mul(unsqueeze(x, 1), y, out=out)


def _scaled_sum(x: Any, product: Any, beta: float, alpha: float) -> Any:
    """Return beta·x + alpha·product; with beta = 0, x is not read (it may hold NaN). Integers truncate both factors."""
    if not product.array.dtype.is_floating_point:
        exact = int if product.array.dtype.category == INTEGER else bool
        beta, alpha = exact(beta), exact(alpha)
    product = product if alpha == 1 else pointwise.mul(product, alpha)
    if beta == 0:
        return product
    (x,) = in_low_precision(x)
    return elementwise.add(product, x if beta == 1 else pointwise.mul(x, beta))


@public(out=True)
def addmm(x: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta·x + alpha·(mat1 @ mat2); x broadcasts."""
    return _scaled_sum(x, mm(mat1, mat2), beta, alpha)


@public(out=True)
def addmv(x: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta·x + alpha·(mat @ vec); x broadcasts."""
    return _scaled_sum(x, mv(mat, vec), beta, alpha)


@public(out=True)
def baddbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta·x + alpha·(batch1 @ batch2); x broadcasts."""
    return _scaled_sum(x, bmm(batch1, batch2), beta, alpha)


# --- Linear layers and their adapters ---------------------------------------------------------------------------------


class LowRankPairs(NamedTuple):
    """Adapters of one or more linear layers with the same input x: c∘(x·Wᵀ + s·dropout(x)·Aᵀ·Bᵀ).

    Attributes:
        pairs: A `[r, in]`, B `[out, r]` and s for each weight; None for a layer without an adapter.
        factors: c of all columns, `[Σ out]`.
        dropout: probability with which an element of x is dropped before A; all pairs share one draw.
    """

    pairs: Sequence[tuple[Tensor, Tensor, float] | None]
    factors: Tensor | None = None
    dropout: float = 0.0


def with_pairs(low_rank: LowRankPairs, weights: Sequence[Tensor], size: int) -> tuple[tuple[Tensor, ...], LowRank]:
    """Return an op's inputs for low-rank pairs, and its attribute; the layers' input x has `size` elements.

    Raises:
        ShapeError: unless there is one pair per weight, and at least one that is not None.
        UsageError: if the dropout is not a probability.
    """
    if len(low_rank.pairs) != len(weights) or not any(low_rank.pairs):
        raise ShapeError(
            f"{len(low_rank.pairs)} low-rank pairs do not match {len(weights)} weights", next="pass one per weight"
        )
    if not 0 <= low_rank.dropout <= 1:
        raise UsageError(f"dropout: {low_rank.dropout} is not a probability", next="pass a value in [0, 1]")
    a, b, columns, start = [], [], [], 0
    for weight, pair in zip(weights, low_rank.pairs, strict=True):
        stop = start + weight.shape[0]
        if pair is not None:
            a.append(pair[0])
            b.append(pair[1])
            columns.append(Pair(start, stop, pair[0].shape[0], float(pair[2])))
        start = stop
    inputs = (*a, *b) if low_rank.factors is None else (*a, *b, low_rank.factors)
    noise = None
    if low_rank.dropout:
        seed, offset, position = default_generator.reserve_relative(size, inputs[0].device)
        noise, inputs = (low_rank.dropout, seed, offset), inputs if position is None else (*inputs, position)
    return inputs, LowRank(tuple(columns), len(inputs), noise)


def dora_factors(
    layers: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float] | None], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return DoRA's factors c = m / ‖W + s·B·A‖ of layers, and the norms: `[Σ sizes]` each.

    Only m receives a gradient.

    Args:
        layers: m, ‖W‖² of each row, W, A, B and s of each layer; None for a layer with c = 1.
        sizes: rows of each layer's W.
    """
    columns, start = [], 0
    for layer, size in zip(layers, sizes, strict=True):
        if layer is not None:
            columns.append((start, start + size))
        start += size
    present: Any = [layer for layer in layers if layer is not None]
    arrays = [layer[i] for i in range(5) for layer in present]
    scales = tuple(float(layer[5]) for layer in present)
    factors_and_norms = apply(low_rank_ops.dora_factors, *arrays, columns=tuple(columns), scales=scales, width=start)
    return factors_and_norms  # type: ignore[no-any-return]


@public(method=False, nn=True)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    fp8: int = 0,
    low_rank: LowRankPairs | None = None,
) -> Tensor:
    """Return x·Wᵀ + b + residual for x `[..., in]`, weight `[out, in]`, bias `[out]` and residual `[..., out]`.

    The sum is rounded once.

    Args:
        fp8: smallest width of a result that is multiplied in 8-bit floats; 0 disables them. The width is `out` in the
            forward pass and `in` for x's gradient. Both sizes of the weight must be multiples of 16.
        low_rank: adapter of the layer.
    """
    array_of(x, "linear"), array_of(weight, "linear")
    attrs: dict[str, Any] = {"fp8": fp8} if fp8 else {}
    if low_rank is not None:
        pairs, attrs["low_rank"] = with_pairs(low_rank, (weight,), x.numel())
        return apply(linear_ops.linear, x, weight, bias, residual, *pairs, **attrs)[0]
    if fp8 or residual is not None:
        return apply(linear_ops.linear, x, weight, bias, residual, **attrs)
    return apply(linear_ops.linear, x, weight) if bias is None else apply(linear_ops.linear, x, weight, bias)


@public(function=False, method=False, nn=True)
def packed_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    fp8: int = 0,
    low_rank: LowRankPairs | None = None,
) -> Tensor:
    """Return the results of several linear layers on one input x `[..., in]`, concatenated in the last dimension.

    A single matmul if the weights are adjacent in memory, as in an optimizer's flat buffers.

    Args:
        weights: weights `[out, in]`.
        biases: one bias `[out]` per weight, or none.
        fp8: as for `linear`, with all columns together as the forward width.
        low_rank: adapters of the layers.
    """
    array_of(x, "packed_linear")
    attrs: dict[str, Any] = {"fp8": fp8} if fp8 else {}
    if low_rank is None:
        return apply(linear_ops.packed_linear, x, *weights, *biases, **attrs)
    pairs, attrs["low_rank"] = with_pairs(low_rank, weights, x.numel())
    return apply(linear_ops.packed_linear, x, *weights, *biases, *pairs, **attrs)[0]


# --- einsum -----------------------------------------------------------------------------------------------------------
#
# Labels are single characters. The dimensions of an ellipsis get their own labels, numbered from the right so that they
# align as in broadcasting. Operands are contracted from left to right.

_DOTS = "\N{HORIZONTAL ELLIPSIS}"


def _labels(term: str, ndim: int, equation: str) -> tuple[str, ...]:
    """Return the label of each dimension of an operand. Raises ShapeError, with the equation and the term."""
    head, dots, tail = term.partition("...")
    letters = head + tail
    if not all(c.isascii() and c.isalpha() for c in letters):
        raise ShapeError(f"einsum: the term {term!r} of {equation!r} has characters other than letters and one ...")
    missing = ndim - len(letters)
    if missing < 0 or (missing and not dots):
        raise ShapeError(f"einsum: the term {term!r} of {equation!r} does not suit an operand of {ndim} dimensions")
    return (*head, *(f"{_DOTS}{missing - i}" for i in range(missing)), *tail)


def _output_labels(written: str | None, terms: list[tuple[str, ...]], equation: str) -> tuple[str, ...]:
    """Return the result's labels: as given, or sorted labels that occur once, after the ellipsis."""
    everywhere = [label for term in terms for label in term]
    dots = sorted({label for label in everywhere if label[0] == _DOTS}, key=lambda d: -int(d[1:]))
    if written is None:
        return (*dots, *sorted(x for x in set(everywhere) if x[0] != _DOTS and everywhere.count(x) == 1))
    head, has_dots, tail = written.partition("...")
    out = (*head, *(dots if has_dots else ()), *tail)
    if len(set(out)) != len(out) or any(label not in everywhere for label in out):
        raise ShapeError(
            f"einsum: the result {written!r} of {equation!r} repeats a label or has one that no operand has"
        )
    return out


def _sum_out(x: Any, labels: tuple[str, ...], keep: set[str]) -> tuple[Any, tuple[str, ...]]:
    """Return x summed over the labels that are not in `keep`."""
    kept = tuple(label for label in labels if label in keep)
    if kept == labels:
        return x, labels
    shape = x.array.shape
    x = x if x.array.dtype.is_floating_point else to_dtype(x, int64)
    ones = tuple(s if label in keep else 1 for s, label in zip(shape, labels, strict=True))
    summed = apply(sum_to_shape, x, shape=ones)
    return reshape(summed, *(s for s, label in zip(shape, labels, strict=True) if label in keep)), kept


def _distinct(x: Any, labels: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Return x with each label once; repeated ones become the diagonal."""
    for label in set(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            shape = x.array.shape
            if shape[first] != shape[second]:
                raise ShapeError(f"einsum: label {label!r} has the sizes {shape[first]} and {shape[second]}")
            x = diagonal(x, 0, first, second)
            labels = (*(name for i, name in enumerate(labels) if i not in (first, second)), label)
    return x, labels


def _ordered(x: Any, labels: tuple[str, ...], order: Sequence[str], sizes: dict[str, int]) -> Any:
    """Return x with its dimensions in `order`, expanded to full size as views."""
    present = [label for label in order if label in labels]
    x = permute(x, *(labels.index(label) for label in present))
    present_sizes = dict(zip(present, x.array.shape, strict=True))
    x = reshape(x, *(present_sizes.get(label, 1) for label in order))
    target = tuple(sizes[label] for label in order)
    return x if x.array.shape == target else expand(x, target)


def _contract(
    a: Any, a_labels: tuple[str, ...], b: Any, b_labels: tuple[str, ...], keep: set[str], sizes: dict[str, int]
) -> tuple[Any, tuple[str, ...]]:
    """Return the product of two operands, summed over shared labels that are not in `keep`."""
    a, a_labels = _sum_out(a, a_labels, keep | set(b_labels))
    b, b_labels = _sum_out(b, b_labels, keep | set(a_labels))
    shared = [label for label in a_labels if label in b_labels]
    batch = [label for label in shared if label in keep]
    inner = [label for label in shared if label not in keep]
    left = [label for label in a_labels if label not in shared]
    right = [label for label in b_labels if label not in shared]
    order = (*batch, *left, *right)
    # No shared label is summed: an elementwise product.
    if not inner:
        wide = sizes | dict.fromkeys((*left, *right), 1)
        x = _ordered(a, a_labels, order, wide | {label: sizes[label] for label in left})
        y = _ordered(b, b_labels, order, wide | {label: sizes[label] for label in right})
        return pointwise.mul(x, y), order

    def merged(*groups: Sequence[str]) -> tuple[int, ...]:
        return tuple(numel([sizes[label] for label in group]) for group in groups)

    # Otherwise a matmul, batched over the shared labels that are kept.
    x = reshape(_ordered(a, a_labels, (*batch, *left, *inner), sizes), merged(batch, left, inner))
    y = reshape(_ordered(b, b_labels, (*batch, *inner, *right), sizes), merged(batch, inner, right))
    if not batch:
        x, y = reshape(x, x.array.shape[1:]), reshape(y, y.array.shape[1:])
    return reshape(apply(ops.matmul, x, y), tuple(sizes[label] for label in order)), order


def _sizes(terms: list[tuple[str, ...]], shapes: list[Shape], equation: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for labels, shape in zip(terms, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            known = sizes.get(label, 1)
            if known != size and 1 not in (known, size):
                shown = "..." if label[0] == _DOTS else label
                raise ShapeError(f"einsum: {shown!r} in {equation!r} has the sizes {known} and {size}")
            sizes[label] = size if known == 1 else known
    return sizes


@public(method=False)
def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return products of elements, summed over labels, as the equation says: `"bij,bjk->bik"`.

    Without `->`, the result has the labels that occur once, in alphabetical order, after the dimensions of `...`. A
    label that an operand repeats selects the diagonal.

    Raises:
        ShapeError: with the equation, and the term or label that does not fit.
    """
    if not isinstance(equation, str):
        raise DTypeError(f"einsum: the equation is a {type(equation).__name__}", next='pass it first: "ij,jk->ik"')
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    written = inputs.split(",")
    if len(written) != len(operands):
        raise ShapeError(f"einsum: {equation!r} has {len(written)} terms for {len(operands)} operands")
    terms = [_labels(t, array_of(x, "einsum").ndim, equation) for t, x in zip(written, operands, strict=True)]
    out = _output_labels(output if arrow else None, terms, equation)
    operands = in_low_precision(*operands)
    labeled: list[tuple[Any, tuple[str, ...]]] = [_distinct(x, t) for x, t in zip(operands, terms, strict=True)]
    sizes = _sizes([labels for _, labels in labeled], [x.array.shape for x, _ in labeled], equation)
    x, labels = labeled[0]
    for i, (y, more) in enumerate(labeled[1:], 2):
        needed = set(out).union(*(rest for _, rest in labeled[i:]))
        x, labels = _contract(x, labels, y, more, needed, sizes)
    x, labels = _sum_out(x, labels, set(out))
    return permute(x, *(labels.index(label) for label in out)) if labels != out else x
