"""RMSNorm fused with the linear layers that read its result: alone, and in a gated MLP with its residual.

The norm's result is not saved: backward recomputes it from x and 1/rms. The MLP, x + down(silu(gate)·up), saves either
all that backward reads, or only gate and up, from which backward recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.errors import ShapeError
from genesis.op import Context, Grads, op
from genesis.ops.blocks import as_type, is_narrow
from genesis.ops.elementwise import cast, div, mul, sub
from genesis.ops.linear import (
    PairsBackward,
    bias_gradients,
    check_linear,
    check_packed,
    input_gradient,
    join_parameters,
    linear,
    low_rank_flops,
    own_parameters,
    packed_gradients,
    packed_linear,
    pairs_backward,
    split_parameters,
    weight_gradients,
)
from genesis.ops.low_rank import LowRank, check_low_rank, split_pairs
from genesis.ops.norm import check_norm, norm_gradients, rms_norm, rms_norm_backward, rms_norm_scale, statistics_type
from genesis.ops.reduce import sum_to_shape
from genesis.ops.shape import window
from genesis.ops.swiglu import swiglu_linear_backward, swiglu_packed, swiglu_packed_backward
from genesis.shapes import Shape


def _infer(
    x: Array, scale: Array, *parameters: Array, eps: float, fp8: int = 0, low_rank: LowRank | None = None
) -> tuple[Spec, ...]:
    specs = check_packed("norm_linear", x, parameters, fp8, low_rank)
    check_norm("norm_linear", x, scale)
    y, *more = (specs,) if isinstance(specs, Spec) else specs
    return y, Spec(x.shape[:-1], statistics_type(x.dtype)), *more


def _vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """The gradients of `packed_linear` at n = rms_norm(x), then the gradients of the norm at x for dn = g·W."""
    x, scale, *parameters = ctx.inputs
    rstd, *kept = ctx.outputs[1:]
    assert rstd is not None
    low_rank, needs_norm = ctx.attrs.get("low_rank"), ctx.needs[0] or ctx.needs[1]
    weights, _biases = split_parameters(own_parameters(parameters, low_rank))
    pairs = pairs_backward(ctx, g, low_rank, kept)
    learns = any(ctx.needs[2 : 2 + len(weights)]) or pairs.reads_input(ctx)
    if not needs_norm:
        normed = rms_norm_scale(x, scale, rstd) if learns else None
        return None, None, *packed_gradients(ctx, g, 2, normed, pairs)
    dn = input_gradient(None, 0, g, pairs.scaled(weights), ctx.attrs.get("fp8", 0), pairs.term)
    dx, dscale, *result = norm_gradients(ctx, rms_norm_backward, dn, x, scale, rstd, count=2, with_result=learns)
    del dn
    return dx, dscale, *packed_gradients(ctx, g, 2, result[0] if result else None, pairs)


@op(
    "norm_linear",
    _infer,
    vjp=_vjp,
    saves=lambda needs: (*range(len(needs)), "out1", "out2", "out3"),
    auxiliary=(1, 2, 3),
    flops=lambda i, o, a: low_rank_flops(i, o, a) + 4 * i[0].size,
    join=join_parameters(2),
    autocast="low_precision",
)
def norm_linear(
    out: tuple[np.ndarray, ...], x: np.ndarray, scale: np.ndarray, *parameters: np.ndarray, eps: float, fp8: int = 0,
    low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    """`packed_linear(rms_norm(x), …)`; the second output is r = 1 / sqrt(mean(x²) + eps), without gradient.

    Args:
        x: `[..., in]`.
        scale: the norm's weight `[in]`.
        parameters: as for `packed_linear`, whose additional outputs for low-rank pairs come last.
        eps: the norm's epsilon.
        fp8: as for `packed_linear`.
        low_rank: as for `packed_linear`.
    """
    y, rstd, *more = out
    with scratch(x.shape, np.float32 if is_narrow(x.dtype) else x.dtype) as normed:
        rms_norm.reference((normed, rstd), x, scale, eps)
        packed_linear.reference((y, *more) if more else y, normed, *parameters, fp8=fp8, low_rank=low_rank)


# --- The gated MLP ----------------------------------------------------------------------------------------------------


FIRST = 4  # first input of the weights and biases of gate and up


def _mlp_infer(
    x: Array, scale: Array, down: Array, down_bias: Array | None, *parameters: Array, eps: float, keep: bool = False,
    fp8: int = 0, low_rank: LowRank | None = None, down_low_rank: LowRank | None = None,
) -> tuple[Spec, ...]:  # fmt: skip
    others = own_parameters(parameters, down_low_rank)
    weights, biases = split_parameters(own_parameters(others, low_rank))
    sizes = [w.shape[0] for w in weights]
    if len(weights) not in (1, 2) or sizes[0] != sizes[-1] or sum(sizes) % 2:
        raise ShapeError(
            "norm_mlp takes weights of gate and up, both [F, in], or one [2F, in];"
            f" got {' and '.join(str(w.shape) for w in weights) or 'none'}"
        )
    check_norm("norm_mlp", x, scale)
    gate_up = check_linear("norm_mlp", x, weights, biases, fp8=fp8)
    h = Spec((*x.shape[:-1], gate_up.shape[-1] // 2), x.dtype)
    like = Array(x.storage, h.shape, h.shape, h.dtype, x.device)  # provides only shape and dtype
    y = check_linear("norm_mlp", like, (down,), () if down_bias is None else (down_bias,), x, fp8)
    kept = (x.spec, h) if keep else ()
    of_gate_up: tuple[Spec, ...] = ()
    of_down: tuple[Spec, ...] = ()
    if low_rank is not None:
        of_gate_up = check_low_rank("norm_mlp", x, gate_up.shape[-1], split_pairs(others, low_rank)[1], low_rank)[:1]
    if down_low_rank is not None:
        at_down = split_pairs(parameters, down_low_rank)[1]
        of_down = check_low_rank("norm_mlp", like, down.shape[0], at_down, down_low_rank)
    return y, Spec(x.shape[:-1], statistics_type(x.dtype)), gate_up, *kept, *of_gate_up, *of_down


# --- Backward ---------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """The saved outputs of a call, and the position of its pairs' inputs.

    Attributes:
        rstd: 1/rms.
        gate_up: gate and up.
        normed: the norm's result, if saved.
        h: silu(gate)·up, if saved.
        u: u of the pairs of gate and up, if any.
        of_down: u and, with c, z of down's pairs.
        end: end of the inputs of gate's and up's pairs, which down's follow.
    """

    rstd: Array
    gate_up: Array
    normed: Array | None
    h: Array | None
    u: Array | None
    of_down: tuple[Array | None, ...]
    end: int


def _kept(ctx: Context) -> _Kept:
    _, rstd, gate_up, *rest = ctx.outputs
    assert rstd is not None and gate_up is not None
    normed = h = u = None
    if ctx.attrs.get("keep", False):
        normed, h, *rest = rest
    if ctx.attrs.get("low_rank") is not None:
        u, *rest = rest
    down = ctx.attrs.get("down_low_rank")
    return _Kept(rstd, gate_up, normed, h, u, tuple(rest), len(ctx.inputs) - (0 if down is None else down.inputs))


def _at_down(ctx: Context, g: Array, kept: _Kept) -> tuple[Array | None, list[Array | None], list[Array | None]]:
    """Return the gradients of gate and up (if needed), of down's weight and bias, and of down's pairs."""
    down, gate_up, h = ctx.inputs[2], kept.gate_up, kept.h
    d, needs_d, fp8 = None, any((*ctx.needs[:2], *ctx.needs[FIRST : kept.end])), ctx.attrs.get("fp8", 0)
    pairs = pairs_backward(ctx, g, ctx.attrs.get("down_low_rank"), kept.of_down)
    reads_h = ctx.needs[2] or pairs.reads_input(ctx)

    def at_gate_up(with_result: bool) -> Any:
        if pairs.term is None or pairs.term.noise is None:
            more = () if pairs.term is None else (pairs.term.v, *pairs.term.a)
            return swiglu_linear_backward(g, *pairs.scaled((down,)), gate_up, *more, with_result=with_result, fp8=fp8)
        dh = input_gradient(None, 0, g, pairs.scaled((down,)), fp8, pairs.term)
        return swiglu_packed_backward(dh, gate_up, with_result=with_result)

    # Gradient of gate and up first if it also recomputes h for the gradients of down.
    if needs_d and reads_h and h is None:
        d, h = at_gate_up(True)
    # Gradients of down; h is recomputed if necessary.
    grads: list[Array | None] = [None, None]
    if reads_h:
        h = swiglu_packed(gate_up) if h is None else h
    if ctx.needs[2]:
        assert h is not None
        (grads[0],) = weight_gradients(ctx, (2,), pairs.of_product(), h, g.shape[-1:])
    if ctx.needs[3]:
        (grads[1],) = bias_gradients(ctx, (3,), g, g.shape[-1:])
    of_pairs = pairs.gradients(ctx, h)
    if needs_d and d is None:
        d = at_gate_up(False)
    return d, grads, of_pairs


def _at_gate_up(ctx: Context, d: Array, kept: _Kept, biases: list[Array]) -> PairsBackward:
    """Return the backward values of gate's and up's pairs. With c, z is not saved but computed as (gate_up - b) / c."""
    low_rank = ctx.attrs.get("low_rank")
    pairs = pairs_backward(ctx, d, low_rank, (kept.u, kept.gate_up), kept.end, is_result=True)
    if pairs.factors is None or not biases:
        return pairs
    assert pairs.c is not None
    factors, sums, kind, start = pairs.factors, sum_to_shape(d, shape=d.shape[-1:]), pairs.factors.dtype, 0
    for bias in biases:
        part, total, c = (window(x, start, start + bias.size) for x in (factors, sums, pairs.c))
        more = mul(cast(bias, dtype=kind), cast(total, dtype=kind))
        sub(part, div(more, cast(c, dtype=kind)), out=part)
        start += bias.size
    return pairs


def _mlp_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """The gradients of `linear` at h = silu(gate)·up, of SwiGLU, of `packed_linear` at n = rms_norm(x), of the norm.

    The residual's gradient, g, is added to the norm's.
    """
    kept = _kept(ctx)
    x, scale, _, _, *parameters = ctx.inputs[: kept.end]
    d, grads, of_down = _at_down(ctx, g, kept)
    if d is None:
        return None, None, *grads, *[None] * len(parameters), *of_down
    needs_norm, normed, low_rank = ctx.needs[0] or ctx.needs[1], kept.normed, ctx.attrs.get("low_rank")
    weights, biases = split_parameters(own_parameters(parameters, low_rank))
    pairs = _at_gate_up(ctx, d, kept, biases)
    learns = any(ctx.needs[FIRST : FIRST + len(weights)]) or pairs.reads_input(ctx)
    if normed is None and learns and not needs_norm:
        normed = rms_norm_scale(x, scale, kept.rstd)
    if normed is not None or not learns:
        grads += packed_gradients(ctx, d, FIRST, normed, pairs)
    if not needs_norm:
        return None, None, *grads, *of_down
    recomputes = normed is None and learns
    dn = input_gradient(None, 0, d, pairs.scaled(weights), ctx.attrs.get("fp8", 0), pairs.term)
    backward = norm_gradients(ctx, rms_norm_backward, dn, x, scale, kept.rstd, count=2, plus=g, with_result=recomputes)
    dx, dscale, *result = backward
    if recomputes:
        grads += packed_gradients(ctx, d, FIRST, result[0], pairs)
    return dx, dscale, *grads, *of_down


def _mlp_saves(needs: tuple[bool, ...]) -> tuple[int | str, ...]:
    """Save x, the weights (in memory anyway), 1/rms, gate and up, and outputs of pairs.

    Also n and h, if a weight or a pair that reads them is trained.
    """
    kept = [name for name, need in (("out3", any(needs[FIRST:])), ("out4", any(needs[2:]))) if need]
    return (*range(len(needs)), "out1", "out2", *kept, "out5", "out6", "out7")


def _mlp_flops(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    x, gate_up = inputs[0], outputs[2]
    width, half = x.shape[-1], gate_up.shape[-1] // 2
    rows, more = x.size // max(width, 1), 0
    for name, size in (("low_rank", width), ("down_low_rank", half)):
        more += sum(2 * rows * p.rank * (size + p.stop - p.start) for p in getattr(attrs.get(name), "pairs", ()))
    return int(4 * x.size + gate_up.size * (6 * width + 7) // 2) + more


@op(
    "norm_mlp",
    _mlp_infer,
    vjp=_mlp_vjp,
    saves=_mlp_saves,
    auxiliary=tuple(range(1, 8)),
    flops=_mlp_flops,
    join=join_parameters(FIRST),
    autocast="low_precision",
)
def norm_mlp(
    out: tuple[np.ndarray, ...], x: np.ndarray, scale: np.ndarray, down: np.ndarray, down_bias: np.ndarray | None,
    *parameters: np.ndarray, eps: float, keep: bool = False, fp8: int = 0, low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    """x + h·Wdᵀ + bd with h = silu(gate)·up, [gate | up] = n·[Wg | Wu]ᵀ + [bg | bu], n = rms_norm(x).

    Outputs without gradient: r = 1 / sqrt(mean(x²) + eps) and [gate | up] `[..., 2F]`; with `keep` n and h, so that
    backward need not recompute them; u of gate's and up's pairs; for down's pairs, the additional outputs of `linear`.

    Args:
        x: `[..., in]`.
        scale: the norm's weight `[in]`.
        down: `[in, F]`.
        down_bias: `[in]`.
        parameters: weights of gate and up `[F, in]`, or one `[2F, in]`; then one bias per weight, or none; then inputs
            of gate's and up's low-rank pairs; then of down's.
        eps: the norm's epsilon.
        keep: whether n and h are saved.
        fp8: as for `packed_linear` and `linear`, decided for each matmul separately.
        low_rank: pairs of gate and up; see low_rank.py.
        down_low_rank: pairs of down.
    """
    own = own_parameters(parameters, down_low_rank)
    count = 5 if keep else 3
    u, of_down = out[count : count + (low_rank is not None)], out[count + (low_rank is not None) :]
    with (
        _inner(out[3] if keep else None, x.shape, x) as n,
        _inner(out[2], out[2].shape, x) as gate_up,
        _inner(out[4] if keep else None, (*x.shape[:-1], out[2].shape[-1] // 2), x) as h,
    ):
        rms_norm.reference((n, out[1]), x, scale, eps)
        wide = (p if p.dtype == np.int64 else as_type(p, n.dtype) for p in own)
        packed_linear.reference((gate_up, *u) if u else gate_up, n, *wide, fp8=fp8, low_rank=low_rank)
        swiglu_packed.reference(h, gate_up)
        pairs = parameters[len(own) :]
        y = (out[0], *of_down) if of_down else out[0]
        linear.reference(y, h, down, down_bias, x, *pairs, fp8=fp8, low_rank=down_low_rank)


@contextmanager
def _inner(kept: np.ndarray | None, shape: Shape, x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield memory for a step's result in a dtype of 4 bytes or more; the result is copied to `kept` if necessary."""
    if kept is not None and not is_narrow(x.dtype):
        yield kept
        return
    with scratch(shape, np.float32 if is_narrow(x.dtype) else x.dtype) as workspace:
        yield workspace
        if kept is not None:
            np.copyto(kept, workspace, casting="unsafe")
