"""Whether a device gets on: an event behind the latest work of a stream, asked about without waiting for it."""

from __future__ import annotations

import queue
import threading
import time

from genesis.backend.cuda.driver import Driver

ANSWER_S = 0.05  # how long a question may take before it counts as one without an answer yet


class Deadline:
    """`mark` is called where work is launched, `overdue` by the thread that watches it.

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
