"""`genesis bench-model --nproc 2`: steps of two ranks and of one, and the end of a job in which a rank fails."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.errors import OutOfMemoryError, UsageError
from genesis.measure.timing import Plan
from genesis.profile.collective_table import CollectiveRow
from genesis.profile.schema import Failure
from genesis.tensor import Tensor
from genesis.train.ranks import ALONE, Ranks
from genesis_cli import environment
from genesis_cli.app import run
from genesis_cli.recipes import shape_named
from genesis_cli.session.bench import measuring, shared
from genesis_cli.session.bench.report import render_lines
from genesis_cli.session.bench.schema import Memory, Report, SharedStep
from genesis_cli.session.bench.shared import LEAST_STEPS, MOST_STEPS, NO_ROOM, timed, with_scaling
from genesis_cli.session.bench.versus import check_recipes
from genesis_models.registry import build
from tests.cli.command import printed
from tests.cli.test_bench_model import RAW
from tests.cli.test_step_bench import exactly, made_report, made_row
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
            shared.timed = lacks_memory
        with (
            small_limits(),
            mock.patch.object(measuring, "FAST", plan),
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
    report = Report.model_validate_json(text)
    (row,), (alone,) = report.shared, report.rows
    assert (report.ranks, row.batch, row.length) == (2, 2, 8)
    assert report.command.endswith(" --nproc 2 --fast")
    assert row.tokens_per_second == 2 * 2 * 8 / row.step.seconds
    assert row.scaling == pytest.approx(row.tokens_per_second / 2 / alone.tokens_per_second)
    assert row.flops_per_second == pytest.approx(2 * alone.flops / row.step.seconds)
    assert (row.step.samples + row.step.outliers >= LEAST_STEPS, row.is_captured) == (True, False)
    assert len(row.rank_seconds) == 2 and all(each > 0 for each in row.rank_seconds)
    _check_collectives(row, tmp_path)
    # Both have all weights; the moments of both are those of one, but for the padding of a bucket.
    assert {each.weights for each in row.memory} == {alone.memory.weights}
    moments = sum(each.optimizer for each in row.memory)
    assert alone.memory.optimizer <= moments <= alone.memory.optimizer + 4096


def check_collectives(rows: Sequence[CollectiveRow], parameters: Iterable[Tensor], own: int) -> None:
    """Two ranks wait for each of them. Gradients of their `own` batches and weights are all sent, matrices apart."""
    sizes = [p.array for p in parameters]
    flat = [sum(-(-p.size // 32) * 32 for p in sizes if (p.ndim > 1) == is_matrix) for is_matrix in (True, False)]
    sums = sum(-(-elements // 4096) for elements in flat)  # of squares, each of a row of 4,096 gradients
    assert {each.name: (each.calls, each.nbytes) for each in rows} == {
        "reduce-scatter, gradients": (2 * own, 4 * sum(flat) * own),
        "all-gather, norm": (2, 4 * sums),
        "all-gather, weights": (2, 4 * sum(flat)),
    }
    for each in rows:
        assert each.hidden == 0 < each.exposed == each.seconds
        assert each.bus_rate == pytest.approx(each.nbytes / each.seconds / 2)


def _check_collectives(row: SharedStep, folder: Path) -> None:
    shape = shape_named(str(folder / "config.json"), "--size")
    check_collectives(row.collectives, build(shape, seed=0).parameters(), 1)
    assert row.exposed == sum(each.seconds for each in row.collectives)
    assert row.computing is not None and row.computing > 0


@linux
def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    assert benched(tmp_path, has_fault=True) == (7, "", "rank 1: error: no room for a step of rank 1\n")


def test_nproc_is_checked_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    words = ["--size", str(tmp_path / "config.json"), "--device", "cpu"]
    for more, what in (
        (["--nproc", "0"], "--nproc 0 is no number of ranks"),
        (["--nproc", "2", "--generate"], "--nproc"),
        (["--nproc", "2", "--vs", "torch", "--recipes", "lean"], "'lean' is no recipe"),
    ):
        code, text, told = printed("bench-model", *words, *more)
        assert (code, text) == (2, "") and what in told
    with pytest.raises(UsageError, match="'ddp' is no recipe"):
        check_recipes("ddp")


# --- Computed ---------------------------------------------------------------------------------------------------------


class _Two(Ranks):
    """Rank 0 of two, of which the other always takes twice as long."""

    def __init__(self) -> None:
        super().__init__(ALONE._peers, ALONE.group)
        self.size, self.waits = 2, 0

    def barrier(self, name: str) -> None:
        self.waits += 1

    def in_turn(self, own: Any) -> list[float]:
        return [each for mine in own for each in (mine, 2 * mine)]

    def took(self, seconds: float) -> None: ...


def test_ranks_take_as_many_steps() -> None:
    for seconds, count in ((0.0, LEAST_STEPS), (1e9, MOST_STEPS)):
        ranks, take = _Two(), mock.Mock()
        found = timed(take, lambda: None, ranks, Plan(seconds=seconds))
        assert (len(found), ranks.waits, take.call_count) == (count, count, count + 2)
        assert all(other == 2 * own for own, other in found)


def shared_row(batch: int, seconds: float) -> SharedStep:
    memory = Memory(weights=1 << 20, gradients=1 << 20, optimizer=1 << 20, peak=5 << 20, planned=None)
    exchanged = CollectiveRow(
        name="reduce-scatter, gradients",
        calls=12,
        nbytes=988 << 20,
        seconds=4e-3,
        hidden=3.9e-3,
        exposed=1e-4,
        bus_rate=129.5e9,
    )
    return SharedStep(
        batch=batch,
        length=8,
        step=exactly(seconds),
        rank_seconds=[seconds, seconds / 2],
        is_captured=False,
        tokens_per_second=2 * batch * 8 / seconds,
        flops_per_second=2e9 / seconds,
        mfu=0.25,
        memory=[memory, memory],
        collectives=[exchanged],
        computing=0.9,
        notes=["a note"],
    )


def test_scaling_and_the_text() -> None:
    alone = made_row(1, 8, 0.25, 0.5, 0.25)  # 8 tokens/s
    found = with_scaling([shared_row(1, 1.25), shared_row(4, 1.0)], [alone], 2)
    assert [row.scaling for row in found] == [pytest.approx(0.8), None]
    alone_too = made_row(4, 8, 0.25, 0.5, 0.25)
    report = made_report([alone, alone_too]).model_copy(update={"shared": found, "ranks": 2})
    lines = list(render_lines(report))
    said = {re.sub(r" +", " ", line) for line in lines}
    assert "reduce-scatter, gradients 12 988.0 MiB 4.00 ms 130 GB/s 3.90 ms 100 µs" in said
    assert "compute forward and backward: 900 ms in ranks, 750 ms alone (+20.0%)" in said
    assert any(line.startswith("1x8   1.25 s") and " 80.0% " in line for line in lines)
    assert "note      a note" in lines
    assert sum(line.startswith(("rank 0    4x8: 1.00 s a step", "rank 1    4x8: 500 ms a step")) for line in lines) == 2
    assert max(map(len, lines)) <= 100


def test_a_case_for_which_one_rank_alone_has_no_room() -> None:
    """It is no failure: all ranks together have taken it."""
    full = Failure(name="step", label="4x8", error="cuda:0 has no room for 28.4 GiB", exit_code=7)
    broken = full.model_copy(update={"label": "1x8", "exit_code": 9})
    found = with_scaling([shared_row(1, 1.25), shared_row(4, 1.0)], [full, broken], 2)
    assert [row.scaling for row in found] == [None, None]
    assert [row.notes for row in found] == [["a note"], ["a note", f"4x8: {NO_ROOM}"]]
    lines = list(render_lines(made_report([]).model_copy(update={"shared": found, "ranks": 2})))
    assert "2 ranks, each with a batch of its own" in lines  # no table above
    assert "note      4x8: one rank alone has no room for it, so that its scaling is not known" in lines
