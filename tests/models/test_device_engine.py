"""The engine of GPUs with its steps called one by one on the CPU: the same tokens as the plain engine, read late."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.backend.cpu import pool
from genesis.errors import NumericError, OutOfMemoryError, UsageError
from genesis_cli.session.generation import _told_width
from genesis_models.adapters import AdapterConfig, apply_adapters
from genesis_models.blocks import Rotary
from genesis_models.engine import (
    EagerEngine,
    Request,
    Sampling,
    Token,
    device,
    device_cache,
    device_rows,
)
from genesis_models.engine.device import DeviceEngine
from genesis_models.weights import quantize
from tests.models.golden import ENGINES, EXTRA, FAMILIES, QWEN, extra, golden, relative_error
from tests.models.test_engine import GREEDY, by_request, prompts
from tests.sampling import some_full


def held(model: genesis_models.CausalLM) -> device_rows.DeviceRows:
    """What the last run with a model left."""
    return device_rows._kept[model]


def rows_of(engine: DeviceEngine) -> int:
    """How many it has, where there was no memory for all: these stay with it."""
    assert engine._held is not None
    return engine._held.cache.rows


def last_logits(model: genesis_models.CausalLM) -> np.ndarray:
    """Of the one kind of step that the last run made, `[B, V]`."""
    (step,) = held(model).steps.values()
    assert step.logits is not None
    return step.logits.float().cpu().numpy()


@pytest.fixture(scope="module")
def model() -> genesis_models.CausalLM:
    return genesis_models.load(golden("qwen3-tied").folder)


@pytest.mark.parametrize("name", some_full([*QWEN, *FAMILIES, *EXTRA], ENGINES))
def test_batched_and_alone_give_the_tokens_of_the_plain_engine(name: str) -> None:
    model = genesis_models.load((extra if name in EXTRA else golden)(name).folder, dtype="float32")
    count, draws = (
        (7, (GREEDY, Sampling(0.9, top_k=20, top_p=0.95, seed=3))) if name == "qwen2-tied" else (3, (GREEDY,))
    )
    ids = prompts(count, model.config.vocab_size)
    batched, single = (DeviceEngine(model, rows=n, capacity=60, chunk=c) for n, c in ((5, 7), (1, 64)))
    for sampling in draws:
        requests = [Request(each, sampling, 3 + i % 3, sequence=i) for i, each in enumerate(ids)]
        expected = by_request(EagerEngine(model).run(requests), len(ids))
        assert [len(each) for each in expected] == [each.max_tokens for each in requests]
        assert by_request(batched.run(requests), len(ids)) == expected
        assert [by_request(single.run([each]), 1)[0] for each in requests] == expected


def test_a_stretched_rope_is_each_sequences_own() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    raw = {**heads, **sizes, "model_type": "llama", "initializer_range": 0.3, "rope_parameters": rope}
    model = genesis_models.build(raw, seed=1)
    requests = [Request(each, GREEDY, 12) for each in prompts(3, 320, 40)]
    expected = by_request(EagerEngine(model).run(requests), 4)
    for chunk in (16, 64):  # the stretched prompt in parts, and in one that has room for others
        assert by_request(DeviceEngine(model, rows=4, capacity=100, chunk=chunk).run(requests), 4) == expected
    rotary = Rotary(model.config)
    for table, rows in zip(rotary.last(50), rotary.rows(np.arange(50)[:, None]), strict=True):
        np.testing.assert_array_equal(table, rows.numpy()[:, 0])


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
        Request([1, 2, 3], drawing, 9, frozenset({*range(320, 340), free[at]})),  # more than the device looks for
    ]
    engine = DeviceEngine(model, rows=2, capacity=128)
    for _ in range(2):
        tokens = list(engine.run(iter(requests)))
        found = by_request(tokens, 5)
        assert found[0] == found[4] == free[:at]
        assert found[3] == free[:4]
        assert len(found[1]) == 8
        finished = {token.request: token.finish for token in tokens if token.finish}
        assert finished == {0: "stop", 1: "context", 2: "length", 3: "length", 4: "stop"}
        assert model.training


def test_the_host_launches_ahead_and_no_step_that_nobody_needs(
    model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of steps are on the device before tokens are read; lengths are known, so none is in vain."""
    events: list[str] = []
    launch, results = device_rows.Step.__call__, device_rows.Reading.results
    monkeypatch.setattr(device_rows.Step, "__call__", lambda self: (events.append("step"), launch(self))[1])
    monkeypatch.setattr(device_rows.Reading, "results", lambda self: (events.append("read"), results(self))[1])
    engine = DeviceEngine(model, rows=2, capacity=64)
    requests = [Request([1, 2], GREEDY, 12), Request([3], GREEDY, 10)]
    assert list(map(len, by_request(engine.run(requests), 2))) == [12, 10]
    sizes = ["".join(group) for group in (list(each) for _, each in itertools.groupby(events))]
    assert events.count("step") == 12
    assert sizes[:4] == ["step" * 5, "read", "step" * 4, "read"]  # 1, 4 | 4 | ...
    events.clear()
    assert len(by_request(engine.run([Request([i], GREEDY, 3) for i in range(4)]), 4)) == 4
    assert events.count("step") == 6  # both rows are given to the next request when their last step was launched


@pytest.mark.full
def test_rows_that_become_free_are_filled_together(
    model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 36 to 40 rows in use, prompts wait for 2 steps and share a pass; with 8, a row is filled at once."""
    filled, pass_all = list[int](), device.Prompts.pass_all
    monkeypatch.setattr(device.Prompts, "pass_all", lambda self, p: (filled.append(len(p)), pass_all(self, p))[1])
    requests = [Request([i % 50 + 1, 2], GREEDY, 2 + i % 16) for i in range(80)]
    expected = by_request(EagerEngine(model).run(requests), 80)
    for rows, least in ((40, 4.0), (8, 1.0)):
        filled.clear()
        engine = DeviceEngine(model, rows=rows, capacity=32)
        assert by_request(engine.run(requests), 80) == expected
        assert filled[0] == rows and sum(filled) == 80
        refills = filled[1 : len(filled) // 2]
        assert (sum(refills) / len(refills) >= least) and (rows == 40 or 1 in refills)


@pytest.mark.parametrize("count", [5, 9])  # with 5 all steps are launched when the second token is read
def test_a_cancelled_request_gets_no_more(model: genesis_models.CausalLM, count: int) -> None:
    requests = [Request([i + 1], GREEDY, count) for i in range(5)]
    expected = by_request(EagerEngine(model).run(requests), 5)
    engine = DeviceEngine(model, rows=2, capacity=16)
    for _ in range(2):
        found: dict[int, list[Any]] = defaultdict(list)
        for token in engine.run(requests):
            found[token.request].append(token.id)
            if token.request == 1 and len(found[1]) == 2:
                engine.cancel(1)
        assert [found[i] for i in range(5)] == [each[:2] if i == 1 else each for i, each in enumerate(expected)]


def test_a_request_that_is_cancelled_while_the_next_is_taken_never_runs(model: genesis_models.CausalLM) -> None:
    """A server reads its connection whenever a request is taken, so that a cancellation may come before the prompt."""
    requests = [Request([i + 1], GREEDY, 5) for i in range(4)]
    expected = by_request(EagerEngine(model).run(requests), 4)
    engine = DeviceEngine(model, rows=3, capacity=16)

    def arriving() -> Iterator[Request]:
        for i, each in enumerate(requests):
            if i == 2:
                engine.cancel(0)
                engine.cancel(1)
            yield each

    for _ in range(2):
        assert by_request(engine.run(arriving()), 4) == [[], [], *expected[2:]]


def drawn_requests(rng: np.random.Generator, vocabulary: int) -> list[Request]:
    """Some of all kinds, a few of which ask for nothing, stop at once or fill the context."""

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    found = []
    for _ in range(int(rng.integers(1, 9))):
        ids, stop = (rng.integers(0, vocabulary, int(n)).tolist() for n in (rng.integers(1, 50), one_of(0, 1, 2, 18)))
        sampling = Sampling(
            one_of(0.0, 0.7, 1.3), one_of(None, 5, 1), one_of(None, 0.9), int(rng.integers(5)), one_of(0.0, 0.05),
            one_of(1.0, 1.0, 1.2),
        )  # fmt: skip
        found.append(Request(ids, sampling, one_of(0, 1, 2, 5, 11, 30), frozenset(stop), int(rng.integers(9))))
    return found


def test_requests_of_all_kinds_give_what_the_plain_engine_gives() -> None:
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    raw = {**sizes, **heads, "model_type": "qwen2", "tie_word_embeddings": True, "initializer_range": 0.3}
    model, rng = genesis_models.build(raw, seed=1), np.random.default_rng(3)
    for _ in range(20):
        requests = drawn_requests(rng, 24)
        cancelled = {i: int(rng.integers(1, 5)) for i in range(len(requests)) if rng.random() < 0.2}
        found = []
        ours = DeviceEngine(model, rows=int(rng.integers(1, 6)), capacity=64, chunk=int(rng.choice([5, 16, 200])))
        for engine in (EagerEngine(model), ours):
            tokens: dict[int, list[tuple[int | None, str | None]]] = defaultdict(list)
            for token in engine.run(iter(requests)):
                tokens[token.request].append((token.id, token.finish))
                if cancelled.get(token.request) == len(tokens[token.request]):
                    engine.cancel(token.request)
            found.append(tokens)
        assert found[0] == found[1]


def test_a_run_that_is_left_does_not_disturb_the_next(model: genesis_models.CausalLM) -> None:
    model.train()
    engine = DeviceEngine(model, rows=3, capacity=64)
    requests = [Request([i + 1, 5], GREEDY, 20) for i in range(3)]
    run = engine.run(requests)
    assert [next(run).request for _ in range(4)] == [0, 1, 2, 0]
    run.close()
    assert model.training
    expected = by_request(EagerEngine(model).run(requests[1:]), 2)
    assert by_request(engine.run(requests[1:]), 2) == expected


def test_log_probabilities_and_penalties_are_those_of_the_plain_engine(model: genesis_models.CausalLM) -> None:
    plain = Request([5, 6, 7], Sampling(1.5, top_k=9, seed=2), 9)
    penalized = Request([1, 2, 3, 4], Sampling(0.0, repetition_penalty=1e6), 12)
    requests = [plain, penalized, plain]

    def listed(engine: Any) -> list[list[Token]]:
        found: dict[int, list[Token]] = defaultdict(list)
        for token in engine.run(requests):
            found[token.request].append(token)
        return [found[i] for i in range(3)]

    expected = listed(EagerEngine(model, log_probs=True))
    for ours, theirs in zip(listed(DeviceEngine(model, rows=2, capacity=64, log_probs=True)), expected, strict=True):
        assert [(t.id, t.finish) for t in ours] == [(t.id, t.finish) for t in theirs]
        assert [t.log_prob for t in ours] == pytest.approx([t.log_prob for t in theirs], abs=1e-5)


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_that_are_not_merged(model: genesis_models.CausalLM, use_dora: bool) -> None:
    adapted = genesis_models.load(golden("qwen3-tied").folder)
    apply_adapters(adapted, AdapterConfig(r=4, alpha=8.0, use_dora=use_dora))
    with genesis.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.uniform_(-0.2, 0.2)
    requests = [Request(each, GREEDY, 6) for each in prompts(3, 320, 12)]
    engine = DeviceEngine(adapted, rows=3, capacity=32)
    assert by_request(EagerEngine(adapted).run(requests), 3) != by_request(EagerEngine(model).run(requests), 3)
    for _ in range(2):
        assert by_request(engine.run(requests), 3) == by_request(EagerEngine(adapted).run(requests), 3)
        with genesis.no_grad():
            adapted.model.layers[0].self_attn.q_proj.weight.mul_(1.5)


def test_a_step_loads_weights_early_where_they_are_parameters(model: genesis_models.CausalLM) -> None:
    """Not where a step computes or copies some: of adapters, in layers of a user's own, or transposed."""
    assert device_rows.has_fixed_weights(model)
    assert device_rows.has_fixed_weights(quantize(genesis_models.load(golden("qwen3-tied").folder), "int8"))
    adapted, watched, moved = (genesis_models.load(golden("qwen3-tied").folder) for _ in range(3))
    apply_adapters(adapted, AdapterConfig(r=4, alpha=8.0))
    watched.model.layers[0].mlp.down_proj = type("Own", (genesis.nn.Linear,), {})(8, 8)
    weight = moved.model.layers[0].self_attn.o_proj.weight
    moved.model.layers[0].self_attn.o_proj.weight = genesis.nn.Parameter(weight.detach().t().contiguous().t())
    turned = quantize(genesis_models.load(golden("qwen3-tied").folder), "int8")
    layer = turned.model.layers[0].self_attn.o_proj
    layer.codes = layer.codes.t().contiguous().t()
    for each in (adapted, watched, moved, turned):
        assert not device_rows.has_fixed_weights(each)


def test_a_changed_norm_with_an_offset_counts_in_the_next_run() -> None:
    """Its scale is made once for all steps of a run."""
    model, fresh = (genesis_models.load(golden("gemma3").folder, dtype="float32") for _ in range(2))
    request = Request(prompts(1, model.config.vocab_size)[0], GREEDY, 8)
    engine, found = DeviceEngine(model, rows=1, capacity=60), []
    found.append(by_request(engine.run([request]), 1))
    norms = [each for each in model.modules() if isinstance(each, genesis.nn.RMSNorm)]
    with genesis.no_grad():
        for norm in norms:
            norm.weight.copy_(genesis.randn(*norm.weight.shape))
        fresh.load_state_dict(model.state_dict())
    found.append(by_request(engine.run([request]), 1))
    assert found[0] != found[1] == by_request(EagerEngine(fresh).run([request]), 1)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_weights_in_8_bits(kind: Any) -> None:
    model = quantize(genesis_models.load(golden("qwen3-tied").folder), kind)
    requests = [Request(each, GREEDY, 6) for each in prompts(3, 320, 12)]
    expected = by_request(EagerEngine(model).run(requests), 3)
    assert by_request(DeviceEngine(model, rows=3, capacity=32).run(requests), 3) == expected


def test_a_cache_in_e4m3_keeps_logits_near(model: genesis_models.CausalLM) -> None:
    requests = [Request(each, GREEDY, 5) for each in prompts(3, 320, 30)]
    for chunk in (64, 7):
        engine = DeviceEngine(model, rows=3, capacity=64, chunk=chunk, cache="fp8")
        tokens = by_request(engine.run(requests), 3)
        assert held(model).cache.data.dtype.itemsize == 1
        for row, request in enumerate(requests):
            with genesis.no_grad():
                whole = model(genesis.tensor([[*request.ids, *tokens[row][:-1]]]))[0, -1].numpy()
            assert 1e-6 < relative_error(last_logits(model)[row], whole) < 0.1


def test_logits_that_are_no_numbers_say_where() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder)
    model.train()
    engine = DeviceEngine(model, rows=2, capacity=8)
    with genesis.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NumericError, match="logits are NaN") as caught:
        list(engine.run([Request([1, 2], GREEDY, 2)]))
    assert caught.value.where == "position 2"
    assert model.training


def test_fewer_rows_where_memory_has_no_room(model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = device_cache.genesis.empty
    requests = [Request(each, GREEDY, 4) for each in prompts(5, 320, 20)]
    expected = by_request(EagerEngine(model).run(requests), 5)
    most = [3]

    def empty(*shape: Any, **how: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], tuple) and shape[0][2] > most[0]:
            raise OutOfMemoryError("no room")
        return fill(*shape, **how)

    monkeypatch.setattr(device_cache.genesis, "empty", empty)
    engine = DeviceEngine(model, rows=8, capacity=600)
    for _ in range(2):
        assert by_request(engine.run(requests), 5) == expected
        assert rows_of(engine) == 2
    most[0] = 0
    with pytest.raises(OutOfMemoryError) as caught:
        list(DeviceEngine(model, rows=8, capacity=1200).run(requests))
    assert str(caught.value).endswith(device_rows.ADVICE)


def test_fewer_rows_where_a_cache_leaves_no_room_for_steps(
    model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [False, False, True]
    monkeypatch.setattr(device_rows, "has_room", lambda device, more: answers.pop(0))
    requests = [Request(each, GREEDY, 4) for each in prompts(5, 320, 20)]
    expected = by_request(EagerEngine(model).run(requests), 5)
    engine = DeviceEngine(model, rows=12, capacity=900)
    assert by_request(engine.run(requests), 5) == expected
    assert (rows_of(engine), engine.width, engine.rows) == (3, 3, 12)
    told: list[str] = []
    assert not list(_told_width(iter(()), engine, told.append))
    assert told == ["memory held 3 of 12 sequences at a time; --kv-cache fp8 or a lower --max-tokens holds more"]
    assert not answers
    answers = [False, False]
    engine = DeviceEngine(model, rows=4, capacity=1400)
    assert len(by_request(engine.run(requests), 5)) == 5
    assert rows_of(engine) == 1  # with one row memory is tried
    assert not answers
    answers = [True]
    list(DeviceEngine(model, rows=4, capacity=1400).run(requests))
    assert held(model).cache.rows == 4  # memory has room again


def test_short_prompts_share_a_forward_pass_and_long_ones_pass_in_chunks(
    model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees itself alone: hidden states are those of a pass by itself."""
    passed: list[tuple[int, int]] = []
    forward = device.Prompts._forward

    def noted(self: Any, values: np.ndarray, *more: Any) -> None:
        is_token = values[0] > 0  # padding is 0
        passed.append((values.shape[1], len(np.unique(values[1][is_token])) if len(values) > 1 else 1))
        forward(self, values, *more)

    monkeypatch.setattr(device.Prompts, "_forward", noted)
    requests = [Request(each, GREEDY, 2) for each in ([1], [2, 3, 4], [*range(1, 71)], [5] * 9, [6] * 20, [7] * 32)]
    expected = by_request(EagerEngine(model).run(requests), 6)
    assert by_request(DeviceEngine(model, rows=6, capacity=80, chunk=32).run(requests), 6) == expected
    assert passed == [(16, 1), (32, 1), (32, 1), (16, 1), (16, 1), (32, 1), (32, 1)]
    passed.clear()
    assert by_request(DeviceEngine(model, rows=6, capacity=80).run(requests), 6) == expected
    assert passed == [(192, 5)]  # the first prompt's only token is for a step


def test_prompts_pass_in_smaller_parts_where_memory_is_short(
    model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request([i + 1] * 100, GREEDY, 3) for i in range(3)]
    expected = by_request(EagerEngine(model).run(requests), 3)
    forward, most, lengths = device.Prompts._forward, 150, list[int]()

    def limited(self: Any, values: np.ndarray, *more: Any) -> None:
        lengths.append(values.shape[1])
        if values.shape[1] > most:
            raise OutOfMemoryError("no room")
        forward(self, values, *more)

    monkeypatch.setattr(device.Prompts, "_forward", limited)
    assert by_request(DeviceEngine(model, rows=3, capacity=128).run(requests), 3) == expected
    assert lengths == [384, 128, 128, 128]
    most = 10
    with pytest.raises(OutOfMemoryError) as caught:
        list(DeviceEngine(model, rows=3, capacity=128).run(requests))
    assert "fewer tokens" in (caught.value.next or "")
    monkeypatch.setattr(device, "FEWEST", 16)  # parts of the fewest tokens fail, too
    with pytest.raises(OutOfMemoryError):
        list(DeviceEngine(model, rows=3, capacity=128).run(requests))


def test_rows_are_left_to_the_next_engine_of_the_model_and_to_one_run_at_a_time() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder)
    requests = [Request([i + 1, 2], GREEDY, 12) for i in range(2)]
    expected = by_request(EagerEngine(model).run(requests), 2)
    for rows, capacity in ((2, 40), (1, 30)):
        assert by_request(DeviceEngine(model, rows=rows, capacity=capacity).run(requests), 2) == expected
        first = held(model)
        assert first.cache.rows == 2
    runs = [DeviceEngine(model, rows=2, capacity=40).run(requests) for _ in range(2)]
    found: list[list[Token]] = [[], []]
    for tokens in itertools.zip_longest(*runs):  # in turns, so that shared rows would mix them up
        for i, token in enumerate(tokens):
            if token is not None:
                found[i].append(token)
    assert [by_request(each, 2) for each in found] == [expected, expected]
    for more in ({"rows": 4}, {"capacity": 300}, {"log_probs": True}, {"cache": "fp8"}):
        before = held(model)
        list(DeviceEngine(model, **{"rows": 2, "capacity": 40} | more).run(requests))  # type: ignore[arg-type]
        assert held(model) is not before
    released = weakref.ref(held(model))
    del before, first
    device_rows.release(model)
    assert released() is None
    list(DeviceEngine(model, rows=2, capacity=40).run(requests))
    gone = weakref.ref(held(model))
    del model, runs
    assert gone() is None


def test_a_penalty_is_the_matter_of_its_run(model: genesis_models.CausalLM) -> None:
    """Tokens are counted while a request asks for it, and its row alone."""
    penalized = Request([1, 2, 3], Sampling(0.0, repetition_penalty=1.3), 8)
    plain = Request([1, 2, 3], GREEDY, 8)
    engine = DeviceEngine(model, rows=2, capacity=500)
    for requests in ([plain, penalized, penalized, plain], [plain], [plain, penalized]):
        expected = by_request(EagerEngine(model).run(requests), len(requests))
        assert by_request(engine.run(requests), len(requests)) == expected
    assert {key[2] for key in held(model).steps} == {False, True}


def test_impossible_requests(model: genesis_models.CausalLM) -> None:
    engine = DeviceEngine(model, rows=1, capacity=8)
    with pytest.raises(UsageError, match="temperature"):
        list(engine.run([Request([1], Sampling(-1.0), 2)]))
    with pytest.raises(UsageError, match="capacity is 8"):
        list(engine.run([Request([1], GREEDY, 12)]))
    with pytest.raises(UsageError, match="auto or fp8"):
        DeviceEngine(model, rows=1, capacity=8, cache="int4")


def test_many_generations_leave_nothing_behind(model: genesis_models.CausalLM) -> None:
    engine = DeviceEngine(model, rows=3, capacity=24)

    def generations(count: int) -> None:
        for i in range(count):
            list(engine.run([Request(each, Sampling(1.0, seed=i), 1 + i % 3) for each in prompts(3, 320, 12)]))

    generations(3)
    held = pool.allocated
    generations(15)
    assert pool.allocated == held


def test_graphs_are_dropped_where_weights_have_moved_and_kept_where_not() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder)
    request = Request([1, 2, 3], GREEDY, 3)
    list(DeviceEngine(model, rows=1, capacity=32).run([request]))
    rows = held(model)
    steps, passes = dict(rows.steps), dict(rows.passes)
    assert steps
    rows.begin(model)
    assert (rows.steps, rows.passes) == (steps, passes)
    model.model.norm.weight = genesis.nn.Parameter(model.model.norm.weight.detach() * 2)
    rows.begin(model)
    assert not rows.steps and not rows.passes


def test_a_prompt_s_pass_is_made_once_for_its_length() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder)
    kept = []
    for ids in ([1, 2, 3], [4, 5, 6], [4, 5, 6]):
        list(DeviceEngine(model, rows=1, capacity=32).run([Request(ids, GREEDY, 2)]))
        kept.append(dict(held(model).passes))
    assert kept[1] and kept[1] == kept[2]


def test_long_passes_are_not_captured(model: genesis_models.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow models pass more tokens at once than are captured; there the host is not the limit."""
    sizes = [dataclasses.replace(model.config, hidden_size=size) for size in (896, 2048, 4096, 16384)]
    assert [*map(device.chunk_of, sizes)] == [8192, 4096, 2048, 2048]
    device_rows.release(model)
    monkeypatch.setattr(device, "CHUNK", 32)
    engine = DeviceEngine(model, rows=2, capacity=128)
    requests = [Request([*range(1, length)], GREEDY, 2) for length in (80, 20)]
    expected = by_request(EagerEngine(model).run(requests), 2)
    for each in (requests[:1], requests[1:]):
        assert by_request(engine.run(each), 2)[0] == expected[requests.index(each[0])]
    assert {length for _, length in held(model).passes} == {32}
