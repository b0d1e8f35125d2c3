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
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import DTypeError, ModelError
from genesis.files.safetensors import load_file
from genesis_models import CausalLM
from genesis_models.folder import check_weights
from tests.files.st_files import save_file
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
    refused(folder, r"embed_tokens.weight has shape \(320, 64\), but the config says \(321, 64\)")


def test_an_unsupported_model_type_is_refused(folder: Path) -> None:
    change_config(folder, model_type="gpt2")
    refused(folder, "gpt2.* not supported.*llama, .*qwen2, qwen3")


def test_a_tied_head_may_be_absent_or_equal_but_not_different(folder: Path) -> None:
    assert genesis_models.load(folder).lm_head is None
    change(folder, lambda arrays: arrays.update({HEAD: arrays[EMBEDDING].copy()}))
    assert genesis_models.load(folder).lm_head is None
    change(folder, lambda arrays: arrays.update({HEAD: arrays[EMBEDDING] + np.float32(1e-3)}))
    refused(folder, "tie_word_embeddings is set, but lm_head.weight differs")


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    refused(folder, r"missing: 1 \(.*lm_head.weight.*use weights with a language-model head")


@pytest.mark.parametrize("prefix", ["", "model.model."])
def test_weights_of_a_base_model_have_names_without_its_prefix(folder: Path, tmp_path: Path, prefix: str) -> None:
    """As `AutoModel(…).save_pretrained` writes them, and as transformers reads them."""
    expected = {n: p.detach().numpy().copy() for n, p in genesis_models.load(folder).named_parameters()}
    change(folder, lambda a: a.update({prefix + n.removeprefix("model."): a.pop(n) for n in list(a)}))
    change_config(folder, architectures=["Qwen3Model"])
    check_weights(folder)
    model = genesis_models.load(folder)
    assert all(np.array_equal(p.detach().numpy(), expected[n]) for n, p in model.named_parameters())
    genesis_models.save(model, tmp_path / "saved")
    assert sorted(load_file(tmp_path / "saved" / "model.safetensors")) == NAMES
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    change(folder, lambda a: a.update({"model.norm.weight": np.ones(32, np.float32)}))
    refused(folder, r"not part of the model: 1 \(.*norm.weight")


def test_rotary_tables_of_old_checkpoints_are_ignored(folder: Path) -> None:
    """Their frequencies are those of the config, whatever the file says."""
    ids = genesis.tensor([[3, 1, 4, 1, 5]])
    expected = genesis_models.load(folder)(ids).detach().numpy()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    change(folder, lambda arrays: arrays.update(extra))
    model = genesis_models.load(folder)
    assert np.array_equal(model(ids).detach().numpy(), expected)
    assert sorted(name for name, _ in model.named_parameters()) == NAMES


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
    refused(folder, "contains neither")


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


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_folder_keeps_its_type_unless_another_is_asked_for(folder: Path, tmp_path: Path, stored: str) -> None:
    dtype = genesis.dtypes.as_dtype(stored).numpy
    change(folder, lambda arrays: arrays.update({n: a.astype(dtype) for n, a in arrays.items()}))
    change_config(folder, dtype=stored)
    model = genesis_models.load(folder)
    assert model.head_weight.dtype is genesis.float32
    genesis_models.save(model, tmp_path / "kept")
    assert (tmp_path / "kept" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["dtype"] == stored
    genesis_models.save(genesis_models.load(folder, dtype="fp32"), tmp_path / "asked")
    assert {str(a.dtype) for a in load_file(tmp_path / "asked" / "model.safetensors").values()} == {"float32"}


def test_tensors_of_several_types_keep_theirs(folder: Path, tmp_path: Path) -> None:
    half = [name for name in NAMES if "proj" in name or "embed" in name]
    change(folder, lambda arrays: arrays.update({n: arrays[n].astype(np.float16) for n in half}))
    genesis_models.save(genesis_models.load(folder), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("asked", "found"), [("bf16", "bfloat16"), ("half", "float16"), ("auto", "float32")])
def test_types_by_their_other_names(folder: Path, asked: str, found: str) -> None:
    assert genesis_models.load(folder, dtype=asked).head_weight.dtype.name == found


@pytest.mark.parametrize("asked", ["int8", "float64", "bf15", 16])
def test_weights_cannot_have_every_type(folder: Path, asked: object) -> None:
    with pytest.raises(DTypeError):
        genesis_models.load(folder, dtype=asked)


def test_license_and_further_templates_are_kept(folder: Path, tmp_path: Path) -> None:
    kept = {"LICENSE": "terms", "NOTICE.txt": "thanks", "added_tokens.json": "{}", "tokenizer.model": "sp"}
    kept |= {"additional_chat_templates/tool_use.jinja": "{{ tools }}"}
    (folder / "additional_chat_templates").mkdir()
    for name, text in (kept | {"README.md": "about the source", "run.py": "print()"}).items():
        (folder / name).write_text(text)
    (folder / "additional_chat_templates" / "secret.jinja").symlink_to("/etc/passwd")
    (folder / "LICENSE-LINK").symlink_to("/etc/passwd")
    for _ in range(2):  # into a new folder, then into one that stands
        genesis_models.save(genesis_models.load(folder), tmp_path / "out", source=folder)
    written = {str(p.relative_to(tmp_path / "out")): p for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {name: written[name].read_text() for name in kept} == kept
    own = {"config.json", "generation_config.json", "model.safetensors", "manifest.json"}
    assert set(written) == set(kept) | own


def test_files_go_into_no_linked_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is not a plain folder"):
        genesis_models.save(genesis_models.load(folder), tmp_path / "out", source=folder)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_tokenizer_is_written_with_the_model(folder: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe(["some words to learn, and more words"], vocab_size=270)
    (folder / "vocab.json").write_text("{}")
    (folder / "LICENSE").write_text("terms")
    model = genesis_models.load(folder)
    genesis_models.save(model, tmp_path / "a", source=folder, tokenizer=tokenizer)
    genesis_models.save(model, tmp_path / "b", tokenizer=tmp_path / "a")
    for name in ("a", "b"):
        assert Tokenizer.load(tmp_path / name).fingerprint == tokenizer.fingerprint
        assert not (tmp_path / name / "vocab.json").exists()
    assert (tmp_path / "a" / "LICENSE").exists()


def with_tokenizer(folder: Path, tokenizer: Tokenizer) -> CausalLM:
    """The model in `folder`, which holds `tokenizer`, a template and terms besides."""
    for name, data in tokenizer.files().items():
        (folder / name).write_bytes(data)
    (folder / "vocab.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("terms")
    return genesis_models.load(folder)


def test_saving_keeps_what_the_folder_had_that_was_loaded(folder: Path, tmp_path: Path) -> None:
    model = with_tokenizer(folder, train_bpe(["some words"], vocab_size=262))
    kept = {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "config.json"}
    for _ in range(2):  # before and after the tokenizer was read
        genesis_models.save(model, tmp_path / "out")
        assert {name: (tmp_path / "out" / name).read_bytes() for name in kept} == kept
        assert model.generate("words", max_tokens=1).text is not None
    genesis_models.save(model, folder)  # in place
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert genesis_models.load(tmp_path / "out").generate("words", max_tokens=1).text is not None


def test_a_tokenizer_that_was_set_is_saved(folder: Path, tmp_path: Path) -> None:
    first, other = (train_bpe([text], vocab_size=262) for text in ("some words", "and others, and others"))
    built = genesis_models.build(genesis_models.load(folder).config, seed=0)
    for name, model in (("built", built), ("loaded", with_tokenizer(folder, first))):
        model.tokenizer = other
        genesis_models.save(model, tmp_path / name)
        assert Tokenizer.load(tmp_path / name).fingerprint == other.fingerprint != first.fingerprint
    assert (tmp_path / "loaded" / "LICENSE").exists() and not (tmp_path / "loaded" / "vocab.json").exists()


def test_the_folder_that_was_loaded_is_gone(folder: Path, tmp_path: Path) -> None:
    model = genesis_models.load(folder)
    folder.rename(tmp_path / "elsewhere")
    for source in (None, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match="does not exist") as caught:
            genesis_models.save(model, tmp_path / "out", source=source)
        assert "source=" in caught.value.next and not (tmp_path / "out").exists()
    genesis_models.save(model, tmp_path / "out", source=tmp_path / "elsewhere")


def test_shards_of_an_older_save_are_removed_whatever_their_digits(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    genesis_models.save(genesis_models.load(folder), out)
    for name in ("model-000001-of-000123.safetensors", "model-00001-of-00002.safetensors", "other-000001.safetensors"):
        (out / name).write_bytes(b"old")
    genesis_models.save(genesis_models.load(folder), out)
    assert [p.name for p in sorted(out.glob("*.safetensors"))] == ["model.safetensors", "other-000001.safetensors"]
