"""Whether Genesis learns as torch does: losses over some hundred steps on real text, from the same weights and batches.

    python -m benchmarks.gpu.loss_curve [--size 0.5B] [--steps 300] [--rate 3e-5] [--text FOLDER] [--precision fp8]
        [--out JSON]

The text is the standard library of Python unless another folder is given. Both sides hold bf16 weights (torch: bf16
autocast) with float32 masters, clip to norm 1 and use AdamW with a linear warm-up. Reported is the largest relative
distance of the means over 10 steps. With `--precision fp8` it is that of Genesis in fp8 from Genesis in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP, BATCH, LENGTH, MEAN, VOCABULARY = 100, 8, 1024, 10, 16_384


def tokens_of(folder: Path, size: int) -> np.ndarray:
    """The folder's Python files as ids of a vocabulary trained on them, in an order drawn by hash."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = sorted(p for p in folder.rglob("*.py") if "test" not in p.parts and "site-packages" not in p.parts)
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    ids = [np.array(e.ids, np.int64) for e in tokenizer.encode_batch(texts)]
    order = np.random.default_rng(0).permutation(len(ids))
    stream = np.concatenate([ids[i] for i in order])
    return np.resize(stream, size)


def rate_at(step: int, rate: float) -> float:
    """The learning rate of a step, counted from 0."""
    return rate * min(1.0, (step + 1) / WARM_UP)


def genesis_side(job: dict[str, Any]) -> list[float]:
    """Losses of Genesis; it makes the weights that the other side reads."""
    from types import SimpleNamespace

    import genesis_models
    from genesis.backend import Device
    from genesis.data.loader import Batch
    from genesis.train.config import OptimConfig
    from genesis.train.device_steps import DeviceSteps
    from genesis.train.optimizer import build_optimizer
    from genesis.train.state import TrainState
    from genesis_models.registry import preset

    model = genesis_models.build(preset(job["size"]), seed=0, device="cuda", dtype="bfloat16")
    if job["save"]:
        genesis_models.save(model, job["folder"] + "/model")
    model.precision = job["precision"]
    model.train()
    stream = np.load(job["folder"] + "/tokens.npy").reshape(-1, BATCH, LENGTH)
    optimizer = build_optimizer(
        OptimConfig(name="adamw", lr=job["rate"], weight_decay=0.1, betas=(0.9, 0.95)), model.named_parameters(), 0
    )
    loader: Any = SimpleNamespace(batch_size=BATCH, seq_len=LENGTH)
    steps = DeviceSteps(TrainState(model, optimizer, loader), Device("cuda", 0), 1.0, job["steps"])
    positions = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    for i in range(job["steps"]):
        targets, samples = BATCH * (LENGTH - 1), np.zeros((0, 4), np.int64)
        steps.take(
            [Batch(0, i, stream[i], stream[i], positions, targets, stream[i].size, samples)], rate_at(i, job["rate"])
        )
    return [r.loss_sum / r.targets for r in steps.reading().results()]


def torch_side(job: dict[str, Any]) -> list[float]:
    """Losses of the lean torch model under torch.compile, from the same weights."""
    import torch
    from safetensors.torch import load_file

    from genesis.profile.peers.torch_steps import lean_model
    from genesis_cli.session.bench.versus import lean_config
    from genesis_models.config import ModelConfig
    from genesis_models.registry import preset

    torch.set_float32_matmul_precision("high")
    config = lean_config(ModelConfig.from_dict(preset(job["size"])), LENGTH - 1)
    model = lean_model(torch, config, LENGTH - 1).to("cuda")
    load_lean(model, {k: v.float() for k, v in load_file(job["folder"] + "/model/model.safetensors").items()})
    compiled = torch.compile(model)
    decay, other = ([p for p in model.parameters() if (p.dim() > 1) is d] for d in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=job["rate"], betas=(0.9, 0.95), fused=True)
    stream = torch.from_numpy(np.load(job["folder"] + "/tokens.npy").reshape(-1, BATCH, LENGTH)).to("cuda")
    losses = []
    for i in range(job["steps"]):
        x = stream[i]
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(x[:, :-1].contiguous(), x[:, 1:].contiguous(), torch.bfloat16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(i, job["rate"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [float(x) for x in torch.stack(losses).cpu()]


def load_lean(model: Any, saved: dict[str, Any]) -> None:
    """Put weights under Hugging Face's names into the lean model."""
    import torch

    found = {"embed.weight": saved["model.embed_tokens.weight"], "norm": saved["model.norm.weight"]}
    if "lm_head.weight" in saved:
        found["head.weight"] = saved["lm_head.weight"]
    for i in range(len(model.layers)):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        parts = {
            "norms.0": ["input_layernorm.weight"],
            "norms.1": ["post_attention_layernorm.weight"],
            "qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
            "qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
            "out.weight": ["self_attn.o_proj.weight"],
            "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "down.weight": ["mlp.down_proj.weight"],
            "norms.2": ["self_attn.q_norm.weight"],
            "norms.3": ["self_attn.k_norm.weight"],
        }
        for name, sources in parts.items():
            if theirs + sources[0] in saved:
                found[ours + name] = torch.cat([saved[theirs + s] for s in sources])
    model.load_state_dict({**found, "cos": model.cos, "sin": model.sin})


def distances(ours: list[float], theirs: list[float]) -> list[float]:
    """Relative distance of the means over MEAN steps."""
    a, b = (np.array(x[: len(x) // MEAN * MEAN]).reshape(-1, MEAN).mean(1) for x in (ours, theirs))
    return [float(x) for x in np.abs(a - b) / b]


def side(job: dict[str, Any]) -> list[float]:
    """One side's losses, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.loss_curve", "--job", json.dumps(job)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3e-5, help="the learning rate after the warm-up")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--precision", choices=["fp8"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        job = json.loads(chosen.job)
        print(json.dumps((genesis_side if job["side"] == "genesis" else torch_side)(job)))
        return
    with tempfile.TemporaryDirectory() as folder:
        np.save(folder + "/tokens.npy", tokens_of(chosen.text, chosen.steps * BATCH * LENGTH))
        job = {"folder": folder, "steps": chosen.steps, "size": chosen.size, "rate": chosen.rate}
        job = {**job, "precision": None, "save": False}
        ours = side({**job, "side": "genesis", "save": chosen.precision is None, "precision": chosen.precision})
        theirs = side({**job, "side": "genesis" if chosen.precision else "torch"})
    names = ("fp8", "bf16") if chosen.precision else ("genesis", "torch")
    found = distances(ours, theirs)
    for i in range(0, len(found), 5):
        print(
            f"steps {i * MEAN:4}: {names[0]} {ours[i * MEAN]:.4f} {names[1]} {theirs[i * MEAN]:.4f}"
            f" means differ {found[i]:.3%}"
        )
    print(f"largest distance of the {MEAN}-step means: {max(found):.3%}; last losses {ours[-1]:.4f} {theirs[-1]:.4f}")
    if chosen.out:
        from benchmarks.gpu.timing import environment

        command = "python -m benchmarks.gpu.loss_curve " + " ".join(sys.argv[1:])
        result = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": command,
            **environment(),
            names[0]: ours,
            names[1]: theirs,
            "distances": found,
        }
        chosen.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
