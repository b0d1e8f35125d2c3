"""Eager modules of random shapes, forward and backward: compared with torch on one GPU, or on a simulated device.

    python -m benchmarks.eager --vs torch --seed 1
    python -m benchmarks.eager --host

The first command prints, for each kind, the wall time of a call with its backward pass and the ratio torch / Genesis:
medians over the shapes. The second needs no GPU: its device runs nothing. It counts what one call costs the host:
microseconds, Python calls, calls of C functions, blocks taken from the memory pool, and launches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Draw = random.Random
Run = Callable[[], None]
LEARNING = ("Linear", "Embedding", "RMSNorm", "LayerNorm")  # modules with parameters


def _size(rng: Draw, low: int, high: int) -> int:
    """A size between two limits, uniform in its logarithm; a multiple of 8 in two cases of three."""
    size = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    return max(8, size // 8 * 8) if rng.random() < 2 / 3 else size


class Case:
    """Tensors and modules of one library, drawn by a seed, so that two libraries get equal cases."""

    def __init__(self, library: Any, device: Any, seed: int) -> None:
        self.library, self.device, self.rng = library, device, Draw(seed)
        self.rows, self.width = _size(self.rng, 16, 8192), _size(self.rng, 16, 4096)
        self.dtype = getattr(library, self.rng.choice(("bfloat16", "float32")))
        self.leaves: list[Any] = []

    def leaf(self, *shape: int) -> Any:
        self.leaves.append(self.library.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=True))
        return self.leaves[-1]

    def labels(self, count: int) -> Any:
        return self.library.randint(0, count, (self.rows,), device=self.device)

    def module(self, kind: str, *sizes: int) -> Any:
        where = {"device": self.device, "dtype": self.dtype} if kind in LEARNING else {}
        module = getattr(self.library.nn, kind)(*sizes, **where)
        self.leaves += module.parameters()
        return module

    def of_rows(self, kind: str, *sizes: int) -> Callable[[], Any]:
        """A module of this kind on `[rows, width]`."""
        module, x = self.module(kind, *sizes), self.leaf(self.rows, self.width)
        return lambda: module(x)

    def runs(self, forward: Callable[[], Any]) -> tuple[Run, Run]:
        """Return functions that run forward, and forward and backward, once."""
        y, leaves = forward(), self.leaves
        seed = None if y.ndim == 0 else self.library.ones_like(y)

        def once() -> None:
            for leaf in leaves:
                leaf.grad = None
            forward().backward(seed)

        return forward, once


def _embedding(case: Case) -> Callable[[], Any]:
    module, ids = case.module("Embedding", case.width * 4, case.width), case.labels(case.width * 4)
    return lambda: module(ids)


def _broadcast(case: Case) -> Callable[[], Any]:
    x, scale, shift, gate = (
        case.leaf(*s) for s in ((case.rows, case.width), (case.width,), (case.width,), (case.rows, 1))
    )
    return lambda: (x * scale + shift) * gate


def _cross_entropy(case: Case) -> Callable[[], Any]:
    module, x, labels = case.module("CrossEntropyLoss"), case.leaf(case.rows, case.width), case.labels(case.width)
    return lambda: module(x, labels)


def _attention(case: Case) -> Callable[[], Any]:
    rng = case.rng
    shape = (rng.randint(1, 4), rng.randint(1, 16), _size(rng, 16, 1024), rng.choice((32, 64, 128)))
    q, k, v, causal = case.leaf(*shape), case.leaf(*shape), case.leaf(*shape), rng.random() < 0.5
    attention = case.library.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, is_causal=causal)


def _mlp(case: Case) -> Callable[[], Any]:
    up, down, x = (
        case.module("Linear", case.width, 256),
        case.module("Linear", 256, case.width),
        case.leaf(64, case.width),
    )
    activation = case.module("ReLU")
    return lambda: x + down(activation(up(x)))


def _mse(case: Case) -> Callable[[], Any]:
    module, x, target = (
        case.module("MSELoss"),
        case.leaf(case.rows, case.width),
        case.leaf(case.rows, case.width).detach(),
    )
    return lambda: module(x, target)


def _mean(case: Case) -> Callable[[], Any]:
    x = case.leaf(case.rows, case.width)
    return lambda: x.mean(-1)


KINDS: dict[str, Callable[[Case], Callable[[], Any]]] = {
    "softmax": lambda case: case.of_rows("Softmax", -1),
    "gelu": lambda case: case.of_rows("GELU"),
    "linear": lambda case: case.of_rows("Linear", case.width, _size(case.rng, 16, 4096)),
    "embedding": _embedding,
    "broadcast": _broadcast,
    "rms_norm": lambda case: case.of_rows("RMSNorm", case.width),
    "layer_norm": lambda case: case.of_rows("LayerNorm", case.width),
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "mlp": _mlp,
    "silu": lambda case: case.of_rows("SiLU"),
    "mse": _mse,
    "mean": _mean,
}


def compare(peer: str, kinds: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Time all cases in turns with a peer; return the ratios by kind."""
    began = time.perf_counter()
    libraries = [importlib.import_module(name) for name in ("genesis", peer)]

    def made(library: Any, kind: str, number: int) -> tuple[Case, Callable[[], Any]]:
        case = Case(library, "cuda", options.seed * 1_000_003 + number * 101 + kinds.index(kind))
        return case, KINDS[kind](case)

    def timed(library: Any, run: Run) -> float:
        start = time.perf_counter()
        for _ in range(options.calls):
            run()
        library.cuda.synchronize()
        return (time.perf_counter() - start) / options.calls * 1e6

    # All operands are on the device before the first launch, so that kernels compile in parallel.
    names = [(kind, number) for number in range(options.shapes) for kind in kinds]
    prepared = []
    for kind, number in names:
        if time.perf_counter() - began > options.seconds / 5:
            break
        prepared.append((kind, number, *made(libraries[0], kind, number)))
    ours = [(kind, number, case.runs(forward)) for kind, number, case, forward in prepared]
    for _, _, (_, once) in ours:
        once()
    libraries[0].cuda.synchronize()
    print(f"{len(ours)} cases compiled after {time.perf_counter() - began:.0f} s", flush=True)
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for kind, number, mine in ours:
        if time.perf_counter() - began > options.seconds:
            break
        case, forward = made(libraries[1], kind, number)
        parts = [(library, run) for runs in zip(mine, case.runs(forward), strict=True)
                 for library, run in zip(libraries, runs, strict=True)]  # fmt: skip
        rounds = [[timed(*part) for part in parts] for _ in range(6)]
        times[kind].append([statistics.median(column) for column in zip(*rounds[1:], strict=True)])
    report: dict[str, Any] = {}
    for kind, rows in times.items():
        if rows:
            ratios = sorted(theirs / ours for _, _, ours, theirs in rows)
            backward = statistics.median((c - a) / max(d - b, 1e-9) for a, b, c, d in rows)
            figures = [statistics.median(column) for column in zip(*rows, strict=True)]
            report[kind] = {"shapes": len(rows), "ratio": statistics.median(ratios), "worst": ratios[0],
                            "backward": backward, "us": figures}  # fmt: skip
            print(f"{kind:14} {peer} / genesis {statistics.median(ratios):5.2f}, worst {ratios[0]:5.2f}, {len(rows):3} "
                  f"shapes, {figures[2]:6.0f} us, {peer} {figures[3]:6.0f} us, forward {figures[0]:5.0f} and "
                  f"{figures[1]:5.0f}, backward genesis / {peer} {backward:5.2f}", flush=True)  # fmt: skip
    return report


def host(kinds: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Count what a call costs the host, on a device that runs nothing."""
    import genesis
    from genesis.backend import backend_for
    from genesis.backend.cuda.launch import watching_launches
    from genesis.backend.cuda.simulated import ARCHITECTURES, counting_device

    device = counting_device(ARCHITECTURES[90])
    report: dict[str, Any] = {}
    for kind in kinds:
        case = Case(genesis, device, options.seed)
        _, once = case.runs(KINDS[kind](case))
        for _ in range(20):
            once()
        events: Counter[str] = Counter()
        names: Counter[str] = Counter()

        def note(frame: Any, event: str, _: Any, events: Counter[str] = events, names: Counter[str] = names) -> None:
            events[event] += 1
            if event == "call":
                names[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1

        pool: Any = backend_for(device)
        before = pool.pool.allocations
        sys.setprofile(note)
        once()
        sys.setprofile(None)
        blocks, launches = pool.pool.allocations - before, []
        with watching_launches(lambda launch, _, launches=launches: launches.append(launch.name)):
            once()
        best = math.inf
        for _ in range(options.calls * 20):
            start = time.perf_counter()
            once()
            best = min(best, time.perf_counter() - start)
        report[kind] = {"us": round(best * 1e6, 1), "calls": events["call"], "c_calls": events["c_call"],
                        "blocks": blocks, "launches": len(launches)}  # fmt: skip
        print(f"{kind:14}", ", ".join(f"{value} {name}" for name, value in report[kind].items()), flush=True)
        if options.verbose:
            print("   ", launches)
            print("   ", names.most_common(options.verbose))
    return report


def main() -> None:
    """Run the chosen comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--vs", help="the library to compare with: torch")
    how.add_argument("--host", action="store_true", help="count the host's work on a device that runs nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--shapes", type=int, default=60, help="shapes of each kind")
    parser.add_argument("--calls", type=int, default=20, help="calls in a measurement")
    parser.add_argument("--seconds", type=float, default=600, help="start no case after this time")
    parser.add_argument("--verbose", type=int, default=0, help="with --host: show the N functions that are called most")
    parser.add_argument("--out", help="write the figures to this file")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    report = host(kinds, options) if options.host else compare(options.vs, kinds, options)
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
