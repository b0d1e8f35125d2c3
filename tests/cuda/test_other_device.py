"""A device that is not the first: what a run, generation and evaluation on cuda:1 do, they do there.

The interpreter has one device. Here it is cuda:1, and whoever asks for cuda:0 gets an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genesis
import genesis_models
from genesis import cuda
from genesis.backend import Device
from genesis.backend.cuda import driver_for
from genesis.backend.cuda.simulated import HostDriver, drivers
from genesis_cli import session
from tests.cuda.fresh import forget_backends
from tests.train.runs import load, make, train

pytestmark = [pytest.mark.host, pytest.mark.slow]

OTHER = "cuda:1"
SETTINGS = (
    *(f"train.device={OTHER}", "train.accumulation_steps=1", "train.batch_size=1", "data.seq_len=16", "train.steps=4"),
    *("eval.every=2", "eval.max_batches=1", "eval.sample_tokens=2", "checkpoint.every=2"),
)


class Forbidden:
    """cuda:0."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"cuda:0 was used: {name}")


class Second(HostDriver):
    def __init__(self) -> None:
        super().__init__(0)
        self.index = 1


@pytest.fixture(autouse=True)
def _only_the_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        forget_backends()
        driver_for.cache_clear()

    kept = dict(drivers)
    drivers.update({0: Forbidden(), 1: Second()})  # type: ignore[dict-item]
    forget()
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    yield
    for index in (0, 1):
        drivers.pop(index)
    drivers.update(kept)
    forget()


def test_the_first_device_is_forbidden_here() -> None:
    with pytest.raises(AssertionError, match="cuda:0 was used"):
        genesis.zeros(2, device="cuda")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_run(dtype: str, tmp_path: Path) -> None:
    """Trained, evaluated, sampled, saved and resumed; then continued by the model, and judged."""
    recipe = make(tmp_path)
    settings = (*SETTINGS, f"model.dtype={dtype}")
    train(load(recipe, "run", *settings, "train.steps=2", "optim.schedule=constant"))
    train(load(recipe, "run", *settings, "optim.schedule=constant"), resume=True)
    folder = str(tmp_path / "run")
    how: dict[str, Any] = {"top_k": None, "top_p": None, "seed": 0, "device": OTHER, "dtype": dtype}
    assert "".join(session.generate(folder, "alpha", max_tokens=3, temperature=0.8, **how))
    source = [str(recipe.parent / "doc00.txt")]
    assert session.evaluate(folder, source, seq_len=16, batch_size=2, device=OTHER, dtype=dtype)


def test_a_model_in_python(tmp_path: Path) -> None:
    recipe = make(tmp_path)
    train(load(recipe, "run", *SETTINGS, "train.device=cpu", "train.steps=1"))
    model = genesis_models.load(tmp_path / "run", device=OTHER)
    assert model.generate("alpha", max_tokens=3).text
    ids = genesis.tensor([[1, 2, 3, 4]], device=Device("cuda", 1))
    model.loss(ids, ids).backward()
