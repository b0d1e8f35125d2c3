"""Streams and events with torch's signatures; see `genesis.backend.cuda.stream` for what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from genesis.backend.cuda import stream as below
from genesis.cuda.devices import AnyDevice, backend

__all__ = ["Event", "Stream", "current_stream", "default_stream", "stream"]


class Stream(below.Stream):
    """A queue of work that runs in order, and beside other streams.

    Args:
        device: None is the current one.
        priority: below 0 is served first.
    """

    def __init__(self, device: AnyDevice = None, priority: int = 0) -> None:
        super().__init__(backend(device), priority)


class Event(below.Event):
    """A mark in a stream, which other streams and the host can wait for.

    Args:
        enable_timing: lets `elapsed_time(end)` tell the milliseconds between two of them.
    """

    def record(self, stream: below.Stream | None = None) -> None:
        """Mark the present end of `stream`, by default the current one."""
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: below.Stream | None = None) -> None:
        """Let later work of `stream`, by default the current one, wait for the event."""
        super().wait(current_stream() if stream is None else stream)


def current_stream(device: AnyDevice = None) -> below.Stream:
    """The stream on which a device's work is launched now."""
    return below.current_stream(backend(device))


def default_stream(device: AnyDevice = None) -> below.Stream:
    """The stream that is used outside of all `stream` blocks."""
    return below.Stream(backend(device), handle=0)


_NEW: Any = object()


def stream(chosen: below.Stream | None = _NEW) -> AbstractContextManager[Any]:
    """`with genesis.cuda.stream(s):` launches on `s` inside the block; None changes nothing.

    `with genesis.cuda.stream() as s:` makes a new stream of the current device, which waits for the work before the
    block, as the work behind the block waits for it. With a stream that is given nothing waits at the ends of the
    block: use `wait_stream`, and `Tensor.record_stream` for memory that both streams use.

    The stream is the process's, not only this thread's.
    """
    if chosen is _NEW:
        return _in_new_stream()
    return nullcontext() if chosen is None else below.use(chosen)


@contextmanager
def _in_new_stream() -> Iterator[Stream]:
    before, made = current_stream(), Stream()
    made.wait_stream(before)
    try:
        with below.use(made):
            yield made
    finally:
        before.wait_stream(made)
