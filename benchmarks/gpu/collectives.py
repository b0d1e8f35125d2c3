"""NCCL's collectives by size of bucket, thread blocks (CTAs) and CTA policy, alone and beside other kernels.

    python -m benchmarks.gpu.collectives --nproc 2 [--mib 16 48 96] [--ctas 0 8 16] [--policies 0 2] [--out JSON]

Rows: `exchange` is the group's reduce_scatter, bfloat16 to float32, with its sum; `gather` its all_gather in place.
Policy 2 leaves the SMs to others and copies by DMA engines, in memory that all ranks have mapped. GB/s is bus
bandwidth: what each rank sends, bucket · (W - 1) / W, over the time of the slowest rank. Beside: the same while another
stream multiplies [8192, 896] by [896, 4864], as the MLP of Qwen2.5-0.5B does, or copies 256 MiB, bound by memory as an
optimizer's update is; `GEMM` and `copy` are how much longer those take than alone.
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
from genesis.array import empty
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.stream import take_stream, use
from genesis.distributed import Peers, World, job_key, launch, read_world
from genesis.distributed.communicator import ZERO_CTAS, Communicator, Tuning, bindings, identity_of
from genesis.distributed.nccl import NcclGroup
from genesis.dtypes import bfloat16, float32
from genesis.op import registry

ROWS, WIDTH, OUT = 8192, 896, 4864
COPIED = 256 << 20  # bytes
CALLS, REPLAYS = 8, 10


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
        there, copied = (empty((COPIED // float32.itemsize,), float32, device) for _ in range(2))
        registry["fill"](out=there, value=0.5, shape=there.shape, dtype=there.dtype)
        self.others: dict[str, Callable[[], Any]] = {
            "GEMM": lambda: registry["matmul"](a, b, out=self.product),
            "copy": lambda: registry["copy"](there, out=copied),
        }

    def seconds(self, collective: Callable[[], None] | None, other: str, count: int) -> tuple[float, float]:
        """(a collective's, another kernel's) of `CALLS` beside `count` in one graph: medians, of the slowest."""
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
                for _ in range(count):
                    self.others[other]()
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
            found.append((driver.elapsed(*marks[:2]) / CALLS, driver.elapsed(*marks[2:]) / max(1, count)))
        driver.destroy_graph(graph, executable)
        own = [statistics.median(each) for each in zip(*found, strict=True)]
        said = self.peers.gather_json("times", own)
        every = self.peers.broadcast_json("times", said)
        return max(each[0] for each in every), max(each[1] for each in every)


def measured(bench: Bench, nccl: Any, case: Case, alone: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of one case.

    Args:
        alone: seconds of the other kernels with no collective beside them.
    """
    peers, device, backend = bench.peers, bench.device, bench.backend
    identity = bytes.fromhex(peers.broadcast_json("nccl", identity_of(nccl).hex() if peers.rank == 0 else None))
    ctas = case.ctas or None
    tuning = Tuning(min_ctas=ctas, max_ctas=ctas, cta_policy=case.policy or None)
    made = Communicator(nccl, backend.driver, peers.rank, peers.size, identity, 60.0, tuning)
    group = NcclGroup(peers, device, made, staging=case.mib << 20, is_mapped=case.policy == ZERO_CTAS)
    length = (case.mib << 20) // bfloat16.itemsize // (32 * peers.size) * (32 * peers.size)
    part = length // peers.size
    total = empty((part,), float32, device)
    x = group.buffer(length, bfloat16, "what travels", [[part] * peers.size])
    x = empty((length,), bfloat16, device) if x is None else x
    own = x.view((part,), (1,), x.offset + part * peers.rank)
    calls: dict[str, Callable[[], None]] = {
        "exchange": lambda: group.reduce_scatter(x, total),
        "gather": lambda: group.all_gather(own, x),
    }
    rows = []
    sent = length * bfloat16.itemsize * (peers.size - 1) / peers.size
    for name, call in calls.items():
        by_itself, _ = bench.seconds(call, "", 0)
        row = {"row": name, **case._asdict(), "us": by_itself * 1e6, "GB/s": sent / by_itself / 1e9}
        for other, seconds in alone.items():
            beside, took = bench.seconds(call, other, max(1, round(CALLS * by_itself / seconds)))
            row |= {f"beside {other} GB/s": sent / beside / 1e9, other: took / seconds}
        rows.append(row)
    made.close(60.0)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Lines for people."""
    lines = [f"{'':12}{'CTAs':>6}{'policy':>8}{'MiB':>6}{'µs':>9}{'GB/s':>8}{'beside':>8}{'GEMM':>7}"
             f"{'beside':>8}{'copy':>7}"]  # fmt: skip
    for r in rows:
        ctas = r["ctas"] or "auto"
        lines.append(
            f"{r['row']:12}{ctas:>6}{r['policy']:>8}{r['mib']:>6}{r['us']:9.1f}{r['GB/s']:8.1f}"
            f"{r['beside GEMM GB/s']:8.1f}{r['GEMM']:7.2f}{r['beside copy GB/s']:8.1f}{r['copy']:7.2f}"
        )
    return "\n".join(lines)


def run(world: World, options: argparse.Namespace, nccl: Any) -> None:
    """One rank of the job."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with Peers.connect(world, job_key(world, os.environ), version="benchmark") as peers:
        bench = Bench(peers, Device("cuda", world.local_rank))
        alone = {name: bench.seconds(None, name, CALLS)[1] for name in bench.others}
        rows = []
        for case in itertools.starmap(Case, itertools.product(options.ctas, options.policies, options.mib)):
            found = measured(bench, nccl, case, alone)
            if peers.rank == 0:
                print(table(found), file=sys.stderr, flush=True)
            rows += found
        if peers.rank == 0:
            said = ", ".join(f"a {name} {seconds * 1e6:.1f} µs" for name, seconds in alone.items())
            print(f"{peers.size} GPUs, NCCL {nccl.get_version()}; alone {said}\n{table(rows)}")
            if options.out:
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                facts = {"date": now, "ranks": peers.size, "nccl": nccl.get_version(), "alone_s": alone}
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
