"""The entry of the command `genesis`, before anything heavy is imported: from here on Ctrl-C shows no traceback.

While modules are imported nothing has begun, so the process ends at once: an exception would come out of the middle of
an import, where some libraries print or swallow it. Afterwards Ctrl-C is a `KeyboardInterrupt` again. A rank ends at
once until its run has handlers of its own, and leaves it to the launcher to say so.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` alone takes 10 ms in which Ctrl-C would show a traceback
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

LAUNCHER = "GENESIS_LAUNCHER"  # as in `genesis.distributed.environment`, which takes longer to import


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; no exception leaves.

    Args:
        arguments: its words; None takes those of this process, whose signals are then handled here.
    """
    if arguments is not None:
        from genesis_cli.app import run

        return run(arguments)
    # A shell that starts jobs in the background ignores SIGINT, and so do they.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _stop)
    if os.getpid() == 1:  # of a container, where the system drops signals that nobody handles
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _stop)
    is_rank = LAUNCHER in os.environ
    if is_rank:  # the launcher has blocked them, so that none comes earlier
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    from genesis.train.signals import raise_interrupt
    from genesis_cli.app import run

    if listens and not is_rank:
        sys.unraisablehook = _stop_unraisable
        signal.signal(signal.SIGINT, raise_interrupt)
    code = run(sys.argv[1:], ends_process=True)
    if listens:
        # The interpreter's own end can be interrupted as well.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    try:
        if LAUNCHER not in os.environ:
            os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)


def _stop_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """A `KeyboardInterrupt` that came in a finalizer or a callback, where it would be printed and forgotten."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _stop(signal.SIGINT, None)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
