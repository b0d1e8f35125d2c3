"""How often a reader who follows a configuration to the first step of its run opens a file again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.config_walk import climbs, walk
from tests.train.runs import ROOT, load, make_lora, train

MOST = 4  # 13 when they were counted first


def test_a_configuration_goes_through_few_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "benchmarks.config_walk"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    *steps, total = done.stdout.splitlines()
    assert steps[0].split() == ["cli/train.py", "->", "cli/session/training.py"]
    assert all((ROOT / line.split()[-1]).is_file() for line in steps)
    assert int(total.split()[-2]) == sum(line.startswith("climb") for line in steps) <= MOST, done.stdout


def test_so_does_that_of_adapters_which_go_on(tmp_path: Path) -> None:
    path = make_lora(tmp_path)
    train(load(path, "run"))
    steps = walk(str(path), [f"train.output_dir={tmp_path / 'run'}", "train.steps=8"], resume="must")
    assert "cli/session/model.py" in {to for _, to in steps}
    assert len(climbs(steps)) <= MOST, steps


def test_climbs_are_noticed() -> None:
    assert climbs([("a", "b"), ("b", "c"), ("a", "d")]) == []
    assert climbs([("a", "b"), ("b", "a"), ("a", "c"), ("a", "b")]) == [1, 3]
