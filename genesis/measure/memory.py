"""Records the blocks that a device's pool allocates and frees, and measures the peak memory of a call."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool
from genesis.measure.recorder import Frame

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend


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
        device: type of the device.
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
        self._changes = list[Change]()
        self._began, self._allocated = time.perf_counter(), self._pool.allocated

    @contextmanager
    def watching(self) -> Iterator[None]:
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
