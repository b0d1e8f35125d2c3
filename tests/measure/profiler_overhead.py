"""The overhead of `genesis.profiler`: `python -m tests.measure.profiler_overhead [cuda]` prints microseconds an op.

A training step of small ops, and one op alone, without a profile and in profiles of each kind. Of 9 times the shortest
counts; on the CPU it is the time of the thread, which other processes do not lengthen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import genesis
from genesis import nn
from genesis.profiler import ProfilerActivity, profile

SETTINGS = {"plain": {}, "with_stack": {"with_stack": True}, "profile_memory": {"profile_memory": True}}


def cases(device: str) -> dict[str, Callable[[], object]]:
    """The functions to time."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)]).to(device)
    x, small = genesis.randn(128, 256, device=device), genesis.ones(4, device=device)
    return {
        "training step": lambda: [model(x).mean().backward() for _ in range(5)],
        "exp of 4 elements": lambda: [small.exp() for _ in range(500)],
    }


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"

    def seconds(run: Callable[[], object]) -> float:
        clock = time.thread_time if device == "cpu" else time.perf_counter
        started = clock()
        run()
        if device != "cpu":
            genesis.cuda.synchronize()
        return clock() - started

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    for name, run in cases(device).items():
        seconds(run)
        alone, watched, ops = list[float](), {kind: list[float]() for kind in SETTINGS}, 0
        for _ in range(9):
            alone.append(seconds(run))
            for kind, settings in SETTINGS.items():
                with profile(activities=activities, **settings) as p:  # type: ignore[call-overload]
                    watched[kind].append(seconds(run))
                ops = sum(frame.level == "op" for frame in p._recordings[0].frames)
        base = min(alone)
        print(f"{name}: {ops} ops, {base / ops * 1e6:.1f} us an op without a profile")
        for kind, times in watched.items():
            more = min(times) - base
            print(f"  {kind:<15} {more / ops * 1e6:+.1f} us an op, {more / base:+.1%}")


if __name__ == "__main__":
    main()
