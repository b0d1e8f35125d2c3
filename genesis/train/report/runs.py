"""The records in a run's folder: metrics as columns, settings, samples. A second read only reads what is new."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.errors import DataError, DiskError, escape
from genesis.files.boundary import boundary
from genesis.files.paths import exists, is_folder, list_folder
from genesis.files.strict_json import read_limited
from genesis.files.trust import run_file
from genesis.train.config_file import RESOLVED
from genesis.train.metrics import DRAWABLE, FILE_NAME, SAMPLES_NAME, STEP, RowOffset, Sample, read_metrics, read_samples

FILES = (FILE_NAME, SAMPLES_NAME, RESOLVED)  # the files that a page shows
MOST_CONFIG = 1 << 20  # bytes
MOST_SAMPLES = 8 << 20  # bytes at the end of their file
MOST_NAMED = 8  # runs in an error
AT_ONCE = 4096  # rows of metrics that are converted at a time

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Run:
    """The records of a run so far.

    Attributes:
        folder: folder of the run.
        series: name of a metric -> steps and values `[2, n]`, without values that are not finite or above `DRAWABLE`.
        config: the resolved settings; empty without them.
        samples: samples in the order of their steps; the last ones if there are very many.
        last_step: last step of the metrics; 0 without metrics.
        bad_rows: rows with a number that is not finite or above `DRAWABLE`.
    """

    folder: Path
    series: Mapping[str, Floats]
    config: str
    samples: Sequence[Sample]
    last_step: int
    bad_rows: int

    def last(self, name: str) -> float | None:
        """Return the last value of a metric."""
        return self._of(name, lambda values: values[-1])

    def least(self, name: str) -> float | None:
        """Return the lowest value of a metric."""
        return self._of(name, np.min)

    def middle(self, name: str) -> float | None:
        """Return the median of a metric."""
        return self._of(name, np.median)

    def most(self, name: str) -> float | None:
        """Return the largest value of a metric."""
        return self._of(name, np.max)

    def _of(self, name: str, figure: Callable[[Floats], Any]) -> float | None:
        return float(figure(self.series[name][1])) if name in self.series else None


class RunReader:
    """Reads a run's folder repeatedly: appended metrics, and the other files that have changed."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._reset()
        self._samples: tuple[object, list[Sample]] = None, []

    def _reset(self) -> None:
        self._position, self._series = RowOffset(), dict[str, Floats]()
        self._step = self._bad_rows = 0

    def read(self) -> Run:
        """Return the current records.

        Raises:
            DataError: the folder does not belong to a run, or a file is malformed, is a link or belongs to another
                user.
            DiskError: a file cannot be read.
        """
        folder = self._folder
        if (path := run_file(folder, FILE_NAME)) is None:
            raise _no_run(folder)
        if not self._position.is_in(path):
            self._reset()
        # Add the rows since the last read, grouped by their names.
        rows, added = read_metrics(path, self._position), defaultdict[str, list[Floats]](list)
        try:
            while some := list(itertools.islice(rows, AT_ONCE)):
                for names, group in itertools.groupby(some, tuple):
                    self._add(added, names, list(zip(*(row.values() for row in group), strict=True)))
        except BaseException:
            self._reset()  # rows before the error are lost
            raise
        for name, parts in added.items():
            self._series[name] = np.concatenate([self._series.get(name, np.empty((2, 0))), *parts], axis=1)
        config = run_file(folder, RESOLVED)
        # Read the settings again, and the samples if their file has changed.
        text = "" if config is None else read_limited(config, MOST_CONFIG, DataError).decode("utf-8", "replace")
        if (now := file_state(folder / SAMPLES_NAME)) != self._samples[0]:
            self._samples = now, list(read_samples(folder, MOST_SAMPLES))
        return Run(folder, self._series, text, self._samples[1], self._step, self._bad_rows)

    def _add(self, added: Mapping[str, list[Floats]], names: Sequence[str], table: Sequence[Sequence[Any]]) -> None:
        """Add rows with the same names, given as columns."""
        steps = np.array(table[names.index(STEP)], np.float64)
        bad = np.full(len(steps), "nonfinite" in names)
        for name, column in zip(names, table, strict=True):
            if name != STEP:
                numbers = [value if type(value) in (int, float) else None for value in column]
                values = np.array(numbers, np.float64)  # None becomes NaN
                good = np.abs(values) <= DRAWABLE
                bad |= np.abs(values) > DRAWABLE
                if good.any():
                    added[name].append(np.stack([steps[good], values[good]]))
        self._step, self._bad_rows = table[names.index(STEP)][-1], self._bad_rows + int(bad.sum())


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Return the records in a run's folder. Raises the errors of `RunReader.read`."""
    return RunReader(folder).read()


def file_state(path: Path) -> tuple[int, int] | None:
    """Return size and time of a file, which change when it is written, or None if it cannot be accessed."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _no_run(path: Path) -> DataError:
    what = f"{escape(path)} has no {FILE_NAME}, so it is not a run's output_dir"
    with boundary(DiskError, "looking for runs", path):
        names = sorted(list_folder(path)) if is_folder(path) else []
        inside = [path / name for name in names if is_folder(path / name) and exists(path / name / FILE_NAME)]
    next = "pass the folder in train.output_dir"
    return DataError(what, next=f"choose a run in it: {' '.join(map(escape, inside[:MOST_NAMED]))}" if inside else next)


def named(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder: its last part, with as many parents as needed to distinguish all."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    count = 1
    while len({each[-count:] for each in parts}) < len(set(parts)):
        count += 1
    return [escape("/".join(each[-count:])) for each in parts]
