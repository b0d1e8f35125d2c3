"""Layer functions under the names of torch.nn.functional, and fused ones for language models.

`genesis.nn.functional` exports them, together with the losses and the activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from genesis.autograd import apply
from genesis.autograd.record import in_fp32
from genesis.dtypes import finfo, float32, float64
from genesis.errors import ShapeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions.create import arange, zeros
from genesis.functions.linalg import LowRankPairs, with_pairs
from genesis.functions.surface import layer_function, public
from genesis.nn.distance_functions import embedded, limit_rows, padding_row
from genesis.ops import activation as activation_ops
from genesis.ops import attention as attention_ops
from genesis.ops import index as index_ops
from genesis.ops import norm as norm_ops
from genesis.ops import norm_linear as norm_linear_ops
from genesis.ops import rope as rope_ops
from genesis.ops import swiglu as swiglu_ops
from genesis.tensor import Tensor

# --- Activations ------------------------------------------------------------------------------------------------------


@layer_function
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x·Φ(x), where Φ is the normal distribution function. `approximate="tanh"` uses the tanh approximation."""
    if approximate == "tanh":
        return pw.gelu_tanh(input)  # type: ignore[no-any-return]
    if approximate != "none":
        raise UsageError(f"approximate is {approximate!r}", next='use "none" or "tanh"')
    return apply(activation_ops.gelu, input)  # type: ignore[no-any-return]


@layer_function
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate)·up, fused. Without `up`, `gate` holds gate and up concatenated in the last dimension."""
    if up is None:
        return apply(swiglu_ops.swiglu_packed, gate)  # type: ignore[no-any-return]
    return apply(activation_ops.swiglu, gate, up)  # type: ignore[no-any-return]


@layer_function
def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate)·up, fused, with the tanh form of GELU. Gate and up are concatenated in the last dimension."""
    return apply(swiglu_ops.geglu_packed, gate_up)  # type: ignore[no-any-return]


# --- Normalization ----------------------------------------------------------------------------------------------------


def _as_rows(
    name: str, x: Tensor, normalized_shape: int | Sequence[int], *affine: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Merge the dimensions to normalize over into one last dimension, in x and in the norm's weight and bias."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    count = len(shape)
    if not count or x.shape[-count:] != shape:
        raise ShapeError(
            f"{name} over {shape} got an input of shape {x.shape}", next="pass the sizes of its last dimensions"
        )
    for each in affine:
        if each is not None and each.shape != shape:
            raise ShapeError(f"{name} over {shape} got a weight or bias of shape {each.shape}")
    if count == 1:
        return x, list(affine)
    return x.flatten(-count), [None if each is None else each.flatten() for each in affine]


_EPS32, _EPS64 = finfo(float32).eps, finfo(float64).eps


def _filled(like: Tensor, value: float) -> Tensor:
    """Return the default of a weight or bias."""
    return zeros(like.shape[-1], dtype=like.dtype, device=like.device).fill_(value)  # type: ignore[no-any-return]


@public(method=False, nn=True)
def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x / √(mean(x²) + eps)·weight over the last dimensions of x = `input`, with statistics in float32 or wider.

    Args:
        normalized_shape: sizes of the last dimensions (usually only one), and shape of the weight.
        eps: machine epsilon of the computing type by default: float32 for 2-byte floats, as in torch.
    """
    rows, (weight,) = _as_rows("rms_norm", input, normalized_shape, weight)
    (rows,) = in_fp32(rows)
    if eps is None:
        eps = _EPS64 if rows.dtype is float64 else _EPS32
    y = apply(norm_ops.rms_norm, rows, _filled(rows, 1) if weight is None else weight, eps=eps)[0]
    return y if y.shape == input.shape else y.reshape(input.shape)  # type: ignore[no-any-return]


@layer_function
def norm_linear(
    x: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    eps: float,
    fp8: int = 0,
    low_rank: LowRankPairs | None = None,
) -> Tensor:
    """`packed_linear(rms_norm(x), weights, biases)`. Backward recomputes the normalized x instead of keeping it.

    Args:
        scale: weight of the norm.
        weights, biases, fp8, low_rank: as for `packed_linear`.
    """
    attrs: dict[str, Any] = {"eps": eps, "fp8": fp8} if fp8 else {"eps": eps}
    pairs: tuple[Any, ...] = ()
    if low_rank is not None:
        pairs, attrs["low_rank"] = with_pairs(low_rank, weights, x.numel())
    return apply(norm_linear_ops.norm_linear, x, scale, *weights, *biases, *pairs, **attrs)[0]  # type: ignore[no-any-return]


@layer_function
def norm_mlp(
    x: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    down: Tensor,
    down_bias: Tensor | None = None,
    *,
    eps: float,
    keep: bool = True,
    fp8: int = 0,
    low_rank: LowRankPairs | None = None,
    down_low_rank: LowRankPairs | None = None,
) -> Tensor:
    """`x + linear(silu(gate)·up, down, down_bias)`, where gate and up are linear layers of `rms_norm(x)`.

    Args:
        scale: weight of the norm.
        weights, biases: gate and up, each `[F, in]`, with biases `[F]` or none.
        down, down_bias: output layer, `[in, F]` with a bias `[in]` or None.
        keep: keep the results of the norm and of SwiGLU for backward, which recomputes them otherwise.
        fp8: as for `packed_linear`.
        low_rank, down_low_rank: low-rank pairs of gate and up, and of down.
    """
    attrs: dict[str, Any] = {"eps": eps, "keep": keep, **({"fp8": fp8} if fp8 else {})}
    inputs = (x, scale, down, down_bias, *weights, *biases)
    if low_rank is not None:
        pairs, attrs["low_rank"] = with_pairs(low_rank, weights, x.numel())
        inputs = (*inputs, *pairs)
    if down_low_rank is not None:
        rows = x.numel() // max(x.shape[-1], 1)
        pairs, attrs["down_low_rank"] = with_pairs(down_low_rank, (down,), rows * down.shape[-1])
        inputs = (*inputs, *pairs)
    return apply(norm_linear_ops.norm_mlp, *inputs, **attrs)[0]  # type: ignore[no-any-return]


@public(method=False, nn=True)
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias over the last dimensions of x = `input`; float32 statistics or wider.

    Args:
        normalized_shape: sizes of the last dimensions (usually only one), and shape of weight and bias.
    """
    rows, (weight, bias) = _as_rows("layer_norm", input, normalized_shape, weight, bias)
    weight = _filled(rows, 1) if weight is None else weight
    y = apply(norm_ops.layer_norm, rows, weight, _filled(rows, 0) if bias is None else bias, eps=eps)[0]
    return y if y.shape == input.shape else y.reshape(input.shape)  # type: ignore[no-any-return]


# --- Embedding, positions ---------------------------------------------------------------------------------------------


@layer_function
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of `weight` `[rows, width]` by integer ids of any shape. Row `padding_idx` gets no gradient.

    Args:
        max_norm, norm_type: scale the rows that are used to this norm first, in place.
        scale_grad_by_freq: divide a row's gradient by the number of its ids.
        sparse: no effect; the gradient is dense.
    """
    if padding_idx is None and max_norm is None and not scale_grad_by_freq:
        return apply(index_ops.embedding, input, weight)  # type: ignore[no-any-return]
    padding = padding_row(padding_idx, weight)
    if max_norm is not None:
        limit_rows(input, weight, max_norm, norm_type)
    return embedded(input, weight, padding, scale_grad_by_freq)


@layer_function
def rope_table(
    positions: Tensor, size: int, theta: float = 10_000.0, *, inverse_frequencies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles position·theta^(-2i/size) for `rope`: float32 `[..., size/2]`.

    Args:
        positions: integers `[T]` or `[B, T]`.
        size: size of a head, even.
        theta: base of the wavelengths.
        inverse_frequencies: angles per position `[size/2]`, which replace theta^(-2i/size) in scaled variants.
    """
    if size % 2:
        raise ShapeError(f"rope_table: the head size {size} is odd", next="use an even head size")
    if inverse_frequencies is None:
        exponents = arange(0, size, 2, dtype="float64", device=positions.device) / size
        inverse_frequencies = pw.exp(exponents * -math.log(theta))
    angles = positions.to("float64").unsqueeze(-1) * inverse_frequencies.to("float64")
    return pw.cos(angles).to("float32"), pw.sin(angles).to("float32")


@layer_function
def rope(x: Tensor, cos: Tensor, sin: Tensor, heads: int | None = None) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of each head by their position's angles (Su et al., 2021; half-split layout).

    Args:
        x: queries or keys `[B, T, heads, D]`.
        cos, sin: tables `[T, D/2]` or `[B, T, D/2]` from `rope_table`.
        heads: number of leading heads to rotate; all by default.
    """
    attrs: dict[str, Any] = {} if heads is None else {"heads": heads}
    return apply(rope_ops.rope, x, cos, sin, **attrs)  # type: ignore[no-any-return]


@layer_function
def norm_rope(
    x: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, *, heads: int, key_heads: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Apply `rope(rms_norm(x))` to the queries and keys in x, and leave its remaining heads unchanged.

    Args:
        x: `[B, T, heads + key_heads + others, D]`: query heads, key heads, then the others.
        query_weight, key_weight: weights `[D]` of the two norms.
        cos, sin: tables `[T, D/2]` or `[B, T, D/2]` from `rope_table`.
    """
    attrs: dict[str, Any] = {"heads": heads, "key_heads": key_heads, "eps": eps}
    return apply(rope_ops.norm_rope, x, query_weight, key_weight, cos, sin, **attrs)[0]  # type: ignore[no-any-return]


# --- Attention --------------------------------------------------------------------------------------------------------


@layer_function
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None = None,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ)·v in the layout of language models, without materializing the score matrix.

    Args:
        q: queries `[B, T, Hq, D]`; query i has key position i + S - T (a KV cache holds the first S - T keys).
        k, v: keys and values `[B, S, Hkv, D]`; Hq is a multiple of Hkv, and query heads share key heads in groups.
        starts: int `[B, T]`, the first key position that each query sees (the start of its document). `[B, T, 3]` also
            has the begin and the end of a range of earlier keys that the query skips, as a branch of a document skips
            another branch.
        causal: hide keys after the query.
        window: number of keys that a query sees, up to its own position and without skipped ones; 0 means all.
        scale: factor of the scores; 1/√D by default.
    """
    inputs = (q, k, v) if starts is None else (q, k, v, starts)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return apply(attention_ops.attention, *inputs, scale=factor, causal=causal, window=window)[0]  # type: ignore[no-any-return]


@layer_function
def attention_packed(
    qkv: Tensor,
    heads: int,
    key_heads: int,
    starts: Tensor | None = None,
    *,
    tables: tuple[Tensor, Tensor] | None = None,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """`attention` of packed queries, keys and values: qkv `[B, T, Hq + 2·Hkv, D]` gives `[B, T, Hq, D]`.

    The gradient of qkv has the same layout. Other arguments are as for `attention`.

    Args:
        qkv: query heads, then key heads, then value heads.
        tables: cos and sin, `[T, D/2]` or `[B, T, D/2]`, from `rope_table`. Queries and keys are rotated first, as by
            `rope(qkv, cos, sin, heads + key_heads)`, and inverse RoPE of their gradients is fused.
    """
    inputs: tuple[Tensor | None, ...] = (qkv,) if starts is None else (qkv, starts)
    if tables is not None:
        inputs = (qkv, starts, *tables)
    factor = 1 / math.sqrt(qkv.shape[-1]) if scale is None else scale
    how: dict[str, Any] = {"scale": factor, "causal": causal, "window": window}
    return apply(attention_ops.attention_packed, *inputs, heads=heads, key_heads=key_heads, **how)[0]  # type: ignore[no-any-return]
