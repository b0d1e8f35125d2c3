"""genesis.utils.data: batches in this process and of workers, and errors and deaths of workers."""

from __future__ import annotations

import os
import signal
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.errors import DistributedError, ShapeError
from genesis.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
    random_split,
)

Point = namedtuple("Point", "x y")


class Examples(Dataset[Any]):
    """The numbers below `n`, one of which goes wrong."""

    def __init__(self, n: int, fault: str = "", at: int = 5) -> None:
        self.n, self.fault, self.at = n, fault, at

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if i == self.at and self.fault == "raise":
            raise KeyError(f"no example {i}")
        if i == self.at and self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if i == self.at and self.fault == "hang":
            time.sleep(60)
        return i if self.fault != "pid" else os.getpid()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, 7, step))


def test_collate_takes_every_type() -> None:
    batch = default_collate([Point(1, {"a": 1.5, "s": "u"}), Point(2, {"a": 2.5, "s": "v"})])
    assert isinstance(batch, Point) and batch.x.dtype is genesis.int64 and batch.y["a"].dtype is genesis.float64
    assert batch.y["s"] == ["u", "v"]
    arrays = default_collate([(np.float32(1), np.ones(2), genesis.ones(2), [True, 2])] * 3)
    assert isinstance(arrays, list) and [a.shape for a in arrays[:3]] == [(3,), (3, 2), (3, 2)]
    assert arrays[0].dtype is genesis.float32 and arrays[3][0].tolist() == [True] * 3
    converted = default_convert([np.arange(2), "text", (np.int64(3), None)])
    assert converted[0].tolist() == [0, 1] and converted[1:] == ["text", [genesis.tensor(3), None]]
    with pytest.raises(TypeError):
        default_collate([object()])
    with pytest.raises(ShapeError):
        default_collate([[1], [1, 2]])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_streams(workers: int) -> None:
    data = TensorDataset(genesis.arange(7.0), genesis.arange(7))
    loader: DataLoader[Any] = DataLoader(data, 3, drop_last=True, num_workers=workers)
    assert [y.tolist() for _, y in loader] == [[0, 1, 2], [3, 4, 5]] and len(loader) == 2
    assert sorted(int(i) for b in DataLoader(Stream(), 2, num_workers=workers) for i in b) == list(range(7))
    parameter = genesis.nn.Parameter(genesis.ones(2))
    ((one,),) = [list(b) for b in DataLoader([(parameter,)], batch_size=None, num_workers=workers)]  # type: ignore[arg-type]
    assert type(one) is genesis.nn.Parameter and one.requires_grad


def test_a_worker_that_raises() -> None:
    with pytest.raises(KeyError, match=r"(?s)DataLoader worker 1.*__getitem__.*no example 5"):
        list(DataLoader(Examples(8, "raise"), num_workers=2))


def test_a_worker_that_is_killed() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"worker 1 \(pid \d+\) was killed by signal 9"):
        list(DataLoader(Examples(8, "die"), num_workers=2))
    assert time.monotonic() - begin < 3


def test_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.utils.data.dataloader.PATIENCE", 0.1)
    with pytest.raises(DistributedError, match=r"within 0\.3 s"):
        list(DataLoader(Examples(8, "hang", 0), num_workers=1, timeout=0.3))


def test_workers_stay_and_seeds_are_set() -> None:
    loader: DataLoader[Any] = DataLoader(Examples(4, "pid"), num_workers=2, persistent_workers=True)
    first = [int(i) for i in loader]
    assert [int(i) for i in loader] == first and len(set(first)) == 2
    broken: DataLoader[Any] = DataLoader(Examples(4), num_workers=2, worker_init_fn=lambda i: [][i])
    with pytest.raises(IndexError):
        list(broken)


def test_spawned_workers() -> None:
    loader: DataLoader[Any] = DataLoader(Examples(4), 2, num_workers=1, multiprocessing_context="spawn")
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]


def test_pinning_without_a_gpu_warns() -> None:
    if not genesis.cuda.is_available():
        with pytest.warns(UserWarning, match="pin_memory"):
            assert next(iter(DataLoader(Examples(4), 2, pin_memory=True))).tolist() == [0, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"num_workers": -1},
        {"batch_sampler": [[0]], "shuffle": True},
        {"sampler": [0], "shuffle": True},
        {"batch_size": None, "drop_last": True},
        {"num_workers": 1, "multiprocessing_context": "thread"},
    ],
)
def test_arguments_that_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="DataLoader: "):
        DataLoader(Examples(4), **options)


def test_data_sets_of_others() -> None:
    one, two = Examples(3), Examples(4)
    assert [(one + two)[i] for i in (0, 4, -1)] == [0, 1, 3]
    assert list(ChainDataset([Stream(), Stream()])) == [*range(7)] * 2
    assert StackDataset(a=one, b=Examples(3))[2] == {"a": 2, "b": 2}
    assert Subset(two, [3, 1])[0] == 3
    with pytest.raises(AssertionError):
        ConcatDataset([Stream()])
    parts = random_split(Examples(10), [0.75, 0.25], generator=genesis.Generator().manual_seed(0))
    assert [len(p) for p in parts] == [8, 2] and sorted(i for p in parts for i in p.indices) == [*range(10)]


def test_samplers() -> None:
    shares = [list(DistributedSampler(Examples(7), 2, rank, shuffle=False)) for rank in (0, 1)]
    assert shares == [[0, 2, 4, 6], [1, 3, 5, 0]]
    with pytest.raises(ValueError, match="rank 2"):
        DistributedSampler(Examples(7), 2, 2)
    with pytest.raises(ValueError, match="process group"):
        DistributedSampler(Examples(7))
    assert sorted(RandomSampler(Examples(5), num_samples=5)) == [*range(5)]
    assert set(WeightedRandomSampler([0.0, 1.0, 0.0], 6)) == {1}
