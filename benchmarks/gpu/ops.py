"""Genesis against torch on one GPU, op by op, in one process: time on the GPU by graph replay, checked before timed.

    python -m benchmarks.gpu.ops --out benchmarks/results/DATE-gpu-ops.json [--only matmul]

The ratio is torch / Genesis: above 1, Genesis is faster. Inputs are random and shared between the two without a copy.
Boolean selection waits for the GPU (its result's size is data), so there wall time counts as GPU time, for both.
What a call of Genesis launches is noted with its time, from one more call.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import genesis
from benchmarks.gpu.launches import kernels_of
from benchmarks.gpu.timing import CUDA, backend, environment, gpu_us, shared, torch_gpu_us, wall_us
from benchmarks.lower_bounds import SMALLEST
from benchmarks.result_files import write_result
from genesis.backend.cuda.precision import allow_tf32


class Row(NamedTuple):
    """One comparison.

    Attributes:
        ours, theirs: the calls; their results must agree.
        nbytes, flops: counted work, for the rates.
        tolerance: of the relative error in norm.
        calls: how often a graph repeats the call.
        wall: compare wall times.
        product: m, n and k where a matmul is all there is.
    """

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    nbytes: int = 0
    flops: int = 0
    tolerance: float = 1e-5
    calls: int = 20
    wall: bool = False
    product: tuple[int, ...] = ()


def as_torch(x: Any) -> torch.Tensor:
    """Genesis's result as a torch tensor (a copy through the host: this is not timed)."""
    if x.dtype is genesis.bfloat16:
        x = x.float()
    return torch.from_numpy(x.numpy().copy()).cuda()


def recorded(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a forward whose backward can be captured: that runs on its forward's stream, and the default one
    cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = forward()
    side.synchronize()
    return out


def random(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    """Normal values, for both."""
    x = torch.randn(*shape, device="cuda", dtype=dtype)
    return shared(x), x


SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def elementwise_rows() -> Iterator[Row]:
    """Additions, small to large."""
    for shape in ((256, 256), (512, 512), (2048, 2048), (4096, 4096), (8192, 8192), (32, 512, 896)):
        (x, p), (y, q) = random(*shape), random(*shape)
        yield Row(f"add {shape} fp32", lambda x=x, y=y: x + y, lambda p=p, q=q: p + q, 12 * p.numel())


def reduction_rows() -> Iterator[Row]:
    """Sums and maxima over all axes, the last, the first two, the middle one."""
    for shape in ((4, 512, 896), (16, 2048, 4864)):
        for dtype in (torch.float32, torch.bfloat16):
            x, p = random(*shape, dtype=dtype)
            size, tag = p.numel() * p.element_size(), f"{shape} {SHORT[dtype]}"
            close = 1e-5 if dtype is torch.float32 else 1e-2
            for axis in (None, -1, (0, 1), 1):
                yield Row(
                    f"sum {axis} {tag}",
                    lambda x=x, axis=axis: x.sum(axis) if axis is not None else x.sum(),
                    lambda p=p, axis=axis: p.sum(axis) if axis is not None else p.sum(),
                    size,
                    tolerance=close,
                )
            yield Row(f"max None {tag}", lambda x=x: x.max(), lambda p=p: p.max(), size)
            yield Row(f"max (0, 1) {tag}", lambda x=x: x.amax((0, 1)), lambda p=p: p.amax((0, 1)), size)
            for axis in (-1, 1):
                yield Row(
                    f"max {axis} {tag}",
                    lambda x=x, axis=axis: x.max(axis)[0],
                    lambda p=p, axis=axis: p.max(axis)[0],
                    size,
                )


def product_row(
    name: str, ours: Callable[[], Any], theirs: Callable[[], Any], product: tuple[int, int, int], calls: int
) -> Row:
    """A matmul of [m, k] x [k, n]."""
    return Row(name, ours, theirs, flops=2 * math.prod(product), tolerance=4e-3, calls=calls, product=product)


def matmul_rows() -> Iterator[Row]:
    """Square matmuls in bf16 and tf32, and the matmuls of a training step of Qwen2.5-0.5B."""
    allow_tf32.set(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    for dtype in (torch.bfloat16, torch.float32):
        for n in (512, 1024, 2048, 4096, 8192):
            (x, p), (y, q) = random(n, n, dtype=dtype), random(n, n, dtype=dtype)
            name = f"matmul {n} {'bf16' if dtype is torch.bfloat16 else 'tf32'}"
            calls = 20 if n < 8192 else 6
            yield product_row(name, lambda x=x, y=y: x @ y, lambda p=p, q=q: p @ q, (n, n, n), calls)
    m = 8192
    for k, n in ((896, 1152), (896, 896), (896, 9728), (4864, 896), (896, 151936)):
        (x, p), (w, v) = random(m, k, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16)
        g, h = random(m, n, dtype=torch.bfloat16)
        calls, tag = (4 if n > 100_000 else 20), f"{m}x{k} -> {n} bf16"
        yield product_row(f"forward {tag}", lambda x=x, w=w: x @ w.T, lambda p=p, v=v: p @ v.T, (m, n, k), calls)
        yield product_row(f"dgrad {tag}", lambda g=g, w=w: g @ w, lambda h=h, v=v: h @ v, (m, k, n), calls)
        yield product_row(f"wgrad {tag}", lambda g=g, x=x: g.T @ x, lambda h=h, p=p: h.T @ p, (n, k, m), calls)


def softmax_rows() -> Iterator[Row]:
    """Rows of 16K and of a vocabulary."""
    for shape, dtype in (
        ((16384, 16384), torch.float32),
        ((8192, 151936), torch.float32),
        ((8192, 151936), torch.bfloat16),
    ):
        x, p = random(*shape, dtype=dtype)
        close = 1e-5 if dtype is torch.float32 else 1e-2
        size = 2 * p.numel() * p.element_size()
        name = f"softmax {shape} {SHORT[dtype]}"
        yield Row(name, lambda x=x: x.softmax(-1), lambda p=p: p.softmax(-1), size, 0, close, 4)


def movement_rows() -> Iterator[Row]:
    """Transposes, rows gathered and added, selection by a mask."""
    for dtype in (torch.bfloat16, torch.float32):
        x, p = random(16384, 4096, dtype=dtype)
        size = 2 * p.numel() * p.element_size()
        name = f"transpose copy (16384, 4096) {SHORT[dtype]}"
        yield Row(name, lambda x=x: x.T.contiguous(), lambda p=p: p.t().contiguous(), size)
    for dtype in (torch.float32, torch.bfloat16):
        table, source = random(151936, 896, dtype=dtype), random(8192, 896, dtype=dtype)
        rows = torch.randint(0, 151936, (8192,), device="cuda")
        index, size = shared(rows), source[1].numel() * source[1].element_size()
        yield Row(
            f"gather 8192 of (151936, 896) {SHORT[dtype]}",
            lambda t=table[0], i=index: t.index_select(0, i),
            lambda t=table[1], i=rows: t.index_select(0, i),
            2 * size,
        )
        yield Row(
            f"scatter-add 8192 into (151936, 896) {SHORT[dtype]}",
            lambda t=table[0], i=index, s=source[0]: t.index_add(0, i, s),
            lambda t=table[1], i=rows, s=source[1]: t.index_add(0, i, s),
            2 * table[1].numel() * table[1].element_size() + 2 * size,
            tolerance=1e-2 if dtype is torch.bfloat16 else 1e-5,
        )
    x, p = random(64 << 20)
    for share in (0.01, 0.5, 0.99):
        keep = torch.rand(64 << 20, device="cuda") < share
        mask = shared(keep)
        yield Row(
            f"masked select {share:.0%} of 64Mi fp32",
            lambda x=x, m=mask: x[m],
            lambda p=p, m=keep: p[m],
            int(p.numel() * (1 + 4 + 4 * share)),
            calls=10,
            wall=True,
        )


GROUPS = {
    "elementwise": elementwise_rows,
    "reduction": reduction_rows,
    "matmul": matmul_rows,
    "softmax": softmax_rows,
    "movement": movement_rows,
}


def copy_rate() -> float:
    """Bytes per second, read and written, of device-to-device copies: the best of 256 MiB, 512 MiB and 1 GiB."""
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    driver, rates = backend.driver, []
    for nbytes in (1 << 28, 1 << 29, 1 << 30):
        us = gpu_us(lambda n=nbytes: driver.copy(y.data_ptr(), x.data_ptr(), n, backend.stream), 10)
        rates.append(2 * nbytes / us * 1e6)
    return max(rates)


def smallest() -> dict[str, float]:
    """Microseconds of kernels on next to no data, by name: what one takes before there is work."""
    x, b = random(64, 64)[0], random(64, 64, dtype=torch.bfloat16)[0]
    turned = x.T.contiguous
    calls = (lambda: x + x, x.abs, lambda: x[:1].sum(-1), lambda: x[:1].max(-1), lambda: b @ b, turned)
    found = {}
    for call in calls:
        call()
        kernels = kernels_of(call, CUDA)
        if len(kernels) == 1:
            found[kernels[0]["name"]] = round(gpu_us(call, 200), 2)
    return found


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative error in norm; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = ours.double(), theirs.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def measure(row: Row) -> dict[str, Any]:
    """Check one row, then time both sides interleaved."""
    try:
        error = error_of(as_torch(row.ours()), row.theirs())
        if not error <= row.tolerance:
            return {"op": row.name, "failed": f"relative error {error:.2e}"}
        if row.wall:
            ours = [wall_us(row.ours, backend.driver.synchronize, row.calls, 5) for _ in range(2)]
            theirs = [wall_us(row.theirs, torch.cuda.synchronize, row.calls, 5) for _ in range(2)]
        else:
            ours, theirs = [], []
            for _ in range(2):
                ours.append(gpu_us(row.ours, row.calls))
                theirs.append(torch_gpu_us(row.theirs, row.calls))
        kernels = kernels_of(row.ours, CUDA)
    except Exception as failure:  # one broken row must not end the run
        return {"op": row.name, "failed": f"{type(failure).__name__}: {failure}"[:400]}
    mine, peer = min(ours), min(theirs)
    found = {"op": row.name, "genesis_us": round(mine, 2), "torch_us": round(peer, 2), "ratio": round(peer / mine, 3)}
    found["spread"] = round(max(max(ours) / mine, max(theirs) / peer) - 1, 3)
    if row.nbytes:
        found["TB/s"] = round(row.nbytes / mine / 1e6, 3)
    if row.flops:
        found["TFLOP/s"] = round(row.flops / mine / 1e6, 1)
    if row.product:
        found["product"] = row.product
    return found | {"clock": "wall" if row.wall else "GPU", "kernels": kernels}


def main() -> None:
    """Measure, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    options = parser.parse_args()
    rate, least = copy_rate(), smallest()
    found = []
    for group in options.only:
        for row in GROUPS[group]():
            found.append(measure(row))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        backend.pool.empty_cache()
    ratios = [r["ratio"] for r in found if "ratio" in r]
    report = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m " + " ".join(["benchmarks.gpu.ops", *sys.argv[1:]]),
        **environment(),
        "copy TB/s": round(rate / 1e12, 3),
        SMALLEST: least,
        "median ratio": statistics.median(ratios) if ratios else None,
        "rows": found,
    }
    if options.out:
        write_result(options.out, report)
    for r in found:
        rest = r.get("failed") or f"{r['genesis_us']:9.2f} {r['torch_us']:9.2f} {r['ratio']:6.2f}"
        print(f"{r['op']:44s} {rest} {r.get('TB/s', r.get('TFLOP/s', ''))}")
    slow = sum(r < 0.9 for r in ratios)
    print(f"copy {rate / 1e12:.2f} TB/s; median ratio {report['median ratio']}; below 0.9: {slow}")


if __name__ == "__main__":
    main()
