"""What a path holds that is no model folder, in a sentence that names what would be one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import genesis_models
from genesis.errors import ModelError
from genesis.files.atomic import AtomicFolder
from genesis_models.source import check_model_folder
from tests.models.golden import FIXTURES

SOURCE = FIXTURES / "qwen3-tied"


def refused(path: Path | str, load: Callable[[Path | str], object] = genesis_models.load) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(path)
    assert caught.value.exit_code == 5
    return caught.value


def weights_as(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.copyfile(SOURCE / "config.json", folder / "config.json")
        (folder / name).write_bytes(b"GGUF" if name.endswith("gguf") else b"\x80\x02")

    return make


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")


def run_folder(folder: Path) -> None:
    (folder / "config.resolved.yaml").write_text("")
    for step in (9, 10):
        with AtomicFolder(folder / f"checkpoint-{step}") as checkpoint:
            checkpoint.write("config.json", b"{}")
    (folder / "checkpoint-11").mkdir()  # not committed


def young_run(folder: Path) -> None:
    (folder / "config.resolved.yaml").write_text("")


def parent(folder: Path) -> None:
    shutil.copytree(SOURCE, folder / "tiny")


def hub_cache(folder: Path) -> None:
    shutil.copytree(SOURCE, folder / "snapshots" / ("0" * 40))


@pytest.mark.parametrize(
    ("make", "what", "next"),
    [
        (weights_as("pytorch_model.bin"), "holds pickled weights", "AutoModelForCausalLM"),
        (weights_as("model-q4.gguf"), "holds GGUF", "original folder: config.json and safetensors weights"),
        (adapter, "is a PEFT adapter, base model Qwen/Qwen2.5-0.5B", "name its base"),
        (run_folder, "is a run without a final model", "name its newest checkpoint: {}/checkpoint-10"),
        (young_run, "is a run that has neither a model nor a complete checkpoint yet", "--resume"),
        (parent, "is not a model folder, but holds 1", "name one: {}/tiny"),
        (hub_cache, "is not a model folder, but holds 1", "name one: {}/snapshots/" + "0" * 40),
        (lambda folder: None, "has no config.json", "name a model folder"),
    ],
    ids=["bin", "gguf", "adapter", "run", "young-run", "parent", "hub-cache", "empty"],
)
def test_a_folder_that_is_something_else(tmp_path: Path, make: Callable[[Path], None], what: str, next: str) -> None:
    make(tmp_path)
    error = refused(tmp_path, check_model_folder)
    assert f"{tmp_path} {what}" in error.what
    assert next.format(tmp_path) in error.next


def test_a_committed_checkpoint_and_a_finished_run_are_model_folders(tmp_path: Path) -> None:
    run_folder(tmp_path)
    shutil.copytree(SOURCE, tmp_path, dirs_exist_ok=True)
    check_model_folder(tmp_path)


def test_files_in_place_of_folders(tmp_path: Path) -> None:
    for name, what in (("m.gguf", "holds GGUF"), ("renamed", "holds GGUF"), ("m.bin", "holds pickled"), ("x", "is no")):
        (tmp_path / name).write_bytes(b"GGUF" if "GGUF" in what else b"")
        assert f"{tmp_path / name} {what}" in refused(tmp_path / name).what
    assert refused(SOURCE / "model.safetensors").next == f"name its folder: {SOURCE}"
    os.mkfifo(tmp_path / "pipe")
    assert "is not a folder" in refused(tmp_path / "pipe").what


def test_a_hub_id_says_how_to_get_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    error = refused("Qwen/Qwen2.5-0.5B")
    assert "it looks like a Hugging Face model" in error.what
    assert error.next == "run genesis pull Qwen/Qwen2.5-0.5B"
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / ("a" * 40)
    shutil.copytree(SOURCE, snapshot)
    assert refused("Qwen/Qwen2.5-0.5B").next.endswith(f"; the cache has Qwen/Qwen2.5-0.5B@{'a' * 40}")


def test_a_mistyped_path_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert "Hugging Face" not in refused("runs/chatz").what
    assert "Hugging Face" in refused("Runs/chatz").what


@pytest.mark.parametrize("name", ["", "nowhere", "a/b/c", "bad\0name", "x" * 5000, "evil\x1b[31m/name"])
def test_names_of_nothing(name: str) -> None:
    error = refused(name)
    assert "Hugging Face" not in error.what
    assert error.what.isprintable()
