"""Records the blocks that a device's pool allocates and frees, and measures the peak memory of a call."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool
from genesis.measure.recorder import Frame

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend


class Change(NamedTuple):
    """An allocation, or a free with negative `nbytes`, and the bytes allocated after it."""

    at: float  # seconds of `time.perf_counter`
    nbytes: int
    frame: Frame | None  # the host's innermost one; None for the first entry, the bytes that exist before
    allocated: int


class Track(NamedTuple):
    """A device's memory over time, which a trace shows as a counter."""

    device: Device
    changes: Sequence[Change]


class MemoryWatch:
    """Records the allocations and frees of a device's pool while `watching` is entered.

    `current` returns the host's innermost frame.
    """

    def __init__(self, device: Device, current: Callable[[], Frame]) -> None:
        self._current, self._device = current, device
        self._pool: Any = pool if device == CPU else cast(Any, backend_for(device)).pool
        self.begin()

    def begin(self) -> None:
        self._changes: list[tuple[float, int, Frame | None]] = [(time.perf_counter(), self._pool.allocated, None)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        def watch(address: int, nbytes: int) -> None:
            self._changes.append((time.perf_counter(), nbytes, self._current()))

        self._pool.watch = watch
        try:
            yield
        finally:
            self._pool.watch = None

    def track(self) -> Track:
        """The memory since `begin`."""
        totals = itertools.accumulate(nbytes for _, nbytes, _ in self._changes)
        return Track(self._device, [Change(*each, total) for each, total in zip(self._changes, totals, strict=True)])


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
