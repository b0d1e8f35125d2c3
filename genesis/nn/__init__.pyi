"""Neural-network building blocks under torch's names: modules, layers, losses, initialization, gradient
clipping.

Made by `make stubs`: do not edit.
"""

from typing import Any

from genesis.nn import functional as functional
from genesis.nn import init as init
from genesis.nn import utils as utils
from genesis.nn.attention import Attention as Attention
from genesis.nn.attention import KVCache as KVCache
from genesis.nn.attention import RoPE as RoPE
from genesis.nn.channel_layers import BatchNorm1d as BatchNorm1d
from genesis.nn.channel_layers import Bilinear as Bilinear
from genesis.nn.channel_layers import CircularPad1d as CircularPad1d
from genesis.nn.channel_layers import ConstantPad1d as ConstantPad1d
from genesis.nn.channel_layers import Conv1d as Conv1d
from genesis.nn.channel_layers import ConvTranspose1d as ConvTranspose1d
from genesis.nn.channel_layers import GroupNorm as GroupNorm
from genesis.nn.channel_layers import InstanceNorm1d as InstanceNorm1d
from genesis.nn.channel_layers import PReLU as PReLU
from genesis.nn.channel_layers import ReflectionPad1d as ReflectionPad1d
from genesis.nn.channel_layers import ReplicationPad1d as ReplicationPad1d
from genesis.nn.channel_layers import ZeroPad1d as ZeroPad1d
from genesis.nn.head_losses import AdaptiveLogSoftmaxWithLoss as AdaptiveLogSoftmaxWithLoss
from genesis.nn.head_losses import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from genesis.nn.layers import Dropout as Dropout
from genesis.nn.layers import Embedding as Embedding
from genesis.nn.layers import EmbeddingBag as EmbeddingBag
from genesis.nn.layers import Flatten as Flatten
from genesis.nn.layers import Hardtanh as Hardtanh
from genesis.nn.layers import Identity as Identity
from genesis.nn.layers import LayerNorm as LayerNorm
from genesis.nn.layers import LazyLinear as LazyLinear
from genesis.nn.layers import Linear as Linear
from genesis.nn.layers import RMSNorm as RMSNorm
from genesis.nn.layers import SwiGLU as SwiGLU
from genesis.nn.layers import Unflatten as Unflatten
from genesis.nn.lora import LoRALinear as LoRALinear
from genesis.nn.module import Module as Module
from genesis.nn.module import ModuleDict as ModuleDict
from genesis.nn.module import ModuleList as ModuleList
from genesis.nn.module import Sequential as Sequential
from genesis.nn.parameter import Buffer as Buffer
from genesis.nn.parameter import Parameter as Parameter
from genesis.nn.parameter_containers import ParameterDict as ParameterDict
from genesis.nn.parameter_containers import ParameterList as ParameterList
from genesis.nn.recurrent import GRU as GRU
from genesis.nn.recurrent import LSTM as LSTM
from genesis.nn.recurrent import RNN as RNN
from genesis.nn.recurrent import GRUCell as GRUCell
from genesis.nn.recurrent import LSTMCell as LSTMCell
from genesis.nn.recurrent import RNNBase as RNNBase
from genesis.nn.recurrent import RNNCell as RNNCell
from genesis.nn.recurrent import RNNCellBase as RNNCellBase
from genesis.nn.transformer import MultiheadAttention as MultiheadAttention
from genesis.nn.transformer import Transformer as Transformer
from genesis.nn.transformer import TransformerDecoder as TransformerDecoder
from genesis.nn.transformer import TransformerDecoderLayer as TransformerDecoderLayer
from genesis.nn.transformer import TransformerEncoder as TransformerEncoder
from genesis.nn.transformer import TransformerEncoderLayer as TransformerEncoderLayer
from genesis.tensor import Tensor

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "GRU",
    "LSTM",
    "RNN",
    "SELU",
    "AdaptiveLogSoftmaxWithLoss",
    "AlphaDropout",
    "Attention",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "Bilinear",
    "Buffer",
    "CircularPad1d",
    "ConstantPad1d",
    "Conv1d",
    "ConvTranspose1d",
    "CosineEmbeddingLoss",
    "CosineSimilarity",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Embedding",
    "EmbeddingBag",
    "FeatureAlphaDropout",
    "Flatten",
    "GRUCell",
    "GaussianNLLLoss",
    "GroupNorm",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "Identity",
    "InstanceNorm1d",
    "KLDivLoss",
    "KVCache",
    "L1Loss",
    "LSTMCell",
    "LayerNorm",
    "LazyLinear",
    "LeakyReLU",
    "Linear",
    "LinearCrossEntropyLoss",
    "LoRALinear",
    "LogSigmoid",
    "LogSoftmax",
    "MSELoss",
    "MarginRankingLoss",
    "Mish",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "MultiheadAttention",
    "NLLLoss",
    "PReLU",
    "PairwiseDistance",
    "Parameter",
    "ParameterDict",
    "ParameterList",
    "PoissonNLLLoss",
    "RMSNorm",
    "RNNBase",
    "RNNCell",
    "RNNCellBase",
    "RReLU",
    "ReLU",
    "ReLU6",
    "ReflectionPad1d",
    "ReplicationPad1d",
    "RoPE",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "Softmax",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "SwiGLU",
    "Tanh",
    "Tanhshrink",
    "Threshold",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
    "Unflatten",
    "ZeroPad1d",
    "functional",
    "init",
    "utils",
]

class AlphaDropout(Module):
    """Set elements to selu's lower limit with probability p, and scale and shift so that mean and variance
    stay."""
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class BCELoss(Module):
    """-(t·log p + (1-t)·log(1-p)) for probabilities p = `input`. Logarithms are clamped at -100, as in torch."""
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class BCEWithLogitsLoss(Module):
    """Binary cross entropy of logits x = `input`: (1-t)·x + (1 + (w-1)·t)·log(1 + e^-x), without overflow."""
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class CELU(Module):
    """x where x > 0, else alpha·(e^(x/alpha) - 1)."""
    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class CosineEmbeddingLoss(Module):
    """1 - cos(x1, x2) where the target is 1, max(0, cos(x1, x2) - margin) where it is -1, and 0 for others."""
    def __init__(
        self, margin: float = 0.0, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class CosineSimilarity(Module):
    """x1·x2 / (max(‖x1‖, eps)·max(‖x2‖, eps)) over `dim`; the operands broadcast."""
    def __init__(self, dim: int = 1, eps: float = 1e-08) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class CrossEntropyLoss(Module):
    """Cross entropy of logits against integer labels, or against class probabilities."""
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Dropout1d(Module):
    """Set whole channels of `[C, L]` or `[N, C, L]` to 0 with probability p, and divide the others by 1 - p."""
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class ELU(Module):
    """x where x > 0, else alpha·(e^x - 1)."""
    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class FeatureAlphaDropout(Module):
    """`alpha_dropout` of whole channels, `[N, C, …]`."""
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class GELU(Module):
    """x·Φ(x), where Φ is the normal distribution function. `approximate="tanh"` uses the tanh approximation."""
    def __init__(self, approximate: str = "none") -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class GLU(Module):
    """a·sigmoid(b), where a and b are the halves of x along `dim` (Dauphin et al., 2017)."""
    def __init__(self, dim: int = -1) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class GaussianNLLLoss(Module):
    """(log v + (input - target)²/v)/2 with v = max(var, eps), which gets var's gradient."""
    def __init__(self, *, full: bool = False, eps: float = 1e-06, reduction: str = "mean") -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Hardshrink(Module):
    """x, and 0 within ±lambd."""
    def __init__(self, lambd: float = 0.5) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Hardsigmoid(Module):
    """x/6 + 1/2, limited to [0, 1]."""
    def __init__(self, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Hardswish(Module):
    """x·hardsigmoid(x) (Howard et al., 2019)."""
    def __init__(self, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class HingeEmbeddingLoss(Module):
    """x where the target is 1, max(0, margin - x) where it is -1; their sum for other targets."""
    def __init__(
        self, margin: float = 1.0, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class HuberLoss(Module):
    """z²/2 for z = |input - target| ≤ delta, else delta·(z - delta/2) (Huber, 1964)."""
    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class KLDivLoss(Module):
    """Kullback-Leibler divergence t·(log t - x) of log-probabilities x = `input` from probabilities t =
    `target`."""
    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class L1Loss(Module):
    """|input - target|. The mean divides by the sum of `weight`, which has input's shape."""
    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class LeakyReLU(Module):
    """x where x > 0, else negative_slope·x."""
    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class LogSigmoid(Module):
    """log(sigmoid(x)), without overflow."""
    def __init__(self) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class LogSoftmax(Module):
    """x - log Σ e^x over `dim`, after a cast to `dtype`. By default `dim` is 0 or 1, as in torch."""
    def __init__(self, dim: int | None = None) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class MSELoss(Module):
    """(input - target)². A `weight` is broadcast to the losses, and the mean divides by its sum."""
    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class MarginRankingLoss(Module):
    """max(0, -t·(x1 - x2) + margin): with t = 1, x1 should exceed x2; with t = -1, x2 should exceed x1."""
    def __init__(
        self, margin: float = 0.0, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Mish(Module):
    """x·tanh(log(1 + e^x)) (Misra, 2019)."""
    def __init__(self, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class MultiLabelMarginLoss(Module):
    """Σ max(0, 1 - (x[i] - x[j])) / C over the labels i of a row and the other classes j."""
    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class MultiLabelSoftMarginLoss(Module):
    """Mean over classes of -w·(t·log σ(x) + (1 - t)·log σ(-x)) for targets t in [0, 1] of input's shape."""
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class MultiMarginLoss(Module):
    """Σ_j w[label]·max(0, margin - x[label] + x[j])^p / C over the other classes j."""
    def __init__(
        self,
        p: int = 1,
        margin: float = 1.0,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class NLLLoss(Module):
    """-w[label]·x[label] for log-probabilities x = `input`; the mean divides by the sum of the w."""
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class PairwiseDistance(Module):
    """‖x1 - x2 + eps‖_p over the last dimension; the operands broadcast."""
    def __init__(self, p: float = 2.0, eps: float = 1e-06, keepdim: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class PoissonNLLLoss(Module):
    """e^x - t·x with `log_input`, else x - t·log(x + eps). `full` adds log t!, by Stirling, where t > 1."""
    def __init__(
        self,
        log_input: bool = True,
        full: bool = False,
        size_average: bool | None = None,
        eps: float = 1e-08,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class RReLU(Module):
    """leaky_relu with a slope drawn for each element from [lower, upper]; their mean outside of training."""
    def __init__(self, lower: float = 0.125, upper: float = 0.3333333333333333, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class ReLU(Module):
    """max(x, 0)."""
    def __init__(self, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class ReLU6(Module):
    """min(max(x, 0), 6)."""
    def __init__(self, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class SELU(Module):
    """1.0507·elu(x, 1.6733), which keeps mean 0 and variance 1 (Klambauer et al., 2017)."""
    def __init__(self, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class SiLU(Module):
    """x·sigmoid(x)."""
    def __init__(self, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Sigmoid(Module):
    """1 / (1 + e^-x)."""
    def __init__(self) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class SmoothL1Loss(Module):
    """z²/(2·beta) for z = |input - target| < beta, else z - beta/2."""
    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean", beta: float = 1.0
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class SoftMarginLoss(Module):
    """log(1 + e^(-t·x)) for targets t = ±1."""
    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Softmax(Module):
    """e^(x - max) / Σ e^(x - max) over `dim`, after a cast to `dtype`. By default `dim` is 0 or 1, as in torch."""
    def __init__(self, dim: int | None = None) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Softmin(Module):
    """softmax(-x) over `dim`."""
    def __init__(self, dim: int | None = None) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Softplus(Module):
    """log(1 + e^(beta·x)) / beta; x itself where beta·x > threshold."""
    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Softshrink(Module):
    """x moved towards 0 by lambd, and 0 within ±lambd."""
    def __init__(self, lambd: float = 0.5) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Softsign(Module):
    """x / (1 + |x|)."""
    def __init__(self) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Tanh(Module):
    """The hyperbolic tangent."""
    def __init__(self) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Tanhshrink(Module):
    """x - tanh(x)."""
    def __init__(self) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class Threshold(Module):
    """x where x > threshold, else value."""
    def __init__(self, threshold: float, value: float, inplace: bool = False) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class TripletMarginLoss(Module):
    """max(0, d(anchor, positive) - d(anchor, negative) + margin) with p-norm distances d."""
    def __init__(
        self,
        margin: float = 1.0,
        p: float = 2.0,
        eps: float = 1e-06,
        swap: bool = False,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...

class TripletMarginWithDistanceLoss(Module):
    """`triplet_margin_loss` with a distance of the caller, `pairwise_distance` by default."""
    def __init__(
        self, *, distance_function: Any | None = None, margin: float = 1.0, swap: bool = False, reduction: str = "mean"
    ) -> None: ...
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...
