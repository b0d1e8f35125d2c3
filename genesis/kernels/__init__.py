"""Kernels of the ops, in Triton: one folder per capability, one file per op family, imported at first use on a GPU.

A file's docstring names its plain reference in `genesis/ops`, which has formulas, shapes and errors. The docstring of
an implementation only adds to these. Names in kernels: `i_` index, `o_` offsets, `m_` mask, `p_` pointer, `b_` tile,
with shapes as comments: `# [BM, BN]`. Kernels that are launched end in `_kernel`; inlined functions do not. Every
dimension that can overrun has a mask. Offsets are int64 if the constant `INT64` is set. Sums are float32 (float64 for
float64).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from genesis.backend.cuda.dispatch import cuda_impl, cuda_impls
from genesis.op import registry

__all__ = ["load"]


def load(name: str, family: str) -> None:
    """Register the CUDA implementation of an op: import the file of its family, or generate it from its formula."""
    if family in _files():
        importlib.import_module(_files()[family])
    op = registry.get(name)
    if name not in cuda_impls and op is not None and op.formula is not None:
        cuda_impl(name)(importlib.import_module(_files()["elementwise"]).implementation(op))


@functools.cache
def _files() -> dict[str, str]:
    """Return the module name of each file in the capabilities' folders, by file name."""
    folders = [each.name for each in pkgutil.iter_modules(__path__) if each.ispkg]
    return {
        each.name: f"{__name__}.{folder}.{each.name}"
        for folder in folders
        for each in pkgutil.iter_modules([str(Path(__path__[0]) / folder)])
    }
