"""The text: what it shows, how wide it is, and how numbers read."""

from __future__ import annotations

from typing import Any

import pytest

from genesis.profile.format import format_bytes, format_rate, format_seconds, format_share
from genesis.profile.report import render_lines
from genesis.profile.schema import (
    Backward,
    Dispatch,
    Failure,
    Launch,
    LimitsRow,
    OpReport,
    OpRow,
    Peer,
    Ratio,
    Resources,
    Time,
)

TIME = Time(
    seconds=123.4e-6, fastest=120e-6, half_width=0.123, spread=0.25, samples=100, calls=10, outliers=3, is_noisy=True
)
QUIET = TIME.model_copy(update={"is_noisy": False, "half_width": 0.01, "outliers": 0})
BACKWARD = Backward(recorded=TIME, recording=90e-6, wall=TIME, gpu=QUIET)
LAUNCHES = [
    Launch(kernel="fold", grid=[86, 36, 1]),
    Launch(kernel="fill", grid=[]),
    Launch(kernel="merge", grid=[36, 1, 1]),
]
TAKEN = Resources(
    threads=128, warps=4, registers=64, shared_static=0, shared_dynamic=16 << 10, local=0, resident=8, occupancy=0.5,
    bound_by="registers", slots=1056, waves=3.25, idle=0.1875,
)  # fmt: skip
PEER = Peer(
    name="torch", version="2.9", clock="GPU", threads=None,
    forward=Ratio(seconds=1e-4, peer_seconds=1.5e-4, ratio=1.5, spread=0.012, rounds=3),
    backward=Ratio(seconds=2e-4, peer_seconds=1e-4, ratio=0.5, spread=2.0, rounds=3),
)  # fmt: skip
DISPATCH = Dispatch(entry=1e-6, lookup=2e-6, allocate=3e-7, launch=None, wrap=4e-7)


def row(**given: Any) -> OpRow:
    usual: dict[str, Any] = {
        "name": "reduce_sum", "op": "sum", "family": "reduce", "shape": [4, 512, 896], "axes": [0, 1],
        "label": "4x512x896 over 0,1", "dtype": "float32", "inputs": ["float32[4,512,896]"], "is_cold": False,
        "wall": QUIET, "gpu": None, "flops": 1_835_008, "bytes": 7_343_616, "bytes_per_second": 5.95e10,
        "flops_per_second": 1.487e10, "intensity": 0.25, "ridge": 9.9, "limit": "bandwidth", "bandwidth_share": 0.57,
        "compute_share": 0.02, "share": 0.57, "band": "fair", "cause": "bandwidth",
        "advice": "a copy of its bytes takes 70 µs, the call 1.8 times as long: " + "look further " * 9,
        "peak_bytes": 3584, "launches": None, "dispatch": None, "backward": None, "notes": [],
    }  # fmt: skip
    return OpRow(**{**usual, **given})


FULL = row(
    wall=TIME, gpu=TIME, backward=BACKWARD, dispatch=DISPATCH, launches=LAUNCHES, is_cold=True, band="excellent",
    share=1.23, notes=["no GPU time: \x1b[31mred"], peak_bytes=5 << 20, peer=PEER,
)  # fmt: skip
LIMITS = LimitsRow(
    dtype="float32", bytes_per_second=4.123e12, flops_per_second=8.12e14, call_seconds=7e-6, kernel_seconds=1.7e-6
)


def report(*rows: OpRow, failures: tuple[Failure, ...] = ()) -> OpReport:
    return OpReport(
        date="2026-01-01T00:00:00+00:00", command="genesis profile --op reduce_sum", device="cuda:0",
        device_name="NVIDIA H200", machine={"genesis": "0"}, limits=[LIMITS], rows=list(rows), failures=list(failures),
    )  # fmt: skip


def text(*rows: OpRow, **rest: Any) -> str:
    return "\n".join(render_lines(report(*rows, **rest)))


@pytest.mark.parametrize("rows", [[FULL], [FULL, FULL], [row(), FULL, row(limit="compute")], [row()]])
def test_lines_fit_100_columns(rows: list[OpRow]) -> None:
    lines = list(
        render_lines(report(*rows, failures=(Failure(name="sum", label="4", error="bad " * 60, exit_code=6),)))
    )
    assert max(map(len, lines)) <= 100
    assert not any("\x1b" in line or line != line.rstrip() for line in lines)


def test_limits_are_shown_as_measured() -> None:
    assert text(row()).splitlines()[:3] == [
        "device  NVIDIA H200 (cuda:0)",
        "limits  measured now: copy 4.12 TB/s, matmul float32 812 TFLOP/s, smallest call 7.00 µs (1.70 µs on",
        "        the GPU)",
    ]


def test_a_table_has_a_line_for_each_case_and_only_columns_that_are_filled() -> None:
    lines = text(row(), row(wall=TIME, label="8 over all", limit="compute", share=0.1, band="critical")).splitlines()
    start = lines.index("reduce_sum, float32")
    assert lines[start + 1].split() == ["case", "wall", "±", "rate", "share", "cause", "note"]
    assert lines[start + 2].split("  ")[-1] == "bandwidth"
    assert lines[start + 3].endswith("noisy")
    assert "14.9 GFLOP/s" in lines[start + 3]
    assert "next: 8 over all: a copy of its bytes" in "\n".join(lines)
    assert "noisy: the machine was not quiet" in "\n".join(lines)


def test_gpu_and_backward_columns_appear_with_their_figures() -> None:
    lines = text(FULL, FULL).splitlines()
    header = lines[lines.index("reduce_sum, float32") + 1]
    assert header.split() == ["case", "wall", "±", "GPU", "backward", "share", "torch", "cause", "note"]
    # The gradient's time is the GPU's, too, where there is one.
    slow = BACKWARD.model_copy(update={"gpu": QUIET.model_copy(update={"seconds": 7.0})})
    assert "  7.00 s  " in text(row(gpu=QUIET, backward=slow), row())


def test_a_single_case_is_told_in_full() -> None:
    found = text(FULL)
    for part in (
        "reduce_sum 4x512x896 over 0,1, float32: float32[4,512,896]",
        "  wall          123 µs ±12%, quartiles 25% apart, 100 samples of 10, 3 outliers left out,",
        "  recording     adds 90.0 µs to a call of 123 µs",
        "  moves         7.0 MiB: 59.5 GB/s, 57% of a copy",
        "  computes      1.84 MFLOP: 14.9 GFLOP/s, 2% of a large matmul",
        "  roofline      0.25 FLOP a byte, the ridge is at 9.9: bandwidth is the limit",
        "  memory        5.0 MiB beyond the inputs",
        "  launches      fold 86x36, fill, merge 36",
        "  dispatch      entry 1.00 µs, lookup 2.00 µs, allocate 300 ns, wrap 400 ns",
        "  band          excellent: 123% of the limit that binds",
        "  cause         bandwidth bound",
    ):
        assert part in found
    assert "cold cache" in " ".join(found.split())
    assert "launch None" not in found
    lost = BACKWARD.model_copy(update={"recording": -3e-6})
    assert "  recording     adds less to a call of 123 µs than times are sure of" in text(row(backward=lost))
    assert "dispatch" not in text(row())
    assert "autograd cost" in text(row(cause="autograd"))


def test_kernels_say_what_they_take() -> None:
    spilling = TAKEN.model_copy(update={"local": 24, "bound_by": "shared memory", "resident": 1, "waves": 0.5})
    launches = [
        Launch(kernel="fold", grid=[3432, 1, 1], resources=TAKEN),
        Launch(kernel="fill", grid=[]),
        Launch(kernel="fold", grid=[3432, 1, 1], resources=TAKEN),
        Launch(kernel="merge", grid=[66, 1, 1], resources=spilling),
    ]
    found = " ".join(text(row(launches=launches)).split())
    fold = (
        "fold: 128 threads, 64 registers, 16.0 KiB shared, no spills; 8 programs an SM, 50% of its warps"
        " (registers bind); 3.2 waves, the last 25% full: 19% of all slots stay empty"
    )
    assert found.count(fold) == 1
    assert "24 bytes of local memory a thread (spills); 1 program an SM" in found
    assert "(shared memory binds); one wave, 50% full" in found
    for waves, said in ((1.0, "one full wave"), (2.0, "; 2.0 waves band")):
        full = Launch(kernel="fold", grid=[1], resources=TAKEN.model_copy(update={"waves": waves}))
        assert said in " ".join(text(row(launches=[full])).split())
    backward = BACKWARD.model_copy(update={"launches": launches[3:]})
    assert "  backward's    merge 66" in text(row(backward=backward))


def test_the_peer_is_told_with_its_rounds() -> None:
    found = " ".join(text(row(peer=PEER)).split())
    assert (
        "torch 1.50x (Genesis 100 µs, torch 150 µs, spread 1.2%); backward 0.50x (Genesis 200 µs, torch 100 µs,"
        " spread a factor of 3.0, noisy); torch 2.9, GPU time band" in found
    )
    on_cpu = PEER.model_copy(update={"clock": "wall", "threads": 1, "backward": None})
    assert "torch 2.9, wall time, 1 thread band" in " ".join(text(row(peer=on_cpu)).split())
    header = text(row(peer=PEER), row()).splitlines()
    assert any(line.split()[:5] == ["case", "wall", "±", "rate", "share"] and "torch" in line for line in header)


def test_failures_are_listed_behind_the_rows() -> None:
    failure = Failure(name="sum", label="4 over all", error="no room\x07", exit_code=7)
    assert text(row(), failures=(failure,)).endswith("  failed        sum 4 over all: no room\\x07")


def test_numbers_read_well() -> None:
    assert [format_seconds(s) for s in (2.5, 1.234e-2, 123.45e-6, 5e-9, -3e-6)] == [
        "2.50 s", "12.3 ms", "123 µs", "5.00 ns", "-3.00 µs",
    ]  # fmt: skip
    assert [format_rate(r, "B/s") for r in (4.8e12, 26.06e9, 999.0, 0.0)] == [
        "4.80 TB/s",
        "26.1 GB/s",
        "999 B/s",
        "0 B/s",
    ]
    assert [format_bytes(n) for n in (512, 10_239, 10_240, 7_340_032, 3 << 30)] == [
        "512 bytes", "10,239 bytes", "10.0 KiB", "7.0 MiB", "3.0 GiB",
    ]  # fmt: skip


def test_the_schema_says_what_each_figure_is() -> None:
    properties = OpReport.model_json_schema()["$defs"]["OpRow"]["properties"]
    assert properties["bytes"]["description"] == "The fewest that the call can move: each operand once."
    assert OpReport.model_json_schema()["properties"]["schema_version"]["const"] == 1


def test_a_time_of_few_samples_has_no_interval() -> None:
    from genesis.measure.timing import summarize

    found = Time.of(summarize([1.0, 1.0]))
    assert found.half_width is None
    assert "±?" in text(row(wall=found))


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0%"), (0.834, "83%"), (1.2, "120%"), (0.0051, "1%"), (0.005, "0.5%"), (0.0042, "0.4%"),
        (0.0006, "0.1%"), (0.0004, "<0.1%"),
    ],
)  # fmt: skip
def test_a_share_is_0_only_where_it_is_nothing(share: float, text: str) -> None:
    assert format_share(share) == text
