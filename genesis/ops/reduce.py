"""Reductions: sums, means, products, min/max, norms and cumulative sums.

2-byte floats accumulate in float32 and are rounded once at the store; integer sums are int64, as in torch. `axes` is
None for all dimensions, an int, or a tuple. In the gradient formulas, g is the gradient of the result y; both are
repeated along the reduced dimensions.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.dtypes import FLOAT, DType, bool_, default_dtype, int64, uint8
from genesis.errors import DimensionError, DTypeError, IndexRangeError, ShapeError
from genesis.op import Context, Grads, Op, op, registry
from genesis.ops.blocks import arrange, as_type, is_narrow, reduce_into, reduce_tiles, store_kept, work_type
from genesis.ops.elementwise import abs, add, arange, copy, div, eq, exp, isfinite, log, mul, pow, sign, sub, where
from genesis.shapes import Shape, broadcast_strides, normalize_axes, normalize_axis, numel, reduced_shape

Axes = int | tuple[int, ...] | None


# --- Shape and dtype rules --------------------------------------------------------------------------------------------


def _axes(name: str, shape: Shape, axes: Axes) -> Shape:
    """Return sorted dimensions in [0, ndim); errors name the op."""
    try:
        return normalize_axes(axes, len(shape))
    except (IndexRangeError, ShapeError) as error:
        raise type(error)(f"{name} of shape {shape}: {error.what}", next=error.next) from None


def single_axis(name: str, shape: Shape, axis: int) -> int:
    """Return one dimension in [0, ndim); errors name the op."""
    try:
        return normalize_axis(axis, len(shape))
    except IndexRangeError as error:
        raise IndexRangeError(f"{name} of shape {shape}: {error.what}", next=error.next) from None


def _need_elements(name: str, shape: Shape, axes: Shape) -> None:
    """Raise DimensionError for an extremum over no elements; with no rows at all, the result is just empty."""
    if 0 in [shape[i] for i in axes]:
        raise DimensionError(f"{name} of shape {shape} over dimensions {axes}: no elements to choose from")


def _rule(
    name: str, dtype: Callable[[DType], DType], *, floats: bool = False, elements: bool = False
) -> Callable[..., Spec]:
    """Return the rule of a reduction: `floats` refuses other dtypes, `elements` refuses to reduce none."""

    def infer(x: Array, axes: Axes = None, keepdim: bool = False, **attrs: Any) -> Spec:
        if floats and x.dtype.category != FLOAT:
            raise DTypeError(f"{name} takes float tensors, got {x.dtype.name}", next="cast with .float()")
        dims = _axes(name, x.shape, axes)
        if elements:
            _need_elements(name, x.shape, dims)
        return Spec(reduced_shape(x.shape, dims, keepdim), dtype(x.dtype))

    return infer


def _same(dtype: DType) -> DType:
    return dtype


def _widest(dtype: DType) -> DType:
    """Return the dtype of sums and products: int64 for integers and bools."""
    return dtype if dtype.category == FLOAT else int64


def _truth(dtype: DType) -> DType:
    return uint8 if dtype is uint8 else bool_  # uint8 was once torch's bool, and torch keeps it here


def reads(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    """Return the FLOPs of one operation per input element."""
    size: int = inputs[0].size
    return size


# --- Helpers of references and gradients ------------------------------------------------------------------------------


def _sum_type(dtype: np.dtype) -> np.dtype:
    if is_narrow(dtype):
        return np.dtype(np.float32)
    return dtype if dtype.kind == "f" else np.dtype(np.int64)


def _kept(out: np.ndarray, axes: Shape, keepdim: bool) -> np.ndarray:
    """Return `out` without its reduced dimensions (a view)."""
    return out[(*(0 if i in axes else slice(None) for i in range(out.ndim)), ...)] if keepdim else out


def _repeat(ctx: Context, value: Array | None) -> Array:
    """Return a result or its gradient as a view in the input's shape, repeated along the reduced dimensions."""
    spec = ctx.input_specs[0]
    assert spec is not None and value is not None
    if ctx.attrs.get("keepdim", False):
        return value.view(spec.shape, broadcast_strides(value.shape, value.strides, spec.shape))
    reduced = normalize_axes(ctx.attrs.get("axes"), len(spec.shape))
    steps = iter(value.strides)
    return value.view(spec.shape, tuple(0 if i in reduced else next(steps) for i in range(len(spec.shape))))


def _count(ctx: Context) -> int:
    spec = ctx.spec(0)
    return numel([spec.shape[i] for i in normalize_axes(ctx.attrs.get("axes"), len(spec.shape))])


def _same_reduction(ctx: Context) -> dict[str, Any]:
    return {"axes": ctx.attrs.get("axes"), "keepdim": ctx.attrs.get("keepdim", False)}


def _share_ties(ctx: Context, g: Array, chosen: Array) -> Array:
    """Divide g evenly among the `chosen` elements of each result."""
    shared: Array = mul(_repeat(ctx, div(g, sum(chosen, **_same_reduction(ctx)))), chosen)
    return shared


# --- Sums -------------------------------------------------------------------------------------------------------------


def _sum_to_shape_infer(x: Array, shape: Shape) -> Spec:
    pad = x.ndim - len(shape)
    if pad < 0 or builtins.any(s not in (1, n) for s, n in zip(shape, x.shape[pad:], strict=True)):
        raise ShapeError(f"sum_to_shape: {shape} does not broadcast to {x.shape}")
    return Spec(tuple(shape), x.dtype)


def _sum_to_shape_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g, repeated along the summed dimensions (a view)."""
    spec = ctx.spec(0)
    return (g.view(spec.shape, broadcast_strides(g.shape, g.strides, spec.shape)),)


@op("sum_to_shape", _sum_to_shape_infer, vjp=_sum_to_shape_vjp, flops=reads)
def sum_to_shape(out: np.ndarray, x: np.ndarray, shape: Shape) -> None:
    """y = x summed over the dimensions that broadcasting from `shape` to x's shape repeats."""
    pad = x.ndim - len(shape)
    axes = (*range(pad), *(i + pad for i, s in enumerate(shape) if s == 1 and x.shape[i + pad] != 1))
    squeezed = out[(*(0 if i + pad in axes else slice(None) for i in range(len(shape))), ...)]
    reduce_into(np.add, x, axes, squeezed, _sum_type(x.dtype))


@op(
    "sum", _rule("sum", _widest), vjp=lambda ctx, g: (_repeat(ctx, g),), flops=reads, autocast="fp32", torch="torch.sum"
)
def sum(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """y = Σ x over `axes`; 0 for no elements. dx = g."""
    axes = normalize_axes(axes, x.ndim)
    reduce_into(np.add, x, axes, _kept(out, axes, keepdim), _sum_type(x.dtype))


def _mean_vjp(ctx: Context, g: Array) -> Grads:
    return (_repeat(ctx, div(g, float(_count(ctx)))),)


@op("mean", _rule("mean", _same, floats=True), vjp=_mean_vjp, flops=reads, torch="torch.mean")
def mean(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """y = Σ x / n over `axes`; NaN for n = 0. dx = g / n."""
    axes = normalize_axes(axes, x.ndim)
    work = _sum_type(x.dtype)
    kept = _kept(out, axes, keepdim)
    total = np.empty(kept.shape, work)
    reduce_into(np.add, x, axes, total, work)
    np.copyto(kept, total / work.type(numel([x.shape[i] for i in axes])), casting="unsafe")


@op("count_nonzero", _rule("count_nonzero", lambda dtype: int64), flops=reads, torch="torch.count_nonzero")
def count_nonzero(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """Count the elements over `axes` that are not 0, as int64."""
    axes = normalize_axes(axes, x.ndim)
    reduce_into(np.add, x.astype(np.bool_, copy=False), axes, _kept(out, axes, keepdim), np.dtype(np.int64))


# --- Variance ---------------------------------------------------------------------------------------------------------


def _variance(x: np.ndarray, axes: Shape, out: np.ndarray, correction: float) -> None:
    """Compute the variance in two passes: the mean, then squared distances from it, over max(n - correction, 0)."""
    if x.size == 0:
        out.fill(math.nan)
        return
    work = _sum_type(x.dtype)
    flat, kept = arrange(x, axes)
    centre = reduce_tiles(np.add, flat, work) / work.type(flat.shape[1])

    def squared(tile: np.ndarray, a: slice, c: slice) -> np.ndarray:
        distance: np.ndarray = tile - centre[a, None, c]
        np.square(distance, out=distance)
        return distance

    total = reduce_tiles(np.add, flat, work, squared)
    store_kept(total / work.type(max(flat.shape[1] - correction, 0)), kept, out)


def _distances(ctx: Context) -> Array:
    x = ctx.inputs[0]
    distances: Array = sub(x, _repeat(ctx, mean(x, **_same_reduction(ctx))))
    return distances


def _var_vjp(ctx: Context, g: Array) -> Grads:
    free = _count(ctx) - ctx.attrs["correction"]
    return (mul(_repeat(ctx, mul(g, 2.0 / free if free > 0 else math.inf)), _distances(ctx)),)


@op("var", _rule("var", _same, floats=True), vjp=_var_vjp, saves=(0,), flops=reads)
def var(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False, *, correction: float) -> None:
    """y = Σ (x - mean)² / (n - correction) over `axes`; NaN for n = 0. dx = g·2·(x - mean) / (n - correction)."""
    axes = normalize_axes(axes, x.ndim)
    _variance(x, axes, _kept(out, axes, keepdim), correction)


def _std_vjp(ctx: Context, g: Array) -> Grads:
    y = ctx.outputs[0]
    free = _count(ctx) - ctx.attrs["correction"]
    scaled = where(eq(y, 0), 0.0, div(mul(g, 1.0 / free if free > 0 else math.inf), y))
    return (mul(_repeat(ctx, scaled), _distances(ctx)),)


@op("std", _rule("std", _same, floats=True), vjp=_std_vjp, saves=(0, "out"), flops=reads)
def std(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False, *, correction: float) -> None:
    """y = √var(x) over `axes`. dx = g·(x - mean) / (y·(n - correction)), 0 where y = 0."""
    axes = normalize_axes(axes, x.ndim)
    kept = _kept(out, axes, keepdim)
    variance = np.empty(kept.shape, _sum_type(x.dtype))
    _variance(x, axes, variance, correction)
    # As in `norm`: squares outside float32's range are rare; only then are they computed in float64.
    if variance.dtype == np.float32 and not np.all((variance > 1e-30) & (variance < 1e30)):
        variance = np.empty(kept.shape)
        _variance(x.astype(np.float64), axes, variance, correction)
    np.copyto(kept, np.sqrt(variance), casting="unsafe")


# --- Products ---------------------------------------------------------------------------------------------------------


def _prod_vjp(ctx: Context, g: Array) -> Grads:
    return (prod_backward(_repeat(ctx, g), ctx.inputs[0], axes=ctx.attrs.get("axes")),)


@op("prod", _rule("prod", _widest), vjp=_prod_vjp, saves=(0,), flops=reads, autocast="fp32")
def prod(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """y = Π x over `axes`; 1 for no elements. dx = g · product of the other elements."""
    axes = normalize_axes(axes, x.ndim)
    reduce_into(np.multiply, x, axes, _kept(out, axes, keepdim), _sum_type(x.dtype))


def _prod_backward_infer(g: Array, x: Array, axes: Axes = None) -> Spec:
    if g.shape != x.shape:
        raise ShapeError(f"prod_backward: gradient {g.shape} does not match an input of shape {x.shape}")
    _axes("prod_backward", x.shape, axes)
    return Spec(x.shape, x.dtype)


def _reshaped(x: Array, shape: Shape) -> Array:
    return registry["reshape"](x if x.is_contiguous else copy(x), shape=shape)


def _prod_backward_plain(g: Array, x: Array, axes: Axes = None) -> Array:
    """Multiply each line `[n]` with its own element replaced by 1, for all n elements at once."""
    axes = normalize_axes(axes, x.ndim)
    order = (*(i for i in range(x.ndim) if i not in axes), *axes)
    moved = registry["permute"](x, dims=order)
    count = numel([x.shape[i] for i in axes])
    lines = _reshaped(moved, (x.size // max(count, 1), 1, count))
    numbers = arange(start=0, step=1, count=count, dtype=int64, device=x.device)
    is_own = eq(_reshaped(numbers, (count, 1)), numbers)
    others = _reshaped(prod(where(is_own, 1.0, lines), axes=(2,)), moved.shape)
    return mul(g, registry["permute"](others, dims=tuple(order.index(i) for i in range(x.ndim))))


@op(
    "prod_backward",
    _prod_backward_infer,
    plain=_prod_backward_plain,
    flops=lambda inputs, outputs, attrs: 4 * inputs[0].size,
)
def prod_backward(out: np.ndarray, g: np.ndarray, x: np.ndarray, axes: Axes = None) -> None:
    """dx_i = g_i · Π x_j over j ≠ i: prefix products times suffix products, exact with zeros."""
    if x.size == 0:
        return
    axes = normalize_axes(axes, x.ndim)
    kept = tuple(i for i in range(x.ndim) if i not in axes)
    order, work = kept + axes, _sum_type(x.dtype)
    transposed = x.transpose(order).astype(work)
    lines = transposed.reshape(numel([x.shape[i] for i in kept]), -1)
    left, right = np.ones_like(lines), np.ones_like(lines)
    np.cumprod(lines[:, :-1], axis=1, out=left[:, 1:])
    np.cumprod(lines[:, :0:-1], axis=1, out=right[:, -2::-1])
    left *= right
    result = left.reshape(transposed.shape) * g.transpose(order)
    np.copyto(out.transpose(order), result, casting="unsafe")


# --- Extrema ----------------------------------------------------------------------------------------------------------


def _extremum_vjp(ctx: Context, g: Array) -> Grads:
    x = ctx.inputs[0]
    chosen = eq(x, _repeat(ctx, ctx.outputs[0]))
    if ctx.attrs.get("axes") is None:  # NaNs share the gradient, as in torch's max() and min()
        chosen = registry["logical_or"](chosen, registry["isnan"](x))
    return (_share_ties(ctx, g, chosen),)


@op("amax", _rule("amax", _same, elements=True), vjp=_extremum_vjp, saves=(0, "out"), flops=reads, torch="torch.amax")
def amax(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """y = largest element over `axes`; NaN if any is NaN. Equal largest elements share g evenly."""
    axes = normalize_axes(axes, x.ndim)
    reduce_into(np.maximum, x, axes, _kept(out, axes, keepdim), work_type(x.dtype))


@op("amin", _rule("amin", _same, elements=True), vjp=_extremum_vjp, saves=(0, "out"), flops=reads, torch="torch.amin")
def amin(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """y = smallest element over `axes`; NaN if any is NaN. Equal smallest elements share g evenly."""
    axes = normalize_axes(axes, x.ndim)
    reduce_into(np.minimum, x, axes, _kept(out, axes, keepdim), work_type(x.dtype))


def _positions(choose: Callable[..., Any], x: np.ndarray, axis: int | None) -> np.ndarray:
    """Return positions by `np.argmax` or `np.argmin` along `axis` (None: in row-major order); the first of equals."""
    transposed = x.reshape(1, -1) if axis is None else np.moveaxis(np.atleast_1d(x), axis, -1)
    lines = transposed.reshape(numel(transposed.shape[:-1]), transposed.shape[-1])
    positions = np.empty(len(lines), np.int64)

    def piece(start: int, stop: int) -> None:
        choose(as_type(lines[start:stop], work_type(x.dtype)), axis=1, out=positions[start:stop])

    if x.size:
        parallel(piece, len(lines), x.size)
    return positions.reshape(() if axis is None else transposed.shape[:-1])


def _position_rule(name: str, *, values: bool) -> Callable[..., Any]:
    """Return the rule of argmax (positions) or max_with_indices (values and positions)."""

    def infer(x: Array, axis: int | None = None, keepdim: bool = False) -> Spec | tuple[Spec, Spec]:
        axes = normalize_axes(None, x.ndim) if axis is None else (single_axis(name, x.shape, axis),)
        axes = tuple(i for i in axes if i < x.ndim)
        _need_elements(name, x.shape, axes)
        shape = reduced_shape(x.shape, axes, keepdim)
        return (Spec(shape, x.dtype), Spec(shape, int64)) if values else Spec(shape, int64)

    return infer


@op("argmax", _position_rule("argmax", values=False), flops=reads, torch="torch.argmax")
def argmax(out: np.ndarray, x: np.ndarray, axis: int | None = None, keepdim: bool = False) -> None:
    """Position of the largest element along `axis`, or in row-major order without it; the first NaN wins."""
    out[...] = _positions(np.argmax, x, axis).reshape(out.shape)


@op("argmin", _position_rule("argmin", values=False), flops=reads, torch="torch.argmin")
def argmin(out: np.ndarray, x: np.ndarray, axis: int | None = None, keepdim: bool = False) -> None:
    """Position of the smallest element along `axis`, or in row-major order without it; the first NaN wins."""
    out[...] = _positions(np.argmin, x, axis).reshape(out.shape)


def _chosen_vjp(ctx: Context, g: Array, _: Array | None) -> Grads:
    """dx = g at the chosen element of each line, 0 elsewhere."""
    spec = ctx.spec(0)
    indices, axis = ctx.outputs[1], normalize_axis(ctx.attrs["axis"], len(spec.shape))
    assert indices is not None
    if not ctx.attrs.get("keepdim", False) and spec.shape:
        g, indices = _insert(g, axis), _insert(indices, axis)
    return (put_along_axis(g, indices, axis=axis, size=spec.shape[axis] if spec.shape else 1),)


def _insert(x: Array, axis: int) -> Array:
    return x.view((*x.shape[:axis], 1, *x.shape[axis:]), (*x.strides[:axis], 1, *x.strides[axis:]))


def _with_indices(name: str, choose: Callable[..., Any], doc: str) -> Op:
    """Register the op `<name>_with_indices`."""

    def reference(out: tuple[np.ndarray, np.ndarray], x: np.ndarray, axis: int, keepdim: bool = False) -> None:
        positions = np.expand_dims(_positions(choose, x, axis), axis)
        out[0][...] = np.take_along_axis(np.atleast_1d(x), positions, axis).reshape(out[0].shape)
        out[1][...] = positions.reshape(out[1].shape)

    reference.__doc__ = f"{doc} along `axis` and its position (the first of equals). dx = g at that position."
    title, facts = f"{name}_with_indices", {"saves": ("out",), "flops": reads, "torch": f"torch.{name}"}
    return op(title, _position_rule(title, values=True), vjp=_chosen_vjp, **facts)(reference)


max_with_indices = _with_indices("max", np.argmax, "The largest element")
min_with_indices = _with_indices("min", np.argmin, "The smallest element")


def _put_infer(values: Array, indices: Array, axis: int, size: int) -> Spec:
    if values.shape != indices.shape:
        raise ShapeError(f"put_along_axis: values {values.shape} and indices {indices.shape} differ in shape")
    if indices.dtype is not int64:
        raise DTypeError(f"put_along_axis takes int64 indices, got {indices.dtype.name}")
    axis = single_axis("put_along_axis", values.shape, axis)
    return Spec((*values.shape[:axis], size, *values.shape[axis + 1 :]) if values.shape else (), values.dtype)


def _put_along_vjp(ctx: Context, g: Array) -> Grads:
    """dvalues = g at the positions."""
    indices = ctx.inputs[1]
    if not g.shape:
        return copy(g), None
    axis = normalize_axis(ctx.attrs["axis"], g.ndim)
    places = []
    for dim, size in enumerate(indices.shape):
        along = (1,) * dim + (size,) + (1,) * (indices.ndim - dim - 1)
        numbers = arange(start=0, step=1, count=size, dtype=int64, device=g.device)
        places.append(indices if dim == axis else _reshaped(numbers, along))
    return registry["index_get"](g, *places, dims=tuple(range(g.ndim))), None


@op("put_along_axis", _put_infer, vjp=_put_along_vjp, saves=(1,))
def put_along_axis(out: np.ndarray, values: np.ndarray, indices: np.ndarray, axis: int, size: int) -> None:
    """Zeros with `values` at positions `indices` along `axis`: y[…, indices, …] = values; positions are distinct."""
    out.fill(0)
    if out.ndim:
        np.put_along_axis(out, indices, values, axis)
    else:
        out[...] = values


# --- Truth ------------------------------------------------------------------------------------------------------------


@op("any", _rule("any", _truth), flops=reads, torch="torch.any")
def any(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """Whether any element over `axes` is not 0 (NaN is not 0); False for no elements."""
    axes = normalize_axes(axes, x.ndim)
    reduce_into(np.logical_or, x, axes, _kept(out, axes, keepdim), np.dtype(np.bool_))


@op("all", _rule("all", _truth), flops=reads, torch="torch.all")
def all(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """Whether all elements over `axes` are not 0 (NaN is not 0); True for no elements."""
    axes = normalize_axes(axes, x.ndim)
    reduce_into(np.logical_and, x, axes, _kept(out, axes, keepdim), np.dtype(np.bool_))


# --- Log of summed exponentials, norms --------------------------------------------------------------------------------


def _logsumexp_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·e^(x - y), 0 where all x are -∞ (a fully masked row; torch gives NaN)."""
    x, y = ctx.inputs[0], ctx.outputs[0]
    return (mul(_repeat(ctx, g), exp(sub(x, _repeat(ctx, where(eq(y, -math.inf), 0.0, y))))),)


def _logsumexp_plain(x: Array, axes: Axes = None, keepdim: bool = False) -> Array:
    highest = amax(x, axes=axes, keepdim=True)
    shift = where(isfinite(highest), highest, 0.0)
    kept = add(log(sum(exp(sub(x, shift)), axes=axes, keepdim=True)), shift)
    return _reshaped(kept, reduced_shape(x.shape, normalize_axes(axes, x.ndim), keepdim))


@op(
    "logsumexp",
    _rule("logsumexp", lambda dtype: dtype if dtype.category == FLOAT else default_dtype()),
    vjp=_logsumexp_vjp,
    plain=_logsumexp_plain,
    saves=(0, "out"),
    flops=lambda inputs, outputs, attrs: 6 * inputs[0].size,
    autocast="fp32",
)
def logsumexp(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False) -> None:
    """y = log Σ e^x over `axes`, with the maximum subtracted first; -∞ for no elements. dx = g·e^(x - y)."""
    axes = normalize_axes(axes, x.ndim)
    kept = _kept(out, axes, keepdim)
    if x.size == 0:
        kept.fill(-math.inf)
        return
    work = _sum_type(out.dtype)
    flat, order = arrange(x, axes)
    top = reduce_tiles(np.maximum, flat, work)
    top = np.where(np.isfinite(top), top, work.type(0))

    def powers(tile: np.ndarray, a: slice, c: slice) -> np.ndarray:
        below: np.ndarray = tile - top[a, None, c]
        np.exp(below, out=below)
        return below

    total = reduce_tiles(np.add, flat, work, powers)
    store_kept(np.log(total) + top, order, kept)


def _norm_rule(x: Array, axes: Axes = None, keepdim: bool = False, *, p: float) -> Spec:
    spec = _rule("norm", _same, floats=True)(x, axes, keepdim)
    if math.isinf(p) or p < 0:
        _need_elements(f"norm with p = {p}", x.shape, _axes("norm", x.shape, axes))
    return spec


def _norm_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·sign(x)·(|x| / y)^(p-1), 0 where y = 0 (or p < 1 and x = 0); for p = ±∞, extreme elements share g."""
    x, y, p = ctx.inputs[0], ctx.outputs[0], ctx.attrs["p"]
    wide = _repeat(ctx, y)
    if p == 0:
        return (mul(x, 0.0),)
    if math.isinf(p):
        return (mul(sign(x), _share_ties(ctx, g, eq(abs(x), wide))),)
    if p == 1:
        return (mul(sign(x), _repeat(ctx, g)),)
    # A zero norm is replaced before the division, because 0 / 0 would be NaN.
    flat = eq(y, 0)
    g, ratio = where(flat, 0.0, g), div(x, _repeat(ctx, where(flat, 1.0, y)))
    if p == 2:
        return (mul(_repeat(ctx, g), ratio),)
    derivative = mul(sign(x), pow(abs(ratio), p - 1))
    return (mul(_repeat(ctx, g), derivative if p > 1 else where(eq(x, 0), 0.0, derivative)),)


def _powers(p: float) -> tuple[Any, Callable[[np.ndarray], Any], Callable[[np.ndarray], Any]]:
    """Return how the p-norm is reduced: the ufunc, and the functions before (per element) and after it (the result)."""
    if p == 2:
        return np.add, np.square, np.sqrt
    if p == 0:
        return np.add, lambda x: x != 0, np.positive
    if p == 1:
        return np.add, np.abs, np.positive
    if math.isinf(p):
        return np.maximum if p > 0 else np.minimum, np.abs, np.positive
    return np.add, lambda x: np.power(np.abs(x), x.dtype.type(p)), lambda y: np.power(y, y.dtype.type(1 / p))


@op(
    "norm",
    _norm_rule,
    vjp=_norm_vjp,
    saves=(0, "out"),
    flops=lambda inputs, outputs, attrs: 2 * inputs[0].size,
    autocast="fp32",
)
def norm(out: np.ndarray, x: np.ndarray, axes: Axes = None, keepdim: bool = False, *, p: float) -> None:
    """y = (Σ |x|^p)^(1/p) over `axes`; p = ±∞ is the largest or smallest |x|, p = 0 counts nonzero elements.

    dx = g·sign(x)·(|x| / y)^(p-1), 0 where y = 0.
    """
    axes = normalize_axes(axes, x.ndim)
    kept = _kept(out, axes, keepdim)
    if x.size == 0:
        kept.fill(0)
        return
    ufunc, before, after = _powers(p)
    flat, order = arrange(x, axes)

    def compute(dtype: np.dtype) -> np.ndarray:
        result: np.ndarray = after(reduce_tiles(ufunc, flat, dtype, lambda tile, a, c: before(tile)))
        return result

    result = compute(_sum_type(x.dtype))
    # Powers outside float32's range (10^±38) are rare; only then is the sum recomputed in float64.
    if result.dtype == np.float32 and not np.all((result > 1e-16) & (result < 1e16)):
        result = compute(np.dtype(np.float64))
    store_kept(result, order, kept)


# --- Cumulative sums --------------------------------------------------------------------------------------------------


def _cumsum_infer(x: Array, axis: int, reverse: bool = False) -> Spec:
    single_axis("cumsum", x.shape, axis)
    return Spec(x.shape, _widest(x.dtype))


def _cumsum_vjp(ctx: Context, g: Array) -> Grads:
    return (cumsum(g, axis=ctx.attrs["axis"], reverse=not ctx.attrs.get("reverse", False)),)


@op("cumsum", _cumsum_infer, vjp=_cumsum_vjp, flops=reads, autocast="fp32", torch="torch.cumsum")
def cumsum(out: np.ndarray, x: np.ndarray, axis: int, reverse: bool = False) -> None:
    """y_i = Σ x_j over j ≤ i along `axis` (j ≥ i with `reverse`), floats in float64. dx_i = Σ g_j over j ≥ i."""
    if x.ndim == 0:
        out[...] = x
        return
    work = np.dtype(np.float64 if out.dtype.kind not in "iu" else np.int64)
    lines, target = np.moveaxis(x, axis, -1), np.moveaxis(out, axis, -1)
    if reverse:
        lines, target = lines[..., ::-1], target[..., ::-1]
    if x.ndim == 1:
        target[...] = np.cumsum(lines.astype(work), axis=-1)
        return

    def piece(start: int, stop: int) -> None:
        wide = lines[start:stop].astype(work)
        target[start:stop] = np.cumsum(wide, axis=-1, out=wide)

    parallel(piece, len(lines), x.size)
