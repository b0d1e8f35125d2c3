"""Genesis: a deep-learning framework for training small language models, without PyTorch underneath.

Tensors, autograd, modules and optimizers follow torch's names and semantics. The command-line tool is `genesis`.

Functions are registered where they are defined (`genesis.functions.surface`); `__init__.pyi`, made by `make stubs`, has
their signatures.
"""

import importlib
from typing import Any

from genesis.tensor import Tensor  # before the function `tensor`, whose name the module has too

# isort: split
from genesis import autograd, errors, random
from genesis.autograd import (
    autocast,
    enable_grad,
    get_autocast_dtype,
    inference_mode,
    is_autocast_enabled,
    is_grad_enabled,
    no_grad,
    set_grad_enabled,
)
from genesis.backend import Device
from genesis.backend import Device as device
from genesis.dtypes import (
    DType,
    bfloat16,
    finfo,
    float16,
    float32,
    float64,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    promote_types,
    uint8,
)
from genesis.dtypes import bool_ as bool
from genesis.dtypes import float16 as half
from genesis.dtypes import float32 as float
from genesis.dtypes import float64 as double
from genesis.dtypes import int16 as short
from genesis.dtypes import int32 as int
from genesis.dtypes import int64 as long
from genesis.functions.reduce import ValuesAndIndices
from genesis.functions.surface import functions as _functions
from genesis.keywords import check_calls
from genesis.random import Generator, manual_seed
from genesis.shapes import Size

globals().update(_functions)

from genesis import nn, optim  # noqa: E402  they need the names above

check_calls(globals(), ("DType", "Device", "promote_types"))


def __getattr__(name: str) -> Any:
    if name in ("cuda", "custom", "profiler"):  # loaded at their first use
        return importlib.import_module(f"genesis.{name}")
    if name in ("check_op", "cuda_op", "triton_op"):
        return getattr(importlib.import_module("genesis.custom"), name)
    if name in ("load", "save"):
        return getattr(importlib.import_module("genesis.saving"), name)
    if name == "generate":  # of the layer above: nothing in here uses it
        return importlib.import_module("genesis_models").generate
    raise AttributeError(f"module 'genesis' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [  # noqa: PLE0604  the table holds names
    "DType",
    "Device",
    "Generator",
    "Size",
    "Tensor",
    "ValuesAndIndices",
    "autocast",
    "autograd",
    "bfloat16",
    "bool",
    "check_op",
    "cuda",
    "cuda_op",
    "custom",
    "device",
    "double",
    "enable_grad",
    "errors",
    "finfo",
    "float",
    "float16",
    "float32",
    "float64",
    "generate",
    "get_autocast_dtype",
    "half",
    "iinfo",
    "inference_mode",
    "int",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_autocast_enabled",
    "is_grad_enabled",
    "load",
    "long",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
    "profiler",
    "promote_types",
    "random",
    "save",
    "set_grad_enabled",
    "short",
    "triton_op",
    "uint8",
    *_functions,
]
__all__.sort()
