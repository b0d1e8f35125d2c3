"""Writes reports of `genesis.measure.record` into benchmarks/results, and finds the newest of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from genesis.backend import Device
from genesis.measure.record import Cell, Column, Report, Table, aligned
from genesis_cli.environment import facts

RESULTS = Path(__file__).resolve().parent / "results"
Row = Mapping[str, Any]


def columns(**described: tuple[str, str, str]) -> list[Column]:
    """A column for each key of a row: its title, unit and meaning."""
    return [
        Column(key, title, unit, about, lambda row, key=key: row.get(key))  # type: ignore[arg-type, misc]
        for key, (title, unit, about) in described.items()
    ]


def rows_table(name: str, title: str, of: Sequence[Column], rows: Iterable[Row]) -> Table:
    """Rows as a table, printed for the terminal."""
    made = Table(name, title, of, rows)
    print("\n".join(aligned(made)), flush=True)
    return made


def write_report(
    path: Path | None, kind: str, device: Device, tables: Sequence[Table], settings: Mapping[str, Cell] | None = None
) -> None:
    """Write a report about this machine as compact JSON, because every clone contains these files."""
    if path is None:
        return
    from genesis import cuda

    machine = facts()
    name = machine["cpu"]["name"] if device.type == "cpu" else cuda.get_device_name(device)
    module = Path(sys.argv[0]).resolve().relative_to(RESULTS.parents[1]).with_suffix("").as_posix().replace("/", ".")
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    report = Report(kind, command, str(device), name, machine, settings or {}, list(tables))
    data = json.loads(report.to_json())
    path.write_text(json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "\n")


def result_files(folder: Path = RESULTS) -> list[Path]:
    """The JSON files of results that git tracks; all of them outside a git clone."""
    command = ["git", "ls-files", "-z", "--", "*.json"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    if listed.returncode:
        return sorted(folder.glob("*.json"))
    return sorted(path for name in listed.stdout.decode().split("\0") if name and (path := folder / name).is_file())


def newest(kind: str, files: Iterable[Path]) -> tuple[Path, dict[str, Any]] | None:
    """The file of a kind's newest report, and the report; None if no file has this kind."""
    found = [(path, json.loads(path.read_text())) for path in files]
    return max((each for each in found if each[1]["kind"] == kind), key=lambda each: each[1]["date"], default=None)
