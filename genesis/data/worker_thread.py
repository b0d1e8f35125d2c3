"""Long library calls in a worker thread, so that the main thread stays free to handle signals.

A signal ends the waiting, not the call: that goes on without a reader until it, or the process, ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_BATCH_CHARS = 1 << 20
_BATCH_TEXTS = 1 << 10
_BATCHES = 4
_PATIENCE_S = 0.05


class _Left(Exception):
    """Nobody waits for the call any more."""


def start_in_thread(call: Callable[[], T]) -> Future[T]:
    """Begin `call()` in another thread; `result` of what is given waits for it, and returns or raises what it did."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a library's panic is no Exception
            future.set_exception(error)

    threading.Thread(target=run, name="genesis-worker", daemon=True).start()
    return future


def call_in_thread(call: Callable[[], T]) -> T:
    """What `call()` returns or raises, made in another thread where this is the main one."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return start_in_thread(call).result()


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

    running = start_in_thread(lambda: call(arriving()))
    try:
        for batch in _batched(texts):
            while not running.done():
                with suppress(queue.Full):
                    batches.put(batch, timeout=_PATIENCE_S)
                    break
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
