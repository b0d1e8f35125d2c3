"""How long training stands still for a checkpoint that is written in the background: runs of a model in full size.

    python -m benchmarks.gpu.background_save [--size 0.5B] [--shape 8x1024] [--every 200] [--steps 240]
        [--background on] [--folder FOLDER] [--out JSON] [--cpu]

The loop is that of `genesis train`, on random tokens. Times of steps are those of the GPU, from the end of one to the
end of the next: what a save adds is its standstill. First a small model's checkpoints are compared, byte for byte, with
those for which training waits. The last step's save, for which every run waits, is left out. `--cpu` takes a model of 4
million parameters and the CPU, where the clock times steps: it shows the same of saves without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.data.loader import Batch
from genesis.files.manifest import verify_manifest
from genesis.train import loop
from genesis.train.checkpoint import Checkpoints
from genesis.train.config import Config
from genesis.train.device_steps import DeviceSteps
from genesis.train.loop import Training
from genesis.train.metrics import Metrics
from genesis.train.optimizer import build_optimizer
from genesis.train.output import Output
from genesis.train.progress import Progress
from genesis.train.saving import SAVER
from genesis.train.signals import Interrupts
from genesis.train.state import TrainState, snapshot_bytes
from genesis.train.step import StepResult
from genesis_models.blocks import CausalLM
from genesis_models.folder import write_model
from genesis_models.registry import build, preset

WARM_UP = 20  # steps that compile, are captured, and run while snapshots' memory is made
POOL = 16  # batches, in turn
SMALL = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
MEDIUM = {**SMALL, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}


class RandomBatches:
    """A loader of random tokens: each row one document."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        self.batch_size, self.seq_len, self.index = rows, length, 0
        rng = np.random.default_rng(0)
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(length), (rows, length)))
        targets, samples = rows * (length - 1), np.zeros((0, 4), np.int64)
        ids = rng.integers(0, vocabulary, (POOL, rows, length))
        self._batches = [Batch(0, i, x, x, positions, targets, x.size, samples) for i, x in enumerate(ids)]

    def __next__(self) -> Batch:
        self.index += 1
        return self._batches[(self.index - 1) % POOL]

    @property
    def epochs_done(self) -> float:
        """The position in epochs."""
        return self.index / POOL

    def state(self) -> dict[str, Any]:
        """The position as JSON values."""
        return {"index": self.index}


def training_of(folder: Path, raw: dict[str, Any], shape: tuple[int, int], device: Device, **chosen: Any) -> Training:
    """A run as `genesis train` assembles it, without data, evaluation and metrics."""
    dtype = "float32" if device == CPU else "bfloat16"
    config = Config.model_validate(
        {
            "model": {"config": raw, "dtype": dtype},
            "data": {"train": ["unused.txt"], "seq_len": shape[1], "eval_fraction": 0},
            "train": {
                "output_dir": str(folder),
                "steps": chosen["steps"],
                "batch_size": shape[0],
                "device": device.type,
            },
            "optim": {"name": "adamw", "lr": 1e-5},
            "eval": {"every": None},
            "checkpoint": {"every": chosen["every"], "background": chosen["background"], "save_total_limit": None},
        }
    )
    model: CausalLM = build(raw, 0, device=str(device), dtype=dtype)
    optimizer = build_optimizer(config.optim, model.named_parameters(), 0)
    loader: Any = RandomBatches(*shape, raw["vocab_size"])
    progress = Progress(chosen["steps"], 0, Output(sys.stderr))
    training = Training(
        config=config,
        state=TrainState(model, optimizer, loader),
        checkpoints=Checkpoints(
            folder, lambda target, snapshot: write_model(model, target, values=snapshot.weights), None
        ),
        lr_at=lambda step: 1e-5,
        sample=lambda prompts: [],
        held_out=None,
        open_metrics=lambda step: Metrics(folder),
        progress=progress,
        interrupts=Interrupts(),
        device=device,
        steps=chosen["steps"],
    )
    training.open()
    return training


@contextmanager
def noting_steps(ended: list[Any]) -> Any:
    """Notes the end of each step, an event or on the CPU a time, and leaves out the save at the end."""
    take, save, on_cpu = DeviceSteps.take, Training._save, loop.take_step

    def noted(self: DeviceSteps, *args: Any) -> None:
        take(self, *args)
        ended.append(self._made[-1].ended)

    def noted_on_cpu(*args: Any) -> StepResult:
        result = on_cpu(*args)
        ended.append(time.perf_counter())
        return result

    def saved(self: Training, *, waits: bool) -> None:
        if not waits:
            save(self, waits=waits)
        else:
            self.state_hash = "left out"

    with (
        mock.patch.object(DeviceSteps, "take", noted),
        mock.patch.object(loop, "take_step", noted_on_cpu),
        mock.patch.object(Training, "_save", saved),
    ):
        yield


def seconds_between(ended: Sequence[Any], device: Device) -> list[float]:
    """From the end of each step to that of the next."""
    if device == CPU:
        return [b - a for a, b in itertools.pairwise(ended)]
    cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(ended)]


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file of a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def check_small(folder: Path, device: Device) -> None:
    """Checkpoints of a small run: the same bytes in the background as at once."""
    found = []
    for background in ("off", "on"):
        output = folder / f"small-{background}"
        output.mkdir()
        with noting_steps([]):
            training_of(output, SMALL, (2, 64), device, steps=9, every=2, background=background).run()
        found.append([digests(output / f"checkpoint-{step}") for step in (2, 4, 6, 8)])
    assert found[0] == found[1], "a checkpoint that was saved in the background has other bytes"
    print("small model: 4 checkpoints have the same bytes in the background as at once", flush=True)


@contextmanager
def noting_saves(times: list[float]) -> Any:
    """Notes how long the thread writes."""
    write = Checkpoints.write

    def timed(self: Checkpoints, *args: Any) -> str:
        begun = time.perf_counter()
        digest = write(self, *args)
        if threading.current_thread().name == SAVER:
            times.append(time.perf_counter() - begun)
        return digest

    with mock.patch.object(Checkpoints, "write", timed):
        yield


def host_memory() -> int:
    """The most bytes that this process has held on the host."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) << 10


def measured(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Figures of a run, and a table of them on stdout."""
    shape = tuple(map(int, chosen.shape.split("x")))
    device, ended = CPU if chosen.cpu else Device("cuda", 0), list[Any]()
    written: list[float] = []
    training = training_of(
        folder,
        MEDIUM if chosen.cpu else preset(chosen.size),
        (shape[0], shape[1]),
        device,
        steps=chosen.steps,
        every=chosen.every,
        background=chosen.background,
    )
    with noting_steps(ended), noting_saves(written):
        training.run()
    gaps = seconds_between(ended[WARM_UP:], device)
    median = statistics.median(gaps)
    saves = [step for step in range(chosen.every, chosen.steps, chosen.every) if step > WARM_UP]
    standstills = [gaps[step - 1 - WARM_UP] - median for step in saves]
    others = [gap for i, gap in enumerate(gaps) if i + 1 + WARM_UP not in saves]
    nbytes = sum(path.stat().st_size for path in training.checkpoints.folder(saves[0]).iterdir())
    found = {
        "size": "cpu" if chosen.cpu else chosen.size,
        "shape": chosen.shape,
        "background": chosen.background,
        "steps": chosen.steps,
        "every": chosen.every,
        "step_ms": median * 1e3,
        "slowest_other_step_ms": max(others) * 1e3,
        "standstill_s": standstills,
        "wall_over_steps": sum(gaps) / (len(gaps) * median),
        "written_s": written,
        "checkpoint_bytes": nbytes,
        "snapshot_bytes": snapshot_bytes(training.state),
        "peak_host_bytes": host_memory(),
    }
    begun = time.perf_counter()
    verify_manifest(training.checkpoints.folder(saves[0]))
    print(f"checkpoint-{saves[0]} verified in {time.perf_counter() - begun:.1f} s: {nbytes / 1e9:.2f} GB")
    print(f"step {median * 1e3:.2f} ms (slowest without a save {max(others) * 1e3:.2f}), {len(gaps)} steps")
    for step, stood in zip(saves, standstills, strict=True):
        print(f"save after step {step}: standstill {stood:.3f} s")
    print(f"written in {', '.join(f'{s:.1f}' for s in written)} s beside the steps")
    during = gaps[saves[0] - WARM_UP :]
    print(f"steps behind the first save: median {statistics.median(during) * 1e3:.2f} ms")
    print(f"wall time over the steps' own: {found['wall_over_steps']:.4f}")
    print(f"host memory: snapshot {found['snapshot_bytes'] / 1e9:.2f} GB, peak {found['peak_host_bytes'] / 1e9:.2f} GB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--shape", default="8x1024")
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--background", choices=["auto", "on", "off"], default="on")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; else a temporary one")
    parser.add_argument("--out", type=Path, help="where figures of a GPU go")
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU, to try the script")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="genesis-saves-", dir=chosen.folder))
    try:
        check_small(folder, CPU if chosen.cpu else Device("cuda", 0))
        output = folder / "run"
        output.mkdir()
        found = measured(output, chosen)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if chosen.out and not chosen.cpu:
        from benchmarks.gpu.timing import environment

        command = "python -m benchmarks.gpu.background_save " + " ".join(sys.argv[1:])
        result = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "command": command, **environment(), **found}
        chosen.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
