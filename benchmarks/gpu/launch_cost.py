"""What one small op costs on the host, by stage: a 64K-element add, eager.

python -m benchmarks.gpu.launch_cost [--out JSON]
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import genesis
from benchmarks.gpu.timing import backend, environment, gpu_us, wall_us
from genesis.op import execute, registry

N = 2000


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of host time a call, without waiting for the GPU."""
    for _ in range(50):
        call()
    best = []
    for _ in range(7):
        backend.driver.synchronize()
        start = time.perf_counter()
        for _ in range(N // 4):
            call()
        best.append((time.perf_counter() - start) / (N // 4) * 1e6)
    backend.driver.synchronize()
    return sorted(best)[3]


def measured() -> dict[str, float]:
    """Microseconds by what is measured."""
    x = genesis.tensor(np.random.rand(256, 256).astype(np.float32), device="cuda")
    y = genesis.tensor(np.random.rand(256, 256).astype(np.float32), device="cuda")
    add = registry["add"]
    a, b = x.array, y.array
    out = add(a, b)
    backend.driver.synchronize()  # the kernel is compiled and the plan ready
    plan = next(iter(backend._plans.values()))
    grad = x.clone().requires_grad_()
    stages = {
        "driver launch": lambda: plan.steps[-1].run(0),
        "plan replay": lambda: plan.run((out, a, b), 0),
        "allocate + free": lambda: backend.allocate(a.nbytes),
        "op on arrays": lambda: execute(add, (a, b), {}),
        "tensor, no autograd": lambda: x + y,
        "tensor, autograd": lambda: grad + y,
    }
    found = {name: host_us(call) for name, call in stages.items()}
    sync = backend.driver.synchronize
    found["wall, no autograd"] = wall_us(lambda: x + y, sync)
    found["wall, autograd"] = wall_us(lambda: grad + y, sync)
    found["inside a graph"] = gpu_us(lambda: x + y, 200)
    try:
        import torch
    except ImportError:
        return found
    p, q = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    with torch.no_grad():
        found["torch, no autograd"] = wall_us(lambda: p + q, torch.cuda.synchronize)
    r = p.clone().requires_grad_()
    found["torch, autograd"] = wall_us(lambda: r + q, torch.cuda.synchronize)
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
        chosen.out.write_text(json.dumps({**about, "microseconds of a 64K-element add": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
