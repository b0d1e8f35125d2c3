"""The first token of generation on a GPU: how long it takes run by run, and where its time goes.

    python -m benchmarks.gpu.first_token --size 0.5B --cases 1x128,1x1024,1x8192,8x128,32x128

Each case runs several times with the same engine: kernels are compiled, passes and steps run as they are, are captured,
and are replayed from the fourth run on. `pass` and `step` are the GPU's time by events, of the prompts and of the first
step; the host's phases end when the call returns. `eager` is the same with passes that are never captured. At last
`--steps` compares one graph a token with one graph for several.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import genesis
import genesis_models
from benchmarks.gpu.lora_genesis import config_of
from genesis import cuda
from genesis_models.engine import Request, Sampling, device_prompts, device_rows
from genesis_models.engine.device import DeviceEngine

RUNS = 6
GROUPS = (2, 4, 8)  # steps in one graph


class Clock:
    """Phases of a run: when each begins and ends on the host, and between events on the GPU."""

    def __init__(self) -> None:
        self.begun, self.collected = 0.0, 0.0
        self.host: dict[str, float] = {}
        self.events: dict[str, tuple[cuda.Event, cuda.Event]] = {}
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        self.collected += time.perf_counter() * (1 if phase == "stop" else -1)

    def start(self) -> None:
        """A run begins."""
        self.host.clear()
        self.events.clear()
        self.collected = 0.0
        cuda.synchronize()
        self.begun = time.perf_counter()

    def watch(self, owner: Any, name: str, called: str, on_gpu: bool = False) -> None:
        """Note the first call of a method in each run."""
        method: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **keywords: Any) -> Any:
            if called in self.host:
                return method(*args, **keywords)
            begun, events = time.perf_counter(), (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            if on_gpu:
                events[0].record()
            found = method(*args, **keywords)
            if on_gpu:
                events[1].record()
                self.events[called] = events
            self.host[called] = (time.perf_counter() - begun) * 1e3
            return found

        setattr(owner, name, watched)

    def line(self, first: float) -> str:
        """What a run took, in milliseconds."""
        cuda.synchronize()
        on_gpu = {name: a.elapsed_time(b) for name, (a, b) in self.events.items()}
        host = "  ".join(f"{name} {ms:6.2f}" for name, ms in self.host.items())
        device = "  ".join(f"{name} {ms:6.2f}" for name, ms in on_gpu.items())
        return f"first {first:7.2f}  host: {host}  gpu: {device}  gc {self.collected * 1e3:5.1f}"


@contextmanager
def eager_passes() -> Iterator[None]:
    """Inside the block, passes are launched as they are."""
    captured = device_prompts.captured
    device_prompts.captured = lambda function, device: function
    try:
        yield
    finally:
        device_prompts.captured = captured


def run_case(model: Any, batch: int, length: int, clock: Clock, runs: int) -> list[tuple[float, str]]:
    """Seconds to the first token, and its phases, of each run."""
    rng = np.random.default_rng(batch)
    ids = rng.integers(0, model.config.vocab_size, (batch, length)).tolist()
    requests = [Request(each, Sampling(0.0), 12, sequence=i) for i, each in enumerate(ids)]
    found = []
    for _ in range(runs):
        engine = DeviceEngine(model, rows=batch, capacity=length + 256)
        clock.start()
        tokens = engine.run(requests)
        next(tokens)
        first = (time.perf_counter() - clock.begun) * 1e3
        line = clock.line(first)
        list(tokens)
        found.append((first, line))
    return found


def steps_in_a_graph(model: Any, batch: int, length: int, count: int = 64) -> None:
    """Milliseconds a token of one graph for one step, and of graphs with several."""
    held = device_rows.take(model, batch, length + 4 * count * (len(GROUPS) + 3), False, "auto")
    held.begin(model)
    model.eval()
    rows = [(row, Request([1] * length, Sampling(0.0), 1 << 20, sequence=row), 1 << 20) for row in range(batch)]
    held.state.start(rows)
    step = held.step(model, batch, length + 4 * count * (len(GROUPS) + 3))
    for _ in range(4):
        step()
    function: Any = step._call._function  # type: ignore[attr-defined]
    times = {1: _timed(step, count)}
    for group in GROUPS:

        def several(group: int = group) -> None:
            for _ in range(group):
                function()

        call = device_rows.captured(several, held.cache.data.device)
        for _ in range(3):
            call()
        times[group] = _timed(call, count // group) / group
        held.cache.lengths.fill_(length)
    again = _timed(step, count)
    found = "  ".join(f"{group} a graph {ms:.4f}" for group, ms in times.items())
    print(f"{batch} x {length}: ms a token: {found}  1 again {again:.4f}", flush=True)


def _timed(call: Callable[[], None], count: int) -> float:
    """Milliseconds of a call, the median of five runs of `count`."""
    found = []
    for _ in range(5):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        cuda.synchronize()
        found.append(begin.elapsed_time(end) / count)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="0.5B", help="0.5B, qwen3-0.6B, llama-3.2-1B, tiny")
    parser.add_argument("--cases", default="1x128,1x1024,1x8192,8x128,32x128", help="batch and tokens of each prompt")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--eager", action="store_true", help="passes that are not captured, too")
    parser.add_argument("--steps", default="", help="cases that compare graphs of one step and of several")
    chosen = parser.parse_args()
    model = genesis_models.build(config_of(chosen.size), seed=0, device="cuda", dtype="bfloat16")
    clock = Clock()
    clock.watch(device_rows.DeviceRows, "begin", "begin")
    clock.watch(device_prompts.Prompts, "pass_all", "pass", on_gpu=True)
    clock.watch(device_rows.DeviceState, "start", "start")
    clock.watch(device_rows.Step, "__call__", "step", on_gpu=True)
    clock.watch(device_rows.Reading, "results", "wait")
    with genesis.no_grad():
        for case in filter(None, chosen.cases.split(",")):
            batch, length = map(int, case.split("x"))
            for name in ["graphs", *["eager"] * chosen.eager]:
                device_rows.release(model)
                if name == "eager":
                    with eager_passes():
                        found = run_case(model, batch, length, clock, 4)
                else:
                    found = run_case(model, batch, length, clock, chosen.runs)
                print(f"{case} {name}: ms of each run {' '.join(f'{first:.1f}' for first, _ in found)}")
                print(f"  the last: {found[-1][1]}", flush=True)
        for case in filter(None, chosen.steps.split(",")):
            device_rows.release(model)
            steps_in_a_graph(model, *map(int, case.split("x")))


if __name__ == "__main__":
    main()
