"""Neural-network building blocks under torch's names: modules, layers, losses, initialization, gradient clipping.

`__init__.pyi`, written by `make stubs`, lists the activation modules, which are generated from op records.
"""

import importlib
from typing import Any

from genesis.keywords import check_calls
from genesis.nn import functional, init, utils
from genesis.nn.attention import Attention, KVCache, RoPE
from genesis.nn.layers import GELU, Dropout, Embedding, Identity, LayerNorm, Linear, RMSNorm, SwiGLU, activations
from genesis.nn.lora import LoRALinear
from genesis.nn.losses import BCELoss, BCEWithLogitsLoss, CrossEntropyLoss, MSELoss
from genesis.nn.module import Module, ModuleDict, ModuleList, Sequential
from genesis.nn.parameter import Parameter

globals().update(activations)

__all__ = [  # noqa: PLE0604  the activations are generated from op records
    "Attention",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "GELU",
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
    "RoPE",
    "Sequential",
    "SwiGLU",
    "functional",
    "init",
    "utils",
    *activations,
]
__all__.sort(key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def __getattr__(name: str) -> Any:
    if name == "modules":  # loaded at first use
        return importlib.import_module("genesis.nn.modules")
    raise AttributeError(f"module 'genesis.nn' has no attribute {name!r}")


check_calls(globals(), ("KVCache", "Parameter"))  # modules check their keywords themselves
