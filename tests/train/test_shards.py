"""A batch in shares: how many there are, and that they give together what the batch gives as one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.backend import CPU, Device, cpu
from genesis.data.loader import Batch
from genesis.random import Generator
from genesis.train import step as shards
from genesis.train.objective import NextTokens
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig

RAW = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = cpu.threads()
    cpu.set_threads(4)
    yield
    cpu.set_threads(before)


def batch_of(rows: int, length: int) -> Batch:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (rows, length))
    positions = np.broadcast_to(np.arange(length), (rows, length))
    return Batch(0, 0, ids, ids, positions, rows * (length - 1), rows * length, np.zeros((0, 4), np.int64))


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("rows", "length", "shares"),
    [(2, 32, 1), (8, 32, 1), (8, 64, 2), (2, 256, 2), (8, 256, 4), (1, 4096, 1), (3, 512, 3)],
)
def test_threads_share_what_is_worth_it(rows: int, length: int, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MIN_SHARE_TOKENS", 256)
    found = shards._shares(NextTokens(), batch_of(rows, length), CPU)
    assert len(found) == shares
    ids = np.concatenate([part[0].numpy() for part in found])
    np.testing.assert_array_equal(ids, batch_of(rows, length).input_ids)


def model() -> CausalLM:
    made = genesis_models.build(ModelConfig.from_dict(RAW), seed=0, device="cpu", dtype="float32")
    made.train()
    return made


@pytest.mark.usefixtures("four_threads")
def test_shares_add_up_to_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for least in (1 << 30, 1, 1):
        monkeypatch.setattr(shards, "MIN_SHARE_TOKENS", least)
        made, batch = model(), batch_of(5, 12)
        assert len(shards._shares(NextTokens(), batch, CPU)) == (4 if least == 1 else 1)
        (loss,) = shards.accumulate_gradients(NextTokens(), made, batch, batch.num_targets, CPU)
        total, _ = shards.measure(NextTokens(), made, batch, CPU)
        results.append((loss, total, {n: p.grad.numpy() for n, p in made.named_parameters()}))
    (loss, total, one), (shared_loss, shared_total, shared), again = results
    assert loss == pytest.approx(total / 55, rel=1e-6)
    assert (shared_loss, shared_total) == (pytest.approx(loss, rel=1e-6), pytest.approx(total, rel=1e-6))
    for name, gradient in one.items():
        np.testing.assert_allclose(shared[name], gradient, rtol=1e-4, atol=1e-6 * np.abs(gradient).max() + 1e-9)
        np.testing.assert_array_equal(shared[name], again[2][name])  # the same bits on the same threads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_targets_that_are_the_likeliest_token_are_counted(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk of rows, also where some of them have no target, and with the loss as training has it."""
    made, batch = genesis_models.build(ModelConfig.from_dict(RAW), seed=0, device="cpu", dtype=dtype), batch_of(5, 12)
    monkeypatch.setattr("genesis.ops.loss.chunk_rows", lambda *given: 7)
    ids, positions = genesis.from_numpy(batch.input_ids), genesis.from_numpy(batch.position_ids)
    with genesis.no_grad():
        likeliest = made(ids, positions).argmax(-1).numpy()
    labels = batch.labels.copy()
    labels[:, 1:][:, ::2] = likeliest[:, :-1][:, ::2]
    labels[:, 1:4] = -100
    expected = (labels[:, 1:] == likeliest[:, :-1]).sum()
    loss, hits = shards.measure(NextTokens(), made, replace(batch, labels=labels), CPU)
    with genesis.no_grad():
        plain = made.loss(ids, genesis.from_numpy(labels), position_ids=positions, num_targets=1).item()
    assert (loss, hits) == (plain, expected) and 15 < expected < (labels[:, 1:] >= 0).sum()
    assert shards.measure(NextTokens(), made, replace(batch, labels=np.full_like(labels, -100)), CPU) == [0, 0]


def test_a_gpu_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rows without a target are not left out, as the host would have to count them."""
    batch, found = batch_of(2, 6), []
    monkeypatch.setattr("genesis.ops.loss.chunk_rows", lambda *given: 7)
    labels = np.where(batch.labels % 3 == 0, -100, 37)  # the likeliest token of two places
    for device in (CPU, Device("cuda", 0)):
        made = genesis_models.build(ModelConfig.from_dict(RAW), seed=0, device=str(device), dtype="float32")
        found.append(shards.measure(NextTokens(), made, replace(batch, labels=labels), device))
    assert found[0] == [pytest.approx(found[1][0], rel=1e-5), 2] and found[1][1] == 2


def test_other_devices_take_the_batch_whole() -> None:
    assert len(shards._shares(NextTokens(), batch_of(8, 256), Device("cuda", 0))) == 1


def test_threads_draw_the_same_dropout_in_whichever_order_they_come() -> None:
    generator, barrier = Generator(3), threading.Barrier(2)
    generator.reserve(40)

    def draws(index: int, found: dict[int, list[tuple[int, int]]]) -> None:
        with generator.apart(100 * index):
            barrier.wait()
            found[index] = [generator.reserve(8) for _ in range(3)]

    found: dict[int, list[tuple[int, int]]] = {}
    threads = [threading.Thread(target=draws, args=(index, found)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [(3, 100 * n), (3, 100 * n + 2), (3, 100 * n + 4)] for n in (1, 2)}
    assert generator.offset == 10 and generator.state() == {"seed": 3, "offset": 10}
