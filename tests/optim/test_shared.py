"""Ranks that train one set of parameters: weights and states have the bits of one process, at every number of ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import genesis
from genesis.array import from_numpy
from genesis.distributed import Alone, Group, Peers, PeersGroup
from genesis.dtypes import as_dtype
from genesis.errors import ConfigError, GradientError
from genesis.optim import Adafactor, AdamW, Lion, Muon, Optimizer, saving, shared
from tests.distributed.pairs import pairs

SHAPES = {"a.weight": (64, 130), "b.weight": (70, 64), "b.bias": (70,), "c.weight": (33, 31)}
MICRO, STEPS = 12, 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", {}),
    "masters": ("bfloat16", {"grad_dtype": "float32"}),
    "float16": ("float16", {"grad_dtype": "float32"}),
    "stochastic": ("bfloat16", {"grad_dtype": "float32", "low_precision": "stochastic"}),
    "bfloat16 states": ("bfloat16", {"grad_dtype": "float32", "state_dtype": "bfloat16"}),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, the last of which ends in the middle of a row."""
    monkeypatch.setattr(shared, "BUCKET", 1 << 10)


def on_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` returns on each rank, which are threads; one rank is alone."""
    if size == 1:
        return [work(Alone())]
    results: list[Any] = [None] * size

    def run(peers: Peers) -> None:
        try:
            with peers:
                results[peers.rank] = work(PeersGroup(peers))
        except BaseException as error:
            results[peers.rank] = error

    started = [threading.Thread(target=run, args=(peers,)) for peers in pairs(size, limit_s=20)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    if failed := [each for each in results if isinstance(each, BaseException)]:
        raise failed[0]
    return results


@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_of_a_bucket_are_alike(size: int) -> None:
    """All are whole rows, but for the end of the last one."""
    borders = shared._borders([0, 3_000, 50_000, 90_000, 140_000], 200_005, 4096 * size)
    assert (borders[0], borders[-1]) == (0, 200_005) and len(borders) > 3
    cuts = [shared._cut(stop - start, size, 4096) for start, stop in itertools.pairwise(borders)]
    assert [sum(cut) for cut in cuts] == [stop - start for start, stop in itertools.pairwise(borders)]
    assert all(len(set(cut)) == 1 and cut[0] % 4096 == 0 for cut in cuts[:-1])


def test_the_largest_exchange_has_room_for_equal_parts() -> None:
    """A bucket whose end is a short part takes as much as one of full parts."""
    params = [genesis.zeros(5024, requires_grad=True)]
    member: Any = SimpleNamespace(rank=0, size=2, is_in_stream_order=False)
    flat = shared.SharedBuffers(params, as_dtype("float32"), member, is_sharded=True)
    assert [bucket.parts for bucket in flat.buckets] == [[4096, 928]] and flat.largest_exchange == 2 * 4096 * 4


def parameters(dtype: str) -> dict[str, genesis.Tensor]:
    draw = np.random.default_rng(0)
    made = {
        n: genesis.tensor(draw.standard_normal(s).astype(np.float32)).to(as_dtype(dtype)) for n, s in SHAPES.items()
    }
    for p in made.values():
        p.requires_grad_()
    return made


def gradient(step: int, micro: int, number: int, param: genesis.Tensor) -> Any:
    """Of magnitudes that show the order in which they are added."""
    draw = np.random.default_rng([step, micro, number])
    return from_numpy((draw.standard_normal(param.shape) * 10.0 ** draw.integers(-3, 2)).astype(param.dtype.numpy))


def make(kind: Any, group: Group, dtype: str, zero: int, **how: Any) -> tuple[Optimizer, dict[str, genesis.Tensor]]:
    params = parameters(dtype)
    pairs = list(params.items())
    given: Any = pairs
    if kind is Muon:
        given = [{"params": pairs[:2], "use_muon": True}, {"params": pairs[2:], "use_muon": False}]
    return kind(given, lr=1e-2, fused=True, ranks=group, zero=zero, seed=5, **how), params


def train(optimizer: Optimizer, params: dict[str, genesis.Tensor], group: Group, first: int = 0) -> list[float]:
    """`STEPS` steps; the norms."""
    norms = []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        for micro in range(group.rank, MICRO, group.size):
            if group.size > 1:
                optimizer.zero_grad()
            for number, p in enumerate(params.values()):
                p.accumulate_grad(gradient(step, micro, number, p))
            optimizer.exchange(adds=micro >= group.size)
        optimizer.complete()
        norms.append(float(optimizer.grad_norm().item()))
        optimizer.step(grad_scale=min(1.0, 5.0 / norms[-1]))
    return norms


def state_of(optimizer: Optimizer, params: dict[str, genesis.Tensor]) -> dict[str, bytes | int]:
    """Weights and states, on rank 0."""
    found: dict[str, bytes | int] = {n: p.detach().numpy().tobytes() for n, p in params.items()}
    with optimizer.gathered_states():
        for name, p in params.items():
            for key, value in optimizer.saved_state(p).items():
                found[f"{name}.{key}"] = value.numpy().tobytes() if isinstance(value, genesis.Tensor) else value
    return found


def run(kind: Any, size: int, dtype: str, zero: int, **how: Any) -> tuple[list[float], dict[str, Any]]:
    def work(group: Group) -> Any:
        optimizer, params = make(kind, group, dtype, zero, **how)
        norms = train(optimizer, params, group)
        weights = {n: p.detach().numpy().tobytes() for n, p in params.items()}
        return norms, state_of(optimizer, params), weights

    results = on_ranks(size, work)
    for norms, _, weights in results[1:]:
        assert norms == results[0][0]
        assert weights == {n: results[0][1][n] for n in SHAPES}
    return results[0][:2]


@pytest.mark.sample
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_bits_of_one_process(name: str, size: int) -> None:
    """ZeRO-1 and ZeRO-0."""
    dtype, how = KINDS[name]
    expected = run(AdamW, 1, dtype, 1, **how)
    for zero in (1, 0):
        assert run(AdamW, size, dtype, zero, **how) == expected, zero


@pytest.mark.parametrize("kind", [Lion, Muon, Adafactor])
def test_other_optimizers(kind: Any) -> None:
    """Those that need whole matrices update all on every rank."""
    assert run(kind, 2, "float32", 1) == run(kind, 1, "float32", 1)


def test_states_are_on_their_owner_alone() -> None:
    def work(group: Group) -> int:
        optimizer, params = make(AdamW, group, "bfloat16", 1, grad_dtype="float32")
        train(optimizer, params, group)
        return sum(s.size for flats in optimizer._flats for flat in flats for s in flat.states.values())

    sizes = on_ranks(4, work)
    assert sum(sizes) == on_ranks(1, work)[0] and max(sizes) < 0.5 * sum(sizes)


@pytest.mark.sample
@pytest.mark.parametrize("name", ["float32", "masters", "float16"])
@pytest.mark.parametrize(("before", "after"), [((1, 1), (2, 1)), ((2, 1), (4, 1)), ((2, 1), (2, 0)), ((4, 0), (1, 1))])
def test_states_go_on_with_other_ranks(name: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    """What rank 0 saved is loaded by any number of ranks, with ZeRO or without."""
    dtype, how = KINDS[name]

    def save(group: Group) -> Any:
        optimizer, params = make(AdamW, group, dtype, before[1], **how)
        train(optimizer, params, group)
        with optimizer.gathered_states():
            if group.rank:
                return None
            saved = optimizer.state_dict()
            for state in saved["state"].values():
                state |= {
                    k: genesis.tensor(v.numpy().copy()) for k, v in state.items() if isinstance(v, genesis.Tensor)
                }
            return saved, [p.detach().numpy().copy() for p in params.values()]

    saved, weights = on_ranks(before[0], save)[0]

    def go_on(group: Group) -> Any:
        optimizer, params = make(AdamW, group, dtype, after[1], **how)
        with genesis.no_grad():
            for p, value in zip(params.values(), weights, strict=True):
                p.copy_(genesis.tensor(value))
        optimizer.load_state_dict(saved)
        return train(optimizer, params, group, STEPS), state_of(optimizer, params)

    def at_once(group: Group) -> Any:
        optimizer, params = make(AdamW, group, dtype, 1, **how)
        train(optimizer, params, group)
        return train(optimizer, params, group, STEPS), state_of(optimizer, params)

    assert on_ranks(after[0], go_on)[0] == on_ranks(1, at_once)[0]


@pytest.mark.parametrize(("name", "size"), [("float32", 2), ("masters", 3), ("float16", 2)])
def test_a_rank_reads_its_parts_of_stored_states(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element once, a few at a time, to the bits that tensors in memory give."""
    dtype, how = KINDS[name]
    optimizer, params = make(AdamW, Alone(), dtype, 1, **how)
    train(optimizer, params, Alone())
    saved = optimizer.state_dict()
    kept = [k for k in saved["state"][0] if k != "step"]
    weights = [p.detach().numpy().copy() for p in params.values()]
    most = 3000
    monkeypatch.setattr(saving, "READ", most)

    def stored(key: tuple[int, str], value: genesis.Tensor, reads: list[Any]) -> saving.StoredTensor:
        flat = value.numpy().reshape(-1)

        def read(start: int, stop: int) -> Any:
            reads.append((*key, start, stop))
            return flat[start:stop].copy()

        return saving.StoredTensor(value.dtype, value.shape, read)

    def load(group: Group, reads: list[Any] | None) -> Any:
        optimizer, params = make(AdamW, group, dtype, 1, **how)
        given = saved
        with genesis.no_grad():
            for p, value in zip(params.values(), weights, strict=True):
                p.copy_(genesis.tensor(value))
        if reads is not None:
            state = {
                n: {k: v if k == "step" else stored((n, k), v, reads) for k, v in values.items()}
                for n, values in saved["state"].items()
            }
            given = {**saved, "state": state}
        optimizer.load_state_dict(given)
        return state_of(optimizer, params), reads

    found = on_ranks(size, lambda group: load(group, []))
    assert found[0][0] == on_ranks(size, lambda group: load(group, None))[0][0]
    reads = [each for _, own in found for each in own]
    assert max(stop - start for *_, start, stop in reads) == most
    every = sorted((n, k, i) for n, k, start, stop in reads for i in range(start, stop))
    assert every == [(n, k, i) for n, p in enumerate(params.values()) for k in sorted(kept) for i in range(p.numel())]
    most_of_a_rank = max(sum(stop - start for *_, start, stop in own) for _, own in found)
    assert most_of_a_rank < 0.7 * len(every)


def test_a_state_is_gathered_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of one parameter for each rank at a time: none needs room for all. Ranks ask for different ones at once."""
    gathered: list[tuple[int, str, int, int]] = []
    gather = shared.SharedBuffers.gather_state

    def noted(self: shared.SharedBuffers, name: str, index: int, root: int) -> Any:
        gathered.append((self.group.rank, name, index, root))
        return gather(self, name, index, root)

    def work(group: Group) -> Any:
        optimizer, params = make(AdamW, group, "float32", 1)
        train(optimizer, params, group)
        asked = list(params.values())[:3] if group.rank == 0 else list(params.values())[3:]
        with optimizer.gathered_states():
            assert group.rank or not gathered
            found = [(optimizer.saved_state(p)["exp_avg"].numpy().copy(), p) for p in asked]
        assert optimizer.state_gather is None and "exp_avg" not in optimizer.saved_state(asked[0])
        with optimizer.gathered_states():
            assert all(np.array_equal(optimizer.saved_state(p)["exp_avg"].numpy(), values) for values, p in found)
        return len(asked)

    monkeypatch.setattr(shared.SharedBuffers, "gather_state", noted)
    first, second = on_ranks(2, work)
    assert first > second > 0
    for rank in (0, 1):
        asked = [each[1:] for each in gathered if each[0] == rank]
        once = [(name, i, int(i >= 3)) for i in range(first + second) for name in ("exp_avg", "exp_avg_sq")]
        assert sorted(asked) == sorted(2 * once)


def test_figures_that_ranks_add_up_are_the_losses_and_the_squares_of_every_buffer() -> None:
    flats = [mock.MagicMock(squares=from_numpy(np.array(each))) for each in ([1.0, 2.0], [3.0])]
    flats[0].buffer = lambda dtype, owner, size: from_numpy(np.full(size, -1, dtype.numpy))
    optimizer, losses = mock.Mock(_figures=None, _shared=lambda: iter(flats)), genesis.tensor([7.0, 0.0, 8.0])
    figures = Optimizer._figures_of_ranks(optimizer, losses)
    assert figures.numpy().tolist() == [7.0, 0.0, 8.0, 1.0, 2.0, 3.0]
    flats[0].group.all_reduce.assert_called_once_with(figures)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_that_is_not_finite_is_found(zero: int) -> None:
    def work(group: Group) -> Any:
        optimizer, params = make(AdamW, group, "float32", zero)
        for p in params.values():
            p.accumulate_grad(gradient(0, 0, 0, p))
        if group.rank == 1:
            assert params["b.weight"].grad is not None
            with genesis.no_grad():
                params["b.weight"].grad[3, 5] = float("nan")
        optimizer.exchange(adds=False)
        optimizer.complete()
        found = optimizer.first_not_finite()
        return next((n for n, p in params.items() if p is found), None), float(optimizer.grad_norm().item())

    results = on_ranks(2, work)
    assert "b.weight" in {name for name, _ in results} and {name for name, _ in results} <= {"b.weight", None}
    assert all(np.isnan(norm) for _, norm in results)


def test_buckets_are_launched_in_one_order_however_gradients_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last bucket to the first on every rank, as soon as a bucket and those before it are complete."""
    launched: dict[int, list[int]] = {0: [], 1: []}
    exchange_bucket = shared.SharedBuffers.exchange_bucket

    def noted(self: shared.SharedBuffers, number: int, adds: bool) -> None:
        launched[self.group.rank].append(number)
        exchange_bucket(self, number, adds)

    def work(group: Group) -> tuple[int, int, list[float]]:
        layers = [genesis.nn.Linear(64, 160, bias=False) for _ in range(4)]
        optimizer = AdamW([layer.weight for layer in layers], lr=1e-2, fused=True, ranks=group)
        x = genesis.full((3, 64), 1.0 + group.rank)
        losses = [layer(x).sum() for layer in (layers if group.rank == 0 else layers[::-1])]
        with optimizer.exchanging(adds=False):
            total = losses[0] + losses[1] + losses[2] + losses[3]
            total.backward()
            during = len(launched[group.rank])
        optimizer.complete()
        buckets = sum(len(flat.buckets) for flat in optimizer._shared())
        return buckets, during, [float(optimizer.grad_norm().item())]

    monkeypatch.setattr(shared.SharedBuffers, "exchange_bucket", noted)
    (buckets, first, norm), (_, second, other_norm) = on_ranks(2, work)
    assert buckets > 2 and launched[0] == launched[1] == list(reversed(range(buckets)))
    assert first == second == buckets, "complete buckets do not wait for the end of the block"
    assert norm == other_norm and norm[0] > 0


def test_what_ranks_cannot_do() -> None:
    def no_gradient(group: Group) -> None:
        optimizer, params = make(AdamW, group, "float32", 1)
        params["a.weight"].accumulate_grad(gradient(0, 0, 0, params["a.weight"]))
        optimizer.exchange(adds=False)

    def not_fused(group: Group) -> None:
        AdamW(list(parameters("float32").items()), ranks=group)

    with pytest.raises(GradientError, match="has no gradient"):
        on_ranks(2, no_gradient)
    with pytest.raises(ConfigError, match="ranks need flat buffers"):
        on_ranks(2, not_fused)
    with pytest.raises(ConfigError, match="zero is 2"):
        make(AdamW, Alone(), "float32", 2)
