"""Which layers a config means, by PEFT's rules, and what is said where it means none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.errors import ConfigError, UsageError
from genesis.random import Generator
from genesis_models.adapters import AdapterConfig, adapted_layers, adapter_of, apply_adapters
from genesis_models.blocks import CausalLM
from tests.models.golden import FIXTURES

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS = (0, 1)


def adapted(name: str = "qwen3-tied", **changed: Any) -> CausalLM:
    options: dict[str, Any] = {"r": 2, "alpha": 4.0}
    return apply_adapters(genesis_models.load(FIXTURES / name), AdapterConfig(**options | changed))


def ends(model: CausalLM) -> list[tuple[int, str]]:
    """The layers with adapters, as the index and the end of the name."""
    return [(int(name.split(".")[2]), name.rpartition(".")[2]) for name in adapted_layers(model)]


def every(*ends: str) -> list[tuple[int, str]]:
    return [(layer, end) for layer in LAYERS for end in PROJECTIONS if end in ends]


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied-sharded"])
def test_all_linear_is_all_but_the_head(name: str) -> None:
    model = adapted(name)
    assert ends(model) == every(*PROJECTIONS)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained == [n for n, _ in model.named_parameters() if ".lora_" in n]
    assert model.is_fused


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"target_modules": ("q_proj", "v_proj")}, every("q_proj", "v_proj")),
        ({"target_modules": ("model.layers.1.mlp.up_proj", "k_proj")}, [(0, "k_proj"), (1, "k_proj"), (1, "up_proj")]),
        ({"target_modules": ("mlp.up_proj",)}, every("up_proj")),
        ({"target_modules": r".*layers\.1\..*(q|k)_proj"}, [(1, "q_proj"), (1, "k_proj")]),
        ({"target_modules": "model.layers.0.mlp.up_proj"}, [(0, "up_proj")]),
        ({"target_modules": ("q_proj",), "layers_to_transform": (1,)}, [(1, "q_proj")]),
        ({"target_modules": ("q_proj",), "layers_to_transform": (0,), "layers_pattern": ("layers",)}, [(0, "q_proj")]),
        # PEFT looks at the index of ends only, not of whole names.
        (
            {"target_modules": ("q_proj", "model.layers.0.mlp.up_proj"), "layers_to_transform": (1,)},
            [(0, "up_proj"), (1, "q_proj")],
        ),
        ({"exclude_modules": ("down_proj", "o_proj")}, every(*(p for p in PROJECTIONS if p[:2] not in ("do", "o_")))),
        ({"target_modules": ("q_proj",), "exclude_modules": r".*\.0\..*"}, [(1, "q_proj")]),
    ],
)
def test_target_modules(changed: dict[str, Any], expected: list[tuple[int, str]]) -> None:
    assert ends(adapted(**changed)) == expected


def test_ranks_and_alphas_by_pattern() -> None:
    ranks = {"q_proj": 3, "layers.1.mlp.(up|gate)_proj": 5, "proj": 9}  # the last matches no whole part of a name
    layers = adapted_layers(
        adapted(rank_pattern=ranks, alpha_pattern={"^model.layers.0.mlp.up_proj": 7.0, "^mlp": 1.0})
    )
    found = {name.removeprefix("model.layers."): layer.r for name, layer in layers.items() if layer.r != 2}
    assert found == {"0.self_attn.q_proj": 3, "1.self_attn.q_proj": 3, "1.mlp.up_proj": 5, "1.mlp.gate_proj": 5}
    assert {name: layer.alpha for name, layer in layers.items() if layer.alpha != 4} == {
        "model.layers.0.mlp.up_proj": 7
    }
    assert layers["model.layers.1.mlp.up_proj"].scaling == 4 / 5


def test_an_entry_that_means_nothing_is_an_error_with_the_name_that_was_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        adapted(target_modules=("q_proj", "qproj_"))
    assert caught.value.what == "target_modules has 'qproj_', which is not a layer of the model"
    assert caught.value.next == "did you mean q_proj?"
    with pytest.raises(ConfigError, match=r"which is not a layer.*q_proj, k_proj, .*down_proj, or all-linear"):
        adapted(target_modules=("query_key_value",))


@pytest.mark.parametrize("wanted", [r".*\.w[12]", ("q_proj",)])
def test_no_layer_at_all(wanted: Any) -> None:
    with pytest.raises(ConfigError, match="matches no layer of the model"):
        adapted(target_modules=wanted, exclude_modules=("q_proj",))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (("embed_tokens",), "is a Embedding, but only linear layers"),
        (r".*mlp.*", "is a FusedMLP, but only linear layers"),
        (("lm_head",), "the head cannot have an adapter"),
    ],
)
def test_what_is_no_linear_layer_and_the_head(wanted: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapted("qwen2-untied-sharded", target_modules=wanted)
    with pytest.raises(ConfigError, match=said):  # the head is the embedding, and has the same reason
        adapted("qwen2-tied", target_modules=wanted)


@pytest.mark.parametrize("pattern", ["(", "a{5", "*q", "q_proj)|(x", "(?P<a>x)(?P<a>y)", "x" * 5000])
def test_no_regular_expression(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a regular expression|matches no layer|characters exceeds"):
        adapted(target_modules=pattern)


def test_the_same_generator_gives_the_same_adapter() -> None:
    def drawn(seed: int) -> list[np.ndarray]:
        model = genesis_models.load(FIXTURES / "qwen3-tied")
        apply_adapters(model, AdapterConfig(r=2, alpha=4.0), generator=Generator(seed))
        return [layer.lora_A.weight.detach().numpy() for layer in adapted_layers(model).values()]

    one, same, other = drawn(1), drawn(1), drawn(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_adapters_are_not_given_twice_and_a_fresh_one_changes_nothing() -> None:
    ids = genesis.from_numpy(np.arange(12)[None])
    model = adapted(use_dora=True, use_rslora=True)
    with genesis.no_grad():
        plain = genesis_models.load(FIXTURES / "qwen3-tied")(ids).numpy()
        np.testing.assert_allclose(model(ids).numpy(), plain, atol=1e-5)
    with pytest.raises(UsageError, match="has adapters already"):
        apply_adapters(model, AdapterConfig(r=2, alpha=4.0))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"target_modules": ("q_proj", "v_proj")},
        {"target_modules": r".*layers\.1\..*(q|k)_proj", "use_dora": True},
        {"rank_pattern": {"q_proj": 3, "1.mlp.up_proj": 5}, "alpha_pattern": {"o_proj": 0.5}, "use_rslora": True},
    ],
)
def test_the_config_of_a_model_gives_the_same_adapters(changed: dict[str, Any]) -> None:
    model = adapted(**changed)
    config = adapter_of(model, base="somewhere")
    again = apply_adapters(genesis_models.load(FIXTURES / "qwen3-tied"), config)

    def settings(model: CausalLM) -> dict[str, str]:
        return {name: repr(layer) for name, layer in adapted_layers(model).items()}

    assert settings(again) == settings(model)
    assert all(len(name) < 30 for name in config.target_modules) == ("1" not in str(changed.get("target_modules")))


def test_a_model_without_adapters_has_no_config() -> None:
    with pytest.raises(UsageError, match="no adapters"):
        adapter_of(genesis_models.load(FIXTURES / "qwen3-tied"))
