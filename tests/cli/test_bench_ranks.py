"""`genesis bench-model --nproc 2`: steps of two ranks and of one, and the end of a job in which a rank fails."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.backend import CPU
from genesis.errors import OutOfMemoryError
from genesis.measure.collectives import Collective, StepTimes
from genesis.measure.record import Failure
from genesis.measure.run import Subject
from genesis.measure.timing import Plan, summarize
from genesis.tensor import Tensor
from genesis.train.ranks import ALONE, Ranks
from genesis_cli import environment
from genesis_cli.app import run
from genesis_cli.recipes import shape_named
from genesis_cli.session import bench_steps as steps
from genesis_cli.session.bench_model import NO_ROOM, Case, Measured, step_tables
from genesis_cli.session.bench_steps import Memory, timed
from genesis_models.registry import build
from tests.cli.command import printed
from tests.cli.test_bench_model import RAW, tables
from tests.distributed.forks import ended, fork
from tests.measure.quick import made_limits, small_limits
from tests.measure.test_model_steps import made_case
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
            steps.timed = lacks_memory
        with (
            small_limits(),
            mock.patch.object(steps, "FAST", plan),
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
    (row,), (alone,) = found["ranks"], found["steps"]
    assert row["case"] == alone["case"] == "2x8" and json.loads(text)["command"].endswith(" --fast --nproc 2")
    assert row["tokens_per_second"] == 2 * 2 * 8 / row["step"]
    assert row["scaling"] == pytest.approx(row["tokens_per_second"] / 2 / alone["tokens_per_second"])
    assert [each["rank"] for each in found["each"]] == [0, 1] and all(each["seconds"] > 0 for each in found["each"])
    shape = shape_named(str(tmp_path / "config.json"), "--size")
    check_collectives(found["collectives"], build(shape, seed=0).parameters(), 1)
    assert row["exposed"] == pytest.approx(sum(each["seconds"] for each in found["collectives"]))
    assert row["computing"] > 0


def check_collectives(rows: Sequence[dict[str, Any]], parameters: Iterable[Tensor], own: int) -> None:
    """Two ranks wait for each of them. Gradients of their `own` batches and weights are all sent, matrices apart."""
    sizes = [p.array for p in parameters]
    flat = [sum(-(-p.size // 32) * 32 for p in sizes if (p.ndim > 1) == is_matrix) for is_matrix in (True, False)]
    sums = sum(-(-elements // 4096) for elements in flat)  # of squares, each of a row of 4,096 gradients
    assert {each["name"]: (each["calls"], each["nbytes"]) for each in rows} == {
        "reduce-scatter, gradients": (2 * own, 4 * sum(flat) * own),
        "all-gather, norm": (2, 4 * sums),
        "all-gather, weights": (2, 4 * sum(flat)),
    }
    for each in rows:
        assert each["hidden"] == 0 < each["exposed"] == each["seconds"]
        assert each["bus_rate"] == pytest.approx(each["nbytes"] / each["seconds"] / 2)


@linux
def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    assert benched(tmp_path, has_fault=True) == (7, "", "rank 1: error: no room for a step of rank 1\n")


def test_nproc_is_checked_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    words = ["--size", str(tmp_path / "config.json"), "--device", "cpu"]
    for more, what in (
        (["--nproc", "0"], "--nproc 0 is not a number"),
        (["--nproc", "2", "--generate"], "--nproc"),
        (["--nproc", "2", "--vs", "torch", "--recipes", "lean"], "'lean' is not a recipe"),
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
    subject = Subject(mock.Mock(), CPU, tuple, take, lambda: None, (), dict, begin=lambda: ranks.barrier("a step"))
    step, by_rank = timed(subject, ranks, Plan(precision=0.0, seconds=0.1, warm_up=0.0, most_calls=1))
    assert step.samples + step.outliers + 1 == ranks.waits == take.call_count <= 51
    assert by_rank[1] == 2 * by_rank[0] > 2e-3 and step.seconds == pytest.approx(by_rank[1], rel=0.5)


def shared_case(batch: int, seconds: float) -> Case:
    memory = Memory(1 << 20, 1 << 20, 1 << 20, 5 << 20)
    sent = Collective("reduce-scatter, gradients", 12, 988 << 20, 4e-3, 1e-4)
    step, own, times = summarize([seconds] * 10), [seconds, seconds / 2], StepTimes(0.9, [sent])
    return Case(batch, 8, step, own, [memory, memory], 10**9, made_limits(), times=times, notes=["a note"])


def compared(alone: list[Case], failures: list[Failure]) -> Measured:
    """Two cases of ranks, compared with what one process has measured."""
    found = Measured(mock.Mock(), made_limits(), alone, [shared_case(1, 1.25), shared_case(4, 1.0)], failures)
    found.compare_with_one()
    return found


def test_scaling_and_the_tables() -> None:
    found = compared([made_case(1, 8, 1.0)], []).shared
    assert [case.scaling for case in found] == [pytest.approx(0.8), None]
    ranks, each, collectives = step_tables(found)
    assert [row["exposed"] for row in ranks.rows] == [1e-4, 1e-4] and ranks.notes == ["a note"]
    assert [(row["rank"], row["seconds"]) for row in each.rows] == [(0, 1.0), (1, 0.5)]
    (sent,) = collectives.rows
    assert (sent["hidden"], sent["bus_rate"]) == (pytest.approx(3.9e-3), pytest.approx((988 << 20) / 4e-3 / 2))


def test_a_case_for_which_one_rank_alone_has_no_room() -> None:
    """It is not a failure: all ranks together have taken it."""
    full = Failure("step", "4x8", "cuda:0 has no room for 28.4 GiB", 7)
    broken = Failure("step", "1x8", "cuda:0 has no room for 28.4 GiB", 9)
    found = compared([], [full, broken])
    assert [case.scaling for case in found.shared] == [None, None] and found.failures == [broken]
    assert [case.notes for case in found.shared] == [["a note"], ["a note", f"4x8: {NO_ROOM}"]]
