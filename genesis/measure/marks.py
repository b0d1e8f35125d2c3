"""When each kernel of a step ran on the GPU: events around every launch, and after every kernel inside a CUDA graph.

Launched one by one, a kernel has an event before it and one after it: what is between a kernel's end and the next
one's beginning is idle time. In a graph an event follows every kernel, and a kernel's time starts where the one
before ended. Kernels then run one after the other: what a graph would run concurrently or launch early waits, and so
does what ranks send each other. A collective counts as one kernel, with all that it launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend.cuda.launch import KernelLaunch, watching_launches
from genesis.measure.recorder import OUTSIDE, Frame, shadowed
from genesis.shapes import Shape

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

COPY, GRAPH = "(copy)", "(CUDA graph)"  # ops of a copy that no op made, and of a graph that was captured unwatched


class Kernel(NamedTuple):
    """A kernel, a copy or a fill as it ran.

    Attributes:
        start, end: seconds since the first mark of the step.
        is_concurrent: it ran on another stream than the step, at the same time as other work.
        shapes: of the op's inputs and outputs.
        launched: when the host launched it by `time.perf_counter`; of a graph's, when it was captured.
        frame: the host's frame that launched it, which for a graph's is one of the capture.
    """

    name: str
    op: str
    phase: str
    module: str
    grid: tuple[int, ...]
    start: float
    end: float
    is_concurrent: bool
    in_graph: bool
    shapes: tuple[Shape, ...] = ()
    launched: float = 0.0
    frame: Frame | None = None


class _Launch(NamedTuple):
    """A launch with the events before and after it; `other` is its op where no op made it."""

    name: str
    grid: tuple[int, ...]
    frame: Frame
    other: str
    at: float
    stream: int
    before: int
    after: int


@dataclass
class _Capture:
    """What a graph holds."""

    start: int
    launches: list[_Launch] = field(default_factory=list)


class Marks:
    """Puts events around launches while `watching` is entered. What was captured meanwhile keeps its events.

    Args:
        current: the frame of the host in which something is launched now.
        launched: called before a wait for what is launched.
    """

    def __init__(
        self, backend: CudaBackend, current: Callable[[], Frame], launched: Callable[[], None] = lambda: None
    ) -> None:
        self.backend, self._current, self._before_wait = backend, current, launched
        self._in_collective = False
        self._launches: list[_Launch] = []
        self._kernels: list[Kernel] = []
        self._free: list[int] = []  # events to be used again
        self._graphs: dict[int, _Capture] = {}  # by executable
        self._capture: _Capture | None = None
        self._replayed: list[int] = []
        self._main = 0
        self._base = backend.driver.create_event(True)
        self._all, self._in_graphs = [self._base], list[int]()

    # --- A step -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: forget the one before."""
        self._free += [e for launch in self._launches for e in (launch.before, launch.after)]
        self._launches, self._kernels, self._replayed = [], [], []
        self._main = self.backend.stream
        self.backend.driver.record_time(self._base, self._main)

    def kernels(self) -> list[Kernel]:
        """What ran on the GPU since `begin`, by its start. The device is idle."""
        self._read_graphs()
        self._kernels += [self._kernel(one, False) for one in self._launches]
        return sorted(self._kernels, key=lambda k: k.start)

    def _kernel(self, one: _Launch, in_graph: bool) -> Kernel:
        elapsed, frame = self.backend.driver.elapsed, one.frame
        start, end = elapsed(self._base, one.before), elapsed(self._base, one.after)
        is_concurrent = not in_graph and one.stream != self._main
        op = frame.name if frame.level == "op" else one.other
        shapes = frame.shapes[0] + frame.shapes[1] if frame.level == "op" else ()
        about = one.name, op, frame.phase, frame.module, one.grid
        return Kernel(*about, start, end, is_concurrent, in_graph, shapes, one.at, frame)

    def _read_graphs(self) -> None:
        """Read the events of graphs that were replayed: the next replay writes over them."""
        replayed, self._replayed = self._replayed, []
        for executable in replayed:
            self._kernels += [self._kernel(one, True) for one in self._graphs[executable].launches]

    # --- Watching -----------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark what is launched inside the block."""
        driver, backend = self.backend.driver, self.backend
        with ExitStack() as stack:
            stack.callback(setattr, driver, "dependent", driver.dependent)
            driver.dependent = False
            stack.enter_context(watching_launches(self._launched))
            stack.enter_context(
                shadowed(backend, on_side_stream=lambda nbytes: nullcontext(), on_comm_stream=nullcontext)
            )
            stack.enter_context(
                shadowed(
                    driver,
                    copy=self._copies(driver.copy),
                    begin_capture=self._begins_capture(driver.begin_capture),
                    instantiate=self._instantiates(driver.instantiate),
                    launch_graph=self._replays(driver.launch_graph),
                )
            )
            yield

    def close(self, keeps_graphs: bool = False) -> None:
        """Give the events back, those of graphs only if these are replayed no more."""
        for event in (*self._all, *(() if keeps_graphs else self._in_graphs)):
            self.backend.driver.destroy_event(event)
        self._all, self._in_graphs = [], []

    def collective(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, all of whose launches count as one."""

        def run(*args: Any, **settings: Any) -> None:
            self._in_collective = True
            try:
                method(*args, **settings)
            finally:
                self._in_collective = False

        def marked(*args: Any, **settings: Any) -> None:
            self._mark(method.__name__, (), self.backend.stream, lambda: run(*args, **settings))

        return marked

    def _launched(self, launched: KernelLaunch, stream: int) -> None:
        self._mark(launched.name, tuple(launched.grid), stream, lambda: launched.run(stream))

    def _mark(
        self, name: str, grid: tuple[int, ...], stream: int, run: Callable[[], object], other: str = OUTSIDE
    ) -> None:
        if self._in_collective:
            run()
            return
        record, at = self.backend.driver.record_time, time.perf_counter()
        if self._capture is not None and self.backend.pool.capturing:
            before = self._capture.launches[-1].after if self._capture.launches else self._capture.start
            run()
            into, after = self._capture.launches, self._event(self._in_graphs)
        else:
            before, after, into = self._reused(), self._reused(), self._launches
            record(before, stream)
            run()
        record(after, stream)
        into.append(_Launch(name, grid, self._current(), other, at, stream, before, after))

    def _reused(self) -> int:
        return self._free.pop() if self._free else self._event(self._all)

    def _event(self, into: list[int]) -> int:
        into.append(self.backend.driver.create_event(True))
        return into[-1]

    # --- Stand-ins for calls of the driver ----------------------------------------------------------------------------

    def _copies(self, copy: Any) -> Any:
        def marked(target: int, source: int, nbytes: int, stream: int) -> None:
            self._mark("copy", (), stream, lambda: copy(target, source, nbytes, stream), COPY)

        return marked

    def _begins_capture(self, begin_capture: Any) -> Any:
        def marked(stream: int) -> None:
            begin_capture(stream)
            self._capture = _Capture(self._event(self._in_graphs))
            self.backend.driver.record_time(self._capture.start, stream)

        return marked

    def _instantiates(self, instantiate: Any) -> Any:
        def marked(graph: int) -> int:
            executable: int = instantiate(graph)
            assert self._capture is not None
            self._graphs[executable], self._capture = self._capture, None
            return executable

        return marked

    def _replays(self, launch_graph: Any) -> Any:
        def marked(executable: int, stream: int) -> None:
            if executable in self._replayed:
                self._before_wait()
                self.backend.driver.synchronize()
                self._read_graphs()
            if executable in self._graphs:
                launch_graph(executable, stream)
                self._replayed.append(executable)
            else:
                self._mark("graph", (), stream, lambda: launch_graph(executable, stream), GRAPH)

        return marked
