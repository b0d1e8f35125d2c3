"""Linear layers: one weight or several on one input, with bias and residual in the product's epilogue.

In the formulas below g is the gradient of the result. All take low-rank pairs, whose formulas are in low_rank.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import scratch
from genesis.errors import ShapeError
from genesis.op import Context, Spec, op
from genesis.ops.fp8 import check_quantizable, is_wide_enough, multiply_quantized
from genesis.ops.linalg import matmul_flops, multiply, same_type
from genesis.ops.linear_gradients import bias_gradients, input_gradient, joined, weight_gradients
from genesis.ops.low_rank import (
    LowRank,
    PairsBackward,
    add_low_rank,
    check_low_rank,
    join_pairs,
    pairs_backward,
    split_pairs,
)
from genesis.ops.shape import reshaped
from genesis.ops.sweep import as_type, is_narrow
from genesis.shapes import numel

__all__ = ["check_linear", "join_parameters", "linear", "packed_gradients", "packed_linear", "split_parameters"]

Grads = tuple[Array | None, ...]
Out = np.ndarray | tuple[np.ndarray, ...]


def low_rank_flops(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    """Those of x·Wᵀ, and of x·Aᵀ and u·Bᵀ."""
    low_rank, x = attrs.get("low_rank"), inputs[0]
    rows, pairs = x.size // max(x.shape[-1], 1), () if low_rank is None else low_rank.pairs
    more = sum(2 * rows * p.rank * (x.shape[-1] + p.stop - p.start) for p in pairs)
    return matmul_flops(inputs, outputs, attrs) + more


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
    x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None, *pairs: Array, fp8: int = 0,
    low_rank: LowRank | None = None,
) -> Spec | tuple[Spec, ...]:  # fmt: skip
    _, operands = split_pairs(pairs, low_rank)
    y = check_linear("linear", x, (weight,), () if bias is None else (bias,), residual, fp8)
    return with_pairs(y, check_low_rank("linear", x, weight.shape[0], operands, low_rank))


def with_pairs(y: Spec, more: tuple[Spec, ...]) -> Spec | tuple[Spec, ...]:
    """The specs of an op's outputs: `more` are those of the pairs."""
    return (y, *more) if more else y


def _linear_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """dx = g·W, dW = gᵀ·x over all rows, db = sum of g over all rows, dresidual = g."""
    x, weight = ctx.inputs[:2]
    pairs = pairs_backward(ctx, g, ctx.attrs.get("low_rank"), ctx.outputs[1:], ctx.needs[0])
    rows = numel(x.shape[:-1]) if x is not None else numel(g.shape[:-1])
    size = g.shape[-1:]
    found: list[Array | None] = [None] * len(ctx.inputs)
    if ctx.needs[1]:
        flat = reshaped(pairs.g, (rows, g.shape[-1]))
        (found[1],) = weight_gradients(ctx, (1,), flat, reshaped(x, (rows, x.shape[-1])), size)
    if len(found) > 2 and ctx.needs[2]:
        (found[2],) = bias_gradients(ctx, (2,), reshaped(g, (rows, g.shape[-1])), size)
    found[pairs.first :] = pairs.gradients(ctx, x)
    if ctx.needs[0]:
        found[0] = input_gradient(ctx, 0, pairs.g, (weight,), ctx.attrs.get("fp8", 0), pairs.term)
    if len(found) > 3 and ctx.needs[3]:
        found[3] = g
    return tuple(found)


def _linear_saves(needs: tuple[bool, ...]) -> tuple[int | str, ...]:
    """The weight for dx, x for dW and dA; the pairs, which lie in memory anyway, with u and z."""
    kept = tuple([i for i, need in ((0, needs[1] or any(needs[4:])), (1, needs[0])) if need])
    return (*kept, *range(4, len(needs)), "out1", "out2") if len(needs) > 4 else kept


def _linear_join(inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`Op.join` of the pairs."""
    if attrs.get("low_rank") is None:
        return inputs, attrs
    pairs, low_rank = join_pairs(inputs[4:], attrs["low_rank"])
    return (*inputs[:4], *pairs), {**attrs, "low_rank": low_rank}


@op(
    "linear",
    _linear_infer,
    vjp=_linear_vjp,
    saves=_linear_saves,
    auxiliary=(1, 2),
    flops=low_rank_flops,
    join=_linear_join,
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
        pairs: inputs of low-rank pairs; see low_rank.py, which says what more the op then gives.
        fp8: the fewest columns of a result that is multiplied in 8-bit floats, 0: none; see fp8.py.
        low_rank: the pairs.
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
    """The references of `linear` and `packed_linear` with low-rank pairs: y, u and, with c, z."""
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
            if len(out) > 2:  # norm_mlp finds it again
                np.copyto(out[2], wide.reshape(y.shape), casting="unsafe")
            wide *= as_type(operands.factors, wide.dtype)
        if biases:
            wide += np.concatenate([as_type(b, wide.dtype) for b in biases])
        if residual is not None:
            wide += as_type(residual, wide.dtype).reshape(wide.shape)
        np.copyto(y, wide.reshape(y.shape), casting="unsafe")


def split_parameters(parameters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Weights and biases of `w1 … wn, b1 … bn` or `w1 … wn`."""
    count = next((i for i, p in enumerate(parameters) if p.ndim != 2), len(parameters))
    return list(parameters[:count]), list(parameters[count:])


def join_parameters(first: int) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """`Op.join` of an op whose inputs from `first` on are weights and biases: one of each where all are neighbours.

    The pairs behind them are joined by themselves: those of `low_rank`, and of `down_low_rank`, which are the last.
    """

    def join(inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pairs: tuple[Any, ...] = ()
        for name in ("down_low_rank", "low_rank"):
            if (low_rank := attrs.get(name)) is not None:
                own, found = inputs[: -low_rank.inputs], inputs[-low_rank.inputs :]
                found, joint = join_pairs(found, low_rank)
                inputs, pairs, attrs = own, (*found, *pairs), {**attrs, name: joint}
        if not pairs:
            return join_plain(inputs, attrs)
        inputs, attrs = join_plain(inputs, attrs)
        return (*inputs, *pairs), attrs

    def join_plain(inputs: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def packed_gradients(ctx: Context, g: Array, first: int, x: Array | None, pairs: PairsBackward) -> list[Array | None]:
    """Gradients of the weights and biases from input `first` on, and of the pairs behind them.

    Args:
        g: the gradient of the result, `[..., Σ out]`.
        x: `[..., in]`, read where a weight or an A learns.
    """
    specs = [s for s in ctx.input_specs[first : pairs.first] if s is not None]
    count = sum(len(s.shape) == 2 for s in specs)
    sizes, rows = [s.shape[0] for s in specs[:count]], numel(g.shape[:-1])
    numbers = range(first, first + len(specs))
    found: list[Array | None] = [None] * count
    if any(ctx.needs[i] for i in numbers[:count]):
        assert x is not None
        flat = reshaped(pairs.g, (rows, g.shape[-1]))
        found = weight_gradients(ctx, numbers[:count], flat, reshaped(x, (rows, x.shape[-1])), sizes)
    if any(ctx.needs[i] for i in numbers[count:]):
        found += bias_gradients(ctx, numbers[count:], reshaped(g, (rows, g.shape[-1])), sizes)
    else:
        found += [None] * (len(specs) - count)
    return found + pairs.gradients(ctx, x)


def _packed_infer(
    x: Array, *parameters: Array, fp8: int = 0, low_rank: LowRank | None = None
) -> Spec | tuple[Spec, ...]:
    return check_packed("packed_linear", x, parameters, fp8, low_rank)


def check_packed(
    name: str, x: Array, parameters: Sequence[Array], fp8: int, low_rank: LowRank | None
) -> Spec | tuple[Spec, ...]:
    """The specs of the results of several layers on x."""
    own, operands = split_pairs(parameters, low_rank)
    weights, biases = split_parameters(own)
    if not weights:
        raise ShapeError(f"{name} takes one weight [out, in] or more")
    y = check_linear(name, x, weights, biases, fp8=fp8)
    return with_pairs(y, check_low_rank(name, x, y.shape[-1], operands, low_rank))


def _packed_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """As for `linear`: dx is the sum over the weights, each weight's gradient comes from its columns of g."""
    low_rank = ctx.attrs.get("low_rank")
    weights, _biases = split_parameters(split_pairs(ctx.inputs[1:], low_rank)[0])
    pairs = pairs_backward(ctx, g, low_rank, ctx.outputs[1:], ctx.needs[0])
    found = packed_gradients(ctx, g, 1, ctx.inputs[0], pairs)
    fp8 = ctx.attrs.get("fp8", 0)
    return input_gradient(ctx, 0, pairs.g, weights, fp8, pairs.term) if ctx.needs[0] else None, *found


def packed_saves(needs: tuple[bool, ...]) -> tuple[int | str, ...]:
    """What the gradients of `packed_linear` read: x, weights and biases (which lie in memory anyway), u and z."""
    return (*range(1 if not any(needs[1:]) else 0, len(needs)), "out1", "out2")


@op(
    "packed_linear",
    _packed_infer,
    vjp=_packed_vjp,
    saves=packed_saves,
    auxiliary=(1, 2),
    flops=low_rank_flops,
    join=join_parameters(1),
    autocast="low_precision",
    torch="torch.nn.functional.linear",
)
def packed_linear(
    out: Out, x: np.ndarray, *parameters: np.ndarray, fp8: int = 0, low_rank: LowRank | None = None
) -> None:
    """[x·W1ᵀ + b1, …, x·Wnᵀ + bn] side by side in the last dimension.

    Args:
        x: `[..., in]`.
        parameters: weights `[out_i, in]`, then for each its bias `[out_i]`, or none; then the inputs of low-rank pairs.
        fp8: as for `linear`, of all columns together.
        low_rank: the pairs; see low_rank.py, which says what more the op then gives.
    """
    if isinstance(out, tuple):
        own, _ = split_pairs(parameters, low_rank)
        _adapted(out, x, *split_parameters(own), None, parameters[len(own) :], low_rank, fp8)
        return
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
