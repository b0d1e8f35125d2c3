"""A rank of a job, started as a program: finds the others, makes steps, and ends as its arguments say.

Arguments: the number of steps; then faults, `KIND:RANK:STEP`. A signal to any rank stops all of them at one step, after
a save of 0.2 s.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from genesis.distributed import PeersGroup, job_key, read_world
from genesis.distributed.peers import Peers
from genesis.errors import GenesisError, InterruptedRun, NumericError


def fault(kind: str) -> None:
    """What happens to the rank."""
    if kind == "kill":
        os.kill(os.getpid(), 9)
    elif kind == "exit":
        os._exit(0)
    elif kind == "raise":
        raise NumericError("the loss is nan")
    elif kind == "hang":
        time.sleep(60)


def steps(peers: Peers, count: int, faults: dict[tuple[int, int], str]) -> None:
    """Steps until a signal reaches any rank."""
    import numpy as np

    from genesis.array import from_numpy

    received = [0]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    group = PeersGroup(peers)
    peers.barrier("ready")
    if peers.rank == 0:
        print("ready", flush=True)
    for step in range(count):
        if (peers.rank, step) in faults:
            fault(faults[peers.rank, step])
        x = from_numpy(np.ones(5, np.float32))
        group.all_reduce(x)
        assert (x.view_np() == peers.size).all()
        time.sleep(0.01)
        if stop := peers.agree(received[-1], step):
            time.sleep(0.2)
            peers.barrier("saved")
            print(f"saved at {step}", flush=True)
            raise InterruptedRun("stopped", signal=stop)


def main() -> int:
    """Exit code as the command line's; what it knows in a line on stderr."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    faults = {(int(rank), int(step)): kind for kind, rank, step in (each.split(":") for each in sys.argv[2:])}
    try:
        world = read_world(os.environ)
        with Peers.connect(world, job_key(world, os.environ), version="1", limit_s=20) as peers:
            try:
                steps(peers, int(sys.argv[1]), faults)
            except InterruptedRun as error:
                peers.close()
                return error.exit_code
    except GenesisError as error:
        print(f"error: {error.what}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
