"""Llama, sliding windows, rotary scalings and biases against transformers; caches, document borders, recomputation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.backend import CPU
from genesis.errors import ConfigError, ModelError
from genesis_models.blocks import CausalLM, KeyValueCache, Rotary, tables
from genesis_models.config import ModelConfig
from genesis_models.registry import PRESETS, parameter_count, preset
from tests.models.golden import EXTRA, FAMILIES, FIXTURES, NAMES, extra, golden, relative_error

ROPES = json.loads((FIXTURES / "rope.json").read_text())
# Parameters of the published models, as transformers counts them.
PARAMETERS = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
}


def ids(array: Any) -> genesis.Tensor:
    return genesis.from_numpy(np.asarray(array, np.int64))


@pytest.mark.parametrize("name", EXTRA)
def test_logits_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    reference = extra(name)
    model = genesis_models.load(reference.folder)
    tokens = ids(reference.arrays["input_ids"])
    with genesis.no_grad():
        assert np.abs(model(tokens).numpy() - reference.arrays["logits"]).max() < 1e-4
    loss = model.loss(tokens, tokens)
    assert loss.item() == pytest.approx(float(reference.arrays["loss"]), abs=1e-5)
    loss.backward()
    expected = reference.group("grad")
    errors = {n: relative_error(p.grad.numpy(), expected[n]) for n, p in model.named_parameters()}
    assert errors.keys() == expected.keys()
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("row", ROPES, ids=lambda row: f"{row['name']}-{row['length']}")
def test_rotary_tables_are_those_of_transformers(row: dict[str, Any]) -> None:
    config = ModelConfig.from_dict({**row["config"], "model_type": "llama"})
    cos, sin = tables(config, row["length"])
    # An angle is a float32 product of position and frequency: half a unit of rounding each.
    bound = 4 * np.finfo(np.float32).eps * row["length"]
    np.testing.assert_allclose(cos[row["rows"]], row["cos"], atol=bound)
    np.testing.assert_allclose(sin[row["rows"]], row["sin"], atol=bound)


def test_a_shorter_stretched_sequence_after_a_longer_one_has_its_own_angles() -> None:
    """Under dynamic scaling every length beyond the trained one has its own frequencies."""
    row = next(row for row in ROPES if "dynamic" in row["name"])
    config = ModelConfig.from_dict({**row["config"], "model_type": "llama", "max_position_embeddings": 64})
    rotary = Rotary(config)
    for length in (128, 96, 64, 128, 80):
        fresh = tables(config, length)
        for device_table in (rotary(np.arange(length), CPU), rotary.span(0, length, CPU)):
            for got, expected in zip(device_table, fresh, strict=True):
                np.testing.assert_array_equal(got.numpy(), expected, err_msg=str(length))
    assert not np.array_equal(tables(config, 128)[0][:96], tables(config, 96)[0])


def test_rotary_scalings_differ_from_each_other() -> None:
    first = {row["name"]: np.array(row["cos"]) for row in ROPES if row["length"] == 200}
    assert len({t.tobytes() for t in first.values()}) == len(first) >= 6


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_sizes(name: str) -> None:
    assert parameter_count(ModelConfig.from_dict(preset(name))) == PARAMETERS[name]


def test_every_preset_is_counted_here_and_an_unknown_one_is_refused() -> None:
    assert set(PRESETS) == set(PARAMETERS)
    with pytest.raises(ConfigError, match=r"13B.*use one of 0\.5B"):
        preset("13B")


def cached_logits(model: CausalLM, tokens: np.ndarray, pieces: list[int]) -> np.ndarray:
    """Logits of `tokens` fed in pieces through a cache."""
    cache = KeyValueCache(model.config, len(tokens), tokens.shape[1], genesis.float32, genesis.Device("cpu"))
    found, begin = [], 0
    with genesis.no_grad():
        for count in pieces:
            found.append(model(ids(tokens[:, begin : begin + count]), cache=cache).numpy())
            begin += count
    return np.concatenate(found, axis=1)


@pytest.mark.sample
@pytest.mark.parametrize("name", [*NAMES, *EXTRA])
@pytest.mark.parametrize("pieces", [[20], [7, 13], [1] * 20, [12, 1, 1, 6]], ids=str)
def test_a_cache_changes_nothing(name: str, pieces: list[int]) -> None:
    reference = golden(name) if name in NAMES else extra(name)
    model = genesis_models.load(reference.folder)
    tokens = reference.arrays["input_ids"][:, :20]
    if model.config.regime(20):  # keys of a shorter sequence have other angles: the engine computes them anew
        pieces = [20] if len(pieces) == 1 else [13, *[1] * 7]
    with genesis.no_grad():
        whole = model(ids(tokens)).numpy()
    np.testing.assert_allclose(cached_logits(model, tokens, pieces), whole, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-window", *FAMILIES])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    reference = golden(name) if name in NAMES else extra(name)
    model = genesis_models.load(reference.folder)
    tokens = reference.arrays["input_ids"][0, :20]
    lengths = [6, 1, 9, 4]
    positions = np.concatenate([np.arange(n) for n in lengths])
    with genesis.no_grad():
        packed = model(ids(tokens[None]), position_ids=ids(positions[None])).numpy()[0]
        begin = 0
        for n in lengths:
            alone = model(ids(tokens[None, begin : begin + n])).numpy()[0]
            np.testing.assert_allclose(packed[begin : begin + n], alone, atol=2e-5)
            begin += n
        leaking = model(ids(tokens[None])).numpy()[0]
    assert np.abs(leaking[6:] - packed[6:]).max() > 1e-2, "the check would not see a leak"


def test_recomputation_gives_the_same_gradients_in_less_memory() -> None:
    from genesis.backend.cpu import pool

    config = {
        **json.loads((FIXTURES / "qwen3-tied/config.json").read_text()),
        "num_hidden_layers": 6,
        "layer_types": None,
    }
    tokens = ids(np.random.default_rng(0).integers(0, 320, (4, 96)))
    found, peaks = [], []
    for how in ("none", "selective", "full"):
        model = genesis_models.build(config, seed=3)
        model.activation_checkpointing = how
        pool.max_allocated = pool.allocated
        before = pool.allocated
        model.loss(tokens, tokens).backward()
        peaks.append(pool.max_allocated - before)
        found.append({n: p.grad.numpy().copy() for n, p in model.named_parameters()})
    for name, gradient in found[0].items():
        np.testing.assert_array_equal(gradient, found[1][name])
        np.testing.assert_array_equal(gradient, found[2][name])
    assert peaks[1] < 0.9 * peaks[0], peaks
    assert peaks[2] < 0.6 * peaks[0], peaks


def test_a_model_built_twice_from_a_seed_is_the_same_and_another_seed_differs() -> None:
    config = json.loads((FIXTURES / "qwen3-tied/config.json").read_text())
    first, second, other = (genesis_models.build(config, seed=s) for s in (1, 1, 2))
    pairs = zip(first.parameters(), second.parameters(), other.parameters(), strict=True)
    for a, b, c in pairs:
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())
        if a.ndim == 2:
            assert not np.array_equal(a.detach().numpy(), c.detach().numpy())
            assert a.detach().numpy().std() == pytest.approx(0.02, rel=0.1)


def test_bfloat16_stays_near_float32() -> None:
    reference = golden("qwen3-tied")
    model = genesis_models.load(reference.folder, dtype="bfloat16")
    assert model.head_weight.dtype is genesis.bfloat16
    loss = model.loss(ids(reference.arrays["input_ids"]), ids(reference.arrays["labels"]))
    # 8 bits of mantissa: each of about ten roundings a layer moves logits by up to 2^-9 of their size.
    assert loss.item() == pytest.approx(float(reference.arrays["loss"]), rel=0.01)


GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"hidden_size": "16"}, 'hidden_size is "16"'),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": True}, "hidden_size is true"),
    ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "not a multiple"),
    ({"hidden_size": 18}, "not a multiple of num_attention_heads"),
    ({"head_dim": 5}, "head_dim 5 is odd"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_dropout": 1.5}, "attention_dropout"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing, but rope_type linear needs it"),
    ({"rope_theta": "many"}, "rope_theta"),
    ({"rope_scaling": [1]}, "rope_scaling is a list"),
    ({"is_causal": False}, "is_causal is false; Genesis supports true"),
    ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias is true; Genesis supports false for qwen2"),
    ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias is true; Genesis supports false for qwen3"),
    ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "has no rope_theta"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    (
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        "layer_types lists 1 layers",
    ),
    ({"model_type": "qwen2", "layer_types": ["odd", "full_attention"]}, "layer_types"),
    ({"model_type": "mamba\x1b[31m"}, "mamba"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_configs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    ModelConfig.from_dict(GOOD)
    with pytest.raises(ModelError, match=message) as caught:
        genesis_models.build({**GOOD, **change})
    assert caught.value.exit_code == 5
    assert "\x1b" not in str(caught.value)


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_rope_scaling_comes_before_rope_parameters() -> None:
    """As in transformers; a folder of transformers 5 has the second, and who extends its context may add the first."""
    both = GOOD | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e6}
    found = ModelConfig.from_dict(both | {"rope_scaling": YARN}).rope
    assert (found.kind, found.theta, found.parameters["factor"]) == ("yarn", 1e6, 4.0)
    for none in (None, {}):
        assert ModelConfig.from_dict(both | {"rope_scaling": none}).rope.theta == 5e5
    saved = GOOD | ModelConfig.from_dict(both | {"rope_scaling": YARN}).rope_json()
    older, newer = (ModelConfig.from_dict(saved | {key: None}).rope for key in ("rope_parameters", "rope_scaling"))
    assert older.json() == newer.json() == found.json()


def test_gemmas_full_layers_have_what_rope_scaling_says() -> None:
    raw = GOOD | {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    raw["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": None}
    full, local = ModelConfig.from_dict(raw).ropes
    assert (full.kind, full.theta, full.parameters["factor"]) == ("linear", 5e5, 8.0)
    assert (local.kind, local.theta) == ("default", 1e4)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_length_beside_the_scaling_comes_first(kind: str) -> None:
    own = {**YARN, "rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    named = ModelConfig.from_dict(GOOD | {"rope_scaling": own, "original_max_position_embeddings": 8}).rope
    assert named.parameters["original_max_position_embeddings"] == 8
    del own["original_max_position_embeddings"]
    assert ModelConfig.from_dict(GOOD | {"rope_scaling": own, "original_max_position_embeddings": 8}).rope == named


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_window_is_4096_where_none_is_named(family: str) -> None:
    raw = GOOD | {"model_type": family, "use_sliding_window": True, "max_window_layers": 1}
    assert ModelConfig.from_dict(raw).layer_windows == (0, 4096)
    assert ModelConfig.from_dict(raw | {"sliding_window": None}).layer_windows == (0, 0)
    assert ModelConfig.from_dict(raw | {"use_sliding_window": False}).layer_windows == (0, 0)


@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "phi3-long"), "qwen2-window"])
def test_answers_that_share_a_prompt_have_the_gradients_of_answers_apart(name: str) -> None:
    """phi3-long is left out: its angles depend on the longest sequence of a batch."""
    model = genesis_models.load((golden(name) if name in NAMES else extra(name)).folder)
    rng = np.random.default_rng(0)
    before, prompt, *answers = (rng.integers(0, model.config.vocab_size, count) for count in (5, 11, 9, 14))
    ids = np.concatenate([before, prompt, answers[0], prompt[-1:], answers[1]])
    second, places = 5 + 11 + 9, np.arange(len(ids))
    positions = np.zeros((len(ids), 4), np.int64)
    positions[:, 0] = np.concatenate([np.arange(5), np.arange(11 + 9), np.arange(10, 11 + 14)])
    positions[5:, 1], positions[second:, 2:] = 5, (5 + 10, second)
    together = [(ids, np.where((places >= 5 + 11) & (places != second), ids, -100), positions)]
    apart = [(own := np.concatenate([prompt, x]), np.r_[[-100] * 11, x], np.arange(len(own))) for x in answers]
    found = []
    for rows in (together, apart):
        model.zero_grad()
        for row in rows:
            model.log_probs(*(genesis.from_numpy(x[None]) for x in row)).sum().backward()
        found.append(np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None]))
    assert relative_error(*found) < 1e-5
