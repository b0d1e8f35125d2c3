"""The tape: nodes, edges, saved contexts, and the slots of leaf gradients in flat buffers.

It works on arrays and does not use Tensor; engine.py runs it backward. A slot is in use as long as a `Lease` of it
exists. The forward of an op may hold a lease (`Op.gradient_outputs`) until the graph is freed, so a graph without a
backward pass leaks nothing. A backward pass holds the leases of its vjps until it ends.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from genesis.array import Array, Spec
from genesis.backend import mode
from genesis.errors import GradientError
from genesis.op import BackwardStep, Context, Op, registry
from genesis.shapes import contiguous_strides

_sequence = itertools.count(1)

GradHook = Callable[[Array], Array | None]


class TapeWatch(Protocol):
    """Observes the tape for a profile: `runs_backward` is entered around each pass, `runs` around each vjp."""

    def recorded(self, node: BaseNode) -> None: ...
    def runs_backward(self) -> AbstractContextManager[None]: ...
    def runs(self, node: BaseNode) -> AbstractContextManager[None]: ...


tape_watches: list[TapeWatch] = []  # at most one, during `watching_tape`


@contextmanager
def watching_tape(watch: TapeWatch) -> Iterator[None]:
    """Report to `watch` every node that is recorded or run backward inside the block."""
    assert not tape_watches, "the tape is watched already"
    tape_watches.append(watch)
    try:
        yield
    finally:
        tape_watches.clear()


class Edge(NamedTuple):
    """One output of a node, which receives the gradient of one tensor."""

    node: BaseNode
    output: int


class HookHandle:
    """Removes a hook from its tensor or module: by `remove()`, by a call, or at the end of a `with` block."""

    __slots__ = ("_remove",)

    def __init__(self, remove: Callable[[], Any]) -> None:
        self._remove: Callable[[], Any] | None = remove

    def remove(self) -> None:
        """Remove the hook. A second call does nothing."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    __call__ = remove

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class BaseNode:
    """A node as the engine sees it: the edges of its inputs, the specs of its outputs, and its recording order.

    Attributes:
        rank: of all nodes that are ready, the one with the lowest rank runs.
    """

    __slots__ = ("__weakref__", "edges", "hooks", "line", "name", "rank", "sequence", "specs")

    def __init__(self, name: str, edges: tuple[Edge | None, ...], specs: tuple[Spec | None, ...]) -> None:
        self.name, self.edges, self.specs = name, edges, specs
        self.sequence = next(_sequence)
        self.rank = -self.sequence
        self.line = calling_line() if mode.anomaly else ""
        self.hooks: list[tuple[int, GradHook]] = []  # (output, hook on its gradient)
        if tape_watches:
            tape_watches[0].recorded(self)

    def apply(self, grads: list[Array | None], step: BackwardStep) -> Sequence[Array | None]:
        """Return the gradients of the inputs, given the gradients of the outputs."""
        raise NotImplementedError

    @property
    def next_functions(self) -> tuple[tuple[BaseNode | None, int], ...]:
        """The nodes of the inputs, each with the number of its result; None for an input without a gradient."""
        return tuple((None, 0) if edge is None else (edge.node, edge.output) for edge in self.edges)

    def release(self) -> None:
        """Drop the values saved for backward."""

    def released(self) -> GradientError:
        """The error of a second backward pass."""
        return GradientError(
            f"backward reached {self.name} a second time, and its saved values are freed",
            next="pass retain_graph=True to the first backward()",
        )


class Saved:
    """A context with the versions of its arrays at the time of the forward call."""

    __slots__ = ("context", "versions")

    def __init__(self, context: Context) -> None:
        self.context = context
        kept: tuple[Any, ...] = context.inputs + context.outputs
        if context.leases:  # leased arrays share a buffer whose other elements change
            leased = [lease.array for lease in context.leases.values()]
            kept = tuple([x for x in kept if not any(x is array for array in leased)])
        self.versions = [(x, x.storage.version) for x in kept if isinstance(x, Array)]

    def checked(self, name: str) -> Context:
        """Return the context. Raises GradientError if one of its arrays was changed in place."""
        for array, version in self.versions:
            if array.storage.version != version:
                raise GradientError(
                    f"{name} needs a tensor of shape {array.shape} for its gradient, and it was changed in place"
                    f" (version {array.storage.version}, saved at {version})",
                    next="use the out-of-place form, or clone() before the change",
                )
        return self.context


class Node(BaseNode):
    """A recorded call of an op. Under checkpointing, `recompute` returns the dropped context."""

    __slots__ = ("op", "recompute", "saved")

    def __init__(
        self,
        op: Op,
        saved: Saved | None,
        edges: tuple[Edge | None, ...],
        specs: tuple[Spec | None, ...],
        recompute: Callable[[], Saved] | None = None,
    ) -> None:
        BaseNode.__init__(self, op.name, edges, specs)
        self.op, self.saved, self.recompute = op, saved, recompute

    def apply(
        self, grads: list[Array | None], step: BackwardStep, prepare: Callable[[Node, Context], Context] | None = None
    ) -> Sequence[Array | None]:
        if not self.edges:  # an op without inputs overwrote a tensor, so earlier history has no gradient
            return ()
        if self.saved is None and self.recompute is not None:
            self.saved = self.recompute()
        if self.saved is None:
            raise self.released()
        context = self.saved.checked(self.name)
        step.leases = context.leases
        if prepare is not None:
            context = prepare(self, context)
        context = context.during(step)
        try:
            input_grads = self.op.gradient(context, *grads)
        finally:
            context._step = None  # a reference back to this node
        assert len(input_grads) == len(self.edges), (
            f"{self.name}: {len(input_grads)} gradients for {len(self.edges)} inputs"
        )
        return [
            g if g is None or (g.spec == spec and self.edges[i] is not None) else self._fit(i, g, spec)
            for i, (g, spec) in enumerate(zip(input_grads, context.input_specs, strict=True))
        ]

    def _fit(self, i: int, grad: Array | None, spec: Spec | None) -> Array | None:
        """Sum a gradient over broadcast dimensions and cast it to the input's dtype."""
        if grad is None or spec is None or self.edges[i] is None:
            return None
        if grad.shape != spec.shape:
            assert self.op.elementwise, f"{self.name}: gradient {grad.shape} for an input of shape {spec.shape}"
            grad = registry["sum_to_shape"](grad, shape=spec.shape)
        if grad.dtype is not spec.dtype:
            grad = registry["cast"](grad, dtype=spec.dtype)
        return grad

    def release(self) -> None:
        # A node that saved nothing may run backward a second time, as in torch.
        self.recompute = None
        if self.saved is not None and self.saved.versions:
            self.saved = None


_PACKAGE = str(Path(__file__).parents[1])


def calling_line() -> str:
    """file:line of the innermost caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# --- Gradient slots ---------------------------------------------------------------------------------------------------


_lock = threading.Lock()


def is_same_window(x: Array, y: Array) -> bool:
    """Whether two arrays view the same elements of the same memory."""
    return x.storage is y.storage and (x.offset, x.shape, x.strides, x.dtype) == (y.offset, y.shape, y.strides, y.dtype)


class Lease:
    """One use of a slot, through its own `array`. If `is_movable`, its values move when the slot is claimed."""

    __slots__ = ("__weakref__", "array", "is_movable")

    def __init__(self, array: Array, is_movable: bool) -> None:
        self.array, self.is_movable = array, is_movable

    def move_out(self) -> None:
        """Move the values of `array` to new memory. References to `array` stay valid."""
        copy, array = registry["copy"](self.array), self.array
        array.storage, array.strides, array.offset = copy.storage, copy.strides, copy.offset
        array._np = array.layout = None
        self.is_movable = False


class GradientSlot:
    """The memory of one leaf's gradient.

    Args:
        array: contiguous memory of the leaf's shape.
        is_wider: whether its dtype is wider than the leaf's. Gradients are then accumulated from elsewhere.

    Attributes:
        idle_memory: returns memory next to the slot that currently holds no gradient, or None.
        arrived: called when the leaf has its final gradient of a backward pass. The side stream may still be computing
            it, so a reader must join that stream first.
    """

    __slots__ = ("_lease", "array", "arrived", "idle_memory", "is_wider")

    def __init__(self, array: Array, is_wider: bool = False) -> None:
        self.array, self.is_wider = array, is_wider
        self.idle_memory: Callable[[], Array | None] = lambda: None
        self.arrived: Callable[[], None] | None = None
        self._lease: weakref.ref[Lease] | None = None

    def lease(self, is_movable: bool) -> Lease | None:
        """Lease the slot for a gradient of the leaf's dtype. None if the slot is in use or wider than the leaf."""
        if self.is_wider:
            return None
        array = self.array
        with _lock:
            if self.is_leased:
                return None
            lease = Lease(array.view(array.shape, contiguous_strides(array.shape)), is_movable)
            self._lease = weakref.ref(lease)
            return lease

    @property
    def is_leased(self) -> bool:
        """Whether the slot holds, or will hold, something other than the accumulated gradient."""
        return self._lease is not None and self._lease() is not None

    def claim(self) -> Array | None:
        """Take the memory for the accumulated gradient and move an op's values out. None while a pass uses it."""
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            if not lease.is_movable:
                return None if lease.array.storage is self.array.storage else self.array
            lease.move_out()
        self._lease = None
        return self.array


def __getattr__(name: str) -> Any:
    if name in ("save_on_cpu", "saved_tensors_hooks"):  # torch's place for them; loaded at first use
        return getattr(importlib.import_module("genesis.autograd.saved_hooks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
