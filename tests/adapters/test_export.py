"""`genesis export`: what it writes, where it does not, and that its check finds what is wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis_models
from genesis.errors import ConfigError, GenesisError, ModelError, NumericError, UsageError
from genesis.files.atomic import AtomicFolder, read_manifest, verify_manifest
from genesis.files.hf import read_head
from genesis.files.safetensors import load_file
from genesis.nn import LoRALinear
from genesis.train.output import Output
from genesis_cli.main import main
from genesis_cli.session.export import export
from genesis_models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapted_layers
from genesis_models.adapters import folder as base_model
from genesis_models.export import EXPORT, Difference, check_answers, check_weights_of, difference
from tests.adapters.golden import FIXTURES, base_of, loaded, logits, reference
from tests.files.st_files import save_file
from tests.models.golden import FIXTURES as MODELS

NAME = "qwen3-tied-dora"


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(export.__globals__, "LONGEST", 6)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """An adapter of PEFT's, with an end of turn of its own; its base has a license."""
    (base / "LICENSE").write_text("terms")
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        shutil.copyfile(FIXTURES / NAME / name, folder / name)
    raw = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(raw | {"base_model_name_or_path": "../base"}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    return folder


def exported(folder: Path, **options: Any) -> tuple[Path, list[str]]:
    """Where to, and what was said."""
    said = io.StringIO()
    given: dict[str, Any] = {"merge": False, "dtype": None, "out": None, "check": False, "base": None}
    target = export(str(folder), **given | options, console=Output(said))
    return target, said.getvalue().splitlines()


def refused(kind: type[GenesisError], folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(kind, match=message):
        exported(folder, **options)


def types(folder: Path) -> set[str]:
    return {str(array.dtype) for array in load_file(folder / "model.safetensors").values()}


def test_an_adapter_is_written_as_one(adapter: Path, base: Path) -> None:
    target, said = exported(adapter, check=True)
    assert target == adapter.parent / "adapter-export"
    assert (target / ADAPTER_WEIGHTS).read_bytes() == (adapter / ADAPTER_WEIGHTS).read_bytes()
    assert json.loads((target / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == "../base"
    assert json.loads((target / "base.json").read_text()) == {"sha256": base_model.base_of(base).sha256}
    assert read_manifest(target).metadata[EXPORT]["from"] == "adapter"
    assert (target / "generation_config.json").read_bytes() == (adapter / "generation_config.json").read_bytes()
    assert said[0].startswith(f"adapter {adapter} (DoRA, r 2) on ")
    assert said[2].startswith("check: 24 tensors equal the trained ones")
    assert said[3].endswith("largest difference of logits 0, KL 0 nats a token")
    assert said[4].startswith("check: training moved the base model by KL ")
    verify_manifest(target)
    exported(target)  # and it is one that can be exported


def test_a_card_names_base_license_and_command(adapter: Path, base: Path) -> None:
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: terms\ntags: [x]\n---\nabout the base")
    target, _ = exported(adapter)
    head = read_head(target)
    assert (head["library_name"], head["license"], head["license_name"]) == ("peft", "other", "terms")
    assert head["tags"] == ["genesis", "lora"] and "base_model" not in head, "a path is not a name on the hub"
    assert str(base.parent) not in (target / "README.md").read_text()
    raw = json.loads((adapter / ADAPTER_CONFIG).read_text())
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(raw | {"base_model_name_or_path": "org/base"}))
    merged, _ = exported(adapter, base=str(base), merge=True, dtype="bfloat16")
    head = read_head(merged)
    assert (head["library_name"], head["base_model"]) == ("transformers", "org/base")
    assert "genesis export adapter --merge --dtype bfloat16" in (merged / "README.md").read_text()
    verify_manifest(merged)


def test_a_readme_of_somebody_stays(adapter: Path, base: Path) -> None:
    (adapter / "README.md").write_text("theirs")
    target, _ = exported(adapter)
    assert (target / "README.md").read_text() == "theirs"
    merged, _ = exported(adapter, merge=True)
    assert "theirs" not in (merged / "README.md").read_text(), "it is about the adapter"
    exported(adapter, merge=True)
    (merged / "README.md").write_text("changed by hand")
    refused(ConfigError, adapter, "not an export's", merge=True)
    assert (merged / "README.md").read_text() == "changed by hand"
    (adapter / "README.md").unlink()
    (adapter / "README.md").symlink_to(base / "LICENSE")
    refused(ModelError, adapter, "is a symbolic link")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model(adapter: Path, base: Path, dtype: str) -> None:
    target, said = exported(adapter, merge=True, dtype=dtype, check=True)
    assert target == adapter.parent / "adapter-merged"
    assert types(target) == {dtype}
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": [9, 7]}
    assert (target / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (target / "LICENSE").read_text() == "terms"
    found = np.abs(logits(genesis_models.load(target), reference(NAME)["input_ids"]) - reference(NAME)["merged_logits"])
    assert found.max() < {"float32": 1e-5, "bfloat16": 0.5}[dtype]
    assert any("the effect of rounding the weights to" in line for line in said) == (dtype == "bfloat16")


def test_merged_weights_keep_the_types_of_their_base(adapter: Path, base: Path) -> None:
    genesis_models.save(genesis_models.load(base, dtype="bfloat16"), base.parent / "narrow", source=base)
    target, _ = exported(adapter, merge=True, base=str(base.parent / "narrow"))
    assert types(target) == {"bfloat16"}


@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_a_whole_model(base: Path, dtype: str | None) -> None:
    target, _ = exported(base, dtype=dtype, check=True)
    assert types(target) == {"float16" if dtype else "float32"}


def test_a_run_without_a_final_model_gives_its_newest_checkpoint(base: Path, tmp_path: Path) -> None:
    for step in (9, 10):
        with AtomicFolder(tmp_path / "run" / f"checkpoint-{step}") as writer:
            genesis_models.folder.write_model(genesis_models.load(base), writer, source=base)
    target, said = exported(tmp_path / "run")
    assert (target, said[0]) == (tmp_path / "run-checkpoint-10-export", f"model {tmp_path}/run/checkpoint-10")


def test_a_damaged_checkpoint(base: Path) -> None:
    checkpoint = base.rename(base.parent / "checkpoint-7")
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)
    refused(ModelError, checkpoint, "'model.safetensors' is damaged")


def test_what_cannot_be_asked_for(adapter: Path, base: Path) -> None:
    refused(UsageError, base, "is a whole model, not an adapter to merge", merge=True)
    refused(UsageError, adapter, "an adapter is always written in float32", dtype="bfloat16")
    refused(ModelError, base, "is a model, not an adapter, so it has no base", base=str(base))
    refused(ModelError, adapter.parent / "nothing", "does not exist")


def others(tmp_path: Path) -> Iterator[Path]:
    """Folders that are not ours to write to."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("keep me")
    yield tmp_path / "notes"
    with AtomicFolder(tmp_path / "checkpoint-3") as writer:  # ours, but no export
        writer.write("config.json", b"{}")
    yield tmp_path / "checkpoint-3"
    (tmp_path / "file").write_text("")
    yield tmp_path / "file"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    yield tmp_path / "link"
    yield tmp_path / "base"
    yield tmp_path / "base" / "inside"
    yield tmp_path


def test_an_export_onto_a_folder_that_is_not_ours(adapter: Path, tmp_path: Path) -> None:
    """Exit code 3, and nothing there changes."""
    targets = list(others(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for target in targets:
        for merge in (False, True):
            with pytest.raises(ConfigError, match="--out") as caught:
                exported(adapter, out=str(target), merge=merge)
            assert caught.value.exit_code == 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_earlier_export_is_replaced_unless_something_was_added(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # empty
    exported(adapter, out=str(tmp_path / "out"))
    exported(adapter, out=str(tmp_path / "out"), merge=True)
    assert not (tmp_path / "out" / ADAPTER_CONFIG).exists()
    (tmp_path / "out" / "mine.txt").write_text("")
    refused(ConfigError, adapter, "not an export's", out=str(tmp_path / "out"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_error_on_the_way_leaves_the_earlier_export(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = exported(adapter, merge=True)
    before = (target / "model.safetensors").read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GenesisError) as caught:
        exported(adapter, merge=True, dtype="bf16")
    assert caught.value.exit_code == 8
    assert (target / "model.safetensors").read_bytes() == before


# --- The check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_check_finds_a_wrong_scale(adapter: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None) -> None:
    right = LoRALinear.merged_weight
    monkeypatch.setattr(LoRALinear, "merged_weight", lambda layer: right(layer) * 1.02)
    options: dict[str, Any] = {"merge": True, "dtype": dtype, "check": True}
    refused(ModelError, adapter, r"not the trained ones, in tensors: 8 \(", **options)


@pytest.mark.parametrize("name", ["qwen2-tied-rslora", "qwen3-tied-dora"])
def test_the_check_finds_one_changed_weight(name: str, tmp_path: Path) -> None:
    model = loaded(name)
    genesis_models.save(model, tmp_path / "merged", source=base_of(name))
    arrays = load_file(tmp_path / "merged" / "model.safetensors")
    count, kind = check_weights_of(model, tmp_path / "merged")
    assert (count, kind) == (len(arrays), "float32")
    changed = next(iter(adapted_layers(model))) + ".weight"
    arrays[changed][1, 2] += 1e-3 * np.abs(arrays[changed]).max()
    save_file(arrays, tmp_path / "merged" / "model.safetensors")
    with pytest.raises(ModelError, match=changed):
        check_weights_of(model, tmp_path / "merged")


def test_the_check_finds_a_changed_adapter(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / NAME, tmp_path / "adapter", copy_function=shutil.copyfile))
    arrays = load_file(folder / ADAPTER_WEIGHTS)
    name = sorted(arrays)[0]
    arrays[name][0] = np.nextafter(arrays[name][0], np.float32(9))
    save_file(arrays, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ModelError, match=name):
        check_weights_of(loaded(NAME), folder)


def test_differences_of_answers() -> None:
    a, b = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.9, 0.1]], np.float32))
    found = difference([a, a], [a, b])
    assert found.tokens == 2
    assert found.kl == pytest.approx(0.5 * np.log(0.5 / 0.9) / 2 + 0.5 * np.log(0.5 / 0.1) / 2, rel=1e-5)
    assert found.logit == pytest.approx(np.log(5), rel=1e-5)
    assert difference([a], [a + 3]).kl < 1e-12  # the same distribution
    with pytest.raises(NumericError):
        difference([a], [np.array([[0.0, np.nan]], np.float32)])


def test_answers_beyond_what_rounding_explains(tmp_path: Path) -> None:
    config = genesis_models.load(MODELS / "qwen3-tied").config
    for dtype, fits, fails in (("float32", 1e-6, 1e-4), ("float16", 1e-3, 0.02), ("bfloat16", 0.01, 0.1)):
        check_answers(Difference(1, 0.0, 0.0, fits), dtype, config, tmp_path)
        for relative in (fails, float("nan")):
            with pytest.raises(ModelError, match=f"rounding to {dtype} explains"):
                check_answers(Difference(1, 0.0, 0.0, relative), dtype, config, tmp_path)


def test_float16_is_refused_where_it_is_too_narrow(base: Path) -> None:
    arrays = load_file(base / "model.safetensors")
    arrays["model.norm.weight"][0] = 1e5
    save_file(arrays, base / "model.safetensors")
    refused(NumericError, base, r"model.norm.weight has a weight of 1e\+05, but float16", dtype="fp16")
    assert not (base.parent / "base-export").exists()


def test_the_command(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(adapter), "--merge", "--dtype", "bf16", "--check"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"wrote {adapter.parent}/adapter-merged: ")
    assert main(["export", str(adapter), "--out", str(adapter.parent / "base")]) == 3
    assert "where: --out" in capsys.readouterr().err
