"""Host memory: reuse of blocks, counters, poison, leaks, the out-of-memory path."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from genesis.array import Array, empty, from_numpy
from genesis.backend.cpu import CpuStorage, Pool, backend, pool, scratch
from genesis.dtypes import ALL, float32, float64, uint8
from genesis.errors import OutOfMemoryError
from genesis.ops.elementwise import add, exp

MIB = 1 << 20


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """An empty pool, so that counters start from what is alive."""
    gc.collect()
    pool.trim()
    yield
    pool.poison = False


def test_a_block_is_used_again() -> None:
    first = empty((MIB,), uint8)
    address = first.data_ptr()
    del first
    assert pool.cached == MIB
    second = empty((MIB,), uint8)
    assert second.data_ptr() == address and pool.cached == 0


def test_sizes_are_rounded_to_pages_and_only_equal_ones_are_exchanged() -> None:
    first = empty((MIB - 5,), uint8)
    address = first.data_ptr()
    del first
    other = empty((MIB + 4096,), uint8)
    assert other.data_ptr() != address and pool.cached == MIB
    same = empty((MIB - 100,), uint8)
    assert same.data_ptr() == address


def test_small_blocks_are_not_kept() -> None:
    small = empty((1000,), float32)
    del small
    assert pool.cached == 0 and not pool.free


def test_counters() -> None:
    before = pool.allocated
    pool.max_allocated = before
    a, b = empty((MIB,), uint8), empty((100,), uint8)
    assert pool.allocated - before == MIB + 100
    del a
    assert pool.allocated - before == 100
    assert pool.max_allocated - before == MIB + 100
    del b
    assert pool.allocated == before


def test_every_view_of_a_storage_keeps_it() -> None:
    array = empty((MIB,), uint8)
    address, view = array.data_ptr(), array.view((10,), (1,), 5)
    del array
    assert pool.cached == 0
    assert view.data_ptr() == address + 5
    del view
    assert pool.cached == MIB


@pytest.mark.parametrize("handed", ["whole", "slice", "view of a view", "dlpack", "buffer", "transposed"])
def test_a_numpy_view_that_was_handed_out_keeps_its_memory_from_reuse(handed: str) -> None:
    array = empty((1024, 256), float32)
    values = array.numpy()
    values[...] = 7
    kept: object = {
        "whole": values,
        "slice": values[3:5, ::2],
        "view of a view": values.reshape(-1)[10:].view(np.uint8)[4:],
        "dlpack": np.from_dlpack(values),
        "buffer": memoryview(values.data),
        "transposed": values.T,
    }[handed]
    before = np.array(kept).copy()
    del array, values
    gc.collect()
    assert pool.cached == 0, "the block went back to the pool while numpy could still see it"
    others = [empty((1024, 256), float32) for _ in range(3)]
    for other in others:
        other.numpy()[...] = -1
    assert np.array_equal(np.array(kept), before)
    del others


def test_a_numpy_view_counts_no_longer_as_allocated() -> None:
    before = pool.allocated
    array = empty((MIB,), uint8)
    kept = array.numpy()
    del array
    assert pool.allocated == before and kept.size == MIB
    del kept
    assert pool.cached == 0, "the block was already given up; it belongs to numpy"


def test_memory_that_came_from_numpy_never_enters_the_pool() -> None:
    before = pool.allocated
    array = from_numpy(np.ones(MIB))
    assert pool.allocated == before
    del array
    assert pool.cached == 0


@pytest.mark.parametrize("size", [10, MIB])
def test_poison_fills_fresh_and_used_memory_with_nan(size: int) -> None:
    used = empty((size,), float64)
    used.numpy()[...] = 1
    del used
    pool.poison = True
    for dtype in ALL:
        array = empty((size,), dtype)
        raw = array.view_np().view(np.uint8)
        assert (raw == 0xFF).all()
        if dtype.is_floating_point:
            assert np.isnan(array.view_np().astype(np.float64)).all()
        del array, raw


def test_a_step_takes_no_fresh_memory_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and an update in place, all from blocks of the step before."""
    import genesis

    w = genesis.ones(MIB // 8, dtype=genesis.float64, requires_grad=True)

    def step() -> None:
        loss = ((w * 0.5).exp() * w).sum()
        loss.backward()
        with genesis.no_grad():
            w.sub_(w.grad * 0.1)
        w.grad = None

    step()
    fresh: list[int] = []
    take = Pool._fresh

    def counted(self: Pool, size: int) -> np.ndarray:
        fresh.append(size)
        return take(self, size)

    monkeypatch.setattr(Pool, "_fresh", counted)
    for _ in range(3):
        step()
    assert not [size for size in fresh if size >= MIB]


def test_ops_leak_nothing() -> None:
    """A thousand calls, through the pool and beside it, end where they began."""
    x, small = empty((MIB // 8,), float64), empty((10,), float64)
    x.numpy()[...] = small.numpy()[...] = 0.5
    exp(x), exp(small)
    before, cached = pool.allocated, pool.cached
    gc.disable()
    try:
        for _ in range(1000):
            add(exp(small), small)
        for _ in range(50):
            add(exp(x), x)
    finally:
        gc.enable()
    assert pool.allocated == before
    assert pool.cached <= cached + 2 * x.nbytes


def test_scratch_returns_its_memory_also_after_an_error() -> None:
    before = pool.allocated
    with scratch((256, 1024), np.float32) as block:
        assert block.shape == (256, 1024) and block.dtype == np.float32
        assert pool.allocated == before + MIB
        del block
    with pytest.raises(ValueError, match="inside"), scratch((256, 1024), np.float32):
        raise ValueError("inside")
    assert pool.allocated == before and pool.cached == MIB


def test_too_much_memory_is_an_error_that_leaves_the_counters() -> None:
    kept = empty((MIB,), uint8)
    before, peak = pool.allocated, pool.max_allocated
    for size in (1 << 60, 1 << 80):
        with pytest.raises(OutOfMemoryError, match=f"no room for {size:,} bytes; Genesis holds {before:,}") as caught:
            empty((size,), uint8)
        assert caught.value.exit_code == 7 and "lower the batch size" in caught.value.next
        assert isinstance(caught.value, MemoryError)
    assert (pool.allocated, pool.max_allocated) == (before, peak)
    del kept


def test_unused_blocks_are_given_up_before_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt, after a trim, may succeed."""
    mine = Pool()
    mine.give(mine.take(MIB), True)
    assert mine.cached == MIB
    real, attempts = np.empty, []

    def scarce(size: int, dtype: type) -> np.ndarray:
        attempts.append(mine.cached)
        if mine.cached:
            raise MemoryError
        return real(size, dtype)

    monkeypatch.setattr(np, "empty", scarce)
    assert mine.take(2 * MIB).nbytes == 2 * MIB
    assert attempts == [MIB, 0]


def test_blocks_of_sizes_that_are_no_longer_used_are_given_up() -> None:
    """What lies idle stays below a quarter of what is in use, or 64 MiB."""
    mine = Pool()
    for i in range(40):
        mine.give(mine.take((4 + i) * MIB), True)
    assert mine.cached <= (64 + 43) * MIB
    mine.trim()
    assert (mine.cached, mine.free) == (0, {})


def test_threads_take_and_give_at_once() -> None:
    mine, failures = Pool(), []

    def work(mark: int) -> None:
        for _ in range(200):
            block = mine.take(MIB)
            block[:100] = mark
            if (block[:100] != mark).any():
                failures.append(mark)
            mine.give(block, True)

    threads = [threading.Thread(target=work, args=(m,)) for m in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and mine.allocated == 0
    assert mine.cached == sum(len(blocks) for blocks in mine.free.values()) * MIB


def test_a_storage_knows_its_bytes_and_address() -> None:
    storage = backend.allocate(100)
    assert isinstance(storage, CpuStorage)
    assert (storage.nbytes, storage.version) == (100, 0)
    assert storage.pointer == storage.block.ctypes.data
    assert Array(storage, (25,), (1,), float32).data_ptr() == storage.pointer


def test_tensors_alive_at_the_end_of_the_program_are_silent() -> None:
    """Storages may be freed after the modules they need; nothing may be printed then."""
    script = (
        "import genesis\n"
        "class Late:\n"
        "    def __init__(self): self.me, self.x = self, genesis.zeros(100_000)\n"
        "late, x = Late(), genesis.ones(3)\n"
        "genesis.keep = [late, x]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
