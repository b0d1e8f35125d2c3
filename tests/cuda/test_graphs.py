"""Graphs: capture, replay, their memory, what may not be captured, buckets, and when something is captured again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import Tensor, cuda, nn
from genesis.backend import Device, backend_for
from genesis.backend.cuda.driver import OutOfDeviceMemory, is_interpreted
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import DeviceError, GenesisError, OutOfMemoryError, ShapeError, UsageError

CUDA = Device("cuda")


def pool() -> Any:
    return backend_for(CUDA).pool  # type: ignore[attr-defined]


def values(x: Tensor) -> list[float]:
    return x.cpu().tolist()  # type: ignore[no-any-return]


def test_a_replay_computes_from_what_is_in_the_static_input_now() -> None:
    x = genesis.arange(4.0, device="cuda")
    graph, calls = FunctionGraph(), []

    def function() -> Tensor:
        calls.append(None)
        return (x * 2 + 1) * x

    y = graph.capture(function)
    assert len(calls) == 3  # two warm-up runs and the capture
    graph.replay()
    assert values(y) == [0, 3, 10, 21]
    x.copy_(genesis.tensor([1.0, 1.0, 2.0, 2.0]))
    other = (genesis.ones(4, device="cuda") * 2 + 1) * 5  # the same launches with other addresses, outside
    graph.replay()
    assert values(y) == [3, 3, 10, 10]
    assert values(other) == [15] * 4
    assert len(calls) == 3


def test_warm_up_runs_are_run_and_the_capture_is_not() -> None:
    total = genesis.zeros(1, device="cuda")
    graph = FunctionGraph()
    graph.capture(lambda: total.add_(1))
    assert values(total) == [2]
    graph.replay()
    assert values(total) == [3]


def test_a_training_step_is_one_graph() -> None:
    w = genesis.ones(3, 3, device="cuda", requires_grad=True)
    x = genesis.ones(2, 3, device="cuda")

    def step() -> Tensor:
        w.grad = None
        loss = ((x * w[:2]) * 2).sum()
        loss.backward()
        return loss.detach()

    graph = FunctionGraph()
    loss = graph.capture(step)
    x.fill_(2)
    graph.replay()
    assert values(loss) == 24
    assert w.grad is not None
    assert values(w.grad) == [[4, 4, 4], [4, 4, 4], [0, 0, 0]]


def test_graphs_share_one_arena_and_give_it_back_together() -> None:
    gc.collect()
    x = genesis.empty(1 << 16, device="cuda")
    graphs, reserved = [], []
    for _ in range(3):
        graphs.append(FunctionGraph())
        graphs[-1].capture(lambda: (x + 1) * 2)
        reserved.append(cuda.memory_reserved())
    assert reserved[2] == reserved[1] == reserved[0]
    count = pool().graph_count
    cuda.empty_cache()
    held = sum(b.size for b in pool().graph_arenas[0].blocks.values())
    assert held >= x.nbytes  # graphs may be replayed: their memory stays
    for graph in graphs:
        graph.close()
    assert pool().graph_count == count - 3
    if pool().graph_count == 0:
        cuda.empty_cache()
        assert not pool().graph_arenas[0].blocks
    with pytest.raises(UsageError, match="a captured graph"):
        graphs[0].replay()


def test_memory_given_back_during_a_capture_is_not_reused_while_the_graph_lives() -> None:
    kept = [genesis.ones(5000, device="cuda")]
    address = kept[0].data_ptr()

    def function() -> Tensor:
        y = kept[0] * 3
        if pool().capturing:
            kept.clear()  # the recorded launch reads this memory at every replay
        return y

    graph = FunctionGraph()
    y = graph.capture(function)
    fresh = [genesis.zeros(5000, device="cuda") for _ in range(3)]
    assert address not in [x.data_ptr() for x in fresh]
    graph.replay()
    assert values(y)[:2] == [3, 3]
    graph.close()
    assert genesis.empty(5000, device="cuda").data_ptr() == address


def test_a_graph_that_the_device_has_no_room_for_is_an_error_and_leaves_nothing(monkeypatch: Any) -> None:
    x = genesis.ones(4, device="cuda")
    graph, kept, driver = FunctionGraph(), [genesis.ones(5000, device="cuda")], pool().driver
    calls = []

    def no_room(recorded: int) -> int:
        calls.append(recorded)
        raise OutOfDeviceMemory

    def function() -> Tensor:
        y = kept[0][:4] + x if kept else x + 1
        if pool().capturing:
            kept.clear()
        return y

    monkeypatch.setattr(driver, "instantiate", no_room)
    before = pool().allocated
    with pytest.raises(OutOfMemoryError, match="no memory for the executable of a CUDA graph"):
        graph.capture(function)
    assert len(calls) == 2  # tried again after unused memory went back
    assert not graph.is_captured
    assert pool().allocated < before - 4 * 5000 + 512
    monkeypatch.undo()
    y = graph.capture(lambda: x + 1)
    graph.replay()
    assert values(y) == [2] * 4


def test_memory_given_back_during_a_capture_that_fails_is_free_again() -> None:
    kept = [genesis.ones(5000, device="cuda")]
    before = pool().allocated

    def function() -> Tensor:
        y = kept[0] * 3 if kept else None
        if pool().capturing:
            kept.clear()
            raise RuntimeError("stopped")
        return y

    with pytest.raises(RuntimeError, match="stopped"):
        FunctionGraph().capture(function)
    gc.collect()
    assert pool().allocated <= before - 4 * 5000


def test_a_capture_may_need_more_memory_than_its_warm_up_did() -> None:
    x, segments = genesis.ones(4, device="cuda"), len(pool().segments)
    graph = FunctionGraph()
    y = graph.capture(lambda: x + genesis.empty(8 << 20 if pool().capturing else 4, device="cuda")[:4].fill_(1))
    assert len(pool().segments) > segments
    graph.replay()
    assert values(y) == [2] * 4


@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        (lambda x: x.sum().item(), "device values were read on the host"),
        (lambda x: x.cpu(), "device values were read on the host"),
        (lambda x: x.copy_(genesis.ones(4)), "host values were copied to the device"),
        (lambda x: cuda.synchronize(), "the device was synchronized"),
        (lambda x: cuda.current_stream().synchronize(), "a stream was synchronized"),
        (lambda x: cuda.current_stream().query(), "was queried"),
        (lambda x: cuda.empty_cache(), "cached memory was released"),
        (lambda x: FunctionGraph().capture(lambda: x + 1), "captures cannot be nested"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_and_all_goes_on(forbidden: Any, message: str) -> None:
    x = genesis.ones(4, device="cuda")

    def function() -> Tensor:
        if pool().capturing:
            forbidden(x)
        return x + 1

    graph = FunctionGraph()
    with pytest.raises(GenesisError, match=message):
        graph.capture(function)
    assert not graph.is_captured
    assert not pool().capturing
    assert pool().private is None
    assert gc.isenabled()
    assert values(x + 1) == [2] * 4
    y = graph.capture(lambda: x + 2)  # the same object, another try
    graph.replay()
    assert values(y) == [3] * 4


def test_errors_of_use() -> None:
    x = genesis.ones(4, device="cuda")
    with pytest.raises(UsageError, match="a captured graph"):
        FunctionGraph().replay()
    graph = FunctionGraph()
    with pytest.raises(UsageError, match="1 warm-up runs"):
        graph.capture(lambda: x + 1, warm_ups=1)
    graph.capture(lambda: x + 1)
    with pytest.raises(UsageError, match="already captured"):
        graph.capture(lambda: x + 1)


def test_blocking_launches_and_graphs_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(DeviceError, match="CUDA_LAUNCH_BLOCKING"):
        FunctionGraph().capture(lambda: None)


def test_a_graph_may_be_dropped_while_another_is_captured() -> None:
    x = genesis.ones(4, device="cuda")
    old = [FunctionGraph()]
    old[0].capture(lambda: x + 1)
    count = pool().graph_count

    def function() -> Tensor:
        if pool().capturing:
            old.clear()
        return x * 2

    graph = FunctionGraph()
    y = graph.capture(function)
    graph.replay()
    assert values(y) == [2] * 4
    graph.close()
    assert pool().graph_count == count - 1


# --- graph_batches ----------------------------------------------------------------------------------------------------


def test_values_and_addresses_of_inputs_are_no_reason_to_capture_again() -> None:
    graphed = cuda.graph_batches(lambda a, b: a * b + 1)
    for factor in (2.0, 3.0):
        a, b = genesis.full((3,), factor, device="cuda"), genesis.arange(3.0, device="cuda")
        assert values(graphed(a, b)) == [1, 1 + factor, 1 + 2 * factor]
    assert graphed.captures == 1


def test_dtypes_and_shapes_are() -> None:
    graphed = cuda.graph_batches(lambda a: a + 1)
    for dtype, size in (("float32", 3), ("float16", 3), ("float32", 4), ("float16", 3)):
        assert values(graphed(genesis.ones(size, dtype=dtype, device="cuda"))) == [2] * size
    assert graphed.captures == 3


def test_another_address_of_a_tensor_that_is_read_is() -> None:
    layer = genesis.nn.Linear(2, 2, bias=False).to("cuda")
    layer.weight.detach().fill_(1)
    x = genesis.ones(1, 2, device="cuda")
    graphed = cuda.graph_batches(lambda x: x * layer.weight.detach(), reads=layer.parameters())
    assert values(graphed(x)) == [[1, 1], [1, 1]]
    layer.weight.detach().fill_(2)  # a value
    assert values(graphed(x)) == [[2, 2], [2, 2]]
    assert graphed.captures == 1
    old = layer.weight.detach()  # kept, so that the new address is another one
    layer.to(dtype="float64")
    assert values(graphed(x)) == [[2, 2], [2, 2]]
    assert graphed.captures == 2
    assert old.dtype is genesis.float32


def test_buckets_round_up_pad_and_cut_back() -> None:
    seen = []

    def function(a: Tensor, b: Tensor) -> dict[str, Tensor]:
        seen.append(a.shape)
        return {"rows": a + b, "all": (a * b).sum()}

    graphed = cuda.graph_batches(function, sizes=[4, 2, 8], pad=(0.0, 7.0))
    for size in (1, 2, 3, 4, 3, 1):
        a = genesis.arange(float(size), device="cuda")
        b = genesis.full((size,), 10.0, device="cuda")
        found = graphed(a, b)
        assert values(found["rows"]) == [10.0 + i for i in range(size)]
        assert values(found["all"]) == 10.0 * sum(range(size))  # a's padding is 0
    assert graphed.captures == 2
    assert set(seen) == {(2,), (4,)}
    assert values(graphed(genesis.ones(9, device="cuda"), genesis.ones(9, device="cuda"))["all"]) == 9  # no graph
    assert graphed.captures == 2
    with pytest.raises(ShapeError, match=r"sizes \[1, 2\]"):
        graphed(genesis.ones(1, device="cuda"), genesis.ones(2, device="cuda"))


def test_results_outlive_the_next_call_unless_asked_otherwise() -> None:
    one, two = genesis.ones(3, device="cuda"), genesis.full((3,), 2.0, device="cuda")
    graphed = cuda.graph_batches(lambda a: a * 10)
    first = graphed(one)
    graphed(two)
    assert values(first) == [10] * 3
    static = cuda.graph_batches(lambda a: a * 10, copy_results=False)
    first = static(one)
    static(two)
    assert values(first) == [20] * 3


@pytest.mark.parametrize("wrong", [(), (1.0,), (np.ones(3),)])
def test_only_cuda_tensors_are_inputs(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="takes CUDA tensors"):
        cuda.graph_batches(lambda *a: a[0])(*wrong)
    with pytest.raises(UsageError, match="got cpu"):
        cuda.graph_batches(lambda a: a)(genesis.ones(3))


def test_a_graph_that_is_alive_at_the_end_ends_quietly() -> None:
    import subprocess
    import sys

    script = (
        "import genesis; from genesis import cuda; from genesis.cuda.graphs import FunctionGraph\n"
        "x = genesis.ones(4, device='cuda')\n"
        "graph = FunctionGraph(); y = graph.capture(lambda: x + 1); graph.replay()\n"
        "kept = [graph, y, cuda.Event(), cuda.Stream(), x.cpu().pin_memory()]; kept.append(kept)\n"
        "kept[2].record(); print(y.cpu().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2.0, 2.0, 2.0, 2.0]\n", "")


@pytest.mark.gpu
def test_a_replay_of_many_launches_costs_little() -> None:
    x = genesis.ones(1 << 16, device="cuda")

    def chain() -> Tensor:
        y = x
        for _ in range(100):
            y = y + 1
        return y

    graph = FunctionGraph()
    y = graph.capture(chain)
    graph.replay()
    cuda.synchronize()
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    assert values(y)[:2] == [101, 101]
    assert begin.elapsed_time(end) / 10 < 0.3, "1.5 us a launch, and twice that for a machine that is not quiet"


def test_the_interpreter_records_as_the_driver_does() -> None:
    """The fake that stands in for graphs here must refuse what the driver refuses."""
    if not is_interpreted():
        pytest.skip("there is a real driver")
    driver = backend_for(CUDA).driver  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="stream 0"):
        driver.begin_capture(0)
    stream = driver.create_stream()
    driver.begin_capture(stream)
    assert driver.is_capturing(stream)
    for wait in (driver.synchronize, lambda: driver.synchronize_stream(stream)):
        with pytest.raises(DeviceError, match="during a capture"):
            wait()
    block = pool().take(512, 0)
    driver.fill(block.pointer, 1, 512, 0)
    driver.fill(block.pointer, 7, 512, stream)
    graph = driver.end_capture(stream)
    import ctypes

    assert ctypes.c_uint8.from_address(block.pointer).value == 1
    driver.launch_graph(driver.instantiate(graph), stream)
    assert ctypes.c_uint8.from_address(block.pointer).value == 7
    driver.destroy_graph(graph, graph)
    pool().give(block)


# --- torch's form -----------------------------------------------------------------------------------------------------


def test_a_block_is_captured_and_replayed_with_new_inputs() -> None:
    x, g = genesis.ones(4, device="cuda"), cuda.CUDAGraph()
    _ = x * 2 + 1
    with cuda.graph(g):
        assert cuda.is_current_stream_capturing()
        y = x * 2 + 1
    assert not cuda.is_current_stream_capturing()
    for value in (1, 5):
        x.fill_(value)
        g.replay()
        assert values(y) == [2 * value + 1] * 4
    g.reset()
    with pytest.raises(UsageError, match="captured graph"):
        g.replay()
    with cuda.graph(g):
        y = x + 1
    g.replay()
    assert values(y) == [6] * 4


def test_results_of_graphs_with_their_own_pools_last_and_pools_can_be_shared() -> None:
    x = genesis.ones(1 << 14, device="cuda")
    graphs, results = [cuda.CUDAGraph() for _ in range(3)], []
    _ = x * 2.0
    handle = cuda.graph_pool_handle()
    for i, (g, pool_of) in enumerate(zip(graphs, (None, handle, handle), strict=True)):
        with cuda.graph(g, pool=pool_of):
            results.append(x * float(i + 2))
    assert graphs[1].pool() == graphs[2].pool() == handle != graphs[0].pool()
    graphs[0].replay()
    first = values(results[0])
    graphs[1].replay()
    graphs[2].replay()
    assert values(results[0]) == first  # another pool
    assert graphs[1].memory_reserved == graphs[2].memory_reserved >= x.nbytes
    for g in graphs:
        g.reset()
    results.clear()
    cuda.empty_cache()
    assert all(arena.graph_count == 0 for arena in pool().graph_arenas.values() if arena.blocks) or pool().graph_count


def test_random_draws_in_a_graph_are_those_of_the_generators_then() -> None:
    x, other = genesis.full((130,), 0.5, device="cuda"), genesis.Generator(seed=5)

    def draws() -> list[Tensor]:
        return [
            genesis.nn.functional.dropout(x, 0.5),
            genesis.rand(70, device="cuda"),
            genesis.empty(9, dtype="float64", device="cuda").normal_(1, 2, generator=other),
            genesis.randint(0, 1000, (33,), device="cuda"),
            genesis.randperm(40, device="cuda"),
            genesis.bernoulli(x),
            genesis.empty(20, device="cuda").exponential_(),
            genesis.multinomial(x, 3),
            genesis.multinomial(x, 5, replacement=True),
        ]

    def run(seed: int, once: Any) -> list[list[float]]:
        genesis.cuda.manual_seed(seed)
        other.manual_seed(2**64 - seed)
        other.offset = 2**32 - 3  # crosses into the upper half of the counter
        return [values(each) for _ in range(2) for each in once()]

    draws()
    g = cuda.CUDAGraph()
    g.register_generator_state(other)
    with cuda.graph(g):
        results = draws()
    for seed in (3, 2**63 + 4):
        drawn = run(seed, lambda: g.replay() or results)
        assert drawn == run(seed, draws)
        assert all(drawn[i] != drawn[i + 9] for i in range(9))
    with pytest.raises(DeviceError, match="on the CPU"), cuda.graph(cuda.CUDAGraph()):
        genesis.rand(4)
    assert values(x + 1) == [1.5] * 130  # the device works on


def test_a_failure_in_a_block_leaves_the_graph_empty() -> None:
    x, g = genesis.ones(4, device="cuda"), cuda.CUDAGraph()
    _ = x + 1
    with pytest.raises(ZeroDivisionError), cuda.graph(g):
        _ = (x + 1, 1 / 0)
    with pytest.raises(DeviceError), cuda.graph(g):
        (x + 1).sum().item()
    with cuda.graph(g):
        y = x + 2
    g.replay()
    assert values(y) == [3] * 4
    with pytest.raises(UsageError, match="default stream"):
        cuda.CUDAGraph().capture_begin()
    with pytest.raises(UsageError, match="capture_error_mode"), cuda.graph(cuda.CUDAGraph(), capture_error_mode="no"):
        pass
    with pytest.raises(UsageError, match="CUDAGraph"):
        cuda.graph(FunctionGraph())  # type: ignore[arg-type]


def test_graphed_modules_train_as_plain_ones() -> None:
    def network() -> list[Any]:
        genesis.manual_seed(0)
        return [nn.Linear(4, 8).cuda(), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)).cuda()]

    def losses(parts: list[Any]) -> list[float]:
        optimizer = genesis.optim.SGD([p for part in parts for p in part.parameters()], lr=0.5)
        rows = []
        for step in range(3):
            x = genesis.arange(12.0, device="cuda").view(3, 4) / (12 + step)
            optimizer.zero_grad()
            loss = parts[1](parts[0](x)).square().sum()
            loss.backward()
            optimizer.step()
            rows.append(loss.item())
        return rows

    plain = losses(network())
    parts = network()
    samples = ((genesis.ones(3, 4, device="cuda"),), (genesis.ones(3, 8, device="cuda").requires_grad_(),))
    graphed = list(cuda.make_graphed_callables(tuple(parts), samples))
    assert losses(graphed) == plain
    with pytest.raises(ShapeError):
        graphed[0](genesis.ones(2, 4, device="cuda"))
    graphed[0].eval()
    assert graphed[0](genesis.ones(2, 4, device="cuda")).shape == (2, 8)  # another mode runs without a graph


def test_a_captured_step_of_an_optimizer_counts_and_reads_its_rate() -> None:
    def run(captured: bool) -> tuple[list[float], dict[str, Any]]:
        w = genesis.ones(4, device="cuda").requires_grad_()
        optimizer = genesis.optim.AdamW([w], lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            (w * w).sum().backward()
            optimizer.step()

        for _ in range(2):
            step()
        g = cuda.CUDAGraph()
        if captured:
            with cuda.graph(g):
                step()
        for _ in range(3):
            optimizer.param_groups[0]["lr"] *= 0.5
            g.replay() if captured else step()
        return values(w.detach()), optimizer.state_dict()["state"][0]

    (plain, state), (replayed, again) = run(False), run(True)
    assert replayed == plain
    assert again["step"] == state["step"] == 5


def test_batches_beyond_the_list_and_without_padding_run_without_a_graph() -> None:
    assert cuda.capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert cuda.capture_sizes(1) == [1]
    fast = cuda.graph_batches(lambda a: a * 10, largest=4, padding=False)
    for n, captures in ((2, 1), (3, 1), (4, 2), (9, 2)):
        assert values(fast(genesis.ones(n, device="cuda"))) == [10] * n
        assert fast.captures == captures
    assert fast.memory_reserved > 0
