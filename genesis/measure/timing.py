"""How long a call takes, on the wall and on a GPU alone, and how sure that is.

Samples are added until the median is precise or the time is over.

The confidence interval of the median is that of order statistics, which assumes nothing about how times are
distributed (Hahn & Meeker, Statistical Intervals, 1991, 5.2). Outliers, such as an interrupt, are recognized by their
distance from the median in median absolute deviations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

Sampler = Callable[[int], float]  # seconds that so many calls take together

NORMAL_95 = 1.96  # standard deviations on both sides of a normal's centre that hold 95 % of it
MAD_TO_SIGMA = 1.4826  # a normal's standard deviation in median absolute deviations
OUTLIER_SIGMAS = 5.0
LEAST_SAMPLES = 10  # fewer than 6 hold the median less often than 95 times in 100
NOISY_SPREAD = 0.10  # quartiles this far apart, as a share of the median
NOISY_OUTLIERS = 0.20  # so large a share of outliers is no accident
REPLAY_SECONDS = 1e-3  # that a replay lasts at least, so that its start and end do not count
LEAST_CALLS, MOST_CALLS = 4, 100  # in a graph
CACHES = 4  # times its size is written to empty the cache


@dataclass(frozen=True)
class Plan:
    """How hard to try.

    Attributes:
        precision: the half-width of the median's 95 % confidence interval to reach, as a share of the median.
        seconds: the time after which no more samples are taken, warm-up left out.
        warm_up: seconds of calls before the first sample; one call at least.
        sample: seconds that one sample lasts at least: short calls are timed several at once.
        most_calls: calls in one sample at most.
        clock: seconds, from any origin.
    """

    precision: float = 0.02
    seconds: float = 1.0
    warm_up: float = 0.05
    sample: float = 1e-3
    most_calls: int = 1000
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)


class Timing(NamedTuple):
    """The time of one call.

    Attributes:
        seconds: the median.
        fastest: the shortest that is no outlier.
        half_width: of its 95 % confidence interval, as a share of it; infinite with fewer than 6 samples.
        spread: the distance of the quartiles, as a share of the median.
        samples, calls: how many were kept, and how many calls each held.
        outliers: how many were left out.
        is_noisy: the requested precision was not reached, or the spread is large, or outliers are many.
    """

    seconds: float
    fastest: float
    half_width: float
    spread: float
    samples: int
    calls: int
    outliers: int
    is_noisy: bool

    @property
    def note(self) -> str:
        """The cell of a report's column of notes."""
        return "noisy" if self.is_noisy else ""


def measure(sample: Sampler, plan: Plan | None = None) -> Timing:
    """Warm up, choose how many calls make a sample, and sample until the median is precise or the time is over."""
    plan = Plan() if plan is None else plan
    calls = _calls_a_sample(_warm_up(sample, plan), plan)
    samples: list[float] = []
    start = plan.clock()
    while True:
        samples.append(sample(calls) / calls)
        found = summarize(samples, calls, plan.precision)
        settled = found.samples >= LEAST_SAMPLES and found.half_width <= plan.precision
        if settled or plan.clock() - start >= plan.seconds:
            return found


def _warm_up(sample: Sampler, plan: Plan) -> float:
    """Call for a while; the shortest time of a call, which first touches of memory and compilation are not in."""
    start, shortest = plan.clock(), math.inf
    while True:
        shortest = min(shortest, sample(1))
        if plan.clock() - start >= plan.warm_up:
            return shortest


def _calls_a_sample(seconds: float, plan: Plan) -> int:
    """So many calls that a sample is long compared with the clock's own cost."""
    return plan.most_calls if seconds <= 0 else min(max(math.ceil(plan.sample / seconds), 1), plan.most_calls)


def summarize(samples: Sequence[float], calls: int = 1, precision: float = Plan.precision) -> Timing:
    """The timing that samples (seconds a call) make."""
    good = sorted(kept(samples))
    middle = median(good)
    low, high = median_interval(len(good))
    share = 1 / middle if middle > 0 else 0.0
    half_width = (good[high] - good[low]) / 2 * share if high < len(good) else math.inf
    spread = (good[-(-3 * (len(good) - 1) // 4)] - good[(len(good) - 1) // 4]) * share
    outliers = len(samples) - len(good)
    is_noisy = half_width > precision or spread > NOISY_SPREAD or outliers > NOISY_OUTLIERS * len(samples)
    return Timing(middle, good[0], half_width, spread, len(good), calls, outliers, is_noisy)


def kept(samples: Sequence[float]) -> list[float]:
    """Samples without outliers. Where nearly all are equal, 1 % of the median counts as a deviation."""
    middle = median(samples)
    deviation = max(MAD_TO_SIGMA * median([abs(s - middle) for s in samples]), 0.01 * middle)
    return [s for s in samples if abs(s - middle) <= OUTLIER_SIGMAS * deviation]


def median_interval(count: int) -> tuple[int, int]:
    """Indices into `count` sorted samples between which the median lies with 95 %; the second is `count` if none do."""
    rank = math.floor((count + 1) / 2 - NORMAL_95 * math.sqrt(count) / 2)  # counted from 1
    return (rank - 1, count - rank) if rank >= 1 else (0, count)


def of_wall(
    call: Callable[[], object],
    wait: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    *,
    of_host: bool = False,
) -> Sampler:
    """Wall time of calls one after the other, with one device synchronization after them.

    The synchronization before the first of them is not counted.

    Args:
        of_host: the host's time alone: without the synchronization after the calls, all of which the device's queue
            must hold.
    """

    def sample(calls: int) -> float:
        wait()
        start = clock()
        for _ in range(calls):
            call()
        if not of_host:
            wait()
        return clock() - start

    return sample


# --- On a GPU alone: replays of a graph, or single calls after a fill that flushes the L2 -----------------------------


def graph_calls(seconds: float) -> int:
    """How many calls a graph should hold whose calls take so long."""
    return min(max(int(REPLAY_SECONDS / max(seconds, 1e-9)), LEAST_CALLS), MOST_CALLS)


@contextmanager
def _events(backend: CudaBackend) -> Iterator[tuple[int, int]]:
    """A start and an end."""
    driver = backend.driver
    start, end = driver.create_event(True), driver.create_event(True)
    try:
        yield start, end
    finally:
        driver.destroy_event(start)
        driver.destroy_event(end)


@contextmanager
def of_graph(call: Callable[[], object], backend: CudaBackend, held: int) -> Iterator[Sampler]:
    """A sampler whose every sample is one replay of a graph of `held` calls, whatever number it is asked for.

    Another replay precedes it: while that one runs, the host launches the one that counts, which then begins
    without a wait.

    Raises:
        DeviceError: the call reads values on the host, which a graph cannot hold.
    """

    def calls() -> None:
        for _ in range(held):
            call()

    from genesis.backend.cuda.graph import RawGraph

    driver, graph = backend.driver, RawGraph(backend)
    graph.capture(calls)
    with _events(backend) as (start, end):

        def sample(count: int) -> float:
            graph.replay()
            driver.record_event(start, backend.stream)
            graph.replay()
            driver.record_event(end, backend.stream)
            driver.synchronize_event(end)
            return driver.elapsed(start, end) * count / held

        try:
            yield sample
        finally:
            graph.close()


@contextmanager
def cold_calls(call: Callable[[], object], backend: CudaBackend) -> Iterator[Sampler]:
    """A sampler of single calls, each with a cache that holds nothing of its inputs.

    The host launches the call while the fill runs, so that its own time does not count.
    """
    driver, size = backend.driver, CACHES * backend.driver.properties.l2
    room = backend.allocate(size)
    with _events(backend) as (start, end):

        def sample(count: int) -> float:
            total = 0.0
            for _ in range(count):
                driver.fill(room.pointer, 0, size, backend.stream)
                driver.record_event(start, backend.stream)
                call()
                driver.record_event(end, backend.stream)
                driver.synchronize_event(end)
                total += driver.elapsed(start, end)
            return total

        yield sample
