"""Long library calls in a worker thread, so that the main thread stays free to handle signals.

A signal ends the waiting, not the call: that goes on without a reader until it, or the process, ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_BATCH_CHARS = 1 << 20
_BATCH_TEXTS = 1 << 10
_BATCHES = 4
_PATIENCE_S = 0.05


class _Left(Exception):
    """Nobody waits for the call any more."""


class _Call:
    """A call in a thread; `result` returns or raises what it did."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._result: object = None
        self._error: BaseException | None = None
        self.done = threading.Event()
        threading.Thread(target=self._run, name="genesis-worker", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # a library's panic is no Exception
            self._error = error
        finally:
            self.done.set()

    def result(self) -> object:
        self.done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def call_in_thread(call: Callable[[], T]) -> T:
    """What `call()` returns or raises, made in another thread where this is the main one."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return _Call(call).result()  # type: ignore[return-value]


def start_in_thread(call: Callable[[], T]) -> Callable[[], T]:
    """Begin `call()` in another thread; what is given waits for it, and returns or raises what it did."""
    return _Call(call).result  # type: ignore[return-value]


def feed_in_thread(call: Callable[[Iterator[str]], object], texts: Iterable[str]) -> None:
    """`call(iterator)` in another thread, where the iterator gives `texts`, which this thread goes through."""
    if threading.current_thread() is not threading.main_thread():
        call(iter(texts))
        return
    batches: queue.Queue[list[str] | None] = queue.Queue(_BATCHES)
    left = threading.Event()

    def arriving() -> Iterator[str]:
        while True:
            try:
                batch = batches.get(timeout=_PATIENCE_S)
            except queue.Empty:
                if left.is_set():
                    raise _Left from None
                continue
            if batch is None:
                return
            yield from batch

    running = _Call(lambda: call(arriving()))
    try:
        for batch in _batched(texts):
            while not running.done.is_set():
                try:
                    batches.put(batch, timeout=_PATIENCE_S)
                    break
                except queue.Full:
                    continue
        running.result()
    finally:
        left.set()


def _batched(texts: Iterable[str]) -> Iterator[list[str] | None]:
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, chars = [], 0
    yield batch
    yield None
