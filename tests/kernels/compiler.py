"""Whether CUDA C++ can be compiled here, and run."""

from __future__ import annotations

from genesis.backend.cuda.driver import is_interpreted
from genesis.custom import cuda_source
from genesis.errors import DeviceError

__all__ = ["has_nvrtc", "runs_cuda"]


def has_nvrtc() -> bool:
    """Whether NVRTC is installed; a GPU is not needed to compile."""
    try:
        cuda_source._bindings()
    except DeviceError:
        return False
    return True


def runs_cuda() -> bool:
    """Whether ops in CUDA C++ run on "cuda": in the interpreter their references stand in."""
    return is_interpreted() or has_nvrtc()
