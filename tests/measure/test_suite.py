"""Many ops: which are measured, what goes wrong in one, the sums, and what changed since earlier reports."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from genesis.backend import CPU
from genesis.dtypes import bfloat16, bool_
from genesis.measure import suite
from genesis.measure.cases import ALIASES, make_case, op_named, supported
from genesis.measure.causes import Finding
from genesis.measure.op import Measured, Settings
from genesis.measure.peer import Ratio
from genesis.measure.record import Report
from genesis.measure.suite import Job, Results, changes_table, earlier_runs, jobs, measure_all, names_of
from genesis.measure.timing import Timing
from tests.measure.quick import PLAN, made_limits, small_limits

QUICK = Settings(plan=PLAN, causes=False)
LAUNCH = Finding("launch", 0.9, "a graph takes less", "use a graph")


def timing(seconds: float, half_width: float = 0.01, noisy: bool = False) -> Timing:
    return Timing(seconds, seconds, half_width, 0.01, 9, 1, 0, noisy)


def made(
    share: float, shape: tuple[int, ...] = (100,), name: str = "add", size: str = "small",
    finding: Finding | None = None, ratio: float | None = None, spread: float = 0.01,
) -> Measured:  # fmt: skip
    """A case that reaches a share of a copy at 10 GB/s."""
    case = make_case(name, shape, None, None, CPU)
    nbytes = sum(x.nbytes for x in case.arrays) * 3 // 2
    peer = None if ratio is None else Ratio(1.0, ratio, ratio, spread)
    seconds = nbytes / 1e10 / share
    return Measured(case, made_limits(), timing(seconds), None, 0, nbytes, 0, peer=peer, finding=finding, size=size)


def rows_of(results: Results, name: str) -> list[dict[str, Any]]:
    return next((table.rows for table in suite.tables_of(results) if table.name == name), [])


# --- Which ------------------------------------------------------------------------------------------------------------


def test_all_ops_stand_for_themselves_once() -> None:
    names = names_of()
    assert len(names) == len(set(names))
    assert {"add", "sum", "matmul", "transpose", "adamw_step", "attention_backward"} <= set(names)
    assert not {"reduce_sum", "clone", "max"} & set(names)
    assert {ALIASES.get(name, name) for name in supported()} == {ALIASES.get(name, name) for name in names}
    assert names_of(["exp", "reduce_sum", "exp"]) == ["exp", "reduce_sum"]
    assert {op_named(name)[1].category for name in names_of(category="matmul")} == {"matmul"}


def test_jobs_are_each_size_over_each_axis() -> None:
    found = jobs(["sum", "add"], ["small", "large"], every_axis=True)
    assert [(each.name, each.size, each.axes) for each in found] == [
        *(("sum", size, axes) for size in ("small", "large") for axes in (None, -1, (0, 1))),
        ("add", "small", None), ("add", "large", None),
    ]  # fmt: skip
    assert [each.axes for each in jobs(["sum", "sort"], ["small"], every_axis=False)] == [None, -1]


# --- Measuring --------------------------------------------------------------------------------------------------------


def found_of(*names: str, settings: Settings = QUICK, dtype: Any = None, **more: Any) -> Results:
    with small_limits():
        return measure_all([Job(name, "small", (2,), None) for name in names], CPU, dtype, settings, **more)


def test_what_an_op_does_not_take_is_skipped() -> None:
    found = found_of("bitwise_and", "exp", dtype=bfloat16)
    (skipped,) = found.skipped
    assert skipped["case"] == "bitwise_and 2" and "bfloat16" in skipped["reason"]
    assert [m.case.dtype for m in found.measured] == [bfloat16]


def test_gradients_are_measured_where_there_are_any() -> None:
    backward = dataclasses.replace(QUICK, backward=True)
    assert [bool(m.backward) for m in found_of("exp", "eq", settings=backward).measured] == [True, False]
    assert [bool(m.backward) for m in found_of("sum", settings=backward, dtype=bool_).measured] == [False]


# --- Sums -------------------------------------------------------------------------------------------------------------


def test_a_size_class_has_average_best_worst_and_target() -> None:
    cases = [made(0.9), made(0.5, (200,)), made(0.01, (2,), finding=LAUNCH), made(0.8, size="large", name="mul")]
    small, large, every = rows_of(Results(cases), "sizes")
    assert (small["name"], small["cases"], small["launch"], small["reached"]) == ("small", 3, 1, 1)
    assert (small["average"], small["best"], small["worst"]) == pytest.approx((0.7, 0.9, 0.5))
    assert (small["worst_case"], small["target"]) == ("add 200", 0.7)
    assert (small["band_excellent"], small["band_fair"]) == (1, 1)
    assert (large["cases"], every["cases"], every["average"]) == (1, 4, pytest.approx((0.9 + 0.5 + 0.8) / 3))


def test_a_ratio_that_is_noise_counts_nowhere() -> None:
    cases = [made(0.9, ratio=2.0), made(0.9, ratio=0.5), made(0.9, ratio=0.1, spread=3.0)]
    (every,) = [row for row in rows_of(Results(cases), "sizes") if row["name"] == "all"]
    assert (every["ratio"], every["ratio_best"], every["ratio_worst"]) == (1.25, 2.0, 0.5)
    assert (every["ratio_target"], every["slower"], every["noise"]) == (1.0, 1, 1)
    assert [row["ratio"] for row in rows_of(Results(cases), "slower")] == [0.5]
    assert any("noise" in note for note in suite.notes_of(Results(cases)))


def test_issues_say_where_most_time_is_lost() -> None:
    slow = Finding("strides", 0.5, "", "store it otherwise")
    cases = [made(0.1, (100,), finding=slow), made(0.1, (300,), finding=slow), made(0.9)]
    (row,) = rows_of(Results(cases), "issues")
    lost = sum(m.time.seconds * 0.9 for m in cases[:2])
    assert (row["issue"], row["cases"], row["most"], row["next"]) == ("strides", 2, "add 300", "store it otherwise")
    assert row["lost"] == pytest.approx(lost)


def test_best_and_worst_are_of_kernels_alone() -> None:
    cases = [made(0.9), made(2.0, (200,)), made(0.3, (300,)), made(0.01, (2,), finding=LAUNCH)]
    results = Results(cases)
    assert [row["label"] for row in rows_of(results, "best")] == ["100"], "what came out of a cache is not the best"
    assert [row["label"] for row in rows_of(results, "worst")] == ["300"]
    assert suite.tables_of(Results()) == []


# --- History ----------------------------------------------------------------------------------------------------------


def verdict(now: Measured, seconds: float, half_width: float = 0.01, spread: float = 0.01) -> str:
    """The verdict about a case that took so many seconds before."""
    before = {"since": "2030", "wall": seconds, "gpu": 0.0, "wall_half_width": half_width, "wall_spread": spread}
    (row,) = changes_table({(now.name, "float32"): before}, [now]).rows
    assert row["ratio"] == pytest.approx(now.time.seconds / seconds)
    return str(row["verdict"])


def test_a_change_is_beyond_the_noise() -> None:
    now = made(0.5)
    seconds = now.time.seconds
    assert [verdict(now, seconds * x) for x in (0.5, 0.98, 2.0)] == ["slower", "same", "faster"]
    assert verdict(now, seconds / 1.04) == "same", "runs differ by 5 %"
    assert verdict(now, seconds / 2, half_width=0.6) == verdict(now, seconds / 1.4, spread=0.5) == "same"
    assert changes_table({}, [now]).rows == []


def test_reports_are_found_again_and_others_passed_over(tmp_path: Path) -> None:
    def report(date: str, *cases: Measured, name: str = "a CPU", threads: int = 2) -> Report:
        settings, tables = {"dtype": "float32", "threads": threads}, suite.tables_of(Results(list(cases)))
        return Report("bench-ops", "", "cpu", name, {}, settings, tables, date=date)

    newer = report("2030-01-01T00:00:00", made(0.5), made(0.5, (200,)))
    first, second = (suite.save(newer, tmp_path)[1] for _ in range(2))
    suite.save(report("2029-01-01T00:00:00", made(0.1)), tmp_path)
    assert first != second and first.suffix == ".json" and json.loads(first.read_bytes())["schema_version"] == 2
    (tmp_path / "2030-bench-ops-x.json").write_text('{"device_name": "a CPU", "settings": 3}')
    (tmp_path / "2031-bench-ops-x.json").write_text("{")
    found = earlier_runs(tmp_path, newer)
    one = found["add 100", "float32"]
    assert len(found) == 2 and one["since"] == newer.date, "the newest run of a case counts"
    assert (one["wall"], one["gpu"], one["wall_half_width"]) == (made(0.5).wall.seconds, 0.0, 0.01)
    assert earlier_runs(tmp_path, report("", name="another")) == earlier_runs(tmp_path, report("", threads=1)) == {}
    changes = changes_table(found, [made(0.5), made(0.1, (200,))])
    assert [(row["case"], row["verdict"]) for row in changes.rows] == [("add 200", "slower"), ("add 100", "same")]
    assert len(changes.first) == 1, "people see the changes"
