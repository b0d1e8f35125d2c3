"""The files of benchmarks/results: how they are written, which are read, and how."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RESULTS", "Result", "read_results", "result_files", "short_name", "write_result"]

RESULTS = Path(__file__).resolve().parent / "results"


class Result(NamedTuple):
    """A file of results."""

    name: str
    data: dict[str, Any]

    @property
    def date(self) -> str:
        """ISO 8601, by which the newest is known; that of its first run where the file holds several."""
        return str(self.data.get("date") or self.data.get("runs", [{}])[0].get("date", ""))


def write_result(path: Path, data: Any) -> None:
    """Write compact JSON: programs read these files, and a clone has them all."""
    path.write_text(json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "\n")


def result_files(folder: Path = RESULTS) -> list[Path]:
    """The JSON files of results: those that git knows, or all where there is no git."""
    command = ["git", "ls-files", "-z", "--", "*.json"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    if listed.returncode:
        return sorted(folder.glob("*.json"))
    return sorted(path for name in listed.stdout.decode().split("\0") if name and (path := folder / name).is_file())


def read_results(files: Iterable[Path]) -> list[Result]:
    """The files' data, oldest first."""
    found = [Result(path.name, json.loads(path.read_text())) for path in files]
    return sorted(found, key=lambda result: (result.date, result.name))


def short_name(gpu: str) -> str:
    """H100 for NVIDIA H100 80GB HBM3."""
    return gpu.removeprefix("NVIDIA ").split()[0]
