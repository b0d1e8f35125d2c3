"""The loss picture: what it draws, that it is deterministic, and that odd runs have one too."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from genesis.errors import DataError, DiskError
from genesis.train.metrics import MetricsWriter
from genesis.train.plot import MAX_POINTS, _figure, _series, _thin, loss_picture, smooth

ROWS: list[tuple[int, dict[str, float]]] = [
    *((step, {"train/loss": 2 + 6 / step, "train/learning_rate": 1e-3 * min(step / 20, 1)}) for step in range(1, 60)),
    (30, {"eval/loss": 2.5}),
    (59, {"eval/loss": 2.25}),
]


def write(folder: Path, rows: list[tuple[int, dict[str, float]]]) -> Path:
    with MetricsWriter(folder) as writer:
        for step, row in sorted(rows, key=lambda row: row[0]):
            writer.write(step, row)
    return writer.path


def lines(rows: list[dict[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> data of every line in the upper panel."""
    upper = _figure(rows).axes[0]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in upper.get_lines()}


def test_the_picture_is_a_png_of_the_promised_size(tmp_path: Path) -> None:
    out = tmp_path / "loss.png"
    loss_picture(write(tmp_path, ROWS), out)
    png = out.read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (1600, 1000)


def test_the_same_rows_give_the_same_bytes_whatever_the_user_configured(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    loss_picture(path, tmp_path / "a.png")
    with matplotlib.rc_context({"lines.linewidth": 9, "savefig.dpi": 20}):
        loss_picture(path, tmp_path / "b.png")
        assert matplotlib.rcParams["lines.linewidth"] == 9
    first = (tmp_path / "a.png").read_bytes()
    assert first == (tmp_path / "b.png").read_bytes()
    assert b"atplotlib" not in first


def test_each_series_is_drawn(tmp_path: Path) -> None:
    rows = [{"train/global_step": step, **row} for step, row in ROWS]
    drawn = lines(rows)
    assert set(drawn) == {"training", "training, smoothed", "held out"}
    assert drawn["training"] == (list(range(1, 60)), [2 + 6 / step for step in range(1, 60)])
    assert drawn["held out"] == ([30, 59], [2.5, 2.25])
    rate = _figure(rows).axes[1].get_lines()[0]
    assert max(rate.get_ydata()) == 1e-3


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(1, {"train/loss": 3.0})],
        [(1, {"eval/loss": 3.0})],
        [(1, {"train/learning_rate": 0.0}), (2, {"train/learning_rate": 0.0})],
        [(1, {"train/loss": math.nan}), (2, {"train/loss": math.inf}), (3, {"train/loss": 2.0})],
        [(1, {"train/loss": 1e30}), (2, {"train/loss": 1e-30})],
        [(1, {"train/loss": 1e308}), (2, {"train/loss": -1e308})],
    ],
    ids=["empty", "one", "eval only", "no rate", "not finite", "extreme", "too large"],
)
def test_odd_runs_have_a_picture(tmp_path: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    loss_picture(write(tmp_path, rows), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_what_is_not_finite_is_left_out() -> None:
    rows = [{"train/global_step": step, "train/loss": value} for step, value in enumerate((1.0, None, math.inf, 2))]
    assert _series(rows, "train/loss") == [(0, 1.0), (3, 2)]


def test_long_runs_are_thinned_and_keep_their_ends() -> None:
    points = [(step, float(step)) for step in range(100_000)]
    thin = _thin(points)
    assert (len(thin), thin[0], thin[-1]) == (MAX_POINTS, points[0], points[-1])
    assert _thin(points[:50]) == points[:50]


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
        loss_picture(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_a_picture_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    with pytest.raises(DiskError):
        loss_picture(path, path / "loss.png")
