"""The entry of the command `genesis`, before anything heavy is imported: from here on Ctrl-C shows no traceback.

While modules are imported nothing has begun, so the process ends at once: an exception would come out of the middle of
an import, where some libraries print or swallow it. Afterwards Ctrl-C is a `KeyboardInterrupt` again.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

INTERRUPTED = 130


def _stop(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _stop_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """A `KeyboardInterrupt` that came in a finalizer or a callback, where it would be printed and forgotten."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _stop(signal.SIGINT, None)
    sys.__unraisablehook__(unraisable)


def main() -> int:
    """Runs the command line and returns its exit code."""
    # A shell that starts jobs in the background ignores SIGINT, and so do they.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _stop)
    from genesis_cli.main import main as run

    if listens:
        sys.unraisablehook = _stop_unraisable
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run()
    if listens:
        # The interpreter's own end can be interrupted as well.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
