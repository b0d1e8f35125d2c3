"""Model folders: strict loading, tied heads, shards, what is written back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.errors import ModelError
from genesis.io.safetensors import load_file, save_file
from tests.models.golden import FIXTURES, golden

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Arrays = dict[str, np.ndarray]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tied Qwen3 model."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / "qwen3-tied" / name, copy / name)
    return copy


def change(folder: Path, edit: Callable[[Arrays], None]) -> None:
    """Rewrite the weights after `edit`."""
    arrays = load_file(folder / "model.safetensors")
    edit(arrays)
    save_file(arrays, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        genesis_models.load(folder)
    assert caught.value.exit_code == 5


NAMES = sorted(load_file(FIXTURES / "qwen3-tied" / "model.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_missing_is_named(folder: Path, name: str) -> None:
    change(folder, lambda arrays: arrays.__delitem__(name))
    refused(folder, rf"missing: 1 \(.*{name.split('.')[-2]}")


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_of_another_shape_is_named(folder: Path, name: str) -> None:
    change(folder, lambda arrays: arrays.update({name: np.ascontiguousarray(arrays[name][:-1])}))
    refused(folder, rf"{name} has shape .* the config says")


def test_extra_tensors_are_counted_and_ten_are_named(folder: Path) -> None:
    change(folder, lambda arrays: arrays.update({f"surprise.{i:02}": np.ones(1, np.float32) for i in range(14)}))
    refused(folder, r"not part of the model: 14 \(.*surprise\.09.*…\)")


def test_integer_weights_are_refused(folder: Path) -> None:
    change(folder, lambda arrays: arrays.update({"model.norm.weight": np.ones(64, np.int32)}))
    refused(folder, "model.norm.weight has type int32")


def test_another_vocabulary_is_refused(folder: Path) -> None:
    change_config(folder, vocab_size=321)
    refused(folder, r"embed_tokens.weight has shape \(320, 64\), the config says \(321, 64\)")


def test_an_unsupported_model_type_is_refused(folder: Path) -> None:
    change_config(folder, model_type="gpt2")
    refused(folder, "gpt2.* not supported.*qwen2, qwen3, llama")


def test_a_tied_head_may_be_absent_or_equal_but_not_different(folder: Path) -> None:
    assert genesis_models.load(folder).lm_head is None
    change(folder, lambda arrays: arrays.update({HEAD: arrays[EMBEDDING].copy()}))
    assert genesis_models.load(folder).lm_head is None
    change(folder, lambda arrays: arrays.update({HEAD: arrays[EMBEDDING] + np.float32(1e-3)}))
    refused(folder, "tie_word_embeddings is set, and lm_head.weight differs")


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    refused(folder, r"missing: 1 \(.*lm_head.weight")


def test_rotary_tables_of_old_checkpoints_are_ignored(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    change(folder, lambda arrays: arrays.update(extra))
    genesis_models.load(folder)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_weights_of_another_float_type_are_cast(folder: Path, stored: str) -> None:
    dtype = genesis.dtypes.as_dtype(stored).numpy
    expected = {n: a.astype(dtype).astype(np.float32) for n, a in load_file(folder / "model.safetensors").items()}
    change(folder, lambda arrays: arrays.update({n: a.astype(dtype) for n, a in arrays.items()}))
    for name, parameter in genesis_models.load(folder).named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), expected[name])


def test_no_folder_no_config_no_weights(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "config.json|nowhere")
    (folder / "model.safetensors").unlink()
    refused(folder, "holds neither")


def test_saving_keeps_the_source_files_and_writes_both_rope_forms(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text('{"odd": "spacing" }')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    change_config(folder, something_unknown={"kept": True})
    genesis_models.save(genesis_models.load(folder), tmp_path / "out", source=folder)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["something_unknown"] == {"kept": True}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    assert HEAD not in arrays
    assert sorted(arrays) == NAMES


def test_shards(tmp_path: Path) -> None:
    source = golden("qwen2-untied-sharded").folder
    model = genesis_models.load(source)
    genesis_models.save(model, tmp_path / "out", source=source, max_shard_bytes=100_000)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.array.nbytes for p in model.parameters())
    again = genesis_models.load(tmp_path / "out")
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())
