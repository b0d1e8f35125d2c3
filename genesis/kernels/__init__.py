"""Kernels of the ops, in Triton: a folder a capability, a file an op family, loaded at its first use on a GPU.

Names inside kernels: `i_` index, `o_` offsets, `m_` mask, `p_` pointer, `b_` tile, with its shape: `# [BM, BN]`. Every
dimension that can overrun is masked; offsets beyond 2^31 are computed in int64 where `WIDE` says so; sums are in
float32 (float64 for float64).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

__all__ = ["load"]


def load(family: str) -> None:
    """Import the file of an op family, whose CUDA implementations register themselves; nothing where there is none."""
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
