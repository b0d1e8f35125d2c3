"""Neural-network building blocks under torch's names: modules, layers, losses, initialization, gradient clipping."""

from genesis.keywords import check_calls
from genesis.nn import functional, init, utils
from genesis.nn.activations import GELU, Dropout, Identity, ReLU, Sigmoid, SiLU, SwiGLU, Tanh
from genesis.nn.attention import Attention, KVCache, RoPE
from genesis.nn.containers import ModuleDict, ModuleList, Sequential
from genesis.nn.layers import Embedding, LayerNorm, Linear, RMSNorm
from genesis.nn.losses import BCELoss, BCEWithLogitsLoss, CrossEntropyLoss, MSELoss
from genesis.nn.module import Module
from genesis.nn.parameter import Parameter

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


check_calls(globals(), ("KVCache", "Parameter"))  # modules see to it themselves
