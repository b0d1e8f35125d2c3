"""A thread that sees another rank go while this one is at work of its own: preparing, compiling, saving.

A rank that waits for others sees that by itself. One that does not is interrupted a moment later; and where its main
thread is in a call that Python cannot interrupt, the process ends.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from genesis.distributed.peers import Peers
from genesis.errors import DistributedError

__all__ = ["Watch"]

_TURN_S = 0.1
_NOTICES_S = 0.4  # how long a rank may take to notice by itself
_ENDS_S = 1.0  # and then to end
# A closed connection is seen although messages wait in it, where the system can say so.
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Watch:
    """Runs while it is entered.

    Args:
        peers: whose connections it looks at; it reads nothing from them.
        interrupt: called in the thread with a function that raises, which it has called in the main thread.
    """

    def __init__(self, peers: Peers, interrupt: Callable[[Callable[[], None]], None]) -> None:
        self._peers, self._interrupt = peers, interrupt
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
        gone = None
        while gone is None:
            if self._is_over.wait(_TURN_S):
                return
            gone = self._peers.closed(_CLOSED)
        if self._notices(_NOTICES_S):
            return
        rank = gone
        self._interrupt(lambda: self._peers.see_gone(rank))
        if not self._notices(_ENDS_S):
            os.write(2, f"error: rank {rank} is gone\n".encode() if sys.stderr is not None else b"")
            os._exit(DistributedError.exit_code)

    def _notices(self, seconds: float) -> bool:
        """Whether the main thread comes to know within so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._peers.is_ending or self._is_over.wait(_TURN_S / 4):
                return True
        return self._peers.is_ending
