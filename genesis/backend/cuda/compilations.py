"""Compilations: kernels from the cache on disk, or made side by side, each once.

Each kernel has one entry in the cache (`genesis.files.cache`): what a launch needs, and the machine code. An entry that
is damaged, or that somebody else could have written, is compiled again and replaced.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from genesis.backend.cores import usable_cores
from genesis.backend.cuda.compile import Binary, Signature, compile_kernel, entry_name, packed, unpacked
from genesis.backend.cuda.compile_workers import Workers
from genesis.files.cache import Cache, user_folder

Progress = Callable[[int, int], None]


class _Work:
    """The compilations of this process, side by side in threads, and how many there are.

    Where many are asked for, workers make them, each for the thread that waits for it.
    """

    def __init__(self) -> None:
        self.asked = self.done = 0
        self.workers = Workers()
        self.listeners: list[Progress] = []
        self.lock = threading.Lock()

    @functools.cached_property
    def threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(usable_cores(), 16), thread_name_prefix="genesis-compile")

    def start(self, make: Callable[[], Binary]) -> Future[Binary]:
        with self.lock:
            self.asked += 1
        self._tell()
        future = self.threads.submit(make)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Binary]) -> None:
        """It is done, has failed, or was given up."""
        with self.lock:
            self.done += 1
            is_last = self.done == self.asked
        self._tell()
        if is_last:
            self.workers.end()

    def cancel(self) -> None:
        """Give up what has not begun."""
        if (threads := self.__dict__.pop("threads", None)) is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def made(self, kernel: Any, signature: Signature, capability: tuple[int, int]) -> Binary:
        """What a worker compiles, or this process where there is none to have."""
        found = self.workers.made(kernel, signature, capability, waiting=self.asked - self.done)
        return compile_kernel(kernel, signature, capability) if found is None else found

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener(self.done, self.asked)


_work = _Work()


@contextmanager
def progress(listener: Progress) -> Iterator[None]:
    """Call `listener(done, asked)` at every kernel that is asked for or done inside the block, from any thread."""
    _work.listeners.append(listener)
    try:
        yield
    finally:
        _work.listeners.remove(listener)


def is_compiling() -> bool:
    """Whether compilations that were asked for have not ended."""
    return _work.done < _work.asked


@contextmanager
def given_up_on_error() -> Iterator[None]:
    """Where the block ends by an error, give up compilations that have not begun: the process's end waits for all."""
    try:
        yield
    except BaseException:
        _work.cancel()
        raise


def compiling(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Future[Binary]:
    """The machine code of `kernel` for a signature: from the cache, or from a compilation that starts now."""
    cache, name = _cache(cache_folder()), entry_name(kernel, signature, capability)
    found = _found(cache, name)
    if found is None:
        return _work.start(functools.partial(_made_once, cache, name, kernel, signature, capability))
    ready: Future[Binary] = Future()
    ready.set_result(found)
    return ready


def _made_once(cache: Cache, name: str, kernel: Any, signature: Signature, capability: tuple[int, int]) -> Binary:
    """Compile where no other process does: ranks of one host ask for the same kernels at the same time."""
    with cache.alone(name):
        found = _found(cache, name)
        if found is None:
            found = _work.made(kernel, signature, capability)
            _keep(cache, name, found)
    return found


# --- The cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept: XDG_CACHE_HOME/genesis/kernels, by default below ~/.cache."""
    return user_folder("kernels")


@functools.cache
def _cache(folder: Path) -> Cache:
    return Cache.of_user(folder)


MAX_BYTES = 64 << 20  # of a kernel's entry


def _found(cache: Cache, name: str) -> Binary | None:
    entry = cache.find(name, limit=MAX_BYTES)
    try:
        return None if entry is None else unpacked(bytes(entry.part("facts")), bytes(entry.part("image")))
    except KeyError:
        return None


def _keep(cache: Cache, name: str, made: Binary) -> None:
    facts, image = packed(made)
    cache.put(name, {"facts": facts, "image": image})
