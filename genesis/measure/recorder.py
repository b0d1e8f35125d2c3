"""Records the host's work as nested frames: phases, modules, ranges and ops, backward included.

`divided` splits a stretch of time among frames so that the parts add up to the whole: threads that work at the same
moment get equal parts, and an op takes precedence over the Python code around it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from genesis.array import Array
from genesis.autograd.graph import BaseNode, watching_tape
from genesis.cuda import nvtx
from genesis.nn import Module
from genesis.nn.hooks import watching_calls
from genesis.op import Op, observe
from genesis.shapes import Shape

OUTSIDE = "(outside ops)"  # the op of time outside of ops
Level = Literal["phase", "module", "range", "op", "wait"]

_PACKAGE = Path(__file__).parents[1]
# Source lines are attributed to callers elsewhere: to a model, the training loop or the user's program.
_PLUMBING = (contextlib.__file__, *(str(path) for path in _PACKAGE.iterdir() if path.name != "train"))


@dataclass(slots=True, eq=False)
class Frame:
    """A stretch of one thread's time."""

    level: Level
    name: str
    phase: str  # the enclosing phase or this frame itself; the same holds for `module`
    module: str
    start: float  # seconds of `time.perf_counter`
    end: float  # stays 0 for an op that raises
    thread: int
    parent: Frame | None = None  # the enclosing frame
    shapes: tuple[tuple[Shape, ...], tuple[Shape, ...]] = ((), ())  # an op's inputs and outputs
    lines: tuple[str, ...] = ()  # the Python calls that led to an op, innermost first, if requested; a wait's line
    flops: int = 0  # an op's work by its cost, if it was requested
    nbytes: int = 0


recorders: list[Recorder] = []  # active ones, the latest last


class Recorder:
    """Records frames while `watching` is entered.

    Args:
        model: its modules are named by their path; modules of other models are prefixed by the model's class.
        has_ranges: shows the frames to Nsight as NVTX ranges.
        ambient: the phase of work before the first marked one.
        has_costs: records each op's bytes and FLOPs.
        outermost: records the Python calls that led to each op, up to this frame of Python.
    """

    def __init__(
        self,
        model: Module | None = None,
        has_ranges: bool = False,
        *,
        ambient: str = "data",
        has_costs: bool = False,
        outermost: FrameType | None = None,
    ) -> None:
        self.root = "" if model is None else type(model).__name__
        self.frames: list[Frame] = []  # that have ended since `begin`
        self.ambient = self._first = ambient  # the phase of work outside of marked ones
        self._has_ranges, self._has_costs, self._outermost = has_ranges, has_costs, outermost
        self._open: dict[int, list[Frame]] = defaultdict(list)  # by thread, the innermost last
        self._paths: dict[int, str] = {}  # of modules, by id
        self._named_models: list[Module] = []  # keeps those ids from being reused
        self._of_node: dict[int, str] = {}  # modules by the sequence number of the nodes they recorded
        self._of_leaf: dict[int, str] = {}  # modules by the sequence number of their parameters' nodes
        if model is not None:
            self._name_modules(model, "")

    def _name_modules(self, model: Module, name: str) -> None:
        self._named_models.append(model)
        prefix = f"{name}." if name else ""
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), f"{prefix}{path}" if path else name)
        for path, parameter in model.named_parameters():
            if (edge := parameter.edge()) is not None:
                self._of_leaf.setdefault(edge.node.sequence, (prefix + path).rpartition(".")[0])

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            recorders.append(self)
            stack.callback(recorders.remove, self)
            stack.enter_context(observe(self._op_ended, self._op_begins))
            stack.enter_context(watching_tape(self))
            stack.enter_context(watching_calls(self._call_frame))
            yield

    def begin(self) -> None:
        self.frames, self.ambient = [], self._first
        self._of_node.clear()
        now = time.perf_counter()
        for open_ in list(self._open.values()):
            for frame in open_:
                frame.start = now

    def end(self) -> list[Frame]:
        """The frames since `begin`. Open ones end here, and continue as new ones."""
        now, (frames, self.frames) = time.perf_counter(), (self.frames, [])
        for thread, open_ in list(self._open.items()):
            ended, following = [frame for frame in open_ if frame.level != "op"], list[Frame]()  # open ops have raised
            for frame in ended:
                following.append(replace(frame, start=now, parent=following[-1] if following else None))
                frame.end = now
            frames += reversed(ended)
            self._open[thread] = following
        return frames

    def current(self) -> Frame:
        """This thread's innermost open frame, or a placeholder for the phase outside of all frames."""
        thread = threading.get_ident()
        if open_ := self._open[thread]:
            return open_[-1]
        return Frame("phase", "", self.ambient, self._module_of(self.ambient), 0.0, 0.0, thread)

    def _module_of(self, phase: str) -> str:
        """The module to which a phase's work outside of modules is attributed."""
        return self.root if phase in ("", "forward", "backward") else f"({phase})"

    def _push(self, level: Level, name: str, phase: str = "", module: str = "", label: str = "") -> int:
        """Open a frame, by default in the phase and module of the enclosing one, and return its depth."""
        around = self.current()
        open_ = self._open[around.thread]
        where, parent = (phase or around.phase, module or around.module), around if open_ else None
        open_.append(Frame(level, name, *where, time.perf_counter(), 0.0, around.thread, parent))
        if self._has_ranges:
            nvtx.range_push(label or name)
        return len(open_) - 1

    def _pop(self, depth: int) -> None:
        """Close the frame at a depth, and drop the frames inside it, which have raised."""
        open_ = self._open[threading.get_ident()]
        frame = open_[depth]
        for _ in open_[depth:] if self._has_ranges else ():
            nvtx.range_pop()
        del open_[depth:]
        frame.end = time.perf_counter()
        self.frames.append(frame)

    @contextmanager
    def frame(self, level: Level, name: str, **more: str) -> Iterator[None]:
        depth = self._push(level, name, **more)
        try:
            yield
        finally:
            self._pop(depth)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the block as a phase. Later unmarked work counts for it too; after forward it counts for backward."""
        with self.frame("phase", name, phase=name, module=self._module_of(name)):
            yield
        if self._first:
            self.ambient = "backward" if name == "forward" else name

    @contextmanager
    def _call_frame(self, module: Module) -> Iterator[None]:
        if id(module) not in self._paths:
            self._name_modules(module, type(module).__name__)
        path = self._paths[id(module)]
        with self.frame("module", path, module=path) if path else nullcontext():  # no path: the model itself
            yield

    def recorded(self, node: BaseNode) -> None:
        self._of_node[node.sequence] = self.current().module

    def runs_backward(self) -> Any:
        return self.phase("backward")

    def runs(self, node: BaseNode) -> Any:
        """A frame for a vjp, in the module that recorded its node or owns its parameter."""
        module = self._of_leaf.get(node.sequence) or self._of_node.get(node.sequence) or self.root
        return self.frame("module", module or node.name, module=module, label=f"{module} {node.name}")

    def _op_begins(self, op: Op) -> None:
        self._push("op", op.name)

    def _op_ended(
        self, op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], seconds: float
    ) -> None:
        open_ = self._open[threading.get_ident()]
        depth = max((i for i, frame in enumerate(open_) if (frame.level, frame.name) == ("op", op.name)), default=None)
        if depth is None:
            return  # it began before the recorder watched
        frame = open_[depth]
        self._pop(depth)
        ours, theirs = (tuple([x.shape for x in each if isinstance(x, Array)]) for each in (inputs, outputs))
        frame.shapes = ours, theirs
        if self._outermost is not None:
            frame.lines = tuple([f"{file}({line}): {name}" for file, line, name in callers(self._outermost)])
        if self._has_costs:
            cost = op.cost(inputs, outputs, attrs)
            frame.flops, frame.nbytes = cost.flops, cost.bytes


def callers(outermost: FrameType | None = None) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the callers outside the framework, from the innermost to `outermost`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PLUMBING):
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = None if frame is outermost else frame.f_back


def aggregated(module: str) -> str:
    """A module's path with a star in place of each layer number."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


@contextmanager
def shadowed(owner: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one object inside the block."""
    for name, method in methods.items():
        assert callable(getattr(owner, name, None)), f"{type(owner).__name__} has no method {name}"
        object.__setattr__(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(owner, name)


def decorated(owner: object, **contexts: Any) -> AbstractContextManager[None]:
    """Enter a context manager, which must be a decorator, in each call of a method inside the block."""
    return shadowed(owner, **{name: context(getattr(owner, name)) for name, context in contexts.items()})


def divided(frames: Iterable[Frame], start: float, end: float) -> dict[Frame | None, float]:
    """Seconds from `start` to `end` by the innermost frame, except waits; None stands for time in no frame."""
    frames = [frame for frame in frames if frame.end > frame.start and frame.level != "wait"]
    begins = [(frame.start, 1, -frame.end, frame) for frame in frames]  # outer frames before inner ones
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
