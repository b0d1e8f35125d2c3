"""Linear layers: one weight or several on one input, with bias and residual in the product's epilogue.

In the formulas below g is the gradient of the result. Gradients of weights go where they stay, and are added there to
what came before, in one product for weights that lie next to each other in memory, as in a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import scratch
from genesis.errors import ShapeError
from genesis.op import Context, Spec, op
from genesis.ops.elementwise import add
from genesis.ops.fp8 import check_quantizable, is_wide_enough, multiply_quantized, quantized_matmul
from genesis.ops.linalg import add_matmul, matmul, matmul_add, matmul_flops, multiply, same_type, transposed
from genesis.ops.reduce import sum_to_shape
from genesis.ops.shape import reshaped
from genesis.ops.sweep import as_type, is_narrow
from genesis.shapes import contiguous_strides, numel

__all__ = [
    "bias_gradients",
    "input_gradient",
    "join_parameters",
    "joined",
    "linear",
    "packed_linear",
    "split_parameters",
    "weight_gradients",
]

Grads = tuple[Array | None, ...]


# --- Arrays next to each other ----------------------------------------------------------------------------------------


def joined(arrays: Sequence[Array]) -> Array | None:
    """One window `[Σ n, ...]` over arrays `[n, ...]` that lie one behind the other in memory, or None."""
    first = arrays[0]
    end, rows = first.offset, 0
    for a in arrays:
        if a.storage is not first.storage or a.offset != end or a.shape[1:] != first.shape[1:]:
            return None
        if a.dtype is not first.dtype or not a.is_contiguous:
            return None
        end += a.size
        rows += a.shape[0]
    shape = (rows, *first.shape[1:])
    return first.view(shape, contiguous_strides(shape))


def slices(whole: Array, sizes: Sequence[int]) -> list[Array]:
    """Windows of `sizes` rows each, one behind the other."""
    found, start, step = [], whole.offset, whole.strides[0]
    for size in sizes:
        found.append(whole.view((size, *whole.shape[1:]), whole.strides, start))
        start += size * step if whole.size else 0  # no elements: no offset beyond the memory
    return found


def columns(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Windows of `sizes` entries each along the last dimension."""
    found, start, step = [], x.offset, x.strides[-1]
    for size in sizes:
        found.append(x.view((*x.shape[:-1], size), x.strides, start))
        start += size * step if x.size else 0
    return found


# --- Gradients of a product x·Wᵀ + b ----------------------------------------------------------------------------------


def input_gradient(ctx: Context | None, i: int, g: Array, weights: Sequence[Array], fp8: int = 0) -> Array:
    """g·W with the weights stacked, plus what input `i` of a context has accumulated, if there is one.

    Args:
        fp8: as for `linear`, of the weights' width.
    """
    accumulated = None if ctx is None else ctx.take_accumulated(i)
    total, is_own = accumulated if accumulated is not None else (None, False)
    whole = joined(weights)
    pairs = [(g, whole)] if whole is not None else zip(columns(g, [w.shape[0] for w in weights]), weights, strict=True)
    for part, weight in pairs:
        if is_wide_enough(fp8, weight.shape[1]):
            total = quantized_matmul(part, weight) if total is None else quantized_matmul(part, weight, total)
        elif total is None:
            total = matmul(part, weight)
        elif is_own:
            add_matmul(total, part, weight)
        else:
            total = matmul_add(part, weight, total)
        is_own = True
    assert total is not None
    return total


def _gradients(
    ctx: Context,
    inputs: Sequence[int],
    sizes: Sequence[int],
    fresh: Callable[[int | None, Array | None], Array],
    more: Callable[[int | None, Array, bool], Array],
) -> list[Array | None]:
    """Gradients of parameters that one product has one after another.

    Args:
        inputs, sizes: which inputs they are, and their rows.
        fresh: `fresh(k, out)` makes the gradient of number k, or of all (None), in `out` if that is given.
        more: `more(k, before, is_own)` adds it to `before`, in place where that is allowed.
    """
    wanted = [k for k, i in enumerate(inputs) if ctx.needs[i]]
    sums = [ctx.take_accumulated(i) if ctx.needs[i] else None for i in inputs]
    slots = [ctx.gradient_slot(i) if t is None and ctx.needs[i] else None for i, t in zip(inputs, sums, strict=True)]
    if len(wanted) == len(inputs):
        arrays = [t.array for t in sums if t is not None and t.is_own]
        if len(arrays) == len(inputs) and (whole := joined(arrays)) is not None:
            more(None, whole, True)
            return list(arrays)
        free = [slot for slot in slots if slot is not None]
        if len(free) == len(inputs) and (whole := joined(free)) is not None:
            fresh(None, whole)
            return list(free)
        if not free and not any(sums):
            return list(slices(fresh(None, None), sizes))
    found: list[Array | None] = [None] * len(inputs)
    for k in wanted:
        before = sums[k]
        found[k] = fresh(k, slots[k]) if before is None else more(k, before.array, before.is_own)
    return found


def _on_side_stream(slot: Array | None, nbytes: int) -> AbstractContextManager[None]:
    """Where a gradient is made from `nbytes`: in its slot nobody reads it before the backward pass does, or is over."""
    return nullcontext() if slot is None else slot.storage.backend.on_side_stream(nbytes)


def weight_gradients(
    ctx: Context, inputs: Sequence[int], g: Array, x: Array, sizes: Sequence[int]
) -> list[Array | None]:
    """gᵀ·x for each weight `[size, in]`; g is `[rows, Σ sizes]`, x `[rows, in]`."""
    parts = columns(g, sizes)

    def left(k: int | None) -> Array:
        return transposed(g if k is None else parts[k])

    def more(k: int | None, before: Array, is_own: bool) -> Array:
        if not is_own:
            return matmul_add(left(k), x, before)
        add_matmul(before, left(k), x)
        return before

    def fresh(k: int | None, out: Array | None) -> Array:
        with _on_side_stream(out, g.nbytes + x.nbytes):
            return matmul(left(k), x, out=out)

    return _gradients(ctx, inputs, sizes, fresh, more)


def bias_gradients(ctx: Context, inputs: Sequence[int], g: Array, sizes: Sequence[int]) -> list[Array | None]:
    """The sum of g `[rows, Σ sizes]` over all rows, for each bias `[size]`."""
    parts = columns(g, sizes)

    def fresh(k: int | None, out: Array | None) -> Array:
        part = g if k is None else parts[k]
        with _on_side_stream(out, g.nbytes):
            return sum_to_shape(part, shape=part.shape[1:], out=out)

    def more(k: int | None, before: Array, is_own: bool) -> Array:
        return add(before, fresh(k, None), out=before if is_own else None)

    return _gradients(ctx, inputs, sizes, fresh, more)


# --- linear -----------------------------------------------------------------------------------------------------------


def check_linear(
    name: str, x: Array, weights: Sequence[Array], biases: Sequence[Array], residual: Array | None = None,
    fp8: int = 0,
) -> Spec:  # fmt: skip
    """The result's spec; all weights have x's width, a bias for each or none."""
    if fp8:
        check_quantizable(name, *(w for w in weights if w.ndim == 2))
    for weight in weights:
        if weight.ndim != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
            raise ShapeError(f"{name}: an input of shape {x.shape} with a weight of shape {weight.shape} [out, in]")
    if biases and [b.shape for b in biases] != [w.shape[:1] for w in weights]:
        listed = " and ".join(str(a.shape) for a in (*biases, *weights))
        raise ShapeError(f"{name}: a bias of shape {listed}: biases [out] go with weights [out, in], each with its own")
    out = (*x.shape[:-1], sum(w.shape[0] for w in weights))
    if residual is not None and residual.shape != out:
        raise ShapeError(f"{name}: a residual of shape {residual.shape} with a result of shape {out}")
    same_type(name, x, *weights, *biases, *(() if residual is None else (residual,)))
    return Spec(out, x.dtype)


def _linear_infer(
    x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None, *, fp8: int = 0
) -> Spec:
    return check_linear("linear", x, (weight,), () if bias is None else (bias,), residual, fp8)


def _linear_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·W, dW = gᵀ·x over all rows, db = sum of g over all rows, dresidual = g."""
    x, weight = ctx.inputs[:2]
    rows = numel(x.shape[:-1]) if x is not None else numel(g.shape[:-1])
    flat, size = reshaped(g, (rows, g.shape[-1])), g.shape[-1:]
    found: list[Array | None] = [None] * len(ctx.inputs)
    if ctx.needs[1]:
        (found[1],) = weight_gradients(ctx, (1,), flat, reshaped(x, (rows, x.shape[-1])), size)
    if len(found) > 2 and ctx.needs[2]:
        (found[2],) = bias_gradients(ctx, (2,), flat, size)
    if ctx.needs[0]:
        found[0] = input_gradient(ctx, 0, g, (weight,), ctx.attrs.get("fp8", 0))
    if len(found) > 3 and ctx.needs[3]:
        found[3] = g
    return tuple(found)


def _linear_saves(needs: tuple[bool, ...]) -> tuple[int, ...]:
    """The weight for dx, x for dW."""
    return tuple([i for i, need in ((0, needs[1]), (1, needs[0])) if need])


@op(
    "linear",
    _linear_infer,
    vjp=_linear_vjp,
    saves=_linear_saves,
    flops=matmul_flops,
    autocast="low_precision",
    torch="torch.nn.functional.linear",
)
def linear(
    out: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None,
    residual: np.ndarray | None = None, fp8: int = 0,
) -> None:  # fmt: skip
    """y = x·Wᵀ + b + residual, rounded once.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        residual: `[..., out]`.
        fp8: the fewest columns of a result that is multiplied in 8-bit floats, 0: none; see fp8.py.
    """
    if is_narrow(out.dtype) and not (bias is None and residual is None):
        with scratch(out.shape, np.float32) as wide:
            given = (None if v is None else as_type(v, wide.dtype) for v in (x, weight, bias, residual))
            linear.reference(wide, *given, fp8=fp8)
            np.copyto(out, wide, casting="unsafe")
        return
    (multiply_quantized if is_wide_enough(fp8, out.shape[-1]) else multiply)(x, weight.T, out)
    if bias is not None:
        np.add(out, bias, out=out)
    if residual is not None:
        np.add(out, residual, out=out)


# --- Several weights on one input -------------------------------------------------------------------------------------


def split_parameters(parameters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Weights and biases of `w1 … wn, b1 … bn` or `w1 … wn`."""
    count = next((i for i, p in enumerate(parameters) if p.ndim != 2), len(parameters))
    return list(parameters[:count]), list(parameters[count:])


def join_parameters(first: int) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """`Op.join` of an op whose inputs from `first` on are weights and biases: one of each where all are neighbours."""

    def join(inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weights, biases = split_parameters(inputs[first:])
        if len(weights) < 2 or len(biases) not in (0, len(weights)) or any(not b.ndim for b in biases):
            return inputs, attrs
        weight = joined(weights)
        if weight is None:
            return inputs, attrs
        if not biases:
            return (*inputs[:first], weight), attrs
        bias = joined(biases)
        return (inputs, attrs) if bias is None else ((*inputs[:first], weight, bias), attrs)

    return join


def packed_gradients(ctx: Context, g: Array, first: int, x: Array | None) -> list[Array | None]:
    """Gradients of the weights and biases from input `first` on; g is `[..., Σ out]`, x `[..., in]`."""
    specs = [s for s in ctx.input_specs[first:] if s is not None]
    count = sum(len(s.shape) == 2 for s in specs)
    sizes, rows = [s.shape[0] for s in specs[:count]], numel(g.shape[:-1])
    flat = reshaped(g, (rows, g.shape[-1]))
    numbers = range(first, first + len(specs))
    found: list[Array | None] = [None] * count
    if any(ctx.needs[i] for i in numbers[:count]):
        assert x is not None
        found = weight_gradients(ctx, numbers[:count], flat, reshaped(x, (rows, x.shape[-1])), sizes)
    if len(specs) == count:
        return found
    if any(ctx.needs[i] for i in numbers[count:]):
        return [*found, *bias_gradients(ctx, numbers[count:], flat, sizes)]
    return found + [None] * count


def _packed_infer(x: Array, *parameters: Array, fp8: int = 0) -> Spec:
    weights, biases = split_parameters(parameters)
    if not weights:
        raise ShapeError("packed_linear takes one weight [out, in] or more")
    return check_linear("packed_linear", x, weights, biases, fp8=fp8)


def _packed_vjp(ctx: Context, g: Array) -> Grads:
    """As for `linear`: dx is the sum over the weights, each weight's gradient comes from its columns of g."""
    weights = [w for w in ctx.inputs[1:] if w is not None and w.ndim == 2]
    found = packed_gradients(ctx, g, 1, ctx.inputs[0])
    fp8 = ctx.attrs.get("fp8", 0)
    return input_gradient(ctx, 0, g, weights, fp8) if ctx.needs[0] else None, *found


def packed_saves(needs: tuple[bool, ...]) -> tuple[int, ...]:
    """Inputs that the gradients of `packed_linear` read: x, and weights and biases (which lie in memory anyway)."""
    return tuple(range(1 if not any(needs[1:]) else 0, len(needs)))


@op(
    "packed_linear",
    _packed_infer,
    vjp=_packed_vjp,
    saves=packed_saves,
    flops=matmul_flops,
    join=join_parameters(1),
    autocast="low_precision",
    torch="torch.nn.functional.linear",
)
def packed_linear(out: np.ndarray, x: np.ndarray, *parameters: np.ndarray, fp8: int = 0) -> None:
    """[x·W1ᵀ + b1, …, x·Wnᵀ + bn] side by side in the last dimension.

    Args:
        x: `[..., in]`.
        parameters: weights `[out_i, in]`, then for each its bias `[out_i]`, or none.
        fp8: as for `linear`, of all columns together.
    """
    if is_narrow(out.dtype):
        with scratch(out.shape, np.float32) as wide:
            packed_linear.reference(wide, *(as_type(v, wide.dtype) for v in (x, *parameters)), fp8=fp8)
            np.copyto(out, wide, casting="unsafe")
        return
    weights, biases = split_parameters(parameters)
    count, start = numel(x.shape[:-1]), 0
    product = multiply_quantized if is_wide_enough(fp8, out.shape[-1]) else multiply
    rows, target = x.reshape(count, x.shape[-1]), out.reshape(count, out.shape[-1])
    for i, weight in enumerate(weights):
        part = target[:, start : start + weight.shape[0]]
        product(rows, weight.T, part)
        if biases:
            np.add(part, biases[i], out=part)
        start += weight.shape[0]
