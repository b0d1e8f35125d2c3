"""Memory through a step: each block that a device's pool gives out and takes back, and what it is for.

Activations are what forward takes and is still there when it ends; workspace is all else that a step takes and gives
back, gradients between ops among it.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool
from genesis.measure.recorder import OUTSIDE, Frame, aggregated

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

Category = Literal["weights", "gradients", "optimizer", "activations", "workspace", "other"]
CATEGORIES: tuple[Category, ...] = ("weights", "optimizer", "gradients", "other", "activations", "workspace")


class Change(NamedTuple):
    """A block that was taken, or given back: then `nbytes` is below 0. `frame` is what the host was in."""

    at: float
    address: int
    nbytes: int
    frame: Frame


class Track(NamedTuple):
    """Bytes over time, by `time.perf_counter`: a counter of the trace. `changes` are those of the device's pool."""

    name: str
    samples: Sequence[tuple[float, Mapping[str, int]]]
    device: str = ""
    changes: Sequence[Change] = ()


@dataclass
class _Block:
    """Memory from when it was taken until it was given back; `frame` is None where it was there before the step."""

    address: int
    size: int
    taken: float
    frame: Frame | None
    given: float | None = None
    category: Category = "workspace"


class Held(NamedTuple):
    """Who holds memory at the peak; module and op are empty for what was there before the step."""

    category: Category
    module: str
    op: str
    nbytes: int
    blocks: int


@dataclass(frozen=True)
class Timeline:
    """Bytes by category after each change.

    Attributes:
        began: by `time.perf_counter`.
        samples: seconds since then, and bytes by category; the first are those before the step.
        peak: the index of the highest sum.
        held: at the peak, the most first.
        pool_peak: the highest sum by the pool's own count.
    """

    began: float
    samples: list[tuple[float, dict[Category, int]]]
    peak: int
    peak_phase: str
    held: list[Held]
    pool_peak: int

    @property
    def peak_bytes(self) -> int:
        """The highest sum."""
        return sum(self.samples[self.peak][1].values())


class MemoryWatch:
    """Notes what the pool of a device gives out and takes back while `watching` is entered.

    Args:
        current: the frame that the host is in.
        resets_peak: whether the pool's peak begins anew, which users may be reading.
    """

    def __init__(self, device: Device, current: Callable[[], Frame], resets_peak: bool = False) -> None:
        self._current, self._device, self._resets_peak = current, device, resets_peak
        self._pool: Any = _pool_of(device)
        self.changes: list[Change] = []
        self.began, self.allocated, self.pool_peak = 0.0, 0, 0

    def begin(self) -> None:
        """Forget what was noted."""
        self.changes, self.began, self.allocated = [], time.perf_counter(), self._pool.allocated

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what happens inside the block, and the peak of the pool from here on."""
        self.begin()
        if self._resets_peak:
            self._pool.max_allocated = self._pool.allocated
        self._pool.watch = self._changed
        try:
            yield
        finally:
            self._pool.watch = None
            self.pool_peak = self._pool.max_allocated

    def _changed(self, address: int, nbytes: int) -> None:
        self.changes.append(Change(time.perf_counter(), address, nbytes, self._current()))

    def track(self) -> Track:
        """Allocated bytes after each change."""
        totals = itertools.accumulate((change.nbytes for change in self.changes), initial=self.allocated)
        times = [self.began, *(change.at for change in self.changes)]
        samples = [(at, {"allocated": total}) for at, total in zip(times, totals, strict=True)]
        return Track(f"memory of {self._device}", samples, self._device.type, self.changes)


def timeline(watch: MemoryWatch, persistent: Mapping[Category, Sequence[Array]], frames: Sequence[Frame]) -> Timeline:
    """A watched step; `persistent` are the arrays that stay from step to step, `frames` those of the step."""
    owned = {
        address: (size, category)
        for category, arrays in persistent.items()
        for address, size in filter(None, map(_block_of, arrays))
    }
    changes, live = _with_blocks(watch, {address: category for address, (_, category) in owned.items()}, frames)
    totals: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    totals["other"] = watch.allocated
    for address, (size, category) in owned.items():
        if address not in live:
            totals[category] += size
            totals["other"] -= size
    samples = [(0.0, dict(totals))]
    for at, block, nbytes in changes:
        totals[block.category] += nbytes
        samples.append((at - watch.began, dict(totals)))
    peak = max(range(len(samples)), key=lambda i: sum(samples[i][1].values()))
    moment = watch.began + samples[peak][0]
    held = _held([block for _, block, nbytes in changes if nbytes > 0], moment, samples[peak][1])
    phase = next((f.phase for f in frames if f.level == "phase" and f.start <= moment <= f.end), "idle")
    return Timeline(watch.began, samples, peak, phase, held, watch.pool_peak)


def _with_blocks(
    watch: MemoryWatch, owned: Mapping[int, Category], frames: Sequence[Frame]
) -> tuple[list[tuple[float, _Block, int]], dict[int, _Block]]:
    """Each change with its block, which knows what it is for; and the blocks that are still there, by address."""
    found: list[tuple[float, _Block, int]] = []
    live: dict[int, _Block] = {}
    for at, address, nbytes, frame in watch.changes:
        if nbytes > 0:
            block = live[address] = _Block(address, nbytes, at, frame)
        else:
            before = _Block(address, -nbytes, watch.began, None, category=owned.get(address, "other"))
            block = live.pop(address, before)
            block.given = at
        found.append((at, block, nbytes))
    forwards = [f for f in frames if f.level == "phase" and f.phase == "forward"]
    for _, block, nbytes in found:
        if nbytes > 0 and block.frame is not None:
            if block.given is None and block.address in owned:
                block.category = owned[block.address]
            elif block.frame.phase == "data":
                block.category = "other"
            elif block.frame.phase == "forward":
                end = max((f.end for f in forwards if f.start <= block.taken <= f.end), default=block.taken)
                block.category = "activations" if block.given is None or block.given >= end else "workspace"
    return found, live


def _held(taken: Sequence[_Block], moment: float, totals: Mapping[Category, int]) -> list[Held]:
    """Who holds memory at a moment: by module and op what the step took, by category what was there before."""
    sizes: Counter[tuple[Category, str, str]] = Counter()
    counts: Counter[tuple[Category, str, str]] = Counter()
    rest = Counter(dict(totals))
    for block in taken:
        frame = block.frame
        if frame is not None and block.taken <= moment and (block.given is None or block.given > moment):
            key = (block.category, aggregated(frame.module), frame.name if frame.level == "op" else OUTSIDE)
            sizes[key] += block.size
            counts[key] += 1
            rest[block.category] -= block.size
    held = [Held(*key, nbytes, counts[key]) for key, nbytes in sizes.items()]
    held += [Held(category, "", "", size, 0) for category, size in rest.items() if size]
    return sorted(held, key=lambda h: -h.nbytes)


def _pool_of(device: Device) -> Any:
    if device == CPU:
        from genesis.backend.cpu import pool

        return pool
    return cast(Any, backend_for(device)).pool


def _block_of(array: Array) -> tuple[int, int] | None:
    """Address and bytes of the pool's block that holds an array; None for memory that is not the pool's."""
    storage: Any = array.storage
    if hasattr(storage, "pool"):
        return None if storage.block is None else (storage.block.pointer, storage.block.size)
    return None if storage.owner is not None else (int(storage.block.ctypes.data), storage.block.nbytes)


# --- Of one call ------------------------------------------------------------------------------------------------------


def peak_bytes(call: Callable[[], object], device: Device) -> int:
    """Bytes of outputs and temporaries of a call that ran before; on the CPU numpy's temporaries are among them."""
    return _on_host(call) if device == CPU else _on_device(call, device)


def _on_host(call: Callable[[], object]) -> int:
    # Only fresh memory is seen: nothing may come out of the pool.
    pool.trim()
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


def _on_device(call: Callable[[], object], device: Device) -> int:
    backend = cast("CudaBackend", backend_for(device))
    backend.driver.synchronize()
    backend.pool.settle()
    backend.pool.reset_peak()
    before = backend.pool.allocated
    call()
    return backend.pool.max_allocated - before
