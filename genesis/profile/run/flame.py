"""Where the time of a step goes, as stacks: phase, modules, op, kernel. Written as collapsed stacks, or drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from genesis.measure.memory import aggregated
from genesis.measure.run import Recorded
from genesis.measure.spans import IDLE, divided
from genesis.profile.format import format_seconds
from genesis.profile.run.svg import document, element, fitted, titled
from genesis.profile.run.tables import kernel_shares

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


def stacks_of(recorded: Recorded, on_gpu: bool) -> dict[Stack, float]:
    """Seconds of a mean step by stack; they add up to the step as `tables.shares_of` has it."""
    found: dict[Stack, float] = defaultdict(float)
    for step in recorded.steps:
        for key, seconds in (divided(step.frames, step.start, step.end) if not on_gpu else {}).items():
            found[_stack(key.phase, key.module, key.op)] += seconds / len(recorded.steps)
        for kernel in step.kernels if on_gpu else ():
            if not kernel.is_concurrent:
                stack = (*_stack(kernel.phase, kernel.module, kernel.op), kernel.name)
                found[stack] += (kernel.end - kernel.start) / len(recorded.steps)
        if on_gpu:
            idle = sum(s for key, s in kernel_shares(step.kernels).items() if key.phase == "idle")
            found["idle",] += idle / len(recorded.steps)
    return dict(found)


def _stack(phase: str, module: str, op: str) -> Stack:
    """Layers count together; what is in brackets says nothing that the phase does not."""
    if module == IDLE:
        return (phase,)
    path = [] if module.startswith("(") else _path(aggregated(module))
    return (phase, *path, op)


def _path(module: str) -> list[str]:
    """The parts of a module's name, a star with the name before it."""
    parts: list[str] = []
    for part in module.split("."):
        if part == "*" and parts:
            parts[-1] += ".*"
        else:
            parts.append(part)
    return parts


def collapsed(stacks: Mapping[Stack, float]) -> bytes:
    """Collapsed stacks with whole microseconds, as other tools take them."""
    lines = []
    for stack, seconds in sorted(stacks.items()):
        count = round(seconds * 1e6)
        if count > 0:
            lines.append(f"{';'.join(part.replace(';', ',') for part in stack)} {count}\n")
    return "".join(lines).encode()


@dataclass
class _Node:
    """A frame of the picture."""

    name: str
    seconds: float = 0.0
    below: dict[str, _Node] = field(default_factory=dict)


def flame_graph(stacks: Mapping[Stack, float], title: str) -> bytes:
    """The stacks as an SVG that needs nothing else: widths are times, the step is at the top."""
    root = _Node(title)
    for stack, seconds in stacks.items():
        root.seconds += seconds
        node = root
        for name in stack:
            node = node.below.setdefault(name, _Node(name))
            node.seconds += seconds
    depth = max((len(stack) for stack in stacks), default=0)
    height = HEAD + ROW * (depth + 1) + 34
    scale = (WIDTH - 2 * MARGIN) / root.seconds if root.seconds else 0.0
    body = [
        element("text", escape(title), class_="title", x=MARGIN, y=24.0),
        element("text", "width: time of a step; point at a frame for its figures", class_="soft", x=MARGIN, y=42.0),
        *_frames(root, root, MARGIN, 0, scale, "whole"),
    ]
    return document(WIDTH, height, title, body, PHASES).encode()


def _frames(root: _Node, node: _Node, x: float, depth: int, scale: float, phase: str) -> Iterator[str]:
    """A node and all below it, those below side by side from the left: phases as a step has them, others by width."""
    width, y = node.seconds * scale, HEAD + depth * ROW
    if width < SMALLEST:
        return
    share = node.seconds / root.seconds
    name, text = ("a step", f"a step, {format_seconds(node.seconds)}") if node is root else (node.name, node.name)
    markup = element("rect", class_=f"frame {phase}", x=x, y=y, width=width, height=ROW - 1, rx=1.5)
    if label := fitted(text, width - 6):
        markup += element("text", label, class_="on", x=x + 4, y=y + 13)
    yield titled(markup, f"{name}: {format_seconds(node.seconds)}, {share:.1%} of the step")
    first = {name: position for position, name in enumerate(PHASES)} if node is root else {}
    for child in sorted(node.below.values(), key=lambda n: (first.get(n.name, len(first)), -n.seconds, n.name)):
        yield from _frames(root, child, x, depth + 1, scale, child.name if depth == 0 else phase)
        x += child.seconds * scale
