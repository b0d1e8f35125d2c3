"""Times on the GPU by graph replay, and wall times of eager calls, for Genesis and for torch as a peer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from genesis.backend import Device
from genesis.backend.cuda import backend_of

__all__ = ["backend", "gpu_us", "torch_gpu_us", "wall_us"]

backend = backend_of(Device("cuda", 0))


def gpu_us(calls: Callable[[], Any] | Sequence[Callable[[], Any]], n: int = 20, replays: int = 12) -> float:
    """Microseconds on the GPU a call: n calls (taking turns) in one graph, the median over replays."""
    turns = list(calls) if isinstance(calls, Sequence) else [calls]
    driver, before = backend.driver, backend.stream
    backend.stream = stream = driver.create_stream()
    try:
        for call in turns * 2:
            call()
        driver.synchronize()
        driver.begin_capture(stream)
        for i in range(n):
            turns[i % len(turns)]()
        graph = driver.end_capture(stream)
        executable = driver.instantiate(graph)
        start, end = driver.create_event(True), driver.create_event(True)
        times = []
        for _ in range(replays):
            driver.record_event(start, stream)
            driver.launch_graph(executable, stream)
            driver.record_event(end, stream)
            driver.synchronize_event(end)
            times.append(driver.elapsed(start, end) / n * 1e6)
        driver.destroy_graph(graph, executable)
        return statistics.median(times)
    finally:
        backend.stream = before


def torch_gpu_us(calls: Callable[[], Any] | Sequence[Callable[[], Any]], n: int = 20, replays: int = 12) -> float:
    """The same for torch."""
    import torch

    turns = list(calls) if isinstance(calls, Sequence) else [calls]
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in turns * 2:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            turns[i % len(turns)]()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / n * 1e3)
    return statistics.median(times)


def wall_us(call: Callable[[], Any], synchronize: Callable[[], Any], n: int = 200, rounds: int = 7) -> float:
    """Microseconds of wall time a call in an eager loop: the median of rounds of n calls, each ended by a wait."""
    for _ in range(20):
        call()
    synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(n):
            call()
        synchronize()
        times.append((time.perf_counter() - start) / n * 1e6)
    return statistics.median(times)
