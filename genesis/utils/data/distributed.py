"""DistributedSampler: each rank's share of a data set."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import genesis
from genesis.errors import UsageError
from genesis.utils.data.sampler import Sampler


def _of_group(name: str) -> int:
    found = getattr(importlib.import_module("genesis.distributed"), name, None)
    if found is None:
        raise UsageError("no process group is initialized", next="pass num_replicas and rank")
    return int(found())


class DistributedSampler(Sampler[int]):
    """Every `num_replicas`-th index from `rank` on, after a shuffle by `seed` and epoch that all ranks share.

    Ranks get equally many: indices from the start are repeated, or with `drop_last` the last ones are left out.
    Call `set_epoch` before each epoch to shuffle anew.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas = _of_group("get_world_size") if num_replicas is None else num_replicas
        self.rank = _of_group("get_rank") if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise UsageError(f"rank {self.rank} is not below the number of replicas {self.num_replicas}")
        self.dataset, self.shuffle, self.seed, self.drop_last, self.epoch = dataset, shuffle, seed, drop_last, 0
        count = len(dataset) / self.num_replicas
        self.num_samples = math.floor(count) if drop_last else math.ceil(count)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = genesis.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.dataset)
        indices = genesis.randperm(count, generator=order).tolist() if self.shuffle else range(count)
        return iter([indices[i % count] for i in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which is part of the shuffle's seed."""
        self.epoch = epoch
