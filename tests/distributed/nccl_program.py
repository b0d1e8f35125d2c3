"""A rank with a GPU, started as a program: `clean` captures, replays and leaves; else rank 1 ends, or makes no call."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from genesis.array import Array, empty
from genesis.backend import backend_for
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.graph import RawGraph
from genesis.distributed import Peers, job_key, read_world
from genesis.distributed.communicator import Memory, bindings
from genesis.distributed.nccl import NcclGroup
from genesis.distributed.watch import Watch
from genesis.dtypes import bfloat16, float32
from genesis.errors import GenesisError
from genesis.op import registry
from genesis.train.signals import Interrupts
from tests.distributed.nccl_ranks import group_over

LENGTH = 1 << 16  # of each rank's part


def given(values: np.ndarray, like: Array) -> None:
    backend_for(like.device).from_numpy(values, like)


def clean(group: NcclGroup) -> None:
    """A graph with every collective, replayed; ended while it is still there."""
    device, size, rank = group.device, group.size, group.rank
    x, whole = empty((LENGTH * size,), bfloat16, device), empty((LENGTH * size,), float32, device)
    part, pair = empty((LENGTH,), float32, device), empty((2,), float32, device)
    graph = RawGraph(backend_of(device))

    def step() -> None:
        group.reduce_scatter(x, part)
        group.all_reduce(pair)
        group.all_gather(part, whole)
        group.broadcast(pair)

    graph.capture(step)
    for turn in range(20):
        values = np.arange(LENGTH * size, dtype=np.float32) % 64
        given(values + turn + rank, x)
        given(np.array([1.5, rank], np.float32), pair)
        graph.replay()
        assert (whole.numpy() == size * (values + turn) + size * (size - 1) / 2).all()
        assert pair.numpy().tolist() == [1.5 * size, size * (size - 1) / 2]
    to_itself(group)
    group.close()
    assert not graph.is_captured


def to_itself(group: NcclGroup) -> None:
    """What no group asks for: a send that this rank receives."""
    a, b = empty((64,), float32, group.device), empty((64,), float32, group.device)
    given(np.arange(64, dtype=np.float32), a)
    mine = group.rank
    group._nccl.exchange(
        [(mine, Memory(a.data_ptr(), a.nbytes))],
        [(mine, Memory(b.data_ptr(), b.nbytes))],
        backend_of(group.device).stream,
    )
    assert b.numpy().tolist() == list(range(64))


def waits(peers: Peers, group: NcclGroup, how: str) -> None:
    """Rank 1 makes no call; rank 0 waits for it on the device, in the driver.

    `load`: while it loads a kernel. `copies`: for DMA engines, which wait in the stream.
    """
    x, parts = empty((LENGTH,), float32, group.device), [LENGTH // group.size] * group.size
    mapped = group.buffer(LENGTH, bfloat16, "a test's", [parts])
    peers.barrier("ready")
    if peers.rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    peers.limit_s = 2.0
    if how == "copies":
        assert mapped is not None
        group.reduce_scatter(mapped, x.view((parts[0],), (1,), 0), parts)
    else:
        group.all_reduce(x)
    if how == "load":
        registry["exp"](x)
    backend_of(group.device).driver.synchronize()
    time.sleep(30)  # the watch raises here
    print("nobody ended this")


def main() -> int:
    """Exit code as the command line's; what it knows in a line on stderr."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    world, how = read_world(os.environ), sys.argv[1]
    try:
        peers = Peers.connect(world, job_key(world, os.environ), version="test") if world.size > 1 else Peers(0, 1)
        from genesis.backend import Device

        with peers, Interrupts() as interrupts, Watch(peers, interrupts.interrupt) as watch:
            device, is_mapped = Device("cuda", world.local_rank), how == "copies"
            group = group_over(bindings(), peers, device, 1 << 20, is_mapped=is_mapped)
            watch.collectives = group
            with peers.during("a test"):
                clean(group) if how == "clean" else waits(peers, group, how)
    except GenesisError as error:
        print(f"error: {error.what} ({error.where})", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
