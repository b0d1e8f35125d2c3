"""Golden values of distillation by a plain torch program: losses, gradients and ten steps of AdamW.

    PYTHONPATH=. .venv-trl/bin/python -m tests.peers.distillation

Writes tests/train/fixtures/distillation.json, which tests/train/test_distillation.py compares with Genesis. It needs
torch, transformers and TRL. Losses are those of TRL's `GKDTrainer.generalized_jsd_loss` on the full logits of padded
conversations. The teacher is wider than the student, and all weights are noise that both sides compute.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import transformers
import trl
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.train.golden import (
    ADAMW,
    DISTILLATION,
    DIVERGENCES,
    SEEDS,
    STEPS,
    STUDENT,
    TEACHER,
    conversations,
    fresh_weight,
    projections,
)

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.gkd import GKDTrainer


def make_model(shape: dict[str, Any], seed: int) -> Qwen3ForCausalLM:
    """Return the model with the weights of a seed."""
    model = Qwen3ForCausalLM(Qwen3Config(**shape, attn_implementation="eager")).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(fresh_weight(seed, name, tuple(parameter.shape))))
    return model


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, attention mask and labels `[B, T]` of conversations (ids, labels)."""
    length = max(len(ids) for ids, _ in rows)
    ids, mask, labels = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(3))
    labels.fill_(-100)
    for i, (tokens, targets) in enumerate(rows):
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
        labels[i, : len(targets)] = torch.tensor(targets)
    return ids, mask, labels


def golden(seed: int, beta: float, temperature: float) -> dict[str, Any]:
    """Return the values over ten steps on one batch."""
    student, teacher = make_model(STUDENT, seed), make_model(TEACHER, seed + 100)
    ids, mask, labels = padded(conversations(seed))
    optimizer = torch.optim.AdamW(student.parameters(), **ADAMW)
    with torch.no_grad():
        taught = teacher(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses, found = [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = student(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = GKDTrainer.generalized_jsd_loss(logits, taught, labels[:, 1:], beta=beta, temperature=temperature)
        loss.backward()
        losses.append(float(f"{float(loss):.8g}"))
        found = {n: [float(f"{v:.7g}") for v in projections(p.grad.numpy())] for n, p in student.named_parameters()}
        optimizer.step()
    return {"losses": losses, "gradients": found}


def main() -> None:
    torch.set_num_threads(1)
    versions = {each.__name__: each.__version__.split("+")[0] for each in (trl, torch, transformers)}
    cases = [
        {"seed": seed, "beta": beta, "temperature": temperature, **golden(seed, beta, temperature)}
        for seed in SEEDS
        for beta, temperature in DIVERGENCES
    ]
    for case in cases:
        print(case["seed"], case["beta"], case["temperature"], case["losses"][::3])
    text = json.dumps({"versions": versions, "cases": cases}, separators=(",", ":"))
    DISTILLATION.write_text(text.replace('{"seed"', '\n{"seed"') + "\n")


if __name__ == "__main__":
    main()
