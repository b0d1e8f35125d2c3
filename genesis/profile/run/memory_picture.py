"""The memory of a step as data, and as a picture: an area for each category, a band for each phase, the peak marked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from genesis.measure.memory import CATEGORIES, Timeline
from genesis.profile.format import format_bytes, format_seconds
from genesis.profile.run.svg import document, element, short, titled

WIDTH, HEIGHT = 1280.0, 520.0
LEFT, RIGHT, TOP, BOTTOM = 92.0, 20.0, 84.0, 40.0
COLOURS = {
    "weights": "#7aa8f0",
    "optimizer": "#7fc99a",
    "gradients": "#e98a9d",
    "activations": "#f2a65a",
    "workspace": "#c9a0e8",
    "other": "#b3b8c2",
}
POINTS = 2000  # of an outline; a screen shows no more


def memory_json(timeline: Timeline) -> bytes:
    """Moments and bytes by category, as JSON."""
    content = {
        "schema_version": 1,
        "seconds": timeline.seconds,
        "bytes": timeline.nbytes,
        "phases": [{"name": name, "start": start, "end": end} for name, start, end in timeline.phases],
        "peak": {"index": timeline.peak, "bytes": timeline.peak_bytes, "phase": timeline.peak_phase},
        "held": [held._asdict() for held in timeline.held],
    }
    return (json.dumps(content) + "\n").encode()


def memory_picture(timeline: Timeline, title: str) -> bytes:
    """The picture as an SVG that needs nothing else."""
    length, top = max(timeline.seconds[-1], 1e-9), _round_up(timeline.peak_bytes)
    scale = _Scale(length, top)
    peak = timeline.seconds[timeline.peak]
    when = f"{timeline.peak_phase}, {format_seconds(peak)} into the step"
    text = f"peak {format_bytes(timeline.peak_bytes)} in {when}"
    body = [
        element("text", escape(title), class_="title", x=LEFT, y=26.0),
        element("text", escape(text), class_="soft", x=LEFT, y=45.0),
        *_legend(timeline),
        *_grid(scale),
        *_areas(timeline, scale),
        *_phases(timeline, scale),
        element(
            "line",
            class_="mark",
            x1=scale.x(peak),
            x2=scale.x(peak),
            y1=TOP,
            y2=HEIGHT - BOTTOM,
            stroke_dasharray="4 3",
        ),
    ]
    return document(WIDTH, HEIGHT, title, body, COLOURS).encode()


class _Scale:
    """From seconds and bytes to pixels."""

    def __init__(self, seconds: float, nbytes: int) -> None:
        self.seconds, self.nbytes = seconds, nbytes

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.seconds

    def y(self, nbytes: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / self.nbytes


def _round_up(nbytes: int) -> int:
    """The top of the scale: 1, 2, 3, 4, 5, 6 or 8 times a power of two, a little above the peak."""
    unit = 1 << max(math.floor(math.log2(max(nbytes, 1))) - 2, 0)
    return math.ceil(nbytes * 1.04 / unit) * unit


def _legend(timeline: Timeline) -> Iterator[str]:
    x = LEFT
    for category in CATEGORIES:
        if any(timeline.nbytes[category]):
            text = f"{category} {format_bytes(timeline.nbytes[category][timeline.peak])}"
            yield element("rect", class_=category, x=x, y=57.0, width=10, height=10, rx=2)
            yield element("text", escape(text), x=x + 15, y=66.0)
            x += 15 + 7.2 * len(text) + 16


def _grid(scale: _Scale) -> Iterator[str]:
    for i in range(5):
        y = scale.y(scale.nbytes * i / 4)
        yield element("line", class_="line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
        yield element(
            "text", format_bytes(scale.nbytes * i // 4), class_="soft", x=LEFT - 8, y=y + 4, text_anchor="end"
        )
        at = scale.seconds * i / 4
        anchor = "end" if i == 4 else "middle"
        yield element(
            "text", format_seconds(at) if i else "0", class_="soft", x=scale.x(at), y=HEIGHT - 6, text_anchor=anchor
        )


def _areas(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    below = [0] * len(timeline.seconds)
    for category in CATEGORIES:
        values = timeline.nbytes[category]
        above = [low + value for low, value in zip(below, values, strict=True)]
        if any(values):
            outline = [*_steps(timeline.seconds, above, scale), *reversed(list(_steps(timeline.seconds, below, scale)))]
            path = "M" + "L".join(f"{short(x)} {short(y)}" for x, y in outline) + "Z"
            yield titled(
                element("path", class_=f"area {category}", d=path), f"{category}: at most {format_bytes(max(values))}"
            )
        below = above


def _steps(seconds: Sequence[float], values: Sequence[int], scale: _Scale) -> Iterator[tuple[float, float]]:
    """The corners of a line that goes in steps; of many changes the highest in each stretch."""
    stride = max(1, len(seconds) // POINTS)
    before = scale.y(values[0])
    for i in range(0, len(seconds), stride):
        x, y = scale.x(seconds[i]), scale.y(max(values[i : i + stride]))
        yield x, before
        yield x, y
        before = y
    yield scale.x(seconds[-1]), before


def _phases(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """The names of phases below the time axis, where they fit."""
    for name, start, end in timeline.phases:
        left, right = scale.x(start), scale.x(end)
        if right - left > 2:
            yield element("line", class_="line", x1=left, x2=left, y1=TOP, y2=HEIGHT - BOTTOM)
        if right - left > 7.2 * len(name):
            yield element(
                "text", escape(name), class_="soft", x=(left + right) / 2, y=HEIGHT - 24, text_anchor="middle"
            )
