"""Pictures without other files: SVG elements, text that fits, and flame graphs.

`genesis.train.report` draws curves with the same elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from genesis.measure.record import format_seconds

CHARACTER = 6.7  # pixels that a character of 11 px takes, at most
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
WIDTH, ROW, MARGIN, HEAD = 1280.0, 19.0, 16.0, 52.0  # pixels
SMALLEST = 0.1  # of a frame that is drawn
PHASES = {  # in the order of a step
    "forward": "#7aa8f0",
    "backward": "#f2a65a",
    "optimizer": "#7fc99a",
    "collectives": "#e58aa0",
    "data": "#c9a0e8",
    "idle": "#b3b8c2",
    "whole": "#cfd4de",
}
Stack = tuple[str, ...]


def document(width: float, height: float, title: str, style: str, body: Iterable[str]) -> str:
    """A picture that stands alone."""
    size = {"width": width, "height": height, "viewBox": f"0 0 {short(width)} {short(height)}"}
    parts = ["", element("style", style), *body, ""]
    return (
        element("svg", "\n".join(parts), xmlns="http://www.w3.org/2000/svg", **size, role="img", aria_label=title)
        + "\n"
    )


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element; `class_` is written as class, stroke_width as stroke-width, and content is markup."""
    words = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(short(v) if isinstance(v, float) else str(v))}"
        for key, v in attributes.items()
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def text(content: str, x: float, y: float, **attributes: object) -> str:
    """Text at a place."""
    return element("text", escape(content), x=x, y=y, **attributes)


def hint(content: str) -> str:
    """What the element that it is in shows under the pointer."""
    return element("title", escape(content))


def fitted(text: str, width: float) -> str:
    """`text` cut to `width` pixels; empty where nothing readable fits."""
    count = int(width / CHARACTER)
    if count < 3:
        return ""
    return text if len(text) <= count else text[: count - 1] + "…"


def short(number: float) -> str:
    """A number without needless digits."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


# --- Flame graphs -----------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A frame of the picture."""

    name: str
    seconds: float = 0.0
    below: dict[str, _Node] = field(default_factory=dict)


def flame_graph(stacks: Mapping[Stack, float], title: str) -> bytes:
    """Seconds by stack, outermost first, as a picture: widths are times, the whole is at the top."""
    root = _Node("whole")
    for stack, seconds in stacks.items():
        root.seconds += seconds
        node = root
        for name in stack:
            node = node.below.setdefault(name, _Node(name))
            node.seconds += seconds
    depth = max((len(stack) for stack in stacks), default=0)
    scale = (WIDTH - 2 * MARGIN) / root.seconds if root.seconds else 0.0
    body = [
        text(title, MARGIN, 24.0, class_="title"),
        text("width: time; point at a frame for its figures", MARGIN, 42.0, class_="soft"),
        *_frames(root, root, MARGIN, 0, scale, "whole"),
    ]
    fills = "".join(f".{name} {{ fill: {colour}; }}\n" for name, colour in PHASES.items())
    return document(WIDTH, HEAD + ROW * (depth + 1) + 34, title, STYLE + fills, body).encode()


def _frames(root: _Node, node: _Node, x: float, depth: int, scale: float, phase: str) -> Iterator[str]:
    """A node and all below it, those below side by side from the left: phases as a step has them, others by width."""
    width, y = node.seconds * scale, HEAD + depth * ROW
    if width < SMALLEST:
        return
    label = f"whole, {format_seconds(node.seconds)}" if node is root else node.name
    markup = element("rect", class_=f"frame {phase}", x=x, y=y, width=width, height=ROW - 1, rx=1.5)
    if shown := fitted(label, width - 6):
        markup += text(shown, x + 4, y + 13, class_="on")
    about = f"{node.name}: {format_seconds(node.seconds)}, {node.seconds / root.seconds:.1%} of the whole"
    yield element("g", hint(about) + markup)
    first = {name: position for position, name in enumerate(PHASES)} if node is root else {}
    for child in sorted(node.below.values(), key=lambda n: (first.get(n.name, len(first)), -n.seconds, n.name)):
        inner = (child.name if child.name in PHASES else "whole") if node is root else phase
        yield from _frames(root, child, x, depth + 1, scale, inner)
        x += child.seconds * scale
