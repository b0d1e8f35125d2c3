"""SVG elements, which the curves of a training report are drawn with too, and flame graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from genesis.measure.record import format_seconds

STYLE = """
svg { color-scheme: light dark; max-width: 100%; height: auto;
  background: #fff; font: 11px ui-monospace, Menlo, Consolas, monospace; }
text { fill: #1b1f27; } .soft { fill: #5d6472; } .title { font-size: 15px; font-weight: 600; }
.on { fill: #10131a; pointer-events: none; } .frame { stroke: #fff; stroke-width: .6; }
.frame:hover { filter: brightness(1.12); }
@media (prefers-color-scheme: dark) {
  svg { background: #15171c; } text { fill: #e8eaf0; } .soft { fill: #9aa2b1; }
  .frame { stroke: #15171c; } .on { fill: #10131a; }
}
"""
CHARACTER = 6.7  # maximum width of a character in pixels
WIDTH, ROW, MARGIN, HEAD = 1280.0, 19.0, 16.0, 52.0  # pixels
NARROWEST = 0.1  # minimum width of a drawn frame in pixels
PHASES = {  # in the order of a step
    "forward": "#7aa8f0",
    "backward": "#f2a65a",
    "optimizer": "#7fc99a",
    "data": "#c9a0e8",
    "idle": "#b3b8c2",
    "whole": "#cfd4de",
}


def document(width: float, height: float, title: str, style: str, body: Iterable[str]) -> str:
    """A standalone picture."""
    size = {"width": width, "height": height, "viewBox": f"0 0 {short(width)} {short(height)}"}
    content = "\n".join(["", element("style", style), *body, ""])
    return element("svg", content, xmlns="http://www.w3.org/2000/svg", **size, role="img", aria_label=title) + "\n"


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element whose content is markup; `class_` becomes class, and stroke_width becomes stroke-width."""
    words = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(short(v) if isinstance(v, float) else str(v))}"
        for key, v in attributes.items()
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def text(content: str, x: float, y: float, **attributes: object) -> str:
    """Text at a position."""
    return element("text", escape(content), x=x, y=y, **attributes)


def hint(content: str) -> str:
    """A tooltip of the enclosing element."""
    return element("title", escape(content))


def short(number: float) -> str:
    """A number with at most three decimals."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


Stacks = Sequence[tuple[tuple[str, ...], float]]


def flame_graph(stacks: Mapping[tuple[str, ...], float], title: str) -> bytes:
    """Seconds by stack, outermost first, as a picture: widths are times, and the whole is at the top."""
    height = HEAD + ROW * (max(map(len, stacks), default=0) + 1) + 34
    body = [
        text(title, MARGIN, 24.0, class_="title"),
        text("width: time; point at a frame for its figures", MARGIN, 42.0, class_="soft"),
        *_frames("whole", list(stacks.items()), 0, MARGIN, sum(stacks.values()) or 1.0, "whole"),
    ]
    fills = "".join(f".{name} {{ fill: {colour}; }}\n" for name, colour in PHASES.items())
    return document(WIDTH, height, title, STYLE + fills, body).encode()


def _frames(name: str, stacks: Stacks, depth: int, x: float, whole: float, phase: str) -> Iterator[str]:
    """The frame of stacks that agree down to `depth`, and those below it: phases in order, others by width."""
    seconds = sum(each for _, each in stacks)
    width, y = seconds / whole * (WIDTH - 2 * MARGIN), HEAD + depth * ROW
    if width < NARROWEST:
        return
    time = format_seconds(seconds)
    markup = element("rect", class_=f"frame {phase}", x=x, y=y, width=width, height=ROW - 1, rx=1.5)
    if (count := int((width - 6) / CHARACTER)) >= 3:
        label = name if depth else f"whole, {time}"
        markup += text(label if len(label) <= count else label[: count - 1] + "…", x + 4, y + 13, class_="on")
    yield element("g", hint(f"{name}: {time}, {seconds / whole:.1%} of the whole") + markup)
    below = defaultdict[str, list[tuple[tuple[str, ...], float]]](list)
    for stack, each in stacks:
        if len(stack) > depth:
            below[stack[depth]].append((stack, each))
    order = {} if depth else {name: position for position, name in enumerate(PHASES)}
    sums = {inner: sum(each for _, each in found) for inner, found in below.items()}
    for inner in sorted(below, key=lambda inner: (order.get(inner, len(order)), -sums[inner], inner)):
        yield from _frames(inner, below[inner], depth + 1, x, whole, inner if inner in order else phase)
        x += sums[inner] / whole * (WIDTH - 2 * MARGIN)
