"""A group for arrays on any device, over one for arrays on the CPU: each call copies to host memory and back.

It waits for the device, and cannot be captured in a CUDA graph: correct, and as slow as the connections of `peers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genesis.array import Array, from_numpy
from genesis.backend import backend_for
from genesis.distributed.group import Group
from genesis.dtypes import DType


class StagedGroup:
    """Args: of: the group that does the work. Arrays on the CPU go to it as they are."""

    is_in_stream_order = False

    def __init__(self, of: Group) -> None:
        self.rank, self.size, self._of = of.rank, of.size, of

    def buffer(self, size: int, dtype: DType, owner: str, parts: Sequence[Sequence[int]]) -> None:
        """See `Group`."""
        return None

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        """See `Group`."""
        if source.device.type == "cpu":
            self._of.reduce_scatter(source, out, parts, adds=adds)
            return
        there = _host(out) if adds else from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._of.reduce_scatter(_host(source), there, parts, adds=adds)
        _put(there, out)

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        """See `Group`."""
        if out.device.type == "cpu":
            self._of.all_gather(part, out, parts)
            return
        whole = from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._of.all_gather(_host(part), whole, parts)
        _put(whole, out)

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        """See `Group`."""
        if part.device.type == "cpu" or out is None:
            self._of.gather(_host(part), out, parts, root)
            return
        whole = from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._of.gather(_host(part), whole, parts, root)
        _put(whole, out)

    def all_reduce(self, x: Array) -> None:
        """See `Group`."""
        there = _host(x)
        self._of.all_reduce(there)
        _put(there, x)

    def broadcast(self, x: Array, root: int = 0) -> None:
        """See `Group`."""
        there = _host(x)
        self._of.broadcast(there, root)
        _put(there, x)

    def close(self) -> None:
        """See `Group`."""
        self._of.close()


def _host(x: Array) -> Array:
    """The array's values in host memory: a copy, but of one that is there."""
    return x if x.device.type == "cpu" else from_numpy(np.array(x.numpy()))


def _put(values: Array, out: Array) -> None:
    if values is not out:
        backend_for(out.device).from_numpy(values.view_np(), out)
