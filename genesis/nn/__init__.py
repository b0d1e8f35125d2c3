"""Neural-network building blocks under torch's names: modules, layers, losses, initialization, gradient clipping.

`__init__.pyi`, written by `make stubs`, lists the modules of one function, which are generated (`applied.py`).
"""

import importlib
from typing import Any

from genesis.keywords import check_calls
from genesis.nn import functional, init, utils
from genesis.nn.applied import applied
from genesis.nn.attention import Attention, KVCache, RoPE
from genesis.nn.channel_layers import (
    BatchNorm1d,
    Bilinear,
    CircularPad1d,
    ConstantPad1d,
    Conv1d,
    ConvTranspose1d,
    GroupNorm,
    InstanceNorm1d,
    PReLU,
    ReflectionPad1d,
    ReplicationPad1d,
    ZeroPad1d,
)
from genesis.nn.head_losses import AdaptiveLogSoftmaxWithLoss, LinearCrossEntropyLoss
from genesis.nn.layers import (
    Dropout,
    Embedding,
    EmbeddingBag,
    Flatten,
    Hardtanh,
    Identity,
    LayerNorm,
    LazyLinear,
    Linear,
    RMSNorm,
    SwiGLU,
    Unflatten,
)
from genesis.nn.lora import LoRALinear
from genesis.nn.module import Module, ModuleDict, ModuleList, Sequential
from genesis.nn.parameter import Buffer, Parameter
from genesis.nn.parameter_containers import ParameterDict, ParameterList
from genesis.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNBase, RNNCell, RNNCellBase
from genesis.nn.transformer import (
    MultiheadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

globals().update(applied)

__all__ = [  # noqa: PLE0604  modules of one function are generated
    "AdaptiveLogSoftmaxWithLoss",
    "Attention",
    "BatchNorm1d",
    "Bilinear",
    "Buffer",
    "CircularPad1d",
    "ConstantPad1d",
    "Conv1d",
    "ConvTranspose1d",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "Flatten",
    "GRU",
    "GRUCell",
    "GroupNorm",
    "Hardtanh",
    "Identity",
    "InstanceNorm1d",
    "KVCache",
    "LSTM",
    "LSTMCell",
    "LayerNorm",
    "LazyLinear",
    "Linear",
    "LinearCrossEntropyLoss",
    "LoRALinear",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiheadAttention",
    "PReLU",
    "Parameter",
    "ParameterDict",
    "ParameterList",
    "RMSNorm",
    "RNN",
    "RNNBase",
    "RNNCell",
    "RNNCellBase",
    "ReflectionPad1d",
    "ReplicationPad1d",
    "RoPE",
    "Sequential",
    "SwiGLU",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "Unflatten",
    "ZeroPad1d",
    "functional",
    "init",
    "utils",
    *applied,
]
__all__.sort(key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def __getattr__(name: str) -> Any:
    if name == "modules":  # loaded at first use
        return importlib.import_module("genesis.nn.modules")
    raise AttributeError(f"module 'genesis.nn' has no attribute {name!r}")


check_calls(globals(), ("KVCache", "Parameter", "Buffer"))  # modules check their keywords themselves
