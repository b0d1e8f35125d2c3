"""What a run's folder has recorded: its metrics as columns, its settings, its samples."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from genesis.errors import DataError, DiskError, escape
from genesis.io.boundary import boundary
from genesis.io.paths import exists, is_folder, list_folder
from genesis.io.strict_json import read_limited
from genesis.train.config_file import RESOLVED
from genesis.train.metrics import FILE_NAME, STEP, read_metrics
from genesis.train.samples import SAMPLES_NAME, Sample, read_samples

__all__ = ["FILES", "Run", "named", "read_run"]

FILES = (FILE_NAME, SAMPLES_NAME, RESOLVED)  # what a page shows
MOST_CONFIG = 1 << 20  # bytes
MOST_NAMED = 8  # runs in an error

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as far as it came.

    Attributes:
        folder: of the run.
        series: name of a metric -> its finite values by step.
        config: the settings as they were resolved; empty where there are none.
        samples: in the order of their steps.
        last_step: of the metrics; 0 where there are none.
        bad_rows: rows with a number that is not finite.
    """

    folder: Path
    series: Mapping[str, Points]
    config: str
    samples: Sequence[Sample]
    last_step: int
    bad_rows: int

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        points = self.series.get(name)
        return points[-1][1] if points else None

    def least(self, name: str) -> tuple[int, float] | None:
        """The step and the value where a metric was lowest."""
        points = self.series.get(name)
        return min(points, key=lambda point: point[1]) if points else None

    def middle(self, name: str) -> float | None:
        """The median of a metric."""
        points = self.series.get(name)
        return median(value for _, value in points) if points else None

    def most(self, name: str) -> float | None:
        """The largest value of a metric."""
        points = self.series.get(name)
        return max(value for _, value in points) if points else None


def read_run(folder: str | os.PathLike[str]) -> Run:
    """What is recorded in a run's folder.

    Raises:
        DataError: it is no folder of a run, or a file of it holds something else. DiskError: one cannot be read.
    """
    path = Path(folder)
    with boundary(DiskError, "reading the run", path):
        has_metrics, has_config = exists(path / FILE_NAME), exists(path / RESOLVED)
    if not has_metrics:
        what = f"{escape(path)} has no {FILE_NAME}, and so is no run's output_dir"
        with boundary(DiskError, "looking for runs", path):
            names = sorted(list_folder(path)) if is_folder(path) else []
            inside = [path / name for name in names if is_folder(path / name) and exists(path / name / FILE_NAME)]
        next = "name the folder that train.output_dir names"
        raise DataError(what, next=f"runs in it: {' '.join(map(escape, inside[:MOST_NAMED]))}" if inside else next)
    series: dict[str, list[tuple[int, float]]] = {}
    step = bad = 0
    for row in read_metrics(path / FILE_NAME):
        step = row[STEP]
        bad += "nonfinite" in row
        for name, value in row.items():
            if name != STEP and type(value) in (int, float) and math.isfinite(value):
                series.setdefault(name, []).append((step, float(value)))
    config = path / RESOLVED
    text = read_limited(config, MOST_CONFIG, DataError).decode("utf-8", "replace") if has_config else ""
    return Run(path, series, text, list(read_samples(path)), step, bad)


def named(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its last part, with as many before it as tell all apart."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    count = 1
    while len({each[-count:] for each in parts}) < len(set(parts)):
        count += 1
    return [escape("/".join(each[-count:])) for each in parts]
