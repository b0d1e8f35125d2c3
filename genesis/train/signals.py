"""SIGINT, SIGTERM and SIGHUP: the first asks the run to save and stop, and says so at once; the second stops it now.

The same signal again within a moment is the first one still: `timeout` and job schedulers send theirs to a process and
to its group. So is a SIGHUP then, which service managers send after a SIGTERM. A SIGHUP that is ignored when the run
starts stays ignored: that is what `nohup` is for.
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

TOLD = "finishing this step, then saving (again: stop now)"

_AGAIN_SECONDS = 0.001
SAME_SECONDS = 0.25
_LOST_SECONDS = 0.25
_JUST_SECONDS = 5.0
_raised: list[tuple[float, BaseException]] = []  # by the last signal that raised something, and when


def raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handles SIGINT as Python does, for `just_raised`."""
    _raised[:] = [(time.monotonic(), KeyboardInterrupt())]
    raise _raised[0][1]


def just_raised() -> BaseException | None:
    """What a signal raised in the last seconds: libraries that are being imported make another error of it."""
    return next((stop for moment, stop in _raised if time.monotonic() - moment < _JUST_SECONDS), None)


class Interrupts:
    """Catches the signals while it is entered.

    Args:
        saves: whether there are checkpoints, of which errors speak.

    Attributes:
        received: the number of the first signal, or None.
        is_quiet: whether another rank says what a first signal does.
        deferred: whether a first signal only sets `received` (there is something to save) or stops the run at once.
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
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
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
        now, again = time.monotonic(), self.received is not None
        if again and number in (self.received, signal.SIGHUP) and now - self._since < SAME_SECONDS:
            return
        self._since = now
        if self.deferred and not again:
            self.received = number
            if not self.is_quiet:
                _tell(TOLD)
            return
        self.received = number
        name = signal.Signals(number).name
        what = f"{name} ended the run "
        what += "without saving, as the second signal" if again else "while there was nothing to save"
        next = "start it again with the same command, with --resume where a checkpoint was saved"
        if not self._saves:
            what, next = f"{name} ended the command", "start it again with the same command"
        self._stop = InterruptedRun(what, signal=number, next=next)
        # Libraries may catch what they do not know: look whether it is lost.
        signal.setitimer(signal.ITIMER_REAL, _LOST_SECONDS, _LOST_SECONDS)
        _raised[:] = [(now, self._stop)]
        raise self._stop

    def _on_unraisable(self, lost: Any) -> None:
        """An exception in a finalizer (of a tensor's memory, say) goes nowhere: raise it again a moment later."""
        if isinstance(lost.exc_value, InterruptedRun):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _LOST_SECONDS)
        else:
            self._hook_before(lost)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
            return
        handled = sys.exc_info()[1]  # is it the stop because of which the interrupted code cleans up?
        while handled is not None and handled is not self._stop:
            handled = handled.__context__
        if handled is None:
            raise self._stop

    def interrupt(self, call: Callable[[], None]) -> None:
        """From another thread: have the main thread, whatever it does, call what may raise."""
        ident = threading.main_thread().ident
        if self._before and ident is not None:
            self._call = call
            signal.pthread_kill(ident, signal.SIGALRM)


def _tell(line: str) -> None:
    """Write `line` to stderr from a handler, past Python's buffers, which the interrupted code may be writing to.

    A line drawn on a terminal (a progress bar) is erased first; its next drawing is then below. A stderr that takes
    nothing just now, as a stopped terminal or a full pipe, is not waited for.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stderr.fileno()
        drawn = os.isatty(descriptor) and os.environ.get("TERM", "") not in ("", "dumb")
        text = f"\r\x1b[2K{line}\n" if drawn else f"{line}\n"
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, text.encode())
