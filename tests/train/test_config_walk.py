"""How often a reader who follows a configuration to the first step of its run opens a file again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.config_walk import CONFIG, climbs, walk
from tests.train.runs import ROOT, load, make_lora, train

MOST = 4  # 13 when they were counted first


def test_a_configuration_seldom_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    steps = walk("config.yaml")
    assert steps[0] == ("cli/train.py", "cli/session/training.py")
    assert all((ROOT / file).is_file() for step in steps for file in step)
    assert len(climbs(steps)) <= MOST, steps


@pytest.mark.full
def test_nor_does_that_of_adapters_which_go_on(tmp_path: Path) -> None:
    path = make_lora(tmp_path)
    train(load(path, "run"))
    steps = walk(str(path), [f"train.output_dir={tmp_path / 'run'}", "train.steps=8"], resume="must")
    assert len(climbs(steps)) <= MOST, steps


def test_climbs_are_noticed() -> None:
    assert climbs([("a", "b"), ("b", "c"), ("a", "d")]) == []
    assert climbs([("a", "b"), ("b", "a"), ("a", "c"), ("a", "b")]) == [1, 3]
