"""The texts that a run samples: rows of step, prompt and text in samples.jsonl, cut back when a run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from genesis.errors import DataError, DiskError, escape
from genesis.files.atomic import write_file
from genesis.files.boundary import boundary
from genesis.files.filesystem import DEFAULT, Writer
from genesis.files.paths import exists, open_regular
from genesis.files.strict_json import read_limited
from genesis.files.trust import run_file

SAMPLES_NAME = "samples.jsonl"
LARGEST = 256 << 20  # bytes of the file, beyond which it is not read


class Sample(NamedTuple):
    """A text that continues a prompt, and the step at which the model drew it."""

    step: int
    prompt: str
    text: str


def append_samples(folder: Path, samples: list[Sample]) -> None:
    """Add samples to the file in a run's folder. Raises: DiskError."""
    lines = "".join(json.dumps(sample._asdict()) + "\n" for sample in samples)
    with Writer(DEFAULT, folder / SAMPLES_NAME, os.O_CREAT | os.O_APPEND) as writer:
        writer.write(lines.encode())


def keep_samples(folder: Path, step: int | None) -> None:
    """Drop the samples after `step`, or with None all of them.

    Raises:
        DataError: the file holds something else. DiskError: it cannot be written.
    """
    path = folder / SAMPLES_NAME
    with boundary(DiskError, "reading the samples", path):
        is_there = exists(path)
    if not is_there:
        return
    if step is None:
        DEFAULT.unlink(path)
        return
    kept = [sample for sample in read_samples(folder) if sample.step <= step]
    write_file(path, "".join(json.dumps(sample._asdict()) + "\n" for sample in kept).encode())


def read_samples(folder: Path, most: int | None = None) -> Iterator[Sample]:
    """The samples of a run, in the order of their steps; a last line that a crash cut short is left out.

    Args:
        most: of a larger file only the samples in its last bytes; None: all, of at most `LARGEST` bytes.

    Raises:
        DataError: a line that is no sample, with its number; the file is a link or another user's.
    """
    path = run_file(folder, SAMPLES_NAME)
    if path is None:
        return
    with boundary(DiskError, "reading the samples", path):
        is_whole = most is None or os.stat(path).st_size <= most
    if is_whole:
        data = read_limited(path, LARGEST, DataError)
    else:
        with boundary(DiskError, "reading the samples", path), open(open_regular(path, DataError), "rb") as file:
            file.seek(-(most or 0), os.SEEK_END)
            data = file.read(most).partition(b"\n")[2]  # it begins within a sample
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            sample = Sample(row["step"], row["prompt"], row["text"])
            if type(sample.step) is not int or not all(type(text) is str for text in sample[1:]):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            where = f"{escape(path)}:{number}" if is_whole else escape(path)
            raise DataError("this line is no sample", where=where, next="move the file away") from None
        yield sample
