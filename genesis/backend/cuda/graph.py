"""CUDA graphs: launches that are captured once and replayed with one call, without tensors.

Graphs with the same pool handle share an arena, separate from the memory of normal work. They reuse each other's
internal memory, so they run one after the other, and the results of one are valid until the next replay. Graphs of
functions share one arena for each device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from genesis.backend.cuda.memory import Arena, Block, Pool, room_for
from genesis.backend.cuda.stream import Runtime, give_stream, take_stream, use
from genesis.errors import DeviceError, OutOfMemoryError, UsageError

SHARED = 0  # pool handle of the graphs of functions
WARM_UPS = 2  # the first allocates persistent memory outside the arena; the second reserves what the capture needs
T = TypeVar("T")


class Captured(NamedTuple):
    """A driver graph, its executable, and blocks that it reads although their owners returned them meanwhile."""

    graph: int
    executable: int
    held: list[Block]
    arena: Arena


class RawGraph:
    """A captured graph of one device, replayed on the current stream."""

    _graph: Captured | None = None  # on the class, because __del__ also runs if __init__ failed

    def __init__(self, backend: Runtime, handle: int = SHARED) -> None:
        self.backend, self.handle = backend, handle
        self._room = 0  # bytes of large blocks that are only used during a run

    @property
    def is_captured(self) -> bool:
        """Whether the graph was captured and can be replayed."""
        return self._graph is not None

    def capture(self, function: Callable[[], T], warm_ups: int = WARM_UPS) -> T:
        """Run `function` `warm_ups` times, capture it, and return its result, which the first replay computes.

        The addresses of its allocations are fixed. It must launch the same work in every run.

        Raises:
            DeviceError: the function reads values on the host, waits, or copies from the host. The graph stays empty.
            UsageError: the call is nested in another capture, has too few warm-ups, or repeats a capture.
        """
        if warm_ups < WARM_UPS:
            raise UsageError(f"{warm_ups} warm-up runs; a capture needs {WARM_UPS}")
        self._check_capturable()
        with self._on_own_stream():
            self.first(function)
            for _ in range(warm_ups - 1):
                self.warm_up(function)
            return self.record(function)

    def first(self, function: Callable[[], T]) -> T:
        """Run `function` in normal memory, where persistent allocations belong, and measure its temporary memory.

        `capture` runs the function only to warm it up. A program that needs the results of these runs, such as the
        steps of a training run, calls `first`, then `warm_up`, then `record`.
        """
        with self.backend.pool.traced(self.backend.stream) as events:
            result = function()
        self._room = room_for(events)
        return result

    def warm_up(self, function: Callable[[], T]) -> T:
        """Run `function` with the memory that its capture will use. It must have run in normal memory before.

        The first graph of a device reserves one segment, so no memory is lost between segments.
        """
        self._check_capturable()
        with self._arena():
            return function()

    def record(self, function: Callable[[], T]) -> T:
        """Capture `function`, which must be warmed up. None of it runs before the first replay. See `capture`."""
        self._check_capturable()
        with self._on_own_stream(priority=-1):  # before work on the side stream
            pool = self.backend.pool
            # With the arena empty, blocks get the same addresses as in the warm-up.
            arena = pool.graph_arena(self.handle)
            if arena.graph_count == 0:
                self.backend.driver.synchronize()
                pool.release_arena(arena)
            with self._arena():
                self._begin()
                try:
                    result = function()
                except BaseException:
                    self._abandon()
                    raise
                self._end()
                return result

    @contextmanager
    def _on_own_stream(self, priority: int = 0) -> Iterator[None]:
        """Launch on a separate stream that waits for the current stream, and which the current stream waits for."""
        backend, origin = self.backend, self.backend.stream
        handle = take_stream(backend, priority)
        backend.driver.follow(handle, origin)
        try:
            with use(backend, handle):
                yield
            backend.driver.follow(origin, handle)
        finally:
            give_stream(backend, handle, priority)

    def _check_capturable(self) -> None:
        """Raise if a capture is not possible now."""
        if self._graph is not None or self.backend.pool.private is not None:
            what = "this graph is already captured" if self._graph is not None else "captures cannot be nested"
            raise UsageError(what, next="create another graph")
        if launches_block():
            raise DeviceError("a graph cannot be captured while launches block", next="unset CUDA_LAUNCH_BLOCKING")

    @contextmanager
    def _arena(self) -> Iterator[None]:
        """Allocate from the graphs' arena inside the block."""
        pool = self.backend.pool
        pool.private = pool.graph_arena(self.handle)
        pool.private.room = self._room
        try:
            yield
        finally:
            pool.private = None

    def _begin(self) -> None:
        """Begin to capture the current stream. The arena must be in use."""
        backend, pool = self.backend, self.backend.pool
        _ = backend.side_stream, backend.comm_stream  # created outside the capture
        # Nothing may be pending when the capture begins.
        gc.collect()
        pool.end_retired()
        backend.driver.synchronize()
        pool.take_back()  # otherwise blocks that are already free would be held
        self._stream, self._collecting = backend.stream, gc.isenabled()
        gc.disable()  # finalizers of other libraries may make driver calls that invalidate a capture
        # Launches now enter the graph, and returned blocks are held.
        backend.driver.begin_capture(backend.stream)
        pool.capturing = True

    def _abandon(self) -> None:
        """End a capture that failed."""
        backend, pool = self.backend, self.backend.pool
        self._resume_collection()
        backend.side_stream.forget()
        backend.comm_stream.forget()
        with contextlib.suppress(DeviceError):  # the driver has already ended the capture
            backend.driver.destroy_graph(backend.driver.end_capture(self._stream), None)
        _give_back(pool, pool.end_capture())

    def _end(self) -> None:
        """End the capture and instantiate the graph; if that fails, return the blocks held meanwhile."""
        driver, pool = self.backend.driver, self.backend.pool
        try:
            self.backend.side_stream.join()
            self.backend.comm_stream.join()
        except BaseException:
            self._abandon()
            raise
        self._resume_collection()
        arena, held, graph = pool.graph_arena(self.handle), pool.end_capture(), None
        try:
            graph = driver.end_capture(self._stream)
            executable = pool.with_room("the executable of a CUDA graph", lambda: driver.instantiate(graph))
        except (DeviceError, OutOfMemoryError):
            if graph is not None:
                driver.destroy_graph(graph, None)
            _give_back(pool, held)
            raise
        self._graph = Captured(graph, executable, held, arena)
        _open.add(self)
        arena.graph_count += 1

    def _resume_collection(self) -> None:
        if self._collecting:
            gc.enable()

    def replay(self) -> None:
        """Run the captured work in stream order. Raises UsageError before a capture and after `close`."""
        if self._graph is None:
            raise UsageError("replay() needs a captured graph", next="call capture() first")
        self.backend.driver.launch_graph(self._graph.executable, self.backend.stream)

    def close(self) -> None:
        """Destroy the graph after its last replay. The memory of graphs becomes free when the last graph is closed."""
        self._retire()
        if not self.backend.pool.capturing:
            self.backend.pool.end_retired()

    def _retire(self) -> None:
        captured, self._graph = self._graph, None
        if captured is not None:
            self.backend.pool.retired.append(functools.partial(_destroy, self.backend, captured))

    def __del__(self) -> None:  # may run in any thread, which must not wait, and during another capture
        self._retire()


_open: weakref.WeakSet[RawGraph] = weakref.WeakSet()


def close_graphs(backend: Runtime) -> None:
    """Close all graphs of a device, and destroy those that have no owner."""
    for graph in list(_open):
        if graph.backend is backend:
            graph.close()
    backend.pool.end_retired()


def _destroy(backend: Runtime, captured: Captured) -> None:
    backend.driver.synchronize()  # the graph may still be running
    backend.driver.destroy_graph(captured.graph, captured.executable)
    captured.arena.graph_count -= 1
    _give_back(backend.pool, captured.held)
    backend.pool.drop_unused_arenas()


def _give_back(pool: Pool, blocks: list[Block]) -> None:
    for block in blocks:
        pool.give(block)


def launches_block() -> bool:
    """Whether every launch blocks until it is done, which CUDA's own setting requests for debugging."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
