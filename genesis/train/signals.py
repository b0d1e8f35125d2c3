"""SIGINT, SIGTERM and SIGHUP: the first asks the run to save and stop and reports so; the second stops it at once.

The same signal within SAME_SECONDS counts as the first one, because `timeout` and job schedulers signal both a process
and its group. So does a SIGHUP, which service managers send after a SIGTERM. A SIGHUP that is ignored when the run
starts remains ignored, as `nohup` requires.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self

from genesis.errors import InterruptedRun

STOPPING_LINE = "finishing this step, then saving (again: stop now)"

_RERAISE_SECONDS = 0.001
SAME_SECONDS = 0.25
_LOST_CHECK_SECONDS = 0.25
_RECENT_SECONDS = 5.0
_raised: list[tuple[float, BaseException]] = []  # time and exception of the last signal that raised one


def raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGINT as Python does, and record it for `just_raised`."""
    _raised[:] = [(time.monotonic(), KeyboardInterrupt())]
    raise _raised[0][1]


def just_raised() -> BaseException | None:
    """Return what a signal raised in the last seconds; libraries that were being imported may replace the error."""
    return next((stop for moment, stop in _raised if time.monotonic() - moment < _RECENT_SECONDS), None)


class Interrupts:
    """Catches the signals while it is entered.

    Args:
        saves: whether the command saves checkpoints; errors then mention them.

    Attributes:
        received: number of the first signal, or None.
        is_quiet: whether another rank reports the effect of a first signal.
        deferred: whether a first signal only sets `received`, so that the run can save; otherwise it stops the run.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, *, saves: bool = True) -> None:
        self.received: int | None = None
        self._saves = saves
        self.deferred = self.is_quiet = False
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._stop = InterruptedRun("", signal=0)
        self._hook_before = sys.unraisablehook
        self._call: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            caught = [n for n in self.SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._on_signal) for number in caught}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
            self._hook_before, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(self, *error: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = self._hook_before
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A repetition of the first signal: ignore it.
        now, again = time.monotonic(), self.received is not None
        if again and number in (self.received, signal.SIGHUP) and now - self._since < SAME_SECONDS:
            return
        self._since = now
        # The first signal of a run with something to save: it stops at the end of the step.
        if self.deferred and not again:
            self.received = number
            if not self.is_quiet:
                _write_now(STOPPING_LINE)
            return
        # A second signal, or one with nothing to save: stop now.
        self.received = number
        name = signal.Signals(number).name
        what = f"{name} ended the run "
        what += "without saving, because it was the second signal" if again else "while there was nothing to save"
        next = "start the same command again, with --resume if a checkpoint was saved"
        if not self._saves:
            what, next = f"{name} ended the command", "start the same command again"
        self._stop = InterruptedRun(what, signal=number, next=next)
        # Libraries may swallow unknown exceptions: check later whether this one was lost.
        signal.setitimer(signal.ITIMER_REAL, _LOST_CHECK_SECONDS, _LOST_CHECK_SECONDS)
        _raised[:] = [(now, self._stop)]
        raise self._stop

    def _on_unraisable(self, lost: Any) -> None:
        """Raise again, a moment later, an exception that a finalizer (say, of a tensor's memory) swallowed."""
        if isinstance(lost.exc_value, InterruptedRun):
            signal.setitimer(signal.ITIMER_REAL, _RERAISE_SECONDS, _LOST_CHECK_SECONDS)
        else:
            self._hook_before(lost)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
            return
        handled = sys.exc_info()[1]  # the stop, if the interrupted code caught it and is cleaning up
        while handled is not None and handled is not self._stop:
            handled = handled.__context__
        if handled is None:
            raise self._stop

    def interrupt(self, call: Callable[[], None]) -> None:
        """Interrupt the main thread to call `call`, which may raise. Call this from another thread."""
        ident = threading.main_thread().ident
        if self._before and ident is not None:
            self._call = call
            signal.pthread_kill(ident, signal.SIGALRM)


def _write_now(line: str) -> None:
    """Write `line` to stderr from a handler, bypassing Python's buffers, which the interrupted code may be using.

    It first erases a line drawn on a terminal (a progress bar), which is then drawn again below. It does not block on a
    stderr that accepts nothing, such as a stopped terminal or a full pipe.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stderr.fileno()
        drawn = os.isatty(descriptor) and os.environ.get("TERM", "") not in ("", "dumb")
        text = f"\r\x1b[2K{line}\n" if drawn else f"{line}\n"
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, text.encode())
