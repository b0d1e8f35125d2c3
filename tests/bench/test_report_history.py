"""Earlier runs: whose they are, what is a change, and what is noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from genesis.backend import CPU
from genesis.profile.op import Settings
from genesis.profile.schema import Failure
from genesis.report import build as building
from genesis.report.build import Setup, measure_all
from genesis.report.files import save
from genesis.report.history import noise_of, scatter_of
from genesis.report.phrases import headline
from genesis.report.schema import BenchReport, Entry
from genesis.report.suite import Job, jobs
from tests.bench.reports import LIMITS, entry, report, time

OPS = [f"op{i}" for i in range(20)]


def saved(folder: Path, when: str, *entries: object, **given: object) -> BenchReport:
    """A report of an earlier date, in the folder."""
    made = report(folder, *entries, **given).model_copy(update={"date": when})  # type: ignore[arg-type]
    save(made, folder)
    return made


def test_the_first_run_has_nothing_to_compare_with(tmp_path: Path) -> None:
    found = report(tmp_path, entry())
    assert (found.history, found.changes, found.trends) == ([], [], [])


def test_a_planted_regression_is_flagged_and_noise_is_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    saved(tmp_path, "2026-01-01T00:00:00+00:00", *(entry(name) for name in OPS))
    jitter = dict(zip(OPS, 1e-3 * (1 + rng.normal(0, 0.01, len(OPS))), strict=True))
    now = [entry(name, seconds=jitter[name]) for name in OPS]
    now[7] = entry("op7", seconds=1.3e-3)
    now[9] = entry("op9", seconds=0.7e-3)
    found = report(tmp_path, *now)
    verdicts = {change.name: change.verdict for change in found.changes}
    assert (verdicts.pop("op7"), verdicts.pop("op9")) == ("slower", "faster")
    assert set(verdicts.values()) == {"same"}
    assert found.changes[7].ratio == pytest.approx(1.3)
    assert found.changes[7].noise < 0.1
    assert any("op7 4x4 ×1.30" in text for text in found.summary.recommendations)


def test_a_machine_that_is_loud_from_run_to_run_flags_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    saved(tmp_path, "2026-01-01T00:00:00+00:00", *(entry(name) for name in OPS))
    found = report(tmp_path, *(entry(name, seconds=1e-3 * float(np.exp(rng.normal(0, 0.3)))) for name in OPS))
    assert {change.verdict for change in found.changes} == {"same"}
    assert min(change.noise for change in found.changes) > 0.3


def test_what_is_slower_everywhere_is_said(tmp_path: Path) -> None:
    saved(tmp_path, "2026-01-01T00:00:00+00:00", *(entry(name) for name in OPS))
    found = report(tmp_path, *(entry(name, seconds=1.25e-3) for name in OPS))
    assert {change.verdict for change in found.changes} == {"slower"}
    assert found.history[0].relative == pytest.approx(1 / 1.25)


@pytest.mark.parametrize(
    ("before", "now", "earlier", "expected"),
    [
        (time(1.0), time(1.0), [1.0], 0.05),
        (time(1.0, half_width=0.03), time(1.0, half_width=0.04), [1.0], 0.1),
        (time(1.0, spread=0.3), time(1.0), [1.0], 0.3),
        (time(1.0, half_width=None), time(1.0, half_width=0.0), [1.0], 2.0),
        (time(1.0), time(1.0), [0.9, 1.0, 1.1], 3 * 1.4826 * 0.1),
        (time(1.0), time(1.0), [0.9, 1.1], 0.05),
    ],
)
def test_noise_is_the_largest_of_what_is_known(
    before: object, now: object, earlier: list[float], expected: float
) -> None:
    assert noise_of(before, now, earlier) == pytest.approx(expected, rel=1e-3)  # type: ignore[arg-type]


def test_few_cases_show_no_scatter() -> None:
    assert scatter_of([1.0, 2.0, 0.5]) == 0.0
    assert scatter_of([1.1] * 10) == pytest.approx(0.0)
    assert scatter_of([1.0, 1.5] * 10) > 1.0


def test_only_runs_of_the_same_machine_count(tmp_path: Path) -> None:
    saved(tmp_path, "2026-01-01T00:00:00+00:00", entry(seconds=2e-3))
    saved(tmp_path, "2026-01-02T00:00:00+00:00", entry(seconds=7e-3), device_name="another processor")
    saved(tmp_path, "2026-01-03T00:00:00+00:00", entry("mul"))
    (file,) = tmp_path.glob("2026-01-01*.json")
    for number, changed in enumerate(({"dtype": "bfloat16"}, {"threads": 99})):
        data = json.loads(file.read_text())
        data["settings"] |= changed
        data["date"] = f"2026-01-0{number + 4}T00:00:00+00:00"
        (tmp_path / f"{number}-bench-ops.json").write_text(json.dumps(data))
    found = report(tmp_path, entry())
    assert [run.date[:10] for run in found.history] == ["2026-01-01"]
    assert found.changes[0].ratio == pytest.approx(0.5)


def test_files_that_are_no_reports_are_passed_over(tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"date": "2026"}'), ("d", "\udcff")):
        (tmp_path / f"{name}-bench-ops.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (tmp_path / "e-bench-ops.json").mkdir()
    saved(tmp_path, "2026-01-01T00:00:00+00:00", entry())
    assert len(report(tmp_path, entry()).history) == 1


def test_fields_of_other_versions_do_not_matter(tmp_path: Path) -> None:
    saved(tmp_path, "2026-01-01T00:00:00+00:00", entry(), entry("mul"))
    (file,) = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    data["new"] = data["entries"][0]["row"]["new"] = 1
    del data["summary"], data["entries"][0]["row"]["flops"]
    file.write_text(json.dumps(data))
    assert len(report(tmp_path, entry()).changes) == 1


def test_trends_have_a_place_for_each_run(tmp_path: Path) -> None:
    saved(tmp_path, "2026-01-01T00:00:00+00:00", entry(seconds=3e-3))
    saved(tmp_path, "2026-01-02T00:00:00+00:00", entry("mul", seconds=4e-3))
    found = report(tmp_path, entry(), entry("mul"), entry("new"))
    assert {trend.name: trend.seconds for trend in found.trends} == {
        "add": [3e-3, None, 1e-3], "mul": [None, 4e-3, 1e-3]
    }  # fmt: skip
    # Each is compared with the last run that has it.
    assert {change.name: change.since[:10] for change in found.changes} == {"add": "2026-01-01", "mul": "2026-01-02"}


def test_gpu_times_are_not_compared_with_wall_times(tmp_path: Path) -> None:
    saved(tmp_path, "2026-01-01T00:00:00+00:00", entry(gpu=time(1e-4)), entry("mul"))
    found = report(tmp_path, entry(gpu=time(2e-4)), entry("mul", gpu=time(1e-4)))
    assert [change.ratio for change in found.changes] == pytest.approx([2.0, 1.0])


def test_an_interrupted_run_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(jobs: list[Job], *rest: object) -> list[Entry]:
        if jobs[0].name == "mul":
            raise KeyboardInterrupt
        return [entry(jobs[0].name)]

    monkeypatch.setattr(building, "run", measured)
    setup = Setup(CPU, None, Settings(), ("medium",), tmp_path, "a processor", {"genesis": "0.0"})
    found = measure_all(jobs(["add", "mul", "sub", "div"], ["medium"], every_axis=False), setup)
    assert [each.row.name for each in found.entries] == ["add"]
    assert (found.interrupted, found.left) == (True, 3)
    text = headline(building.build("bench-ops", "genesis bench-ops", setup, found, [LIMITS]))
    assert text.endswith("; interrupted before the last 3 cases.")


def test_what_looks_slower_is_measured_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "2026-01-01T00:00:00+00:00", entry("add"), entry("sub"), entry("mul"))
    # The first time of `add` is a mishap, `sub` is slower indeed, and `mul` looks slower and fails the second time.
    times = {"add": [5e-3, 1.01e-3], "sub": [5e-3, 6e-3], "mul": [2e-3, None]}

    def measured(jobs: list[Job], *rest: object) -> list[Entry | Failure]:
        seconds = times[jobs[0].name].pop(0)
        if seconds is None:
            return [Failure(name="mul", label="4x4", error="gone", exit_code=6)]
        return [entry(jobs[0].name, seconds=seconds)]

    monkeypatch.setattr(building, "run", measured)
    setup = Setup(CPU, None, Settings(), ("medium",), tmp_path, "a processor", {"genesis": "0.0"})
    told: list[str] = []
    found = measure_all(jobs(["add", "sub", "mul"], ["medium"], every_axis=False), setup, told.append)
    assert [each.row.wall.seconds for each in found.entries] == [1.01e-3, 5e-3, 2e-3]
    assert (found.failures, found.skipped) == ([], [])
    assert told == [
        "1/3 add medium", "2/3 sub medium", "3/3 mul medium",
        *(f"once more: {name} 4x4" for name in ("add", "sub", "mul")),
    ]  # fmt: skip
