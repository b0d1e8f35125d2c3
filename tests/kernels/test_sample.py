"""Drawing tokens on CUDA against the reference: every setting, ties, flat logits, large vocabularies, mixed rows.

On generic logits the tokens are equal. Where u may be within rounding of a border between two tokens (flat logits of a
large vocabulary, penalties), the token's part of the cumulated probabilities must contain it within 2^-20, about what
a float32 sum of 152k terms in a tree of 17 levels can be off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genesis.array import Array, empty, from_numpy
from genesis.backend import backend_for
from genesis.backend.cuda.driver import is_interpreted
from genesis.dtypes import as_dtype
from genesis.kernels.decode import sample as kernels
from genesis.ops.sample import next_tokens, sample, uniforms
from tests.ops.devices import CUDA, poisoned

V = 2500  # several chunks for one row


def on_device(values: np.ndarray) -> Array:
    array = empty(values.shape, as_dtype(values.dtype), CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def keys_of(rows: int, seed: int = 7) -> np.ndarray:
    """A sequence for each row, at positions beyond 32 bits."""
    rng = np.random.default_rng(seed)
    return np.stack([np.full(rows, -5 - seed), np.arange(rows), rng.integers(0, 1 << 40, rows)], 1).astype(np.int64)


def drawn(logits: np.ndarray, settings: Any, top_k: Any, seen: np.ndarray | None = None, seed: int = 7) -> Any:
    """Tokens and log-probabilities on the device, then those of the reference."""
    rows = len(logits)
    numbers = np.array(np.broadcast_to(np.asarray(settings, np.float64), (rows, 4)))
    inputs = [logits, keys_of(rows, seed), numbers, np.array(np.broadcast_to(top_k, (rows,)), np.int64)]
    inputs += [] if seen is None else [seen]
    with poisoned():  # scratch memory, too
        found = sample(*map(on_device, inputs), log_probs=True)
    wanted = sample(*(from_numpy(x.copy()) for x in inputs), log_probs=True)
    return (*(x.numpy() for x in found), *(x.numpy() for x in wanted))


def assert_equal(logits: np.ndarray, settings: Any, top_k: Any, seen: np.ndarray | None = None) -> None:
    tokens, chances, wanted, log_probs = drawn(logits, settings, top_k, seen)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(chances, log_probs, rtol=2e-6, atol=1e-6)


def miss(token: int, logits: np.ndarray, key: np.ndarray, temperature: float) -> float:
    """How far u is from the token's part of the probabilities of all tokens, cumulated in the order of the ids."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    ends = np.cumsum(weights) / weights.sum()
    u = float(uniforms(key[None])[0])
    return float(max(u - ends[token], (ends[token - 1] if token else 0.0) - u, 0.0))


SETTINGS = {
    "temperature": ((1, 1, 0, 1), 0),
    "top-p": ((1, 0.9, 0, 1), 0),
    "tiny top-p": ((1, 1e-9, 0, 1), 0),
    "flat": ((100, 1, 0, 1), 0),
    "flat, top-p": ((100, 0.5, 0, 1), 0),
    "flat, many of top-k": ((100, 0.5, 0, 1), 1700),
    "all bounds": ((3, 0.8, 1e-2, 1), 1700),
    "min-p": ((3, 1, 1e-3, 1), 0),
    "min-p of 1": ((1, 1, 1, 1), 0),
    "default": ((0.8, 0.95, 0, 1), 50),
    "top-k of 1": ((1, 1, 0, 1), 1),
    "top-k of all": ((1, 1, 0, 1), V),
    "top-k of more": ((1, 1, 0, 1), V + 9),
    "cold": ((1e-3, 1, 0, 1), 0),
    "cold, top-k": ((1e-3, 0.9, 0, 1), 50),
    "greedy": ((0, 1, 0, 1), 0),
}


@pytest.mark.sample(cases=6)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_reference(name: str) -> None:
    logits = (np.random.default_rng(1).standard_normal((6, V)) * 3).astype(np.float32)
    assert_equal(logits, *SETTINGS[name])


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_equal_logits_of_two_bytes_are_drawn_in_order_of_ids(dtype: str) -> None:
    logits = np.random.default_rng(2).standard_normal((8, V)).astype(as_dtype(dtype).numpy)
    settings = np.array([(t, p, m, 1) for t in (1, 20) for p in (1, 0.7) for m in (0, 0.05)])
    assert_equal(logits, settings, [0, 0, 300, 1400, 0, 0, 300, 1400])


@pytest.mark.sample(cases=2)
@pytest.mark.sample
@pytest.mark.parametrize(
    ("values", "top_k"), [("equal", 0), ("equal", 77), ("rounded", 0), ("rounded", 2300), ("one above", 2300)]
)
def test_more_equal_logits_than_a_tile_has_room_for(values: str, top_k: int) -> None:
    rng = np.random.default_rng(3)
    logits = np.zeros((3, 3000), np.float32)
    if values == "rounded":
        logits = np.round(rng.standard_normal(logits.shape) * 0.3).astype(np.float32)
    if values == "one above":
        logits[:, 1234] = 3
    assert_equal(logits, [(1, 1, 0, 1), (1, 0.333, 0, 1), (2, 0.777, 0.3, 1)], top_k)


@pytest.mark.sample
@pytest.mark.parametrize("order", ["falling", "rising", "in one place", "shuffled"])
@pytest.mark.parametrize("top_k", [1, 50, 78, 79, 80])  # of 157 groups: the last take another way
def test_the_likeliest_tokens_may_be_neighbours(order: str, top_k: int) -> None:
    """Where they share groups, the bound that groups give is low: up to all tokens are candidates."""
    rng = np.random.default_rng(13)
    logits = np.sort(rng.standard_normal((3, V)).astype(np.float32) * 2)
    if order == "falling":
        logits = logits[:, ::-1]
    if order == "shuffled":
        logits = rng.permuted(logits, axis=1)
    if order == "in one place":
        logits[:, :400] = rng.permuted(logits[:, :400] + 20, axis=1)
    assert_equal(logits, [(0.8, 0.95, 0, 1), (1, 1, 0.1, 1), (3, 1, 0, 1)], top_k)


@pytest.mark.full
def test_flat_rows_have_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16-bit logits, with hundreds of equals of each value, are not bisected, whatever bounds they have."""
    if is_interpreted():
        monkeypatch.setattr(kernels, "bisected", None)
    logits = np.random.default_rng(14).standard_normal((3, 40_000)).astype(as_dtype("bfloat16").numpy)
    assert_equal(logits, [(1, 1, 0.05, 1), (1, 0.9, 0.05, 1), (1, 0.95, 0, 1)], [0, 9000, 5000])


def test_a_dominating_logit_leaves_nothing_to_the_others() -> None:
    logits = np.zeros((4, V), np.float32)
    logits[:, 1234] = 60
    tokens, chances, *_ = drawn(logits, (1, 1, 0, 1), [0, 5, 0, 2000])
    assert tokens.tolist() == [1234] * 4
    assert np.abs(chances).max() < 1e-20


def test_seen_tokens_are_penalized() -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((6, V)) * 3).astype(np.float32)
    seen = rng.random(logits.shape) < 0.3
    assert_equal(logits, [(t, p, 0, r) for t, p in ((1, 1), (1, 0.9), (0, 1)) for r in (1.3, 0.8)], [0, 40] * 3, seen)


def test_rows_of_all_kinds_share_a_batch_and_do_not_touch_each_other() -> None:
    """Greedy, sampled and failed rows; and a row's token is the same at any place of any batch."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((12, V)) * 3).astype(np.float32)
    logits[3, V - 1], logits[7, 0], logits[8, 5] = np.nan, -np.inf, np.inf
    numbers = [(0, 1, 0, 1), (1, 1, 0, 1), (0.7, 0.9, 0, 1), (1, 1, 0, 1), (5, 0.5, 0.1, 1), (0, 1, 0, 1)] * 2
    settings, top_k = np.array(numbers, np.float64), np.array([0, 0, 50, 1, 2000, 4] * 2)
    tokens, chances, wanted, log_probs = drawn(logits, settings, top_k)
    assert [row for row, token in enumerate(tokens) if token < 0] == [3, 7, 8]
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(chances, log_probs, rtol=2e-6, atol=1e-6)
    keys = keys_of(12)
    for some in ([4], [11, 2, 10], [9, 1]):
        inputs = (logits[some], keys[some], settings[some], top_k[some])
        alone = sample(*map(on_device, inputs))[0].numpy()
        np.testing.assert_array_equal(alone, tokens[some])


@pytest.mark.parametrize(("programs", "rows"), [(6, 2), (264, 1)])  # calls are replayed for the same shapes
def test_programs_with_few_and_many_groups(monkeypatch: pytest.MonkeyPatch, programs: int, rows: int) -> None:
    """One of many groups lists those with candidates; the last program has fewer groups than the others."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "BIN_PROGRAMS", programs)
    rng = np.random.default_rng(12)
    logits = (rng.standard_normal((rows, 8 * V)) * 3).astype(np.float32)
    for settings, top_k in (((1, 0.9, 0, 1), 0), ((5, 1, 0, 1), [50, 1800][-rows:])):
        assert_equal(logits, settings, top_k)


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_programs_of_whole_rows(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """As many rows have. Top-p leaves few or many tokens out of the bins, and min-p few or many groups."""
    for name, number in (("FEW_ROWS", 0), ("PROGRAMS", 1), ("BIN_PROGRAMS", 1)):
        monkeypatch.setattr(kernels, name, number)
    logits = (np.random.default_rng(15).standard_normal((4, 2 * V)) * scale).astype(np.float32)
    for top_p in (0.5, 0.9, 0.999):
        assert_equal(
            logits, [(1, top_p, 0, 1), (0.5, 1, top_p, 1), (2, top_p, 0.01, 1), (1, top_p, 0, 1)], [0, 0, 0, 1500]
        )


def test_a_draw_and_its_sums_repeat_to_the_bit() -> None:
    logits = (np.random.default_rng(6).standard_normal((4, V)) * 2).astype(np.float32)
    first = drawn(logits, (1.5, 0.97, 0, 1), [0, 0, 60, 1500])[:2]
    again = drawn(logits, (1.5, 0.97, 0, 1), [0, 0, 60, 1500])[:2]
    for a, b in zip(first, again, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("vocabulary", [151_936, 128_256, 262_144])
def test_a_large_vocabulary(rows: int, vocabulary: int, dtype: str) -> None:
    """All settings, mixed; peaked and flat rows."""
    rng = np.random.default_rng(rows + vocabulary)
    logits = rng.standard_normal((rows, vocabulary)) * rng.choice([0.1, 1, 4], (rows, 1))
    logits = logits.astype(as_dtype(dtype).numpy)
    chosen = [list(SETTINGS.values())[i] for i in rng.integers(0, len(SETTINGS), rows)]
    settings, top_k = np.array([s for s, _ in chosen], np.float64), [k for _, k in chosen]
    tokens, chances, wanted, log_probs = drawn(logits, settings, top_k)
    same = tokens == wanted
    np.testing.assert_allclose(chances[same], log_probs[same], rtol=1e-5, atol=1e-5)
    assert same.mean() > 0.9 or rows == 1, (tokens, wanted)
    for row in np.flatnonzero(~same):  # a border lies within rounding: the token must be a neighbour of the reference's
        if top_k[row] == 0 and settings[row, 1:3].tolist() == [1, 0]:
            assert miss(int(tokens[row]), logits[row], keys_of(rows)[row], settings[row, 0]) <= 2.0**-20
            continue
        order = np.argsort(-logits[row].astype(np.float64), kind="stable")
        places = [int(np.flatnonzero(order == token)[0]) for token in (tokens[row], wanted[row])]
        assert abs(places[0] - places[1]) == 1, (row, settings[row], top_k[row], places)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_u_lies_in_the_part_of_the_token(scale: float) -> None:
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((32, 151_936)) * scale).astype(np.float32)
    tokens, *_ = drawn(logits, (1, 1, 0, 1), 0)
    keys = keys_of(32)
    assert max(miss(int(t), logits[row], keys[row], 1) for row, t in enumerate(tokens)) <= 2.0**-20


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_frequencies_are_the_probabilities(where: str) -> None:
    """Chi-square of draws from the 40 tokens that top-k leaves, at the 0.1 % level."""
    rng = np.random.default_rng(9)
    line, rows = (rng.standard_normal(400) * 2).astype(np.float32), 20_000
    keys = np.stack([np.full(rows, 11), np.arange(rows), np.full(rows, 3)], 1).astype(np.int64)
    settings, top_k = np.broadcast_to([1.0, 1.0, 0.0, 1.0], (rows, 4)), np.full(rows, 40, np.int64)
    inputs = [np.array(x) for x in (np.broadcast_to(line, (rows, 400)), keys, settings, top_k)]
    tokens = sample(*map(from_numpy if where == "cpu" else on_device, inputs))[0].numpy()
    order = np.argsort(-line, kind="stable")[:40]
    expected = np.exp(line[order].astype(np.float64))
    expected *= rows / expected.sum()
    counts = np.array([(tokens == token).sum() for token in order])
    assert counts.sum() == rows
    assert ((counts - expected) ** 2 / expected).sum() < 72.1  # of 39 degrees of freedom


def test_a_captured_graph_serves_any_settings() -> None:
    """Draws and what follows them, captured once; settings change between replays."""
    backend: Any = backend_for(CUDA)
    driver, rows, vocabulary, steps = backend.driver, 4, V, 6
    rng = np.random.default_rng(10)
    logits = (rng.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    host = {"keys": keys_of(rows), "settings": np.zeros((rows, 4)), "top_k": np.zeros(rows, np.int64)}
    on_gpu = {name: on_device(x) for name, x in host.items()}
    state = {
        "stops": np.full((rows, 16), -1), "tokens": np.zeros(rows, np.int64), "lengths": np.full(rows, 9),
        "left": np.array([steps, 2, steps, 0]), "keys": host["keys"], "seen": np.zeros((rows, vocabulary), bool),
        "ring": np.zeros((steps, rows), np.int64), "ring_log_probs": np.zeros((steps, rows), np.float32),
        "step": np.zeros(1, np.int64),
    }  # fmt: skip
    following = {name: on_gpu["keys"] if name == "keys" else on_device(x) for name, x in state.items()}
    on_gpu_logits = on_device(logits)

    def step() -> None:
        drawn = sample(on_gpu_logits, *on_gpu.values(), following["seen"], log_probs=True)
        next_tokens(*drawn, *following.values())

    before, backend.stream = backend.stream, driver.create_stream()
    try:
        for _ in range(2):  # compiles and records the calls, then takes memory as the captured calls will
            step()
        driver.synchronize()
        for name, array in following.items():
            backend.from_numpy(state[name], array)
        driver.synchronize()
        driver.begin_capture(backend.stream)
        step()
        executable = driver.instantiate(driver.end_capture(backend.stream))
        for i in range(steps):
            numbers = np.array([(0, 1, 0, 1.5), (1, 1, 0, 1), (0.8, 0.95, 0, 1.25), (1, 0.9, 0.01, 1)])
            host["settings"] = np.roll(numbers, i, 0)
            backend.from_numpy(host["settings"], on_gpu["settings"])
            backend.from_numpy(host["top_k"], on_gpu["top_k"])
            driver.synchronize()
            driver.launch_graph(executable, backend.stream)
            driver.synchronize()
            arrays = [logits, host["keys"], host["settings"], host["top_k"], state["seen"]]
            wanted = (np.empty(rows, np.int64), np.empty(rows, np.float32))
            sample.reference(wanted, *arrays, log_probs=True)
            next_tokens.reference((), *wanted, *state.values())
    finally:
        backend.stream = before
    for name, array in following.items():
        if name != "ring_log_probs":
            np.testing.assert_array_equal(array.numpy(), state[name], err_msg=name)
    np.testing.assert_allclose(following["ring_log_probs"].numpy(), state["ring_log_probs"], rtol=1e-5, atol=1e-5)
    assert state["left"].tolist() == [0, 0, 0, 0] and (state["ring"][2:, 1] == -2).all()
