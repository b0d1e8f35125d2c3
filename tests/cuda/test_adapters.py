"""Training adapters on CUDA: their steps are graphs, dropout included, and draw what the CPU draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import random
from genesis.ops.shape import joined
from genesis.optim import AdamW
from genesis.optim.states import decay_groups
from genesis.train.device_steps import DeviceSteps
from genesis_models.adapters import AdapterConfig, apply_adapters
from genesis_models.registry import build
from tests.train.runs import assembled, load, make_lora

SMALL = ("model.dtype=float32", "train.accumulation_steps=1", "train.batch_size=1", "data.seq_len=16", "lora.r=4")
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("lora"))


def losses(recipe: Path, output: Path, device: str, *settings: str) -> tuple[list[tuple[Any, ...]], str, bool]:
    """The losses and norms of four steps, the state hash, and whether steps are graphs."""
    training = assembled(load(recipe, str(output), *SMALL, f"train.device={device}", *settings))
    steps, results = training._on_device, []
    for _ in range(4):
        if isinstance(steps, DeviceSteps):
            steps.take(training._batches(), 0.01)
            results += steps.reading().results()
        else:
            training._step(training._batches())
    captured = isinstance(steps, DeviceSteps) and steps._whole.is_captured
    return [(r.loss_sum, r.grad_norm) for r in results], training.state.hash(), captured


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("lora.dropout=0.25",), marks=pytest.mark.full),  # of which DoRA has every kernel
        ("lora.dropout=0.25", "lora.use_dora=true"),
    ],
    ids="-".join,
)
def test_replayed_steps_with_dropout_are_those_that_are_launched_one_by_one(
    settings: tuple[str, ...], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = losses(recipe, tmp_path / "graph", "cuda", *settings)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    launched = losses(recipe, tmp_path / "launched", "cuda", *settings)
    assert (replayed[2], launched[2]) == (True, False)
    assert replayed[:2] == launched[:2]  # the state hash holds the generator's position


def with_adapters(device: str, **settings: Any) -> Any:
    random.manual_seed(3)
    model = build(SHAPE, 3)
    config = AdapterConfig(r=4, alpha=8.0, target_modules="all-linear", **settings)
    model = apply_adapters(model, config).to(device=device)
    for module in model.modules():
        if isinstance(module, genesis.nn.LoRALinear):
            genesis.nn.init.normal_(module.lora_B.weight, std=0.1)
    return model.train()


@pytest.mark.parametrize("use_dora", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_step_with_dropout_is_that_of_the_cpu(use_dora: bool) -> None:
    found = []
    ids = np.random.default_rng(0).integers(0, 64, (1, 12))
    for device in ("cpu", "cuda"):
        model = with_adapters(device, dropout=0.25, use_dora=use_dora)
        model.activation_checkpointing = "selective"
        optimizer = AdamW(decay_groups(model.named_parameters(), 0.0), lr=1e-2, fused=True)
        random.manual_seed(5)
        tokens = genesis.tensor(ids, device=device)
        loss = model.loss(tokens, tokens)
        loss.backward()
        norm = optimizer.grad_norm().item()
        found.append((loss.item(), norm, random.get_state()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)
    assert found[0][2] == found[1][2]


def test_frozen_weights_of_layers_on_one_input_are_one_operand() -> None:
    model = build(SHAPE, device="cuda", dtype="bfloat16")
    apply_adapters(model, AdapterConfig(r=4, alpha=8.0, target_modules="all-linear"))
    AdamW(decay_groups(model.named_parameters(), 0.0), lr=1e-2, fused=True)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        for part in ("weight", "lora_A.weight", "lora_B.weight"):
            assert joined([layer.get_parameter(part).array for layer in layers]) is not None, part
    biases = [layer.bias.array for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert joined(biases) is not None
