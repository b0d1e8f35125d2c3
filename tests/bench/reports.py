"""Reports made without measuring, for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genesis.backend import CPU
from genesis.measure.timing import Plan
from genesis.profile.op import Settings
from genesis.profile.roofline import band_of
from genesis.profile.schema import Failure, LimitsRow, OpRow, Time
from genesis.report.build import Measured, Setup, build
from genesis.report.schema import BenchReport, Entry, Section, Skipped

__all__ = ["LIMITS", "entry", "report", "time"]

LIMITS = LimitsRow(
    dtype="float32", bytes_per_second=1e10, flops_per_second=1e11, call_seconds=1e-6, kernel_seconds=None
)


def time(seconds: float, half_width: float | None = 0.01, spread: float = 0.02, is_noisy: bool = False) -> Time:
    return Time(
        seconds=seconds, fastest=seconds, half_width=half_width, spread=spread, samples=20, calls=1, outliers=0,
        is_noisy=is_noisy,
    )  # fmt: skip


def entry(
    name: str = "add", share: float | None = 0.8, *, seconds: float = 1e-3, size: str = "medium",
    category: str = "element", label: str = "4x4", wall: Time | None = None, **given: Any,
) -> Entry:  # fmt: skip
    """A case of 1 ms; one that is limited by bandwidth, unless it is told otherwise."""
    nbytes = int((share or 0.0) * seconds * LIMITS.bytes_per_second)
    usual: dict[str, Any] = {
        "name": name, "op": name, "family": category, "shape": [4, 4], "axes": None, "label": label,
        "dtype": "float32", "inputs": ["float32[4,4]"], "is_cold": False, "wall": wall or time(seconds), "gpu": None,
        "flops": nbytes // 12, "bytes": nbytes, "bytes_per_second": nbytes / seconds,
        "flops_per_second": nbytes / 12 / seconds, "intensity": 1 / 12, "ridge": 10.0, "limit": "bandwidth",
        "bandwidth_share": share or 0.0, "compute_share": 0.01, "share": share,
        "band": None if share is None else band_of(share), "cause": "bandwidth", "advice": f"look at {name}",
        "peak_bytes": 64, "launches": None, "dispatch": None, "backward": None, "notes": [],
    }  # fmt: skip
    return Entry(category=category, size=size, row=OpRow(**{**usual, **given}))  # type: ignore[arg-type]


def report(
    folder: Path, *entries: Entry, failures: tuple[Failure, ...] = (), skipped: tuple[Skipped, ...] = (),
    device_name: str = "a processor", sections: tuple[Section, ...] = (), machine: dict[str, Any] | None = None,
) -> BenchReport:  # fmt: skip
    """A report of such cases, with the earlier ones in `folder` as its history."""
    setup = Setup(
        device=CPU, dtype=None, settings=Settings(plan=Plan()), sizes=("medium",), folder=folder,
        device_name=device_name, machine=machine or {"genesis": "0.0"},
    )  # fmt: skip
    measured = Measured(list(entries), list(failures), list(skipped), 12.3)
    return build("bench-all" if sections else "bench-ops", "genesis bench-ops", setup, measured, [LIMITS], sections)
