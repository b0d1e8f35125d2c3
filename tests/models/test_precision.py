"""The type of a model's weights where nobody names one, the same for every command and after a resumption."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from genesis.backend import CPU, Device
from genesis.dtypes import as_dtype
from genesis.errors import ConfigError, DTypeError
from genesis.files.safetensors import load_file
from genesis.train.config_file import parse_config
from genesis_cli.session.settings import settled
from genesis_models.folder import stored_dtype
from genesis_models.weights import WeightType, weight_type
from tests.files.st_files import save_file
from tests.models.golden import FIXTURES
from tests.train.runs import load, make, train

GPU = Device("cuda", 0)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make(tmp_path, documents=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / "qwen3-tied" / name, copy / name)
    return copy


def config_types(folder: Path, **types: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(raw | types))


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize(
    ("device", "stored", "trains", "expected"),
    [
        (CPU, "bfloat16", False, WeightType("float32", "on the CPU")),
        (CPU, None, True, WeightType("float32", "on the CPU")),
        (GPU, "float32", True, WeightType("float32", "the folder's type")),
        (GPU, "bfloat16", True, WeightType("bfloat16", "the folder's type")),
        (GPU, "float16", False, WeightType("float16", "the folder's type")),
        (GPU, "float16", True, WeightType("bfloat16", "the folder has float16, which training does not support")),
        (GPU, "float64", False, WeightType("float32", "the folder has float64")),
        (GPU, None, True, WeightType("bfloat16", "from scratch on a GPU")),
    ],
)
def test_the_rule(asked: str | None, device: Device, stored: str | None, trains: bool, expected: WeightType) -> None:
    assert weight_type(asked, device, stored, trains=trains) == expected


def test_a_named_type_is_taken_by_any_of_its_names() -> None:
    names = {"float32": ("fp32", "float"), "bfloat16": ("bf16", "torch.bfloat16"), "float16": ("fp16", "half")}
    for name, others in names.items():
        for other in (name, *others, as_dtype(name)):
            assert weight_type(other, CPU, None) == WeightType(name)
    for other in ("int8", "double"):
        with pytest.raises(DTypeError, match="weights cannot be"):
            weight_type(other, CPU, None)


def test_a_folder_has_the_type_of_its_config_else_that_of_most_bytes(folder: Path) -> None:
    for key in ("dtype", "torch_dtype"):
        config_types(folder, **{key: "float16"})
        assert stored_dtype(folder) == "float16"
    config_types(folder)
    assert stored_dtype(folder) == "float32"
    arrays = load_file(folder / "model.safetensors")
    wide = {n: a.astype(np.float16) if a.ndim == 2 else a for n, a in arrays.items()}
    save_file(wide, folder / "model.safetensors")
    assert stored_dtype(folder) == "float16"
    config_types(folder, dtype="float8_e4m3fn")
    assert stored_dtype(folder) == "float16"


def test_a_run_settles_its_type_before_anything_else(recipe: Path, folder: Path) -> None:
    fresh = load(recipe, "run")
    assert fresh.model.dtype == "auto"
    config, found = settled(fresh, GPU)
    assert (config.model.dtype, str(found)) == ("bfloat16", "bfloat16 (auto: from scratch on a GPU)")
    config, found = settled(load(recipe, "run", f"model={{path: {folder}}}"), GPU)
    assert (config.model.dtype, str(found)) == ("float32", "float32 (auto: the folder's type)")
    config, found = settled(load(recipe, "run", "model.dtype=bf16"), CPU)
    assert (config.model.dtype, str(found)) == ("bfloat16", "bfloat16")


def test_a_resumed_run_keeps_the_type_that_it_began_with(recipe: Path) -> None:
    console = io.StringIO()
    train(load(recipe, "run", "model.dtype=bf16", "train.steps=2"), console=console)
    record = recipe.parent / "run" / "config.resolved.yaml"
    assert parse_config(record.read_bytes(), "record").model.dtype == "bfloat16"
    train(load(recipe, "run", "train.steps=4"), resume=True, console=console)
    assert "parameters, bfloat16 (auto: as the run began)\n" in console.getvalue()
    assert parse_config(record.read_bytes(), "record").model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r'model.dtype: "bfloat16" -> "float32"'):
        train(load(recipe, "run", "model.dtype=float32", "train.steps=4"), resume=True)


def test_a_run_records_and_says_what_auto_came_to(recipe: Path) -> None:
    console = io.StringIO()
    train(load(recipe, "run", "train.steps=2", "train.device=cpu"), console=console)
    assert "parameters, float32 (auto: on the CPU)\n" in console.getvalue()
    record = recipe.parent / "run" / "config.resolved.yaml"
    assert parse_config(record.read_bytes(), "record").model.dtype == "float32"


@pytest.mark.parametrize("name", ["float16", "fp16", "half"])
def test_training_in_float16_is_refused_with_the_reason(recipe: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not train in float16, whose gradients underflow; bfloat16"):
        load(recipe, "run", f"model.dtype={name}")


def test_every_setting_of_a_type_takes_the_short_names(recipe: Path) -> None:
    short = load(recipe, "run", "model.dtype=fp32", "optim.state_dtype=bf16", "optim.grad_dtype=float")
    assert (short.model.dtype, short.optim.state_dtype, short.optim.grad_dtype) == ("float32", "bfloat16", "float32")


def test_dropout_that_is_not_applied_is_announced(recipe: Path) -> None:
    console = io.StringIO()
    train(load(recipe, "run", "train.steps=2", "model.config.attention_dropout=0.1"), console=console)
    line = "warning: attention_dropout 0.1 of config.json is not applied: Genesis trains without dropout\n"
    assert console.getvalue().count(line) == 1
