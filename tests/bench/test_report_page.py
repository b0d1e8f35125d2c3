"""The files of a report: one page that stands alone, tables that are tables, and names that sort by date."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from genesis.errors import DiskError
from genesis.profile.schema import Failure
from genesis.report import charts
from genesis.report.files import default_folder, made_folder, save
from genesis.report.markdown import markdown_of
from genesis.report.page import page_of
from genesis.report.schema import Bar, BenchReport, Section, Skipped
from genesis.report.text import render_lines
from tests.bench.reports import LIMITS, entry, report, time

VOID = frozenset(("meta", "br", "hr", "img", "link", "input"))
EVIL = "<script>alert(1)</script> & | \x1b[31m"
MODEL = Section(
    title="Training steps", text=["A step takes 5 ms."], columns=["batch", "step"], cells=[["1", "5 ms"]],
    bars=[Bar(label="forward", share=0.4, text="40%"), Bar(label="backward", share=0.6, text="60%")], data={"rows": []},
)  # fmt: skip


class Parsed(HTMLParser):
    """Tags of a page, which must close in the order in which they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.words = list[str](), list[str](), list[str]()
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def full(folder: Path) -> BenchReport:
    """A report with all that there can be."""
    names = [f"op{i}" for i in range(30)]
    for day in (1, 2):
        made = report(folder, *(entry(name, 0.9 - 0.02 * i) for i, name in enumerate(names)))
        save(made.model_copy(update={"date": f"2026-01-0{day}T00:00:00+00:00"}), folder)
    now = [entry(name, 0.9 - 0.02 * i, seconds=1e-3 * (1 + (i == 3) - 0.5 * (i == 5))) for i, name in enumerate(names)]
    now.append(entry("slow", 0.01, label=EVIL, category="reduction", wall=time(1e-3, None, is_noisy=True)))
    now.append(entry("quick", 1.7, category="memory", cause="launch", flops=0, intensity=0.0))
    now.append(entry("moved", None, limit=None, category="memory", gpu=time(1e-5)))
    failures = (Failure(name="sort", label="8", error=f"no kernel {EVIL}", exit_code=6),)
    skipped = (Skipped(name="eq", label="4", reason="takes no bfloat16"),)
    machine = {
        "genesis": "0.0", "python": {"version": "3.11"}, "cpu": {"name": EVIL, "usable_cores": 2},
        "cuda": {"devices": [{"name": "a GPU"}]}, "packages": [{"name": "numpy", "version": "2"}, {"name": "rich"}],
    }  # fmt: skip
    return report(folder, *now, failures=failures, skipped=skipped, sections=(MODEL,), machine=machine)


def test_the_page_is_well_formed_and_stands_alone(tmp_path: Path) -> None:
    made = full(tmp_path)
    text = page_of(made)
    page = Parsed(text)
    assert page.links == []
    assert "script" not in page.tags and "iframe" not in page.tags
    assert not re.search(r"https?:|//cdn|url\(|@import", text)
    assert {"svg", "table", "details", "polyline", "circle"} <= set(page.tags)
    words = " ".join(page.words)
    for part in (
        "What to do next", "Since the last run", "Roofline", "What failed", "takes no bfloat16", "Training steps",
        "A step takes 5 ms.", "copy", "10.0 GB/s", "a GPU", "What was left out", "farthest from the limit",
        "16 more, nearer to the limit", "33 of 34",
    ):  # fmt: skip
        assert part in words
    assert EVIL.split(maxsplit=1)[0] in words  # escaped, as words


def test_a_parser_that_closes_nothing_is_noticed() -> None:
    for wrong in ("<p>", "<p><b></p></b>", "</p>"):
        with pytest.raises(AssertionError):
            Parsed(wrong)


def test_a_page_without_rows_or_history(tmp_path: Path) -> None:
    failure = Failure(name="sort", label="8", error="no kernel", exit_code=6)
    page = Parsed(page_of(report(tmp_path, failures=(failure,))))
    assert "None of 1 cases could be measured." in " ".join(page.words)
    assert "circle" not in page.tags
    one = " ".join(Parsed(page_of(report(tmp_path, entry()))).words)
    assert "There is no earlier run" in one
    assert "Ops on a processor" in one


def test_markdown_tables_have_as_many_cells_as_columns(tmp_path: Path) -> None:
    made = full(tmp_path)
    text = markdown_of(made)
    lines = text.splitlines()
    columns, tables = 0, 0
    for before, line in zip(["", *lines], lines, strict=False):
        if not line.startswith("|"):
            columns = 0
            continue
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if not before.startswith("|"):
            columns, tables = len(cells), tables + 1
        assert len(cells) == columns
    assert tables >= 10
    assert "\x1b" not in text
    for part in (
        "# Ops and a model on a processor",
        "## What to do next",
        "## What failed",
        "| sort | 8 | no kernel",
        "1. ",
    ):
        assert part in text


def test_the_terminal_has_the_summary_in_100_columns(tmp_path: Path) -> None:
    lines = list(render_lines(full(tmp_path), [Path("report.html")]))
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "written  report.html"
    for start in (
        "device   a processor",
        "worst    slow",
        "best     op0",
        "slower   op3 4x4 ×2.00",
        "failed   sort 8",
        "left out 1 case",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert not any("\x1b" in line for line in lines)


def test_a_report_is_valid_by_its_own_schema(tmp_path: Path) -> None:
    made = full(tmp_path)
    assert BenchReport.model_validate_json(made.model_dump_json()) == made
    assert BenchReport.model_json_schema()["properties"]["schema_version"]["const"] == 1


def test_files_are_named_by_date_kind_and_device(tmp_path: Path) -> None:
    made = report(tmp_path, entry(), device_name="NVIDIA H200 / <x>").model_copy(
        update={"date": "2026-03-04T05:06:07+00:00"}
    )
    paths = save(made, tmp_path)
    stem = "2026-03-04-050607-bench-ops-nvidia-h200-x-float32"
    assert [path.name for path in paths] == [f"{stem}.html", f"{stem}.md", f"{stem}.json"]
    assert paths[0].read_text() == page_of(made)
    assert BenchReport.model_validate_json(paths[2].read_text()) == made
    assert save(made, tmp_path)[0].name == f"{stem}-2.html"  # nothing is overwritten


def test_reports_lie_in_the_clone_where_there_is_one(tmp_path: Path) -> None:
    assert default_folder(tmp_path) == tmp_path / "genesis-bench"
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    assert default_folder(tmp_path) == tmp_path / "genesis-bench"  # another project's
    (tmp_path / "genesis" / "report").mkdir(parents=True)
    (tmp_path / "genesis" / "report" / "files.py").touch()
    assert default_folder(tmp_path / "docs") == tmp_path / "benchmarks" / "results"


def test_a_folder_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    assert made_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(DiskError) as error:
        made_folder(tmp_path / "file" / "c")
    assert error.value.where == "--out"


# --- Charts -----------------------------------------------------------------------------------------------------------


def test_bars_show_each_op_once_at_its_largest_size() -> None:
    rows = [
        entry("a", 0.9, size="large", label="9"), entry("a", 0.1, size="small"), entry("b", 5.0, cause="launch"),
        entry("c", None, limit=None), entry("d", 0.4, axes=[0]), entry("d", 0.3, axes=[1]),
    ]  # fmt: skip
    (found,) = charts.bars_by_category(rows)
    assert [(bar.label, bar.text) for bar in found.first] == [("d", "30%"), ("d", "40%"), ("a", "90%"), ("b", "500%")]
    assert found.first[-1].percent == 100
    assert [(bar.look, bar.word) for bar in found.first[2:]] == [("excellent", "excellent"), ("launch", "launch bound")]
    assert found.rest == []
    (many,) = charts.bars_by_category([entry(f"op{i}", i / 30) for i in range(30)])
    assert (len(many.first), len(many.rest)) == (charts.FIRST, 30 - charts.FIRST)


@pytest.mark.parametrize("size", [(1040, 460), (340, 380)])
def test_the_roofline_bends_at_the_ridge(size: tuple[int, int]) -> None:
    rows = [
        entry("ridge side", 1.0, intensity=1.0, flops=10, flops_per_second=1e10),
        entry("flat", 1.0, intensity=1000.0, flops=10, flops_per_second=1e11),
        entry("none", 1.0, flops=0, intensity=0.0),
        entry("other", 1.0, dtype="int32"),
    ]
    found = charts.roofline(rows, LIMITS, *size)
    assert found is not None
    (x0, y0), (x1, y1), (x2, y2) = found.roof
    sloping, flat = found.points
    assert sloping.y - y0 == pytest.approx((sloping.x - x0) * (y1 - y0) / (x1 - x0), abs=0.2)  # on the sloping line
    assert (y1, flat.y, flat.title.split(":")[0]) == (y2, y2, "flat 4x4")
    for at in (x0, x1, x2, sloping.x, flat.x):
        assert found.left <= at <= found.right
    for at in (y0, y1, y2, sloping.y):
        assert found.top <= at <= found.bottom
    assert charts.roofline(rows[2:], LIMITS, *size) is None


def test_sparklines_rise_with_the_values_and_leave_gaps_out() -> None:
    points = charts.sparkline([1.0, None, 2.0], 84, 22)
    assert [x for x, _ in points] == [3.0, 81.0]
    assert points[0][1] > points[1][1]  # y points down
    # A change of 1 % is not drawn over the whole height.
    flat = charts.sparkline([1.0, 1.01], 84, 22)
    assert abs(flat[0][1] - flat[1][1]) < 3
    assert charts.sparkline([1.0], 84, 22) == [(3.0, 11.0)]


def test_strips_fill_the_width() -> None:
    assert charts.stacked([1, 0, 3]) == [(0.0, 25.0), (25.0, 0.0), (25.0, 75.0)]
    assert charts.stacked([0, 0]) == [(0.0, 0.0), (0.0, 0.0)]


# --- Colours ----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Of WCAG 2.1, from #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_words_and_bars_can_be_read_in_both_schemes() -> None:
    css = resources.files("genesis.report").joinpath("page.css").read_text("utf-8")
    light, dark = (dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", part)) for part in css.split("@media", 2)[:2])
    assert set(light) == set(dark)
    for scheme in (light, dark):
        for back in ("back", "surface"):
            for name in ("text", "muted", "link", "excellent", "good", "fair", "poor", "critical", "launch"):
                assert contrast(scheme[name], scheme[back]) >= 4.5, (name, back)
        for name in ("excellent", "good", "fair", "poor", "critical", "launch"):
            assert contrast(scheme[name], scheme["track"]) >= 3
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
