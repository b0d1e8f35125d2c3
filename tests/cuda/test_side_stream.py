"""The side stream of a graph: work on it gives the same bits, joins before it is read, and keeps its memory."""

from __future__ import annotations

import numpy as np
import pytest

import genesis
from genesis import Tensor, cuda, nn
from genesis.backend import Device
from genesis.backend.cuda import SIDE_STREAM_BYTES, CudaBackend, backend_of
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import DeviceError
from genesis.nn import functional as F
from genesis.optim import AdamW


def backend() -> CudaBackend:
    """The device's now: other tests may have forgotten it."""
    return backend_of(Device("cuda", 0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.first(x)))


def gradients(in_graph: bool, steps: int = 2) -> list[np.ndarray]:
    """Of a net whose gradients have slots, after steps with the same batch."""
    genesis.manual_seed(0)
    net = Net().to("cuda")
    optimizer = AdamW(net.parameters(), fused=True)
    x = genesis.randn(16, 24, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()

    step()
    if in_graph:
        graph = FunctionGraph()
        graph.capture(step)
        for p in net.parameters():
            assert p.grad is not None
            p.grad.fill_(float("nan"))
        for _ in range(steps):
            graph.replay()
    found = [p.grad.cpu().numpy() for p in net.parameters() if p.grad is not None]
    assert len(found) == 4
    return found


def test_gradients_of_the_side_stream_are_those_made_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    plain = CudaBackend.on_side_stream

    def counted(self: CudaBackend, nbytes: int) -> object:
        if self.pool.capturing:
            opened.append(nbytes)
        return plain(self, nbytes)

    wanted = gradients(in_graph=False)
    monkeypatch.setattr(CudaBackend, "on_side_stream", counted)
    for a, b in zip(gradients(in_graph=True), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(opened) == 4  # two weights, two biases
    assert max(opened) <= SIDE_STREAM_BYTES


def test_a_hook_reads_a_gradient_after_the_join(monkeypatch: pytest.MonkeyPatch) -> None:
    genesis.manual_seed(0)
    net = Net().to("cuda")
    optimizer, x, seen = AdamW(net.parameters(), fused=True), genesis.randn(16, 24, device="cuda"), []
    net.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(len(backend().side_stream._ends)))

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()

    FunctionGraph().capture(step)
    assert seen == [0, 0, 0]  # nothing was open, also in the capture


def test_memory_given_back_meanwhile_waits_for_the_join() -> None:
    x = genesis.ones(1 << 16, device="cuda")
    pool, seen = backend().pool, {}

    def work() -> Tensor:
        read = x + 1
        pointer = read.data_ptr()
        with backend().on_side_stream(read.nbytes):
            y = read * 2
        del read
        other = x * 3  # must not lie where the side stream still reads
        seen[pool.capturing] = other.data_ptr() == pointer
        backend().join_side_stream()
        assert not pool.kept
        return y + other

    graph = FunctionGraph()
    result = graph.capture(work)
    assert seen == {False: True, True: False}
    graph.replay()
    assert (result.cpu().numpy() == 7).all()


def test_outside_of_a_capture_there_is_no_branch() -> None:
    with backend().on_side_stream(1):
        assert backend().stream != backend().side_stream.stream
    backend().join_side_stream()


def test_a_capture_that_fails_forgets_its_branch() -> None:
    x = genesis.ones(8, device="cuda")

    def work() -> None:
        with backend().on_side_stream(8):
            x.add_(1)
            if backend().pool.capturing:
                raise DeviceError("stopped")

    with pytest.raises(DeviceError, match="stopped"):
        FunctionGraph().capture(work)
    assert not backend().pool.kept
    graph = FunctionGraph()
    y = graph.capture(lambda: x * 2)
    graph.replay()
    assert (y.cpu().numpy() == x.cpu().numpy() * 2).all()


def test_an_op_takes_temporaries_from_memory_that_it_is_given() -> None:
    memory = genesis.zeros(1 << 20, device="cuda").array
    with backend().temporaries_from(memory):
        first, second = backend().temporary(1000), backend().temporary(1000)
        assert first.pointer % 512 == 0
        assert memory.data_ptr() <= first.pointer < second.pointer < memory.data_ptr() + memory.nbytes
        assert second.pointer - first.pointer >= 1000
        outside = backend().temporary(memory.nbytes)
        assert not memory.data_ptr() <= outside.pointer < memory.data_ptr() + memory.nbytes
        assert backend().allocate(1000).block is not None  # an output stays
    assert backend().temporary(1000).block is not None


def test_the_loss_has_its_chunks_where_gradients_will_come() -> None:
    genesis.manual_seed(0)
    embedding, hidden = nn.Embedding(128, 32).to("cuda"), nn.Linear(32, 4096).to("cuda")
    optimizer = AdamW([*embedding.parameters(), *hidden.parameters()], fused=True)
    ids = genesis.arange(160, device="cuda").remainder(128)

    def loss() -> tuple[Tensor, int]:
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        value = F.linear_cross_entropy(embedding(ids), embedding.weight, ids)
        return value, cuda.max_memory_allocated() - before

    plain = F.linear_cross_entropy(embedding(ids), embedding.weight.detach(), ids)
    first, taken = loss()
    first.backward()
    wanted = embedding.weight.grad.cpu().numpy()  # type: ignore[union-attr]
    optimizer.zero_grad()
    hidden.weight.grad = genesis.zeros_like(hidden.weight)  # the memory is not idle
    second, more = loss()
    second.backward()
    assert more - taken >= 128 * 160 * 4
    assert plain.item() == first.item() == second.item()
    np.testing.assert_array_equal(embedding.weight.grad.cpu().numpy(), wanted)  # type: ignore[union-attr]
