"""Reports in a folder: where they are written, the earlier ones of the same machine, and what changed since.

Only what is compared is read of a file, whatever else it holds.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from genesis.errors import DiskError, GenesisError, escape
from genesis.files.atomic import write_file
from genesis.files.strict_json import parse_object, read_limited
from genesis.measure.op import Measured
from genesis.measure.record import Column, Report, Table, table, to_markdown
from genesis.measure.timing import MAD_TO_SIGMA

MOST_BYTES = 64 << 20
MOST_RUNS = 30
PATTERN = "*-bench-*.json"
LEAST_NOISE = 0.05  # clocks, memory's layout and other programs differ this much from run to run
INTERVALS = 2.0  # half-widths of the 95 % intervals: of hundreds of cases, a twentieth would be beyond one
SIGMAS = 3.0
LEAST_RUNS = 3  # from which on their scatter is known
LEAST_CASES = 8  # the same for the cases of two runs
BARS = "▁▂▃▄▅▆▇█"

Key = tuple[str, str, bool]


@dataclass(frozen=True)
class Seen:
    """A time of an earlier report."""

    wall: float
    gpu: float | None
    half_width: float
    spread: float


@dataclass(frozen=True)
class Past:
    """An earlier report.

    Attributes:
        rates: bytes and FLOPs a second that the machine reached then.
    """

    date: str
    genesis: str
    rates: tuple[float | None, float | None]
    rows: dict[Key, Seen]


def _key(m: Measured) -> Key:
    return m.name, m.case.dtype.name, m.is_cold


def earlier_runs(folder: Path, device_name: str, settings: dict[str, Any]) -> list[Past]:
    """Runs of the same device with the same dtype and threads, oldest first; what is no such report is passed over."""
    found = []
    for path in sorted(folder.glob(PATTERN)):
        try:
            data = parse_object(read_limited(path, MOST_BYTES), where=path.name)
            theirs = (data["device_name"], *(data["settings"].get(key) for key in ("dtype", "threads")))
            if theirs == (device_name, *(settings.get(key) for key in ("dtype", "threads"))):
                found.append(_past(data))
        except (GenesisError, KeyError, TypeError, AttributeError, ValueError):
            continue
    return sorted(found, key=lambda past: past.date)[-MOST_RUNS:]


def _past(data: dict[str, Any]) -> Past:
    tables = {each["name"]: each["rows"] for each in reversed(data["tables"])}  # the first of a name
    dtype, rows = data["settings"].get("dtype"), {}
    for row in tables.get("ops", []):
        prefix = "wall" if row.get("gpu") is None else "gpu"
        half_width, spread = (float(row.get(f"{prefix}_{key}") or 0) for key in ("half_width", "spread"))
        seen = Seen(float(row["wall"]), row.get("gpu"), half_width, spread)
        if seen.wall > 0:
            rows[row["case"], row["dtype"], bool(row.get("is_cold"))] = seen
    limits: dict[str, Any] = next((each for each in tables.get("limits", []) if each["dtype"] == dtype), {})
    rates = limits.get("bytes_per_second"), limits.get("flops_per_second")
    return Past(str(data["date"]), str(data.get("machine", {}).get("genesis", "unknown")), rates, rows)


# --- What changed -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A case beside the last earlier run that has it.

    Attributes:
        noise: how far two times can lie apart that mean the same, as a share.
        trend: seconds in all earlier runs that have the case, and now.
    """

    name: str
    since: str
    before: float
    now: float
    noise: float
    trend: list[float]

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


def changes_since(earlier: Sequence[Past], cases: Sequence[Measured]) -> list[Change]:
    """Each case beside the last run that has it, with the noise of both times and of the two runs."""
    pairs = []
    for m in cases:
        having = [(past.date, past.rows[_key(m)]) for past in earlier if _key(m) in past.rows]
        if having:
            pairs.append((m, having[-1][0], [_times(seen, m) for _, seen in having], having[-1][1]))
    scatters = {
        date: _scatter([times[-1][1] / times[-1][0] for _, since, times, _ in pairs if since == date])
        for date in {since for _, since, _, _ in pairs}
    }
    found = []
    for m, since, times, last in pairs:
        (before, now), past = times[-1], [each for each, _ in times]
        noise = max(noise_of(last, m, past), scatters[since])
        found.append(Change(m.name, since, before, now, noise, [*past, now]))
    return found


def _times(before: Seen, now: Measured) -> tuple[float, float]:
    """GPU times where both have one, else wall times."""
    if before.gpu and now.gpu:
        return before.gpu, now.gpu.seconds
    return before.wall, now.wall.seconds


def _scatter(ratios: Sequence[float]) -> float:
    """How much two runs differ from case to case, as a share; 0 for too few cases to tell.

    Most cases have the same code in both runs, so what spreads their ratios is the machine and what else it did.
    A change that all cases share is not in it.
    """
    if len(ratios) < LEAST_CASES:
        return 0.0
    return math.expm1(SIGMAS * _deviation([math.log(ratio) for ratio in ratios]))


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return MAD_TO_SIGMA * median([abs(x - middle) for x in values])


def noise_of(before: Seen, now: Measured, seconds: Sequence[float]) -> float:
    """How far two times can lie apart that mean the same: the largest of what is known about it.

    Args:
        seconds: of the earlier runs. Three or more of them show how much runs differ.
    """
    width = now.time.half_width if math.isfinite(now.time.half_width) else 1.0
    known = [LEAST_NOISE, INTERVALS * math.hypot(before.half_width, width), before.spread, now.time.spread]
    if len(seconds) >= LEAST_RUNS:
        known.append(SIGMAS * _deviation(seconds) / median(seconds))
    return max(known)


def bars(values: Sequence[float]) -> str:
    """Values as a line of bars, from the least to the greatest."""
    low, high = min(values), max(values)
    return "".join(BARS[round((len(BARS) - 1) * (v - low) / (high - low))] if high > low else BARS[0] for v in values)


CHANGES = (
    Column("case", "case", "text", "Op and shape.", lambda c: c.name),
    Column("since", "since", "text", "The last report with the case.", lambda c: c.since[:16].replace("T", " ")),
    Column("before", "before", "s", "Its time then.", lambda c: c.before),
    Column("now", "now", "s", "Its time now.", lambda c: c.now),
    Column("ratio", "now/before", "ratio", "Above 1 it is slower now.", lambda c: c.ratio),
    Column("noise", "noise", "share", "How far two times can lie apart that mean the same.", lambda c: c.noise),
    Column("verdict", "verdict", "text", "slower, faster or same.", lambda c: c.verdict),
    Column("trend", "trend", "text", "Times of all runs, the oldest first.", lambda c: bars(c.trend)),
)  # fmt: skip


def tables_of(earlier: Sequence[Past], cases: Sequence[Measured]) -> list[Table]:
    """What is slower or faster than in the last run, all changes, and the earlier runs."""
    changes = sorted(changes_since(earlier, cases), key=lambda c: -abs(math.log(c.ratio)))
    by_key = {_key(m): m for m in cases}

    def relative(past: Past) -> float | None:
        pairs = [_times(seen, by_key[key]) for key, seen in past.rows.items() if key in by_key]
        return math.exp(sum(math.log(before / now) for before, now in pairs) / len(pairs)) if pairs else None

    runs = (
        Column("date", "date", "text", "End of the run, UTC.", lambda p: p.date[:16].replace("T", " ")),
        Column("genesis", "Genesis", "text", "Version.", lambda p: p.genesis),
        Column("copy", "copy", "byte/s", "Rate of a copy then.", lambda p: p.rates[0]),
        Column("matmul", "matmul", "FLOP/s", "Rate of a large product then.", lambda p: p.rates[1]),
        Column("common", "common cases", "count", "Cases that are here too.", lambda p: len(by_key.keys() & p.rows)),
        Column("relative", "time beside now", "ratio", "Its times over these, geometric mean.", relative),
    )
    of: Callable[[str], Iterator[Change]] = lambda verdict: (c for c in changes if c.verdict == verdict)  # noqa: E731
    tables = [
        table("slower_now", "slower than in the last run", CHANGES, of("slower")),
        table("faster_now", "faster than in the last run", CHANGES, of("faster")),
        table("changes", "since the last run", CHANGES, changes, most=1),
        table("history", "earlier runs", runs, reversed(earlier), most=5),
    ]
    return [each for each in tables if each.rows]


# --- Files ------------------------------------------------------------------------------------------------------------


def default_folder(here: Path | None = None) -> Path:
    """`benchmarks/results` of the clone of Genesis that `here` (the current folder) is in, else `genesis-bench`."""
    start = Path.cwd() if here is None else here
    for folder in (start, *start.parents):
        results = folder / "benchmarks" / "results"
        if (folder / "genesis" / "measure" / "history.py").is_file() and results.is_dir():
            return results
    return start / "genesis-bench"


def made_folder(folder: Path) -> Path:
    """The folder, made where it is missing.

    Raises:
        DiskError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder {escape(folder)} cannot be made: {error.strerror}"
        raise DiskError(what, where="--out", next="choose another folder") from error
    return folder


def save(report: Report, folder: Path) -> list[Path]:
    """Write the report as Markdown and JSON into the folder, named by date, kind and device.

    Raises:
        DiskError: writing failed.
    """
    stamp = re.sub(r"[^0-9-]", "", report.date[:19].replace("T", "-"))
    device = re.sub(r"[^a-z0-9]+", "-", report.device_name.lower()).strip("-")[:32].strip("-")
    stem = f"{stamp}-{report.kind}-{device or 'unknown'}-{report.settings.get('dtype')}"
    # A report of the same second has the name already.
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    stem = next(name for name in names if not (folder / f"{name}.json").exists())
    texts = {"md": "\n".join([*to_markdown(report), ""]).encode(), "json": report.to_json()}
    paths = [folder / f"{stem}.{suffix}" for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_file(path, text)
    return paths
