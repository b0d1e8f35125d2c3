"""What many rows say together."""

from __future__ import annotations

from genesis.profile.schema import Failure
from genesis.report.schema import Change
from genesis.report.summary import listed, summarize
from tests.bench.reports import entry, time

FAILURE = Failure(name="sort", label="8", error="no kernel", exit_code=6)


def test_counts() -> None:
    found = summarize(
        [
            entry("a", 0.95),
            entry("b", 0.75, wall=time(1e-3, is_noisy=True)),
            entry("c", 1.3, category="memory"),
            entry("d", 0.1, cause="launch", category="matmul"),
            entry("e", None, limit=None),
        ],
        [FAILURE],
    )
    assert (found.cases, found.measured, found.success_rate) == (6, 5, 5 / 6)
    assert found.bands == {"excellent": 2, "good": 1, "fair": 0, "poor": 0, "critical": 0}
    assert found.median_share == 0.95
    assert (found.launch_bound, found.cached, found.noisy) == (1, 1, 1)
    assert [(c.category, c.cases, c.launch_bound, c.median_share) for c in found.categories] == [
        ("element", 3, 0, 0.85), ("matmul", 1, 1, None), ("memory", 1, 0, 1.3)
    ]  # fmt: skip


def test_nothing_was_measured() -> None:
    found = summarize([], [FAILURE])
    assert (found.success_rate, found.median_share, found.best, found.worst) == (0.0, None, [], [])
    assert found.recommendations == ["Repair what failed: sort 8; the errors are below."]
    assert summarize([], []).recommendations == []


def test_best_and_worst_leave_out_what_says_nothing() -> None:
    rows = [entry(f"op{i}", share) for i, share in enumerate((0.3, 0.1, 0.5, 0.9, 0.75, 0.99, 0.2, 0.4, 0.6, 0.05))]
    found = summarize([*rows, entry("cached", 2.0), entry("small", 0.01, cause="launch")], [])
    assert [row.share for row in found.worst] == [0.05, 0.1, 0.2, 0.3, 0.4]
    assert [row.share for row in found.best] == [0.99, 0.9, 0.75]


def test_recommendations_follow_from_the_numbers() -> None:
    def change(name: str, verdict: str) -> Change:
        return Change(
            name=name, label="4", dtype="float32", since="2026", before=1.0, now=1.5, ratio=1.5, noise=0.1,
            verdict=verdict,  # type: ignore[arg-type]
        )  # fmt: skip

    rows = [
        entry("quick", 0.1, seconds=1e-6),
        entry("long", 0.5, seconds=1.0),
        entry("product", 0.4, cause="compute", limit="compute"),
        entry("tiny", 0.01, cause="launch"),
        entry("fine", 0.9),
    ]
    found = summarize(rows, [FAILURE], [change("add", "slower"), change("mul", "same")]).recommendations
    assert len(found) == 5
    assert "sort 8" in found[0]
    assert "add 4 ×1.50" in found[1] and "mul" not in found[1]
    # The farthest from the limit comes first; the most time is lost elsewhere.
    assert "2 cases bound by bandwidth reach less than 70%" in found[2]
    assert "quick (10%), long (50%)" in found[2] and "long 4x4: 500 ms of 1.00 s. There, look at long." in found[2]
    assert "1 case bound by compute reaches" in found[3] and "product" in found[3]
    assert "1 of 5 cases are bound by the call itself" in found[4]


def test_a_loud_machine_is_named() -> None:
    noisy = [entry(f"op{i}", 0.9, wall=time(1e-3, is_noisy=True)) for i in range(2)]
    assert "2 of 4 cases are noisy" in summarize([*noisy, entry("a", 0.9), entry("b", 0.9)], []).recommendations[0]
    beaten = summarize([entry("matmul", 1.4, limit="compute", cause="compute")], []).recommendations
    assert "1 product ran faster than the limit" in beaten[0]


def test_lists_end_with_how_many_more() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 other"
    assert listed(list("abcdef"), 2) == "a, b and 4 others"
