"""Neural-network building blocks under torch's names: modules, layers, losses, initialization, gradient
clipping.

Made by `make stubs`: do not edit.
"""

from genesis.nn import functional as functional
from genesis.nn import init as init
from genesis.nn import utils as utils
from genesis.nn.attention import Attention as Attention
from genesis.nn.attention import KVCache as KVCache
from genesis.nn.attention import RoPE as RoPE
from genesis.nn.layers import GELU as GELU
from genesis.nn.layers import Dropout as Dropout
from genesis.nn.layers import Embedding as Embedding
from genesis.nn.layers import Identity as Identity
from genesis.nn.layers import LayerNorm as LayerNorm
from genesis.nn.layers import Linear as Linear
from genesis.nn.layers import RMSNorm as RMSNorm
from genesis.nn.layers import SwiGLU as SwiGLU
from genesis.nn.lora import LoRALinear as LoRALinear
from genesis.nn.losses import BCELoss as BCELoss
from genesis.nn.losses import BCEWithLogitsLoss as BCEWithLogitsLoss
from genesis.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from genesis.nn.losses import MSELoss as MSELoss
from genesis.nn.module import Module as Module
from genesis.nn.module import ModuleDict as ModuleDict
from genesis.nn.module import ModuleList as ModuleList
from genesis.nn.module import Sequential as Sequential
from genesis.nn.parameter import Parameter as Parameter
from genesis.tensor import Tensor

__all__ = [
    "GELU",
    "Attention",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Identity",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LoRALinear",
    "MSELoss",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "RoPE",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SwiGLU",
    "Tanh",
    "functional",
    "init",
    "utils",
]

class ReLU(Module):
    """max(x, 0)."""
    def forward(self, x: Tensor) -> Tensor: ...

class SiLU(Module):
    """x·sigmoid(x)."""
    def forward(self, x: Tensor) -> Tensor: ...

class Sigmoid(Module):
    """1 / (1 + e^-x)."""
    def forward(self, x: Tensor) -> Tensor: ...

class Tanh(Module):
    """The hyperbolic tangent."""
    def forward(self, x: Tensor) -> Tensor: ...
