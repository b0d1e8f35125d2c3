"""An adapter's folder where a model's is expected: its base is found, checked and named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis_models
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError
from genesis.files.atomic import AtomicFolder
from genesis.files.hashing import sha256_file
from genesis.files.safetensors import load_file
from genesis_cli.session import evaluate, generate
from genesis_models.adapters import (
    ADAPTER_CONFIG,
    BASE_NAME,
    AdapterConfig,
    apply_adapters,
    base_name,
    base_of,
    load_adapter,
    write_adapter,
)
from genesis_models.adapters import folder as base_model
from genesis_models.folder import read_config
from genesis_models.source import find_source, newest_checkpoint
from genesis_models.weights import quantize
from tests.adapters.golden import FIXTURES, logits, reference
from tests.files.st_files import save_file
from tests.models.golden import FIXTURES as MODELS

NAME = "qwen3-tied-dora"
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """An adapter as a run saves it, base.json too; its own copy of the tokenizer, and an end of its own."""
    with AtomicFolder(tmp_path / "adapter") as writer:
        write_adapter(load_adapter(genesis_models.load(base), FIXTURES / NAME), writer, base=base)
        writer.write(BASE_NAME, base_of(base).to_json())
    return tmp_path / "adapter"


def changed(folder: Path, **values: Any) -> Path:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def refused(path: Path, *words: str, base: Path | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        find_source(path, base)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 5
    return caught.value


def test_the_committed_adapters_find_their_base_from_their_own_folder() -> None:
    source = find_source(FIXTURES / NAME)
    assert os.path.samefile(source.folder, MODELS / "qwen3-tied")
    model = genesis_models.load(FIXTURES / NAME)
    assert np.abs(logits(model, reference(NAME)["input_ids"]) - reference(NAME)["logits"]).max() < 1e-5
    assert str(source).startswith(f"adapter {FIXTURES / NAME} (DoRA, r 2) on ")


def test_from_the_current_folder_or_named(adapter: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(adapter, base_model_name_or_path="base")
    refused(adapter, "the base model 'base' of the adapter", str(adapter), "--base FOLDER")
    assert find_source(adapter, base).folder == base
    monkeypatch.chdir(base.parent)
    assert find_source(adapter).folder == Path("base")


def test_the_files_say_nothing_about_the_machine(adapter: Path, base: Path) -> None:
    assert json.loads((adapter / BASE_NAME).read_text()) == {"sha256": base_of(base).sha256}
    assert json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == "../base"
    for path in adapter.iterdir():
        assert str(base.parent).encode() not in path.read_bytes()


def test_the_base_is_found_from_anywhere_and_where_both_were_moved(
    adapter: Path, base: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert find_source(adapter).folder == base
    Path("link").symlink_to(adapter)
    assert find_source("link").folder == base
    moved = shutil.move(base.parent, "moved")
    assert os.path.samefile(find_source(f"{moved}/adapter").folder, f"{moved}/base")
    aside = Path(moved) / "abandoned-1" / "adapter"  # as the checkpoints of a run that went another way
    shutil.move(f"{moved}/adapter", aside)
    assert os.path.samefile(find_source(aside).folder, f"{moved}/base")


def test_a_base_in_the_cache_of_the_hub_has_its_name(base: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    shutil.copytree(base, snapshot)
    assert base_name(snapshot, tmp_path / "adapter") == "org/name"


def test_an_unchanged_base_is_hashed_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, hashed = base_of(base), list[str]()
    monkeypatch.setattr(base_model, "sha256_file", lambda path: hashed.append(path.name) or sha256_file(path))
    assert base_of(base, known) == known and not hashed
    os.utime(base / "model.safetensors")
    assert base_of(base, known) == known and len(hashed) == 2


def test_an_older_base_json(adapter: Path, base: Path) -> None:
    older = {"path": str(base), "sha256": base_of(base).sha256, "files": {"config.json": [1, 2, 3, 4, 5]}}
    (adapter / BASE_NAME).write_text(json.dumps(older))
    changed(adapter, base_model_name_or_path=str(base))
    assert find_source(adapter).folder == base
    (adapter / BASE_NAME).write_text(json.dumps(older | {"sha256": "0" * 64}))
    refused(adapter, f"the base model in {base} has changed")
    for bad in ("0" * 63, "../" + "0" * 61, 5):
        (adapter / BASE_NAME).write_text(json.dumps(older | {"sha256": bad}))
        refused(adapter, "base.json")


def test_a_base_that_moved(adapter: Path, base: Path) -> None:
    shutil.move(base, base.parent / "elsewhere")
    refused(adapter, f"the adapter in {adapter}", f"the base model '{base}' of", "--base FOLDER")
    assert find_source(adapter, base.parent / "elsewhere").folder == base.parent / "elsewhere"


def test_a_base_that_changed(adapter: Path, base: Path) -> None:
    arrays = load_file(base / "model.safetensors")
    arrays["model.norm.weight"][0] += 1e-3
    save_file(arrays, base / "model.safetensors")
    refused(adapter, f"the base model in {base} has changed")
    (adapter / BASE_NAME).unlink()  # PEFT's own folders do not have it
    find_source(adapter)


def test_another_base_of_the_same_shape(adapter: Path, base: Path) -> None:
    other = base.parent / "other"
    genesis_models.save(genesis_models.build(genesis_models.load(base).config, seed=1), other)
    refused(adapter, f"the model in {other} is not the base of this adapter, which was in {base}", base=other)


def test_a_name_of_the_hub(adapter: Path) -> None:
    refused(changed(adapter, base_model_name_or_path="Qwen/Qwen2.5-0.5B"), "genesis pull Qwen/Qwen2.5-0.5B", "--base")


def test_no_base_named_and_an_adapter_as_base(adapter: Path) -> None:
    refused(changed(adapter, base_model_name_or_path=None), "names no base model", "--base")
    refused(adapter, "which is an adapter too", base=FIXTURES / NAME)


def test_what_is_loaded_is_in_eval_mode(adapter: Path, base: Path) -> None:
    changed(adapter, lora_dropout=0.5)
    ids = np.arange(24).reshape(2, 12)
    for model in (genesis_models.load(adapter), genesis_models.load(base), quantize(genesis_models.load(base), "int8")):
        assert not any(module.training for module in model.modules())
        np.testing.assert_array_equal(logits(model, ids), logits(model, ids))
    trained = genesis_models.load(adapter).train()
    assert np.abs(logits(trained, ids) - logits(trained, ids)).max() > 1e-2
    trained.generate([1, 2], max_tokens=1)
    assert all(module.training for module in trained.modules())
    np.testing.assert_array_equal(logits(trained.eval(), ids), logits(genesis_models.load(adapter), ids))
    with_more = apply_adapters(genesis_models.load(base), AdapterConfig(r=2, alpha=4.0))
    assert not any(module.training for module in with_more.modules())


def test_a_model_has_no_base(base: Path) -> None:
    refused(base, "is a model, not an adapter, so it has no base", base=base)


def test_where_a_whole_model_is_needed_an_adapter_says_so(adapter: Path) -> None:
    with pytest.raises(ModelError, match=r"a PEFT adapter, .* whole model.*init_from"):
        read_config(adapter)


def test_a_whole_model_beside_an_adapter_goes_first(adapter: Path, base: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(base / name, adapter / name)
    assert find_source(adapter).adapter is None


def test_generate_and_eval_take_adapters(adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = base.parent / "merged"
    (base / "LICENSE").write_text("terms")
    (adapter / "chat_template.jinja").write_text("the adapter's")
    genesis_models.save(genesis_models.load(adapter), merged)
    assert (merged / "LICENSE").exists() and (merged / "chat_template.jinja").read_text() == "the adapter's"

    def text(folder: Path, **options: Any) -> str:
        return "".join(generate(str(folder), "words", **GREEDY, device="cpu", dtype="auto", **options))

    assert text(adapter) == text(merged) == text(adapter, base=str(base))
    assert f"adapter {adapter} (DoRA, r 2) on {base}" in capsys.readouterr().err
    (base.parent / "text.txt").write_text("words to learn\n" * 20)
    options: dict[str, Any] = {"seq_len": None, "batch_size": 2, "device": "cpu", "dtype": "auto"}
    one, other, plain = (
        evaluate(str(folder), [str(base.parent / "text.txt")], **options) for folder in (adapter, merged, base)
    )
    assert one["eval/loss"] == pytest.approx(other["eval/loss"], abs=1e-5)
    assert abs(one["eval/loss"] - plain["eval/loss"]) > 1e-3


def test_what_an_adapter_was_trained_to_end_with_ends_its_text(adapter: Path) -> None:
    def text() -> str:
        return "".join(generate(str(adapter), "words", **GREEDY, device="cpu", dtype="auto"))

    whole = text()
    first = Tokenizer.load(adapter.parent / "base").encode(whole)[0]
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [int(first)]}))
    assert text() == ""


def test_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere") is None
    for step in (9, 10):
        with AtomicFolder(tmp_path / f"checkpoint-{step}") as checkpoint:
            checkpoint.write("config.json", b"{}")
    (tmp_path / "checkpoint-11").mkdir()  # not committed
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
