"""The entry of the command `genesis`, before any heavy import; from here on Ctrl-C shows no traceback.

During the imports nothing has begun, so the process exits at once: an exception inside an import may be printed or
swallowed by a library. Afterwards Ctrl-C raises `KeyboardInterrupt` again. A rank exits at once and silently until its
run installs its own handlers; the launcher reports it.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # importing `typing` takes 10 ms in which Ctrl-C would show a traceback
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

LAUNCHER = "GENESIS_LAUNCHER"  # the name in `genesis.distributed.environment`, which takes longer to import


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; no exception escapes.

    Args:
        arguments: words of the command. None uses this process's words and handles its signals.
    """
    if arguments is not None:
        from genesis_cli.app import run

        return run(arguments)
    # A shell that starts jobs in the background makes them ignore SIGINT.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _stop)
    if os.getpid() == 1:  # in a container, where the system drops unhandled signals
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _stop)
    is_rank = LAUNCHER in os.environ
    if is_rank:  # the launcher has blocked them until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    from genesis.train.signals import raise_interrupt
    from genesis_cli.app import run

    if listens and not is_rank:
        sys.unraisablehook = _stop_unraisable
        signal.signal(signal.SIGINT, raise_interrupt)
    code = run(sys.argv[1:], ends_process=True)
    if listens:
        # The interpreter's shutdown can be interrupted too.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    try:
        if LAUNCHER not in os.environ:
            os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)


def _stop_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Exit on a `KeyboardInterrupt` in a finalizer or a callback, where Python would only print it."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _stop(signal.SIGINT, None)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
