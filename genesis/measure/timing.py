"""How long a call takes, by the wall and on a GPU alone, and how sure that is.

Samples are added until the median is precise or the time is over. The median's confidence interval is the one of order
statistics, which assumes nothing about how times are distributed (Hahn & Meeker, Statistical Intervals, 1991, 5.2).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

Sampler = Callable[[int], float]  # takes a number of calls, returns the seconds of all of them together

NORMAL_95 = 1.96  # standard deviations around the centre of a normal that hold 95 % of it
MAD_TO_SIGMA = 1.4826  # standard deviation of a normal in median absolute deviations
OUTLIER_SIGMAS = 5.0
LEAST_SAMPLES = 10  # the interval of fewer than 6 samples holds the median less often than 95 times in 100
NOISY_SPREAD = 0.10  # distance of the quartiles, as a share of the median
NOISY_OUTLIERS = 0.20  # share of outliers
REPLAY_SECONDS = 1e-3  # least duration of a replay, so that its start and end do not count
LEAST_CALLS, MOST_CALLS = 4, 100  # in a graph
CACHES = 4  # a fill of this many times the L2's size empties it


@dataclass(frozen=True)
class Plan:
    """How long and how precisely to measure."""

    precision: float = 0.02  # half-width of the median's 95 % confidence interval to reach, as a share of the median
    seconds: float = 1.0  # time after which sampling ends, without the warm-up
    warm_up: float = 0.05  # seconds of calls before the first sample; at least one call
    sample: float = 1e-3  # least seconds of a sample: several short calls are timed together
    most_calls: int = 1000  # calls in one sample at most
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)  # seconds, from any origin


class Timing(NamedTuple):
    """The time of one call."""

    seconds: float  # the median
    fastest: float  # the shortest sample that is not an outlier
    half_width: float  # of the median's 95 % confidence interval, as a share of it; infinite below 6 samples
    spread: float  # distance of the quartiles, as a share of the median
    samples: int  # number of samples kept
    calls: int  # number of calls in each sample
    outliers: int  # number of samples left out
    is_noisy: bool  # the precision was not reached, the spread is large, or outliers are many


def measure(sample: Sampler, plan: Plan | None = None) -> Timing:
    """Warm up, choose how many calls make a sample, and sample until the median is precise or the time is over."""
    plan = Plan() if plan is None else plan
    start, shortest = plan.clock(), sample(1)  # the shortest leaves out first touches of memory, and compilation
    while plan.clock() - start < plan.warm_up:
        shortest = min(shortest, sample(1))
    calls = plan.most_calls if shortest <= 0 else min(max(math.ceil(plan.sample / shortest), 1), plan.most_calls)
    samples: list[float] = []
    start = plan.clock()
    while True:
        samples.append(sample(calls) / calls)
        found = summarize(samples, calls, plan.precision)
        is_settled = found.samples >= LEAST_SAMPLES and found.half_width <= plan.precision
        if is_settled or plan.clock() - start >= plan.seconds:
            return found


def summarize(samples: Sequence[float], calls: int = 1, precision: float = Plan.precision) -> Timing:
    """The timing of samples in seconds a call."""
    middle = median(samples)
    # Where nearly all samples are equal, 1 % of the median counts as a deviation.
    deviation = max(MAD_TO_SIGMA * median([abs(s - middle) for s in samples]), 0.01 * middle)
    good = sorted(s for s in samples if abs(s - middle) <= OUTLIER_SIGMAS * deviation)
    middle = median(good)
    low, high = median_interval(len(good))
    share = 1 / middle if middle > 0 else 0.0
    half_width = (good[high] - good[low]) / 2 * share if high < len(good) else math.inf
    spread = (good[-(-3 * (len(good) - 1) // 4)] - good[(len(good) - 1) // 4]) * share
    outliers = len(samples) - len(good)
    is_noisy = half_width > precision or spread > NOISY_SPREAD or outliers > NOISY_OUTLIERS * len(samples)
    return Timing(middle, good[0], half_width, spread, len(good), calls, outliers, is_noisy)


def median_interval(count: int) -> tuple[int, int]:
    """Indices into `count` sorted samples that enclose the median with 95 %; (0, count) for too few samples."""
    rank = math.floor((count + 1) / 2 - NORMAL_95 * math.sqrt(count) / 2)  # counted from 1
    return (rank - 1, count - rank) if rank >= 1 else (0, count)


def of_wall(
    call: Callable[[], object],
    wait: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    of_host: bool = False,
) -> Sampler:
    """Samples the wall time of calls from one device synchronization to the next; `of_host` leaves out the last one."""

    def sample(calls: int) -> float:
        wait()
        start = clock()
        for _ in range(calls):
            call()
        if not of_host:
            wait()
        return clock() - start

    return sample


def graph_calls(seconds: float) -> int:
    """The number of calls of so many seconds that a graph should hold."""
    return min(max(int(REPLAY_SECONDS / max(seconds, 1e-9)), LEAST_CALLS), MOST_CALLS)


@contextmanager
def _timed(backend: Any) -> Iterator[Callable[[Callable[[], object]], float]]:
    """Yields a function that returns the GPU's seconds for what a call enqueues."""
    driver = backend.driver
    start, end = (driver.create_event(True) for _ in range(2))

    def seconds(call: Callable[[], object]) -> float:
        driver.record_event(start, backend.stream)
        call()
        driver.record_event(end, backend.stream)
        driver.synchronize_event(end)
        return driver.elapsed(start, end)  # type: ignore[no-any-return]

    try:
        yield seconds
    finally:
        driver.destroy_event(start)
        driver.destroy_event(end)


@contextmanager
def of_graph(call: Callable[[], object], backend: Any, held: int) -> Iterator[Sampler]:
    """A sampler that replays a graph of `held` calls once for each sample, whatever number of calls it is asked for.

    An uncounted replay runs first, while the host launches the counted one. Raises DeviceError: no graph can hold it.
    """
    from genesis.backend.cuda.graph import RawGraph

    def calls() -> None:
        for _ in range(held):  # a result is freed before the next call
            call()

    with ExitStack() as stack:
        graph = RawGraph(backend)
        graph.capture(calls)
        stack.callback(graph.close)
        seconds = stack.enter_context(_timed(backend))

        def sample(count: int) -> float:
            graph.replay()
            return seconds(graph.replay) * count / held

        yield sample


@contextmanager
def cold_calls(call: Callable[[], object], backend: Any) -> Iterator[Sampler]:
    """A sampler of single calls, each launched during a fill that evicts its inputs from the L2."""
    size = CACHES * backend.driver.properties.l2
    room = backend.allocate(size)
    with _timed(backend) as seconds:

        def cold() -> float:
            backend.driver.fill(room.pointer, 0, size, backend.stream)
            return seconds(call)

        yield lambda count: sum(cold() for _ in range(count))
