"""Training speed and memory on the CPU: the quickstart's model in Genesis and in torch eager, interleaved in one run.

    python benchmarks/cpu_training.py --torch-python .venv-peers/bin/python

Each side runs in its own processes, interleaved, on the same tokens, with the same number of threads. The report has
the median step over all rounds, tokens a second, the peak resident memory of the process, and torch / Genesis.

Matmuls take most of a step, and each library picks their kernels by the CPU. The report names the processor for which
Genesis's BLAS picked them, and OPENBLAS_CORETYPE if that pins the choice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import columns, rows_table, write_report
from genesis.backend import CPU

HERE = Path(__file__).parent
# The peer's optimizer; the quickstart itself uses Muon.
ADAMW = ["optim.name=adamw"]


def genesis_side(job: dict[str, Any]) -> dict[str, Any]:
    """Train in this process with the parts of Genesis's own loop."""
    import resource
    import time

    import numpy as np
    from threadpoolctl import threadpool_info

    import genesis
    import genesis_models
    from genesis.backend.cpu import set_threads
    from genesis.data.loader import PackedLoader
    from genesis.data.pipeline import prepare
    from genesis.train.optimizer import build_optimizer, build_schedule
    from genesis.train.state import TrainState
    from genesis.train.step import take_step
    from genesis_cli import recipes

    config = recipes.load("quickstart", ADAMW)
    set_threads(job["threads"])
    data = prepare(
        train_sources=config.data.train,
        eval_sources=None,
        eval_fraction=config.data.eval_fraction,
        tokenizer_path=None,
        vocab_size=job["model"]["vocab_size"],
        cache_dir=job["cache"],
        seed=config.train.seed,
        on_error="fail",
        max_line_bytes=config.data.max_line_bytes,
        seq_len=job["seq_len"],
        progress=lambda stage, done, total: None,
    )
    if job.get("export"):
        np.save(job["export"], np.asarray(data.train.stream))
        return {}
    loader = PackedLoader(data.train, batch_size=job["batch_size"], seq_len=job["seq_len"], seed=0)
    model = genesis_models.build(job["model"], seed=0)
    state = TrainState(model, build_optimizer(config.optim, model.named_parameters(), 0), loader)
    lr_at = build_schedule(config.optim, 250)
    times, losses = [], []
    for step in range(job["warmup"] + job["steps"]):
        begun = time.perf_counter()
        result = take_step(state, [next(loader)], lr_at(step), config.train.max_grad_norm, CPU)
        times.append(time.perf_counter() - begun)
        losses.append(result.loss_sum / result.targets)
    assert losses[-1] < losses[0], "Genesis does not train"
    return {
        "step_ms": [1000 * x for x in times[job["warmup"] :]],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(p.numel() for p in model.parameters()),
        "last_loss": losses[-1],
        "version": f"genesis {genesis.__version__}, numpy {np.__version__}",
        "blas": ", ".join(
            f"{x['internal_api']} {x['version']} for {x.get('architecture', 'an unknown processor')}"
            for x in threadpool_info()
            if x["user_api"] == "blas"
        ),
    }


def run(command: list[str], job: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run([*command, json.dumps(job)], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


COLUMNS = columns(
    side=("side", "text", "Library."),
    step=("step", "s", "Median step."),
    fastest=("fastest", "s", "Fastest step."),
    tokens_per_second=("tokens/s", "token/s", "Trained tokens a second at the median step."),
    peak=("peak memory", "bytes", "Largest resident memory of the process."),
    last_loss=("last loss", "count", "Loss of the last step."),
    version=("version", "text", "Versions of the library and its BLAS."),
    ratio=("ratio", "ratio", "This side's time / Genesis's."),
    memory_ratio=("memory ratio", "ratio", "This side's memory / Genesis's."),
)


def summary(side: str, rounds: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    steps = [ms / 1e3 for r in rounds for ms in r["step_ms"]]
    median = statistics.median(steps)
    return {
        "side": side,
        "step": median,
        "fastest": min(steps),
        "tokens_per_second": tokens / median,
        "peak": max(r["peak_bytes"] for r in rounds),
        "last_loss": rounds[-1]["last_loss"],
        "version": ", ".join(filter(None, (rounds[0]["version"], rounds[0].get("blas")))),
    }


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from genesis_cli import recipes

    config = recipes.load("quickstart", [])
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "model": config.model.config,
            "batch_size": config.train.batch_size,
            "seq_len": config.data.seq_len,
            "threads": arguments.threads,
            "warmup": 3,
            "steps": arguments.steps,
            "cache": str(Path(folder) / "cache"),
            "tokens": str(Path(folder) / "tokens.npy"),
        }
        ours = [sys.executable, str(HERE / "cpu_training.py"), "--side"]
        theirs = [arguments.torch_python, str(HERE / "cpu_training_torch.py")]
        run(ours, {**job, "export": job["tokens"]})
        rounds: dict[str, list[dict[str, Any]]] = {"genesis": [], "torch": []}
        for _ in range(arguments.rounds):
            rounds["genesis"].append(run(ours, job))
            rounds["torch"].append(run(theirs, job))
    tokens = config.train.batch_size * config.data.seq_len
    ours_row, theirs_row = (summary(name, found, tokens) for name, found in rounds.items())
    theirs_row["ratio"] = theirs_row["step"] / ours_row["step"]
    theirs_row["memory_ratio"] = theirs_row["peak"] / ours_row["peak"]
    return [ours_row, theirs_row]


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        print(json.dumps(genesis_side(json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True, help="the python of an environment with torch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="steps measured in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the JSON report")
    arguments = parser.parse_args()
    made = rows_table("sides", "Training steps of the quickstart", COLUMNS, compare(arguments))
    if pinned := os.environ.get("OPENBLAS_CORETYPE"):
        print(f"OPENBLAS_CORETYPE={pinned} pins the kernels of matmuls: unset it to measure what a user gets")
    write_report(arguments.out, "cpu-training", CPU, [made], {"threads": arguments.threads, "pinned": pinned})


if __name__ == "__main__":
    main()
