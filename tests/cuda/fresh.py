"""A fresh device in a process that has used one before."""

from __future__ import annotations

import genesis.backend.cuda as cuda
from genesis.backend import backend_for
from genesis.backend.cuda import faults
from genesis.kernels.index import select


def forget_backends() -> None:
    """The next launches are those of a fresh device: what was recorded on another one is not replayed."""
    backend_for.cache_clear()
    cuda.backend_of.cache_clear()
    select._plans.clear()
    faults.flag.cache_clear()
    faults._words.clear()
