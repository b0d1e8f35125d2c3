"""The loss picture: valid SVG of what the metrics hold, deterministic, and drawn of odd runs too."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from genesis.errors import DataError, DiskError
from genesis.train.metrics import MetricsWriter
from genesis.train.report.curves import smooth
from genesis.train.report.page import loss_picture

SVG = "{http://www.w3.org/2000/svg}"
ROWS: list[tuple[int, dict[str, float]]] = [
    *((step, {"train/loss": 2 + 6 / step, "train/learning_rate": 1e-3 * min(step / 20, 1)}) for step in range(1, 60)),
    (30, {"eval/loss": 2.5, "eval/chats/loss": 3.5}),
    (59, {"eval/loss": 2.25, "eval/chats/loss": 3.25}),
]


def write(folder: Path, rows: list[tuple[int, dict[str, float]]]) -> Path:
    folder.mkdir(exist_ok=True)
    with MetricsWriter(folder) as writer:
        for step, row in sorted(rows, key=lambda row: row[0]):
            writer.write(step, row)
    return folder


def drawn(folder: Path) -> ElementTree.Element:
    loss_picture(folder)
    root = ElementTree.fromstring((folder / "loss.svg").read_text())
    assert root.tag == f"{SVG}svg"
    return root


def lines(root: ElementTree.Element) -> dict[str, list[list[tuple[float, float]]]]:
    """Title of each line -> the points of those that have it."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for line in root.iter(f"{SVG}polyline"):
        points = [point.split(",") for point in line.attrib["points"].split()]
        found.setdefault(line[0].text or "", []).append([(float(x), float(y)) for x, y in points])
    return found


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_each_series_is_drawn_with_its_labels(tmp_path: Path) -> None:
    root = drawn(write(tmp_path / "r", ROWS))
    by_title = lines(root)
    counts = {title: [len(points) for points in group] for title, group in by_title.items()}
    assert counts == {
        "r: train/loss": [59, 59],
        "r: eval/loss": [2],
        "r: eval/chats/loss": [2],
        "r: train/learning_rate": [59],
    }
    [first, *_, last] = by_title["r: train/loss"][0]
    assert first[0] < last[0] and first[1] < last[1]  # y points down: the loss falls
    [charts] = [[chart.attrib["aria-label"] for chart in root.findall(f"{SVG}svg")]]
    assert charts == ["Loss over steps", "Held-out loss: chats over steps", "Learning rate over steps"]
    shown = texts(root)
    assert any("nats per token" in text and "2.25 at step 59" in text for text in shown)
    assert {"r", "20", "40", "8", "1.0e-3"} <= {*shown}, "the name, steps, losses and rates of the axes"
    heights = [(float(chart.attrib["y"]), float(chart.attrib["height"])) for chart in root.findall(f"{SVG}svg")]
    assert all(y + height <= after for (y, height), (after, _) in itertools.pairwise(heights))
    assert sum(heights[-1]) < float(root.attrib["height"])


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", ROWS)
    drawn(folder)
    first = (folder / "loss.svg").read_bytes()
    drawn(folder)
    assert (folder / "loss.svg").read_bytes() == first


def test_a_resumed_run_is_drawn_with_its_later_steps(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", ROWS[:20])
    assert len(lines(drawn(folder))["r: train/loss"][0]) == 20
    with MetricsWriter(folder, resume_step=10) as writer:
        writer.write(11, {"train/loss": 2.0})
    assert len(lines(drawn(folder))["r: train/loss"][0]) == 11


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<i>&\"'\x1b\ufffe"
    folder.mkdir()
    odd = "</text>\x00\ud800"
    row = {"train/global_step": 1, "train/loss": 1.0, f"eval/{odd}x/loss": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    root = drawn(folder)
    assert "<i>&\"'\\x1b\\ufffe" in texts(root)
    assert len(root.findall(f"{SVG}svg")) == 1  # "/" separates: this name is none of a set
    row = {**row, "eval/<b>\x00\ud800/loss": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert any(text.startswith("Held-out loss: <b>\\x00\\ud800") for text in texts(drawn(folder)))


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([], 0),
        ([(1, {"train/loss": 3.0})], 2),
        ([(1, {"eval/loss": 3.0})], 1),
        ([(1, {"train/learning_rate": 0.0}), (2, {"train/learning_rate": 0.0})], 1),
        ([(1, {"train/loss": math.nan}), (2, {"train/loss": math.inf}), (3, {"train/loss": 2.0})], 2),
        ([(1, {"train/loss": 1e30}), (2, {"train/loss": 1e-30})], 2),
        ([(1, {"train/loss": 1e308}), (2, {"train/loss": -1e308})], 0),
    ],
    ids=["empty", "one", "eval only", "no rate", "not finite", "extreme", "too large"],
)
def test_odd_runs_have_a_picture(tmp_path: Path, rows: list[tuple[int, dict[str, float]]], count: int) -> None:
    root = drawn(write(tmp_path / "r", rows))
    found = [points for group in lines(root).values() for points in group]
    assert len(found) == count
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(0 <= x <= width and 0 <= y <= height for points in found for x, y in points)
    assert ("Nothing is recorded yet." in texts(root)) == (count == 0)


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    rows = [(step, {"train/loss": value}) for step, value in enumerate((1.0, math.nan, math.inf, 2.0))]
    assert [len(points) for points in lines(drawn(write(tmp_path / "r", rows)))["r: train/loss"]] == [2, 2]


def test_smoothing_is_a_centred_mean() -> None:
    assert smooth([]) == []
    assert smooth([3.0]) == [3.0]
    assert smooth([0.0, 3.0, 0.0, 3.0]) == pytest.approx([0.0, 1.0, 2.0, 3.0])
    line = [float(x) for x in range(200)]
    assert smooth(line) == pytest.approx(line)
    noisy = [x + (-1) ** i for i, x in enumerate(line)]
    assert max(abs(a - b) for a, b in zip(smooth(noisy)[10:-10], line[10:-10], strict=True)) < 0.2


def test_a_file_that_is_no_metrics_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(DataError):
        loss_picture(tmp_path)


def test_a_picture_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", ROWS)
    (folder / "loss.svg").mkdir()
    with pytest.raises(DiskError):
        loss_picture(folder)
