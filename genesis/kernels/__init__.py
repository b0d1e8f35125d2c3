"""Kernels of the ops, in Triton: one folder per capability, one file per op family, loaded at its first use on a GPU.

A file's header names its plain reference in `genesis/ops`, which has formula, shapes and errors: the docstring of an
implementation says what else there is to know. Names inside kernels: `i_` index, `o_` offsets, `m_` mask, `p_` pointer,
`b_` tile, with its shape: `# [BM, BN]`. What is launched ends in `_kernel`, what is inlined does not. Every dimension
that can overrun is masked; offsets are int64 if the constant `INT64` is set; sums are float32 (float64 for float64).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

__all__ = ["load"]


def load(family: str) -> None:
    """Import the file of an op family, whose CUDA implementations register themselves, if there is one."""
    if family in _files():
        importlib.import_module(_files()[family])


@functools.cache
def _files() -> dict[str, str]:
    """The module of each file in the capabilities' folders, by the file's name."""
    folders = [each.name for each in pkgutil.iter_modules(__path__) if each.ispkg]
    return {
        each.name: f"{__name__}.{folder}.{each.name}"
        for folder in folders
        for each in pkgutil.iter_modules([str(Path(__path__[0]) / folder)])
    }
