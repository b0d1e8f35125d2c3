"""`genesis --help` shows commands by task, and shells complete them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genesis_cli import recipes
from genesis_cli.app import COMPLETE, TASKS
from genesis_cli.init import GOALS
from genesis_cli.options import complete_config
from genesis_cli.session import init as session
from tests.cli.command import printed


def test_the_help_has_the_tasks_in_order() -> None:
    code, out, _ = printed("--help")
    assert code == 0
    found = [line.rstrip(":") for line in out.splitlines() if line.rstrip(":") in TASKS]
    assert found == list(TASKS)
    for name in (name for names in TASKS.values() for name in names):
        assert any(line.startswith(f"  {name} ") for line in out.splitlines()), name


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({COMPLETE: "source_bash"}, "complete -o default -F _genesis_completion genesis"),
        ({COMPLETE: "complete_bash", "COMP_WORDS": "genesis es", "COMP_CWORD": "1"}, "estimate"),
        ({COMPLETE: "complete_bash", "COMP_WORDS": "genesis init --go", "COMP_CWORD": "2"}, "--goal"),
        ({COMPLETE: "complete_bash", "COMP_WORDS": "genesis train qui", "COMP_CWORD": "2"}, "quickstart"),
        ({COMPLETE: "complete_bash", "COMP_WORDS": "genesis init --goal pre", "COMP_CWORD": "3"}, "pretrain"),
    ],
)
def test_a_shell_completes(given: dict[str, str], expected: str) -> None:
    command = [sys.executable, "-m", "genesis_cli.main"]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_configurations_are_completed_beside_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick").mkdir()
    for name in ("qui[1].yaml", "quick/a.yml", "quiet.txt"):
        (tmp_path / name).write_text("")
    assert complete_config("qui") == ["quickstart", "qui[1].yaml", "quick/"]
    assert complete_config("qui[") == ["qui[1].yaml"] and complete_config("quick/") == ["quick/a.yml"]
    assert complete_config("") == [*recipes.names(), "qui[1].yaml", "quick/"]


def test_the_goals_that_are_completed_are_all() -> None:
    assert tuple(session.GOALS) == GOALS
