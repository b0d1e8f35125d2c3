"""`genesis.profiler` on a GPU: `python -m tests.measure.profiler_on_gpu` prints a short table.

It compares kernel times with those of the same op in a graph, sums of rows with the whole, and a step captured inside
the profile with the eager one.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import genesis
from genesis import nn
from genesis.cuda.graphs import FunctionGraph
from genesis.profiler import ProfilerActivity, profile, record_function

CALLS = 20


def by_hand(run: Callable[[], object]) -> float:
    """Microseconds of a call inside a graph of `CALLS` calls."""
    graph = FunctionGraph()
    graph.capture(lambda: [run() for _ in range(CALLS)] and None)
    times = []
    for _ in range(10):
        genesis.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        genesis.cuda.synchronize()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    graph.close()
    return min(times)


def ops() -> None:
    a = genesis.randn(4096, 4096, dtype="bfloat16", device="cuda")
    x = genesis.randn(64 << 20, device="cuda")
    rows = x.reshape(16384, 4096)
    cases = {
        "matmul": lambda: a @ a,
        "add": lambda: x + x,
        "gelu": lambda: nn.functional.gelu(x),
        "softmax": lambda: rows.softmax(-1),
        "reduce_sum": lambda: rows.sum(-1),
    }
    print(f"{'op':<12}{'by hand':>12}{'profiler':>12}{'ratio':>8}")
    for name, run in cases.items():
        run()
        alone = by_hand(run)
        with profile(activities=list(ProfilerActivity)) as p:
            for _ in range(CALLS):
                run()
        found = sum(row.self_cuda_time_total for row in p.key_averages()) / CALLS
        print(f"{name:<12}{alone:>9.1f} us{found:>9.1f} us{found / alone:>8.3f}")


def steps() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]).to("cuda")
    x = genesis.randn(1024, 1024, device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=False)
        with record_function("forward"):
            loss = model(x).square().mean()
        loss.backward()

    step()
    step()
    with profile(activities=list(ProfilerActivity), profile_memory=True, with_stack=True) as eager:
        step()
    with profile(activities=list(ProfilerActivity)) as captured:
        graph = FunctionGraph()
        graph.capture(step)
        graph.replay()
    graph.replay()
    genesis.cuda.synchronize()
    for name, p, kernels in (
        ("eager", eager, eager._recordings[0].kernels),
        ("captured", captured, [k for k in captured._recordings[0].kernels if k.in_graph]),
    ):
        found, recording = p.key_averages(), p._recordings[0]
        host = found.self_cpu_time_total / recording.seconds / 1e6
        device = sum(row.self_cuda_time_total for row in found) / sum(k.end - k.start for k in recording.kernels) / 1e6
        whole = sum(k.end - k.start for k in kernels) * 1e6
        print(f"{name} step: {len(kernels)} kernels, {whole:.1f} us; rows / whole: host {host:.4f}, GPU {device:.4f}")
    print(eager.key_averages().table(sort_by="cuda_time_total", row_limit=8))
    with tempfile.TemporaryDirectory() as folder:
        eager.export_chrome_trace(Path(folder) / "trace.json")
        eager.export_stacks(Path(folder) / "stacks.txt", "self_cuda_time_total")
        events = json.loads((Path(folder) / "trace.json").read_bytes())["traceEvents"]
        print(
            f"trace: {len(events)} events; stacks: {len((Path(folder) / 'stacks.txt').read_text().splitlines())} lines"
        )


if __name__ == "__main__":
    ops()
    steps()
