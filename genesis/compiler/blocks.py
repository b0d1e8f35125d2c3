"""Groups of elementwise calls on the CPU: numpy computes all of them on one block that stays in the L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import parallel
from genesis.compiler.fuse import Group
from genesis.compiler.graph import Value
from genesis.shapes import numel

BLOCK = 1 << 17  # elements; with fewer, the calls of numpy cost more than the cache saves


class BlockStep:
    """A group as a step of a program. Threads run the numpy references of its ops, block by block.

    Attributes:
        reads: the roots in memory that the group reads.
        results: the roots that it stores.
    """

    def __init__(self, group: Group, stored: list[Value]) -> None:
        self.group, self.calls, self.results = group, group.calls, stored
        self.reads = list(dict.fromkeys(v for c in group.calls for v in c.reads if v not in group.places))
        # Values that no later call of the group reads pass their block on to the next value of their dtype.
        self.slots, self.dtypes = _blocks_of(group, set(stored))

    def run(self, array_of: Callable[[Value], Array]) -> None:
        space = self.group.space or (1,)
        stored = {v: array_of(v).view_np().reshape(space) for v in self.results}  # may lack leading dimensions of 1
        loaded = {x: array_of(x).view_np() for c in self.calls for x in c.inputs if self._is_loaded(x)}
        loaded = {x: a.reshape(()) if a.size == 1 else np.broadcast_to(a, space) for x, a in loaded.items()}
        arrays = [*stored.values(), *(a for a in loaded.values() if a.ndim)]
        shape = space
        if all(a.flags.c_contiguous for a in arrays):
            shape = (numel(space),)
            stored = {v: a.reshape(-1) for v, a in stored.items()}
            loaded = {x: a.reshape(-1) if a.ndim else a for x, a in loaded.items()}
        step = max(1, BLOCK // max(1, numel(shape[1:])))

        def work(start: int, stop: int) -> None:
            temporaries = [np.empty((min(step, stop - start), *shape[1:]), dtype) for dtype in self.dtypes]
            for first in range(start, stop, step):
                self._block(slice(first, min(first + step, stop)), stored, loaded, temporaries)

        parallel(work, shape[0], numel(space) * len(self.calls))

    def _is_loaded(self, x: Any) -> bool:
        return isinstance(x, Value) and x.root not in self.group.places

    def _block(
        self, part: slice, stored: dict[Value, np.ndarray], loaded: dict[Value, np.ndarray],
        temporaries: list[np.ndarray],
    ) -> None:  # fmt: skip
        values: dict[Value, np.ndarray] = {}

        def operand(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            if x.root in values:
                return values[x.root]
            return loaded[x][part] if loaded[x].ndim else loaded[x]

        for call in self.calls:
            out = call.outputs[0]
            target = stored[out][part] if out in stored else temporaries[self.slots[out]][: part.stop - part.start]
            call.op.reference(target, *[operand(x) for x in call.inputs], **call.attrs)
            values[out] = target


def _blocks_of(group: Group, stored: set[Value]) -> tuple[dict[Value, int], list[np.dtype]]:
    """Give each value that is not stored a temporary block; return the block of each value and the blocks' dtypes."""
    last = {v: i for i, c in enumerate(group.calls) for v in c.reads}
    slots: dict[Value, int] = {}
    dtypes: list[np.dtype] = []
    free: dict[np.dtype, list[int]] = {}
    for i, call in enumerate(group.calls):
        out = call.outputs[0]
        if out not in stored:
            dtype = out.dtype.numpy
            idle = free.setdefault(dtype, [])
            if not idle:
                dtypes.append(dtype)
                idle.append(len(dtypes) - 1)
            slots[out] = idle.pop()
        # A block becomes free after the last call that reads it: an op must not overwrite an operand it broadcasts.
        for v in dict.fromkeys(call.reads):
            if v in slots and last[v] == i:
                free.setdefault(v.dtype.numpy, []).append(slots[v])
    return slots, dtypes
