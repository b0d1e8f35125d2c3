"""GPU times by graph replay, wall times of eager calls, and memory that Genesis shares with its peer torch."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from genesis.array import Array
from genesis.autograd.record import TensorBase
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.dtypes import as_dtype

if TYPE_CHECKING:
    import torch

__all__ = [
    "backend",
    "environment",
    "gpu_graph",
    "gpu_us",
    "shared",
    "shared_array",
    "torch_gpu_graph",
    "torch_gpu_us",
    "wall_us",
]

CUDA = Device("cuda", 0)
backend = backend_of(CUDA)


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code: GPU, driver, and versions of what is installed."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    versions = {"python": platform.python_version()}
    for name in ("triton", "torch", "cuda-bindings", "transformers", "liger-kernel"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"gpu": backend.driver.properties.name, "driver": driver, "versions": versions}


def shared_array(x: torch.Tensor) -> Array:
    """A Genesis array over torch's memory."""
    storage = backend.adopt(x.data_ptr(), x.numel() * x.element_size(), x)
    return Array(storage, tuple(x.shape), tuple(x.stride()), as_dtype(str(x.dtype)), CUDA)


def shared(x: torch.Tensor) -> Any:
    """A Genesis tensor over torch's memory."""
    return TensorBase.wrap(shared_array(x))


@contextmanager
def gpu_graph(turns: Sequence[Callable[[], Any]], n: int) -> Iterator[Callable[[], float]]:
    """A graph of n calls that take turns; a call of it replays it and gives the microseconds of each."""
    driver, before = backend.driver, backend.stream
    backend.stream = stream = driver.create_stream()
    try:
        for call in [*turns, *turns]:
            call()
        driver.synchronize()
        driver.begin_capture(stream)
        for i in range(n):
            turns[i % len(turns)]()
        graph = driver.end_capture(stream)
    finally:
        backend.stream = before
    executable = driver.instantiate(graph)
    start, end = driver.create_event(True), driver.create_event(True)

    def replay() -> float:
        driver.record_event(start, stream)
        driver.launch_graph(executable, stream)
        driver.record_event(end, stream)
        driver.synchronize_event(end)
        return driver.elapsed(start, end) / n * 1e6

    yield replay
    driver.destroy_graph(graph, executable)


def torch_gpu_graph(turns: Sequence[Callable[[], Any]], n: int) -> Callable[[], float]:
    """The same for torch."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        for call in [*turns, *turns]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            turns[i % len(turns)]()
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / n * 1e3

    return replay


def gpu_us(calls: Callable[[], Any] | Sequence[Callable[[], Any]], n: int = 20, replays: int = 12) -> float:
    """Microseconds on the GPU a call: n calls (taking turns) in one graph, the median over replays."""
    with gpu_graph(calls if isinstance(calls, Sequence) else [calls], n) as replay:
        return statistics.median(replay() for _ in range(replays))


def torch_gpu_us(calls: Callable[[], Any] | Sequence[Callable[[], Any]], n: int = 20, replays: int = 12) -> float:
    """The same for torch."""
    replay = torch_gpu_graph(calls if isinstance(calls, Sequence) else [calls], n)
    return statistics.median(replay() for _ in range(replays))


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
