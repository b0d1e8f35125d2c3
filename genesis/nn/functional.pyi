"""Functions of neural networks under the names of torch.nn.functional, and the fused ones that language
models need.

Made by `make stubs`: do not edit.
"""

from collections.abc import Sequence

from genesis.functions.linalg import LowRankPairs
from genesis.functions.surface import DTypeLike
from genesis.random import Generator
from genesis.tensor import Tensor

__all__ = [
    "attention",
    "attention_packed",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "dropout",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "mse_loss",
    "norm_linear",
    "norm_mlp",
    "norm_rope",
    "packed_linear",
    "pad",
    "relu",
    "rms_norm",
    "rope",
    "rope_table",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "swiglu",
    "tanh",
]

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
    """softmax(scale·q·kᵀ)·v in the layout of language models, without materializing the score matrix."""

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
    """`attention` of packed queries, keys and values: qkv `[B, T, Hq + 2·Hkv, D]` gives `[B, T, Hq, D]`."""

def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """-(t·log p + (1-t)·log(1-p)) for probabilities p = `input`. Logarithms are clamped at -100, as in torch."""

def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Binary cross entropy of logits x = `input`: (1-t)·x + (1 + (w-1)·t)·log(1 + e^-x), without overflow."""

def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of logits against integer labels."""

def dropout(input: Tensor, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """Return x with elements set to 0 with probability `p` and the others divided by 1 - p; x itself if not
    training."""

def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of `weight` `[rows, width]` by integer ids of any shape. Row `padding_idx` gets no gradient."""

def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate)·up, fused, with the tanh form of GELU. Gate and up are concatenated in the last dimension."""

def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x·Φ(x), where Φ is the normal distribution function. `approximate="tanh"` uses the tanh approximation."""

def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias over the last dimensions of x = `input`; float32 statistics or
    wider."""

def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    fp8: int = 0,
    low_rank: LowRankPairs | None = None,
) -> Tensor:
    """Return x·Wᵀ + b + residual for x `[..., in]`, weight `[out, in]`, bias `[out]` and residual `[..., out]`."""

def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    shift: int = 0,
    num_targets: int | Tensor | None = None,
) -> Tensor:
    """Cross entropy of the logits x·weightᵀ, computed in chunks. Forward also computes the gradients."""

def log_softmax(input: Tensor, dim: int, *, dtype: DTypeLike = None) -> Tensor:
    """Return log softmax(x) along `dim`, computed without the softmax; `dtype` casts x first."""

def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """(input - target)². A `weight` is broadcast to the losses, and the mean divides by its sum."""

def norm_linear(
    input: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    eps: float,
    fp8: int = 0,
    low_rank: LowRankPairs | None = None,
) -> Tensor:
    """`packed_linear(rms_norm(x), weights, biases)`. Backward recomputes the normalized x instead of keeping
    it."""

def norm_mlp(
    input: Tensor,
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
    """`x + linear(silu(gate)·up, down, down_bias)`, where gate and up are linear layers of `rms_norm(x)`."""

def norm_rope(
    input: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    key_heads: int,
    eps: float,
) -> Tensor:
    """Apply `rope(rms_norm(x))` to the queries and keys in x, and leave its remaining heads unchanged."""

def packed_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    fp8: int = 0,
    low_rank: LowRankPairs | None = None,
) -> Tensor:
    """Return the results of several linear layers on one input x `[..., in]`, concatenated in the last
    dimension."""

def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Return x padded with `value`; `pad` lists (before, after) from the last dimension on; negative widths
    crop."""

def relu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """max(x, 0)."""

def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x / √(mean(x²) + eps)·weight over the last dimensions of x = `input`, with statistics in float32 or
    wider."""

def rope(input: Tensor, cos: Tensor, sin: Tensor, heads: int | None = None) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of each head by their position's angles (Su et al., 2021; half-split
    layout)."""

def rope_table(
    positions: Tensor, size: int, theta: float = 10000.0, *, inverse_frequencies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles position·theta^(-2i/size) for `rope`: float32 `[..., size/2]`."""

def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of this name: q `[B, Hq, T, D]`, k and v `[B, Hkv, S, D]`, dimensions before T optional."""

def sigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / (1 + e^-x)."""

def silu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x·sigmoid(x)."""

def softmax(input: Tensor, dim: int, *, dtype: DTypeLike = None) -> Tensor:
    """Return e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""

def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate)·up, fused. Without `up`, `gate` holds gate and up concatenated in the last dimension."""

def tanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic tangent."""
