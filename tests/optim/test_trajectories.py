"""Every optimizer follows torch's trajectory (Lion its paper's), in each implementation and in both float types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genesis import optim
from genesis.functions.create import tensor
from genesis.tensor import Tensor
from tests.optim.trajectories import FIXTURE, KEPT, NEW_LR_AT, RUNS, inputs

IMPLEMENTATIONS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.fixture(scope="module")
def reference() -> Any:
    with np.load(FIXTURE, allow_pickle=False) as stored:
        return dict(stored)


def run(optimizer: str, settings: dict[str, Any], dtype: str, implementation: str) -> dict[int, np.ndarray]:
    """The parameters after each kept step, end to end, in float64."""
    params, grads = inputs(optimizer)
    tensors: list[Tensor] = [tensor(p, dtype=dtype, requires_grad=True) for p in params]
    made = getattr(optim, optimizer)(tensors, **settings, **IMPLEMENTATIONS[implementation])
    kept = {}
    for step, row in enumerate(grads, 1):
        if step == NEW_LR_AT:
            made.param_groups[0]["lr"] *= 0.3
        made.zero_grad()
        for t, g in zip(tensors, row, strict=True):
            t.grad = None if g is None else tensor(g, dtype=dtype)
        made.step()
        if step in KEPT:
            kept[step] = np.concatenate([t.detach().numpy().astype(np.float64).reshape(-1) for t in tensors])
    return kept


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error relative to the larger of 1 and the value: parameters start as standard normals."""
    return float(np.max(np.abs(found - expected) / np.maximum(1, np.abs(expected))))


@pytest.mark.sample(cases=14)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "optimizer", "settings"), RUNS, ids=[r[0] for r in RUNS])
def test_float64_follows_the_reference(
    name: str, optimizer: str, settings: dict[str, Any], implementation: str, reference: Any
) -> None:
    for step, found in run(optimizer, settings, "float64", implementation).items():
        assert worst(found, reference[f"{name}/float64/{step}"]) < 1e-12, step


@pytest.mark.sample(cases=23)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "optimizer", "settings"), RUNS, ids=[r[0] for r in RUNS])
def test_float32_follows_the_reference(
    name: str, optimizer: str, settings: dict[str, Any], implementation: str, reference: Any
) -> None:
    """Rounding differs from torch's in each step: half a unit in the last place for each of a handful of operations."""
    for step, found in run(optimizer, settings, "float32", implementation).items():
        kind = "float64" if optimizer == "Lion" else "float32"
        assert worst(found, reference[f"{name}/{kind}/{step}"]) < 1e-6, step


def test_the_check_sees_a_wrong_setting(reference: Any) -> None:
    """A learning rate wrong by one part in a million is seen in float64, one in ten thousand in float32."""
    for dtype, error, limit in (("float64", 1e-6, 1e-12), ("float32", 1e-4, 1e-6)):
        found = run("AdamW", {"lr": 0.02 * (1 + error)}, dtype, "fused")
        assert worst(found[20], reference[f"adamw/{dtype}/20"]) > limit


def test_settings_and_steps_of_the_fixture(reference: Any) -> None:
    assert {k.split("/")[0] for k in reference} >= {r[0] for r in RUNS}
    assert all(f"{r[0]}/float64/{s}" in reference for r in RUNS for s in KEPT)
    assert FIXTURE.stat().st_size < 200_000
