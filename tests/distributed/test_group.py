"""One suite for every `Group`, equal bits: alone, threads over pairs of sockets, processes, and NCCL.

Without a GPU NCCL is a fake, and the arrays are those of Triton's interpreter. `test_nccl_on_gpus.py` runs the same
tests on GPUs, as many ranks of one pytest each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genesis.array import Array, empty, from_numpy
from genesis.backend import CPU, backend_for
from genesis.distributed import Alone, Group, Peers, PeersGroup
from genesis.distributed import group as group_module
from genesis.dtypes import DType, as_dtype, bfloat16, bool_, float16, float32, float64, int64
from genesis.errors import DTypeError, ShapeError
from tests.distributed import nccl_ranks
from tests.distributed.forks import ended, start_ranks
from tests.distributed.pairs import pairs

Work = Callable[[Group], Any]

DTYPES = {"float32": float32, "bfloat16": bfloat16, "int64": int64, "float16": float16, "float64": float64}
PARTS = {1: [37], 2: [33, 4], 3: [0, 36, 1], 4: [1, 0, 35, 1]}


def alone(size: int, work: Work, folder: Path) -> list[Any]:
    assert size == 1
    return [work(Alone())]


def threads(size: int, work: Work, folder: Path) -> list[Any]:
    """What `work` returns on each of `size` threads."""
    results: list[Any] = [None] * size

    def run(peers: Peers) -> None:
        with peers:
            results[peers.rank] = work(PeersGroup(peers))

    started = [threading.Thread(target=run, args=(peers,)) for peers in pairs(size, limit_s=20)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return results


def processes(size: int, work: Work, folder: Path) -> list[Any]:
    """What `work` returns on each of `size` processes."""
    forks = ended(start_ranks(size, lambda peers: work(PeersGroup(peers)), folder))
    assert [each.code for each in forks] == [0] * size, [each.error for each in forks]
    return [each.value for each in forks]


def nccl(size: int, work: Work, folder: Path) -> list[Any]:
    """What `work` returns on each of `size` processes over the fake of NCCL."""
    forks = nccl_ranks.started(size, lambda peers, group: work(group), folder)
    assert [each.code for each in forks] == [0] * size, [each.error for each in forks]
    return [each.value for each in forks]


def gpus(size: int, work: Work, folder: Path) -> list[Any]:
    """The same on GPUs: this process is one of the ranks, and all of them are here."""
    peers, group = nccl_ranks.on_gpu()
    said = peers.gather_json("result", work(group))
    return list(peers.broadcast_json("results", said))


RUNS: list[tuple[Any, int]] = [(alone, 1), *((threads, n) for n in (1, 2, 3, 4)), (processes, 2), (processes, 4)]
RUNS += [(nccl, 1), (nccl, 2), (nccl, 3)]
if nccl_ranks.IS_ONE:
    RUNS = [(gpus, nccl_ranks.count())]


def _marks(run: Any, size: int) -> list[pytest.MarkDecorator]:
    """The fake is over the interpreter's memory; two ranks show most."""
    return [pytest.mark.host, *([] if size == 2 else [pytest.mark.full])] if run is nccl else []


GROUPS = [pytest.param(run, n, marks=_marks(run, n), id=f"{run.__name__}-{n}") for run, n in RUNS]
on_every_group = pytest.mark.parametrize(("run", "size"), GROUPS)


def values(rank: int, length: int, dtype: DType) -> np.ndarray:
    """Of a rank: magnitudes that make the order of a sum visible, a -0 and an infinity."""
    draw = np.random.default_rng([rank, length])
    if dtype is int64:
        return draw.integers(-(2**62), 2**62, length)
    made = draw.standard_normal(length) * 10.0 ** draw.integers(-3, 4, length)
    made[:1], made[5:6] = -0.0, np.inf
    return made.astype(dtype.numpy)


def expected_sum(size: int, length: int, dtype: DType, out: DType) -> np.ndarray:
    """By the definition: in float32, in the order of the ranks, rounded once."""
    exact = np.float32 if dtype in (bfloat16, float16) else dtype.numpy
    total = values(0, length, dtype).astype(exact)
    with np.errstate(all="ignore"):
        for rank in range(1, size):
            total = total + values(rank, length, dtype).astype(exact)
        return total.astype(out.numpy)


def given(group: Any, values: np.ndarray) -> Array:
    """An array of the group's device."""
    made = empty(values.shape, as_dtype(values.dtype), group.device)
    backend_for(group.device).from_numpy(values, made)
    return made


def bits(array: Array) -> list[int]:
    return of(array.numpy())


def of(array: np.ndarray) -> list[int]:
    return array.view(np.uint8).tolist()


def cuts(size: int) -> list[tuple[int, list[int] | None]]:
    """Lengths and parts: equal ones, none, odd ones."""
    return [(64 * size, None), (0, None), (0, [0] * size), (37, PARTS[size])]


@on_every_group
def test_reduce_scatter(run: Any, size: int, tmp_path: Path) -> None:
    """Every dtype, also from 2-byte floats to float32, into memory of its own and into the source's."""
    pairs = [(dtype, dtype) for dtype in DTYPES.values()] + [(bfloat16, float32), (float16, float32)]

    def work(group: Group) -> list[list[int]]:
        found = []
        for dtype, to in pairs:
            for length, parts in cuts(size):
                source = given(group, values(group.rank, length, dtype))
                mine = parts[group.rank] if parts else length // size
                start = sum(parts[: group.rank]) if parts else mine * group.rank
                out = empty((mine,), to, group.device)
                group.reduce_scatter(source, out, parts)
                found.append(bits(out))
                if to is dtype:
                    group.reduce_scatter(source, source.view((mine,), (1,), start), parts)
                    found.append(of(source.numpy()[start : start + mine]))
        return found

    results = run(size, work, tmp_path)
    for rank, found in enumerate(results):
        expected = []
        for dtype, to in pairs:
            for length, parts in cuts(size):
                mine = parts[rank] if parts else length // size
                start = sum(parts[:rank]) if parts else mine * rank
                total = expected_sum(size, length, dtype, to)[start : start + mine]
                expected += [of(total)] * (2 if to is dtype else 1)
        assert found == expected, rank


@on_every_group
def test_a_sum_that_starts_from_what_is_there(run: Any, size: int, tmp_path: Path) -> None:
    """Micro-batches one after the other, exchanged as they come, have the bits of one rank that adds them all."""
    pairs = [(float32, float32), (bfloat16, float32), (bfloat16, bfloat16), (int64, int64), (float64, float64)]

    def work(group: Group) -> list[list[int]]:
        found = []
        for dtype, to in pairs:
            for length, parts in cuts(size):
                mine = parts[group.rank] if parts else length // size
                out = empty((mine,), to, group.device)
                for turn in range(3):
                    source = given(group, values(turn * size + group.rank, length, dtype))
                    group.reduce_scatter(source, out, parts, adds=turn > 0)
                found.append(bits(out))
        return found

    results = run(size, work, tmp_path)
    for rank, found in enumerate(results):
        expected = []
        for dtype, to in pairs:
            exact = np.float32 if dtype is bfloat16 else dtype.numpy
            for length, parts in cuts(size):
                mine = parts[rank] if parts else length // size
                start = sum(parts[:rank]) if parts else mine * rank
                total = expected_sum(size, length, dtype, to)
                with np.errstate(all="ignore"):
                    for turn in (1, 2):
                        wide = total.astype(exact)
                        for each in range(size):
                            wide = wide + values(turn * size + each, length, dtype).astype(exact)
                        total = wide.astype(to.numpy)
                expected.append(of(total[start : start + mine]))
        assert found == expected, rank


@on_every_group
def test_all_gather(run: Any, size: int, tmp_path: Path) -> None:
    """Of parts in memory of their own, and of parts that are where they belong already."""

    def work(group: Group) -> list[list[int]]:
        found = []
        for dtype in DTYPES.values():
            for length, parts in cuts(size):
                mine = parts[group.rank] if parts else length // size
                start = sum(parts[: group.rank]) if parts else mine * group.rank
                whole = values(7, length, dtype)
                out = given(group, np.zeros(length, dtype.numpy))
                group.all_gather(given(group, whole[start : start + mine]), out, parts)
                found.append(bits(out))
                there = np.zeros(length, dtype.numpy)
                there[start : start + mine] = whole[start : start + mine]
                out = given(group, there)
                group.all_gather(out.view((mine,), (1,), start), out, parts)
                found.append(bits(out))
        return found

    expected = [of(values(7, n, dtype)) for dtype in DTYPES.values() for n, _ in cuts(size) for _ in range(2)]
    assert run(size, work, tmp_path) == [expected] * size


@on_every_group
def test_gather(run: Any, size: int, tmp_path: Path) -> None:
    """On every rank once."""

    def work(group: Group) -> list[list[int]]:
        found = []
        for root in range(size):
            for length, parts in cuts(size):
                parts = parts or [length // size] * size
                start = sum(parts[: group.rank])
                own = given(group, values(root, length, float32)[start : start + parts[group.rank]])
                out = given(group, np.zeros(length, np.float32)) if group.rank == root else None
                group.gather(own, out, parts, root)
                found += [] if out is None else [bits(out)]
        return found

    expected = [[of(values(root, n, float32)) for n, _ in cuts(size)] for root in range(size)]
    assert run(size, work, tmp_path) == expected


@on_every_group
def test_all_reduce_and_broadcast(run: Any, size: int, tmp_path: Path) -> None:
    """Empty, one element, odd and larger than a block."""
    lengths = (0, 1, 37)

    def work(group: Group) -> list[list[int]]:
        found = []
        for dtype in DTYPES.values():
            for length in lengths:
                x = given(group, values(group.rank, length, dtype))
                group.all_reduce(x)
                found.append(bits(x))
                x = given(group, values(group.rank, length, dtype))
                group.broadcast(x, size - 1)
                found.append(bits(x))
        return found

    expected = []
    for dtype in DTYPES.values():
        for length in lengths:
            expected += [of(expected_sum(size, length, dtype, dtype)), of(values(size - 1, length, dtype))]
    assert run(size, work, tmp_path) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_change_nothing(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that travel in several blocks have the bits of those that travel in one."""
    length = 96 * size

    def work(group: Group) -> list[list[int]]:
        x, out = given(group, values(group.rank, length, bfloat16)), empty((96,), float32)
        group.reduce_scatter(x, out)
        group.all_reduce(x)
        gathered = empty((length,), float32)
        group.all_gather(out, gathered)
        return [bits(x), bits(gathered)]

    whole = threads(size, work, tmp_path)
    monkeypatch.setattr(group_module, "_BLOCK", 7)
    assert threads(size, work, tmp_path) == whole
    assert whole[0][1] == of(expected_sum(size, length, bfloat16, float32))


def test_a_long_array(tmp_path: Path) -> None:
    """More than a connection buffers, in both directions: nobody waits for each other."""
    length = 32 * 4 * 9001

    def work(group: Group) -> bool:
        x = given(group, np.full(length, group.rank + 1, np.float32))
        out = empty((length // 4,), float32)
        group.reduce_scatter(x, out)
        group.all_gather(out, x)
        group.broadcast(x, 3)
        return bool((x.view_np() == 10).all())

    assert processes(4, work, tmp_path) == [True] * 4


def test_order_of_ranks_is_visible() -> None:
    """The check of the order could fail: another order gives other bits."""
    rows = [values(rank, 64, bfloat16).astype(np.float32) for rank in range(4)]
    assert ((rows[0] + rows[1]) + rows[2] + rows[3]).tobytes() != ((rows[3] + rows[2]) + rows[1] + rows[0]).tobytes()


def flat(length: int, dtype: DType = float32) -> Array:
    return from_numpy(np.zeros(length, dtype.numpy))


ERRORS: dict[str, tuple[type[Exception], str, Work]] = {
    "odd size": (ShapeError, "37 elements", lambda g: g.reduce_scatter(flat(37), flat(37))),
    "parts of another sum": (ShapeError, r"the parts \[31\]", lambda g: g.all_gather(flat(31), flat(32), [31])),
    "too many parts": (ShapeError, r"the parts \[16, 16\]", lambda g: g.all_gather(flat(16), flat(32), [16, 16])),
    "a negative part": (ShapeError, r"the parts \[-1\]", lambda g: g.all_gather(flat(32), flat(32), [-1])),
    "a part of another size": (ShapeError, "an array of 31", lambda g: g.reduce_scatter(flat(32), flat(31))),
    "two dimensions": (ShapeError, "one dimension", lambda g: g.all_reduce(empty((2, 2), float32))),
    "strides": (ShapeError, "contiguous", lambda g: g.all_reduce(flat(4).view((2,), (2,)))),
    "bool": (DTypeError, "cannot be added", lambda g: g.all_reduce(flat(4, bool_))),
    "narrower": (DTypeError, "not genesis.bfloat16", lambda g: g.reduce_scatter(flat(32), flat(32, bfloat16))),
    "another dtype": (DTypeError, "do not fit an array", lambda g: g.all_gather(flat(32), flat(32, bfloat16))),
    "no such rank": (ShapeError, "root 1", lambda g: g.broadcast(flat(32), 1)),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("make", [Alone, lambda: PeersGroup(Peers(0, 1))], ids=["alone", "peers"])
def test_errors(make: Callable[[], Group], case: str) -> None:
    kind, text, work = ERRORS[case]
    with pytest.raises(kind, match=text):
        work(make())


def test_parts_that_add_up_have_none_below_zero() -> None:
    rank = SimpleNamespace(rank=1, size=2, device=CPU)
    assert group_module.parts_of(rank, flat(32), flat(32), [0, 32]) == [0, 32]
    with pytest.raises(ShapeError, match=r"the parts \[-1, 33\]"):
        group_module.parts_of(rank, flat(32), flat(33), [-1, 33])


def test_ranks_with_other_arrays(tmp_path: Path) -> None:
    """A call with another size or dtype is refused on every rank before anything is added."""

    def work(peers: Peers) -> None:
        PeersGroup(peers).all_reduce(flat(32 + peers.rank // 2))

    for each in ended(start_ranks(3, work, tmp_path)):
        assert each.code == 10
        assert "the ranks make different calls: rank 2: all_reduce float32 33" in each.error["what"]
