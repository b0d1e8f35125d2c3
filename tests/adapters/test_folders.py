"""Folders of adapters: what is read and written, and what is wrong with one; only a ModelError comes of a bad file."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import genesis
import genesis_models
from genesis.errors import ModelError
from genesis.files.atomic import AtomicFolder
from genesis.files.safetensors import load_file
from genesis.optim import AdamW
from genesis.train.state import masters, tensor_sources
from genesis_models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterConfig,
    adapted_layers,
    adapter_parameters,
    apply_adapters,
    load_adapter,
    write_adapter,
)
from genesis_models.adapters.config import read_adapter_config
from genesis_models.blocks import CausalLM
from tests.adapters.golden import FIXTURES, NAMES, base_of, loaded, logits, reference, stored
from tests.files.st_files import save_file
from tests.models.config_mutations import BAD

LORA, DORA = "qwen3-tied-lora", "qwen3-tied-dora"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the DoRA of a Qwen3."""
    return Path(shutil.copytree(FIXTURES / DORA, tmp_path / "adapter", copy_function=shutil.copyfile))


@pytest.fixture(scope="module")
def base() -> CausalLM:
    """The base model; what is refused must leave it as it is."""
    return genesis_models.load(base_of(DORA))


def change(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Rewrite the weights after `edit`."""
    arrays = stored(folder)
    edit(arrays)
    save_file(arrays, folder / ADAPTER_WEIGHTS)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(base: CausalLM, folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_adapter(base, folder)
    assert caught.value.exit_code == 5
    assert not adapted_layers(base)


def written(model: CausalLM, folder: Path, **options: Any) -> Path:
    with AtomicFolder(folder) as writer:
        write_adapter(model, writer, **{"base": "base", **options})
    return folder


# --- What is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_peft_writes(name: str, tmp_path: Path) -> None:
    found = written(loaded(name), tmp_path / "out")
    assert (found / ADAPTER_WEIGHTS).read_bytes() == (FIXTURES / name / ADAPTER_WEIGHTS).read_bytes()
    ours, theirs = (json.loads((each / ADAPTER_CONFIG).read_text()) for each in (found, FIXTURES / name))
    own = ("base_model_name_or_path", "target_modules", "rank_pattern", "init_lora_weights")
    assert [ours.pop(key) for key in own[:1]] == ["base"]
    assert {key: value for key, value in ours.items() if key not in own} == {
        key: value for key, value in theirs.items() if key not in own
    }
    again = load_adapter(genesis_models.load(base_of(name)), found)
    np.testing.assert_array_equal(
        logits(again, reference(name)["input_ids"]), logits(loaded(name), reference(name)["input_ids"])
    )


def test_masters_are_written_where_an_optimizer_keeps_some(tmp_path: Path) -> None:
    model = genesis_models.load(base_of(LORA), dtype="bfloat16")
    apply_adapters(model, AdapterConfig(r=2, alpha=4.0, target_modules=("q_proj", "v_proj"))).train()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = AdamW(trained, lr=1e-3, fused=True, low_precision="master")
    ids = genesis.from_numpy(np.arange(12)[None])
    model.loss(ids, ids).backward()
    optimizer.step()
    values = masters(*tensor_sources(trained, optimizer))
    arrays = stored(written(model, tmp_path / "out", values=values))
    for name, layer in adapted_layers(model).items():
        for part in ("lora_A", "lora_B"):
            master = arrays[f"base_model.model.{name}.{part}.weight"]
            weight = getattr(layer, part).weight.detach().numpy()
            assert master.dtype == np.float32
            assert not np.array_equal(master, weight.astype(np.float32))
            np.testing.assert_array_equal(master.astype(weight.dtype), weight)


EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@pytest.mark.parametrize(
    ("wanted", "ensure", "own"),
    [
        (["embed_tokens"], False, [EMBEDDING]),
        (["lm_head"], False, [HEAD]),
        (["embed_tokens", "lm_head", "layernorm"], False, [EMBEDDING, HEAD]),
        (["lm_head"], True, [EMBEDDING, HEAD]),
    ],
)
def test_modules_that_are_saved_whole(wanted: list[str], ensure: bool, own: list[str], tmp_path: Path) -> None:
    """The model computes what its base does with these weights in the place of its own."""
    genesis.manual_seed(0)
    tied = {"modules_to_save": tuple(wanted), "ensure_weight_tying": ensure}
    model = apply_adapters(
        genesis_models.load(base_of(LORA)), AdapterConfig(r=2, alpha=2.0, target_modules=("q_proj",), **tied)
    )
    parameters = adapter_parameters(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == parameters.keys()
    with genesis.no_grad():
        for parameter in parameters.values():
            parameter.add_(genesis.randn(*parameter.shape) * 0.05)
    folder = written(model, tmp_path / "adapter")
    saved = {n.removeprefix("base_model.model."): array for n, array in stored(folder).items()}
    whole = {name: array for name, array in saved.items() if "lora" not in name}
    norms = {name for name in whole if "layernorm" in name}
    assert whole.keys() - norms == {f"{name}.weight" for name in own} and len(norms) == (4 if len(wanted) == 3 else 0)
    weights = load_file(base_of(LORA) / "model.safetensors")
    weights = {**weights, f"{HEAD}.weight": weights[f"{EMBEDDING}.weight"]} | whole
    for name in (name.removesuffix(".lora_A.weight") for name in saved if name.endswith("lora_A.weight")):
        delta = saved[f"{name}.lora_B.weight"] @ saved[f"{name}.lora_A.weight"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta
    plain = tmp_path / "plain"
    plain.mkdir()
    raw = json.loads((base_of(LORA) / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    save_file(weights, plain / "model.safetensors")
    ids = reference(LORA)["input_ids"]
    expected = logits(genesis_models.load(plain, dtype="float32"), ids)
    again = load_adapter(genesis_models.load(base_of(LORA)), folder)
    genesis_models.save(again, tmp_path / "merged")
    merged = genesis_models.load(tmp_path / "merged")
    for found in (model, again, load_adapter(again, folder), merged):
        np.testing.assert_allclose(logits(found, ids), expected, atol=2e-5)
    assert (merged.lm_head is None) == ensure


def test_a_model_that_saves_other_modules_whole(folder: Path) -> None:
    model = genesis_models.load(base_of(DORA))
    config = read_adapter_config(json.loads((folder / ADAPTER_CONFIG).read_text()), "here")
    apply_adapters(model, replace(config, modules_to_save=("model.norm",)))
    with pytest.raises(ModelError, match=r"the folder saves \[\] whole, but the model \['model.norm'\]"):
        load_adapter(model, folder)


def test_ensure_weight_tying_where_it_does_nothing(folder: Path) -> None:
    change_config(folder, ensure_weight_tying=True)
    model = load_adapter(genesis_models.load(base_of(DORA)), folder)
    np.testing.assert_array_equal(
        logits(model, reference(DORA)["input_ids"]), logits(loaded(DORA), reference(DORA)["input_ids"])
    )


# --- What is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_are_cast(folder: Path, kind: Any) -> None:
    change(folder, lambda arrays: arrays.update({n: a.astype(kind) for n, a in arrays.items()}))
    model = load_adapter(genesis_models.load(base_of(DORA)), folder)
    values = adapted_layers(model)[Q.removeprefix("base_model.model.")].lora_A.weight.detach().numpy()
    np.testing.assert_array_equal(values, stored(folder)[f"{Q}.lora_A.weight"].astype(np.float32))


def test_older_fields_and_names(folder: Path) -> None:
    """Of PEFT before 0.10, which knew fewer fields; and of Unsloth, which adds to one."""
    raw = json.loads((folder / ADAPTER_CONFIG).read_text())
    kept = ("peft_type", "r", "lora_alpha", "target_modules", "use_dora", "bias", "rank_pattern", "alpha_pattern")
    more = {"auto_mapping": {"base_model_class": "Qwen3ForCausalLM", "unsloth_fixed": True}, "fan_in_fan_out": True}
    (folder / ADAPTER_CONFIG).write_text(json.dumps({key: raw[key] for key in kept} | more))
    old = {f"{Q}.lora_magnitude_vector": f"{Q}.lora_magnitude_vector.weight"}
    change(folder, lambda arrays: [arrays.update({new: arrays.pop(name)}) for name, new in old.items()])
    model = load_adapter(genesis_models.load(base_of(DORA)), folder)
    np.testing.assert_array_equal(
        logits(model, reference(DORA)["input_ids"]), logits(loaded(DORA), reference(DORA)["input_ids"])
    )


def test_new_values_for_adapters_that_are_there(folder: Path) -> None:
    model = loaded(DORA)
    change(folder, lambda arrays: arrays[f"{Q}.lora_A.weight"].__setitem__(0, 5.0))
    load_adapter(model, folder)
    assert (adapted_layers(model)[Q.removeprefix("base_model.model.")].lora_A.weight.detach().numpy()[0] == 5).all()
    change_config(folder, lora_alpha=7)
    with pytest.raises(ModelError, match=r"the folder has r 3, alpha 7, .*, but the model has r 3, alpha 6"):
        load_adapter(model, folder)


def test_dropout_can_be_another_one(folder: Path) -> None:
    change_config(folder, lora_dropout=0.25)
    layers = adapted_layers(load_adapter(genesis_models.load(base_of(DORA)), folder)).values()
    assert {layer.dropout for layer in layers} == {0.25}
    layers = adapted_layers(load_adapter(genesis_models.load(base_of(DORA)), folder, dropout=0.5)).values()
    assert {layer.dropout for layer in layers} == {0.5}


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [f"{Q}.{part}" for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")]
)
def test_shapes_that_do_not_fit(base: CausalLM, folder: Path, name: str) -> None:
    shape = stored(folder)[name].shape
    change(folder, lambda arrays: arrays.update({name: np.ascontiguousarray(arrays[name][:-1])}))
    other = str((shape[0] - 1, *shape[1:]))
    refused(base, folder, f"{name} has shape ".replace(".", r"\.") + f".{other[1:-1]}., .* need .{str(shape)[1:-1]}.")


def test_an_adapter_of_another_base(folder: Path) -> None:
    config = json.loads((base_of(DORA) / "config.json").read_text()) | {"hidden_size": 128}
    refused(genesis_models.build(config), folder, r"lora_A.weight has shape \(3, 64\), .* need \(3, 128\)")


def test_missing_and_further_tensors_are_named(base: CausalLM, folder: Path) -> None:
    change(folder, lambda arrays: arrays.update({f"{Q}.surprise": arrays.pop(f"{Q}.lora_B.weight")}))
    refused(base, folder, rf"missing: 1 \('{Q}.lora_B.weight'\); outside the layers .* targets: 1 \('{Q}.surprise'\)")


def test_integers(base: CausalLM, folder: Path) -> None:
    change(folder, lambda arrays: arrays.update({f"{Q}.lora_A.weight": np.ones((3, 64), np.int32)}))
    refused(base, folder, "lora_A.weight has type int32")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bias": "all"}, "`bias` is 'all': it also trains the base's biases"),
        ({"bias": "lora_only"}, "`bias` is 'lora_only'"),
        ({"peft_type": "IA3"}, "`peft_type` is 'IA3'; the only PEFT adapter"),
        ({"modules_to_save": ["score"]}, "modules_to_save has 'score', but no module's name ends in it"),
        ({"modules_to_save": ["q_proj"]}, "q_proj is in modules_to_save, but one of its layers gets an adapter"),
        ({"modules_to_save": ["lm_head"]}, r"missing: 1 \('base_model.model.lm_head.weight'\)"),
        ({"target_modules": ["lm_head"]}, "the head cannot have an adapter.*PEFT's merge would change both"),
        ({"target_modules": ["embed_tokens"]}, "is a Embedding.*PEFT's merge would change both"),
        ({"ensure_weight_tying": 1}, "`ensure_weight_tying` is '1', expected true or false"),
        ({"lora_bias": True}, "B has a bias"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layers are repeated"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"trainable_token_indices": [1]}, "rows of the embedding"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "parameters outside linear layers"),
        ({"use_new_thing": True}, "an unknown variant of LoRA"),
        ({"init_lora_weights": "pissa"}, "trained on a base that it modified"),
        ({"init_lora_weights": "pissa_niter_16"}, "`init_lora_weights`"),
        ({"init_lora_weights": "olora"}, "`init_lora_weights`"),
        ({"init_lora_weights": "loftq"}, "`init_lora_weights`"),
        ({"init_lora_weights": 1}, "`init_lora_weights`"),
        ({"r": 0}, "`r` is '0', expected a rank from 1"),
        ({"r": True}, "`r` is"),
        ({"r": 10**400}, "`r` is"),
        ({"r": 8}, r"has shape .* need \(8, 64\)"),
        ({"lora_alpha": "8"}, "expected a finite number"),
        ({"lora_alpha": 10**400}, "expected a finite number"),
        ({"lora_dropout": 1.0}, "expected a number from 0 to below 1"),
        ({"target_modules": None}, "`target_modules`"),
        ({"target_modules": [["q_proj"]]}, "`target_modules`"),
        ({"target_modules": ["w1"]}, "matches no layer of the model"),
        ({"target_modules": "("}, "not a regular expression"),
        ({"rank_pattern": {"q_proj": "3"}}, "expected a rank"),
        ({"rank_pattern": {"(": 3}}, "not a regular expression"),
        ({"rank_pattern": {f"x{i}": 1 for i in range(5000)}}, "of at most"),
        ({"layers_to_transform": 0}, "`layers_to_transform` is '0', expected null"),
        ({"base_model_name_or_path": 1}, "expected a text"),
    ],
)
def test_what_is_not_read_says_why(base: CausalLM, folder: Path, changed: dict[str, Any], said: str) -> None:
    change_config(folder, **changed)
    refused(base, folder, said)


def test_pickles_are_not_read(base: CausalLM, folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")
    refused(base, folder, "only adapter_model.bin, a pickle, which can run code")


def test_nothing_there(base: CausalLM, folder: Path, tmp_path: Path) -> None:
    (folder / ADAPTER_WEIGHTS).unlink()
    refused(base, folder, f"has no {ADAPTER_WEIGHTS}")
    refused(base, tmp_path / "nowhere", "nowhere does not exist")
    refused(base, tmp_path, f"has no {ADAPTER_CONFIG}")
    (folder / ADAPTER_WEIGHTS).symlink_to("/etc/passwd")
    refused(base, folder, "link")


def test_a_pattern_that_backtracks_without_end_is_stopped(base: CausalLM, folder: Path) -> None:
    change_config(folder, rank_pattern={r"([\w.]+)+!": 3})
    began = time.monotonic()
    refused(base, folder, "takes over 1 s")
    assert time.monotonic() - began < 60


def test_every_field_with_every_bad_value() -> None:
    raw = json.loads((FIXTURES / DORA / ADAPTER_CONFIG).read_text())
    refusals = []
    for key in raw:
        for value in BAD:
            try:
                read_adapter_config({**raw, key: value}, "here")
            except ModelError as error:
                refusals.append(str(error))
    assert all(map(str.isprintable, refusals))
    assert len(refusals) > 300


@few
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    content = bytearray((FIXTURES / DORA / name).read_bytes())
    limit = min(len(content), 4000)  # of the weights the header
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, limit - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    for each in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (folder / each).write_bytes(bytes(content) if each == name else (FIXTURES / DORA / each).read_bytes())
    refusal = ""
    try:
        load_adapter(genesis_models.load(base_of(DORA)), folder)
    except ModelError as error:
        refusal = str(error)
    assert refusal.isprintable()
