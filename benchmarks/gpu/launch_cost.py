"""What one small op costs on the host, by stage: a 64K-element add, eager.

python -m benchmarks.gpu.launch_cost
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import genesis
from benchmarks.gpu.timing import backend, gpu_us, wall_us
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


def main() -> None:
    """Print the table."""
    x = genesis.tensor(np.random.rand(256, 256).astype(np.float32), device="cuda")
    y = genesis.tensor(np.random.rand(256, 256).astype(np.float32), device="cuda")
    add = registry["add"]
    a, b = x.array, y.array
    out = add(a, b)
    backend.driver.synchronize()  # the kernel is compiled and the plan ready
    plan = next(iter(backend._plans.values()))
    grad = x.clone().requires_grad_()
    rows = {
        "driver launch": lambda: plan.steps[-1].run(0),
        "plan replay": lambda: plan.run((out, a, b), 0),
        "allocate + free": lambda: backend.allocate(a.nbytes),
        "op on arrays": lambda: execute(add, (a, b), {}),
        "tensor, no autograd": lambda: x + y,
        "tensor, autograd": lambda: grad + y,
    }
    for name, call in rows.items():
        print(f"{name:22s} {host_us(call):7.2f} us host")
    sync = backend.driver.synchronize
    print(f"{'wall, no autograd':22s} {wall_us(lambda: x + y, sync):7.2f} us")
    print(f"{'wall, autograd':22s} {wall_us(lambda: grad + y, sync):7.2f} us")
    print(f"{'inside a graph':22s} {gpu_us(lambda: x + y, 200):7.2f} us")
    try:
        import torch
    except ImportError:
        return
    p, q = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    with torch.no_grad():
        print(f"{'torch, no autograd':22s} {wall_us(lambda: p + q, torch.cuda.synchronize):7.2f} us")
    r = p.clone().requires_grad_()
    print(f"{'torch, autograd':22s} {wall_us(lambda: r + q, torch.cuda.synchronize):7.2f} us")


if __name__ == "__main__":
    main()
