"""Linear layers: one or several weights on one input, with bias and residual in the matmul's epilogue.

In the formulas, g is the gradient of the result. Weight gradients are written straight into their gradient slots, or
added to the accumulated gradients there, in one matmul for weights that are adjacent in memory, as in a flat buffer.
All ops in this file take low-rank pairs, whose formulas are in low_rank.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.errors import ShapeError
from genesis.op import Accumulated, Context, Grads, op
from genesis.ops.blocks import as_type, is_narrow
from genesis.ops.elementwise import add, cast
from genesis.ops.fp8 import check_quantizable, multiply_quantized, quantized_matmul
from genesis.ops.linalg import (
    add_matmul,
    is_wide_enough,
    matmul,
    matmul_add,
    matmul_flops,
    multiply,
    same_type,
    transposed,
)
from genesis.ops.low_rank import (
    LowRank,
    add_low_rank,
    check_low_rank,
    join_pairs,
    low_rank_backward,
    matmul_sum,
    scale_columns,
    scale_rows,
    split_pairs,
)
from genesis.ops.random import dropout
from genesis.ops.reduce import sum_to_shape
from genesis.ops.shape import columns, joined, reshaped, slices
from genesis.shapes import numel

Out = np.ndarray | tuple[np.ndarray, ...]


def low_rank_flops(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    """Return the FLOPs of x·Wᵀ, and of x·Aᵀ and u·Bᵀ for low-rank pairs."""
    low_rank, x = attrs.get("low_rank"), inputs[0]
    rows, pairs = x.size // max(x.shape[-1], 1), () if low_rank is None else low_rank.pairs
    more = sum(2 * rows * p.rank * (x.shape[-1] + p.stop - p.start) for p in pairs)
    return matmul_flops(inputs, outputs, attrs) + more


def own_parameters(parameters: Sequence[Any], low_rank: LowRank | None) -> Sequence[Any]:
    """Return weights and biases, without the inputs of low-rank pairs, which follow them."""
    return parameters if low_rank is None else parameters[: -low_rank.inputs]


def split_parameters(parameters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split `w1 … wn, b1 … bn` or `w1 … wn` into weights and biases."""
    count = next((i for i, p in enumerate(parameters) if p.ndim != 2), len(parameters))
    return list(parameters[:count]), list(parameters[count:])


def join_parameters(first: int) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the `Op.join` of an op whose inputs from `first` on are weights and biases.

    If all weights are adjacent in memory, and all biases, one joined weight and bias replace them. The low-rank pairs
    that follow (of `low_rank`, then of `down_low_rank`) are joined separately.
    """

    def join(inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(inputs) <= first:
            return inputs, attrs
        pairs: tuple[Any, ...] = ()
        for name in ("down_low_rank", "low_rank"):
            if (low_rank := attrs.get(name)) is not None:
                joined_inputs, joint = join_pairs(inputs[-low_rank.inputs :], low_rank)
                inputs, pairs, attrs = inputs[: -low_rank.inputs], (*joined_inputs, *pairs), {**attrs, name: joint}
        weights, biases = split_parameters(inputs[first:])
        if len(weights) > 1 and len(biases) in (0, len(weights)) and all(b.ndim for b in biases):
            joint_parameters = [joined(each) for each in (weights, biases) if each]
            inputs = inputs if any(w is None for w in joint_parameters) else (*inputs[:first], *joint_parameters)
        return (*inputs, *pairs), attrs

    return join


# --- Gradients of x·Wᵀ + b --------------------------------------------------------------------------------------------


class LowRankTerm(NamedTuple):
    """The low-rank term of an input's gradient, dropout(v·A); see low_rank.py."""

    v: Array  # `[..., Σ ranks]`
    a: list[Array]  # A of each pair `[rank, in]`
    ranks: list[int]  # rank of each pair
    noise: dict[str, Any] | None  # attributes of `dropout`; None without dropout
    position: tuple[Any, ...]  # second input of `dropout`, if it has one

    @property
    def products(self) -> list[tuple[Array, Array]]:
        """Pairs (part of v, part of A) for as few matmuls as possible."""
        joint = joined(self.a)
        return [(self.v, joint)] if joint is not None else list(zip(columns(self.v, self.ranks), self.a, strict=True))


def input_gradient(
    ctx: Context | None, i: int, g: Array, weights: Sequence[Array], fp8: int = 0, low: LowRankTerm | None = None
) -> Array:
    """Return g·W with the weights stacked, plus the accumulated gradient of input `i`, plus the low-rank term.

    Args:
        ctx: context whose accumulated gradient is taken; None for an intermediate gradient.
        i: number of the input.
        g: gradient of the result, `[..., out]`.
        weights: weights `[out, in]`, in whose dtype the result is.
        fp8: as for `linear`, with `in` as the width.
        low: the low-rank term, if any.
    """
    accumulated = None if ctx is None else ctx.take_accumulated(i)
    total, is_own = accumulated if accumulated is not None else (None, False)
    joint, quantizes = joined(weights), is_wide_enough(fp8, weights[0].shape[1])
    parts = columns(g, [w.shape[0] for w in weights]) if joint is None else [g]
    pairs = list(zip(parts, weights if joint is None else [joint], strict=True))
    # Add the low-rank term: with dropout in its own pass, else fused with the matmul or accumulated.
    if low is not None and low.noise is not None:
        more = _sum_of_products(None, False, low.products, False)
        dropout(more, *low.position, **low.noise, out=more)
        total, is_own = more if total is None else add(total, more, out=total if is_own else None), True
    elif low is not None and len(pairs) == len(low.products) == 1 and not quantizes and not is_own:
        return matmul_sum(*pairs[0], *low.products[0], *(() if total is None else (total,)))
    elif low is not None:
        total, is_own = _sum_of_products(total, is_own, low.products, False), True
    return _sum_of_products(total, is_own, pairs, quantizes)


def _sum_of_products(total: Array | None, is_own: bool, pairs: Sequence[tuple[Array, Array]], quantizes: bool) -> Array:
    """Return `total` plus the matmuls of all pairs; `is_own`: `total` may be overwritten; `quantizes`: use fp8."""
    for part, weight in pairs:
        if quantizes:
            total = quantized_matmul(part, weight) if total is None else quantized_matmul(part, weight, total)
        elif total is None:
            total = matmul(part, weight)
        elif is_own and type(total) is Array:
            add_matmul(total, part, weight)
        else:
            total = matmul_add(part, weight, total)
        is_own = True
    assert total is not None
    return total


class _Target(NamedTuple):
    """The destination of one matmul that computes gradients of some parameters.

    Attributes:
        number: number of the parameter; None for all parameters at once.
        out: memory to write to.
        before: accumulated gradient to add to, in place if allowed.
        arrays: gradients of all parameters after the matmul; None if they are slices of its result.
    """

    number: int | None = None
    out: Array | None = None
    before: Accumulated | None = None
    arrays: list[Array] | None = None

    def columns(self, g: Array, sizes: Sequence[int]) -> Array:
        """Return the columns of g that belong to the destination's parameters."""
        return g if self.number is None else columns(g, sizes)[self.number]

    def on_side_stream(self, nbytes: int) -> AbstractContextManager[None]:
        """Return a context for a matmul of `nbytes`: nothing reads a slot before the backward pass needs it or ends."""
        return nullcontext() if self.out is None else self.out.storage.backend.on_side_stream(nbytes)

    def put(self, result: Array, grads: list[Array | None], sizes: Sequence[int]) -> None:
        """Enter the matmul's result in the list of all gradients."""
        if self.number is None:
            grads[:] = self.arrays or slices(result, sizes)
        else:
            grads[self.number] = result


def _targets(ctx: Context, inputs: Sequence[int]) -> list[_Target]:
    """Return one destination for all inputs if they are adjacent in memory or have no memory yet, else one each."""
    needed = [k for k, i in enumerate(inputs) if ctx.needs[i]]
    sums = {k: ctx.take_accumulated(inputs[k]) for k in needed}
    slots = {k: ctx.gradient_slot(inputs[k]) for k in needed if sums[k] is None}
    if len(needed) == len(inputs):
        own = [t.array for t in sums.values() if t is not None and t.is_own]
        if len(own) == len(inputs) and (joint := joined(own)) is not None:
            return [_Target(None, None, Accumulated(joint, True), own)]
        free = [slot for slot in slots.values() if slot is not None]
        if len(free) == len(inputs) and (joint := joined(free)) is not None:
            return [_Target(None, joint, None, free)]
        if not free and not any(sums.values()):
            return [_Target()]
    return [_Target(k, slots.get(k), sums[k]) for k in needed]


def _as_rows(x: Array) -> Array:
    return x if x.ndim == 2 else reshaped(x, (numel(x.shape[:-1]), x.shape[-1]))


def weight_gradients(
    ctx: Context, inputs: Sequence[int], g: Array, x: Array, sizes: Sequence[int]
) -> list[Array | None]:
    """Return gᵀ·x over all rows for each weight `[size, in]`; g is `[..., Σ sizes]`, x `[..., in]`."""
    grads: list[Array | None] = [None] * len(inputs)
    g, x = _as_rows(g), _as_rows(x)
    for target in _targets(ctx, inputs):
        left = transposed(target.columns(g, sizes))
        if target.before is None:
            with target.on_side_stream(g.nbytes + x.nbytes):
                result = matmul(left, x, out=target.out)
        elif target.before.is_own:
            result = target.before.array
            add_matmul(result, left, x)
        else:
            result = matmul_add(left, x, target.before.array)
        target.put(result, grads, sizes)
    return grads


def bias_gradients(ctx: Context, inputs: Sequence[int], g: Array, sizes: Sequence[int]) -> list[Array | None]:
    """Return the sum of g `[..., Σ sizes]` over all rows, for each bias `[size]`."""
    grads: list[Array | None] = [None] * len(inputs)
    g = _as_rows(g)
    for target in _targets(ctx, inputs):
        part = target.columns(g, sizes)
        with target.on_side_stream(g.nbytes):
            result = sum_to_shape(part, shape=part.shape[1:], out=target.out)
        if target.before is not None:
            array, is_own = target.before
            result = add(array, result, out=array if is_own else None)
        target.put(result, grads, sizes)
    return grads


# --- Gradients of low-rank pairs --------------------------------------------------------------------------------------


class PairsBackward(NamedTuple):
    """Intermediate values for the gradients of a call with low-rank pairs; without pairs, only g.

    Attributes:
        g: gradient of the result, `[..., out]`.
        first: number of the pairs' first input, which follows the op's own inputs.
        low_rank: the pairs.
        b: gradient of each B that is trained.
        c: factors, if any.
        factors: gradient of c.
        term: low-rank term of dx.
    """

    g: Array
    first: int
    low_rank: LowRank | None = None
    b: Sequence[Array | None] = ()
    c: Array | None = None
    factors: Array | None = None
    term: LowRankTerm | None = None

    def of_product(self) -> Array:
        """Return g' = c∘g."""
        return self.g if self.c is None else scale_columns(self.g, self.c)

    def scaled(self, weights: Sequence[Array]) -> Sequence[Array]:
        """Return c∘W, because g·(c∘W) = g'·W."""
        if self.c is None:
            return weights
        joint = joined(weights)
        parts = list(weights) if joint is None else [joint]
        factors = slices(self.c, [w.shape[0] for w in parts])
        return [scale_rows(w, c) for w, c in zip(parts, factors, strict=True)]

    def reads_input(self, ctx: Context) -> bool:
        """Whether the gradient of an A is needed, which reads x."""
        count = 0 if self.low_rank is None else len(self.low_rank.pairs)
        return any(ctx.needs[self.first : self.first + count])

    def gradients(self, ctx: Context, x: Array | None) -> list[Array | None]:
        """Return the gradients of the pairs' inputs; x `[..., in]` is read only if an A is trained."""
        if self.low_rank is None:
            return []
        count, first = len(self.low_rank.pairs), self.first
        grads: list[Array | None] = [None] * self.low_rank.inputs
        if self.reads_input(ctx):
            term = self.term
            assert term is not None and x is not None
            dropped = x if term.noise is None else dropout(x, *term.position, **term.noise)
            grads[:count] = weight_gradients(ctx, range(first, first + count), term.v, dropped, term.ranks)
        grads[count : 2 * count] = self.b
        if self.factors is not None and ctx.needs[first + 2 * count]:
            c = ctx.inputs[first + 2 * count]
            grads[2 * count] = self.factors if self.factors.dtype is c.dtype else cast(self.factors, dtype=c.dtype)
        return grads


def pairs_backward(
    ctx: Context, g: Array, low_rank: LowRank | None, kept: Sequence[Array | None], end: int | None = None,
    is_result: bool = False,
) -> PairsBackward:  # fmt: skip
    """Compute the intermediate values of the backward pass of a call's pairs.

    Args:
        g: gradient of the result, `[..., out]`.
        kept: saved u and, with c, z.
        end: end of the pairs' inputs; by default the last input.
        is_result: as for `low_rank_backward`.
    """
    end = len(ctx.inputs) if end is None else end
    if low_rank is None:
        return PairsBackward(g, end)
    _, operands = split_pairs(ctx.inputs[:end], low_rank)
    assert operands is not None and kept[0] is not None
    first, pairs, c = end - low_rank.inputs, low_rank.pairs, operands.factors
    numbers = range(first + len(pairs), first + 2 * len(pairs))
    # Write the gradients of B into their slots, or add them to the accumulated ones afterwards.
    sums = [ctx.take_accumulated(i) if ctx.needs[i] else None for i in numbers]
    slots = [
        ctx.gradient_slot(i) if ctx.needs[i] and before is None else None
        for i, before in zip(numbers, sums, strict=True)
    ]
    arrays, out = (operands.b, (None, *slots)) if c is None else ((*operands.b, c, kept[1]), (None, *slots, None))
    # v, and the gradients of B and c.
    attrs = {"pairs": pairs} if c is None else {"pairs": pairs, "is_result": is_result}
    v, *b_grads = low_rank_backward(g, kept[0], *arrays, out=out, **attrs)
    factors = None if c is None else b_grads.pop()
    b = [grad if ctx.needs[i] else None for i, grad in zip(numbers, b_grads, strict=True)]
    for i, before in enumerate(sums):
        if before is not None:
            b[i] = add(before.array, b_grads[i], out=before.array if before.is_own else None)
    noise = None if low_rank.dropout is None else low_rank.noise
    term = LowRankTerm(v, operands.a, [p.rank for p in pairs], noise, operands.where)
    return PairsBackward(g, first, low_rank, b, c, factors, term)


# --- linear -----------------------------------------------------------------------------------------------------------


def check_linear(
    name: str, x: Array, weights: Sequence[Array], biases: Sequence[Array], residual: Array | None = None,
    fp8: int = 0,
) -> Spec:  # fmt: skip
    """Return the result's spec; all weights must have x's width, and there is one bias per weight or none."""
    if fp8:
        check_quantizable(name, *(w for w in weights if w.ndim == 2))
    for weight in weights:
        if weight.ndim != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
            raise ShapeError(f"{name}: an input of shape {x.shape} does not fit a weight {weight.shape} [out, in]")
    if biases and [b.shape for b in biases] != [w.shape[:1] for w in weights]:
        listed = " and ".join(str(a.shape) for a in (*biases, *weights))
        raise ShapeError(f"{name}: a bias of shape {listed}: each weight [out, in] needs its own bias [out]")
    out = (*x.shape[:-1], sum(w.shape[0] for w in weights))
    if residual is not None and residual.shape != out:
        raise ShapeError(f"{name}: a residual of shape {residual.shape} does not match a result of shape {out}")
    same_type(name, x, *weights, *biases, *(() if residual is None else (residual,)))
    return Spec(out, x.dtype)


def _linear_infer(
    x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None, *pairs: Array, fp8: int = 0,
    low_rank: LowRank | None = None,
) -> Spec | tuple[Spec, ...]:  # fmt: skip
    y = check_linear("linear", x, (weight,), () if bias is None else (bias,), residual, fp8)
    if low_rank is None:
        return y
    return y, *check_low_rank("linear", x, weight.shape[0], split_pairs(pairs, low_rank)[1], low_rank)


def _linear_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """dx = g·W, dW = gᵀ·x over all rows, db = sum of g over all rows, dresidual = g."""
    x, weight = ctx.inputs[:2]
    pairs = pairs_backward(ctx, g, ctx.attrs.get("low_rank"), ctx.outputs[1:])
    grads: list[Array | None] = [None] * len(ctx.inputs)
    if ctx.needs[1]:
        (grads[1],) = weight_gradients(ctx, (1,), pairs.of_product(), x, g.shape[-1:])
    if len(grads) > 2 and ctx.needs[2]:
        (grads[2],) = bias_gradients(ctx, (2,), g, g.shape[-1:])
    grads[pairs.first :] = pairs.gradients(ctx, x)
    if ctx.needs[0]:
        grads[0] = input_gradient(ctx, 0, g, pairs.scaled((weight,)), ctx.attrs.get("fp8", 0), pairs.term)
    if len(grads) > 3 and ctx.needs[3]:
        grads[3] = g
    return tuple(grads)


def _linear_saves(needs: tuple[bool, ...]) -> tuple[int | str, ...]:
    """Save the weight for dx, x for dW and dA; and the pairs, which are in memory anyway, with u and z."""
    kept = tuple([i for i, need in ((0, needs[1] or any(needs[4:])), (1, needs[0])) if need])
    return (*kept, *range(4, len(needs)), "out1", "out2") if len(needs) > 4 else kept


@op(
    "linear",
    _linear_infer,
    vjp=_linear_vjp,
    saves=_linear_saves,
    auxiliary=(1, 2),
    flops=low_rank_flops,
    join=join_parameters(4),  # joins only the pairs
    autocast="low_precision",
    torch="torch.nn.functional.linear",
)
def linear(
    out: Out, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, residual: np.ndarray | None = None,
    *pairs: np.ndarray, fp8: int = 0, low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    """y = x·Wᵀ + b + residual, rounded once.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        residual: `[..., out]`.
        pairs: inputs of low-rank pairs; see low_rank.py, which also lists the additional outputs.
        fp8: smallest result width that is computed in 8-bit floats; 0 disables them. See fp8.py.
        low_rank: description of the pairs.
    """
    if isinstance(out, tuple):
        _adapted(out, x, (weight,), () if bias is None else (bias,), residual, pairs, low_rank, fp8)
        return
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


def _adapted(
    out: tuple[np.ndarray, ...], x: np.ndarray, weights: Sequence[np.ndarray], biases: Sequence[np.ndarray],
    residual: np.ndarray | None, pairs: Sequence[np.ndarray], low_rank: LowRank | None, fp8: int,
) -> None:  # fmt: skip
    """Run the references of `linear` and `packed_linear` with low-rank pairs; writes y, u and, with c, z."""
    assert low_rank is not None
    _, operands = split_pairs(pairs, low_rank)
    assert operands is not None
    y, u = out[:2]
    rows = numel(x.shape[:-1])
    with scratch((rows, y.shape[-1]), np.float32 if is_narrow(x.dtype) else x.dtype) as wide:
        values = as_type(x, wide.dtype).reshape(rows, x.shape[-1])
        packed_linear.reference(wide, values, *(as_type(w, wide.dtype) for w in weights), fp8=fp8)
        add_low_rank(wide, u.reshape(rows, u.shape[-1]), values, operands, low_rank)
        if operands.factors is not None:
            if len(out) > 2:  # norm_mlp does not save z
                np.copyto(out[2], wide.reshape(y.shape), casting="unsafe")
            wide *= as_type(operands.factors, wide.dtype)
        if biases:
            wide += np.concatenate([as_type(b, wide.dtype) for b in biases])
        if residual is not None:
            wide += as_type(residual, wide.dtype).reshape(wide.shape)
        np.copyto(y, wide.reshape(y.shape), casting="unsafe")


def packed_gradients(ctx: Context, g: Array, first: int, x: Array | None, pairs: PairsBackward) -> list[Array | None]:
    """Return gradients of the weights and biases from input `first` on, and of the pairs' inputs, which follow.

    Args:
        g: gradient of the result, `[..., Σ out]`.
        x: `[..., in]`; read only if a weight or an A is trained.
    """
    specs = [s for s in ctx.input_specs[first : pairs.first] if s is not None]
    count = sum(len(s.shape) == 2 for s in specs)
    sizes, numbers = [s.shape[0] for s in specs[:count]], range(first, first + len(specs))
    grads: list[Array | None] = [None] * count
    if any(ctx.needs[i] for i in numbers[:count]):
        assert x is not None
        grads = weight_gradients(ctx, numbers[:count], pairs.of_product(), x, sizes)
    if any(ctx.needs[i] for i in numbers[count:]):
        grads += bias_gradients(ctx, numbers[count:], g, sizes)
    else:
        grads += [None] * (len(specs) - count)
    return grads + pairs.gradients(ctx, x)


def check_packed(
    name: str, x: Array, parameters: Sequence[Array], fp8: int, low_rank: LowRank | None
) -> Spec | tuple[Spec, ...]:
    """Return the specs of the outputs of several linear layers on x."""
    weights, biases = split_parameters(own_parameters(parameters, low_rank))
    if not weights:
        raise ShapeError(f"{name} takes one weight [out, in] or more")
    y = check_linear(name, x, weights, biases, fp8=fp8)
    if low_rank is None:
        return y
    return y, *check_low_rank(name, x, y.shape[-1], split_pairs(parameters, low_rank)[1], low_rank)


def _packed_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """As for `linear`: dx is summed over the weights; each weight's gradient comes from its columns of g."""
    low_rank = ctx.attrs.get("low_rank")
    weights, _biases = split_parameters(own_parameters(ctx.inputs[1:], low_rank))
    pairs = pairs_backward(ctx, g, low_rank, ctx.outputs[1:])
    grads = packed_gradients(ctx, g, 1, ctx.inputs[0], pairs)
    fp8 = ctx.attrs.get("fp8", 0)
    return input_gradient(ctx, 0, g, pairs.scaled(weights), fp8, pairs.term) if ctx.needs[0] else None, *grads


@op(
    "packed_linear",
    lambda x, *parameters, fp8=0, low_rank=None: check_packed("packed_linear", x, parameters, fp8, low_rank),
    vjp=_packed_vjp,
    # x; weights and biases, which are in memory anyway; u and z
    saves=lambda needs: (*range(0 if any(needs[1:]) else 1, len(needs)), "out1", "out2"),
    auxiliary=(1, 2),
    flops=low_rank_flops,
    join=join_parameters(1),
    autocast="low_precision",
    torch="torch.nn.functional.linear",
)
def packed_linear(
    out: Out, x: np.ndarray, *parameters: np.ndarray, fp8: int = 0, low_rank: LowRank | None = None
) -> None:
    """[x·W1ᵀ + b1, …, x·Wnᵀ + bn], concatenated in the last dimension.

    Args:
        x: `[..., in]`.
        parameters: weights `[out_i, in]`; then one bias `[out_i]` per weight, or none; then inputs of low-rank pairs.
        fp8: as for `linear`, with all columns together as the width.
        low_rank: description of the pairs; low_rank.py lists the additional outputs.
    """
    if isinstance(out, tuple):
        own = own_parameters(parameters, low_rank)
        _adapted(out, x, *split_parameters(own), None, parameters[len(own) :], low_rank, fp8)
        return
    if is_narrow(out.dtype):
        with scratch(out.shape, np.float32) as wide:
            packed_linear.reference(wide, *(as_type(v, wide.dtype) for v in (x, *parameters)), fp8=fp8)
            np.copyto(out, wide, casting="unsafe")
        return
    weights, biases = split_parameters(parameters)
    count, start = numel(x.shape[:-1]), 0
    matmul_into = multiply_quantized if is_wide_enough(fp8, out.shape[-1]) else multiply
    rows, target = x.reshape(count, x.shape[-1]), out.reshape(count, out.shape[-1])
    for i, weight in enumerate(weights):
        part = target[:, start : start + weight.shape[0]]
        matmul_into(rows, weight.T, part)
        if biases:
            np.add(part, biases[i], out=part)
        start += weight.shape[0]
