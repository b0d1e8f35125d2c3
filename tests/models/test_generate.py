"""Drawing tokens: greedy, seeds, top-k and top-p, stopping, limits."""

from __future__ import annotations

import weakref
from collections import Counter

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.errors import NumericError, UsageError
from genesis_models.blocks import Rotary
from genesis_models.config import ModelConfig
from genesis_models.engine import Sampling, choose
from tests.models.continued import continue_ids
from tests.models.golden import golden


def draws(sampling: Sampling, logits: np.ndarray, count: int = 2000) -> Counter[int]:
    return Counter(choose(logits, sampling, position) for position in range(count))


DRAWS = 8000
LOGITS = np.log(np.array([0.1, 0.5, 0.25, 0.15]))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(Sampling(0.0), LOGITS, 10) == {1: 10}


def test_draws_follow_the_probabilities() -> None:
    found = draws(Sampling(1.0, seed=5), LOGITS, DRAWS)
    for token, p in enumerate((0.1, 0.5, 0.25, 0.15)):
        assert abs(found[token] - DRAWS * p) < 5 * (DRAWS * p * (1 - p)) ** 0.5


def test_temperature_sharpens() -> None:
    found = draws(Sampling(0.5, seed=5), LOGITS, DRAWS)
    squares = np.array([0.1, 0.5, 0.25, 0.15]) ** 2
    assert abs(found[1] / DRAWS - squares[1] / squares.sum()) < 0.02


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draws(Sampling(1.0, top_k=2), LOGITS)) == {1, 2}
    assert set(draws(Sampling(1.0, top_p=0.6), LOGITS)) == {1, 2}
    assert set(draws(Sampling(1.0, top_p=0.4), LOGITS)) == {1}
    assert set(draws(Sampling(1.0, top_k=10**6, top_p=1.0), LOGITS)) == {0, 1, 2, 3}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    first = [choose(LOGITS, Sampling(1.0, seed=1), p) for p in range(50)]
    assert first == [choose(LOGITS, Sampling(1.0, seed=1), p) for p in range(50)]
    assert first != [choose(LOGITS, Sampling(1.0, seed=2), p) for p in range(50)]


def test_nan_is_an_error() -> None:
    with pytest.raises(NumericError, match="NaN"):
        choose(np.array([0.0, np.nan]), Sampling(1.0), 0)


def test_greedy_generation_equals_calling_the_model_each_time() -> None:
    reference = golden("qwen3-tied")
    model = genesis_models.load(reference.folder)
    model.train()
    prompt = [int(i) for i in reference.arrays["input_ids"][0, :5]]
    found = continue_ids(model, prompt, Sampling(0.0), 12)
    tokens = list(prompt)
    for _ in range(12):
        with genesis.no_grad():
            tokens.append(int(model(genesis.tensor([tokens]))[0, -1].argmax()))
    assert found == tokens[5:]
    assert model.training


def test_generation_ends_at_a_stop_token_and_at_the_context() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder)
    free = continue_ids(model, [1, 2, 3], Sampling(0.0), 10)
    assert continue_ids(model, [1, 2, 3], Sampling(0.0), 10, frozenset({free[0]})) == []
    assert len(continue_ids(model, [1, 2, 3], Sampling(1.0), 10_000)) == 128 - 3
    with pytest.raises(UsageError, match="128"):
        continue_ids(model, [1] * 128, Sampling(0.0), 1)
    with pytest.raises(UsageError, match="no tokens"):
        continue_ids(model, [], Sampling(0.0), 1)


def test_generation_leaves_the_random_generator_alone() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder)
    before = genesis.random.get_state()
    continue_ids(model, [1], Sampling(1.0), 3)
    assert genesis.random.get_state() == before


def test_dynamic_rope_generates_beyond_the_trained_length() -> None:
    """The ids are what transformers 5.23 gave for this model, saved and loaded there, in a run of 40 greedy tokens."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    raw = {**heads, **sizes, "model_type": "llama", "initializer_range": 0.3, "rope_parameters": rope}
    model = genesis_models.build(raw, seed=1)
    prompt = [272, 203, 163, 86, 98, 13, 24, 5, 56, 260, 207, 292, 161, 194, 310, 233, 202, 173, 179, 299, 88, 261, 214]
    expected = [67, 73, 150, 305, 302, 13, 266, 278, 121, 255, 129, 142, 169, 130, 13, 165, 155, 159, 0, 264, 277, 110]
    expected += [225, 145, 64, 244, 70, 110, 45, 206, 29, 260, 76, 90, 193, 32, 187, 165, 27, 55]
    assert continue_ids(model, [*prompt, 0], Sampling(0.0), 40) == expected
    assert len(continue_ids(model, [*prompt, 0], Sampling(0.0), 1000)) == 4 * 32 - 24


def test_tables_of_stretched_angles_go_when_another_length_comes() -> None:
    """Each length has its own on a device: they are not kept for all lengths that a text comes through."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = ModelConfig.from_dict({**sizes, **heads, "model_type": "llama", "rope_parameters": rope})
    rotary, kept = Rotary(config), []
    for length in (40, 41, 40):
        cos, sin = rotary.span(0, length, genesis.Device("cpu"))
        expected = rotary(np.arange(length), genesis.Device("cpu"))
        assert np.array_equal(cos.numpy(), expected[0].numpy()) and np.array_equal(sin.numpy(), expected[1].numpy())
        memory = cos.numpy().base
        assert isinstance(memory, np.ndarray)
        kept.append(weakref.ref(memory))
        del cos, sin, expected, memory
    assert [each() is not None for each in kept] == [False, False, True]
