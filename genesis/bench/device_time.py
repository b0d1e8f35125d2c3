"""Time on a GPU alone: replays of a CUDA graph, or single calls after a fill that flushes the L2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from genesis.backend.cuda.graph import RawGraph
from genesis.bench.timing import Sampler

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

REPLAY_SECONDS = 1e-3  # that a replay lasts at least, so that its start and end do not count
LEAST_CALLS, MOST_CALLS = 4, 100  # in a graph
CACHES = 4  # times its size is written to empty the cache


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
