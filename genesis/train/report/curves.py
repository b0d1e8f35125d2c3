"""Charts of runs: the points to draw, their positions, and the SVG. The page and the loss picture use them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from genesis.errors import escape
from genesis.measure.svg import element, hint, text
from genesis.train.report.runs import Floats, Run

MOST_POINTS = 500  # per line; a screen does not resolve more
MARKED = 60  # a line with at most so many points marks each
# A smaller range, relative or absolute, is drawn as a single value, because a float cannot divide it.
SAME, SMALLEST = 1e-9, 1e-200


class Tick(NamedTuple):
    """A grid line and its label."""

    at: float
    label: str


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        run: number of the run, which determines the colour.
        look: "raw" (as measured, behind a "smooth" one), "smooth", "line" (as measured) or "held-out" (dashed).
        points: x and y in the chart's units.
        is_marked: whether each point is marked.
        title: title of the line.
    """

    run: int
    look: str
    points: Sequence[tuple[float, float]]
    is_marked: bool
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one width."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    rows: Sequence[Tick]
    columns: Sequence[Tick]
    lines: Sequence[Line]

    def svg(self, title: str, **attributes: object) -> str:
        """Return the chart as an SVG element, whose classes a style sheet defines.

        Args:
            title: description for screen readers.
            attributes: attributes of the element, such as its class and position.
        """
        parts = [""]
        for at, label in self.rows:
            rule = element("line", class_="axis", x1=self.left, x2=self.right, y1=at, y2=at)
            parts.append(rule + text(label, self.left - 8, at + 4, text_anchor="end"))
        for at, label in self.columns:
            parts.append(text(label, at, self.bottom + 18, text_anchor="end" if at > self.right - 24 else "middle"))
        for line in self.lines:
            points = " ".join(f"{x},{y}" for x, y in line.points)
            curve = element("polyline", hint(line.title), class_=f"curve {line.look}", points=points)
            dots = line.points if line.is_marked and line.look != "raw" else ()
            circles = "".join(element("circle", class_="point-of", cx=x, cy=y, r=2.5) for x, y in dots)
            parts.append(element("g", curve + circles, class_=f"run{line.run}"))
        size, label = f"0 0 {self.width} {self.height}", f"{title} over steps"
        return element("svg", "\n".join([*parts, ""]), **attributes, viewBox=size, role="img", aria_label=label)


class Kind(NamedTuple):
    """A kind of chart: its title, its unit, and its metrics, each with a look."""

    title: str
    unit: str
    metrics: Sequence[tuple[str, str]]
    scale: float = 1.0
    from_zero: bool = False
    in_picture: bool = False


_LOSS_OF_A_SET = re.compile(r"eval/[^/]+/loss")
CHARTS = (
    Kind(
        "Loss",
        "nats per token",
        (("train/loss", "raw"), ("train/loss", "smooth"), ("eval/loss", "held-out")),
        in_picture=True,
    ),
    Kind("Bits per byte", "held out", (("eval/bits_per_byte", "held-out"),)),
    Kind("Token accuracy", "held out", (("eval/token_accuracy", "held-out"),)),
    Kind(
        "Margins of rewards",
        "chosen minus rejected",
        (("rewards/margins", "raw"), ("rewards/margins", "smooth"), ("eval/rewards/margins", "held-out")),
    ),
    Kind(
        "Accuracy of rewards",
        "chosen above rejected",
        (("rewards/accuracies", "smooth"), ("eval/rewards/accuracies", "held-out")),
    ),
    Kind("Margin of rewards", "chosen minus rejected", (("margin", "smooth"), ("eval/margin", "held-out"))),
    Kind(
        "Accuracy of a reward model", "chosen above rejected", (("accuracy", "smooth"), ("eval/accuracy", "held-out"))
    ),
    Kind("Log-probability of chosen answers", "nats", (("logps/chosen", "smooth"), ("eval/logps/chosen", "held-out"))),
    Kind("KL", "nats", (("kl", "smooth"), ("eval/kl", "held-out"))),
    Kind("Learning rate", "", (("train/learning_rate", "line"),), from_zero=True, in_picture=True),
    Kind(
        "Gradient norm", "before clipping", (("train/grad_norm", "raw"), ("train/grad_norm", "smooth")), from_zero=True
    ),
    Kind("Speed", "tokens a second", (("perf/tokens_per_second", "smooth"),), from_zero=True),
    Kind("Memory", "GiB at the peak", (("memory/max_allocated", "line"),), 2.0**-30, True),
)


def kinds_of(runs: Sequence[Run]) -> list[Kind]:
    """Return the charts of some runs. A chart for each named held-out set follows the loss."""
    names = dict.fromkeys(name for run in runs for name in run.series if _LOSS_OF_A_SET.fullmatch(name))
    sets = [
        Kind(f"Held-out loss: {escape(name.split('/')[1])}", "nats per token", ((name, "held-out"),), in_picture=True)
        for name in names
    ]
    return [CHARTS[0], *sets, *CHARTS[1:]]


def make_chart(kind: Kind, runs: Sequence[Run], names: Sequence[str], width: int, height: int) -> Chart | None:
    """Return a chart of some runs, or None if none has recorded its metrics."""
    # Collect the lines and the ranges of both axes.
    found = [
        (number, look, *_columns(run.series[metric], look, kind.scale), f"{name}: {escape(metric)}")
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
        for metric, look in kind.metrics
        if metric in run.series
    ]
    if not found:
        return None
    lowest, highest = _range([values for _, _, _, values, _ in found], kind.from_zero)
    last = max(float(steps[-1]) for _, _, steps, _, _ in found)
    rows = nice_ticks(lowest, highest, 5)
    lowest, highest = min(lowest, rows[0]), max(highest, rows[-1])
    labels = [_label(value, rows) for value in rows]
    left, right, top, bottom = 14 + 8 * max(map(len, labels)), width - 14, 14, height - 34

    # Convert steps and values to positions.
    def x(step: float) -> float:
        return round(left + (right - left) * step / max(last, 1), 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * (min(max(value, lowest), highest) - lowest) / (highest - lowest), 1)

    steps = [tick for tick in nice_ticks(0, max(last, 1), max(2, width // 140)) if tick <= last and tick == int(tick)]
    return Chart(
        width, height, left, right, top, bottom,
        [Tick(y(value), label) for value, label in zip(rows, labels, strict=True)],
        [Tick(x(step), f"{step:,.0f}") for step in steps],
        [
            Line(number, look, [(x(step), y(v)) for step, v in reduced(steps, values)], len(steps) <= MARKED, title)
            for number, look, steps, values, title in found
        ],
    )  # fmt: skip


def _columns(points: Floats, look: str, scale: float) -> tuple[Floats, Floats]:
    steps, values = points
    return steps, (np.array(smooth(values)) if look == "smooth" and len(values) > MARKED else values) * scale


def smooth(values: Sequence[float] | Floats) -> list[float]:
    """Return the centred mean over about a twentieth of the series; the window shrinks near the ends."""
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    at = np.arange(count)
    half = np.minimum(count // 40 + 1, np.minimum(at, count - 1 - at))
    means: list[float] = ((sums[at + half + 1] - sums[at - half]) / (2 * half + 1)).tolist()
    return means


def reduced(steps: Floats, values: Floats, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most `most` of the points: the lowest and the highest of each part of a long line, in order."""
    chosen = list(range(len(values)))
    if len(values) > most:
        size = math.ceil(2 * len(values) / most)
        parts = ((begin, values[begin : begin + size]) for begin in range(0, len(values), size))
        chosen = [begin + at for begin, part in parts for at in sorted({int(part.argmin()), int(part.argmax())})]
    return list(zip(steps[chosen].tolist(), values[chosen].tolist(), strict=True))


def _range(lines: Iterable[Floats], from_zero: bool) -> tuple[float, float]:
    """Return the range of values to show. Long lines omit 2 % at each end, as the first steps would dominate."""
    low, high = math.inf, -math.inf
    for values in lines:
        cut = len(values) // 50 if len(values) > MARKED else 0
        ordered = np.partition(values, (cut, len(values) - 1 - cut))
        low, high = min(low, float(ordered[cut])), max(high, float(ordered[-1 - cut]))
    low = min(low, 0.0) if from_zero else low
    size = max(abs(low), abs(high))
    if high - low <= max(SAME * size, SMALLEST):
        room = size * 0.1 if size > SMALLEST else 1.0
        low, high = (low, low + room) if from_zero else (low - room, high + room)
    return low, high


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers that cover low … high."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _label(value: float, all_ticks: Sequence[float]) -> str:
    """Return a tick's number with enough digits to distinguish it from its neighbours."""
    largest, step = max(map(abs, all_ticks)), all_ticks[1] - all_ticks[0]
    if value == 0:
        return "0"
    if largest >= 1e13:
        return f"{value:.2e}"
    if largest >= 10_000:
        unit, letter = (1e9, "G") if largest >= 1e9 else (1e6, "M") if largest >= 1e6 else (1e3, "k")
        return f"{value / unit:.{_digits(step / unit)}f}{letter}"
    if largest < 1e-2:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{_digits(step)}f}"


def _digits(step: float) -> int:
    found = max(0, -math.floor(math.log10(step) + 1e-9))
    return found if round(step * 10.0**found, 6).is_integer() else found + 1
