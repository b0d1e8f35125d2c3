"""`genesis profile CONFIG --nproc 2`: the report of rank 0, and the end of a job in which a rank fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genesis_models.registry import build
from tests.cli.command import printed
from tests.cli.test_bench_ranks import check_collectives
from tests.cli.test_profile_run import tables_of
from tests.train.runs import Ended, Forks, load, make, picture

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launches ranks as forks")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


def profiled(forks: Forks, recipe: Path, *words: str | Path, fault: Any = ()) -> Ended:
    """Two ranks, each with two of the batches of a step."""
    settings = ("train.device=cpu", "train.accumulation_steps=4", "data.cache_dir=null")
    return forks.run("profile", recipe, *settings, "--steps", "2", "--nproc", "2", *words, fault=fault)


@pytest.fixture(scope="module")
def report(forks: Forks, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 writes, which is what it prints; nothing else is there afterwards."""
    before, out = picture(recipe.parent), tmp_path_factory.mktemp("found")
    done = profiled(forks, recipe, "--out", out)
    assert done.code == 0, done
    assert "ranks: 2 on one host, by --nproc\n" in done.err and "rank 1:" not in done.out + done.err
    assert picture(recipe.parent) == before
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert "\ncollectives of a step" in done.out and "\nwrote " in done.out
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    return found


def test_the_collectives_of_a_step(report: dict[str, Any], recipe: Path) -> None:
    assert report["command"].endswith("data.cache_dir=null --steps 2 --nproc 2")
    settings, rows = report["settings"], tables_of(report)["collectives"]
    assert (settings["ranks"], settings["micro-batches"], settings["threads"]) == (2, 4, 1)
    raw: Any = load(recipe, "unused").model.config
    check_collectives(rows, build(raw, seed=0).parameters(), 2)


def test_they_are_a_phase_and_an_op_of_the_step(report: dict[str, Any]) -> None:
    tables = tables_of(report)
    (step,) = tables["steps"]
    for name in ("eager-phases", "eager-modules", "eager-ops"):
        assert sum(row["seconds"] for row in tables[name]) == pytest.approx(step["seconds"], rel=0.02)
    (phase,) = [row for row in tables["eager-phases"] if row["name"] == "collectives"]
    (op,) = [row for row in tables["eager-ops"] if row["name"] == "(collective)"]
    assert op["calls"] == sum(row["calls"] for row in tables["collectives"]) == 8
    assert 0 < op["seconds"] <= phase["seconds"] < step["seconds"]


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (("on_rank", 1, "raise_in", "reading", "memory"), 7, "rank 1: error: the host has too little memory"),
        (("on_rank", -1, "nan_at", 1), 9, "error: the loss of micro-batch 0 is nan in step 1"),
        (("on_rank", 0, "signal_in", "reading", 15), 143, "stopped: SIGTERM ended the command\n  next: start"),
    ],
)
def test_a_rank_that_fails_ends_the_job(fault: Any, code: int, said: str, forks: Forks, recipe: Path) -> None:
    done = profiled(forks, recipe, fault=fault)
    assert (done.code, done.out) == (code, "")
    assert said in done.err and done.err.count("error:") + done.err.count("stopped:") == 1


def test_ranks_start_no_ranks(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2" if name.endswith("SIZE") else "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    code, text, told = printed("profile", recipe, "--nproc", "2")
    assert (code, text) == (2, "") and "already rank 0 of 2, by torchrun" in told
