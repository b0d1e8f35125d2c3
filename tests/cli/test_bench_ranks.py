"""`genesis bench-model --nproc 2`: steps of two ranks and of one, and the end of a job in which a rank fails."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.backend import CPU
from genesis.errors import OutOfMemoryError
from genesis.measure.record import Failure
from genesis.measure.run import Subject
from genesis.measure.timing import Plan, summarize
from genesis.train.ranks import ALONE, Ranks
from genesis_cli import environment
from genesis_cli.app import run
from genesis_cli.session import bench_model as model
from genesis_cli.session.bench_model import Case, Memory, Request, measure_model, timed
from genesis_models.config import ModelConfig
from tests.cli.command import printed
from tests.cli.test_bench_model import RAW, tables
from tests.distributed.forks import ended, fork
from tests.measure.quick import small_limits
from tests.train.warm_ranks import start_warm

linux = pytest.mark.skipif(sys.platform != "linux", reason="launches ranks as forks")


def lacks_memory(*given: Any) -> Any:
    raise OutOfMemoryError("no room for a step of rank 1")


def benched(folder: Path, *, has_fault: bool = False) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of `genesis bench-model --nproc 2`, by forks; the fault is rank 1's."""
    (folder / "config.json").write_text(json.dumps(RAW))
    words = ["--size", str(folder / "config.json"), "--batch-size", "2", "--seq-len", "8", "--fast", "--json", "-"]
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    plan = Plan(precision=0.5, seconds=0.05, warm_up=0.0, most_calls=1)

    def rank(given: list[str]) -> int:
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if has_fault and os.environ["RANK"] == "1":
            model.timed = lacks_memory
        with (
            small_limits(),
            mock.patch.object(model, "FAST", plan),
            mock.patch.object(environment, "facts", return_value=facts),
        ):
            return run(given, ends_process=True)

    def launcher() -> int:
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        start_warm(rank)
        return run(["bench-model", *words, "--device", "cpu", "--nproc", "2"])

    (done,) = ended([fork(launcher, folder / "launcher.json")])
    assert done.code == 0, done.error
    return done.value, (folder / "out").read_text(), (folder / "err").read_text()


@linux
def test_two_ranks_and_one(tmp_path: Path) -> None:
    code, text, told = benched(tmp_path)
    assert (code, told) == (0, ""), told
    found = tables(text)
    (row,) = found["steps"]
    assert row["case"] == "2x8" and json.loads(text)["command"].endswith(" --fast --nproc 2")
    assert row["tokens_per_second"] == 2 * 2 * 8 / row["step"]
    assert row["scaling"] > 0


@linux
def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    assert benched(tmp_path, has_fault=True) == (7, "", "rank 1: error: no room for a step of rank 1\n")


def test_nproc_is_checked_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    words = ["--size", str(tmp_path / "config.json"), "--device", "cpu"]
    for more, what in (
        (["--nproc", "0"], "--nproc 0 is not a number"),
        (["--nproc", "2", "--vs", "jax"], "'jax' is not a peer"),
    ):
        code, text, told = printed("bench-model", *words, *more)
        assert (code, text) == (2, "") and what in told


# --- Computed ---------------------------------------------------------------------------------------------------------


class _Two(Ranks):
    """Rank 0 of two, of which the other always takes twice as long."""

    def __init__(self) -> None:
        super().__init__(ALONE._peers, ALONE.group)
        self.size, self.waits, self.barrier = 2, 0, self._wait  # type: ignore[method-assign]

    def _wait(self, name: str) -> None:
        self.waits += 1

    def in_turn(self, own: Any) -> list[float]:
        return [each for mine in own for each in (mine, 2 * mine)]

    def record_seconds(self, seconds: float) -> None: ...


def test_ranks_take_as_many_steps() -> None:
    """Each rank ends by the times that all have exchanged, whatever its own clock says."""
    ranks, take = _Two(), mock.Mock(side_effect=lambda batches: time.sleep(1e-3))
    subject = Subject(mock.Mock(), CPU, tuple, take, lambda: None, (), begin=lambda: ranks.barrier("a step"))
    step = timed(subject, ranks, Plan(precision=0.0, seconds=0.1, warm_up=0.0, most_calls=1))
    assert step.samples + step.outliers + 1 == ranks.waits == take.call_count <= 51
    assert step.seconds > 2e-3


class _Main(_Two):
    """The first rank of two, whose measurements are made up."""

    def from_main(self, name: str, value: Any) -> Any:
        return value


def test_scaling_is_compared_with_one_rank_alone_where_that_has_room() -> None:
    config = ModelConfig.from_dict(RAW)
    request = Request(config, [(1, 8), (4, 8)], CPU, "float32")

    def each(request: Request, limits: Any, child: Any = None, ranks: Ranks = ALONE) -> Iterator[Case | Failure]:
        alone, memory = ranks.size == 1, Memory(1, 1, 1, 5)
        yield Case(1, 8, summarize([1.0 if alone else 1.25] * 10), memory, 10**9, limits, ranks.size)
        if alone:
            yield Failure("step", "4x8", "cuda:0 has no room for 28.4 GiB", 7)
        else:
            yield Case(4, 8, summarize([1.0] * 10), memory, 10**9, limits, 2)

    with mock.patch.object(model, "each_case", each), small_limits():
        found = measure_model(request, _Main())
    assert [case.scaling for case in found.cases] == [pytest.approx(0.8), None] and found.failures == []
    note = "4x8: one rank alone cannot run it: cuda:0 has no room for 28.4 GiB"
    assert [case.notes for case in found.cases] == [[], [note]]
