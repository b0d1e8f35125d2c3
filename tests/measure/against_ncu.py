"""Ten ops on a GPU: do the profiler's times agree with times by hand, and its bytes with the GPU's counters?

    .venv/bin/python -m tests.measure.against_ncu

By hand means genesis.cuda events around replays of a graph. Counters are read with ncu where it is installed and may
read them; elsewhere the counted bytes are compared with what the memory of this GPU moves at most in that time, and
the last line says which. Ends with 1 where a time differs by more than 5 %, or bytes cannot be right.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from statistics import median

from genesis import cuda, no_grad
from genesis.backend import Device
from genesis.cuda.graphs import FunctionGraph
from genesis.measure.cases import Axes, make_case, op_named
from genesis.measure.limits import copy_rate, has_gpu_time, limits_of
from genesis.measure.op import Settings, profile_case
from genesis.measure.record import format_bytes, format_seconds
from genesis.measure.timing import Plan

GPU = Device("cuda", 0)
MOST = 0.05
PRODUCTS = ("matmul", "linear")
CASES = (
    ("add", (8192, 8192)), ("copy", (8192, 8192)), ("exp", (8192, 8192)), ("sum", (8192, 8192)),
    ("softmax", (8192, 8192)), ("rms_norm", (16384, 4096)), ("matmul", (4096,)), ("linear", (8192, 896, 4864)),
    ("embedding", (65536, 896)), ("adamw_step", (8192, 4096)),
)  # fmt: skip
CALLS, REPLAYS = 20, 30
METRICS = "dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum"


def axes_of(name: str) -> Axes:
    """The last axis for ops that have any."""
    return -1 if op_named(name)[1].axes else None


def by_hand(name: str, shape: tuple[int, ...]) -> float:
    """Seconds of a call: the median over replays of a graph that holds some, between two events."""
    call = make_case(name, shape, axes_of(name), None, GPU).call
    with no_grad():
        call()
        graph = FunctionGraph()
        graph.capture(lambda: [call() for _ in range(CALLS)])
        found = []
        for _ in range(REPLAYS):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / CALLS)
    return median(found)


def by_counters(name: str) -> tuple[float, float] | str:
    """Bytes and seconds of a call by ncu; why not, where they cannot be read."""
    tool = shutil.which("ncu")
    if tool is None:
        return "ncu is not installed"
    words = [tool, "--csv", "--clock-control", "none", "--metrics", METRICS, sys.executable, "-m", __spec__.name, name]  # type: ignore[union-attr]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        return "ncu may not read counters: " + (done.stdout + done.stderr).strip().splitlines()[-1][:120]
    rows = list(csv.DictReader(lines))
    last = rows[-1]["Kernel Name"]
    mine = {row["Metric Name"]: row for row in rows if row["Kernel Name"] == last}  # of the last launch
    units = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3,
             "ns": 1e-9, "us": 1e-6, "ms": 1e-3}  # fmt: skip
    read, written, seconds = (
        float(mine[m]["Metric Value"].replace(",", "")) * units[mine[m]["Metric Unit"]] for m in METRICS.split(",")
    )
    return read + written, seconds


def main() -> int:
    """A line for each op."""
    if len(sys.argv) > 1:  # what ncu looks at
        with no_grad():
            make_case(sys.argv[1], dict(CASES)[sys.argv[1]], axes_of(sys.argv[1]), None, GPU).call()
        cuda.synchronize()
        return 0
    if not cuda.is_available() or not has_gpu_time(GPU):
        print("skipped: there is no GPU")
        return 0
    print(f"{cuda.get_device_name(GPU)}: {'op':14} {'profile':>10} {'by hand':>10} {'differs':>8}  bytes")
    wrong, reason = 0, ""
    for name, shape in CASES:
        case = make_case(name, shape, axes_of(name), None, GPU)
        settings = Settings(stages=False, causes=False, plan=Plan(seconds=1.0))
        row = profile_case(case, limits_of(GPU, case.dtype), settings)
        assert row.gpu is not None
        hand = by_hand(name, shape)
        differs = row.gpu.seconds / hand - 1
        counted = reason or by_counters(name)
        if isinstance(counted, str):
            reason, most = counted, row.gpu.seconds * copy_rate(GPU) * 1.2  # a part of it may come out of the L2
            bytes_are_right = row.nbytes <= most
            told = f"{format_bytes(row.nbytes)} counted, {format_bytes(most)} at most"
        else:
            more = counted[0] / row.nbytes - 1  # products read tiles again, which the fewest bytes leave out
            bytes_are_right = more > -0.25 and (more < 0.25 or name in PRODUCTS)
            told = f"{format_bytes(row.nbytes)} counted, {format_bytes(counted[0])} by ncu"
            told += f", which says {format_seconds(counted[1])} ({counted[1] / row.gpu.seconds - 1:+.1%})"
        wrong += abs(differs) > MOST or not bytes_are_right
        print(f"{name:14} {format_seconds(row.gpu.seconds):>10} {format_seconds(hand):>10} {differs:+8.1%}  {told}")
    print(f"compared with {'counted bytes: ' + reason if reason else 'the counters of ncu'}; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
