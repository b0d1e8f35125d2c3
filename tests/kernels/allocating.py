"""The shared memory that a kernel takes, without machine code: Triton decides it before the longer part of its work."""

from __future__ import annotations

from typing import Any

import pytest

import genesis.backend.cuda.compile as compiling
from genesis.backend.cuda.compile import Signature

__all__ = ["shared_memory"]


class _Decided(Exception):
    """How much it is."""


def shared_memory(kernel: Any, signature: Signature, capability: tuple[int, int]) -> int:
    """Bytes, as `compile_kernel` gives them."""
    from triton.backends.nvidia.compiler import nvidia

    forms: list[Any] = []

    def note(*stage: Any) -> Any:
        if not stage:
            return "shared memory alone", "shared memory alone"
        lower = stage[1]["llir"]
        stage[1]["llir"] = lambda form, metadata: lower(forms.append(form) or form, metadata)
        return None

    def decide(passes: Any, *_: Any) -> None:
        passes.run(forms[0], "shared memory")
        raise _Decided(forms[0].get_int_attr("ttg.shared"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_assemble_dependent", note)
        patch.setattr(nvidia.passes.ttnvgpuir, "add_allocate_tensor_memory", decide)
        with pytest.raises(_Decided) as decided:
            compiling.compiled(kernel, signature, capability)
    return int(decided.value.args[0])
