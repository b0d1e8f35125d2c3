"""SIGINT and SIGTERM: the first asks the run to save and stop, the second stops it now."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from genesis.errors import InterruptedRun

__all__ = ["Interrupts"]


class Interrupts:
    """Catches the two signals while it is entered.

    Attributes:
        received: the number of the first signal, or None.
        deferred: whether a first signal only sets `received` (there is something to save) or stops the run at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None and self.deferred:
            self.received = number
            return
        again = self.received is not None
        self.received = number
        what = "stopped at the second signal, without saving" if again else "stopped before the first step"
        raise InterruptedRun(what, signal=number, next="continue with --resume: the last complete checkpoint counts")
