"""Adapters of PEFT's against PEFT: logits, gradients, ten steps of AdamW, and the merged model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.nn.utils import clip_grad_norm_
from genesis.optim import AdamW
from genesis_models.adapters import adapted_layers
from tests.adapters.golden import NAMES, loaded, logits, reference, saved_names
from tests.models.golden import relative_error

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
LOGITS, MERGED, LOSS, GRADIENT, TRAJECTORY = 1e-5, 1e-5, 1e-5, 1e-4, 1e-4


def ids(array: np.ndarray, device: str) -> genesis.Tensor:
    return genesis.from_numpy(array).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
class TestAgainstPeft:
    def test_logits_loss_and_gradients(self, name: str, device: str) -> None:
        expected, model = reference(name), loaded(name, device).train()
        assert model.is_fused
        batch = ids(expected["input_ids"], device)
        assert np.abs(logits(model, expected["input_ids"]) - expected["logits"]).max() < LOGITS
        loss = model.loss(batch, batch)
        assert abs(loss.item() - float(expected["loss"])) < LOSS
        loss.backward()
        errors = {n: relative_error(p.grad.numpy(), expected[f"grad.{n}"]) for n, p in saved_names(model).items()}
        assert {f"grad.{n}" for n in errors} == {n for n in expected if n.startswith("grad.")}
        assert max(errors.values()) < GRADIENT, errors
        assert all(p.grad is None for _, p in model.named_parameters() if not p.requires_grad)

    def test_ten_steps(self, name: str, device: str) -> None:
        expected, model = reference(name), loaded(name, device).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = AdamW(trained, lr=float(expected["lr"]), weight_decay=0.0)
        for step, batch in enumerate(expected["train_ids"]):
            optimizer.zero_grad()
            loss = model.loss(ids(batch, device), ids(batch, device))
            loss.backward()
            norm = clip_grad_norm_(trained, float(expected["clip"]))
            optimizer.step()
            assert loss.item() == pytest.approx(float(expected["step_loss"][step]), rel=TRAJECTORY)
            assert norm.item() == pytest.approx(float(expected["grad_norm"][step]), rel=TRAJECTORY)
        errors = {n: relative_error(p.detach().numpy(), expected[f"final.{n}"]) for n, p in saved_names(model).items()}
        assert max(errors.values()) < TRAJECTORY, errors


@pytest.mark.parametrize("name", NAMES)
def test_merged_logits(name: str, tmp_path: Path) -> None:
    expected, model = reference(name), loaded(name)
    genesis_models.save(model, tmp_path / "merged")
    merged = genesis_models.load(tmp_path / "merged")
    assert not adapted_layers(merged)
    assert np.abs(logits(merged, expected["input_ids"]) - expected["merged_logits"]).max() < MERGED
