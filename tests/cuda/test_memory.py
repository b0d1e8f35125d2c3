"""The pool: counters, peaks, the snapshot, other streams' use, running out, leaks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import cuda
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.memory import Pool
from genesis.backend.cuda.simulated import HostDriver
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import OutOfMemoryError

KIB, MIB = 1 << 10, 1 << 20


class SlowDriver(HostDriver):
    """Host memory whose events happen when they are told to."""

    def __init__(self) -> None:
        super().__init__(0)
        self.happened: set[int] = set()
        self.destroyed: list[int] = []

    def is_event_done(self, event: int) -> bool:
        return event in self.happened

    def synchronize_event(self, event: int) -> None:
        self.happened.add(event)

    def destroy_event(self, event: int) -> None:
        self.destroyed.append(event)


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool(SlowDriver())
    yield found
    found.driver.__dict__["happened"] = {*range(10_000)}


def test_counters_follow_tensors_and_peaks_stay() -> None:
    gc.collect()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    x = genesis.empty(1000, 1000, device="cuda")
    size = -(-x.nbytes // 512) * 512
    assert cuda.memory_allocated() - before == size
    assert cuda.memory_reserved() >= cuda.memory_allocated()
    del x
    assert cuda.memory_allocated() == before
    assert cuda.max_memory_allocated() == before + size
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == before
    assert cuda.memory_cached() == cuda.memory_reserved() == cuda.memory_stats()["reserved_bytes.all.current"]


def test_empty_cache_gives_back_and_the_snapshot_names_the_op() -> None:
    x = genesis.empty(3 * MIB, device="cuda", dtype="uint8")
    rows = [r for r in cuda.memory_snapshot() if r["address"] == x.data_ptr()]
    assert rows == [{"address": x.data_ptr(), "size": 3 * MIB, "state": "allocated", "op": rows[0]["op"]}]
    del x
    cuda.empty_cache()
    assert cuda.memory_reserved() == sum(r["size"] for r in cuda.memory_snapshot())
    free, total = cuda.mem_get_info()
    assert 0 < free <= total


def test_a_block_that_another_stream_uses_waits_for_it(pool: Pool) -> None:
    driver: Any = pool.driver
    block = pool.take(MIB, 0)
    pool.record_stream(block, 7)
    pool.give(block)
    assert pool.allocated == MIB  # in use until stream 7 is past it
    other = pool.take(MIB, 0)
    assert other.pointer != block.pointer
    pool.give(other)
    driver.happened.update(range(1000))
    again = {pool.take(MIB, 0).pointer, pool.take(MIB, 0).pointer}
    assert again == {block.pointer, other.pointer}
    assert len(driver.destroyed) == 1


def test_without_record_stream_it_would_be_reused_at_once(pool: Pool) -> None:
    block = pool.take(MIB, 0)
    pool.give(block)
    assert pool.take(MIB, 0).pointer == block.pointer


def test_who_watches_is_told_at_once_of_what_is_given_back(pool: Pool) -> None:
    seen: list[tuple[int, int]] = []
    before = pool.take(KIB, 0)
    pool.give(before)
    pool.watch = lambda address, nbytes: seen.append((address, nbytes))
    block = pool.take(MIB, 0)
    pool.give(block)
    assert seen == [(block.pointer, MIB), (block.pointer, -MIB)]
    pool.watch = None
    pool.give(pool.take(MIB, 0))
    assert len(seen) == 2
    assert pool.allocated == 0


def test_a_finalizer_may_give_back_while_somebody_watches(pool: Pool) -> None:
    """In the middle of dealing with other blocks, in the same thread."""
    blocks = [pool.take(KIB, 0) for _ in range(4)]

    def watch(address: int, nbytes: int) -> None:
        if nbytes < 0 and blocks:
            pool.give(blocks.pop())

    pool.watch = watch
    pool.give(blocks.pop())
    assert not blocks
    assert pool.allocated == 0


def test_what_was_free_before_a_capture_is_not_held_by_it() -> None:
    graph, other, x = FunctionGraph(), FunctionGraph(), genesis.ones(1000, device="cuda")
    other.capture(lambda: x * 2)
    graph.warm_up(lambda: x + 1)
    idle = genesis.empty(3 * MIB, dtype="uint8", device="cuda")
    in_use = cuda.memory_allocated()
    del idle
    graph.record(lambda: x + 1)
    assert graph._graph is not None
    assert not graph._graph.held
    assert cuda.memory_allocated() <= in_use - 3 * MIB + 4 * KIB


def test_record_stream_of_a_tensor_holds_its_memory() -> None:
    side = cuda.Stream()
    x = genesis.empty(5 * MIB, dtype="uint8", device="cuda")
    address, in_use = x.data_ptr(), cuda.memory_allocated()
    x.record_stream(side)
    del x
    assert cuda.memory_allocated() == in_use
    cuda.synchronize()
    y = genesis.empty(5 * MIB, dtype="uint8", device="cuda")  # the event has happened
    assert cuda.memory_allocated() == in_use
    assert y.data_ptr() == address


def test_a_tensor_made_on_a_side_stream_needs_no_record_for_that_stream() -> None:
    side = cuda.Stream()
    with cuda.stream(side):
        x = genesis.empty(MIB, dtype="uint8", device="cuda")
    x.record_stream(side)
    assert x.array.storage.block.streams is None


@pytest.mark.parametrize("room", range(0, 9))
def test_whichever_allocation_fails_the_error_names_what_matters(room: int) -> None:
    driver = HostDriver(0)
    driver.memory = room * 20 * MIB
    pool = Pool(driver)
    pool.owner = "softmax"
    taken = [pool.take(19 * MIB, 0) for _ in range(room)]
    with pytest.raises(OutOfMemoryError) as caught:
        pool.take(19 * MIB, 0)
    assert caught.value.exit_code == 7
    text = str(caught.value)
    for part in ("19.0 MiB for softmax", "are free", OutOfMemoryError.ADVICE):
        assert part in text
    if taken:
        assert f"largest owners: softmax {19.0 * room:.1f} MiB in {room} block{'s' * (room > 1)}" in text
        pool.give(taken.pop())
        assert pool.take(19 * MIB, 0)  # it goes on with what is left


def test_free_memory_of_other_streams_is_given_back_before_giving_up() -> None:
    driver = HostDriver(0)
    driver.memory = 40 * MIB
    pool = Pool(driver)
    pool.give(pool.take(30 * MIB, 1))
    assert pool.take(30 * MIB, 2).size >= 30 * MIB


def test_what_the_driver_takes_besides_the_pool_gets_its_unused_segments_or_the_same_error() -> None:
    driver = HostDriver(0)
    driver.memory = 40 * MIB
    pool = Pool(driver)
    pool.give(pool.take(30 * MIB, 0))
    code = pool.with_room("the code of a kernel", lambda: driver.allocate(20 * MIB))
    assert pool.reserved == 0
    kept = pool.take(10 * MIB, 0)
    with pytest.raises(OutOfMemoryError, match=r"no memory for the code of a kernel: 10\.0 MiB .* 10\.0 MiB in all"):
        pool.with_room("the code of a kernel", lambda: driver.allocate(20 * MIB))
    driver.free(code)
    pool.give(kept)


def test_a_finalizer_in_the_middle_of_a_merge_loses_no_block(pool: Pool) -> None:
    """Merging allocates, so the collector may give blocks back while it runs."""
    blocks = [pool.take(size * 512, 0) for size in range(1, 60)]
    late = blocks.pop()

    class Late:
        def __del__(self) -> None:
            pool.give(late)

    for block in blocks:
        pool.give(block)
    cycle: list[Any] = [Late()]
    cycle.append(cycle)
    del cycle
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        pool.arenas[0].merge()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert pool.allocated == 0
    pool.empty_cache()
    assert pool.reserved == 0


def test_leak_check_is_flat_and_sees_a_leak() -> None:
    kept = []

    def step() -> None:
        x = genesis.ones(8, 64, device="cuda")
        (x + x).mul_(2.0)

    def leaky() -> None:
        kept.append(genesis.ones(8, 64, device="cuda"))

    flat = cuda.leak_check(step, 100)
    assert flat.growth == 0
    assert flat.peak > flat.before
    assert cuda.leak_check(leaky, 10).growth == 10 * 8 * 64 * 4


def test_poison_fills_fresh_memory() -> None:
    before = cuda.set_poison(True)
    try:
        assert np.isnan(genesis.empty(100, device="cuda").cpu().numpy()).all()
    finally:
        assert cuda.set_poison(before)


def test_finalizers_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may run in the thread that compiles the kernel for which another thread waits, with every lock."""
    backend = backend_of(Device("cuda", 0))
    side = cuda.Stream()
    graph, x, pinned = FunctionGraph(), genesis.ones(4, device="cuda"), genesis.ones(1000).pin_memory()
    graph.capture(lambda: x + 1)
    on_device = pinned.to("cuda", non_blocking=True)
    on_device.record_stream(side)
    before = backend.pool.allocated
    held: list[object] = [graph, pinned, on_device]
    del graph, pinned, on_device
    with monkeypatch.context() as patch:
        for name in ("record_event", "synchronize", "create_event", "flush", "_enter_and_flush"):
            if hasattr(backend.driver, name):
                patch.setattr(backend.driver, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
        with backend.pool._lock:
            thread = threading.Thread(target=held.clear, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
            assert not held
    assert len(backend.pool.retired) == 1
    cuda.empty_cache()
    assert not backend.pool.retired
    assert not backend.pool.returned
    assert backend.pool.allocated < before


@pytest.mark.gpu
def test_a_thousand_steps_of_autograd_are_flat() -> None:
    x = genesis.randn(256, 256, device="cuda", requires_grad=True)

    def step() -> None:
        x.grad = None
        ((x @ x).exp().sum()).backward()

    assert cuda.leak_check(step, 1000, warm_up=5).growth == 0
