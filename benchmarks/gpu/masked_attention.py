"""Attention with a mask, or dropout, next to torch's, in bf16: time, peak memory, and the error of the result.

    python -m benchmarks.gpu.masked_attention [--out JSON]

It calls the public function alone and so runs on older commits too, to compare before and after. torch takes the
backend it chooses itself. Times are wall times of calls that end with a wait, the median of rounds; the errors are the
largest difference to float64 over the largest result, forward, and of the queries' gradient.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF

import genesis
from benchmarks.gpu.timing import environment
from benchmarks.result_files import write_result
from genesis.nn import functional as F

SHAPES = [(8, 1024, 14, 2, 64), (2, 4096, 16, 16, 128), (1, 512, 14, 2, 64)]  # batch, tokens, query and key heads, size
ROUNDS = 15


def wall_ms(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Milliseconds of a call and the wait for it."""
    times = []
    for turn in range(ROUNDS + 3):
        wait()
        start = time.perf_counter()
        call()
        wait()
        if turn >= 3:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference over the largest number."""
    return float((found.detach().double() - right.detach()).abs().max() / right.detach().abs().max())


def as_torch(x: Any) -> torch.Tensor:
    """A copy on the GPU."""
    return torch.tensor(x.detach().to("float32").cpu().numpy(), device="cuda")


def measure(shape: tuple[int, ...], form: str) -> dict[str, Any]:
    """One shape under a mask of keys (a quarter is hidden) or dropout."""
    b, t, hq, hk, d = shape
    torch.manual_seed(0)
    sizes = ((b, hq, t, d), (b, hk, t, d), (b, hk, t, d), (b, hq, t, d))
    theirs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in sizes]
    theirs[0] *= 4  # scores as sharp as those of trained models
    leaves = [x.clone().requires_grad_() for x in theirs[:3]]
    own = [genesis.tensor(x.float().cpu().numpy(), dtype="bfloat16", device="cuda") for x in theirs]
    for x in own[:3]:
        x.requires_grad_()
    mask = torch.rand(b, 1, 1, t, device="cuda") < 0.75 if form == "mask" else None
    seen = None if mask is None else genesis.tensor(mask.cpu().numpy(), device="cuda")
    p = 0.1 if form == "dropout" else 0.0

    def ours() -> Any:
        return F.scaled_dot_product_attention(*own[:3], seen, p, enable_gqa=True)

    def both() -> None:
        for x in own[:3]:
            x.grad = None
        ours().backward(own[3])

    def peer() -> Any:
        return TF.scaled_dot_product_attention(*leaves, mask, p, enable_gqa=True)

    def peer_both() -> None:
        for x in leaves:
            x.grad = None
        peer().backward(theirs[3])

    waits = genesis.cuda.synchronize, torch.cuda.synchronize
    row: dict[str, Any] = {"shape": shape, "form": form}
    row["forward_ms"] = [wall_ms(ours, waits[0]), wall_ms(peer, waits[1])]
    row["step_ms"] = [wall_ms(both, waits[0]), wall_ms(peer_both, waits[1])]
    genesis.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_memory_stats()
    both()
    peer_both()
    row["peak_MiB"] = [genesis.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20]
    if not p and t <= 1024:
        exact = [x.detach()[:1].double().requires_grad_() for x in leaves]
        right = TF.scaled_dot_product_attention(*exact, None if mask is None else mask[:1], enable_gqa=True)
        right.backward(theirs[3][:1].double())
        row["error"] = [error(as_torch(ours()[:1]), right), error(peer()[:1], right)]
        row["error_dq"] = [error(as_torch(own[0].grad[:1]), exact[0].grad), error(leaves[0].grad[:1], exact[0].grad)]
    return row


def described(row: dict[str, Any]) -> str:
    """A row as a line: Genesis, torch, and how many times torch's figure ours is."""
    pairs = [(name, pair) for name, pair in row.items() if isinstance(pair, list)]
    parts = [f"{name} {ours:.4g}, {theirs:.4g} ({ours / theirs:.2f})" for name, (ours, theirs) in pairs]
    return "  ".join([f"{row['shape']} {row['form']}:", *parts, row.get("failed", "")]).rstrip()


def main() -> None:
    """Measure every shape and form, and print Genesis / torch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = []
    for shape in SHAPES:
        for form in ("mask", "dropout"):
            try:
                rows.append(measure(shape, form))
            except Exception as failure:  # one broken row must not end the run
                rows.append({"shape": shape, "form": form, "failed": f"{type(failure).__name__}: {failure}"[:300]})
            print(described(rows[-1]))
    if out is not None:
        about = {"date": datetime.date.today().isoformat(), "command": "python -m benchmarks.gpu.masked_attention"}
        write_result(out, {**about, **environment(), "Genesis, torch": rows})


if __name__ == "__main__":
    main()
