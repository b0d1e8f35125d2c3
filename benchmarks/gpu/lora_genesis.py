"""The Genesis side of lora_step.py: adapter steps as in `genesis train`. It also writes the files of all sides."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import genesis_models
from benchmarks.gpu.lora_step import serve, tokens
from genesis import cuda, no_grad, random
from genesis.backend import as_device
from genesis.data.loader import IGNORE_INDEX, Batch
from genesis.files.atomic import AtomicFolder
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_models.adapters import AdapterConfig, adapted_layers, apply_adapters, load_adapter, write_adapter
from genesis_models.registry import preset

__all__ = ["OpenedSteps", "config_of", "prepare"]

LR, MAX_NORM = 2e-4, 1.0
# The heads and widths of Llama-3.2-1B, with plain rotary angles, and a toy for a test on the CPU.
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def config_of(size: str) -> dict[str, Any]:
    """The config of a size that `--sizes` names; `tiny` and `tiny-FAMILY` are toys."""
    if size == "llama-3.2-1B":
        return dict(LLAMA)
    if size.startswith("tiny"):
        raw = LLAMA if size.endswith("llama") else preset("qwen3-0.6B" if size.endswith("qwen3") else "0.5B")
        return {**raw, **TINY} | ({"head_dim": 16} if "head_dim" in raw else {})
    return preset(size)


def prepare(job: dict[str, Any]) -> None:
    """Write a base model and an adapter. Norms, biases and B are random too, so that every value affects the loss."""
    random.manual_seed(1)  # for the adapter's A
    folder, rng = Path(job["folder"]), np.random.default_rng(1)
    model = genesis_models.build(config_of(job["size"]), seed=0, device=job["device"], dtype=job["dtype"])
    with no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(_drawn(rng, p, 0.0 if name.endswith("bias") else 1.0))
    genesis_models.save(model, folder / "base")
    apply_adapters(model, AdapterConfig(r=job["r"], alpha=32.0, use_dora=job["kind"] == "dora"))
    with no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.copy_(_drawn(rng, layer.lora_B.weight, 0.0))
    with AtomicFolder(folder / "adapter") as writer:
        write_adapter(model, writer, base=folder / "base")


def _drawn(rng: np.random.Generator, p: Any, mean: float) -> Any:
    from genesis import tensor

    return tensor(rng.normal(mean, 0.02, p.shape).astype(np.float32)).to(p.device).to(p.dtype)


class OpenedSteps:
    """A model with the adapter, and its steps, which are captured graphs on a GPU."""

    def __init__(self, job: dict[str, Any]) -> None:
        folder, self.device = Path(job["folder"]), as_device(job["device"])
        model: Any = genesis_models.load(folder / "base", device=job["device"], dtype=job["dtype"])
        load_adapter(model, folder / "adapter")
        if job["checkpointing"] != "none":
            model.activation_checkpointing = job["checkpointing"]
        model.train()
        optimizer = build_optimizer(OptimConfig(name="adamw", lr=LR, weight_decay=0.0), model.named_parameters(), 0)
        loader: Any = SimpleNamespace(batch_size=job["batch"], seq_len=job["length"])
        self.state, self.job = TrainState(model, optimizer, loader), job
        self.batches, self.count = [_batch(ids) for ids in tokens(job)], 0
        self.taken: list[float] = []
        self.memory = {"peak": 0, "reserved": 0}
        self.steps = None
        if job["device"] != "cpu":
            self.steps = DeviceSteps(self.state, self.device, MAX_NORM, 1000, note=_note)
            cuda.empty_cache(self.device)  # memory that loading took
            cuda.reset_peak_memory_stats(self.device)

    def step(self) -> None:
        """Take a step and wait for its end."""
        batch = self.batches[self.count % len(self.batches)]
        self.count += 1
        if self.steps is None:
            result = take_step(self.state, [batch], LR, MAX_NORM, self.device)
            self.taken.append(result.loss_sum / result.targets)
        else:
            self.steps.take([batch], LR)
            cuda.synchronize()

    def losses(self) -> list[float]:
        """The losses of the steps since the last call."""
        if self.steps is not None:
            return [r.loss_sum / r.targets for r in self.steps.reading().results()]
        found, self.taken = self.taken, []
        return found

    def forget_peak(self) -> None:
        """Store the peak of the first steps: replays take no memory, and a profile makes its own graphs."""
        if self.steps is not None:
            allocated, reserved = cuda.max_memory_allocated(), cuda.max_memory_reserved()
            self.memory = {"peak": allocated, "reserved": reserved}

    def facts(self) -> dict[str, Any]:
        """Bytes of peak and reserved memory."""
        return dict(self.memory)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _batch(ids: Any) -> Batch:
    """A batch in which each row is one document."""
    b, t = ids.shape
    labels = np.concatenate([np.full((b, 1), IGNORE_INDEX), ids[:, 1:]], 1)
    positions = np.broadcast_to(np.arange(t), (b, t))
    return Batch(0, 0, ids, labels, positions, b * (t - 1), b * t, np.zeros((0, 4), np.int64))


if __name__ == "__main__":
    given, begun = json.loads(sys.argv[1]), time.perf_counter()
    if given.get("prepare"):
        prepare(given)
        print("{}", flush=True)
    else:
        serve(OpenedSteps(given), given, begun)
