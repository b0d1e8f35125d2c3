"""Reports in a folder: where they are written, the earlier ones of the same machine, and what changed since.

A case is compared by its row in a report's table of ops, whether it was measured now or read from a file.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from genesis.errors import DiskError, GenesisError, escape
from genesis.files.atomic import write_file
from genesis.files.strict_json import parse_object, read_limited
from genesis.measure.record import Column, Report, Table, table, to_markdown
from genesis.measure.timing import MAD_TO_SIGMA

MOST_BYTES = 64 << 20
PATTERN = "*-bench-*.json"
LEAST_NOISE = 0.05  # clocks, memory layout and other programs make runs differ this much
INTERVALS = 2.0  # half-widths of the 95 % intervals: a twentieth of hundreds of cases would exceed one
SIGMAS = 3.0
LEAST_CASES = 8  # cases that show how much two runs scatter

Key = tuple[str, str, bool]  # case, dtype, whether the cache was cold
Row = Mapping[str, Any]


class Seen(NamedTuple):
    """The time of a case in a report."""

    date: str
    wall: float
    gpu: float | None
    half_width: float
    spread: float


def seen_in(rows: Iterable[Row], date: str = "") -> dict[Key, Seen]:
    """The times of a table of ops. Raises: KeyError, TypeError or ValueError if a row is not one of ops."""
    found = {}
    for row in rows:
        prefix = "wall" if row.get("gpu") is None else "gpu"
        # JSON has no infinite half-width: None stands for it.
        half_width, spread = (float(row.get(f"{prefix}_{key}") or 0.0) for key in ("half_width", "spread"))
        seen = Seen(date, float(row["wall"]), row.get("gpu"), half_width, spread)
        if seen.wall > 0:
            found[row["case"], row["dtype"], bool(row.get("is_cold"))] = seen
    return found


def earlier_runs(folder: Path, device_name: str, settings: Mapping[str, Any]) -> dict[Key, Seen]:
    """The last time of each case in reports of the same device, dtype and threads; other files are skipped."""
    wanted = (device_name, settings.get("dtype"), settings.get("threads"))
    runs: list[tuple[str, dict[Key, Seen]]] = []
    for path in folder.glob(PATTERN):
        try:
            data = parse_object(read_limited(path, MOST_BYTES), where=path.name)
            theirs, date = data["settings"], str(data["date"])
            if (data["device_name"], theirs.get("dtype"), theirs.get("threads")) == wanted:
                ops: list[Row] = next((each["rows"] for each in data["tables"] if each["name"] == "ops"), [])
                runs.append((date, seen_in(ops, date)))
        except (GenesisError, KeyError, TypeError, AttributeError, ValueError):
            continue
    return {key: seen for _, run in sorted(runs, key=lambda run: run[0]) for key, seen in run.items()}


# --- Changes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A case compared with the last earlier run that has it, in seconds."""

    case: str
    since: str
    before: float
    now: float
    noise: float  # how much two equal times may differ, as a share

    @property
    def ratio(self) -> float:
        """Now over before."""
        return self.now / self.before

    @property
    def verdict(self) -> str:
        """slower, faster, or same."""
        if 1 / (1 + self.noise) <= self.ratio <= 1 + self.noise:
            return "same"
        return "slower" if self.ratio > 1 else "faster"


CHANGES = (
    Column("case", "case", "text", "Op and shape."),
    Column("since", "since", "text", "The last report with the case."),
    Column("before", "before", "s", "Its time then."),
    Column("now", "now", "s", "Its time now."),
    Column("ratio", "now/before", "ratio", "Above 1 it is slower now."),
    Column("noise", "noise", "share", "How much two equal times may differ."),
    Column("verdict", "verdict", "text", "slower, faster or same."),
)


def changes_since(earlier: Mapping[Key, Seen], rows: Iterable[Row]) -> list[Change]:
    """Each case compared with the last run that has it; the noise is the largest of what is known."""
    pairs = []
    for key, now in seen_in(rows).items():
        if (last := earlier.get(key)) is not None:
            times = (last.gpu, now.gpu) if last.gpu and now.gpu else (last.wall, now.wall)
            pairs.append((key[0], last, now, *times))
    ratios: dict[str, list[float]] = {}
    for _, last, _, before, after in pairs:
        ratios.setdefault(last.date, []).append(after / before)
    found = []
    for name, last, now, before, after in pairs:
        intervals = INTERVALS * math.hypot(last.half_width, now.half_width)
        noise = max(LEAST_NOISE, intervals, last.spread, now.spread, scatter(ratios[last.date]))
        found.append(Change(name, last.date[:16].replace("T", " "), before, after, noise))
    return found


def scatter(ratios: Sequence[float]) -> float:
    """How much two runs differ from case to case, as a share; 0 for too few cases to tell.

    Most cases run the same code in both, so their ratios scatter with the machine and its other work. A change that all
    cases share does not count.
    """
    if len(ratios) < LEAST_CASES:
        return 0.0
    logs = [math.log(ratio) for ratio in ratios]
    middle = median(logs)
    return math.expm1(SIGMAS * MAD_TO_SIGMA * median([abs(x - middle) for x in logs]))


def changes_table(earlier: Mapping[Key, Seen], rows: Iterable[Row]) -> Table:
    """All changes, the largest first; people see those beyond the noise, or the largest."""
    changes = sorted(changes_since(earlier, rows), key=lambda c: (c.verdict == "same", -abs(math.log(c.ratio))))
    most = max(sum(change.verdict != "same" for change in changes), 1)
    return table("changes", "changed since the last run", CHANGES, changes, most=most)


# --- Files ------------------------------------------------------------------------------------------------------------


def default_folder(here: Path | None = None) -> Path:
    """`benchmarks/results` of the clone of Genesis that contains `here` (the current folder), else `genesis-bench`."""
    start = Path.cwd() if here is None else here
    for folder in (start, *start.parents):
        results = folder / "benchmarks" / "results"
        if (folder / "genesis" / "measure" / "history.py").is_file() and results.is_dir():
            return results
    return start / "genesis-bench"


def made_folder(folder: Path) -> Path:
    """The folder, created if it is missing. Raises: DiskError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder {escape(folder)} cannot be made: {error.strerror}"
        raise DiskError(what, where="--out", next="choose another folder") from error
    return folder


def save(report: Report, folder: Path) -> list[Path]:
    """Write the report as Markdown and JSON, named by date, kind, device and dtype. Raises: DiskError."""
    stamp = re.sub(r"[^0-9-]", "", report.date[:19].replace("T", "-"))
    device = re.sub(r"[^a-z0-9]+", "-", report.device_name.lower()).strip("-")[:32].strip("-")
    stem = f"{stamp}-{report.kind}-{device or 'unknown'}-{report.settings.get('dtype')}"
    # A report of the same second has the name already.
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    stem = next(name for name in names if not (folder / f"{name}.json").exists())
    paths = folder / f"{stem}.md", folder / f"{stem}.json"
    write_file(paths[0], "\n".join([*to_markdown(report), ""]).encode())
    write_file(paths[1], report.to_json())
    return list(paths)
