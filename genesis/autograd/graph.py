"""The tape: nodes, edges, what nodes keep, and the slots of leaves' gradients in flat buffers.

It works on arrays and knows no Tensor; engine.py runs it backward. A slot is in use while a `Lease` of it lives. An
op's forward may hold one (`Op.gradient_outputs`): it ends with the graph, so a forward whose backward never comes keeps
nothing. A backward pass holds those that it gave to vjps, until it ends.
"""

from __future__ import annotations

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
    """What follows the tape while a profile is made: `runs_backward` is entered around a pass, `runs` around a vjp."""

    def recorded(self, node: BaseNode) -> None: ...
    def runs_backward(self) -> AbstractContextManager[None]: ...
    def runs(self, node: BaseNode) -> AbstractContextManager[None]: ...


tape_watches: list[TapeWatch] = []  # none but while somebody looks, at most one


@contextmanager
def watching_tape(watch: TapeWatch) -> Iterator[None]:
    """Tell `watch` of what is recorded and run backward inside the block."""
    assert not tape_watches, "the tape is watched already"
    tape_watches.append(watch)
    try:
        yield
    finally:
        tape_watches.clear()


class Edge(NamedTuple):
    """One output of a node: where the gradient of one tensor goes."""

    node: BaseNode
    output: int


class HookHandle:
    """Takes a hook off its tensor or module: by `remove()`, by a call, or at the end of a `with` block."""

    __slots__ = ("_take_off",)

    def __init__(self, take_off: Callable[[], Any]) -> None:
        self._take_off: Callable[[], Any] | None = take_off

    def remove(self) -> None:
        """Take the hook off; a second call does nothing."""
        take_off, self._take_off = self._take_off, None
        if take_off is not None:
            take_off()

    __call__ = remove

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class BaseNode:
    """What the engine needs of a node: its inputs' edges, its outputs' specs, its place in recording order."""

    __slots__ = ("__weakref__", "edges", "hooks", "line", "name", "sequence", "specs")

    def __init__(self, name: str, edges: tuple[Edge | None, ...], specs: tuple[Spec | None, ...]) -> None:
        self.name, self.edges, self.specs = name, edges, specs
        self.sequence = next(_sequence)
        self.line = calling_line() if mode.anomaly else ""
        self.hooks: list[tuple[int, GradHook]] = []  # (output, hook on its gradient)
        if tape_watches:
            tape_watches[0].recorded(self)

    def apply(self, grads: list[Array | None], step: BackwardStep) -> Sequence[Array | None]:
        """Gradients of the inputs from those of the outputs."""
        raise NotImplementedError

    def release(self) -> None:
        """Drop what backward needed."""

    def released(self) -> GradientError:
        """The error of a second backward pass."""
        return GradientError(
            f"backward reached {self.name} a second time and what it had saved is gone",
            next="pass retain_graph=True to the first backward()",
        )


class Saved:
    """A context with the versions that its arrays had when it was made."""

    __slots__ = ("context", "versions")

    def __init__(self, context: Context) -> None:
        self.context = context
        kept: tuple[Any, ...] = context.inputs + context.outputs
        if context.leases:  # in a buffer whose other elements change
            leased = [lease.array for lease in context.leases.values()]
            kept = tuple([x for x in kept if not any(x is array for array in leased)])
        self.versions = [(x, x.storage.version) for x in kept if isinstance(x, Array)]

    def checked(self, name: str) -> Context:
        """The context. Raises: GradientError, if one of its arrays was changed in place since."""
        for array, version in self.versions:
            if array.storage.version != version:
                raise GradientError(
                    f"a tensor of shape {array.shape} that {name} needs for its gradient was changed in place"
                    f" (version {array.storage.version}, saved at {version})",
                    next="use the out-of-place form, or clone() before the change",
                )
        return self.context


class Node(BaseNode):
    """A recorded call of an op. `recompute`, under checkpointing, gives what was not kept."""

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

    def apply(self, grads: list[Array | None], step: BackwardStep) -> Sequence[Array | None]:
        if not self.edges:  # an op without inputs that wrote over a tensor: what lay before it does not count
            return ()
        if self.saved is None and self.recompute is not None:
            self.saved = self.recompute()
        if self.saved is None:
            raise self.released()
        context = self.saved.checked(self.name)
        step.leases = context.leases
        found = self.op.gradient(context.during(step), *grads)
        assert len(found) == len(self.edges), f"{self.name}: {len(found)} gradients for {len(self.edges)} inputs"
        return [self._fit(i, g, context.input_specs[i]) for i, g in enumerate(found)]

    def _fit(self, i: int, grad: Array | None, spec: Spec | None) -> Array | None:
        """Sum a gradient over broadcast dimensions and give it the input's dtype."""
        if grad is None or spec is None or self.edges[i] is None:
            return None
        if grad.shape != spec.shape:
            assert self.op.elementwise, f"{self.name}: gradient {grad.shape} for an input of shape {spec.shape}"
            grad = registry["sum_to_shape"](grad, shape=spec.shape)
        if grad.dtype is not spec.dtype:
            grad = registry["cast"](grad, dtype=spec.dtype)
        return grad

    def release(self) -> None:
        # A node that saved no values has nothing to release and may run backward again, as in torch.
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
    """Whether two arrays are the same elements of the same memory."""
    return x.storage is y.storage and (x.offset, x.shape, x.strides, x.dtype) == (y.offset, y.shape, y.strides, y.dtype)


class Lease:
    """One use of a slot, an array of its own. `is_movable`: its values may be moved when others need the slot."""

    __slots__ = ("__weakref__", "array", "is_movable")

    def __init__(self, array: Array, is_movable: bool) -> None:
        self.array, self.is_movable = array, is_movable

    def move_out(self) -> None:
        """Give `array` other memory with the same values; all who hold it read them there."""
        copy, array = registry["copy"](self.array), self.array
        array.storage, array.strides, array.offset = copy.storage, copy.strides, copy.offset
        array._np = array.layout = None
        self.is_movable = False


class GradientSlot:
    """The memory of one leaf's gradient.

    Args:
        array: contiguous, of the leaf's shape.
        is_wider: whether its dtype is wider than the leaf's; gradients are then made elsewhere and added there.

    Attributes:
        idle_memory: gives memory next to the slot in which no gradient is stored now, if there is some.
        arrived: called when the leaf has the finished gradient of a backward pass, which the side stream may still be
            making: nothing has joined it. None while nobody asks.
    """

    __slots__ = ("_lease", "array", "arrived", "idle_memory", "is_wider")

    def __init__(self, array: Array, is_wider: bool = False) -> None:
        self.array, self.is_wider = array, is_wider
        self.idle_memory: Callable[[], Array | None] = lambda: None
        self.arrived: Callable[[], None] | None = None
        self._lease: weakref.ref[Lease] | None = None

    def lease(self, is_movable: bool) -> Lease | None:
        """Use the slot for a gradient of the leaf's dtype; None where it is in use or of another."""
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
        """Whether something but the gradient itself is stored in the slot, or will be."""
        return self._lease is not None and self._lease() is not None

    def claim(self) -> Array | None:
        """The memory, for the gradient itself: what an op keeps there moves out. None while a backward pass uses it."""
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            if not lease.is_movable:
                return None if lease.array.storage is self.array.storage else self.array
            lease.move_out()
        self._lease = None
        return self.array
