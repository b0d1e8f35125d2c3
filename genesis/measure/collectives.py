"""The collectives of a training step in ranks: their bytes, their bandwidth, and how long a step stands still for them.

A step's own stream waits at few places for what ranks send each other. What of a collective falls into such a wait is
exposed, the rest is hidden behind the step's work. On a GPU whose group is in stream order both are read from events on
the comm stream and around each join, which a graph that is captured meanwhile records at each replay; a graph that is
captured before or after has none. Elsewhere the host's clock is read, and every call is a wait.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.distributed.group import Group
from genesis.measure.limits import wait_for
from genesis.measure.record import Column, Table, format_seconds, format_share, table
from genesis.measure.recorder import shadowed
from genesis.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = "reduce-scatter", "all-gather", "all-reduce"


class Collective(NamedTuple):
    """The calls of one kind in a step, added up.

    Attributes:
        name: what is called, and for what.
        nbytes: of the whole buffers: what a reduce-scatter reads, an all-gather writes, an all-reduce reads.
        seconds: from when this rank could begin until it was done; the wait for a rank that comes later is part of it.
        exposed: seconds of them in which the step waited.
    """

    name: str
    calls: int
    nbytes: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds behind the step's own work."""
        return self.seconds - self.exposed


class StepTimes(NamedTuple):
    """A step of this rank.

    Attributes:
        computing: seconds until it first waited for what ranks send each other: forward and backward.
        collectives: by name.
    """

    computing: float
    collectives: list[Collective]


class Call(NamedTuple):
    """One call; times are seconds since the step began."""

    name: str
    nbytes: int
    start: float
    end: float


def bus_factor(name: str, ranks: int) -> float:
    """By what bytes over seconds are multiplied for the bandwidth that links need: 2·(W - 1)/W for an all-reduce, else
    (W - 1)/W, as NVIDIA's nccl-tests define it (doc/PERFORMANCE.md).
    """
    return (ranks - 1) / ranks * (2 if name.startswith(ALL_REDUCE) else 1)


# Of a collective of a step, and the number of ranks.
COLUMNS = (
    Column("name", "collective", "text", "What is called, and for what.", lambda row: row[0].name),
    Column("calls", "calls", "count", "In a step.", lambda row: row[0].calls),
    Column("nbytes", "bytes", "bytes", "Of the whole buffers.", lambda row: row[0].nbytes),
    Column("seconds", "time", "s", "From when a rank could begin, with the wait for others.",
           lambda row: row[0].seconds),
    Column("bus_rate", "bus", "byte/s", "As nccl-tests define it.",
           lambda row: row[0].nbytes * bus_factor(row[0].name, row[1]) / row[0].seconds),
    Column("hidden", "hidden", "s", "The part of the time behind the step's own work.", lambda row: row[0].hidden),
    Column("exposed", "exposed", "s", "The part of the time in which the step waited.", lambda row: row[0].exposed),
)  # fmt: skip


def collective_table(times: StepTimes, ranks: int, plain: float) -> Table:
    """The collectives of a step of so many ranks, which takes `plain` seconds unwatched."""
    title = "collectives of a step: the median of steps, the mean of ranks"
    found = table("collectives", title, COLUMNS, [(each, ranks) for each in times.collectives])
    exposed = sum(each.exposed for each in times.collectives)
    share = format_share(exposed / plain)
    found.notes = [f"A step waits {format_seconds(exposed)} for them, {share} of an unwatched one."]
    return found


def collectives_of(calls: Iterable[Call], waits: Sequence[tuple[float, float]]) -> list[Collective]:
    """Calls by name, in the order of their first.

    Args:
        waits: (start, end) of the step's waits, of which none overlap.
    """
    found = dict[str, Collective]()
    for name, nbytes, start, end in calls:
        exposed = sum(max(0.0, min(end, last) - max(start, first)) for first, last in waits)
        one = found.get(name, Collective(name, 0, 0, 0.0, 0.0))
        found[name] = Collective(
            name, one.calls + 1, one.nbytes + nbytes, one.seconds + end - start, one.exposed + exposed
        )
    return list(found.values())


def medians(steps: Sequence[StepTimes]) -> StepTimes:
    """The median of each time over steps, which make the same calls."""
    by_name = defaultdict[str, list[Collective]](list)
    for step in steps:
        for each in step.collectives:
            by_name[each.name].append(each)
    assert all(len({(c.calls, c.nbytes) for c in same}) == 1 for same in by_name.values()), "steps make the same calls"
    rows = [
        same[0]._replace(seconds=median(c.seconds for c in same), exposed=median(c.exposed for c in same))
        for same in by_name.values()
    ]
    return StepTimes(median(step.computing for step in steps), rows)


class CollectiveWatch:
    """Times the collectives of steps that are made, or captured, while `watching` is entered.

    A graph's times are those of its last replay in a step.

    Args:
        optimizer: which makes the collectives.
        group: through which.
    """

    def __init__(self, optimizer: Optimizer, group: Group, device: Device) -> None:
        self._group, self._device = group, device
        self._comm_stream = None if device == CPU or not group.is_in_stream_order else _backend(device).comm_stream
        self._clock: _HostClock | _DeviceClock = (
            _HostClock(device) if self._comm_stream is None else _DeviceClock(_backend(device))
        )
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        self._weights = [p.array.storage for p in parameters]
        self._gradients = [each.storage for each in optimizer.shared_memory()["gradients"]]
        self._captured, self._made = _Moments(), _Moments()
        self._unjoined = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time what is launched or captured inside the block; leave it when the graphs are closed."""
        with ExitStack() as stack:
            stack.callback(self._clock.close)
            timed = {
                "reduce_scatter": self._timed(REDUCE_SCATTER, self._group.reduce_scatter, 0),
                "all_gather": self._timed(ALL_GATHER, self._group.all_gather, 1),
                "all_reduce": self._timed(ALL_REDUCE, self._group.all_reduce, 0),
            }
            stack.enter_context(shadowed(self._group, **timed))
            if self._comm_stream is not None:
                stack.enter_context(
                    shadowed(self._comm_stream, join=functools.partial(self._join, self._comm_stream.join))
                )
            yield

    def begin(self) -> None:
        """A step begins."""
        self._made = _Moments()
        self._clock.begin()

    def times(self) -> StepTimes:
        """Those of the step since `begin`. The device is idle."""
        moments = self._made if self._made.calls else self._captured
        seconds = self._clock.seconds
        waits = [(seconds(start), seconds(end)) for start, end in moments.waits]
        calls = (Call(name, nbytes, seconds(start), seconds(end)) for name, nbytes, start, end in moments.calls)
        return StepTimes(min((start for start, _ in waits), default=0.0), collectives_of(calls, waits))

    def _timed(self, kind: str, method: Callable[..., None], whole: int) -> Callable[..., None]:
        """`method`, timed; argument number `whole` has the bytes that count."""

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> None:
            start = self._clock.now()
            method(*args, **settings)
            end, into = self._clock.now(), self._into()
            into.calls.append((f"{kind}, {self._purpose(kind, args[whole])}", args[whole].nbytes, start, end))
            if self._comm_stream is None:
                into.waits.append((start, end))
            self._unjoined = True

        return call

    def _join(self, join: Callable[[], None]) -> None:
        if not self._unjoined:
            join()
            return
        self._unjoined, start = False, self._clock.now()
        join()
        self._into().waits.append((start, self._clock.now()))

    def _into(self) -> _Moments:
        is_captured = self._device != CPU and _backend(self._device).pool.capturing
        return self._captured if is_captured else self._made

    def _purpose(self, kind: str, whole: Array) -> str:
        """What it is that ranks send each other: gradients, weights, or the losses and squares that are few numbers."""
        if any(whole.storage is each for each in self._weights):
            return "weights"
        is_sum = any(whole.storage is each for each in self._gradients)
        return "gradients" if is_sum or kind == REDUCE_SCATTER else "norm"


@dataclass
class _Moments:
    """Calls and waits by the clock's moments."""

    calls: list[tuple[str, int, Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class _HostClock:
    """By the host, where calls wait for the device: once it is done with what comes before."""

    def __init__(self, device: Device) -> None:
        self._wait, self._begun = wait_for(device), 0.0

    def begin(self) -> None:
        self._begun = self.now()

    def now(self) -> float:
        self._wait()
        return time.perf_counter()

    def seconds(self, moment: float) -> float:
        return moment - self._begun

    def close(self) -> None: ...


class _DeviceClock:
    """By events, in graphs as well."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend, self._driver = backend, backend.driver
        self._events = [self._driver.create_event(True)]

    def begin(self) -> None:
        self._driver.record_event(self._events[0], self._backend.stream)

    def now(self) -> int:
        self._events.append(self._driver.create_event(True))
        self._driver.record_time(self._events[-1], self._backend.stream)
        return self._events[-1]

    def seconds(self, moment: int) -> float:
        return self._driver.elapsed(self._events[0], moment)

    def close(self) -> None:
        wait_for(self._backend.device)()
        for event in self._events:
            self._driver.destroy_event(event)
        self._events = []


def _backend(device: Device) -> CudaBackend:
    return cast("CudaBackend", backend_for(device))
