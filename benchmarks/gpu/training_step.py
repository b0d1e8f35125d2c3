"""A training step of Genesis on one GPU, next to torch's recipes in the same run: milliseconds, memory, warm-up.

    python -m benchmarks.gpu.training_step [--size 0.5B] [--shapes 1x128,8x1024] [--recipes lean-compile,hf]
        [--steps 12] [--precision fp8] [--profile] [--out JSON]

A step is forward, backward, clipping to norm 1 and AdamW, bf16 weights with float32 masters. A shape is batch x
length, with a third number batch x length x micro-steps. Each side runs in a process of its own, interleaved; the
median step is reported. `--profile` adds the time of each op, from events inside a captured step. `--precision fp8` has
Genesis make its steps so, and for comparison in the weights' type.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.result_files import write_result

Job = dict[str, Any]


def genesis_side(job: Job) -> list[dict[str, Any]]:
    """Steps of the product's own parts, for each shape; one process."""
    started = time.perf_counter()
    from benchmarks.gpu.step_runs import measured

    return [measured(job, shape, started) | {"side": job["side"]} for shape in job["shapes"]]


def torch_side(job: Job) -> list[dict[str, Any]]:
    """The same with torch, as one recipe has it."""
    from benchmarks.gpu.torch_step import measured

    return [measured(job, shape) for shape in job["shapes"]]


def in_process(job: Job, limit: float) -> list[dict[str, Any]]:
    """One side's rows, from a fresh process."""
    command = [sys.executable, "-m", "benchmarks.gpu.training_step", "--job", json.dumps(job)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return [*_rows(text), {**job, "error": f"no end after {limit:.0f} s"}]
    found = _rows(done.stdout)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        found.append({**job, "error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]})
    return found


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in row:
        return f"{row.get('side', '?'):22} {row.get('shapes', row.get('shape'))!s:12} {row['error'][:90]}"
    return (
        f"{row['side']:22} {row['shape']:12} {row['ms']:8.2f} ms {row['tokens_per_second'] / 1e3:7.1f}k tok/s"
        f" {row['model_tflops']:6.1f} TFLOP/s {row['peak_gib']:6.2f} GiB  warm-up {row['warm_s']:5.1f} s"
        f"  loss {row['loss']:.4f}"
    )


def memory_field(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    """The figure of memory that both rows are compared by.

    What a CUDA graph of torch's holds is in no count of allocations, so next to one it is what is reserved from the
    driver, on both sides, where both rows have it.
    """
    has_both = all(row.get("reserved_gib") for row in (ours, peer))
    return "reserved_gib" if "graphs" in peer["side"] and has_both else "peak_gib"


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Each recipe's time and memory over those of Genesis."""
    found = []
    first = rows[0].get("side") if rows else None
    ours = {r["shape"]: r for r in rows if r.get("side") == first and "ms" in r}
    for row in rows:
        mine = ours.get(row.get("shape", ""))
        if mine is not None and row["side"] != first and "ms" in row:
            field = memory_field(mine, row)
            memory, what = mine[field] / row[field], {"peak_gib": "memory", "reserved_gib": "reserved memory"}[field]
            found.append(
                f"{row['shape']:12} {row['side']:22} {row['ms'] / mine['ms']:5.2f}x time  {memory:5.2f} {what}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--shapes", default="1x128,1x512,4x512,8x1024")
    parser.add_argument("--recipes", default="", help="torch's: lean-compile, lean-graphs, lean-pure-compile, hf, …")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=300, help="seconds that one process may take")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--checkpointing", default="")
    parser.add_argument("--precision", choices=["fp8"], help="of the layers' matmuls; else the type of the weights")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        job = json.loads(chosen.job)
        for row in (genesis_side if job["side"].startswith("genesis") else torch_side)(job):
            print(json.dumps(row), flush=True)
        return
    base = {k: getattr(chosen, k) for k in ("size", "steps", "profile", "eager", "checkpointing")}
    base["shapes"] = chosen.shapes.split(",")
    rows = []
    ours = [f"genesis-{chosen.precision}", "genesis"] if chosen.precision else ["genesis"]
    for side in [*ours, *filter(None, chosen.recipes.split(","))]:
        precision = chosen.precision if side == ours[0] else None
        for row in in_process({**base, "side": side, "precision": precision}, chosen.limit):
            print(line(row), flush=True)
            rows.append(row)
    print("\n".join(ratios(rows)))
    if chosen.out:
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        command = "python -m benchmarks.gpu.training_step " + " ".join(sys.argv[1:])
        write_result(chosen.out, {"date": date, "command": command, "rows": rows})


if __name__ == "__main__":
    main()
