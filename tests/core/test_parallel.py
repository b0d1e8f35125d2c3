"""Threads of the CPU backend: splitting, errors, nesting, sizes, forks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from genesis.backend import cpu
from genesis.backend.cpu import parallel, set_threads
from genesis.ops.blocks import BLOCK, split, sweep

BIG = cpu._PARALLEL_FROM


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    count = cpu._workers.count
    yield
    set_threads(count)


def pieces(rows: int, elements: int) -> list[tuple[int, int]]:
    """The pieces that `parallel` makes, in order."""
    found: list[tuple[int, int]] = []
    parallel(lambda start, stop: found.append((start, stop)), rows, elements)
    return sorted(found)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_pieces_cover_all_rows_once(count: int, rows: int) -> None:
    set_threads(count)
    found = pieces(rows, BIG)
    assert len(found) == min(count, rows)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in found]
    assert max(sizes) - min(sizes) <= 1


def test_small_work_stays_in_its_thread() -> None:
    set_threads(4)
    assert pieces(100, BIG - 1) == [(0, 100)]
    assert pieces(0, BIG) == [(0, 0)]


def test_pieces_run_at_the_same_time() -> None:
    set_threads(3)
    together = threading.Barrier(3)

    def work(start: int, stop: int) -> None:
        together.wait(10)  # a timeout breaks the barrier and raises

    parallel(work, 3, BIG)


def test_work_inside_a_piece_is_not_split_again() -> None:
    """With every worker waiting for others there would be nobody left to do the work."""
    set_threads(2)
    inner: list[tuple[int, int]] = []
    parallel(lambda a, b: parallel(lambda c, d: inner.append((c, d)), 10, BIG), 2, BIG)
    assert inner == [(0, 10), (0, 10)]
    assert len(pieces(2, BIG)) == 2, "the mark stays on after the piece"


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_in_a_piece_arrives_after_all_pieces_have_ended(bad: int) -> None:
    set_threads(2)
    ended = []

    def work(start: int, stop: int) -> None:
        if start == bad:
            raise ValueError(f"piece {start}")
        time.sleep(0.05)
        ended.append(start)

    with pytest.raises(ValueError, match=f"piece {bad}"):
        parallel(work, 2, BIG)
    assert ended == [1 - bad]
    assert len(pieces(2, BIG)) == 2


def test_floating_point_warnings_are_off_in_every_piece() -> None:
    """Division by zero gives inf, in workers as in the caller; pytest turns warnings into errors."""
    set_threads(2)
    x = np.zeros(2)

    def work(start: int, stop: int) -> None:
        x[start:stop] = 1 / x[start:stop]

    parallel(work, 2, BIG)
    assert np.isinf(x).all()


def test_threads_may_be_changed_at_any_time() -> None:
    for count in (3, 1, 2, 0, -5):
        set_threads(count)
        assert len(pieces(8, BIG)) == max(count, 1)


def test_callers_in_several_threads() -> None:
    set_threads(2)
    results: dict[int, bool] = {}

    def work(k: int) -> None:
        out = np.empty(BIG)
        for _ in range(5):
            sweep(np.add, out, np.full(BIG, float(k)), 1.0)
        results[k] = bool((out == k + 1).all())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == dict.fromkeys(range(4), True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    """The parent's threads do not exist in the child: work sent to them would wait for ever."""
    set_threads(2)
    assert len(pieces(4, BIG)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, for forking a process with threads
        child = os.fork()
    if child == 0:
        os._exit(0 if len(pieces(4, BIG)) == 2 else 1)
    deadline = time.monotonic() + 20
    done, status = 0, 0
    while done == 0 and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if done == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == child and status == 0


# --- Splitting arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(BIG,), (4, BIG // 4), (BIG // 2, 2), (3, BIG // 2), (1, BIG), (2, 2, BIG // 4)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sweep_is_split_along_a_long_axis_and_gives_the_same_bits(shape: tuple[int, ...], count: int) -> None:
    set_threads(count)
    rng = np.random.default_rng(0)
    x, row = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape[-1:]).astype(np.float32)
    out = np.full(shape, np.nan, np.float32)
    calls: list[int] = []

    def work(target: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        calls.append(target.size)
        np.multiply(x, y, out=target)

    split(work, out, x, row)
    assert out.tobytes() == (x * row).tobytes()
    assert (
        len(calls) == max(count, -(-out.size // BLOCK))
        and max(calls) - min(calls) <= 2 * max(out.shape[1:], default=1) * 2
    )


FAULTS = """
import resource
import genesis
from genesis.nn.functional import silu
x = genesis.zeros(1024, 1024)
faults = []
for _ in range(6):  # in one of them a thread may get its first memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    silu(x)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc")
def test_temporaries_of_a_formula_keep_their_pages() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # 896 without the freed block in `genesis.backend.cpu`


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("function", [np.exp, np.log, np.sin, np.tanh, np.sqrt, np.expm1])
def test_large_elementwise_work_does_not_depend_on_the_number_of_threads(function: np.ufunc, dtype: type) -> None:
    """Ends of pieces fall inside vector registers: the tail must round as the body does."""
    x: np.ndarray = np.random.default_rng(1).uniform(0.1, 5, BIG + 13).astype(dtype)
    results = []
    for count in (1, 2, 3):
        set_threads(count)
        for view in (x, x[::2], x.reshape(-1, 1)):
            out: np.ndarray = np.empty(view.shape, dtype)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cpu, "_PARALLEL_FROM", 1)
                sweep(function, out, view)
            results.append(out.tobytes())
    assert results[:3] == results[3:6] == results[6:]
