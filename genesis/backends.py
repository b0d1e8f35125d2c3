"""Settings of torch.backends: what has a meaning here takes effect, and the rest keeps its value without one.

>>> genesis.backends.cudnn.deterministic = True
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from genesis.functions.settings import get_float32_matmul_precision, set_float32_matmul_precision

__path__: list[str] = []  # `import genesis.backends.cudnn` finds the settings below


class _Matmul(ModuleType):
    allow_fp16_reduced_precision_reduction = allow_bf16_reduced_precision_reduction = False

    @property
    def allow_tf32(self) -> bool:
        """Whether float32 matmuls on CUDA round their operands to TF32."""
        return get_float32_matmul_precision() != "highest"

    @allow_tf32.setter
    def allow_tf32(self, value: bool) -> None:
        set_float32_matmul_precision("high" if value else "highest")


def _no() -> bool:
    return False


def _part(name: str, kind: type[ModuleType] = ModuleType, **values: Any) -> Any:
    part = kind(f"{__name__}.{name}")
    part.__dict__.update(values)
    sys.modules[part.__name__] = part
    return part


def _cpu_capability() -> str:
    found = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
    names = {"AVX512F": "AVX512", "AVX2": "AVX2", "ASIMD": "DEFAULT", "VSX": "VSX"}
    return next((name for feature, name in names.items() if found.get(feature)), "DEFAULT")


def _bindings_exist() -> bool:
    return all(find_spec(name) for name in ("cuda", "cuda.bindings"))


cpu = _part("cpu", get_cpu_capability=_cpu_capability)
cuda = _part("cuda", is_built=_bindings_exist, matmul=_part("cuda.matmul", _Matmul))
for _name in ("flash", "mem_efficient", "math", "cudnn"):  # attention has one implementation for each device
    cuda.__dict__[f"enable_{_name}_sdp"] = lambda enabled: None
    cuda.__dict__[f"{_name}_sdp_enabled"] = lambda: True
cudnn = _part(
    "cudnn",
    enabled=True,
    deterministic=False,
    benchmark=False,
    benchmark_limit=10,
    allow_tf32=True,
    is_available=_no,
    version=lambda: None,
)
mps = _part("mps", is_available=_no, is_built=_no)
mkl, mkldnn, openmp = (_part(name, is_available=_no) for name in ("mkl", "mkldnn", "openmp"))
