"""Records memory through a step: each block that a device's pool allocates or frees, with its purpose."""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool
from genesis.measure.recorder import Frame

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

Category = Literal["weights", "gradients", "optimizer", "activations", "workspace", "other"]
CATEGORIES: tuple[Category, ...] = ("weights", "optimizer", "gradients", "other", "activations", "workspace")


class Change(NamedTuple):
    """An allocation, or a free with negative `nbytes`. `frame` is the host's innermost frame at that time."""

    at: float
    address: int
    nbytes: int
    frame: Frame


class Track(NamedTuple):
    """Bytes over time, which a trace shows as a counter. Times are seconds of `time.perf_counter`.

    Attributes:
        samples: pairs of a time and the bytes by name.
        device: type of the device; empty for a track that divides another track by category.
        changes: allocations and frees of the device's pool since the track began.
    """

    name: str
    samples: Sequence[tuple[float, Mapping[Any, int]]]
    device: str = ""
    changes: Sequence[Change] = ()


class MemoryWatch:
    """Records the allocations and frees of a device's pool while `watching` is entered.

    Args:
        current: returns the host's innermost frame.
    """

    def __init__(self, device: Device, current: Callable[[], Frame]) -> None:
        self._current, self._device = current, device
        self._pool: Any = pool if device == CPU else cast(Any, backend_for(device)).pool
        self.begin()

    def begin(self) -> None:
        """Drop recorded changes."""
        self._changes = list[Change]()
        self._began, self._allocated = time.perf_counter(), self._pool.allocated

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record allocations and frees inside the block."""
        self._pool.watch = lambda address, nbytes: self._changes.append(
            Change(time.perf_counter(), address, nbytes, self._current())
        )
        try:
            yield
        finally:
            self._pool.watch = None

    def track(self) -> Track:
        """The track of allocated bytes since `begin`."""
        totals = itertools.accumulate((change.nbytes for change in self._changes), initial=self._allocated)
        times = [self._began, *(change.at for change in self._changes)]
        samples = [(at, {"allocated": total}) for at, total in zip(times, totals, strict=True)]
        return Track(f"memory of {self._device}", samples, self._device.type, self._changes)


# --- By category ------------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """A block from its allocation until it is freed; -inf and inf mean before and after the step."""

    nbytes: int
    category: Category
    frame: Frame | None = None
    taken: float = -math.inf
    freed: float = math.inf


@dataclass(frozen=True)
class Timeline:
    """A step's memory by category.

    Activations are allocated in forward and live at its end. Workspace is all other memory that the step allocates.

    Attributes:
        samples: time and bytes by category after each change; the first sample is from before the step.
        peak: index of the sample with the highest sum.
        peak_phase: phase of that sample.
    """

    samples: list[tuple[float, dict[Category, int]]]
    peak: int
    peak_phase: str


def timeline(track: Track, frames: Sequence[Frame], persistent: Mapping[Category, Sequence[Array]]) -> Timeline:
    """Divide a step's track by category; `persistent` has the arrays that outlive the step."""
    blocks = _blocks(track.changes, {c: list(filter(None, map(_block_of, arrays))) for c, arrays in persistent.items()})
    ends = {frame.start: frame.end for frame in frames if (frame.level, frame.name) == ("phase", "forward")}
    for block in blocks:
        if block.category == "workspace" and block.frame is not None and block.frame.phase == "forward":
            end = max((end for start, end in ends.items() if start <= block.taken <= end), default=math.inf)
            block.category = "activations" if block.freed >= end else "workspace"
    began, before = track.samples[0]
    blocks.append(_Block(before["allocated"] - sum(b.nbytes for b in blocks if b.frame is None), "other"))

    samples, totals = dict[float, dict[Category, int]](), dict.fromkeys(CATEGORIES, 0)
    changes = [(at, b.category, size) for b in blocks for at, size in ((b.taken, b.nbytes), (b.freed, -b.nbytes))]
    for at, category, size in sorted(change for change in changes if change[0] < math.inf):
        totals[category] += size
        samples[max(at, began)] = dict(totals)
    moment = max(samples, key=lambda at: sum(samples[at].values()))
    phase = next((f.phase for f in frames if f.level == "phase" and f.start <= moment <= f.end), "idle")
    return Timeline(list(samples.items()), list(samples).index(moment), phase)


def _blocks(changes: Sequence[Change], persistent: Mapping[Category, Sequence[tuple[int, int]]]) -> list[_Block]:
    """The blocks of a step; blocks of the persistent arrays, given as (address, bytes), get the arrays' category."""
    owners = {address: category for category, owned in persistent.items() for address, _ in owned}
    blocks, live = list[_Block](), dict[int, _Block]()
    for at, address, nbytes, frame in changes:
        if nbytes > 0:
            live[address] = _Block(nbytes, "other" if frame.phase == "data" else "workspace", frame, at)
            blocks.append(live[address])
        elif address in live:
            live.pop(address).freed = at
        else:
            blocks.append(_Block(-nbytes, owners.get(address, "other"), freed=at))
    for category, owned in persistent.items():
        for address, nbytes in owned:
            if address not in live:
                live[address] = _Block(nbytes, category)
                blocks.append(live[address])
            live[address].category = category
    return blocks


def _block_of(array: Array) -> tuple[int, int] | None:
    """Address and bytes of the pool's block that holds an array; None if the array is outside the pool."""
    storage: Any = array.storage
    if hasattr(storage, "pool"):
        return None if storage.block is None else (storage.block.pointer, storage.block.size)
    return None if storage.owner is not None else (int(storage.block.ctypes.data), storage.block.nbytes)


# --- One call ---------------------------------------------------------------------------------------------------------


def peak_bytes(call: Callable[[], object], device: Device) -> int:
    """Peak bytes of a call's outputs and temporaries, on the CPU including numpy's. The call must have run before."""
    if device != CPU:
        backend = cast("CudaBackend", backend_for(device))
        backend.driver.synchronize()
        backend.pool.settle()
        backend.pool.reset_peak()
        before = backend.pool.allocated
        call()
        return backend.pool.max_allocated - before
    pool.trim()  # only fresh memory is traced
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
