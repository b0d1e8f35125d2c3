"""What config.json may say: the family first, every key bounded, no bad value ends in anything but a named refusal."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import genesis_models
from genesis.errors import ModelError, OutOfMemoryError
from genesis_models.config import FAMILIES, MOST, ModelConfig
from genesis_models.registry import ARCHITECTURES, parameter_count, parameter_shapes
from tests.models.config_mutations import BAD, bases, limited, mutations, refusal
from tests.models.golden import FIXTURES

SAMPLE = 7  # every so many of the mutations; the module runs all


def refused(raw: dict[str, Any]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(raw)
    return caught.value


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen3_5", "mixtral", "qwen3_moe"])
def test_the_family_comes_before_its_keys(kind: str) -> None:
    error = refused({"model_type": kind, "n_embd": 768})
    assert error.what == f'model_type "{kind}" is not supported'
    assert error.next == f"use one of {', '.join(FAMILIES)}: {'; '.join(each.models for each in FAMILIES.values())}"
    assert {"llama", "qwen2", "qwen3", "mistral"} <= set(FAMILIES) == set(ARCHITECTURES)


def test_a_model_of_pictures_and_a_config_without_a_family() -> None:
    assert refused({"model_type": "qwen3_5", "text_config": {}}).what == (
        'model_type "qwen3_5" is not supported: it takes more than text'
    )
    assert refused({"hidden_size": 8}).what == "model_type is missing, so the kind of model is unknown"
    assert refused({"model_type": 7}).what == "model_type is 7, expected a text"


def test_every_base_is_a_model() -> None:
    assert {kind: refusal(raw) for kind, raw in bases().items()} == dict.fromkeys(bases())


def test_bad_values_are_refused_by_key() -> None:
    for _, key, _, raw in list(mutations())[::SAMPLE]:
        found = refusal(raw)
        assert found is None or key in found or key in ("rope_parameters", "rope_scaling"), (key, found)
        for python in ("None", "True", "False", "<class", "dict_keys", "['", "{'"):
            assert found is None or python not in found, found


def test_bad_values_load_or_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    shutil.copyfile(FIXTURES / "qwen3-tied" / "model.safetensors", tmp_path / "model.safetensors")
    cases = [raw for *_, raw in list(mutations())[:: 3 * SAMPLE]]
    found = limited(tmp_path, [bases()["qwen3"], *cases])
    assert found[0] == "loaded"
    assert [each for each in found if each.startswith("CRASH")] == []
    assert len({each.split()[0] for each in found}) == 2


def test_the_guard_sees_memory_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hog(folder: Path) -> None:
        bytearray(1 << 30)

    monkeypatch.setattr("tests.models.config_mutations.load", hog)
    assert limited(tmp_path, [{}])[0].startswith("CRASH MemoryError")


@pytest.mark.parametrize("key", [key for key in MOST if not key.startswith("original")])
def test_every_dimension_has_a_bound(key: str) -> None:
    raw = bases()["qwen2"] | {"use_sliding_window": True, "layer_types": None}
    assert refused({**raw, key: MOST[key] + 1}).what.startswith(f"{key} is ")


def test_a_number_of_many_digits_is_told_by_its_length() -> None:
    raw = bases()["qwen2"]
    assert refused({**raw, "hidden_size": 10**400}).what == (
        f"hidden_size is a number of about 401 digits, expected 1 to {MOST['hidden_size']:,}"
    )


def test_values_that_bound_nothing_are_shown_short() -> None:
    for value in BAD:
        assert len(refused({**bases()["qwen2"], "rope_theta": value, "hidden_act": [value]}).what) < 120


def test_swish_is_silu_and_dropout_is_no_obstacle() -> None:
    raw = {**bases()["qwen2"], "hidden_act": "swish", "attention_dropout": 0.1, "resid_pdrop": 0}
    assert ModelConfig.from_dict(raw).dropout == {"attention_dropout": 0.1}
    assert ModelConfig.from_dict(bases()["qwen2"]).dropout == {}


def test_unknown_rope_parameters_are_refused() -> None:
    raw = {**bases()["qwen2"], "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
    assert refused(raw).what == (
        'rope_parameters has the unknown key "mrope_section", which may change the computation'
    )
    raw["rope_parameters"] = {"rope_type": "longrope"}
    assert (
        refused(raw).what
        == 'rope_type is "longrope"; Genesis supports default, linear, dynamic, yarn, llama3 for such models'
    )


@pytest.mark.parametrize(
    ("rope", "longest", "packed"),
    [
        ({"rope_type": "default"}, 32, 32),
        ({"rope_type": "linear", "factor": 4.0}, 32, 32),
        ({"rope_type": "dynamic", "factor": 4.0}, 128, 32),
        ({"rope_type": "yarn", "factor": 4.0}, 32, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64, 64),
    ],
)
def test_the_longest_sequence_follows_the_scaling(rope: dict[str, Any], longest: int, packed: int) -> None:
    config = ModelConfig.from_dict({**bases()["llama"], "max_position_embeddings": 32, "rope_parameters": rope})
    assert (config.context_length, config.packed_length) == (longest, packed)


def test_shapes_are_those_of_the_model_and_take_no_memory() -> None:
    from genesis.backend.cpu import pool

    for raw in bases().values():
        config = ModelConfig.from_dict(raw)
        shapes = parameter_shapes(config)
        assert shapes == {name: p.shape for name, p in genesis_models.build(config).named_parameters()}
        assert parameter_count(config) == sum(math.prod(shape) for shape in shapes.values())
    large = ModelConfig.from_dict({**bases()["llama"], "hidden_size": 1 << 16, "intermediate_size": 1 << 18})
    pool.max_allocated = before = pool.allocated
    assert parameter_count(large) > 1 << 36
    assert pool.max_allocated - before < 1 << 20


def test_a_model_beyond_all_memory_is_refused_before_it_is_made() -> None:
    raw = {**bases()["llama"], "hidden_size": 1 << 19, "intermediate_size": 1 << 21, "num_hidden_layers": 64}
    with pytest.raises(OutOfMemoryError, match=r"the model of this config has 2[0-9,]{18} parameters, .* in float32"):
        genesis_models.build(raw)
