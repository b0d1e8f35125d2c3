"""Ranks with a group over NCCL: forks over the fake in Triton's interpreter, or this process as one of several."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from genesis.backend import Device
from genesis.backend.cuda import driver_for
from genesis.distributed import Peers, job_key, read_world
from genesis.distributed.communicator import ZERO_CTAS, Communicator, Tuning, bindings, identity_of
from genesis.distributed.nccl import NcclGroup
from tests.distributed import fake_nccl
from tests.distributed.forks import Fork, ended, start_ranks

STAGING = 4096  # bytes: longer parts travel in pieces
IS_ONE = "GENESIS_NCCL_SUITE" in os.environ  # this pytest is one of the ranks that `test_nccl_on_gpus.py` starts

Work = Callable[[Peers, NcclGroup], Any]


def group_over(
    nccl: Any, peers: Peers, device: Device, staging: int = STAGING, *, is_mapped: bool = False
) -> NcclGroup:
    """The group of `peers`."""
    identity = bytes.fromhex(peers.broadcast_json("nccl", identity_of(nccl).hex() if peers.rank == 0 else None))
    driver = driver_for(device.index)
    tuning = Tuning(cta_policy=ZERO_CTAS) if is_mapped else Tuning()
    made = Communicator(nccl, driver, peers.rank, peers.size, identity, peers.limit_s, tuning)
    return NcclGroup(peers, device, made, staging, is_mapped=is_mapped)


def fake_group(peers: Peers, folder: Path, staging: int = STAGING, *, is_mapped: bool = False) -> NcclGroup:
    """The same over the fake."""
    fake_nccl.folder = folder
    return group_over(fake_nccl, peers, Device("cuda", 0), staging, is_mapped=is_mapped)


def started(
    size: int, work: Work, folder: Path, *, ends: bool = True, limit_s: float = 10.0, is_mapped: bool = False
) -> list[Fork]:
    """Run `work` on `size` forks, which leave together if `ends`."""

    def run(peers: Peers) -> Any:
        group = fake_group(peers, folder, is_mapped=is_mapped)
        value = work(peers, group)
        if ends:
            group.close()
        return value

    return ended(start_ranks(size, run, folder, limit_s=limit_s))


@functools.cache
def on_gpu() -> tuple[Peers, NcclGroup]:
    """This process as a rank with a GPU of its own, until it ends."""
    world = read_world(os.environ)
    peers = Peers.connect(world, job_key(world, os.environ), version="test") if world.size > 1 else Peers(0, 1)
    group = group_over(bindings(), peers, Device("cuda", world.local_rank), 1 << 20)
    atexit.register(group.close)
    return peers, group


def count() -> int:
    """How many ranks there are of this pytest."""
    return read_world(os.environ).size
