"""SIGKILL at every file-system call of three saves, with rotation and replacement: what was committed always loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from genesis.files.atomic import AtomicFolder
from tests.files.kill_worker import check, fill

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill loses nothing that the kernel was given, flushed or not."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_killed_at_every_call(fast_path: Path) -> None:
    command = [sys.executable, "-m", "tests.files.kill_worker", str(fast_path)]
    # A forked child of a process with threads could hang in a lock that one of them held.
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["calls"] > 150
    # The output folder of a killed run is there before it, which saves the two calls that make it.
    assert found["kills"] == found["calls"] - 2
    assert found["sweep_kills"] > 100


class TestTheCheckItself:
    """Each thing that a kill could break makes `check` fail."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        for name in ("checkpoint-2", "best"):
            with AtomicFolder(tmp_path / name, metadata={"version": 2}) as folder:
                fill(folder, 2)
        for name in ("state.txt", "a.txt", "b.txt"):
            (tmp_path / name).write_text("2" * 1000)
        check(tmp_path, dict.fromkeys(("checkpoint", "best", "file", "update"), 2))
        return tmp_path

    @pytest.mark.parametrize(
        "kind, version", [("checkpoint", 3), ("best", 3), ("best", 0), ("file", 3), ("update", 3), ("update", 0)]
    )
    def test_a_version_too_old_or_too_new(self, out: Path, kind: str, version: int) -> None:
        with pytest.raises(AssertionError, match=r"lost|has version"):
            check(out, {"best": 2, "file": 2, "update": 2, kind: version})

    @pytest.mark.parametrize("name", ["state.txt", "b.txt"])
    def test_a_half_made_file(self, out: Path, name: str) -> None:
        (out / name).write_text("2" * 500 + "1" * 500)
        with pytest.raises(AssertionError, match="half made"):
            check(out, {"best": 2, "file": 2, "update": 2})

    def test_a_leftover(self, out: Path) -> None:
        (out / ".tmp-x").mkdir()
        with pytest.raises(AssertionError, match="leftovers"):
            check(out, {"best": 2, "file": 2, "update": 2})
