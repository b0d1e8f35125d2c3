"""Writes reports to a folder, reads earlier ones of the same machine, and compares their cases with new ones.

A case is compared by its row in a report's table of ops, whether the row is new or comes from a file.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from genesis.errors import GenesisError
from genesis.files.atomic import write_file
from genesis.files.strict_json import parse_object, read_limited
from genesis.measure.record import Column, Report, Table, table, to_markdown

MOST_BYTES = 64 << 20
PATTERN = "*-bench-*.json"
LEAST_NOISE = 0.05  # runs differ by this share because of clocks, memory layout and other programs
INTERVALS = 2.0  # tolerance in half-widths of the 95 % intervals; at 1, one case in twenty would exceed it
FIGURES = tuple(clock + figure for clock in ("wall", "gpu") for figure in ("", "_half_width", "_spread"))

Key = tuple[str, str]  # case, dtype
Row = Mapping[str, Any]


def earlier_runs(folder: Path, report: Report) -> dict[Key, Row]:
    """The latest figures of each case from reports with the same device, dtype and threads; other files are skipped."""
    runs = []
    for path in folder.glob(PATTERN):
        try:
            data = parse_object(read_limited(path, MOST_BYTES), where=path.name)
            theirs, date, found = data["settings"], str(data["date"]), {}
            ops: list[Row] = next((each["rows"] for each in data["tables"] if each["name"] == "ops"), [])
            for row in ops:  # JSON cannot store an infinite half-width, so it stores None
                found[row["case"], row["dtype"]] = {"since": date} | {n: float(row.get(n) or 0.0) for n in FIGURES}
        except (GenesisError, KeyError, TypeError, AttributeError, ValueError):
            continue
        same = [theirs.get(name) == report.settings.get(name) for name in ("dtype", "threads")]
        if data["device_name"] == report.device_name and all(same):
            runs.append((date, found))
    return {key: row for _, run in sorted(runs, key=lambda run: run[0]) for key, row in run.items()}


CHANGES = (
    Column("case", "case", "text", "Op and shape."),
    Column("since", "since", "text", "The last report with the case."),
    Column("before", "before", "s", "Its time in that report."),
    Column("now", "now", "s", "Its time now."),
    Column("ratio", "now/before", "ratio", "Above 1 the case is slower now."),
    Column("noise", "noise", "share", "Difference that noise explains."),
    Column("verdict", "verdict", "text", "slower, faster or same."),
)


def changes_table(earlier: Mapping[Key, Row], rows: Iterable[Row]) -> Table:
    """The table that compares each case with the last run that has it.

    The text shows the cases that changed by more than the noise, or the largest change if none did.
    """
    changes = []
    for row in rows:
        before = earlier.get((row["case"], row["dtype"]))
        clock = "gpu" if before and before["gpu"] and row["gpu"] else "wall"
        if before and before[clock]:
            half_widths, spreads = (
                [each[f"{clock}_{name}"] or 0.0 for each in (before, row)] for name in ("half_width", "spread")
            )
            noise, ratio = max(LEAST_NOISE, INTERVALS * math.hypot(*half_widths), *spreads), row[clock] / before[clock]
            is_same = 1 / (1 + noise) <= ratio <= 1 + noise
            changes.append({
                "case": row["case"], "since": before["since"][:16].replace("T", " "), "before": before[clock],
                "now": row[clock], "ratio": ratio, "noise": noise,
                "verdict": "same" if is_same else "slower" if ratio > 1 else "faster",
            })  # fmt: skip
    changes.sort(key=lambda change: (change["verdict"] == "same", -abs(math.log(change["ratio"]))))
    most = max(sum(change["verdict"] != "same" for change in changes), 1)
    return table("changes", "changed since the last run", CHANGES, changes, most=most)


def default_folder() -> Path:
    """`benchmarks/results` in the clone of Genesis around the current folder, otherwise `genesis-bench` in it."""
    start = Path.cwd()
    for folder in (start, *start.parents):
        results = folder / "benchmarks" / "results"
        if (folder / "genesis" / "measure" / "history.py").is_file() and results.is_dir():
            return results
    return start / "genesis-bench"


def save(report: Report, folder: Path) -> list[Path]:
    """Write the report as Markdown and JSON, named by date, kind, device and dtype. Raises DiskError."""
    stamp = re.sub(r"[^0-9-]", "", report.date[:19].replace("T", "-"))
    device = re.sub(r"[^a-z0-9]+", "-", report.device_name.lower()).strip("-")[:32].strip("-")
    stem = f"{stamp}-{report.kind}-{device or 'unknown'}-{report.settings.get('dtype')}"
    # A report from the same second already has this name, so append a number.
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    stem += next(ending for ending in endings if not (folder / f"{stem}{ending}.json").exists())
    paths = folder / f"{stem}.md", folder / f"{stem}.json"
    write_file(paths[0], "\n".join([*to_markdown(report), ""]).encode())
    write_file(paths[1], report.to_json())
    return list(paths)
