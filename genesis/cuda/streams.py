"""Streams and events as objects, named as in torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from genesis.backend import Device
from genesis.backend.cuda import AnyDevice, find_backend
from genesis.backend.cuda.stream import Runtime, give_stream, take_stream
from genesis.errors import DeviceError, UsageError


class Stream:
    """A queue of work that runs in order, and concurrently with other streams.

    All threads of the process launch on the same current stream, while torch has one per thread.

    Args:
        device: device of the stream; None is the current device.
        priority: a stream with a priority below 0 is served first.
        handle: an existing stream, such as another library's; None creates a stream.
    """

    def __init__(self, device: AnyDevice = None, priority: int = 0, *, handle: int | None = None) -> None:
        self.backend, self.priority = find_backend(device), priority
        self.handle = take_stream(self.backend, priority) if handle is None else handle
        self._owned, self._before = handle is None, list[int]()

    @property
    def cuda_stream(self) -> int:
        """The driver's handle, for use with other libraries."""
        return self.handle

    stream_id = cuda_stream

    @property
    def device(self) -> Device:
        """The device of the stream."""
        return self.backend.device

    def is_capturing(self) -> bool:
        """Whether the stream's work is captured into a graph."""
        return self.backend.driver.is_capturing(self.handle)

    def __enter__(self) -> Self:
        """`with s:` launches on the stream inside the block, as `with genesis.cuda.stream(s):` does."""
        self._before.append(self.backend.stream)
        self.backend.stream = self.handle
        return self

    def __exit__(self, *error: object) -> None:
        self.backend.stream = self._before.pop()

    def __del__(self) -> None:
        if getattr(self, "_owned", False):
            give_stream(self.backend, self.handle, self.priority)

    def synchronize(self) -> None:
        """Wait until all work of the stream is done."""
        self.backend.refuse_in_capture("a stream was synchronized")
        self.backend.driver.synchronize_stream(self.handle)

    def query(self) -> bool:
        """Whether all work of the stream is done."""
        self.backend.refuse_in_capture("a stream was queried")
        return self.backend.driver.is_stream_done(self.handle)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event behind the stream's present work, and return it; None creates an event."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for `event`; the host does not wait."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for the present work of `stream`."""
        if stream.handle != self.handle:
            self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.handle, self.backend) == (other.handle, other.backend)

    def __hash__(self) -> int:
        return hash((self.handle, id(self.backend)))

    def __repr__(self) -> str:
        return f"Stream(device={self.backend.device}, handle={self.handle:#x})"


class ExternalStream(Stream):
    """A stream of another library, which remains its owner.

    Args:
        stream_ptr: the driver's handle.
    """

    def __init__(self, stream_ptr: int, device: AnyDevice = None) -> None:
        super().__init__(device, handle=stream_ptr)


class Event:
    """A point in a stream that other streams and the host can wait for. The first `record` creates it.

    Args:
        enable_timing: allow `elapsed_time(end)` to measure the milliseconds between two events.
        blocking: let a thread in `synchronize` sleep; it polls otherwise.
        interprocess, external: accepted only as False.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess or external:
            raise UsageError("events have no interprocess or external form", next="leave the argument out")
        self.enable_timing, self.blocking = enable_timing, blocking
        self._backend: Runtime | None = None
        self._handle = 0

    @property
    def cuda_event(self) -> int:
        """The driver's handle, for use with other libraries; 0 before the first `record`."""
        return self._handle

    def record(self, stream: Stream | None = None) -> None:
        """Record the event behind the present work of `stream`, by default the current one."""
        stream = current_stream() if stream is None else stream
        if self._backend is None:
            driver, self._backend = stream.backend.driver, stream.backend
            self._handle = driver.create_event(self.enable_timing, self.blocking)
        if self._backend is not stream.backend:
            raise UsageError(f"the event belongs to {self._backend.device}, the stream to {stream.backend.device}")
        self._backend.driver.record_event(self._handle, stream.handle)

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of `stream`, by default the current one, wait for the event, if it was recorded."""
        stream = current_stream() if stream is None else stream
        if self._backend is not None:
            stream.backend.driver.wait_event(stream.handle, self._handle)

    def query(self) -> bool:
        """Whether the event has happened; True if it was never recorded."""
        if self._backend is None:
            return True
        self._backend.refuse_in_capture("an event was queried")
        return self._backend.driver.is_event_done(self._handle)

    def synchronize(self) -> None:
        """Wait on the host until the event has happened."""
        if self._backend is not None:
            self._backend.refuse_in_capture("an event was synchronized")
            self._backend.driver.synchronize_event(self._handle)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`; both must have happened.
        Raises UsageError if one of them was created without timing or was never recorded.
        """
        if self._backend is None or end_event._backend is None or not (self.enable_timing and end_event.enable_timing):
            raise UsageError(
                "elapsed_time needs two recorded events with timing", next="Event(enable_timing=True), then record()"
            )
        return self._backend.driver.elapsed(self._handle, end_event._handle) * 1e3

    def __del__(self) -> None:
        if getattr(self, "_backend", None) is None or sys.is_finalizing():
            return
        assert self._backend is not None
        with contextlib.suppress(DeviceError):
            self._backend.driver.destroy_event(self._handle)


class StreamContext:
    """`with StreamContext(s):` launches on `s` inside the block; with None it does nothing. See `stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> Stream | None:
        return self.stream and self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def get_stream_from_external(data_ptr: int, device: AnyDevice = None) -> Stream:
    """A stream of another library, as an `ExternalStream`."""
    return ExternalStream(data_ptr, device)


def current_stream(device: AnyDevice = None) -> Stream:
    """The stream that a device's work is launched on now."""
    return Stream(device, handle=find_backend(device).stream)


def default_stream(device: AnyDevice = None) -> Stream:
    """The stream that is used outside all `stream` blocks."""
    return Stream(device, handle=0)


def set_stream(stream: Stream) -> None:
    """Launch on `stream` from now on, in the whole process. `with genesis.cuda.stream(s):` does it for a block."""
    stream.backend.stream = stream.handle


_NEW: Any = object()


def stream(stream: Stream | None = _NEW) -> AbstractContextManager[Any]:
    """`with genesis.cuda.stream(s):` launches on `s` inside the block; with None it does nothing.

    `with genesis.cuda.stream() as s:` creates a stream of the current device. It waits for the work before the block,
    and the work after the block waits for it. A stream that you pass does not wait at the ends of the block: use
    `wait_stream`, and `Tensor.record_stream` for memory that both streams use.

    The stream changes for the whole process, not only for this thread.
    """
    if stream is _NEW:
        return _in_new_stream()
    return StreamContext(stream)


@contextmanager
def _in_new_stream() -> Iterator[Stream]:
    before, new = current_stream(), Stream()
    new.wait_stream(before)
    try:
        with StreamContext(new):
            yield new
    finally:
        before.wait_stream(new)
