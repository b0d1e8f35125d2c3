"""The families' configs: what they leave out, what is refused; and which of a run's settings work with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genesis.backend import CPU, Device
from genesis.errors import ConfigError, ModelError
from genesis.measure.peer import PeerError
from genesis_cli.session.bench_model import lean_config
from genesis_cli.session.dry_run import memory_plan
from genesis_cli.session.model import model_config, usable_precision
from genesis_models.config import FAMILIES, ModelConfig
from genesis_models.folder import read_config
from genesis_models.registry import build, fuses, parameter_count
from tests.models.golden import FAMILIES as GOLDEN
from tests.models.golden import FIXTURES
from tests.train.runs import load, make

DEFAULTS = json.loads((FIXTURES / "defaults.json").read_text())
HERE = [kind for kind in DEFAULTS if kind in FAMILIES]
GPU = Device("cuda", 0)
LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


def minimal(kind: str, **changes: Any) -> dict[str, Any]:
    """The config of a family with the keys that it needs."""
    return {"model_type": kind, **DEFAULTS[kind]["given"], **changes}


@pytest.mark.parametrize("kind", HERE)
def test_keys_that_are_left_out_are_read_as_transformers_does(kind: str) -> None:
    config, expected = ModelConfig.from_dict(minimal(kind)), dict(DEFAULTS[kind]["read"])
    ropes = expected.pop("rope_parameters")
    by_kind = [ropes[name] for name in ("full_attention", "sliding_attention") if name in ropes] or [ropes]
    assert [rope.theta for rope in config.ropes] == [rope["rope_theta"] for rope in by_kind]
    size, layers = expected.pop("sliding_window", None), range(config.num_hidden_layers)
    types = expected.pop("layer_types", ["sliding_attention" if size else "full_attention" for _ in layers])
    assert config.layer_windows == tuple(size if each == "sliding_attention" else 0 for each in types)
    if "no_rope_layers" in expected:
        assert config.layer_ropes == tuple(map(bool, expected.pop("no_rope_layers")))  # type: ignore[attr-defined]
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.raw == minimal(kind)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected 1 to"),
    ("mistral", {"layer_types": ["full_attention"] * 8}, "layer_types is a list of 8; Genesis supports none"),
    ("mistral", {"attention_bias": True}, "attention_bias is true; Genesis supports false for mistral"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act is gelu; Genesis supports silu"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers lists 2 layers, but num_hidden_layers is 8"),
    ("smollm3", {"no_rope_layers": [2] * 8}, "no_rope_layers has 2; Genesis supports 0 and 1"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, expected at least 1"),
    ("smollm3", {"layer_types": ["chunked_attention"] * 8}, "layer_types has chunked_attention; Genesis supports"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv is 8; Genesis supports none for olmo2"),
    ("olmo2", {"sliding_window": 8}, "sliding_window is 8; Genesis supports none for olmo2"),
    ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation is silu; Genesis supports gelu_pytorch_tanh"),
    (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is true",
    ),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30; Genesis supports none"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0, expected at least 1"),
    ("gemma3_text", {"rope_local_base_freq": 0.5}, "rope_local_base_freq is 0.5, expected a number above 1"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is not an object of"),
    (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "linear"}},
        "full_attention: factor is missing",
    ),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, expected a number above 0"),
    ("granite", {"logits_scaling": "8"}, "logits_scaling is 8, expected a number"),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1]}},
        "long_factor is missing",
    ),
    (
        "phi3",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "short_factor is missing",
    ),
    ("phi3", {"rope_scaling": LONG | {"short_factor": [1.0] * 8}}, "short_factor has 8 numbers, expected 1"),
    ("phi3", {"rope_scaling": LONG | {"long_factor": [0]}}, "long_factor has 0, expected numbers from 1e-06"),
    ("phi3", {"rope_scaling": LONG | {"long_factor": 4}}, "long_factor is 4, expected a list"),
    (
        "phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type is linear; Genesis supports",
    ),
    ("phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0, expected a number above 0"),
    ("phi3", {"partial_rotary_factor": 0.7}, "partial_rotary_factor 0.7 rotates 1 of 2 values"),
    ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but such models rotate whole heads"),
    (
        "mistral",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is",
    ),
    ("olmo2", {"rope_scaling": LONG}, "rope_type is longrope; Genesis supports default"),
]


@pytest.mark.parametrize(("kind", "changes", "what"), REFUSED, ids=[f"{kind}-{what}" for kind, _, what in REFUSED])
def test_what_a_family_does_not_have_is_refused_by_key(kind: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(minimal(kind, **changes))
    assert caught.value.what.replace('"', "").startswith(what)
    assert caught.value.where and caught.value.next


def test_layers_without_rope_slide_where_smollm3_has_a_window() -> None:
    config = ModelConfig.from_dict(minimal("smollm3", use_sliding_window=True, sliding_window=5))
    assert config.layer_windows == (0, 0, 0, 5, 0, 0, 0, 5)


def test_norms_of_gemma3_start_at_a_weight_of_0() -> None:
    weights = {n: p.detach().numpy() for n, p in build(minimal("gemma3_text")).named_parameters() if "norm" in n}
    assert len(weights) == 6 * 8 + 1
    assert not any(weight.any() for weight in weights.values())


def test_null_is_not_the_default_of_a_sliding_window() -> None:
    assert set(ModelConfig.from_dict(minimal("mistral", sliding_window=None)).layer_windows) == {0}


PLAIN = [kind for kind in HERE if not fuses(ModelConfig.from_dict(minimal(kind)))]


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_layers_take_no_setting_of_fused_ones(kind: str, tmp_path: Path) -> None:
    config = load(make(tmp_path), "run", f"model.config.model_type={kind}", "train.precision=fp8")
    line = f"precision: auto: fp8 needs fused layers, but the layers of {kind} are plain"
    assert usable_precision(config, model_config(config), CPU) == (None, line)
    selective = load(
        tmp_path / "config.yaml", "run", f"model.config.model_type={kind}", "train.activation_checkpointing=selective"
    )
    with pytest.raises(ConfigError, match="selective needs fused layers") as caught:
        model_config(selective)
    assert caught.value.where == "train.activation_checkpointing"


@pytest.mark.sample(cases=3)
@pytest.mark.parametrize("name", GOLDEN)
def test_captured_steps_of_a_family_run_on_a_fake_gpu(name: str) -> None:
    config = read_config(FIXTURES / name)
    plans = [memory_plan(config, GPU, batch=2, length=16, activation_checkpointing=how) for how in ("none", "full")]
    assert plans[0].weights >= 2 * parameter_count(config)
    assert plans[0].activations > plans[1].activations


def test_torch_has_no_granite() -> None:
    with pytest.raises(PeerError, match="differ from those of granite"):
        lean_config(ModelConfig.from_dict(minimal("granite")), 8)
