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
        group, space = self.group, self.group.space
        stored = {v: array_of(v).view_np() for v in self.results}
        loaded = {
            x: np.broadcast_to(array_of(x).view_np(), space)
            for c in group.calls for x in c.inputs
            if isinstance(x, Value) and x.root not in group.places and x.size != 1
        }  # fmt: skip
        single = {
            x: array_of(x).view_np().reshape(())
            for c in group.calls for x in c.inputs
            if isinstance(x, Value) and x.root not in group.places and x.size == 1
        }  # fmt: skip
        arrays = [*stored.values(), *loaded.values()]
        if all(a.flags.c_contiguous and a.shape == space for a in arrays):
            stored = {v: a.reshape(-1) for v, a in stored.items()}
            loaded = {x: a.reshape(-1) for x, a in loaded.items()}
        elif any(a.shape != space for a in stored.values()):
            stored = {v: a.reshape(space) for v, a in stored.items()}
        shape = next(iter(stored.values())).shape
        rows = shape[0] if shape else 1
        if not shape:
            stored = {v: a.reshape(1) for v, a in stored.items()}
            loaded = {x: a.reshape(1) for x, a in loaded.items()}
            shape = (1,)
        step = max(1, BLOCK // max(1, numel(shape[1:])))

        def work(start: int, stop: int) -> None:
            temporaries = [np.empty((min(step, stop - start), *shape[1:]), dtype) for dtype in self.dtypes]
            for first in range(start, stop, step):
                last = min(first + step, stop)
                self._block(slice(first, last), stored, loaded, single, temporaries)

        parallel(work, rows, numel(space) * len(group.calls))

    def _block(
        self, part: slice, stored: dict[Value, np.ndarray], loaded: dict[Value, np.ndarray],
        single: dict[Value, np.ndarray], temporaries: list[np.ndarray],
    ) -> None:  # fmt: skip
        values: dict[Value, np.ndarray] = {}
        count = part.stop - part.start

        def operand(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            if x.root in values:
                return values[x.root]
            return loaded[x][part] if x in loaded else single[x]

        for call in self.group.calls:
            out = call.outputs[0]
            target = stored[out][part] if out in stored else temporaries[self.slots[out]][:count]
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
