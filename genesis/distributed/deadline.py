"""Whether a device gets on: an event behind the latest work of a stream, asked about without waiting for it."""

from __future__ import annotations

import threading
import time

from genesis.backend.cuda.driver import Driver

__all__ = ["Deadline"]


class Deadline:
    """`mark` is called where work is launched, `overdue` by the thread that watches it.

    Of two events one is watched. The other moves with every mark, and is watched when the first has happened: so work
    that comes again and again is not taken for work that hangs.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._watched, self._latest = driver.create_event(False), driver.create_event(False)
        self._since: float | None = None  # when the watched one became the one that is waited for
        self._has_later = False
        self._lock = threading.Lock()

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
        """For how many seconds the device has not got on; 0 where nothing is left to do."""
        with self._lock:
            if self._since is None:
                return 0.0
            if not self._driver.has_happened(self._watched):
                return time.monotonic() - self._since
            self._watched, self._latest = self._latest, self._watched
            self._since, self._has_later = (time.monotonic() if self._has_later else None), False
            return 0.0
