"""NCCL's collectives by size of bucket, number of thread blocks (CTAs) and CTA policy, alone and beside a GEMM.

    python -m benchmarks.gpu.collectives --nproc 2 [--mib 16 48 96] [--ctas 1 2 4 8 16] [--policies 0 2] [--out JSON]

Rows: `exchange` is the group's reduce_scatter, bfloat16 to float32, with its sum; `gather` its all_gather in place;
`all-to-all` is NCCL's, which moves what an exchange moves. Policy 2 leaves the SMs to others and copies by DMA engines,
which NCCL does with registered memory alone: so it is registered there. GB/s is bus bandwidth: what each rank sends,
bucket · (W - 1) / W, over the time of the slowest rank. Beside: the same while another stream multiplies [8192, 896] by
[896, 4864], as the MLP of Qwen2.5-0.5B does; `GEMM` is how much longer those take than alone.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import write_result
from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import CudaBackend, backend_of
from genesis.backend.cuda.stream import take_stream, use
from genesis.distributed import Peers, World, job_key, launch, read_world
from genesis.distributed.communicator import Communicator, Tuning, bindings, identity_of
from genesis.distributed.nccl import NcclGroup
from genesis.dtypes import DType, bfloat16, float32
from genesis.op import registry

ROWS, WIDTH, OUT = 8192, 896, 4864
CALLS, REPLAYS = 8, 10
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
BYTE = 1  # ncclUint8


class Case(NamedTuple):
    ctas: int
    policy: int
    mib: int


class Bench:
    """A rank: times what it and all others launch at the same time."""

    def __init__(self, peers: Peers, device: Device) -> None:
        self.peers, self.device, self.backend = peers, device, backend_of(device)
        self.side = take_stream(self.backend, -1)
        self.main = take_stream(self.backend)
        a, b = (empty(shape, bfloat16, device) for shape in ((ROWS, WIDTH), (WIDTH, OUT)))
        for x in (a, b):
            registry["fill"](out=x, value=0.5, shape=x.shape, dtype=x.dtype)
        self.product = empty((ROWS, OUT), bfloat16, device)
        self.gemm = lambda: registry["matmul"](a, b, out=self.product)

    def seconds(self, collective: Callable[[], None] | None, gemms: int) -> tuple[float, float]:
        """(a collective's, a GEMM's) of `CALLS` of them beside `gemms` in one graph: medians, the slowest rank's."""
        backend, driver = self.backend, self.backend.driver
        marks = [driver.create_event(True) for _ in range(4)]

        def work(timed: bool) -> None:
            note = driver.record_time if timed else lambda event, stream: None
            driver.follow(self.side, self.main)
            with use(backend, self.side):
                note(marks[0], self.side)
                for _ in range(CALLS if collective is not None else 0):
                    assert collective is not None
                    collective()
                note(marks[1], self.side)
            with use(backend, self.main):
                note(marks[2], self.main)
                for _ in range(gemms):
                    self.gemm()
                note(marks[3], self.main)
            driver.follow(self.main, self.side)

        for _ in range(2):
            work(timed=False)
        driver.synchronize()
        driver.begin_capture(self.main)
        work(timed=True)
        graph = driver.end_capture(self.main)
        executable = driver.instantiate(graph)
        found = []
        for _ in range(REPLAYS):
            self.peers.barrier("replay")
            driver.launch_graph(executable, self.main)
            driver.synchronize_stream(self.main)
            found.append((driver.elapsed(*marks[:2]) / CALLS, driver.elapsed(*marks[2:]) / max(1, gemms)))
        driver.destroy_graph(graph, executable)
        own = [statistics.median(each) for each in zip(*found, strict=True)]
        said = self.peers.gather_json("times", own)
        every = self.peers.broadcast_json("times", said)
        return max(each[0] for each in every), max(each[1] for each in every)


class Registered:
    """Memory that NCCL knows on all ranks, as arrays; freed with the process."""

    def __init__(self, nccl: Any, handle: Any, backend: CudaBackend) -> None:
        self._nccl, self._handle, self._backend = nccl, handle, backend

    def array(self, length: int, dtype: DType) -> Array:
        nbytes = length * dtype.itemsize
        pointer = self._nccl.mem_alloc(nbytes)
        self._nccl.comm_window_register(self._handle, pointer, nbytes, SYMMETRIC)
        return Array(self._backend.adopt(pointer, nbytes, None), (length,), (1,), dtype, self._backend.device)


def measured(bench: Bench, nccl: Any, case: Case, alone: float) -> list[dict[str, Any]]:
    """The rows of one case.

    Args:
        alone: seconds of a GEMM with no collective beside it.
    """
    peers, device, backend = bench.peers, bench.device, bench.backend
    identity = bytes.fromhex(peers.broadcast_json("nccl", identity_of(nccl).hex() if peers.rank == 0 else None))
    tuning = Tuning(max_ctas=case.ctas or None, cta_policy=case.policy)
    made = Communicator(nccl, backend.driver, peers.rank, peers.size, identity, 60.0, tuning)
    group = NcclGroup(peers, device, made, staging=case.mib << 20)
    length = (case.mib << 20) // bfloat16.itemsize // (32 * peers.size) * (32 * peers.size)
    part = length // peers.size

    def plain(length: int, dtype: DType) -> Array:
        return empty((length,), dtype, device)

    take = Registered(nccl, made._handle, backend).array if case.policy == 2 else plain
    x, there, total = take(length, bfloat16), take(length, bfloat16), plain(part, float32)
    own = x.view((part,), (1,), part * peers.rank)
    calls: dict[str, Callable[[], None]] = {
        "exchange": lambda: group.reduce_scatter(x, total),
        "gather": lambda: group.all_gather(own, x),
    }
    if hasattr(nccl, "allto_all"):
        nbytes = part * bfloat16.itemsize
        calls["all-to-all"] = lambda: nccl.allto_all(
            x.data_ptr(), there.data_ptr(), nbytes, BYTE, made._handle, backend.stream
        )
    rows = []
    sent = length * bfloat16.itemsize * (peers.size - 1) / peers.size
    for name, call in calls.items():
        by_itself, _ = bench.seconds(call, 0)
        gemms = max(1, round(CALLS * by_itself / alone))
        beside, gemm = bench.seconds(call, gemms)
        rows.append(
            {"row": name, **case._asdict(), "GB/s": sent / by_itself / 1e9, "beside GB/s": sent / beside / 1e9,
             "GEMM": gemm / alone, "us": by_itself * 1e6}
        )  # fmt: skip
    made.close(60.0)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Lines for people."""
    lines = [f"{'':12}{'CTAs':>6}{'policy':>8}{'MiB':>6}{'µs':>9}{'GB/s':>8}{'beside':>8}{'GEMM':>7}"]
    for r in rows:
        ctas = r["ctas"] or "auto"
        lines.append(
            f"{r['row']:12}{ctas:>6}{r['policy']:>8}{r['mib']:>6}{r['us']:9.1f}{r['GB/s']:8.1f}"
            f"{r['beside GB/s']:8.1f}{r['GEMM']:7.2f}"
        )
    return "\n".join(lines)


def run(world: World, options: argparse.Namespace, nccl: Any) -> None:
    """One rank of the job."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with Peers.connect(world, job_key(world, os.environ), version="benchmark") as peers:
        bench = Bench(peers, Device("cuda", world.local_rank))
        _, alone = bench.seconds(None, CALLS)
        rows = []
        for case in itertools.starmap(Case, itertools.product(options.ctas, options.policies, options.mib)):
            rows += measured(bench, nccl, case, alone)
        if peers.rank == 0:
            print(
                f"{peers.size} GPUs, NCCL {nccl.get_version()}, a GEMM alone takes {alone * 1e6:.1f} µs\n{table(rows)}"
            )
            if options.out:
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                facts = {"date": now, "ranks": peers.size, "nccl": nccl.get_version(), "gemm_us": alone * 1e6}
                facts["gpu"] = bench.backend.driver.properties.name
                write_result(options.out, {**facts, "rows": rows})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 48, 96])
    parser.add_argument("--ctas", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16], help="0 leaves it to NCCL")
    parser.add_argument("--policies", type=int, nargs="+", default=[0, 2], choices=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return launch([sys.executable, "-m", "benchmarks.gpu.collectives", *sys.argv[1:]], options.nproc)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    run(read_world(os.environ), options, bindings())
    return 0


if __name__ == "__main__":
    sys.exit(main())
