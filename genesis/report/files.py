"""Where reports go: the folder, the names, and the three files of a report."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from genesis.errors import DiskError, escape
from genesis.files.atomic import write_file
from genesis.report.markdown import markdown_of
from genesis.report.page import page_of
from genesis.report.schema import BenchReport

ELSEWHERE = Path("genesis-bench")


def default_folder(here: Path | None = None) -> Path:
    """`benchmarks/results` of the clone of Genesis that `here` (the current folder) is in, else `genesis-bench`."""
    start = Path.cwd() if here is None else here
    for folder in (start, *start.parents):
        results = folder / "benchmarks" / "results"
        if (folder / "genesis" / "report" / "files.py").is_file() and results.is_dir():
            return results
    return start / ELSEWHERE


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


def save(report: BenchReport, folder: Path) -> list[Path]:
    """Write the page, the Markdown and the JSON into the folder, named by date, kind and device.

    Raises:
        DiskError: writing failed.
    """
    stamp = re.sub(r"[^0-9-]", "", report.date[:19].replace("T", "-"))
    device = re.sub(r"[^a-z0-9]+", "-", report.device_name.lower()).strip("-")[:32].strip("-")
    stem = _free(folder, f"{stamp}-{report.kind}-{device or 'unknown'}-{report.settings.dtype}")
    texts = {"html": page_of(report), "md": markdown_of(report), "json": report.model_dump_json() + "\n"}
    paths = [folder / f"{stem}.{suffix}" for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_file(path, text.encode())
    return paths


def _free(folder: Path, stem: str) -> str:
    """The stem, with a number where a report of the same second has it."""
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (folder / f"{name}.json").exists())
