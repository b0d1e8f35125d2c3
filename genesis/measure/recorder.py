"""What happens on the host, as frames that nest: phases, modules, ranges and ops, those of backward too.

Time is divided among frames so that shares add up to the whole: at a moment in which several threads work, each of them
has an equal part, and ops go before the Python around them.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

from genesis.array import Array
from genesis.autograd.graph import BaseNode, watching_tape
from genesis.nn import Module
from genesis.nn.hooks import watching_calls
from genesis.op import Op, observe
from genesis.shapes import Shape

OUTSIDE = "(outside ops)"
IDLE = "(idle)"
COLLECTIVE = "(collective)"  # the op of what ranks send each other
Level = Literal["phase", "module", "range", "op"]

_PACKAGE = Path(__file__).parents[1]
# What the lines of a model and of the training loop call.
PLUMBING = tuple(str(path) for path in _PACKAGE.iterdir() if path.name not in ("train", "__pycache__"))


@dataclass(slots=True, eq=False)
class Frame:
    """A stretch of one thread's time.

    Attributes:
        phase, module: that contain it, or that it is.
        start, end: seconds of `time.perf_counter`.
        parent: the frame around it.
        shapes: of an op's inputs and outputs.
        lines: of an op, the Python calls that led to it, innermost first; empty unless they were asked for.
        flops: of an op, as its cost says.
    """

    level: Level
    name: str
    phase: str
    module: str
    start: float
    end: float
    thread: int
    parent: Frame | None = None
    shapes: tuple[tuple[Shape, ...], tuple[Shape, ...]] = ((), ())
    lines: tuple[str, ...] = ()
    flops: float = 0.0


class Ranges(Protocol):
    """Where frames are shown to another profiler: ranges of a thread that nest."""

    def push(self, name: str) -> None:
        """A range begins."""

    def pop(self) -> None:
        """The innermost range ends."""


recorders: list[Recorder] = []  # that watch now


class Recorder:
    """Notes frames while `watching` is entered.

    Args:
        model: whose modules are told apart by their dotted names; others go by the class of the outermost one.
        ranges: where the frames are shown to another profiler, too.
        ambient: the phase of what happens outside of all marked ones, at the beginning.
        has_lines: whether ops note the Python calls that led to them.
        has_flops: whether ops note their FLOPs.

    Attributes:
        frames: that have ended, since `begin`.
    """

    def __init__(
        self,
        model: Module | None = None,
        ranges: Ranges | None = None,
        *,
        ambient: str = "data",
        has_lines: bool = False,
        has_flops: bool = False,
    ) -> None:
        self.root = "" if model is None else type(model).__name__
        self.frames: list[Frame] = []
        self.ambient = self._first = ambient
        self._ranges, self._has_lines, self._has_flops = ranges, has_lines, has_flops
        self._open: dict[int, list[Frame]] = defaultdict(list)  # by thread, the innermost last
        self._paths: dict[int, str] = {}
        self._known: list[Module] = []  # or others would get their ids
        self._of_node: dict[int, str] = {}  # modules of nodes, by their position in the order of recording
        self._of_leaf: dict[int, str] = {}
        self._called: set[str] = set()  # modules; parameters of others are used by one around them
        self.outermost: FrameType | None = None  # Python's frame at which lines end
        if model is not None:
            self._learn(model, "")

    def _learn(self, model: Module, name: str) -> None:
        """Know the modules and parameters of `model`, whose own name is `name`."""
        self._known.append(model)
        prefix = f"{name}." if name else ""
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), f"{prefix}{path}" if path else name)
        for path, parameter in model.named_parameters():
            if (edge := parameter.edge()) is not None:
                self._of_leaf.setdefault(edge.node.sequence, prefix + path)

    def begin(self) -> None:
        """Forget what was noted; what is open begins here."""
        self.frames, self.ambient = [], self._first
        self._of_node.clear()
        now = time.perf_counter()
        for frame in (frame for open_ in list(self._open.values()) for frame in open_):
            frame.start = now

    def end(self) -> list[Frame]:
        """The frames since `begin`; those that are open end here, and begin anew."""
        now, frames = time.perf_counter(), self.frames
        for thread, open_ in list(self._open.items()):
            frames += [frame for frame in open_ if frame.level != "op"]  # an open op has raised
            again: list[Frame] = []
            for frame in list(open_):
                frame.end = 0.0 if frame.level == "op" else now
                again.append(replace(frame, start=now, parent=again[-1] if again else None))
            self._open[thread] = again
        return frames

    def current(self) -> Frame:
        """The innermost open frame of this thread; outside of all one without a parent that stands for the phase."""
        thread = threading.get_ident()
        if open_ := self._open[thread]:
            return open_[-1]
        return Frame("phase", "", self.ambient, self._home(self.ambient), 0.0, 0.0, thread)

    def _home(self, phase: str) -> str:
        """The module of what a phase does outside of modules."""
        return self.root if not phase or phase in ("forward", "backward") else f"({phase})"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what happens inside the block."""
        with ExitStack() as stack:
            recorders.append(self)
            stack.callback(recorders.remove, self)
            stack.enter_context(observe(self._op_ended, self._op_begins))
            stack.enter_context(watching_tape(self))
            stack.enter_context(watching_calls(self._calls))
            yield

    def _push(
        self, level: Level, name: str, phase: str | None = None, module: str | None = None, label: str = ""
    ) -> int:
        """Open a frame, inside the phase and the module of the one around it unless it has others; its depth."""
        thread = threading.get_ident()
        open_ = self._open[thread]
        around = open_[-1] if open_ else self.current()
        phase, module = around.phase if phase is None else phase, around.module if module is None else module
        frame = Frame(level, name, phase, module, time.perf_counter(), 0.0, thread, around if open_ else None)
        open_.append(frame)
        if self._ranges is not None:
            self._ranges.push(label or name)
        return len(open_) - 1

    def _pop(self, depth: int) -> None:
        """Close the frame at a depth, and forget those in it, which have raised."""
        open_ = self._open[threading.get_ident()]
        for frame in reversed(open_[depth:]):
            open_.pop()
            if self._ranges is not None:
                self._ranges.pop()
            if len(open_) == depth:
                frame.end = time.perf_counter()
                self.frames.append(frame)

    @contextmanager
    def _inside(self, *what: Any, **more: Any) -> Iterator[None]:
        depth = self._push(*what, **more)
        try:
            yield
        finally:
            self._pop(depth)

    # --- Phases and ranges --------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is a part of a phase."""
        with self._inside("phase", name, name, self._home(name)):
            yield
        if self._first:
            self.ambient = "backward" if name == "forward" else name

    def range(self, name: str) -> AbstractContextManager[None]:
        """The block has a name of the user's."""
        return self._inside("range", name)

    def marked(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """`method`, each call of it a part of a phase."""

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> Any:
            with self.phase(phase):
                return method(*args, **settings)

        return call

    def collective(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, each call of it a phase and an op of its own; what comes behind belongs to the phase before."""

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> None:
            ambient = self.ambient
            with self.phase("collectives"), self._inside("op", COLLECTIVE):
                method(*args, **settings)
            self.ambient = ambient

        return call

    # --- Modules and the tape -----------------------------------------------------------------------------------------

    @contextmanager
    def _calls(self, module: Module) -> Iterator[None]:
        if id(module) not in self._paths:
            self._learn(module, type(module).__name__)
        path = self._paths[id(module)]
        if not path:  # the model itself
            yield
            return
        self._called.add(path)
        with self._inside("module", path, None, path):
            yield

    def recorded(self, node: BaseNode) -> None:
        """A node belongs to the module that made it."""
        self._of_node[node.sequence] = self.current().module

    def runs_backward(self) -> Any:
        """A backward pass."""
        return self.phase("backward")

    def runs(self, node: BaseNode) -> Any:
        """What a vjp does belongs to the node's module."""
        name = self._of_leaf.get(node.sequence)
        if name is None:
            module = self._of_node.get(node.sequence, self.root)
        else:
            while name and name not in self._called:
                name = name.rpartition(".")[0]
            module = name or self.root
        return self._inside("module", module or node.name, None, module, label=f"{module} {node.name}")

    # --- Ops ----------------------------------------------------------------------------------------------------------

    def _op_begins(self, op: Op) -> None:
        self._push("op", op.name)

    def _op_ended(
        self, op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], seconds: float
    ) -> None:
        open_ = self._open[threading.get_ident()]
        depth = len(open_) - 1
        while depth >= 0 and (open_[depth].name != op.name or open_[depth].level != "op"):
            depth -= 1
        if depth < 0:
            return  # it began before anybody watched
        frame = open_[depth]
        self._pop(depth)
        frame.shapes = _shapes(inputs), _shapes(outputs)
        if self._has_lines:
            frame.lines = tuple([f"{file}({line}): {name}" for file, line, name in callers(self.outermost)])
        if self._has_flops:
            frame.flops = float(op.cost(inputs, outputs, attrs).flops)


def _shapes(operands: Iterable[Any]) -> tuple[Shape, ...]:
    return tuple([x.shape for x in operands if isinstance(x, Array)])


def callers(outermost: FrameType | None = None) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the callers outside the framework's inner parts, innermost first, to `outermost`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(PLUMBING):
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = None if frame is outermost else frame.f_back


def aggregated(module: str) -> str:
    """A module's name with a star for the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


@contextmanager
def shadowed(of: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """Other methods for one object inside the block."""
    for name, method in methods.items():
        assert callable(getattr(of, name, None)), f"{type(of).__name__} has no method {name}"
        object.__setattr__(of, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(of, name)


# --- Time divided among frames ----------------------------------------------------------------------------------------


def divided(frames: Iterable[Frame], start: float, end: float) -> dict[Frame | None, float]:
    """Seconds between `start` and `end` by the innermost frame, None where there is none; they add up to all.

    Of threads that work at the same time each has an equal part; ops go before what is no op.
    """
    frames = [frame for frame in frames if frame.end > frame.start]
    begins = [(frame.start, 1, -frame.end, frame) for frame in frames]  # of two that begin together the outer one first
    ends = [(frame.end, 0, 0.0, frame) for frame in frames]
    shares: dict[Frame | None, float] = defaultdict(float)
    threads: dict[int, list[Frame]] = defaultdict(list)  # open frames, the innermost last
    at = start
    for moment, is_begin, _, frame in [*sorted([*begins, *ends], key=lambda event: event[:3]), (end, 2, 0.0, None)]:
        if (until := min(max(moment, start), end)) > at:
            innermost = [open_[-1] for open_ in threads.values() if open_]
            chosen: Sequence[Frame | None] = [each for each in innermost if each.level == "op"] or innermost or [None]
            for share in chosen:
                shares[share] += (until - at) / len(chosen)
            at = until
        if frame is not None:
            (threads[frame.thread].append if is_begin else threads[frame.thread].remove)(frame)
    return dict(shares)


class Key(NamedTuple):
    """What tables divide time by."""

    phase: str
    module: str
    op: str


NOTHING = Key("idle", IDLE, IDLE)


def by_key(frames: Sequence[Frame], start: float, end: float) -> dict[Key, float]:
    """`divided` by phase, module and op."""
    found: dict[Key, float] = defaultdict(float)
    for frame, seconds in divided(frames, start, end).items():
        if frame is None:
            found[NOTHING] += seconds
        else:
            found[Key(frame.phase, frame.module, frame.name if frame.level == "op" else OUTSIDE)] += seconds
    return dict(found)
