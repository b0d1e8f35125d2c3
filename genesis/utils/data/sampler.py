"""Samplers: the order in which a loader takes the examples of a data set."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Generic, TypeVar

import genesis
from genesis.errors import UsageError

T_co = TypeVar("T_co", covariant=True)


def check_count(name: str, value: Any) -> None:
    """Raise UsageError unless `value` is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UsageError(f"{name} must be a positive integer, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise UsageError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, got {value!r}")


def drawn_seed(generator: genesis.Generator | None) -> int:
    """Draw a seed from a generator, or from the default one."""
    return int(genesis.randint(0, 2**63 - 1, (), generator=generator).item())


class Sampler(Generic[T_co]):
    """Base class of samplers: override `__iter__`, which yields indices or lists of them, and usually `__len__`."""

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError("a Sampler needs __iter__")


class SequentialSampler(Sampler[int]):
    """The indices of a data set in order."""

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler[int]):
    """The indices of a data set in random order, or drawn with replacement; `num_samples` of them, by default all."""

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: genesis.Generator | None = None,
    ) -> None:
        self.data_source, self.replacement = data_source, replacement
        self._num_samples, self.generator = num_samples, generator
        check_flag("replacement", replacement)
        check_count("num_samples", self.num_samples)

    @property
    def num_samples(self) -> int:
        """The number of indices in an epoch."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __iter__(self) -> Iterator[int]:
        n, left = len(self.data_source), self.num_samples
        generator = self.generator or genesis.Generator().manual_seed(drawn_seed(None))
        while left > 0:
            if self.replacement:
                drawn = genesis.randint(n, (min(left, 32),), generator=generator)
            else:
                drawn = genesis.randperm(n, generator=generator)[:left]
            yield from drawn.tolist()
            left -= len(drawn)

    def __len__(self) -> int:
        return self.num_samples


class SubsetRandomSampler(Sampler[int]):
    """Some indices in random order."""

    def __init__(self, indices: Sequence[int], generator: genesis.Generator | None = None) -> None:
        self.indices, self.generator = indices, generator

    def __iter__(self) -> Iterator[int]:
        return (self.indices[i] for i in genesis.randperm(len(self.indices), generator=self.generator).tolist())

    def __len__(self) -> int:
        return len(self.indices)


class WeightedRandomSampler(Sampler[int]):
    """`num_samples` indices, each drawn in proportion to its weight."""

    def __init__(
        self,
        weights: Sequence[float],
        num_samples: int,
        replacement: bool = True,
        generator: genesis.Generator | None = None,
    ) -> None:
        check_count("num_samples", num_samples)
        check_flag("replacement", replacement)
        self.weights = genesis.as_tensor(weights, dtype=genesis.float64)
        if self.weights.ndim != 1:
            raise UsageError(f"weights must have one dimension, got the shape {tuple(self.weights.shape)}")
        self.num_samples, self.replacement, self.generator = num_samples, replacement, generator

    def __iter__(self) -> Iterator[int]:
        drawn = genesis.multinomial(self.weights, self.num_samples, self.replacement, generator=self.generator)
        return iter(drawn.tolist())

    def __len__(self) -> int:
        return self.num_samples


class BatchSampler(Sampler[list[int]]):
    """The indices of another sampler in lists of `batch_size`; `drop_last` drops a shorter last one.

    >>> from genesis.utils.data import BatchSampler, SequentialSampler
    >>> list(BatchSampler(SequentialSampler(range(5)), 2, drop_last=False))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, sampler: Sampler[int] | Iterable[int], batch_size: int, drop_last: bool) -> None:
        check_count("batch_size", batch_size)
        check_flag("drop_last", drop_last)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        count = len(self.sampler)  # type: ignore[arg-type]
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)
