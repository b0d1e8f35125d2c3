"""The engine against the plain one: unequal lengths, rows in turn, chunks, windows, stops, sampling state."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

import genesis
import genesis_models
from genesis.errors import NumericError, UsageError
from genesis_models.engine import EagerEngine, Engine, Request, Sampling, Token
from genesis_models.engine.device import DeviceEngine
from tests.models.golden import ENGINES, EXTRA, FAMILIES, QWEN, extra, golden
from tests.sampling import some_full
from tests.soak.generations import Held, generations, held

GREEDY = Sampling(0.0)


def prompts(count: int, vocabulary: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [
        rng.integers(0, vocabulary, n).tolist() for n in rng.permutation(np.linspace(1, longest, count).astype(int))
    ]


def by_request(tokens: Iterable[Token], count: int) -> list[list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for token in tokens:
        if token.id is not None:
            found[token.request].append(token.id)
    return [found[i] for i in range(count)]


@pytest.fixture(scope="module")
def model() -> genesis_models.CausalLM:
    return genesis_models.load(golden("qwen3-tied").folder)


@pytest.mark.parametrize("name", some_full([*QWEN, *FAMILIES, *EXTRA], ENGINES))
def test_batched_alone_and_eager_give_the_same_tokens(name: str) -> None:
    folder = (extra if name in EXTRA else golden)(name).folder
    model = genesis_models.load(folder, dtype="float32")
    count, draws = (
        (7, (GREEDY, Sampling(0.9, top_k=20, top_p=0.95, seed=3))) if name == "qwen2-tied" else (3, (GREEDY,))
    )
    ids = prompts(count, model.config.vocab_size)
    for sampling in draws:
        requests = [Request(each, sampling, 3 + i % 3, sequence=i) for i, each in enumerate(ids)]
        expected = by_request(EagerEngine(model).run(requests), len(ids))
        alone = [by_request(Engine(model, rows=1, capacity=60).run([each]), 1)[0] for each in requests]
        batched = by_request(Engine(model, rows=4, capacity=60, chunk=7).run(requests), len(ids))
        assert [len(each) for each in expected] == [each.max_tokens for each in requests]
        assert alone == expected
        assert batched == expected


def test_a_stretched_rope_in_a_batch_is_each_sequences_own() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    raw = {**heads, **sizes, "model_type": "llama", "initializer_range": 0.3, "rope_parameters": rope}
    model = genesis_models.build(raw, seed=1)
    requests = [Request(each, GREEDY, 12) for each in prompts(3, 320, 40)]
    expected = by_request(EagerEngine(model).run(requests), 4)
    assert by_request(Engine(model, rows=4, capacity=100, chunk=16).run(requests), 4) == expected


@pytest.mark.sample
@pytest.mark.parametrize("kind", [Engine, DeviceEngine])
@pytest.mark.parametrize("name", ["phi3-long", "phi3-beyond"])
def test_keys_are_computed_anew_where_longrope_changes_their_angles(name: str, kind: Any) -> None:
    """Each token is that of a pass over the whole sequence, whose length is what its angles depend on."""
    model = genesis_models.load((extra if name in EXTRA else golden)(name).folder)
    trained, context = model.config.packed_length, model.config.context_length
    rng, drawing = np.random.default_rng(1), Sampling(1.0, seed=4, repetition_penalty=1.2)
    lengths = (trained - 4, trained - 1, trained, trained + 1, 3)
    requests = [
        Request(rng.integers(0, 96, length).tolist(), GREEDY if i % 2 else drawing, most, sequence=i)
        for i, (length, most) in enumerate(zip(lengths, (8, 1, 2, 8, 200), strict=True))
    ]
    engine = kind(model, rows=2, capacity=context)
    tokens = list(engine.run(requests))
    found = by_request(tokens, 5)
    assert [len(each) for each in found] == [8, 1, 2, 8, context - 3]
    assert found == by_request(EagerEngine(model).run(requests), 5)
    assert {each.request: each.finish for each in tokens if each.finish} == dict.fromkeys(range(4), "length") | {
        4: "context"
    }
    for request, drawn in zip(requests, found, strict=True):
        for count, token in enumerate(drawn if request.sampling is GREEDY else ()):
            with genesis.no_grad():
                logits = model(genesis.tensor([[*request.ids, *drawn[:count]]])).numpy()[0, -1]
            assert logits[token] > logits.max() - 1e-4
    rest: dict[int, list[int | None]] = defaultdict(list)
    for each in engine.run(requests):
        rest[each.request].append(each.id)
        if each.request == 0 and len(rest[0]) == 5:  # it waits to be passed anew
            engine.cancel(0)
    assert rest[0] == found[0][:5] and all(rest[i] == found[i] for i in range(1, 5))


@pytest.mark.parametrize("kind", [Engine, DeviceEngine, EagerEngine])
def test_chances_beyond_the_trained_length_are_those_of_a_pass_over_all(kind: Any) -> None:
    model = genesis_models.load(golden("phi3-long").folder)
    ids = np.random.default_rng(1).integers(0, 96, model.config.packed_length - 2).tolist()
    how: dict[str, int] = {} if kind is EagerEngine else {"rows": 1, "capacity": 64}
    tokens = list(kind(model, log_probs=True, **how).run([Request(ids, GREEDY, 6)]))
    assert len(tokens) == 6
    for token in tokens:
        with genesis.no_grad():
            logits = model(genesis.tensor([ids])).numpy()[0, -1].astype(np.float64)
        assert token.id is not None and token.log_prob == pytest.approx(
            logits[token.id] - np.log(np.exp(logits).sum()), abs=1e-4
        )
        ids = [*ids, token.id]


def test_stop_ids_and_the_contexts_end_free_rows_for_the_next(model: genesis_models.CausalLM) -> None:
    model.train()
    drawing = Sampling(1.0, seed=1)
    free = by_request(EagerEngine(model).run([Request([1, 2, 3], drawing, 9)]), 1)[0]
    at = next(i for i, token in enumerate(free) if token not in free[:i] and i > 1)
    requests = [
        Request([1, 2, 3], drawing, 9, frozenset({free[at], 319})),
        Request([1] * 120, GREEDY, 1000),
        Request([1, 2, 3], GREEDY, 0),
        Request([1, 2, 3], drawing, 4),
    ]
    for engine in (Engine(model, rows=2, capacity=128), EagerEngine(model)):
        tokens = list(engine.run(iter(requests)))
        assert by_request(tokens, 4)[0] == free[:at]
        assert by_request(tokens, 4)[3] == free[:4]
        finished = {token.request: token.finish for token in tokens if token.finish}
        assert finished == {0: "stop", 1: "context", 2: "length", 3: "length"}
        assert len(by_request(tokens, 4)[1]) == 8
        assert model.training


def test_a_cancelled_request_gets_no_more(model: genesis_models.CausalLM) -> None:
    requests = [Request([i + 1], GREEDY, 5) for i in range(4)]
    expected = by_request(EagerEngine(model).run(requests), 4)
    for engine in (Engine(model, rows=2, capacity=8), EagerEngine(model)):
        found: list[Token] = []
        for token in engine.run(requests):
            found.append(token)
            if token.request == 1 and len(by_request(found, 4)[1]) == 2:
                engine.cancel(1)
        assert by_request(found, 4) == [each[:2] if i == 1 else each for i, each in enumerate(expected)]
        assert by_request(engine.run(requests), 4) == expected, "a later run cancels nothing"


def test_log_probabilities_are_those_of_the_logits(model: genesis_models.CausalLM) -> None:
    request = Request([5, 6, 7], Sampling(1.5, top_k=9, seed=2, repetition_penalty=1.3), 5)
    for engine in (Engine(model, rows=1, capacity=8, log_probs=True), EagerEngine(model, log_probs=True)):
        ids = [5, 6, 7]
        for token in engine.run([request]):
            with genesis.no_grad():
                logits = model(genesis.tensor([ids]))[0, -1].numpy().astype(np.float64)
            assert token.id is not None and token.log_prob is not None
            expected = logits[token.id] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert token.log_prob == pytest.approx(expected, abs=1e-5)
            ids.append(token.id)


def test_a_penalty_counts_prompt_and_continuation(model: genesis_models.CausalLM) -> None:
    """A penalty without bound forbids what was there; a sequence beside it is not touched."""
    prompt, plain = [1, 2, 3, 4], Request([9, 9], GREEDY, 12)
    penalized = Request(prompt, Sampling(0.0, repetition_penalty=1e6), 12)
    found = by_request(Engine(model, rows=2, capacity=40).run([penalized, plain]), 2)
    logits = model(genesis.tensor([prompt + found[0][:-1]])).detach().numpy()[0]
    for i, token in enumerate(found[0]):
        row, seen = logits[len(prompt) - 1 + i], prompt + found[0][:i]
        row[seen] = np.where(row[seen] > 0, row[seen] / 1e6, row[seen] * 1e6)
        assert token == row.argmax()
    assert found[1] == by_request(EagerEngine(model).run([plain]), 1)[0]


@pytest.mark.parametrize(
    "setting", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"min_p": 2.0}, {"repetition_penalty": 0.0}]
)
def test_impossible_settings(model: genesis_models.CausalLM, setting: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(setting))):
        list(Engine(model, rows=1, capacity=8).run([Request([1], Sampling(**{"temperature": 1.0} | setting), 2)]))  # type: ignore[arg-type]


def test_logits_that_are_no_numbers_say_where() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder)
    model.train()
    with genesis.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for engine in (Engine(model, rows=1, capacity=8), EagerEngine(model)):
        with pytest.raises(NumericError, match="logits are NaN") as caught:
            list(engine.run([Request([1, 2], GREEDY, 2)]))
        assert caught.value.where == "position 2"
        assert model.training


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what /proc shows")
def test_many_generations_leave_nothing_behind(model: genesis_models.CausalLM) -> None:
    """Of mixed lengths, some cancelled, refused or left in the middle; tests.soak.generations makes 10,000."""

    def after(count: int, start: int) -> Held:
        next(done for done in generations(model, start, longest=16, new=4) if done >= count)
        return held("cpu")

    with ThreadpoolController().limit(limits=1, user_api="blas"):  # of matrices so small
        before = after(250, 0)
        assert after(200, 50).grown(before, objects=50) == []


def test_what_grows_is_named() -> None:
    before = Held(10.0, 3, 1, 100, 0, 0, 0)
    assert Held(50.0, 4, 1, 100, 0, 0, 0).grown(before) == ["rss: 10.0 became 50.0", "descriptors: 3 became 4"]
