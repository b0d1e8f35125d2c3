"""A fixed sample of `make faults`: some calls of every command fail once, each with the next of the errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from genesis_cli.app import app
from tests.faults.sweep import CASES, ERRORS, Case, Fault, Worker, World, problems_of, sweep, table, workers

EVERY = 197  # coprime to the number of errors, so that over the commands each call meets each error
pytestmark = pytest.mark.xdist_group("faults")  # one worker serves all
WITHOUT_CASE = {("bench", each) for each in ("all", "ops", "model")}  # `bench-ops` and `bench-model` have cases


@pytest.fixture(scope="module")
def team() -> Iterator[tuple[World, list[Worker]]]:
    with workers(1, patience=60) as made:
        yield made


@pytest.mark.full
def test_no_command_ends_in_a_bug_report(team: tuple[World, list[Worker]]) -> None:
    world, made = team
    found = sweep(world, made, CASES, every=EVERY, offset=7)
    failures = [failure for tally in found for failure in tally.failures]
    assert not failures, "\n".join([*map(str, failures), *table(found)])
    tried = {tally.case.name: tally.faults for tally in found}
    assert tried["train"] >= 5 and tried["eval"] >= 3 and sum(tried.values()) >= 50


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that start each command of a typer group."""
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name)) if hasattr(command, "commands") else [(*words, name)]


def test_every_command_has_a_case() -> None:
    found = set(commands(typer.main.get_command(app)))
    tried = {command for command in found for case in CASES if case.words[: len(command)] == command}
    assert found - tried == WITHOUT_CASE and ("data", "preview") in tried


@pytest.mark.full
def test_the_checker_sees_what_is_wrong(team: tuple[World, list[Worker]]) -> None:
    """It must refuse a bug's exit code, a traceback, an error without its path, a changed file and a false 0."""
    world, (worker, *_) = team
    case = next(case for case in CASES if case.name == "eval")
    folder = worker.folder / "here"
    world.fill(case, folder)
    fault = Fault(case, 1, "EIO", "open", "docs/0.txt")

    def problems(told: str, code: int | None) -> list[str]:
        (worker.folder / "stderr").write_text(told)
        return list(problems_of(worker, world, fault, code, "loss 1"))

    (folder / "streams" / "stdout").write_text("loss 1")
    assert problems("", 0) == []
    assert problems(f"error: {os.strerror(errno.EIO)}\n  where: docs/0.txt\n", 4) == []
    assert "exit code 70" in problems("error: this is a bug in Genesis: Input/output error docs", 70)
    assert "a traceback or a bug report" in problems("Traceback\nerror: docs Input/output error", 8)
    assert problems(f"error: {os.strerror(errno.EIO)}\n", 4) == ["no word of the path"]
    assert problems("error: docs\n", 4) == ["no word of the reason"]
    assert problems("", None) == ["no end within 10 s"]
    (folder / "streams" / "stdout").write_text("loss 2")
    assert problems("", 0) == ["exit 0, and stdout is 'loss 2'"]
    (folder / "docs" / "0.txt").unlink()
    assert "files of the user's are changed" in problems("", 0)


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS)
def test_the_call_that_is_named_fails(team: tuple[World, list[Worker]], error: str) -> None:
    world, (worker, *_) = team
    case = Case("validate", ("validate", "config.yaml"))
    folder = worker.folder / "here"
    world.fill(case, folder)
    # The first call looks at stdout, the second for the configuration.
    assert worker.run(folder, case.words, 2, error) == 3
    assert [(number, Path(path).name) for number, _, path in worker.calls] == [(2, "config.yaml")]
    assert os.strerror(getattr(errno, error)) in worker.told or error == "ENOENT"
