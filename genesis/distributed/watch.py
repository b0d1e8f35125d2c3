"""A thread that sees another rank go while this one is at work of its own: preparing, compiling, saving.

A rank that waits for others sees that by itself. One that does not is interrupted a moment later; and where its main
thread is in a call that Python cannot interrupt, the process ends. On a GPU that call may wait for a collective of a
rank that is gone: the thread gives the collectives up first, so that it returns. It sees as well where the device
stands still, or NCCL fails.
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

_TURN_S = 0.1
_NOTICES_S = 0.4  # how long a rank may take to notice by itself
_ENDS_S = 1.0  # and then to end
ANSWER_S = 0.05  # how long a question to the driver may take before it counts as one without an answer yet
# A closed connection is seen although messages wait in it, where the system can say so.
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Collectives(Protocol):
    """What a group over NCCL says and does, from any thread."""

    def fault(self) -> DistributedError | None: ...
    def abort(self) -> None: ...


class Watch:
    """Runs while it is entered: looks at the connections of `peers`, from which it reads nothing, and at `collectives`,
    those of the ranks' GPUs, once there are some.

    `interrupt` is called in the thread with a function that raises, which it has called in the main thread.
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
        while not self._is_over.wait(_TURN_S):
            fault = self.collectives.fault() if self.collectives is not None else None
            if fault is not None and self._is_over.wait(_NOTICES_S):  # of a rank that goes, NCCL may say it first
                return
            if (gone := self._peers.closed(_CLOSED)) is not None:
                if not self._notices(_NOTICES_S):
                    self._end(functools.partial(self._peers.see_gone, gone), f"rank {gone} is gone")
                return
            if fault is not None:
                self._end(functools.partial(self._raise, fault), fault.what)
                return

    def _raise(self, fault: DistributedError) -> None:
        if not self._peers.is_ending:
            self._peers.is_ending = True
            raise fault

    def _end(self, call: Callable[[], None], what: str) -> None:
        """Have the main thread raise; where it does not come to that, end the process."""
        self._interrupt(call)
        if self.collectives is not None:
            self.collectives.abort()
        if not self._notices(_ENDS_S):
            os.write(2, f"error: {what}\n".encode() if sys.stderr is not None else b"")
            os._exit(DistributedError.exit_code)

    def _notices(self, seconds: float) -> bool:
        """Whether the main thread comes to know within so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._peers.is_ending or self._is_over.wait(_TURN_S / 4):
                return True
        return self._peers.is_ending


class Deadline:
    """Whether a device gets on: an event behind the latest work of a stream, asked about without waiting for it.

    `mark` is called where work is launched, `overdue` by the thread that watches it.

    Of two events one is watched. The other moves with every mark, and is watched when the first has happened: so work
    that comes again and again is not taken for work that hangs.

    A thread of its own asks the driver. Where the main thread loads a kernel, the driver waits for the device and
    answers nobody: who watches must not wait with it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._watched, self._latest = driver.create_event(False), driver.create_event(False)
        self._since: float | None = None  # when the watched one became the one that is waited for
        self._has_later = False
        self._lock = threading.Lock()
        self._questions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        self._is_asked = False
        self._thread: threading.Thread | None = None

    def mark(self, stream: int) -> None:
        """Watch what was launched so far; not during a capture."""
        with self._lock:
            if self._since is None:
                self._driver.record_event(self._watched, stream)
                self._since = time.monotonic()
            else:
                self._driver.record_event(self._latest, stream)
                self._has_later = True

    def overdue(self) -> float:
        """For how many seconds the device has not got on; 0 where nothing is left to do. Raises DeviceError."""
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
        """Whether the watched event has happened, as far as the driver has answered."""
        if not self._is_asked:
            if self._thread is None:
                self._thread = threading.Thread(target=self._ask, name="genesis-device", daemon=True)
                self._thread.start()
            self._questions.put(self._watched)
            self._is_asked = True
        try:
            answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            return False
        self._is_asked = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self) -> None:
        while True:
            event = self._questions.get()
            try:
                self._answers.put(self._driver.has_happened(event))
            except Exception as error:
                self._answers.put(error)
