"""The loss picture of a run: training and held-out loss over steps, the learning rate below; from metrics.jsonl."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from genesis.errors import DataError
from genesis.files.atomic import write_file
from genesis.files.boundary import close_read
from genesis.files.trust import Refused, open_folder, private_folder
from genesis.train.metrics import DRAWABLE, STEP, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_NAME = "loss.png"

# Okabe and Ito's colours, which people with any colour vision tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
INK, GRID = "#222222", "#DDDDDD"
MAX_POINTS = 4000
DRAWN = (STEP, "train/loss", "eval/loss", "train/learning_rate")


def loss_picture(metrics_path: str | Path, out_png: str | Path) -> None:
    """Writes the picture as a PNG of 1600 × 1000 pixels; the same rows give the same bytes.

    Raises:
        DataError: the metrics file holds something other than rows of metrics.
        DiskError: the metrics file cannot be read, or the picture not written.
    """
    # Rows of a long run are many, and only these parts of them are drawn.
    rows = [{name: row[name] for name in DRAWN if name in row} for row in read_metrics(metrics_path)]
    _settle_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # The user's own matplotlib settings do not change the picture, nor does drawing it change them.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = _figure(rows)
        png = io.BytesIO()
        FigureCanvasAgg(figure)
        figure.savefig(png, format="png", metadata={"Software": "Genesis"})
    write_file(out_png, png.getvalue())


def _settle_matplotlib() -> None:
    """Before its first import: matplotlib reads settings and a list of fonts, and would wait for a FIFO there."""
    if "matplotlib" in sys.modules:
        return
    rc = Path("matplotlibrc")
    if rc.exists() and not rc.is_dir() and not rc.is_file():
        raise DataError("matplotlibrc in the current folder is no regular file", where=str(rc.absolute()))
    home = Path(os.path.expanduser("~"))
    own = os.environ.get("MPLCONFIGDIR")
    folders = [Path(own)] if own else []
    if not own and sys.platform.startswith("linux"):
        named = {"XDG_CONFIG_HOME": home / ".config", "XDG_CACHE_HOME": home / ".cache"}
        folders = [Path(os.environ.get(name) or default) / "matplotlib" for name, default in named.items()]
    try:
        for folder in folders:
            close_read(open_folder(folder))
            if any(stat.S_ISFIFO(os.lstat(folder / name).st_mode) for name in os.listdir(folder)):
                raise Refused(f"{folder} holds a FIFO")
    except (OSError, Refused):
        os.environ["MPLCONFIGDIR"] = str(private_folder())


def _figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(
        figsize=(10, 6.25), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08), facecolor="white"
    )
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _draw_loss(loss, _series(rows, "train/loss"), _series(rows, "eval/loss"))
    _draw_rate(rate, _series(rows, "train/learning_rate"))
    for axes in (loss, rate):
        _style(axes)
    return figure


def _draw_loss(axes: Axes, train: list[tuple[int, float]], held_out: list[tuple[int, float]]) -> None:
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Loss", loc="left", color=INK, fontsize=14, fontweight="bold")
    if not train and not held_out:
        axes.text(0.5, 0.5, "no loss recorded yet", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    if train:
        steps, losses = zip(*_thin(train), strict=True)
        axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1, label="training")
        axes.plot(steps, smooth(losses), color=BLUE, linewidth=2, label="training, smoothed")
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        (line,) = axes.plot(steps, losses, "o--", color=ORANGE, linewidth=1.5, label="held out", zorder=3)
        line.set(markersize=7, markeredgecolor="white")
        end = f"{losses[-1]:.3f}"
        axes.annotate(end, (steps[-1], losses[-1]), (-6, 8), textcoords="offset points", color=ORANGE, ha="right")
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)


def _draw_rate(axes: Axes, rates: list[tuple[int, float]]) -> None:
    axes.set_ylabel("learning rate")
    axes.set_xlabel("step")
    if rates:
        steps, values = zip(*_thin(rates), strict=True)
        axes.plot(steps, values, color=GREY, linewidth=1.5)
        axes.set_ylim(0, 1.1 * max(*values, 1e-12))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))


def _style(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)
    axes.margins(x=0.02)


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of every row that has a number under `name` that can be drawn."""
    found = ((row[STEP], row.get(name)) for row in rows)
    return [(step, value) for step, value in found if isinstance(value, int | float) and abs(value) <= DRAWABLE]


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `MAX_POINTS` points, the first and the last among them: a screen shows no more."""
    if len(points) <= MAX_POINTS:
        return points
    last = len(points) - 1
    return [points[round(i * last / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def smooth(values: Sequence[float] | npt.NDArray[np.float64]) -> list[float]:
    """Centred mean over about a twentieth of the series; near the ends the window shrinks, so that it stays centred."""
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    at = np.arange(count)
    half = np.minimum(count // 40 + 1, np.minimum(at, count - 1 - at))
    found: list[float] = ((sums[at + half + 1] - sums[at - half]) / (2 * half + 1)).tolist()
    return found
