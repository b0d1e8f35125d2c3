"""What was trained in bfloat16 is exported as float32 from the optimizer's masters, where a checkpoint has them."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.files.safetensors import load_file
from genesis.train.checkpoint import OPTIMIZER
from genesis.train.output import Output
from genesis_cli.session.export import export
from tests.files.st_files import save_file
from tests.train.runs import load, make, train

SETTINGS = "model.dtype=bfloat16", "train.steps=2", "checkpoint.every=1", "eval.every=null", "eval.prompts=[]"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps in bfloat16, with a checkpoint of each."""
    train(load(make(tmp_path), "run", *SETTINGS, "optim.lr=1e-3"))
    return tmp_path / "run"


def exported(folder: Path, dtype: str | None = "float32") -> tuple[dict[str, np.ndarray], str]:
    """The tensors, and the line about masters."""
    said = io.StringIO()
    target = export(str(folder), merge=False, dtype=dtype, out=None, check=True, base=None, console=Output(said))
    lines = [line for line in said.getvalue().splitlines() if line.startswith("float32: ")]
    assert len(lines) <= 1
    return load_file(target / "model.safetensors"), "".join(lines)


def masters(checkpoint: Path) -> dict[str, np.ndarray]:
    found = load_file(checkpoint / OPTIMIZER)
    return {name.removesuffix(".master"): array for name, array in found.items() if name.endswith(".master")}


@pytest.mark.parametrize("which", ["", "checkpoint-1"])
def test_masters_are_written(run: Path, which: str) -> None:
    tensors, line = exported(run / which)
    checkpoint = run / (which or "checkpoint-2")
    expected = masters(checkpoint)
    assert expected.keys() == tensors.keys()
    assert line == f"float32: the optimizer's masters in {checkpoint}, from which the weights were rounded"
    narrow = load_file(run / which / "model.safetensors")
    for name, array in tensors.items():
        assert np.array_equal(array, expected[name])
    assert any(not np.array_equal(tensors[n], narrow[n].astype(np.float32)) for n in tensors), "more than bfloat16 has"


def test_other_types_are_rounded_from_what_was_saved(run: Path) -> None:
    tensors, line = exported(run, None)
    assert not line
    narrow = load_file(run / "model.safetensors")
    assert all(np.array_equal(tensors[n].view(np.uint16), narrow[n].view(np.uint16)) for n in narrow)


def damaged(run: Path) -> None:
    path = run / "checkpoint-2" / OPTIMIZER
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: [shutil.rmtree(run / f"checkpoint-{n}") for n in (1, 2)], "has no checkpoint"),
        (lambda run: shutil.rmtree(run / "checkpoint-2"), " is of another step"),
        (damaged, "has no masters of them: "),
    ],
    ids=["none", "older", "damaged"],
)
def test_a_line_says_why_there_are_none(run: Path, change: Any, words: str) -> None:
    change(run)
    tensors, line = exported(run)
    assert line.startswith("float32: the bfloat16 weights unchanged; ")
    assert words in line
    narrow = load_file(run / "model.safetensors")
    assert all(np.array_equal(tensors[n], narrow[n].astype(np.float32)) for n in narrow)


def test_an_optimizer_without_masters(tmp_path: Path) -> None:
    train(load(make(tmp_path), "run", *SETTINGS, "optim.low_precision=stochastic"))
    _, line = exported(tmp_path / "run")
    assert line.endswith("has no masters of them: its optimizer keeps none")


def test_a_model_in_float32_has_no_line(tmp_path: Path) -> None:
    train(load(make(tmp_path), "run", *SETTINGS[1:]))
    assert not exported(tmp_path / "run")[1]


def test_halves_are_rounded_as_the_optimizer_does(run: Path) -> None:
    """A split master halfway between two weights goes away from 0, where numpy goes to the even one."""
    checkpoint, half = run / "checkpoint-2", np.float32(1 + 2**-8)
    arrays, weights = load_file(checkpoint / OPTIMIZER), load_file(run / "model.safetensors")
    name = next(n for n, array in weights.items() if array.ndim == 1)
    arrays[f"{name}.master"][0] = half
    weights[name][0] = 1 + 2**-7
    kept = {n: np.ascontiguousarray(a) for n, a in arrays.items()}
    save_file(kept, checkpoint / OPTIMIZER)
    save_file(weights, run / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[export.__module__], "verify_manifest", lambda folder: None)
        tensors, line = exported(run)
    assert line.startswith("float32: the optimizer's masters")
    assert tensors[name][0] == half
