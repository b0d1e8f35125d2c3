"""What `genesis estimate` says of steps on the CPU, and by how much the memory of a process grows that takes them.

    python -m benchmarks.cpu_estimates

Steps in full and with adapters, with and without checkpointing, in micro-steps, with other optimizers, widths
and vocabularies. The estimate takes steps of a few layers and rows; each measurement is of a process of its own (VmHWM
of /proc, so on Linux alone).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import genesis_models
from genesis.backend import CPU
from genesis.backend.cpu import pool
from genesis.data.loader import Batch
from genesis.train.config_file import parse_config
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli import recipes
from genesis_cli.session.estimate import estimate, place_of
from genesis_cli.session.trained_parameters import select_trained

TOLERANCE = 0.10
# Rows, micro-steps, activation checkpointing, adapters, optimizer, and what is other than in the quickstart's model.
CASES: tuple[tuple[int, int, str, dict[str, Any] | None, str, dict[str, Any]], ...] = (
    (8, 1, "none", None, "adamw", {"num_hidden_layers": 6}),
    (16, 1, "full", None, "adamw", {"num_hidden_layers": 8}),
    (8, 1, "none", {"r": 16}, "adamw", {"num_hidden_layers": 6}),
    (8, 2, "none", None, "muon", {"num_hidden_layers": 6}),
    (8, 1, "none", {"r": 16, "use_dora": True}, "adamw", {"num_hidden_layers": 6}),
    (8, 2, "full", {"r": 8}, "adamw", {"num_hidden_layers": 8}),
    (8, 1, "none", None, "adamw", {"vocab_size": 32768}),
    (4, 4, "none", None, "adamw", {"hidden_size": 512, "intermediate_size": 1408, "tie_word_embeddings": False}),
    (12, 1, "full", None, "lion", {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 16384}),
    (1, 1, "none", None, "adamw", {"num_hidden_layers": 12}),
    (6, 2, "full", {"r": 16, "use_dora": True}, "adamw", {"num_hidden_layers": 6, "vocab_size": 8192}),
    (32, 1, "full", None, "adamw", {"num_hidden_layers": 6}),
    (8, 1, "none", None, "sgd", {"num_hidden_layers": 6}),
)


def config_of(number: int, folder: Path) -> Any:
    """The configuration of a case; with adapters its base is written below `folder`."""
    rows, micro, how, lora, optimizer, changed = CASES[number]
    model = dict(recipes.load("quickstart", []).model.config or {}) | changed
    raw: dict[str, Any] = {
        "model": {"config": model},
        "data": {"train": "stdlib:", "seq_len": 256},
        "train": {"output_dir": "none", "steps": 1, "batch_size": rows, "accumulation_steps": micro, "device": "cpu"},
        "optim": {"name": optimizer},
    }
    raw["train"]["activation_checkpointing"] = how
    if lora is not None:
        base = folder / str(number)
        if not base.exists():
            genesis_models.save(genesis_models.build(model), base)
        raw |= {"model": {"path": str(base)}, "lora": lora}
    return parse_config(json.dumps(raw), "a case")


def status(key: str) -> int:
    """Bytes that /proc says of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def taken(config: Any) -> int:
    """Bytes by which this process grows at the most while it takes steps of `config`."""
    raw = config.model.config or json.loads((Path(config.model.path) / "config.json").read_text())
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    steps(config, raw | small, 2)  # what is imported and made once
    gc.collect()
    pool.trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    steps(config, raw, config.train.batch_size)
    return status("VmHWM") - before


def steps(config: Any, raw: dict[str, Any], rows: int) -> None:
    """Three steps of a new model."""
    model = genesis_models.build(raw)
    select_trained(config, model)
    model.train()
    model.activation_checkpointing = config.train.activation_checkpointing
    micro, loader = config.train.accumulation_steps, SimpleNamespace(batch_size=rows, seq_len=config.data.seq_len)
    state = TrainState(model, build_optimizer(config.optim, model.named_parameters(), 0, micro), loader)
    for _ in range(3):
        take_step(state, [Batch.empty(rows, config.data.seq_len)] * micro, 1e-5, 1.0, CPU)


def main() -> None:
    """Print a table; with a number, what that case takes."""
    if len(sys.argv) > 2:
        print(taken(config_of(int(sys.argv[1]), Path(sys.argv[2]))))
        return
    worst = 0.0
    print("| rows | micro | checkpointing | trained | optimizer | model | estimate MiB | measured MiB | off % | s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for number, (rows, micro, how, lora, optimizer, changed) in enumerate(CASES):
            config, started = config_of(number, Path(name)), time.perf_counter()
            said, seconds = estimate(config, str(number), place_of("cpu", None)).peak, time.perf_counter() - started
            command = [sys.executable, "-m", "benchmarks.cpu_estimates", str(number), name]
            found = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            worst = max(worst, abs(said / found - 1))
            kind = "full" if lora is None else "DoRA" if lora.get("use_dora") else "LoRA"
            other = ", ".join(f"{key.removeprefix('num_hidden_')} {value}" for key, value in changed.items())
            figures = f"{said >> 20} | {found >> 20} | {100 * (said / found - 1):+.1f} | {seconds:.1f}"
            print(f"| {rows} | {micro} | {how} | {kind} | {optimizer} | {other} | {figures} |", flush=True)
    print(f"largest difference: {100 * worst:.1f} %, allowed {100 * TOLERANCE:.0f} %")
    assert worst <= TOLERANCE


if __name__ == "__main__":
    main()
