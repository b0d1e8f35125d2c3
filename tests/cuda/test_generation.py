"""Generation on a GPU: captured steps give the plain tokens; what is captured anew, and what stays allocated."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import genesis
import genesis_models
from genesis import cuda
from genesis.backend import Device, backend_for
from genesis.backend.cuda import backend_of, compilations, dispatch
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.simulated import HostDriver, drivers, interpreted_launch
from genesis.errors import DeviceError, NumericError, OutOfMemoryError, UsageError
from genesis.kernels.decode import sample
from genesis.train.captured import Captured
from genesis_models.engine import EagerEngine, Request, Sampling, device_rows
from genesis_models.engine import device as device_module
from genesis_models.engine.device import DeviceEngine
from genesis_models.generate import CODED_ROWS, GPU_ROWS, engine_for
from genesis_models.weights import quantize
from tests.models.golden import EXTRA, FAMILIES, QWEN, extra, golden, relative_error
from tests.models.test_device_engine import held, last_logits
from tests.models.test_engine import GREEDY, by_request, prompts

CUDA = Device("cuda")
DRAWN = Sampling(0.9, top_k=20, top_p=0.95, seed=3)
TINY = {
    "model_type": "qwen3", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32,
    "tie_word_embeddings": True, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def draws_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The op `sample` with its kernels, also while it still runs the reference: no graph holds that."""
    monkeypatch.setitem(dispatch.cuda_impls, "sample", sample.sample_on_device)
    dispatch.cuda_impl_named.cache_clear()
    yield
    dispatch.cuda_impl_named.cache_clear()


def tiny(device: str = "cuda", **changes: Any) -> genesis_models.CausalLM:
    return genesis_models.build(TINY | changes, seed=1, device=device)


def captured(model: genesis_models.CausalLM) -> dict[tuple[int, int, bool], bool]:
    """Which steps are graphs, by rows, keys and whether tokens are counted."""
    return {key: step.is_captured for key, step in held(model).steps.items()}


def graph_count() -> int:
    return backend_for(CUDA).pool.graph_count  # type: ignore[attr-defined,no-any-return]


def test_captured_steps_give_the_tokens_of_the_plain_engine() -> None:
    ids = [[7], [1, 2, 3], [4, 5, 6, 7, 8, 9]]
    requests = [Request(each, DRAWN if i else GREEDY, 2 + 2 * i, sequence=i) for i, each in enumerate(ids)]
    expected = by_request(EagerEngine(tiny("cpu")).run(requests), 3)
    model, poisoned = tiny(), cuda.set_poison(True)  # what was never written is NaN
    try:
        for chunk in (4, 64):
            engine = DeviceEngine(model, rows=2, capacity=32, chunk=chunk)
            assert by_request(engine.run(requests), 3) == expected
    finally:
        cuda.set_poison(poisoned)
    assert set(captured(model).values()) == {True}


@pytest.mark.full
def test_passes_of_prompts_are_captured_for_each_length_whatever_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prompts at once, and one in chunks of 16: a graph for its first, and in the first row for the others."""
    monkeypatch.setattr(device_module, "GRAPHS", 3)
    model, plain = tiny(max_position_embeddings=64), EagerEngine(tiny("cpu", max_position_embeddings=64))
    expected = [[0, 16], [0, 32], [16, 16]]
    poisoned = cuda.set_poison(True)
    try:
        for turn in range(5):
            long = [(turn + i) % 40 for i in range(30)]
            for ids in ([[turn + 1, 2, 3], [5], [4, turn, 6, 7, 8, 9]], [long]):
                requests = [Request(each, GREEDY, 2) for each in ids]
                engine = DeviceEngine(model, rows=3, capacity=64, chunk=16 if ids == [long] else 64)
                assert by_request(engine.run(requests), len(ids)) == by_request(plain.run(requests), len(ids))
            passes = held(model).passes
            assert sorted(map(list, passes)) == expected
            assert {isinstance(each, Captured) and each.is_captured for each in passes.values()} == {turn >= 2}
    finally:
        cuda.set_poison(poisoned)
    count = graph_count()
    list(DeviceEngine(model, rows=3, capacity=64).run([Request([1] * 50, GREEDY, 1)]))  # another length
    assert sorted(map(list, passes))[-1] == [16, 16]  # the oldest goes
    assert len(passes) == 3
    backend_for(CUDA).pool.end_retired()  # type: ignore[attr-defined]
    assert graph_count() == count - 1


@pytest.mark.full
def test_caches_and_weights_of_fewer_bits_are_near_those_of_the_cpu() -> None:
    requests = [Request(each, GREEDY, 3) for each in ([7], [1, 2, 3], [4, 5, 6, 7, 8, 9])]
    on_host, model = (genesis_models.build(TINY, seed=1, device=d, dtype="bfloat16") for d in ("cpu", "cuda"))
    for chunk in (3, 64):
        found, expected = (DeviceEngine(m, rows=3, capacity=32, chunk=chunk, cache="fp8") for m in (model, on_host))
        assert by_request(found.run(requests), 3) == by_request(expected.run(requests), 3)
        assert relative_error(last_logits(model)[:3], last_logits(on_host)[:3]) < 0.02


def test_a_model_on_a_gpu_is_given_this_engine_which_captures_once() -> None:
    model, requests = tiny(), [Request([i + 1, 2], GREEDY, 3) for i in range(2)]
    expected = by_request(EagerEngine(tiny("cpu")).run(requests), 2)
    for _ in range(2):
        engine = engine_for(model, requests)
        assert isinstance(engine, DeviceEngine)
        assert by_request(engine.run(requests), 2) == expected
        assert captured(model) == {(2, 256, False): True}
    with pytest.raises(UsageError, match="fp8 on the CPU"):
        engine_for(tiny("cpu"), requests, cache="fp8")
    assert (engine_for(model, requests, rows=1).rows, engine_for(model, requests * GPU_ROWS).rows) == (1, GPU_ROWS)
    assert engine_for(quantize(model, "int8"), requests * GPU_ROWS).rows == CODED_ROWS


class BehindDriver(HostDriver):
    """A device of the interpreter that does nothing before the host waits for it."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.index = index
        self.queue: deque[Callable[[], Any]] = deque()
        self.done, self.waits = 0, 0
        self.marks: dict[int, int] = {}

    def run_or_capture(self, stream: int, work: Callable[[], Any]) -> None:
        if stream in self._captures:
            super().run_or_capture(stream, work)
        else:
            self.queue.append(work)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """From ordinary host memory at once, as the driver does; from its own and pinned memory in its turn."""
        if any(block <= source < block + each.nbytes - 512 for block, each in self._blocks.items()):
            super().copy(target, source, nbytes, stream)
        else:
            values = ctypes.string_at(source, nbytes)
            self.run_or_capture(stream, lambda: ctypes.memmove(target, values, nbytes))

    def launch_graph(self, executable: int, stream: int) -> None:
        self.queue.append(lambda: super(BehindDriver, self).launch_graph(executable, stream))

    def run_to(self, mark: int) -> None:
        self.waits += 1
        while self.done < mark:
            self.queue.popleft()()
            self.done += 1

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        self.marks[event] = self.done + len(self.queue)

    def synchronize_event(self, event: int) -> None:
        self.run_to(self.marks.get(event, 0))

    def is_event_done(self, event: int) -> bool:
        return self.marks.get(event, 0) <= self.done

    def synchronize_stream(self, stream: int) -> None:
        super().synchronize_stream(stream)
        self.run_to(self.done + len(self.queue))

    def synchronize(self) -> None:
        super().synchronize()
        self.run_to(self.done + len(self.queue))

    def free(self, pointer: int) -> None:
        self.synchronize()
        super().free(pointer)


@pytest.mark.full
@pytest.mark.skipif(not is_interpreted(), reason="a GPU is behind the host by itself")
def test_tokens_are_right_on_a_device_that_runs_as_late_as_it_may() -> None:
    """Nothing is read before it is there, and nothing that the device will read is changed before it did."""
    drivers[1 << 18] = driver = BehindDriver(1 << 18)
    ids = [[7], [1, 2, 3], [4, 5, 6, 7, 8], [9, 9]]
    requests = [Request(each, DRAWN if i % 2 else GREEDY, 5 - i, sequence=i) for i, each in enumerate(ids)]
    expected = by_request(EagerEngine(tiny("cpu")).run(requests), 4)
    stop = Request(ids[0], GREEDY, 5, frozenset(expected[0][2:3]))
    model = tiny(f"cuda:{1 << 18}")
    engine = DeviceEngine(model, rows=2, capacity=32, chunk=4, log_probs=True)
    for _ in range(2):
        driver.synchronize()
        driver.waits = 0
        found = by_request(engine.run([*requests, stop]), 5)
        assert found == [*expected, expected[0][: expected[0].index(expected[0][2])]]
    assert driver.waits <= 5 + sum(map(len, found))  # the host waits for tokens alone


class IdleDriver(BehindDriver):
    """The same, whose kernels compute nothing, quickly."""

    def allocate(self, nbytes: int) -> int:
        pointer = super().allocate(nbytes)
        ctypes.memset(pointer, 0, nbytes)
        return pointer

    allocate_pinned = allocate

    def prepare(self, *what: Any) -> Any:
        _, kernel, grid, args, keywords = what
        return interpreted_launch(
            lambda stream, _: self.run_or_capture(stream, lambda: None), kernel, grid, args, keywords
        )


def generations(engine: DeviceEngine, ids: list[list[int]], count: int) -> None:
    """Runs of requests of mixed lengths; some are left in the middle."""
    for i in range(count):
        each = [Request(x, Sampling(1.0, seed=i), 1 + (i + j) % 9, sequence=j) for j, x in enumerate(ids)]
        list(engine.run(each))
        if i % 7 == 0:
            run = engine.run(each)
            next(run)
            run.close()


def pinned_in_use(device: Device) -> int:
    """Bytes of pinned memory that are not kept for reuse."""
    pool = backend_of(device).pinned
    kept = sum(size * len(blocks) for size, blocks in pool.free.items())
    return pool.reserved - kept - sum(size for _, size, _ in pool.returned)


@pytest.mark.skipif(not is_interpreted(), reason="how late a GPU is changes from run to run")
def test_pinned_memory_has_a_bound_on_a_device_that_runs_as_late_as_it_may() -> None:
    """What is on its way is at most that of a run that was left and of the next one."""
    device = Device("cuda", 1 << 19)
    drivers[device.index] = driver = IdleDriver(device.index)
    engine = DeviceEngine(tiny(str(device)), rows=2, capacity=32, chunk=4, log_probs=True)
    found = []
    for _ in range(3):
        generations(engine, [[7], [1, 2, 3], [4, 5, 6, 7, 8], [9, 9]], 8)
        gc.collect()
        driver.synchronize()
        found.append((cuda.pinned_memory_reserved(str(device)), pinned_in_use(device)))
    assert found[0][0] > 0
    assert {*found} == {(found[0][0], 0)}


def test_a_cache_in_fp8_needs_a_gpu_that_has_such_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(DeviceError, match=r"KV cache in fp8 needs compute capability 8\.9"):
        list(DeviceEngine(tiny(), rows=1, capacity=8, cache="fp8").run([Request([1], GREEDY, 2)]))


def test_weights_that_move_are_captured_anew_and_those_that_change_are_not() -> None:
    model, request = tiny(), Request([1, 2], GREEDY, 4)
    engine = DeviceEngine(model, rows=1, capacity=32)
    first = by_request(engine.run([request]), 1)
    steps, passes = dict(held(model).steps), dict(held(model).passes)
    with genesis.no_grad():
        model.model.norm.weight.mul_(-1)
    changed = by_request(engine.run([request]), 1)
    assert changed != first
    assert (held(model).steps, held(model).passes) == (steps, passes)
    model.model.norm.weight = genesis.nn.Parameter(model.model.norm.weight.detach() * -1)
    assert by_request(engine.run([request]), 1) == first
    assert held(model).steps.keys() == steps.keys()
    assert held(model).steps != steps
    assert held(model).passes.keys() == passes.keys()
    assert held(model).passes != passes


def test_logits_that_are_no_numbers_say_where() -> None:
    model = tiny()
    with genesis.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NumericError, match="logits are NaN") as caught:
        list(DeviceEngine(model, rows=2, capacity=8).run([Request([1, 2], GREEDY, 3)]))
    assert caught.value.where == "position 2"


def test_graphs_and_rows_go_with_the_model() -> None:
    """Without the garbage collector: nothing of an engine is a cycle."""
    pool = backend_for(CUDA).pool  # type: ignore[attr-defined]
    list(DeviceEngine(tiny(), rows=1, capacity=8).run([Request([1], GREEDY, 4)]))  # makes what is made once
    gc.collect()
    pool.end_retired()
    pool.settle()
    gc.disable()
    try:
        count, before, model = graph_count(), pool.allocated, tiny()
        list(DeviceEngine(model, rows=1, capacity=8).run([Request([1], GREEDY, 4)]))
        assert graph_count() == count + 1
        del model
        pool.end_retired()
        cuda.synchronize()
        pool.settle()
        assert graph_count() == count
        assert pool.allocated == before
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*QWEN, *FAMILIES, *EXTRA])
def test_golden_models_alone_and_batched(name: str) -> None:
    """20 prompts of unequal length, greedy and drawn, in float32; the plain engine runs on the CPU."""
    model = genesis_models.load((extra if name in EXTRA else golden)(name).folder, dtype="float32")
    ids = prompts(20, model.config.vocab_size)
    longest = 40 if name == "qwen2-tied" else 12
    cases = [
        [Request(each, sampling, longest - i % 3, sequence=i) for i, each in enumerate(ids)]
        for sampling in (GREEDY, DRAWN)
    ]
    expected = [by_request(EagerEngine(model).run(requests), len(ids)) for requests in cases]
    model.to(device="cuda")
    batched, single = (DeviceEngine(model, rows=n, capacity=96, chunk=c) for n, c in ((8, 30), (1, 64)))
    for requests, tokens in zip(cases, expected, strict=True):
        assert by_request(batched.run(requests), len(ids)) == tokens
        assert [by_request(single.run([each]), 1)[0] for each in requests] == tokens
    assert all(captured(model).values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-tied", "gemma3"])
def test_sixteen_bit_steps_are_near_float32(name: str) -> None:
    """The logits of a step after its row's prompt and continuation, against those of the whole text in float32."""
    reference = genesis_models.load(golden(name).folder, dtype="float32")
    for dtype, most in (("bfloat16", 0.03), ("float16", 0.005)):
        model = genesis_models.load(golden(name).folder, device="cuda", dtype=dtype)
        engine = DeviceEngine(model, rows=3, capacity=64)
        requests = [Request(each, GREEDY, 9) for each in prompts(3, model.config.vocab_size, 30)]
        tokens = by_request(engine.run(requests), 3)
        found = last_logits(model)
        for row, request in enumerate(requests):
            with genesis.no_grad():
                whole = reference(genesis.tensor([[*request.ids, *tokens[row][:-1]]]))[0, -1].numpy()
            assert relative_error(found[row], whole) < most


@pytest.mark.gpu
def test_stops_cancels_and_the_contexts_end_with_rows_in_turn() -> None:
    model = genesis_models.load(golden("qwen3-tied").folder, dtype="float32")
    drawing = Sampling(1.0, seed=1)
    free = by_request(EagerEngine(model).run([Request([1, 2, 3], drawing, 9)]), 1)[0]
    at = next(i for i, token in enumerate(free) if token not in free[:i] and i > 1)
    requests = [
        Request([1, 2, 3], drawing, 9, frozenset({free[at], 319})),
        Request([1] * 120, GREEDY, 1000),
        Request([1, 2, 3], GREEDY, 0),
        Request([7], GREEDY, 20),
        Request([1, 2, 3], drawing, 4),
    ]
    ended = by_request(EagerEngine(model).run(requests), 5)
    ended[3] = ended[3][:6]
    engine = DeviceEngine(model.to(device="cuda"), rows=2, capacity=128)
    for _ in range(3):
        found: list[list[int]] = [[] for _ in requests]
        finished = {}
        for token in engine.run(iter(requests)):
            if token.id is not None:
                found[token.request].append(token.id)
            if token.request == 3 and len(found[3]) == 6:
                engine.cancel(3)
            if token.finish:
                finished[token.request] = token.finish
        assert found == ended
        assert finished == {0: "stop", 1: "context", 2: "length", 4: "length"}


@pytest.mark.gpu
def test_many_generations_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = genesis_models.load(golden("qwen3-tied").folder, device="cuda", dtype="bfloat16")
    engine = DeviceEngine(model, rows=4, capacity=64, log_probs=True)
    ids = prompts(6, 320, 40)

    def held() -> tuple[int, ...]:
        gc.collect()
        cuda.synchronize()
        pinned, files = cuda.pinned_memory_reserved(), len(os.listdir("/proc/self/fd"))
        return (
            cuda.memory_allocated(), cuda.memory_reserved(), pinned, pinned_in_use(CUDA), graph_count(), files,
        )  # fmt: skip

    # How many pinned blocks are on their way depends on how late the GPU is: here as many as if it never came.
    with monkeypatch.context() as never:
        never.setattr(backend_of(CUDA).driver, "is_event_done", lambda event: False)
        generations(engine, ids, 30)
    generations(engine, ids, 9)
    while compilations._work.workers.running:  # in a process by itself; they end in the background
        time.sleep(0.01)
    before = held()
    generations(engine, ids, 300)
    assert held() == before


@pytest.mark.gpu
def test_a_long_text_passes_from_bucket_to_bucket() -> None:
    """Keys of a graph grow with the text: tokens are those of a cache that has them all at once."""
    model = genesis_models.build(TINY | {"max_position_embeddings": 2048}, seed=1)
    rng = np.random.default_rng(5)
    request = Request(rng.integers(0, 40, 500).tolist(), GREEDY, 700)
    expected = by_request(EagerEngine(model).run([request]), 1)
    engine = DeviceEngine(model.to(device="cuda"), rows=1, capacity=2048)
    assert by_request(engine.run([request]), 1) == expected
    assert [key[1] for key in captured(model)] == [512, 1024, 2048]


@pytest.mark.full
@pytest.mark.skipif(not is_interpreted(), reason="other tests share a GPU's memory")
def test_prompts_wait_for_fewer_rows_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 MiB, beside which 64 are left: there are several, then one, then an error that says what to do."""
    longest, driver = 1 << 17, backend_for(CUDA).driver  # type: ignore[attr-defined]
    model, plain = (tiny(device, max_position_embeddings=longest) for device in ("cuda", "cpu"))
    requests = [Request([i + 1, 2], GREEDY, 2) for i in range(5)]
    expected = by_request(EagerEngine(plain).run(requests), 5)
    monkeypatch.setattr(device_rows, "ROOM", 64 << 20)
    for free, rows in ((192, 4), (80, 1), (10, 0)):
        device_rows.release(model)
        gc.collect()  # what other tests left in cycles would make room later
        cuda.empty_cache()
        # Blocks that other tests use in part leave cached memory, which counts as free.
        monkeypatch.setattr(driver, "memory", cuda.memory_allocated() + (free << 20))
        engine = DeviceEngine(model, rows=8, capacity=longest)
        if rows:
            assert by_request(engine.run(requests), 5) == expected
            assert (engine._held or held(model)).cache.rows == rows
        else:
            with pytest.raises(OutOfMemoryError, match=r"has no memory for 16\.0 MiB") as caught:
                list(engine.run(requests))
            assert str(caught.value).endswith(device_rows.ADVICE)
        del engine
    # A short text needs less. Memory that other tests left in the cache would be part of the 10 MiB.
    monkeypatch.setattr(driver, "memory", cuda.memory_reserved() + (10 << 20))
    assert by_request(DeviceEngine(model, rows=8, capacity=64).run(requests), 5) == expected
