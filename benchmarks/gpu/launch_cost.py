"""What one small op costs on the host, by stage: a 64K-element add, eager.

python -m benchmarks.gpu.launch_cost [--out JSON]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import genesis
from benchmarks.gpu.timing import backend, environment, gpu_us
from benchmarks.result_files import write_result
from genesis.backend.cuda.dispatch import call_key
from genesis.op import execute, registry

ROUNDS, CALLS = 15, 300


def round_us(call: Callable[[], Any], *, wall: bool) -> float:
    """Microseconds a call in one eager loop; `wall`: with the wait for the GPU at its end."""
    backend.driver.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    if wall:
        backend.driver.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def loops() -> dict[str, Callable[[], Any]]:
    """What is measured, by name."""
    x = genesis.tensor(np.random.rand(256, 256).astype(np.float32), device="cuda")
    y = genesis.tensor(np.random.rand(256, 256).astype(np.float32), device="cuda")
    add = registry["add"]
    a, b = x.array, y.array
    out = add(a, b)
    backend.driver.synchronize()  # the kernel is compiled and the plan ready
    key = call_key(add, (a, b), {})
    call = backend._calls[key]
    grad = x.clone().requires_grad_()
    found = {
        "driver launch": lambda: call.plan.launches[-1].run(0),
        "allocate + free": lambda: backend.allocate(a.nbytes),
        "look-up": lambda: backend._calls.get(call_key(add, (a, b), {})),
        "allocate, launch, wrap": lambda: call.run((a, b)),
        "op on arrays": lambda: execute(add, (a, b), {}),
        "tensor, no autograd": lambda: x + y,
        "tensor, autograd": lambda: grad + y,
        "wall, no autograd": lambda: x + y,
        "wall, autograd": lambda: grad + y,
        "into given memory": lambda: execute(add, (a, b), {}, out),
    }
    try:
        import torch
    except ImportError:
        return found
    p, q = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    r = p.clone().requires_grad_()
    return {**found, "torch, no autograd": lambda: p + q, "torch, autograd": lambda: r + q}


def measured() -> dict[str, float]:
    """Microseconds by what is measured: the median of rounds, taken in turns because a machine's speed drifts."""
    calls = loops()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            times[name].append(round_us(call, wall=name.startswith(("wall", "torch"))))
    found = {name: statistics.median(rounds[1:]) for name, rounds in times.items()}  # the first one warms up
    found["inside a graph"] = gpu_us(calls["wall, no autograd"], 200)
    return found


def main() -> None:
    """Measure, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = {name: round(us, 2) for name, us in measured().items()}
    for name, us in found.items():
        print(f"{name:22s} {us:7.2f} us")
    if chosen.out:
        command = "python -m " + " ".join(["benchmarks.gpu.launch_cost", *sys.argv[1:]])
        about = {"date": datetime.date.today().isoformat(), "command": command, **environment()}
        write_result(chosen.out, {**about, "microseconds of a 64K-element add": found})


if __name__ == "__main__":
    main()
