"""Genesis: a deep-learning framework for training small language models, without PyTorch underneath.

Tensors, autograd, modules and optimizers follow torch's names and semantics. The command-line tool is `genesis`.

Functions register themselves where they are defined (`genesis.functions.surface`). `make stubs` writes their signatures
to `__init__.pyi`.
"""

import importlib
from math import e, inf, nan, pi
from typing import Any

from genesis.tensor import Tensor  # before the function `tensor`, which has the module's name

# isort: split
from genesis import autograd, errors, random
from genesis.autograd import (
    autocast,
    enable_grad,
    exact,
    get_autocast_dtype,
    inference_mode,
    is_autocast_enabled,
    is_grad_enabled,
    no_grad,
    set_grad_enabled,
)
from genesis.backend import Device
from genesis.backend import Device as device
from genesis.dtypes import COMPLEX as _complex_types
from genesis.dtypes import NAMES as _types
from genesis.dtypes import DType, Layout, contiguous_format, finfo, iinfo, preserve_format, promote_types, strided
from genesis.dtypes import DType as dtype
from genesis.dtypes import Layout as layout
from genesis.dtypes import MemoryFormat as memory_format
from genesis.functions.reduce import ValuesAndIndices
from genesis.functions.surface import functions as _functions
from genesis.keywords import check_calls
from genesis.random import Generator, default_generator, manual_seed
from genesis.shapes import Size

globals().update(_types | _complex_types | _functions)

from genesis import complexes, nn, optim  # noqa: E402, F401  they need the names above

globals().update(_functions)  # also those of neural networks

newaxis = None

check_calls(globals(), ("DType", "Device", "layout", "memory_format", "promote_types"))


_LAZY = {
    "amp", "backends", "compiler", "cuda", "custom", "distributed", "distributions", "func", "linalg", "masked",
    "profiler", "special", "testing", "utils",
}  # fmt: skip

_ELSEWHERE = {  # names that load their module at first use
    **dict.fromkeys(("check_op", "cuda_op", "triton_op"), "genesis.custom"),
    **dict.fromkeys(("load", "save"), "genesis.saving"),
    **dict.fromkeys(("Event", "Stream"), "genesis.cuda"),
    **dict.fromkeys(
        ("BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor", "HalfTensor",
         "IntTensor", "LongTensor", "ShortTensor", "set_default_tensor_type"),
        "genesis.legacy",
    ),
    "GradScaler": "genesis.amp", "OutOfMemoryError": "genesis.errors", "UntypedStorage": "genesis.functions.storage",
    "compile": "genesis.compiler", "generate": "genesis_models",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:  # loaded at first use
        return importlib.import_module(f"genesis.{name}")
    if name in _ELSEWHERE:  # some in a higher layer, which this one must not import
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module 'genesis' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [  # noqa: PLE0604  the tables hold names
    "DType",
    "Device",
    "Generator",
    "Layout",
    "Size",
    "Tensor",
    "ValuesAndIndices",
    "autocast",
    "autograd",
    "compiler",
    "contiguous_format",
    "masked",
    "memory_format",
    "preserve_format",
    "cuda",
    "custom",
    "linalg",
    "backends",
    "default_generator",
    "device",
    "dtype",
    "e",
    "inf",
    "layout",
    "nan",
    "newaxis",
    "pi",
    "special",
    "strided",
    "testing",
    "enable_grad",
    "errors",
    "exact",
    "finfo",
    "get_autocast_dtype",
    "iinfo",
    "inference_mode",
    "is_autocast_enabled",
    "is_grad_enabled",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
    "profiler",
    "promote_types",
    "random",
    "set_grad_enabled",
    "check_op",
    "compile",
    "cuda_op",
    "generate",
    "load",
    "save",
    "triton_op",
    *_types,
    *_complex_types,
    *_functions,
]
__all__.sort()
