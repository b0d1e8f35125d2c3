"""A thread that detects the end of another rank while this rank is busy preparing, compiling or saving.

A rank that waits for others detects this itself. A busy rank is interrupted a moment later. If its main thread is in a
call that Python cannot interrupt, the process ends. On a GPU this call may be waiting for a collective with a rank that
is gone, so the thread first aborts the collectives. It also detects a hanging device and failures of NCCL.
"""

from __future__ import annotations

import functools
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from genesis.distributed.peers import Peers
from genesis.errors import DistributedError

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Driver

_POLL_S = 0.1
_NOTICE_S = 0.4  # how long the main thread may take to detect a fault itself
_END_S = 1.0  # how long it may then take to end
ANSWER_S = 0.05  # how long to wait for the driver's answer before treating it as pending
# On systems with POLLRDHUP, these events report a closed connection even if it has unread messages.
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Collectives(Protocol):
    """The part of a group over NCCL that any thread may call."""

    def fault(self) -> DistributedError | None: ...
    def abort(self) -> None: ...


class Watch:
    """Watches the connections of `peers`, without reading from them, and `collectives` once it is set.

    The thread runs while the context is entered. It passes `interrupt` a function that raises; `interrupt` must have
    the main thread call this function.
    """

    def __init__(self, peers: Peers, interrupt: Callable[[Callable[[], None]], None]) -> None:
        self._peers, self._interrupt = peers, interrupt
        self.collectives: Collectives | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genesis-ranks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_POLL_S):
            fault = self.collectives.fault() if self.collectives is not None else None
            if fault is not None and self._is_over.wait(_NOTICE_S):  # NCCL may report the end of a rank first
                return
            if (gone := self._peers.closed(_CLOSED)) is not None:
                if not self._notices(_NOTICE_S):
                    self._end(functools.partial(self._peers.raise_gone, gone), f"rank {gone} is gone")
                return
            if fault is not None:
                self._end(functools.partial(self._raise, fault), fault.what)
                return

    def _raise(self, fault: DistributedError) -> None:
        if not self._peers.is_ending:
            self._peers.is_ending = True
            raise fault

    def _end(self, call: Callable[[], None], what: str) -> None:
        """Make the main thread raise. If it does not in time, end the process."""
        self._interrupt(call)
        if self.collectives is not None:
            self.collectives.abort()
        if not self._notices(_END_S):
            os.write(2, f"error: {what}\n".encode() if sys.stderr is not None else b"")
            os._exit(DistributedError.exit_code)

    def _notices(self, seconds: float) -> bool:
        """Whether the main thread detects the fault within this time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._peers.is_ending or self._is_over.wait(_POLL_S / 4):
                return True
        return self._peers.is_ending


class Deadline:
    """Detects a device without progress, by events after the launched work, without waiting for them.

    The main thread calls `mark` after a launch, and the watching thread calls `overdue`. One event is watched until it
    happens, while a second one follows every mark and is watched next. So frequent launches do not look like a hang.

    Another thread queries the driver. While the main thread loads a kernel, the driver waits for the device and answers
    no query, and the watching thread must not block on it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._watched, self._latest = driver.create_event(False), driver.create_event(False)
        self._since: float | None = None  # the time at which the watched event was chosen
        self._has_later = False
        self._lock = threading.Lock()
        self._questions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        self._is_pending = False
        self._thread: threading.Thread | None = None

    def mark(self, stream: int) -> None:
        """Watch the work launched so far. Must not be called during a capture."""
        with self._lock:
            if self._since is None:
                self._driver.record_event(self._watched, stream)
                self._since = time.monotonic()
            else:
                self._driver.record_event(self._latest, stream)
                self._has_later = True

    def overdue(self) -> float:
        """Return the seconds without progress of the device, 0 if no work is left. Raises DeviceError."""
        since = self._since
        if since is None:
            return 0.0
        if not self._has_happened():
            return time.monotonic() - since
        with self._lock:
            self._watched, self._latest = self._latest, self._watched
            self._since, self._has_later = (time.monotonic() if self._has_later else None), False
            return 0.0

    def _has_happened(self) -> bool:
        """Whether the watched event has happened. False if the driver does not answer in time."""
        if not self._is_pending:
            if self._thread is None:
                self._thread = threading.Thread(target=self._answer_questions, name="genesis-device", daemon=True)
                self._thread.start()
            self._questions.put(self._watched)
            self._is_pending = True
        try:
            answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            return False
        self._is_pending = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer_questions(self) -> None:
        while True:
            event = self._questions.get()
            try:
                self._answers.put(self._driver.has_happened(event))
            except Exception as error:
                self._answers.put(error)
