"""Runs long library calls in a worker thread, so that the main thread remains free to handle signals.

A signal ends the waiting, not the call, which continues without a reader until it or the process ends.
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


class _Abandoned(Exception):
    """The caller no longer waits for the call."""


def start_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call()` in another thread. `result()` of the returned future blocks and returns or raises what it did."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a library's panic is not an Exception
            future.set_exception(error)

    threading.Thread(target=run, name="genesis-worker", daemon=True).start()
    return future


def call_in_thread(call: Callable[[], T]) -> T:
    """Return or raise what `call()` does. On the main thread it runs in another thread."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return start_in_thread(call).result()


def feed_in_thread(call: Callable[[Iterator[str]], object], texts: Iterable[str]) -> None:
    """Run `call(iterator)` in another thread; the iterator yields `texts`, which this thread iterates over."""
    if threading.current_thread() is not threading.main_thread():
        call(iter(texts))
        return
    batches: queue.Queue[list[str] | None] = queue.Queue(_BATCHES)
    abandoned = threading.Event()

    # Yields batches in the other thread; it ends with an error once this thread no longer waits.
    def arriving() -> Iterator[str]:
        while True:
            try:
                batch = batches.get(timeout=_PATIENCE_S)
            except queue.Empty:
                if abandoned.is_set():
                    raise _Abandoned from None
                continue
            if batch is None:
                return
            yield from batch

    # Feed batches as long as the call runs.
    running = start_in_thread(lambda: call(arriving()))
    try:
        for batch in _batched(texts):
            while not running.done():
                with suppress(queue.Full):
                    batches.put(batch, timeout=_PATIENCE_S)
                    break
        running.result()
    finally:
        abandoned.set()


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
