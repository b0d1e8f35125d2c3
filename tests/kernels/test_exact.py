"""Exact runs in the interpreter, whose dot adds 16 terms at a time in a fixed order: a token has the same bits whatever
is computed beside it. Each rule of docs/decisions/0014-exact.md is broken on purpose, and the comparison must see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest

import genesis
import genesis.kernels.attention.attention as attention
import genesis.kernels.gemm.linalg as linalg
import genesis_models
from genesis.array import empty
from genesis.backend import backend_for
from genesis.backend.cuda.driver import is_interpreted
from genesis.dtypes import float32
from genesis.errors import UsageError
from genesis.nn import functional as F
from genesis.nn.quantized import quantize_layers
from genesis.op import registry
from genesis.ops.low_rank import LowRank, Pair
from tests.interpreter import ordered

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="benchmarks/gpu/exact.py checks a GPU")
BLOCK = 64  # the key block
CONFIG = {
    "model_type": "qwen3", "vocab_size": 150, "hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fixed_order() -> Iterator[None]:
    """Dots and sums are added in stated orders, and no launch recorded under a broken rule is replayed."""
    backend: Any = backend_for(genesis.device("cuda", 0))
    with ordered():
        yield
    backend._calls.clear()
    backend._calls_into.clear()


@pytest.fixture(scope="module")
def model() -> genesis_models.CausalLM:
    return genesis_models.build(CONFIG, 3, device="cuda", dtype="bfloat16")


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 72)


def log_probs(
    model: genesis_models.CausalLM, ids: np.ndarray, labels: np.ndarray, grad: bool = False, **how: Any
) -> np.ndarray:
    """The log-probability of each label `[B, T]` after the tokens before it, in a pass over ids `[B, T]`."""
    given = {name: genesis.from_numpy(value).to("cuda") for name, value in how.items() if isinstance(value, np.ndarray)}
    with genesis.set_grad_enabled(grad), genesis.exact():
        hidden = model.hidden_states(genesis.from_numpy(ids).to("cuda"), **{**how, **given})
        labels_there = genesis.from_numpy(labels).to("cuda")
        return F.linear_token_log_probs(hidden, model.head_weight, labels_there, temperature=0.7).detach().cpu().numpy()


@pytest.fixture(scope="module")
def expected(model: genesis_models.CausalLM, tokens: np.ndarray) -> np.ndarray:
    with ordered():
        return log_probs(model, tokens[None, :-1], tokens[None, 1:])[0]


def packed(model: genesis_models.CausalLM, tokens: np.ndarray, rows: int = 1) -> np.ndarray:
    """Those of a training pass, with the tokens as the third document of the last row."""
    t, begin = len(tokens) - 1, BLOCK
    ids, labels = (np.random.default_rng(1).integers(0, CONFIG["vocab_size"], (rows, begin + t)) for _ in range(2))
    ids[-1, begin:], labels[-1, begin:] = tokens[:-1], tokens[1:]
    positions = np.tile(np.r_[0:40, 0 : begin - 40, 0:t], (rows, 1))
    return log_probs(model, ids, labels, grad=True, position_ids=positions)[-1, begin:]


def chunked(model: genesis_models.CausalLM, tokens: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Those of passes over chunks, and of one token alone after them, which attend to a cache."""
    cache = genesis_models.blocks.KeyValueCache(model.config, 1, len(tokens), genesis.bfloat16, "cuda")
    ends = np.cumsum(sizes)
    parts = [tokens[None, end - size : end + 1] for end, size in zip(ends, sizes, strict=True)]
    return np.concatenate([log_probs(model, part[:, :-1], part[:, 1:], cache=cache)[0] for part in parts])


def test_a_token_has_the_bits_of_one_pass_wherever_it_is_packed(model: Any, tokens: Any, expected: Any) -> None:
    assert np.isfinite(expected).all() and len(set(expected.tolist())) > len(expected) // 2
    np.testing.assert_array_equal(packed(model, tokens), expected)


def test_the_batch_and_checkpointing_change_no_bit(model: Any, tokens: Any, expected: Any) -> None:
    with mock.patch.object(model, "_checkpointing", "full"), mock.patch.object(model, "training", True):
        np.testing.assert_array_equal(packed(model, tokens, rows=2), expected)


@pytest.mark.parametrize("sizes", [(BLOCK, 6, 1)])
def test_chunks_and_single_tokens_have_the_bits_of_one_pass(model: Any, tokens: Any, expected: Any, sizes: Any) -> None:
    np.testing.assert_array_equal(chunked(model, tokens, sizes), expected[: sum(sizes)])
    assert (without_exact(chunked, model, tokens, sizes) != expected[: sum(sizes)]).any()


def without_exact(function: Callable[..., np.ndarray], *args: Any) -> np.ndarray:
    with mock.patch.object(genesis, "exact", nullcontext):
        return function(*args)


def split_of_k() -> Any:
    choose = linalg.choose

    def split(p: Any, sms: int, shared: int, one_chain: bool = False) -> Any:
        return choose(p, sms, shared, one_chain)._replace(split=2 if p.m > 20 else 1)

    return mock.patch.object(linalg, "choose", split)


def other_key_block() -> Any:
    return mock.patch.dict(attention.EXACT_SIZES, keys=BLOCK // 2)


def other_vocabulary_block() -> Any:
    return mock.patch.object(genesis.kernels.loss.lm_head, "COLUMNS", 64)


def rounding_left_out() -> Any:
    flags = linalg.Epilogue.flags.fget
    return mock.patch.object(linalg.Epilogue, "flags", property(lambda e: flags(e) & ~linalg.gemm.ROUND.value))


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("broken", [other_key_block, other_vocabulary_block, rounding_left_out])
def test_a_broken_rule_is_seen(model: Any, tokens: Any, expected: Any, broken: Callable[[], Any]) -> None:
    with broken():
        assert (packed(model, tokens) != expected).any()


def test_a_row_of_a_norm_does_not_depend_on_the_tile() -> None:
    """97 rows of 1,000 have tiles of one or two rows, and rows of 64 of up to 32: other lanes and warps on a GPU."""
    op, rng = registry["rms_norm"], np.random.default_rng(2)
    for width in (64, 1000):
        x = genesis.from_numpy(rng.standard_normal((97, width), np.float32)).to("cuda").to(dtype="bfloat16")
        weight = genesis.ones(width, dtype="bfloat16", device="cuda")

        def rstd(x: genesis.Tensor, weight: genesis.Tensor = weight) -> np.ndarray:
            return op(x.array, weight.array, eps=1e-6)[1].numpy()

        with genesis.exact():
            found = rstd(x)
            alone = np.concatenate([rstd(x[i : i + 1]) for i in range(9)])
            np.testing.assert_array_equal(alone, found[:9])
        if width == 64:
            assert (np.concatenate([rstd(x[i : i + 1]) for i in range(9)]) != rstd(x)[:9]).any()
        mean = (x.double().cpu().numpy() ** 2).mean(1)
        np.testing.assert_allclose(found, (mean + 1e-6) ** -0.5, rtol=2e-7)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.0, 1e-30, 3e38])
def test_norms_of_extreme_rows_are_those_of_plain_norms(value: float) -> None:
    x = np.full((2, 48), value, np.float32)
    x[1, 1:] = 1
    given = genesis.from_numpy(x).to("cuda").array, genesis.ones(48, device="cuda").array
    plain = registry["rms_norm"](*given, eps=1e-6)
    with genesis.exact():
        found = registry["rms_norm"](*given, eps=1e-6)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=3e-7)


def test_matmuls_without_a_chain_are_not_chosen_for_few_rows() -> None:
    x, w = (genesis.from_numpy(np.random.default_rng(3).standard_normal((n, 512), np.float32)) for n in (40, 8))
    x, w = (each.to("cuda").to(dtype="bfloat16") for each in (x, w))

    def product(x: genesis.Tensor) -> np.ndarray:
        out = empty((x.shape[0], 8), float32, w.device)
        linalg.matmul_into(out, x.array, w.array, transpose_b=True)
        return out.numpy()

    with genesis.exact():
        np.testing.assert_array_equal(product(x[5:6]), product(x)[5:6])
        with split_of_k():
            assert (product(x[5:6]) != product(x)[5:6]).any()
    assert (product(x[5:6]) != product(x)[5:6]).any()


def test_low_rank_pairs_are_further_steps_of_the_chain() -> None:
    """Two pairs of rank 4 on parts of the columns, with bias and residual."""
    rng, pairs = np.random.default_rng(4), (Pair(0, 20, 4, 0.5), Pair(24, 40, 4, 2.0))
    shapes = {"x": (40, 72), "w": (40, 72), "bias": (40,), "residual": (40, 40), "a0": (4, 72), "a1": (4, 72)}
    shapes |= {"b0": (20, 4), "b1": (16, 4)}
    host = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    given = {name: genesis.from_numpy(value).to("cuda").to(dtype="bfloat16") for name, value in host.items()}

    def product(rows: slice) -> np.ndarray:
        inputs = [given["x"][rows], given["w"], given["bias"], given["residual"][rows]]
        inputs += [given[name] for name in ("a0", "a1", "b0", "b1")]
        y = registry["linear"](*(each.array for each in inputs), low_rank=LowRank(pairs, 4))[0]
        return genesis.Tensor.wrap(y).float().cpu().numpy()

    with genesis.exact():
        whole = product(slice(0, 40))
        np.testing.assert_array_equal(product(slice(7, 8)), whole[7:8])
        np.testing.assert_array_equal(product(slice(3, 20)), whole[3:20])
    np.testing.assert_allclose(whole, product(slice(0, 40)), rtol=0.02, atol=0.5)


def test_low_rank_pairs_of_a_gated_mlp_are_steps_of_the_chain() -> None:
    rng, low_rank = np.random.default_rng(6), LowRank((Pair(0, 32, 8, 0.5), Pair(32, 64, 8, 0.5)), 2)
    shapes = [(40, 48), (48,), (48, 32), (64, 48), (16, 48), (64, 8)]
    x, scale, down, weight, a, b = (
        genesis.from_numpy(rng.standard_normal(shape, np.float32)).to("cuda").to(dtype="bfloat16") for shape in shapes
    )

    def mlp(rows: slice) -> list[np.ndarray]:
        arrays = (x[rows].array, scale.array, down.array, None, weight.array, a.array, b.array)
        outputs = registry["norm_mlp"](*arrays, eps=1e-6, low_rank=low_rank)
        return [genesis.Tensor.wrap(each).float().cpu().numpy() for each in outputs]

    with genesis.exact():
        whole = mlp(slice(0, 40))
        parts = [mlp(slice(9, 10)), mlp(slice(9, 30))]
    for part in parts:
        for found, expected in zip(part, whole, strict=True):
            np.testing.assert_array_equal(found, expected[9 : 9 + len(found)])


def test_what_has_no_stated_order_is_refused(model: genesis_models.CausalLM) -> None:
    hidden = genesis.ones(1, 160, device="cuda")
    labels = genesis.zeros(1, dtype="int64", device="cuda")
    with genesis.exact():
        with pytest.raises(UsageError, match="needs bfloat16"):
            F.linear_cross_entropy(hidden, hidden, labels)
        with pytest.raises(UsageError, match="in bfloat16, got float32"):
            F.attention(*[hidden.reshape(1, 1, 2, 80)] * 3)
        with pytest.raises(UsageError, match="8-bit weights"):
            quantize_layers([genesis.nn.Linear(16, 16)], "int8")[0](genesis.ones(16))


def test_a_single_row_of_any_stride_has_the_bits_of_others(model: Any, expected: Any) -> None:
    x = genesis.from_numpy(np.random.default_rng(5).standard_normal((20, 96), np.float32)).to("cuda")
    x, labels = x.to(dtype="bfloat16"), genesis.arange(20, device="cuda")
    with genesis.no_grad(), genesis.exact():
        found = F.linear_token_log_probs(x, model.head_weight, labels).cpu().numpy()
        for i in range(20):
            row = x[i : i + 1].reshape(-1, 96)
            assert row.array.strides == (1, 1)
            alone = F.linear_token_log_probs(row, model.head_weight, labels[i : i + 1])
            np.testing.assert_array_equal(alone.cpu().numpy(), found[i : i + 1])


def test_a_compiled_function_is_refused() -> None:
    with genesis.exact(), pytest.raises(UsageError, match="fused sums have no documented order"):
        genesis.compile(lambda x: (x * 2).sum())(genesis.ones(3))
