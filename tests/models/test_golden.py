"""The golden models against transformers: logits, loss, gradients, greedy text, and a few steps of AdamW."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.errors import ConfigError
from genesis.nn.utils import clip_grad_norm_
from genesis.optim import AdamW, decay_groups
from genesis_models.engine import Request, Sampling
from genesis_models.generate import engine_for
from tests.models.continued import continue_ids
from tests.models.golden import EXTRA, FAMILIES, FIXTURES, NAMES, QWEN, extra, golden, relative_error

LOGITS, LOSS, GRADIENT, TRAJECTORY, WEIGHTS = 1e-4, 1e-5, 1e-4, 1e-4, 1e-3  # the bounds of the acceptance test


BF16 = 2e-2  # relative norm: a few roundings to 8 bits (eps 7.8e-3) a layer, and two layers


def ids(array: np.ndarray, device: str = "cpu") -> genesis.Tensor:
    return genesis.from_numpy(array.astype(np.int64)).to(device)


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
class TestGolden:
    def test_logits(self, name: str, device: str) -> None:
        reference = golden(name)
        model = genesis_models.load(reference.folder, device=device)
        with genesis.no_grad():
            logits = model(ids(reference.arrays["input_ids"], device)).numpy()
        assert np.abs(logits - reference.arrays["logits"]).max() < LOGITS

    def test_loss_and_gradients(self, name: str, device: str) -> None:
        reference = golden(name)
        model = genesis_models.load(reference.folder, device=device)
        loss = model.loss(ids(reference.arrays["input_ids"], device), ids(reference.arrays["labels"], device))
        assert abs(loss.item() - float(reference.arrays["loss"])) < LOSS
        loss.backward()
        gradients = {n: p.grad.numpy() for n, p in model.named_parameters()}
        expected = reference.group("grad")
        assert gradients.keys() == expected.keys()
        errors = {n: relative_error(gradients[n], expected[n]) for n in expected}
        assert max(errors.values()) < GRADIENT, errors


# One way of each model; the others give the same gradients.
WAYS = dict(zip(QWEN, ("selective", "full", "none"), strict=True))
STEPS = [
    pytest.param(name, way, marks=[pytest.mark.full] if way != WAYS.get(name, "none") else [])
    for name in NAMES
    for way in ("none", "selective", "full")
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "checkpointing"), STEPS)
def test_steps(name: str, device: str, checkpointing: str) -> None:
    reference = golden(name)
    hyper = reference.trainer
    model = genesis_models.load(reference.folder, device=device).train()
    if checkpointing == "selective" and not model.is_fused:
        with pytest.raises(ConfigError, match="needs fused layers"):
            model.activation_checkpointing = checkpointing
        return
    model.activation_checkpointing = checkpointing
    groups = decay_groups(model.named_parameters(), hyper["weight_decay"])
    optimizer = AdamW(groups, lr=hyper["lr"], betas=tuple(hyper["betas"]), eps=hyper["eps"])
    for step, batch in enumerate(reference.arrays["train_ids"]):
        optimizer.zero_grad()
        loss = model.loss(ids(batch, device), ids(batch, device))
        loss.backward()
        norm = clip_grad_norm_(list(model.parameters()), hyper["max_grad_norm"])
        optimizer.step()
        assert loss.item() == pytest.approx(float(reference.arrays["step_loss"][step]), rel=TRAJECTORY)
        assert norm.item() == pytest.approx(float(reference.arrays["grad_norm"][step]), rel=TRAJECTORY)
    expected = reference.group("final")
    errors = {n: relative_error(p.detach().numpy(), expected[n]) for n, p in model.named_parameters()}
    assert errors.keys() == expected.keys()
    assert max(errors.values()) < WEIGHTS, errors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text(name: str, device: str) -> None:
    reference = golden(name)
    model = genesis_models.load(reference.folder, device=device)
    expected = reference.arrays["greedy"].tolist()
    assert continue_ids(model, expected[:9], Sampling(0.0), len(expected) - 9) == expected[9:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NAMES, *EXTRA])
@pytest.mark.parametrize("count", [12, pytest.param(40, marks=pytest.mark.full)])
def test_greedy_text_of_prompts_of_unequal_length(name: str, device: str, count: int) -> None:
    """Tokens after each of 20 prompts are transformers', together and some alone.

    On the CPU a quarter of the prompts must do for all models but one.
    """
    cases = json.loads((FIXTURES / "greedy.json").read_text())[name]
    cases = cases if device == "cuda" or name == "qwen3-tied" else cases[::4]
    model = genesis_models.load((extra if name in EXTRA else golden)(name).folder, device=device, dtype="float32")
    requests = [Request(case["prompt"], Sampling(0.0), count) for case in cases]
    for some in (range(len(cases)), *([number] for number in range(0, len(cases), 9))):
        chosen, found = [requests[number] for number in some], defaultdict[int, list[int]](list)
        for token in engine_for(model, chosen).run(chosen):
            if token.id is not None:
                found[token.request].append(token.id)
        assert [found[i] for i in range(len(chosen))] == [cases[number]["tokens"][:count] for number in some]


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_again(name: str, tmp_path: object) -> None:
    reference = golden(name)
    model = genesis_models.load(reference.folder)
    genesis_models.save(model, f"{tmp_path}/saved", source=reference.folder)
    again = genesis_models.load(f"{tmp_path}/saved")
    for (n, a), (m, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert n == m
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("name", QWEN)
def test_bfloat16_on_a_gpu(name: str) -> None:
    reference = golden(name)
    model = genesis_models.load(reference.folder, device="cuda", dtype="bfloat16")
    inputs, labels = (ids(reference.arrays[key], "cuda") for key in ("input_ids", "labels"))
    with genesis.no_grad():
        logits = model(inputs).float().numpy()
    assert relative_error(logits, reference.arrays["logits"]) < BF16
    loss = model.loss(inputs, labels)
    assert loss.item() == pytest.approx(float(reference.arrays["loss"]), rel=BF16)
    loss.backward()
    expected = reference.group("grad")
    errors = {n: relative_error(p.grad.float().numpy(), expected[n]) for n, p in model.named_parameters()}
    assert max(errors.values()) < 4 * BF16, errors


def test_relative_error_rejects_what_is_wrong() -> None:
    right = np.linspace(1.0, 2.0, 50)
    assert relative_error(right * (1 + 2e-4), right) > GRADIENT
    assert relative_error(np.full(50, np.nan), right) == float("inf")
