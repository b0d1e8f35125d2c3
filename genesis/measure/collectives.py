"""Times the collectives of training steps on several ranks, and how long a step waits for them.

A collective's time is exposed while the step's stream waits for it, and hidden while the step computes. On a GPU whose
group runs in stream order, CUDA events on the comm stream and around each join time both. A CUDA graph that is captured
meanwhile records these events at each replay. Elsewhere the host's clock times the calls, and each call blocks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.distributed.group import Group
from genesis.measure.limits import wait_for
from genesis.measure.record import Column, Table, format_seconds, format_share, table
from genesis.measure.recorder import shadowed
from genesis.measure.run import Subject, free_graphs, step_seconds
from genesis.optim.optimizer import Optimizer


class Collective(NamedTuple):
    """All calls of one kind in a step.

    Attributes:
        name: the call and its purpose.
        calls: number of calls.
        nbytes: bytes of the full buffers, which a reduce-scatter or all-reduce reads and an all-gather writes.
        seconds: time from this rank's start to the end, including the wait for slower ranks.
        exposed: the part of `seconds` in which the step waited.
    """

    name: str
    calls: int
    nbytes: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds that overlap with the step's computation."""
        return self.seconds - self.exposed


class StepTimes(NamedTuple):
    """The times of a step on this rank.

    Attributes:
        computing: seconds until the step first waits for a collective, which covers forward and backward.
        collectives: the collectives, one entry per name.
    """

    computing: float
    collectives: list[Collective]


def bus_factor(name: str, ranks: int) -> float:
    """Bus bandwidth divided by bytes per second: 2·(W - 1)/W for an all-reduce, otherwise (W - 1)/W, for W ranks.

    Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    """
    return (ranks - 1) / ranks * (2 if name.startswith("all-reduce") else 1)


COLUMNS = (
    Column("name", "collective", "text", "The call and its purpose."),
    Column("calls", "calls", "count", "Calls in a step."),
    Column("nbytes", "bytes", "bytes", "Bytes of the full buffers."),
    Column("seconds", "time", "s", "Time from a rank's start, including the wait for other ranks."),
    Column("bus_rate", "bus", "byte/s", "Bus bandwidth as nccl-tests define it."),
    Column("hidden", "hidden", "s", "The part of the time that overlaps with the step's computation."),
    Column("exposed", "exposed", "s", "The part of the time in which the step waited."),
)


def collective_table(times: StepTimes, ranks: int, plain: float) -> Table:
    """The table of a step's collectives over `ranks` ranks; an unwatched step takes `plain` seconds."""
    rows = [
        {**c._asdict(), "hidden": c.hidden, "bus_rate": c.nbytes * bus_factor(c.name, ranks) / c.seconds}
        for c in times.collectives
    ]
    exposed = sum(each.exposed for each in times.collectives)
    note = f"A step waits {format_seconds(exposed)} for them, {format_share(exposed / plain)} of an unwatched one."
    title = "collectives of a step: the median of steps, the mean of ranks"
    return table("collectives", title, COLUMNS, rows, notes=[note])


Call = tuple[str, int, float, float]  # name, bytes, and start and end in seconds since the step began


def collectives_of(calls: Iterable[Call], waits: Sequence[tuple[float, float]]) -> list[Collective]:
    """Sum calls by name, in the order of first calls; `waits` are (start, end) of the step's disjoint waits."""
    sums = dict[str, Collective]()
    for name, nbytes, start, end in calls:
        exposed = sum(max(0.0, min(end, last) - max(start, first)) for first, last in waits)
        earlier = sums.get(name, Collective(name, 0, 0, 0.0, 0.0))
        total = earlier.seconds + end - start, earlier.exposed + exposed
        sums[name] = Collective(name, earlier.calls + 1, earlier.nbytes + nbytes, *total)
    return list(sums.values())


def medians(steps: Sequence[StepTimes]) -> StepTimes:
    """The median of each time over steps. All steps must make the same calls."""
    rows = []
    for same in zip(*(step.collectives for step in steps), strict=True):
        assert len({each[:3] for each in same}) == 1, "steps make the same calls"
        seconds, exposed = (median(times) for times in zip(*(each[3:] for each in same), strict=True))
        rows.append(same[0]._replace(seconds=seconds, exposed=exposed))
    return StepTimes(median(step.computing for step in steps), rows)


def timed_collectives(
    optimizer: Optimizer,
    group: Group,
    captured: Callable[[], Subject],
    count: int,
    in_turn: Callable[[Sequence[float]], list[float]],
) -> StepTimes:
    """Time the collectives of `count` steps: medians over steps, means over ranks. All ranks must call it.

    Args:
        captured: returns the steps to take. On a GPU it captures them, because CUDA graphs hold the timing events.
        in_turn: gathers the numbers of all ranks: first each rank's first number, then each rank's second, and so on.
    """
    device, by_step = optimizer.param_groups[0]["params"][0].device, list[StepTimes]()
    free_graphs(device)
    watch = CollectiveWatch(optimizer, group, device)
    with watch.watching():
        subject = captured()
        for _ in range(count):
            step_seconds(subject, watch.begin)
            by_step.append(watch.times())
            subject.settle()
        del subject
        free_graphs(device)  # graphs must be freed before their events
    own = medians(by_step)
    every = in_turn([own.computing, *(t for each in own.collectives for t in (each.seconds, each.exposed))])
    means = np.reshape(every, (1 + 2 * len(own.collectives), -1)).mean(1).tolist()
    rows = zip(own.collectives, means[1::2], means[2::2], strict=True)
    return StepTimes(means[0], [each._replace(seconds=seconds, exposed=exposed) for each, seconds, exposed in rows])


class CollectiveWatch:
    """Times the collectives of steps that run, or are captured, while `watching` is entered.

    A moment is a CUDA event if the group runs in stream order, otherwise a time of the host's clock. The moments of a
    CUDA graph are from its last replay in a step.
    """

    def __init__(self, optimizer: Optimizer, group: Group, device: Device) -> None:
        self._group, self._wait = group, wait_for(device)
        self._backend: Any = None if device == CPU else backend_for(device)
        self._in_order = device != CPU and group.is_in_stream_order
        self._events: list[int] = []
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        self._weights = [p.array.storage for p in parameters]
        self._gradients = [each.storage for each in optimizer.shared_memory()["gradients"]]
        # Calls (name, bytes, start, end) and waits (start, end), by whether they were captured.
        self._calls: dict[bool, list[tuple[str, int, Any, Any]]] = {False: [], True: []}
        self._waits: dict[bool, list[tuple[Any, Any]]] = {False: [], True: []}
        self._began: Any = self._now()
        self._is_joined = True

    def _now(self) -> Any:
        """The current moment."""
        if not self._in_order:
            self._wait()
            return time.perf_counter()
        self._events.append(self._backend.driver.create_event(True))
        self._backend.driver.record_time(self._events[-1], self._backend.stream)
        return self._events[-1]

    def _seconds(self, moment: Any) -> float:
        """Seconds from the start of the step to a moment."""
        return float(self._backend.driver.elapsed(self._began, moment) if self._in_order else moment - self._began)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the work that runs or is captured inside the block. Close all captured graphs before the block ends."""
        group = self._group
        with ExitStack() as stack:
            stack.callback(self._close)
            timed = {
                "reduce_scatter": self._timed("reduce-scatter", group.reduce_scatter, 0),
                "all_gather": self._timed("all-gather", group.all_gather, 1),
                "all_reduce": self._timed("all-reduce", group.all_reduce, 0),
            }
            stack.enter_context(shadowed(group, **timed))
            if self._in_order:
                stream = self._backend.comm_stream
                stack.enter_context(shadowed(stream, join=functools.partial(self._join, stream.join)))
            yield

    def _close(self) -> None:
        self._wait()
        for event in self._events:
            self._backend.driver.destroy_event(event)

    def begin(self) -> None:
        """Begin a step."""
        self._calls[False], self._waits[False] = [], []
        if self._in_order:
            self._backend.driver.record_event(self._began, self._backend.stream)
        else:
            self._began = self._now()

    def times(self) -> StepTimes:
        """The times of the step since `begin`. The device must be idle."""
        in_graph, seconds = not self._calls[False], self._seconds
        waits = [(seconds(start), seconds(end)) for start, end in self._waits[in_graph]]
        calls = [(name, size, seconds(start), seconds(end)) for name, size, start, end in self._calls[in_graph]]
        return StepTimes(min((start for start, _ in waits), default=0.0), collectives_of(calls, waits))

    def _is_capturing(self) -> bool:
        return self._backend is not None and bool(self._backend.pool.capturing)

    def _timed(self, kind: str, method: Callable[..., None], whole: int) -> Callable[..., None]:
        """Return `method` with timed calls; its argument number `whole` is the full buffer."""

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> None:
            start = self._now()
            method(*args, **settings)
            end, in_graph = self._now(), self._is_capturing()
            name = f"{kind}, {self._purpose(kind, args[whole])}"
            self._calls[in_graph].append((name, args[whole].nbytes, start, end))
            if not self._in_order:
                self._waits[in_graph].append((start, end))
            self._is_joined = False

        return call

    def _join(self, join: Callable[[], None]) -> None:
        if self._is_joined:
            join()
        else:
            self._is_joined, start = True, self._now()
            join()
            self._waits[self._is_capturing()].append((start, self._now()))

    def _purpose(self, kind: str, whole: Array) -> str:
        """The purpose: "weights", "gradients", or "norm" for the losses and sums of squares of the gradient norm."""
        if any(whole.storage is each for each in self._weights):
            return "weights"
        is_sum = any(whole.storage is each for each in self._gradients)
        return "gradients" if is_sum or kind == "reduce-scatter" else "norm"
