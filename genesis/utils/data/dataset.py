"""Data sets: examples by index or as a stream, and data sets made of others."""

from __future__ import annotations

import bisect
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import genesis
from genesis import Tensor
from genesis.errors import UsageError

T_co = TypeVar("T_co", covariant=True)


class MismatchError(UsageError, AssertionError):
    """Data sets that cannot be combined; torch raises AssertionError."""


class Dataset(Generic[T_co]):
    """Base class of data sets with examples by index: override `__getitem__`, and `__len__` for the samplers.

    A data set with `__getitems__` returns the examples of a list of indices at once.
    """

    def __getitem__(self, index: Any) -> T_co:
        raise NotImplementedError("a Dataset needs __getitem__")

    def __add__(self, other: Dataset[Any]) -> ConcatDataset:
        return ConcatDataset([self, other])


class IterableDataset(Dataset[T_co]):
    """Base class of streams: override `__iter__`. In a worker, `get_worker_info` says which part to yield."""

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError("an IterableDataset needs __iter__")

    def __add__(self, other: Dataset[Any]) -> ChainDataset:  # type: ignore[override]
        return ChainDataset([self, other])


class TensorDataset(Dataset[tuple[Tensor, ...]]):
    """The rows of tensors of equal first size, as tuples.

    >>> from genesis.utils.data import TensorDataset
    >>> TensorDataset(genesis.arange(3), genesis.eye(3))[1]
    (tensor(1), tensor([0., 1., 0.]))
    """

    def __init__(self, *tensors: Tensor) -> None:
        if any(each.size(0) != tensors[0].size(0) for each in tensors):
            raise MismatchError(f"TensorDataset got tensors of {[each.size(0) for each in tensors]} rows")
        self.tensors = tensors

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(each[index] for each in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


def examples(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """Return the examples of several indices, at once if the data set can."""
    at_once = getattr(dataset, "__getitems__", None)
    return at_once(indices) if callable(at_once) else [dataset[i] for i in indices]


class StackDataset(Dataset[Any]):
    """Data sets of equal length side by side: tuples of their examples, or dicts if they are given by keyword."""

    def __init__(self, *args: Dataset[Any], **kwargs: Dataset[Any]) -> None:
        self.datasets: Any = args or kwargs
        lengths = {len(each) for each in (*args, *kwargs.values())}  # type: ignore[arg-type]
        if len(lengths) != 1 or (args and kwargs):
            raise UsageError(
                f"StackDataset got {len(args)} data sets, {len(kwargs)} by keyword, of lengths {sorted(lengths)}",
                next="pass data sets of one length, all by position or all by keyword",
            )
        (self._length,) = lengths

    def __getitem__(self, index: Any) -> Any:
        if isinstance(self.datasets, dict):
            return {name: each[index] for name, each in self.datasets.items()}
        return tuple(each[index] for each in self.datasets)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        named = isinstance(self.datasets, dict)
        columns = [examples(each, indices) for each in (self.datasets.values() if named else self.datasets)]
        if any(len(each) != len(indices) for each in columns):
            raise UsageError(f"__getitems__ of {len(indices)} indices gave lists of {[len(each) for each in columns]}")
        rows = zip(*columns, strict=True)
        return [dict(zip(self.datasets, row, strict=True)) for row in rows] if named else list(rows)

    def __len__(self) -> int:
        return self._length


class ConcatDataset(Dataset[Any]):
    """Data sets one after the other."""

    def __init__(self, datasets: Iterable[Dataset[Any]]) -> None:
        self.datasets = list(datasets)
        if not self.datasets or any(isinstance(each, IterableDataset) for each in self.datasets):
            raise MismatchError("ConcatDataset needs data sets with lengths", next="use ChainDataset for streams")
        self.cumulative_sizes = self.cumsum(self.datasets)

    @staticmethod
    def cumsum(sequence: Iterable[Any]) -> list[int]:
        """Return the running sums of the lengths."""
        return list(itertools.accumulate(len(each) for each in sequence))

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, idx: int) -> Any:
        if idx < -len(self):
            raise UsageError(f"index {idx} of a ConcatDataset of length {len(self)}")
        idx += len(self) if idx < 0 else 0
        part = bisect.bisect_right(self.cumulative_sizes, idx)
        return self.datasets[part][idx - (self.cumulative_sizes[part - 1] if part else 0)]


class ChainDataset(IterableDataset[Any]):
    """Streams one after the other."""

    def __init__(self, datasets: Iterable[Dataset[Any]]) -> None:
        self.datasets = datasets

    def _streams(self) -> Iterator[Any]:
        for each in self.datasets:
            if not isinstance(each, IterableDataset):
                raise MismatchError(f"ChainDataset got a {type(each).__name__}", next="use ConcatDataset")
            yield each

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._streams())

    def __len__(self) -> int:
        return sum(len(each) for each in self._streams())


class Subset(Dataset[T_co]):
    """The examples of a data set at some indices."""

    def __init__(self, dataset: Dataset[T_co], indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices
        kind = type(self)
        if kind.__getitem__ is not Subset.__getitem__ and kind.__getitems__ is Subset.__getitems__:
            raise NotImplementedError(f"{kind.__name__} overrides __getitem__ | override __getitems__, too")

    def __getitem__(self, idx: Any) -> Any:
        return self.dataset[[self.indices[i] for i in idx] if isinstance(idx, list) else self.indices[idx]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return examples(self.dataset, [self.indices[i] for i in indices])

    def __len__(self) -> int:
        return len(self.indices)


def random_split(
    dataset: Dataset[T_co],
    lengths: Sequence[float],
    generator: genesis.Generator | None = genesis.random.default_generator,
) -> list[Subset[T_co]]:
    """Split a data set at random into subsets of these lengths, or of these fractions if they add up to 1.

    >>> from genesis.utils.data import random_split
    >>> [len(each) for each in random_split(range(10), [0.75, 0.25])]
    [8, 2]

    Raises:
        UsageError: the lengths do not add up to the data set's, or a fraction is not between 0 and 1.
    """
    total = len(dataset)  # type: ignore[arg-type]
    if math.isclose(sum(lengths), 1) and sum(lengths) <= 1:
        if not all(0 <= each <= 1 for each in lengths):
            raise UsageError(f"random_split got the fractions {list(lengths)}, which must be between 0 and 1")
        sizes = [math.floor(total * each) for each in lengths]
        rest = total - sum(sizes)  # handed out one by one, from the first on
        lengths = [n + (rest + len(sizes) - 1 - i) // len(sizes) for i, n in enumerate(sizes)]
        for i, length in enumerate(lengths):
            if length == 0:
                warnings.warn(f"split {i} of random_split has no examples", stacklevel=2)
    if sum(lengths) != total:
        raise UsageError(f"random_split got lengths of {sum(lengths)} in total for {total} examples")
    indices = iter(genesis.randperm(total, generator=generator).tolist())
    return [Subset(dataset, list(itertools.islice(indices, int(length)))) for length in lengths]
