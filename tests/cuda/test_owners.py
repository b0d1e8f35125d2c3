"""Whose each block of memory is: in the snapshot, in the pool that one may look at, and in the error of no room."""

from __future__ import annotations

import pytest

import genesis
from genesis import Tensor, cuda, nn, optim
from genesis.backend import backend_for
from genesis.backend.cuda.driver import OutOfDeviceMemory
from genesis.cuda import MemoryBlock
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import OutOfMemoryError
from genesis.op import registry
from tests.ops.devices import CUDA

MIB = 1 << 20


def owner(x: Tensor) -> str:
    """Who holds the block in which a tensor stands."""
    at = x.data_ptr()
    (found,) = (r for r in cuda.memory_snapshot() if r["address"] <= at < r["address"] + r["size"])
    assert found["state"] == "allocated"
    return str(found["op"])


def test_results_are_their_ops_however_often_it_ran() -> None:
    x = genesis.ones(5, 3, device="cuda")
    assert owner(x) == "fill"
    for _ in range(4):  # decided, replayed, written out
        assert owner(x + x) == "add"
        assert owner(x.softmax(1)) == "softmax"
        values, places = x.topk(2)
        assert owner(values) == owner(places) == "topk"
        assert owner(x[x > 0]) == "masked_select"
    assert owner(genesis.empty(3, device="cuda")) == "empty"
    assert owner(genesis.tensor([1.0], device="cuda")) == "tensor"
    assert owner(genesis.ones(3).to("cuda")) == "to"


def test_a_block_that_is_taken_again_is_the_next_ones() -> None:
    x = genesis.ones(700, device="cuda")
    y = x.exp()
    address = y.data_ptr()
    del y
    y = x.neg()
    assert y.data_ptr() == address
    assert owner(y) == "neg"


def test_gradients_are_those_of_the_ops_that_made_them() -> None:
    for _ in range(3):
        w = genesis.ones(4, 4, device="cuda").requires_grad_()
        (w.silu() @ w).sum().backward()
        assert w.grad is not None
        assert owner(w.grad) in registry


@pytest.mark.parametrize("fused", [False, True])
def test_in_training_every_block_has_a_holder(fused: bool) -> None:
    model = nn.Linear(4, 4, bias=False).to("cuda")
    assert owner(model.weight) == "parameter"
    optimizer = optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for _ in range(3):
        optimizer.zero_grad()
        model(genesis.ones(2, 4, device="cuda")).square().mean().backward()
        optimizer.step()
    assert owner(model.weight) == ("parameters" if fused else "parameter")
    states = {owner(state) for state in optimizer.state[model.weight].values() if isinstance(state, Tensor)}
    assert states == {"AdamW exp_avg", "AdamW exp_avg_sq"}
    if fused:
        assert owner(model.weight.grad) == "gradients"
    assert all(row["op"] for row in cuda.memory_snapshot() if row["state"] == "allocated")


def test_memory_of_graphs_has_holders_too() -> None:
    x, graph = genesis.ones(900, device="cuda"), FunctionGraph()
    result = graph.capture(lambda: (x + 1).tanh())
    graph.replay()
    assert owner(result) == "tanh"


def test_the_pool_shows_its_blocks() -> None:
    pool = cuda.memory_pool()
    x = genesis.empty(3 * MIB // 4, device="cuda", dtype="uint8")
    assert MemoryBlock(x.data_ptr(), 3 * MIB // 4, "empty") in pool.allocated_blocks
    address = x.data_ptr()
    del x
    assert (address, 3 * MIB // 4, "") in pool.free_blocks
    assert pool.allocated == sum(b.size for b in pool.allocated_blocks) == cuda.memory_allocated()
    assert pool.reserved == pool.allocated + sum(b.size for b in pool.free_blocks) == cuda.memory_reserved()
    assert str(pool.reserved) in repr(pool)


@pytest.mark.parametrize(("calls_before", "holder"), [(0, "neg"), (1, "floor"), (3, "ceil")])
def test_the_error_names_the_op_that_asks_and_those_that_hold(
    calls_before: int, holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> int:
        raise OutOfDeviceMemory

    x = genesis.ones(16, 1024, device="cuda")
    for _ in range(calls_before):
        x.square()
    kept, held = [getattr(x, holder)() for _ in range(2)], []
    monkeypatch.setattr(backend_for(CUDA).driver, "allocate", refuse)
    with pytest.raises(OutOfMemoryError, match=r"no memory for 64\.0 KiB for empty: "):
        held.extend(genesis.empty(16, 1024, device="cuda") for _ in range(10_000))
    with pytest.raises(OutOfMemoryError) as caught:
        x.square()
    assert "no memory for 64.0 KiB for square: " in caught.value.what
    assert f"; {holder} 128.0 KiB in 2 blocks, the largest float32 [16, 1024]" in caught.value.what
    assert caught.value.next == OutOfMemoryError.ADVICE
    assert len(kept) == 2
