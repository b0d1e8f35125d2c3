"""Functions of neural networks under the names of torch.nn.functional, and the fused ones that language
models need.

Made by `make stubs`: do not edit.
"""

from collections.abc import Sequence
from typing import Any

from genesis.functions.linalg import LowRankPairs
from genesis.functions.surface import Dims, DTypeLike, Sizes
from genesis.random import Generator
from genesis.tensor import Tensor

__all__ = [
    "alpha_dropout",
    "attention",
    "attention_packed",
    "batch_norm",
    "bilinear",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "celu",
    "celu_",
    "conv1d",
    "conv_transpose1d",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "dropout",
    "dropout1d",
    "elu",
    "elu_",
    "embedding",
    "embedding_bag",
    "feature_alpha_dropout",
    "gaussian_nll_loss",
    "geglu",
    "gelu",
    "glu",
    "group_norm",
    "gumbel_softmax",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "hardtanh_",
    "hinge_embedding_loss",
    "huber_loss",
    "instance_norm",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "leaky_relu_",
    "linear",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_loss_and_hits",
    "linear_token_log_probs",
    "log_softmax",
    "logsigmoid",
    "margin_ranking_loss",
    "mish",
    "mse_loss",
    "multi_head_attention_forward",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "norm_linear",
    "norm_mlp",
    "norm_rope",
    "normalize",
    "one_hot",
    "packed_linear",
    "pad",
    "pairwise_distance",
    "pdist",
    "poisson_nll_loss",
    "prelu",
    "relu",
    "relu6",
    "relu_",
    "rms_norm",
    "rope",
    "rope_table",
    "rrelu",
    "rrelu_",
    "scaled_dot_product_attention",
    "selu",
    "selu_",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softmin",
    "softplus",
    "softshrink",
    "softsign",
    "swiglu",
    "tanh",
    "tanhshrink",
    "threshold",
    "threshold_",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
]

def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Set elements to selu's lower limit with probability p, and scale and shift so that mean and variance
    stay."""

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

def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-05,
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias by channel of x = `input`, `[N, C, …]`."""

def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Σ_ij x1_i·weight_oij·x2_j + bias_o for inputs `[…, in1]` and `[…, in2]` and weight `[out, in1, in2]`."""

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

def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x where x > 0, else alpha·(e^(x/alpha) - 1)."""

def celu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    """Compute `celu` in place."""

def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """y[o, i] = Σ weight[o, c, k]·x[c, stride·i + dilation·k - padding] + bias[o]."""

def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The gradient of `conv1d` with respect to its input, as a layer: `[N, C, L]` to `[N, O, …]`."""

def cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """1 - cos(x1, x2) where the target is 1, max(0, cos(x1, x2) - margin) where it is -1, and 0 for others."""

def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-08) -> Tensor:
    """x1·x2 / (max(‖x1‖, eps)·max(‖x2‖, eps)) over `dim`; the operands broadcast."""

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
    """Cross entropy of logits against integer labels, or against class probabilities."""

def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Return x with elements set to 0 with probability `p` and the others divided by 1 - p; x itself if not
    training."""

def dropout1d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Set whole channels of `[C, L]` or `[N, C, L]` to 0 with probability p, and divide the others by 1 - p."""

def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x where x > 0, else alpha·(e^x - 1)."""

def elu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    """Compute `elu` in place."""

def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of `weight` `[rows, width]` by integer ids of any shape. Row `padding_idx` gets no gradient."""

def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Reduce the rows of `weight` that each bag of ids names: `[bags, width]`. An empty bag gives 0."""

def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """`alpha_dropout` of whole channels, `[N, C, …]`."""

def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-06, reduction: str = "mean"
) -> Tensor:
    """(log v + (input - target)²/v)/2 with v = max(var, eps), which gets var's gradient."""

def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate)·up, fused, with the tanh form of GELU. Gate and up are concatenated in the last dimension."""

def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x·Φ(x), where Φ is the normal distribution function. `approximate="tanh"` uses the tanh approximation."""

def glu(input: Tensor, dim: int = -1) -> Tensor:
    """a·sigmoid(b), where a and b are the halves of x along `dim` (Dauphin et al., 2017)."""

def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias with statistics of groups of channels (Wu & He, 2018)."""

def gumbel_softmax(
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """softmax((logits + Gumbel noise) / tau) over `dim` (Jang et al., 2017). `eps` has no effect, as in torch."""

def hardshrink(input: Tensor, lambd: float = 0.5, *, out: Tensor | None = None) -> Tensor:
    """x, and 0 within ±lambd."""

def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """x/6 + 1/2, limited to [0, 1]."""

def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·hardsigmoid(x) (Howard et al., 2019)."""

def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """x limited to [min_val, max_val]; the gradient is 0 at the limits and outside."""

def hardtanh_(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Compute `hardtanh` in place."""

def hinge_embedding_loss(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """x where the target is 1, max(0, margin - x) where it is -1; their sum for other targets."""

def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """z²/2 for z = |input - target| ≤ delta, else delta·(z - delta/2) (Huber, 1964)."""

def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-05,
) -> Tensor:
    """`batch_norm` with statistics of each channel of each sample; the running ones average over samples."""

def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Kullback-Leibler divergence t·(log t - x) of log-probabilities x = `input` from probabilities t =
    `target`."""

def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """|input - target|. The mean divides by the sum of `weight`, which has input's shape."""

def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """(x - mean) / √(var + eps)·weight + bias over the last dimensions of x = `input`; float32 statistics or
    wider."""

def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """x where x > 0, else negative_slope·x."""

def leaky_relu_(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Compute `leaky_relu` in place."""

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
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    shift: int = 0,
    num_targets: int | Tensor | None = None,
) -> Tensor:
    """`cross_entropy` of the logits input·linear_weightᵀ + linear_bias."""

def linear_distillation(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    shift: int = 0,
    num_targets: int | Tensor = 1,
) -> tuple[Tensor, Tensor]:
    """Return the divergence between a student and a teacher over the vocabulary, without logits, and three
    sums."""

def linear_loss_and_hits(input: Tensor, linear_weight: Tensor, target: Tensor, *, shift: int = 0) -> Tensor:
    """Return `[2]`: the summed loss of `linear_cross_entropy`, and how many targets are the likeliest class,
    the first one of several. There are no gradients."""

def linear_token_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    shift: int = 0,
) -> Tensor:
    """Return the log-probability of each target under softmax(input·linear_weightᵀ / temperature), without
    logits."""

def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DTypeLike = None) -> Tensor:
    """x - log Σ e^x over `dim`, after a cast to `dtype`. By default `dim` is 0 or 1, as in torch."""

def logsigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(sigmoid(x)), without overflow."""

def margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, -t·(x1 - x2) + margin): with t = 1, x1 should exceed x2; with t = -1, x2 should exceed x1."""

def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·tanh(log(1 + e^x)) (Misra, 2019)."""

def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """(input - target)². A `weight` is broadcast to the losses, and the mean divides by its sum."""

def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs `[T, B, E]` of multi-head attention, and its weights `[B, T, S]` or None."""

def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Σ_j w[label]·max(0, margin - x[label] + x[j])^p / C over the other classes j."""

def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """Σ max(0, 1 - (x[i] - x[j])) / C over the labels i of a row and the other classes j."""

def multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Mean over classes of -w·(t·log σ(x) + (1 - t)·log σ(-x)) for targets t in [0, 1] of input's shape."""

def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """-w[label]·x[label] for log-probabilities x = `input`; the mean divides by the sum of the w."""

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

def normalize(input: Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """x / max(‖x‖_p, eps) over `dim`."""

def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Vectors `[…, num_classes]` of int64 with a 1 at each label and 0 elsewhere."""

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

def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Return x with elements added; `pad` lists (before, after) from the last dimension on; negative widths
    crop."""

def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-06, keepdim: bool = False) -> Tensor:
    """‖x1 - x2 + eps‖_p over the last dimension; the operands broadcast."""

def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """‖x_i - x_j‖_p of all pairs of rows i < j of x = `input` `[N, M]`: `[N·(N-1)/2]`."""

def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    size_average: bool | None = None,
    eps: float = 1e-08,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """e^x - t·x with `log_input`, else x - t·log(x + eps). `full` adds log t!, by Stirling, where t > 1."""

def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """x where x > 0, else weight·x; `weight` has one element, or one for each channel (dimension 1)."""

def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(x, 0)."""

def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x, 0), 6)."""

def relu_(input: Tensor) -> Tensor:
    """Compute `relu` in place."""

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

def rrelu(
    input: Tensor,
    lower: float = 0.125,
    upper: float = 0.3333333333333333,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """leaky_relu with a slope drawn for each element from [lower, upper]; their mean outside of training."""

def rrelu_(input: Tensor, lower: float = 0.125, upper: float = 0.3333333333333333, training: bool = False) -> Tensor:
    """Compute `rrelu` in place."""

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

def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """1.0507·elu(x, 1.6733), which keeps mean 0 and variance 1 (Klambauer et al., 2017)."""

def selu_(input: Tensor) -> Tensor:
    """Compute `selu` in place."""

def sigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / (1 + e^-x)."""

def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x·sigmoid(x)."""

def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """z²/(2·beta) for z = |input - target| < beta, else z - beta/2."""

def soft_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """log(1 + e^(-t·x)) for targets t = ±1."""

def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DTypeLike = None) -> Tensor:
    """e^(x - max) / Σ e^(x - max) over `dim`, after a cast to `dtype`. By default `dim` is 0 or 1, as in torch."""

def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DTypeLike = None) -> Tensor:
    """softmax(-x) over `dim`."""

def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0, *, out: Tensor | None = None) -> Tensor:
    """log(1 + e^(beta·x)) / beta; x itself where beta·x > threshold."""

def softshrink(input: Tensor, lambd: float = 0.5, *, out: Tensor | None = None) -> Tensor:
    """x moved towards 0 by lambd, and 0 within ±lambd."""

def softsign(input: Tensor) -> Tensor:
    """x / (1 + |x|)."""

def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate)·up, fused. Without `up`, `gate` holds gate and up concatenated in the last dimension."""

def tanh(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The hyperbolic tangent."""

def tanhshrink(input: Tensor) -> Tensor:
    """x - tanh(x)."""

def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """x where x > threshold, else value."""

def threshold_(input: Tensor, threshold: float, value: float) -> Tensor:
    """Compute `threshold` in place."""

def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-06,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, d(anchor, positive) - d(anchor, negative) + margin) with p-norm distances d."""

def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Any | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """`triplet_margin_loss` with a distance of the caller, `pairwise_distance` by default."""
