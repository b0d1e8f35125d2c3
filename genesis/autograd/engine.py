"""The tape: nodes, edges and what nodes keep. It works on arrays and knows nothing of Tensor; walk.py walks it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from genesis.array import Array
from genesis.autograd.homes import HomeUse
from genesis.autograd.modes import mode
from genesis.errors import GradientError
from genesis.op import Context, Op, Spec, registry

if TYPE_CHECKING:
    from genesis.autograd.walk import Arrivals

__all__ = [
    "AccumulateNode",
    "BaseNode",
    "Edge",
    "Leaf",
    "Node",
    "Saved",
    "TapeWatch",
    "calling_line",
    "tape_watches",
    "watching_tape",
]

_sequence = itertools.count(1)

GradHook = Callable[[Array], Array | None]


class TapeWatch(Protocol):
    """What is told of the tape while a profile is made."""

    def recorded(self, node: BaseNode) -> None:
        """A node was made."""

    def walks(self) -> AbstractContextManager[None]:
        """Around a walk backward."""

    def runs(self, node: BaseNode) -> AbstractContextManager[None]:
        """Around the vjp of a node, and what is done with its gradients."""


tape_watches: list[TapeWatch] = []  # none but while somebody looks, at most one


@contextmanager
def watching_tape(watch: TapeWatch) -> Iterator[None]:
    """Tell `watch` of what is recorded and walked inside the block."""
    assert not tape_watches, "the tape is watched already"
    tape_watches.append(watch)
    try:
        yield
    finally:
        tape_watches.clear()


class Edge(NamedTuple):
    """One output of a node: where the gradient of one tensor goes."""

    node: BaseNode
    slot: int


class BaseNode:
    """What the walk needs of a node: its inputs' edges, its outputs' specs, its place in recording order."""

    __slots__ = ("__weakref__", "edges", "hooks", "line", "name", "sequence", "specs")

    def __init__(self, name: str, edges: tuple[Edge | None, ...], specs: tuple[Spec | None, ...]) -> None:
        self.name, self.edges, self.specs = name, edges, specs
        self.sequence = next(_sequence)
        self.line = calling_line() if mode.anomaly else ""
        self.hooks: list[tuple[int, GradHook]] = []  # (slot, hook on the gradient of that output)
        if tape_watches:
            tape_watches[0].recorded(self)

    def apply(self, grads: list[Array | None], arrivals: Arrivals) -> Sequence[Array | None]:
        """Gradients of the inputs from those of the outputs."""
        raise NotImplementedError

    def release(self) -> None:
        """Drop what backward needed."""

    def released(self) -> GradientError:
        """The error of a second walk."""
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
        if context.lent:  # in a buffer that others write beside it
            lent = [use.array for use in context.lent.values()]
            kept = tuple([x for x in kept if not any(x is array for array in lent)])
        self.versions = [(x, x.storage.version) for x in kept if isinstance(x, Array)]

    def checked(self, name: str) -> Context:
        """The context.

        Raises:
            GradientError: if one of its arrays was changed in place since.
        """
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

    def apply(self, grads: list[Array | None], arrivals: Arrivals) -> Sequence[Array | None]:
        if not self.edges:  # an op without inputs that wrote over a tensor: what lay before it does not count
            return ()
        if self.saved is None and self.recompute is not None:
            self.saved = self.recompute()
        if self.saved is None:
            raise self.released()
        context = self.saved.checked(self.name)
        arrivals.lent = context.lent
        found = self.op.gradient(context.during(arrivals), *grads)
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
        # A node that saved no values has nothing to release and may be walked again, as in torch.
        self.recompute = None
        if self.saved is not None and self.saved.versions:
            self.saved = None


class Leaf(Protocol):
    """What the tape needs of a leaf."""

    def receive(self, grad: Array, is_total: bool) -> None:
        """Take the finished gradient of a walk; `is_total` says that it includes what `held` gave."""

    def held(self) -> Array | None:
        """The gradient of walks before."""

    def lend(self) -> HomeUse | None:
        """The place of the gradient, where it is free and no gradient is held."""


class AccumulateNode(BaseNode):
    """The end of the tape at a leaf: hands the finished gradient over."""

    __slots__ = ("leaf",)

    def __init__(self, spec: Spec, leaf: Leaf) -> None:
        super().__init__("accumulate", (), (spec,))
        self.leaf = leaf

    def apply(self, grads: list[Array | None], arrivals: Arrivals) -> Sequence[Array | None]:
        if grads[0] is not None:
            self.leaf.receive(grads[0], arrivals.is_total)
        return ()


_PACKAGE = str(Path(__file__).parents[1])


def calling_line() -> str:
    """file:line of the innermost caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
