"""Streams and events with a lifetime, named as in torch. Handles are reused and streams never destroyed: memory is
reused in the order of a stream, so a stream must not end while its memory is known."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from genesis.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

__all__ = ["Event", "Stream", "current_stream", "use"]

_idle: dict[tuple[int, int], list[int]] = {}  # handles without an owner, by device and priority


class Stream:
    """A queue of work of one device, which runs in order and beside other streams.

    The stream on which work is launched is one for the process, not for each thread as in torch.

    Args:
        backend: of the device.
        priority: 0, or below 0 for a stream that is served first.
        handle: an existing stream, such as another library's; None makes one.
    """

    def __init__(self, backend: CudaBackend, priority: int = 0, handle: int | None = None) -> None:
        self.backend, self.priority, self._owned = backend, priority, handle is None
        if handle is None:
            idle = _idle.setdefault((backend.device.index, priority), [])
            handle = idle.pop() if idle else backend.driver.create_stream(priority)
        self.handle = handle

    @property
    def cuda_stream(self) -> int:
        """The driver's handle, for other libraries."""
        return self.handle

    def __del__(self) -> None:
        if getattr(self, "_owned", False):
            _idle[self.backend.device.index, self.priority].append(self.handle)

    def synchronize(self) -> None:
        """Wait until all its work is done."""
        self.backend.refuse_in_capture("a stream was waited for")
        self.backend.driver.synchronize_stream(self.handle)

    def query(self) -> bool:
        """Whether all its work is done."""
        self.backend.refuse_in_capture("a stream was asked whether it is done")
        return self.backend.driver.is_stream_done(self.handle)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the stream's present end with an event, a new one unless given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for `event`; the host does not wait."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Let later work of this stream wait for what is in `stream` now."""
        if stream.handle != self.handle:
            self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.handle, self.backend) == (other.handle, other.backend)

    def __hash__(self) -> int:
        return hash((self.handle, id(self.backend)))

    def __repr__(self) -> str:
        return f"Stream(device={self.backend.device}, handle={self.handle:#x})"


class Event:
    """A mark in a stream, which other streams and the host can wait for. It is made at its first `record`.

    Args:
        enable_timing: lets `elapsed_time` read when it happened.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._backend: CudaBackend | None = None
        self._handle = 0

    def record(self, stream: Stream) -> None:
        """Mark the present end of `stream`."""
        if self._backend is None:
            self._backend, self._handle = stream.backend, stream.backend.driver.create_event(self.enable_timing)
        if self._backend is not stream.backend:
            raise UsageError(f"an event of {self._backend.device} in a stream of {stream.backend.device}")
        self._backend.driver.record_event(self._handle, stream.handle)

    def wait(self, stream: Stream) -> None:
        """Let later work of `stream` wait for the event; nothing happens where it was never recorded."""
        if self._backend is not None:
            stream.backend.driver.wait_event(stream.handle, self._handle)

    def query(self) -> bool:
        """Whether it has happened; True where it was never recorded."""
        if self._backend is None:
            return True
        self._backend.refuse_in_capture("an event was asked whether it has happened")
        return self._backend.driver.is_event_done(self._handle)

    def synchronize(self) -> None:
        """Wait on the host until it has happened."""
        if self._backend is not None:
            self._backend.refuse_in_capture("an event was waited for")
            self._backend.driver.synchronize_event(self._handle)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`; both must have happened.

        Raises:
            UsageError: one of them keeps no time, or was never recorded.
        """
        if self._backend is None or end._backend is None or not (self.enable_timing and end.enable_timing):
            raise UsageError(
                "elapsed_time of events that keep no time", next="Event(enable_timing=True), then record()"
            )
        return self._backend.driver.elapsed(self._handle, end._handle) * 1e3

    def __del__(self) -> None:
        if getattr(self, "_backend", None) is None or sys.is_finalizing():
            return
        assert self._backend is not None
        with contextlib.suppress(DeviceError):
            self._backend.driver.destroy_event(self._handle)


def current_stream(backend: CudaBackend) -> Stream:
    """The stream on which work is launched now."""
    return Stream(backend, handle=backend.stream)


@contextmanager
def use(stream: Stream) -> Iterator[Stream]:
    """Launch on `stream` inside the block; nothing waits when it begins or ends."""
    backend = stream.backend
    before, backend.stream = backend.stream, stream.handle
    try:
        yield stream
    finally:
        backend.stream = before
