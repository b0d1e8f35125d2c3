"""What happens on the host in a step, noted as frames: phases, modules and ops, also those of backward."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from genesis.array import Array
from genesis.autograd.graph import BaseNode, watching_tape
from genesis.measure.nvtx import Ranges
from genesis.measure.spans import COLLECTIVE, Frame
from genesis.nn import Module
from genesis.nn.hooks import watching_calls
from genesis.op import Op, observe

OpWatch = Callable[[Op, Sequence[Any], float, float], None]


class _Thread(threading.local):
    """Where one thread is: its phases, modules and ops with their starts, the innermost last."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.modules: list[str] = []
        self.ops: list[tuple[Op, float]] = []


class Recorder:
    """Notes frames while `watching` is entered.

    Args:
        model: whose modules are distinguished by their dotted names.
        ranges: where the frames are shown to another profiler, too.

    Attributes:
        frames: of the step so far.
        ambient: the phase of what happens outside of all marked ones.
        after_op: called after each op with its operands, its start and its end.
    """

    def __init__(self, model: Module, ranges: Ranges | None = None) -> None:
        self.root = type(model).__name__
        self.frames: list[Frame] = []
        self.ambient = "data"
        self.after_op: list[OpWatch] = []
        self._ranges = ranges
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._thread = _Thread()
        self._of_node: dict[int, str] = {}  # modules of nodes, by their position in the order of recording
        edges = ((name, parameter.edge()) for name, parameter in model.named_parameters())
        self._of_leaf = {edge.node.sequence: name for name, edge in edges if edge is not None}
        self._called: set[str] = set()  # modules; parameters of others are used by one around them

    def begin(self) -> None:
        """Forget what was noted: a step begins."""
        self.frames, self.ambient = [], "data"
        self._of_node.clear()

    def location(self) -> tuple[str, str]:
        """The phase and the module in which this thread is."""
        own = self._thread
        phase = own.phases[-1] if own.phases else self.ambient
        if own.modules:
            return phase, own.modules[-1]
        return phase, self.root if phase in ("forward", "backward") else f"({phase})"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what happens inside the block."""
        with ExitStack() as stack:
            stack.enter_context(observe(self._op_ended, self._op_begins))
            stack.enter_context(watching_tape(self))
            stack.enter_context(watching_calls(self._calls))
            yield

    # --- Phases -------------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is a part of a phase."""
        own, started = self._thread, time.perf_counter()
        outer, own.modules = own.modules, []
        own.phases.append(name)
        self._push(name)
        try:
            yield
        finally:
            own.modules = outer
            own.phases.pop()
            self._pop()
            self.ambient = "backward" if name == "forward" else name
            self._note("phase", name, name, self.root if name in ("forward", "backward") else f"({name})", started)

    def marked(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """`method`, each call of it a part of a phase."""

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> Any:
            with self.phase(phase):
                return method(*args, **settings)

        return call

    def collective(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, each call of it a phase and an op of its own; what comes behind belongs to the phase before."""

        def noted(*args: Any, **settings: Any) -> None:
            started = time.perf_counter()
            method(*args, **settings)
            self._note("op", COLLECTIVE, *self.location(), started)

        within = self.marked(noted, "collectives")

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> None:
            ambient = self.ambient
            within(*args, **settings)
            self.ambient = ambient

        return call

    # --- Modules ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _calls(self, module: Module) -> Iterator[None]:
        path, started = self._paths.get(id(module), ""), time.perf_counter()
        if not path:  # the model itself, or a module of no part of it
            yield
            return
        self._called.add(path)
        self._thread.modules.append(path)
        self._push(path)
        try:
            yield
        finally:
            phase, _ = self.location()
            self._thread.modules.pop()
            self._pop()
            self._note("module", path, phase, path, started)

    # --- The tape -----------------------------------------------------------------------------------------------------

    def recorded(self, node: BaseNode) -> None:
        """A node belongs to the module that made it."""
        self._of_node[node.sequence] = self.location()[1]

    def runs_backward(self) -> Any:
        """A backward pass."""
        return self.phase("backward")

    @contextmanager
    def runs(self, node: BaseNode) -> Iterator[None]:
        """What a vjp does belongs to the node's module."""
        module = self._module_of(node)
        modules, started = self._thread.modules, time.perf_counter()
        modules.append(module)
        self._push(f"{module} {node.name}")
        try:
            yield
        finally:
            modules.pop()
            self._pop()
            self._note("module", module, self.location()[0], module, started)

    def _module_of(self, node: BaseNode) -> str:
        """The module that recorded a node; of a leaf the one that was called and has the parameter."""
        name = self._of_leaf.get(node.sequence)
        if name is None:
            return self._of_node.get(node.sequence, self.root)
        while name and name not in self._called:
            name = name.rpartition(".")[0]
        return name or self.root

    # --- Ops ----------------------------------------------------------------------------------------------------------

    def _op_begins(self, op: Op) -> None:
        self._push(op.name)
        self._thread.ops.append((op, time.perf_counter()))

    def _op_ended(
        self, op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], seconds: float
    ) -> None:
        end, ops = time.perf_counter(), self._thread.ops
        while ops and ops[-1][0] is not op:
            ops.pop()  # it raised
        if not ops:
            return  # it began before anybody watched
        _, start = ops.pop()
        phase, module = self.location()
        self.frames.append(Frame("op", op.name, phase, module, start, end, threading.get_ident()))
        self._pop()
        for watch in self.after_op:
            watch(op, (*inputs, *outputs), start, end)

    def _note(self, level: Any, name: str, phase: str, module: str, started: float) -> None:
        self.frames.append(Frame(level, name, phase, module, started, time.perf_counter(), threading.get_ident()))

    def _push(self, name: str) -> None:
        if self._ranges is not None:
            self._ranges.push(name)

    def _pop(self) -> None:
        if self._ranges is not None:
            self._ranges.pop()


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
