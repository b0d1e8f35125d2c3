"""`genesis serve` with a stand-in for the engine: what HTTP and the worker can do, on a machine without a GPU.

    python -m benchmarks.gpu.serving --size tiny --device cpu --step-ms 2

starts it. The stand-in has a GPU's rows and computes nothing: each step takes STEP_MS milliseconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from genesis_cli.main import main
from genesis_cli.session.serving import process
from genesis_models.engine import Request, Token
from genesis_models.engine.engine import Waiting
from genesis_models.generate import GPU_ROWS

__all__ = ["STEP_MS", "StandIn"]

STEP_MS = "STEP_MS"  # the environment variable with a step's milliseconds


class StandIn:
    """An engine whose every request draws the same ids up to its last."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left: dict[int, int] = {}  # tokens that are missing, by the request's number

    def run(self, requests: Iterable[Request | None]) -> Iterator[Token]:
        """See `Engine.run`."""
        waiting, due = Waiting(requests), 0.0
        while waiting.is_more or self._left:
            while len(self._left) < GPU_ROWS and (found := waiting.take()) is not None:
                self._left[found[0]] = found[1].max_tokens
            due = max(due + self._seconds, time.perf_counter())
            while (rest := due - time.perf_counter()) > 0:
                time.sleep(rest)
            for number in [*self._left]:
                if number not in self._left:
                    continue  # cancelled
                self._left[number] -= 1
                is_over = self._left[number] == 0
                if is_over:
                    del self._left[number]
                yield Token(number, 300 + number % 50, None, "length" if is_over else None)

    def cancel(self, request: int) -> None:
        """See `Engine.cancel`."""
        self._left.pop(request, None)


def stand_in(*_: Any, **__: Any) -> StandIn:
    """Stands for `engine_for`."""
    return StandIn(float(os.environ[STEP_MS]) / 1e3)


if __name__ == "__main__":
    with mock.patch.object(process, "engine_for", stand_in):
        sys.exit(main())
