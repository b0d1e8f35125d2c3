"""CUDA graphs: the launches of a function captured once and replayed with one call. This part knows no tensors.

All graphs of a device share one arena, apart from that of normal work. Memory that a graph uses inside itself is used
by the next one, too, so graphs run one after the other, and what one leaves is valid until the next replay.
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

WARM_UPS = 2  # the first makes what is made once, in normal memory; the second takes what the capture will need
T = TypeVar("T")


class Captured(NamedTuple):
    """The driver's graph and its executable, and memory that it reads and that was given back meanwhile."""

    graph: int
    executable: int
    held: list[Block]


class RawGraph:
    """A captured graph of one device, replayed on the current stream."""

    _graph: Captured | None = None  # of the class, because an object that could not be made is deleted, too

    def __init__(self, backend: Runtime) -> None:
        self.backend = backend
        self._room = 0  # bytes of large blocks in a run that do not outlast it

    @property
    def is_captured(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    def capture(self, function: Callable[[], T], warm_ups: int = WARM_UPS) -> T:
        """Run `function` `warm_ups` times and capture it; its result, whose values appear with the first replay.

        What it allocates stays at its place. It must launch the same work in every run, and must not read values on
        the host, wait, or copy from the host: all that raises DeviceError, and the graph stays empty.

        Raises:
            DeviceError: see above. UsageError: inside another capture, without warm-up, or a second time.
        """
        if warm_ups < WARM_UPS:
            raise UsageError(f"{warm_ups} warm-up runs; a capture needs {WARM_UPS}")
        self._refuse()
        with self._on_own_stream():
            self.first(function)
            for _ in range(warm_ups - 1):
                self.warm_up(function)
            return self.record(function)

    def first(self, function: Callable[[], T]) -> T:
        """Run `function` in normal memory, which holds what is made once, and note how much the run takes besides.

        A program whose first runs count (the steps of a training run) calls this, then `warm_up`, then `record`, where
        `capture` would run the function without need.
        """
        with self.backend.pool.traced(self.backend.stream) as events:
            result = function()
        self._room = room_for(events)
        return result

    def warm_up(self, function: Callable[[], T]) -> T:
        """Run `function` with the memory that its capture will use: one segment where it is the first graph, so that
        none is lost between segments. It must have run before in normal memory.
        """
        self._refuse()
        with self._arena():
            return function()

    def record(self, function: Callable[[], T]) -> T:
        """Capture `function`, which was warmed up; nothing of it runs before the first replay. See `capture`."""
        self._refuse()
        with self._on_own_stream(priority=-1):  # before work on the side stream
            pool = self.backend.pool
            if pool.graph_count == 0:  # packed anew, blocks are where they were in the warm-up
                self.backend.driver.synchronize()
                pool.empty_graphs()
            with self._arena():
                return self._record(function, self.backend.stream)

    @contextmanager
    def _on_own_stream(self, priority: int = 0) -> Iterator[None]:
        """Launch on a stream of its own, which follows the current one and is followed by it."""
        backend, origin = self.backend, self.backend.stream
        handle = take_stream(backend, priority)
        backend.driver.follow(handle, origin)
        try:
            with use(backend, handle):
                yield
            backend.driver.follow(origin, handle)
        finally:
            give_stream(backend, handle, priority)

    def _refuse(self) -> None:
        """Raise for what cannot be captured now."""
        if self._graph is not None or self.backend.pool.private is not None:
            what = "this graph was captured already" if self._graph is not None else "a capture inside a capture"
            raise UsageError(what, next="make another Graph")
        if launches_block():
            raise DeviceError("CUDA_LAUNCH_BLOCKING waits for every launch, which a graph cannot hold", next="unset it")

    @contextmanager
    def _arena(self) -> Iterator[None]:
        """Memory comes from the graphs' arena."""
        pool = self.backend.pool
        if pool.graphs is None:
            pool.graphs = Arena(pool, compact=True)
        pool.private, pool.graphs.room = pool.graphs, self._room
        try:
            yield
        finally:
            pool.private = None

    def _record(self, function: Callable[[], T], stream: int) -> T:
        driver, pool, side_stream = self.backend.driver, self.backend.pool, self.backend.side_stream
        comm_stream = self.backend.comm_stream
        gc.collect()
        pool.end_retired()
        driver.synchronize()
        pool.take_back()  # or what is free already would be held
        collecting = gc.isenabled()
        gc.disable()  # finalizers of other libraries may call the driver in ways that end a capture
        driver.begin_capture(stream)
        pool.capturing = True
        try:
            result = function()
            side_stream.join()
            comm_stream.join()
        except BaseException:
            side_stream.forget()
            comm_stream.forget()
            with contextlib.suppress(DeviceError):  # what the driver has ended already
                driver.destroy_graph(driver.end_capture(stream), None)
            _give_back(pool, pool.end_capture())
            raise
        finally:
            if collecting:
                gc.enable()
        held, graph = pool.end_capture(), None
        try:
            graph = driver.end_capture(stream)
            executable = pool.with_room("the executable of a CUDA graph", lambda: driver.instantiate(graph))
        except (DeviceError, OutOfMemoryError):
            if graph is not None:
                driver.destroy_graph(graph, None)
            _give_back(pool, held)
            raise
        self._graph = Captured(graph, executable, held)
        _open.add(self)
        pool.graph_count += 1
        return result

    def replay(self) -> None:
        """Run what was recorded, in stream order. Raises UsageError before a capture and after `close`."""
        if self._graph is None:
            raise UsageError("replay() of a graph that was not captured", next="call capture() first")
        self.backend.driver.launch_graph(self._graph.executable, self.backend.stream)

    def close(self) -> None:
        """Forget the graph after its last replay is done; the memory of all graphs is free when none is left."""
        self._retire()
        if not self.backend.pool.capturing:
            self.backend.pool.end_retired()

    def _retire(self) -> None:
        captured, self._graph = self._graph, None
        if captured is not None:
            self.backend.pool.retired.append(functools.partial(_destroy, self.backend, captured))

    def __del__(self) -> None:  # in any thread, which must not wait, and in the middle of another graph's capture
        self._retire()


_open: weakref.WeakSet[RawGraph] = weakref.WeakSet()


def close_graphs(backend: Runtime) -> None:
    """Close all graphs of a device, whoever holds them, and destroy those that nobody holds any more."""
    for graph in list(_open):
        if graph.backend is backend:
            graph.close()
    backend.pool.end_retired()


def _destroy(backend: Runtime, captured: Captured) -> None:
    backend.driver.synchronize()  # it may still run
    backend.driver.destroy_graph(captured.graph, captured.executable)
    backend.pool.graph_count -= 1
    _give_back(backend.pool, captured.held)


def _give_back(pool: Pool, blocks: list[Block]) -> None:
    for block in blocks:
        pool.give(block)


def launches_block() -> bool:
    """Whether every launch waits until it is done: CUDA's own setting, for debugging."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
