"""The numpy backend: it pools host memory and runs the reference of an op on it.

Touching fresh pages costs more than the arithmetic, so blocks of 64 KiB and more are kept and reused by size. A block
returns to the pool when its last `Storage` is deleted, unless numpy views of it are still alive.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.backend import ArrayLike, Backend, OpLike
from genesis.errors import OutOfMemoryError

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_POOLED_FROM = 64 << 10  # bytes; smaller blocks are left to malloc
_PAGE = 4096
_SLACK = 64 << 20  # bytes kept for reuse beyond a quarter of the peak

# glibc returns free memory to the operating system beyond twice the largest block that was freed so far, at first
# 256 KiB. Temporaries of a block of a formula then touch fresh pages every time: gelu takes three times as long.
np.empty(8 << 20, np.uint8)


class Pool:
    """Blocks of host memory by size, with counters in bytes. `poison` fills fresh float memory with NaN patterns."""

    def __init__(self) -> None:
        self.free: dict[int, list[np.ndarray]] = {}
        self.allocated = self.max_allocated = self.cached = 0
        self.poison = False
        # called with the address and size of each block that is taken, and with a negative size when it is returned
        self.watch: Callable[[int, int], None] | None = None
        self._lock = threading.RLock()  # a finalizer may interrupt take() in the same thread

    def take(self, nbytes: int) -> np.ndarray:
        """A block of at least `nbytes`, contents undefined."""
        size = max(nbytes, 1) if nbytes < _POOLED_FROM else -(-nbytes // _PAGE) * _PAGE
        with self._lock:
            if blocks := self.free.get(size):
                block = blocks.pop()
                self.cached -= size
            else:
                block = self._fresh(size)
            self.allocated += size
            self.max_allocated = max(self.max_allocated, self.allocated)
            if self.watch is not None:
                self.watch(int(block.ctypes.data), size)
        if self.poison:
            block.fill(0xFF)  # NaN in every float type
        return block

    def _fresh(self, size: int) -> np.ndarray:
        # Phases such as training and evaluation use different sizes. Blocks of the old sizes must not add another peak.
        reserved = self.allocated + self.cached + size
        if size >= _POOLED_FROM and reserved > most_reserved(self.max_allocated):
            self.trim()
        try:
            return np.empty(size, np.uint8)
        except (MemoryError, ValueError):
            self.trim()
        try:
            return np.empty(size, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than an address can hold
            raise OutOfMemoryError(
                f"the host has no room for {size:,} bytes; Genesis holds {self.allocated:,}",
                next=OutOfMemoryError.ADVICE,
            ) from error

    # `least` is bound as a default for the same reason as in `CpuStorage.__del__`.
    def give(self, block: np.ndarray, reusable: bool, least: int = _POOLED_FROM) -> None:
        """Return a block; `reusable` is False while numpy views of it are alive."""
        size = block.nbytes
        with self._lock:
            self.allocated -= size
            if self.watch is not None:
                self.watch(int(block.ctypes.data), -size)
            if reusable and size >= least:
                self.free.setdefault(size, []).append(block)
                self.cached += size

    def trim(self) -> None:
        """Release all unused blocks to the operating system."""
        with self._lock:
            self.free.clear()
            self.cached = 0


def most_reserved(peak: int) -> int:
    """The reserved bytes above which the pool drops unused blocks, after a peak of `peak` bytes in use."""
    return peak + peak // 4 + _SLACK


pool = Pool()


class CpuStorage:
    """Host memory: a pooled block, or memory that belongs to `owner` (a numpy array of the caller)."""

    __slots__ = ("block", "nbytes", "owner", "version")

    def __init__(self, block: np.ndarray, nbytes: int, owner: object = None) -> None:
        self.block, self.nbytes, self.owner = block, nbytes, owner
        self.version = 0

    @property
    def pointer(self) -> int:
        return int(self.block.ctypes.data)

    @property
    def backend(self) -> CpuBackend:
        """The backend that runs ops on this memory."""
        return backend

    # The defaults keep these functions alive: at interpreter exit the module's names may be cleared first.
    def __del__(
        self, give: Callable[[np.ndarray, bool], None] = pool.give, users: Callable[[object], int] = sys.getrefcount
    ) -> None:
        if self.owner is None:
            unseen = users(self.block) <= 2  # this attribute and the argument
            give(self.block, unseen)


class CpuBackend(Backend):
    """Memory and execution on the host."""

    def allocate(self, nbytes: int) -> CpuStorage:
        return CpuStorage(pool.take(nbytes), nbytes)

    def run(self, op: OpLike, outputs: tuple[Any, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
        if op.family != "compiled":  # a compiled program takes arrays, like an implementation on a GPU
            outputs = tuple([o.view_np() for o in outputs])
            inputs = tuple([x.view_np() if hasattr(x, "view_np") else x for x in inputs])
        out = outputs[0] if len(outputs) == 1 else outputs
        with nullcontext() if _workers.inside.piece else np.errstate(all="ignore"):  # a piece has no warnings
            op.reference(out, *inputs, **attrs)

    def to_numpy(self, array: ArrayLike) -> np.ndarray:
        return array.view_np()

    def from_numpy(self, values: np.ndarray, array: ArrayLike) -> None:
        np.copyto(array.view_np(), values, casting="unsafe")


backend = CpuBackend()


@contextmanager
def scratch(shape: tuple[int, ...], dtype: np.dtype | type) -> Iterator[np.ndarray]:
    """Yield pooled temporary memory for a reference; its contents are undefined, and it is freed after the block."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = pool.take(nbytes)
    try:
        yield np.ndarray(shape, dtype, block)
    finally:
        # The caller's variable still refers to a view, which must not be used after the block.
        pool.give(block, True)


_PARALLEL_FROM = 1 << 17  # elements; below this, starting a thread costs more than it saves


class _Inside(threading.local):
    """Whether this thread is already running a piece. Work is not split again: waiting workers could deadlock."""

    piece = False


class _Workers:
    """The threads that `parallel` uses, started at the first piece of work."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.inside = _Inside()
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Reset after a fork: the child has none of its parent's threads, and may hold one of their locks."""
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        pool._lock = threading.RLock()

    def resize(self, count: int) -> None:
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown()
            self.count, self._executor = max(1, count), None

    def start(self, work: Callable[[int, int], None], start: int, stop: int) -> Future[None]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.count, thread_name_prefix="genesis-cpu")
            return self._executor.submit(self.run, work, start, stop)

    def run(self, work: Callable[[int, int], None], start: int, stop: int) -> None:
        self.inside.piece = True
        try:
            with np.errstate(all="ignore"):  # the setting is per thread
                work(start, stop)
        finally:
            self.inside.piece = False


_workers = _Workers(os.cpu_count() or 1)


def set_threads(count: int) -> None:
    """Set how many threads elementwise work may use. Matmuls follow the setting of the BLAS library."""
    _workers.resize(count)


def threads() -> int:
    """The number of threads that elementwise work may use."""
    return _workers.count


def each_thread(work: Callable[[int], None], count: int) -> None:
    """Run `work(0)` … `work(count - 1)` in parallel. Each call runs its matmuls on one thread and is not split."""

    def run_range(start: int, stop: int) -> None:
        for i in range(start, stop):
            work(i)

    with one_blas_thread():
        parallel(run_range, count, _PARALLEL_FROM)


def is_split(elements: int) -> bool:
    """Whether `parallel` would split work on this many elements."""
    return elements >= _PARALLEL_FROM and _workers.count > 1 and not _workers.inside.piece


def parallel(work: Callable[[int, int], None], rows: int, elements: int) -> None:
    """Run `work(start, stop)` over [0, rows), split between threads if there are enough `elements`.

    Pieces write separate outputs, and a row's result depends on that row only. So results do not depend on the split
    or on timing. Work inside a piece is not split again.
    """
    parts = min(_workers.count, rows) if is_split(elements) else 1
    if parts <= 1:
        work(0, rows)
        return
    bounds = list(itertools.pairwise(rows * i // parts for i in range(parts + 1)))
    jobs = [_workers.start(work, start, stop) for start, stop in bounds[1:]]
    try:
        _workers.run(work, *bounds[0])
    finally:
        wait(jobs)  # also after an error: the pieces write memory that the caller is about to free
    for job in jobs:
        job.result()


@functools.cache
def _blas() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def set_blas_threads(count: int) -> None:
    """Set how many threads matmuls use."""
    _blas().limit(limits=count, user_api="blas")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run the matmuls inside the block on one thread each, for work that `parallel` splits."""
    with _blas().limit(limits=1, user_api="blas"):
        yield
