"""The tape: nodes, edges, and the walk backward. It works on arrays and knows nothing of Tensor.

The walk is iterative (a chain of 10,000 ops is fine). A node runs once all its consumers have run; among those that are
ready, the one recorded last goes first. Gradients that meet are added in that order, so results are reproducible.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from genesis.array import Array
from genesis.autograd.modes import is_anomaly_enabled
from genesis.errors import GradientError, NumericError
from genesis.op import Context, Op, Spec, registry

__all__ = ["AccumulateNode", "BaseNode", "Edge", "Node", "Saved", "calling_line", "run_backward"]

_sequence = itertools.count(1)

GradHook = Callable[[Array], Array | None]


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
        self.line = calling_line() if is_anomaly_enabled() else ""
        self.hooks: list[tuple[int, GradHook]] = []  # (slot, hook on the gradient of that output)

    def apply(self, grads: list[Array | None]) -> Sequence[Array | None]:
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
        self.versions = [(x, x.storage.version) for x in context.inputs + context.outputs if isinstance(x, Array)]

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

    def apply(self, grads: list[Array | None]) -> Sequence[Array | None]:
        if not self.edges:  # an op without inputs that wrote over a tensor: what lay before it does not count
            return ()
        if self.saved is None and self.recompute is not None:
            self.saved = self.recompute()
        if self.saved is None:
            raise self.released()
        context = self.saved.checked(self.name)
        found = self.op.gradient(context, *grads)
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


class AccumulateNode(BaseNode):
    """The end of the tape at a leaf: hands the finished gradient to `sink`."""

    __slots__ = ("sink",)

    def __init__(self, spec: Spec, sink: Callable[[Array], None]) -> None:
        super().__init__("accumulate", (), (spec,))
        self.sink = sink

    def apply(self, grads: list[Array | None]) -> Sequence[Array | None]:
        if grads[0] is not None:
            self.sink(grads[0])
        return ()


def _consumers(roots: Sequence[Edge]) -> dict[BaseNode, int]:
    """How many edges of the reachable graph lead into each node."""
    counts: dict[BaseNode, int] = {edge.node: 0 for edge in roots}
    stack = list(counts)
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            if edge.node not in counts:
                counts[edge.node] = 0
                stack.append(edge.node)
            counts[edge.node] += 1
    return counts


def _leading_to(targets: Sequence[Edge], nodes: Sequence[BaseNode]) -> set[BaseNode]:
    """Those of `nodes` that have to run for gradients to arrive at `targets`."""
    ends = {edge.node for edge in targets}
    leading: set[BaseNode] = set()
    for node in sorted(nodes, key=lambda n: n.sequence):  # what a node's edges lead to was recorded before it
        if any(edge is not None and (edge.node in ends or edge.node in leading) for edge in node.edges):
            leading.add(node)
    return leading


def run_backward(
    roots: Sequence[tuple[Edge, Array]], *, retain_graph: bool = False, capture: Sequence[Edge] | None = None
) -> list[Array | None]:
    """Send gradients from `roots` to the leaves, or to `capture`.

    Args:
        roots: edges with the gradient of the loss at each.
        retain_graph: keep what nodes saved, for another call.
        capture: edges whose gradients are returned; leaves then accumulate nothing.

    Returns:
        The gradients at `capture` (None where none arrived), else an empty list.
    """
    waiting = _consumers([edge for edge, _ in roots])
    grads: dict[BaseNode, list[Array | None]] = {}
    owned: set[tuple[BaseNode, int]] = set()
    for edge, grad in roots:
        _add(grads, owned, edge, grad)
    wanted = {edge: i for i, edge in enumerate(capture or ())}
    running = set(waiting) if capture is None else _leading_to(capture, list(waiting))
    found: list[Array | None] = [None] * len(wanted)
    ready = [(-node.sequence, node) for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        slots = grads.pop(node, None)
        if slots is not None:
            _run_hooks(node, slots)
            for slot, value in enumerate(slots):
                owned.discard((node, slot))
                if (index := wanted.get(Edge(node, slot))) is not None:
                    found[index] = value
            if node in running:
                _step(node, slots, grads, owned, retain_graph)
        for below in (e.node for e in node.edges if e is not None):
            waiting[below] -= 1
            if waiting[below] == 0:
                heapq.heappush(ready, (-below.sequence, below))
    return found


def _step(
    node: BaseNode,
    slots: list[Array | None],
    grads: dict[BaseNode, list[Array | None]],
    owned: set[tuple[BaseNode, int]],
    retain_graph: bool,
) -> None:
    """Run one node and pass its gradients on."""
    produced = node.apply(slots)
    if is_anomaly_enabled():
        _check_finite(node, produced)
    for edge, grad in zip(node.edges, produced, strict=False):
        if edge is not None and grad is not None:
            _add(grads, owned, edge, grad)
    if not retain_graph:
        node.release()


def _add(grads: dict[BaseNode, list[Array | None]], owned: set[tuple[BaseNode, int]], edge: Edge, grad: Array) -> None:
    """Add a gradient to what already arrived at an edge; the first is kept as it is, the sum is ours to add into."""
    slots = grads.setdefault(edge.node, [None] * len(edge.node.specs))
    have = slots[edge.slot]
    if have is None:
        slots[edge.slot] = grad
    elif edge in owned:
        registry["add"](have, grad, out=have)
    else:
        slots[edge.slot] = registry["add"](have, grad)
        owned.add((edge.node, edge.slot))


def _run_hooks(node: BaseNode, slots: list[Array | None]) -> None:
    for slot, hook in tuple(node.hooks):
        grad = slots[slot]
        if grad is not None:
            replaced = hook(grad)
            if replaced is not None:
                if replaced.shape != grad.shape:
                    raise GradientError(
                        f"a hook on the gradient of {node.name} returned shape {replaced.shape} for {grad.shape}"
                    )
                slots[slot] = replaced if replaced.dtype is grad.dtype else registry["cast"](replaced, dtype=grad.dtype)


def _check_finite(node: BaseNode, produced: Sequence[Array | None]) -> None:
    for i, grad in enumerate(produced):
        if grad is not None and grad.dtype.is_floating_point and bool(np.isnan(grad.numpy().astype(np.float64)).any()):
            raise NumericError(
                f"the gradient of {node.name} for its input {i} is NaN",
                where=node.line or "the forward call was recorded without anomaly detection",
                next="look at the values that reach this op",
            )


_PACKAGE = str(Path(__file__).parents[1])


def calling_line() -> str:
    """file:line of the innermost caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
