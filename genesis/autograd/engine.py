"""The engine of backward passes: gradients on their way from the loss to the leaves. `backward` and `grad` start one.

It is iterative (a chain of 10,000 ops is fine). A node runs once all its consumers have run; among those that are
ready, leaves go first, so that a gradient which is added up elsewhere is not kept until the end, and then the node that
was recorded last. Gradients that meet are added in that order, so results are reproducible.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from genesis.array import Array, empty
from genesis.autograd.autocast import autocasting, resumed, settings
from genesis.autograd.graph import BaseNode, Edge, is_same_window, tape_watches
from genesis.autograd.modes import is_anomaly_enabled, no_grad
from genesis.autograd.record import AccumulateNode, TensorBase
from genesis.errors import GradientError, NumericError, ShapeError
from genesis.op import Accumulated, GradientLease, registry

units: weakref.WeakSet[Array] = weakref.WeakSet()  # the 1s with which passes start at losses


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
    """Those of `nodes` that have to run for gradients to reach `targets`."""
    ends = {edge.node for edge in targets}
    leading: set[BaseNode] = set()
    for node in sorted(nodes, key=lambda n: n.sequence):  # what a node's edges lead to was recorded before it
        if any(edge is not None and (edge.node in ends or edge.node in leading) for edge in node.edges):
            leading.add(node)
    return leading


class BackwardPass:
    """The gradients of one backward pass that nodes which have not run yet have accumulated.

    Attributes:
        grads: by node, a gradient for each of its outputs.
        owned: edges whose gradient may be written over: a sum that the engine made, or one in a gradient slot.
        leases: by leaf, the use of its gradient slot in this pass.
        totals: leaves for which a vjp took the gradient of passes before, so that theirs includes it.
    """

    def __init__(self, retain_graph: bool, to_leaves: bool) -> None:
        self.retain_graph, self.to_leaves = retain_graph, to_leaves
        self.grads: dict[BaseNode, list[Array | None]] = {}
        self.owned: set[Edge] = set()
        self.leases: dict[BaseNode, GradientLease] = {}
        self.totals: set[BaseNode] = set()

    def accumulated(self, edge: Edge) -> Array | None:
        """The gradient of an edge so far."""
        grads = self.grads.get(edge.node)
        return None if grads is None else grads[edge.output]

    def add(self, edge: Edge, grad: Array, is_own: bool = False) -> None:
        """Accumulate a gradient: the first of an edge is kept as it is, sums are ours to add into."""
        grads = self.grads.setdefault(edge.node, [None] * len(edge.node.specs))
        have = grads[edge.output]
        if have is None:
            grads[edge.output] = grad
            if not is_own:
                return
        else:
            have.storage.backend.join_side_stream()  # either may have been made there
            if edge in self.owned:
                registry["add"](have, grad, out=have)
            else:
                grads[edge.output] = registry["add"](have, grad, out=grad if is_own else self.lease(edge))
        self.owned.add(edge)

    def lease(self, edge: Edge) -> Array | None:
        """The gradient slot of a leaf, if it is free, for the one gradient or sum of this pass."""
        node = edge.node
        if not self.to_leaves or not isinstance(node, AccumulateNode) or node.hooks or node in self.leases:
            return None
        lease = node.lease()
        if lease is None:
            return None
        self.leases[node] = lease
        return lease.array

    def of_passes_before(self, edge: Edge) -> Array | None:
        """A leaf's gradient of passes before, once; a hook is to see the gradient of this pass alone."""
        node = edge.node
        if not self.to_leaves or not isinstance(node, AccumulateNode) or node.hooks or node in self.totals:
            return None
        found = node.accumulated()
        if found is None or found.spec != node.specs[0] or not found.is_contiguous:
            return None
        self.totals.add(node)
        return found

    def pop(self, node: BaseNode) -> list[Array | None] | None:
        """The gradients of a node that is about to run."""
        grads = self.grads.pop(node, None)
        if grads is not None and self.owned:
            for output in range(len(grads)):
                self.owned.discard(Edge(node, output))
        return grads

    def run(self, node: BaseNode, grads: list[Array | None]) -> None:
        """Run one node and pass its gradients on."""
        step = _Step(self, node)
        produced = node.apply(grads, step)
        if is_anomaly_enabled():
            _check_finite(node, produced)
        for i, (edge, grad) in enumerate(zip(node.edges, produced, strict=False)):
            if edge is not None and grad is not None:
                self.add(edge, *step.settled(i, edge, grad))
        step.finish(produced)
        if not self.retain_graph:
            node.release()


class _Step:
    """One node's step of a backward pass: what its vjp may ask of the engine, see `op.BackwardStep`."""

    __slots__ = ("given", "leases", "node", "of", "taken")

    def __init__(self, of: BackwardPass, node: BaseNode) -> None:
        self.of, self.node = of, node
        self.given: dict[int, Array] = {}  # gradient slots, by input
        self.taken: set[int] = set()  # inputs whose accumulated gradient the vjp has
        self.leases: Mapping[int, GradientLease] = {}

    @property
    def is_last(self) -> bool:
        return not self.of.retain_graph

    def is_unit(self, grad: Array) -> bool:
        """See Context.is_unit."""
        return grad in units

    @property
    def is_total(self) -> bool:
        return self.node in self.of.totals

    def gradient_slot(self, i: int) -> Array | None:
        """See Context.gradient_slot."""
        edge = self.node.edges[i]
        if edge is None or self.of.accumulated(edge) is not None:
            return None
        slot = self.of.lease(edge)
        if slot is not None:
            self.given[i] = slot
        return slot

    def take_accumulated(self, i: int) -> Accumulated | None:
        """See Context.take_accumulated."""
        edge = self.node.edges[i]
        if edge is None:
            return None
        found, is_own = self.of.accumulated(edge), edge in self.of.owned
        if found is not None:
            found.storage.backend.join_side_stream()
            self.of.grads[edge.node][edge.output] = None
            self.of.owned.discard(edge)
        else:
            found, is_own = self.of.of_passes_before(edge), True
        if found is None:
            return None
        self.taken.add(i)
        return Accumulated(found, is_own)

    def settled(self, i: int, edge: Edge, grad: Array) -> tuple[Array, bool]:
        """The gradient of input `i` as it is passed on, and whether the engine may write over it."""
        slot = self.given.get(i)
        if slot is not None:
            if is_same_window(slot, grad):
                return grad, True
            del self.of.leases[edge.node]
        for lease in self.leases.values():
            if is_same_window(lease.array, grad):  # made in forward
                if not self.of.to_leaves or edge.node.hooks:
                    return registry["copy"](grad), True  # it goes to the user, whose memory stays as it is
                lease.is_movable = False
                self.of.leases[edge.node] = lease
                return grad, True
        return grad, i in self.taken

    def finish(self, produced: Sequence[Array | None]) -> None:
        """Give gradient slots back that got nothing."""
        for i in self.taken:
            assert produced[i] is not None, f"{self.node.name} took the gradient of input {i} and gave none back"
        for i in self.given:
            edge = self.node.edges[i]
            if edge is not None and produced[i] is None:
                del self.of.leases[edge.node]


def run_backward(
    roots: Sequence[tuple[Edge, Array]], *, retain_graph: bool = False, capture: Sequence[Edge] | None = None
) -> list[Array | None]:
    """Send gradients from `roots`, edges with the gradient of the loss at each, to the leaves, or to `capture`.

    Args:
        retain_graph: keep what nodes saved, for another call.
        capture: edges whose gradients are returned (None where there is none); leaves then accumulate nothing.
    """
    # Hooks and custom functions compute in the types that they are given.
    no_autocast = resumed(settings()._replace(low={})) if autocasting.low else nullcontext()
    with no_grad(), no_autocast, tape_watches[0].runs_backward() if tape_watches else nullcontext():
        waiting = _consumers([edge for edge, _ in roots])
        current = BackwardPass(retain_graph, to_leaves=capture is None)
        for edge, grad in roots:
            current.add(edge, grad)
        wanted = {edge: i for i, edge in enumerate(capture or ())}
        running = set(waiting) if capture is None else _leading_to(capture, list(waiting))
        found: list[Array | None] = [None] * len(wanted)
        ready = [(_turn(node), node) for node, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            _, node = heapq.heappop(ready)
            grads = current.pop(node)
            if grads is not None:
                _run_hooks(node, grads)
                for output, value in enumerate(grads):
                    if (index := wanted.get(Edge(node, output))) is not None:
                        found[index] = value
                if node in running:
                    if tape_watches:
                        with tape_watches[0].runs(node):
                            current.run(node, grads)
                    else:
                        current.run(node, grads)
            for below in (e.node for e in node.edges if e is not None):
                waiting[below] -= 1
                if waiting[below] == 0:
                    heapq.heappush(ready, (_turn(below), below))
        for _, grad in roots[:1]:
            grad.storage.backend.join_side_stream()
        return found


def _turn(node: BaseNode) -> tuple[bool, int]:
    """What nodes that are ready are sorted by: a leaf was seen first in some pass before, and must not wait."""
    return not isinstance(node, AccumulateNode), -node.sequence


def _run_hooks(node: BaseNode, grads: list[Array | None]) -> None:
    for output, hook in tuple(node.hooks):
        grad = grads[output]
        replaced = None if grad is None else hook(grad)
        if grad is None or replaced is None:
            continue
        if replaced.shape != grad.shape:
            raise GradientError(
                f"a hook on the gradient of {node.name} returned shape {replaced.shape} for {grad.shape}"
            )
        grads[output] = replaced if replaced.dtype is grad.dtype else registry["cast"](replaced, dtype=grad.dtype)


def _check_finite(node: BaseNode, produced: Sequence[Array | None]) -> None:
    for i, grad in enumerate(produced):
        if grad is not None and grad.dtype.is_floating_point and bool(np.isnan(grad.numpy().astype(np.float64)).any()):
            raise NumericError(
                f"the gradient of {node.name} for its input {i} is NaN",
                where=node.line or "the forward call was recorded without anomaly detection",
                next="look at the values that reach this op",
            )


# --- What users call --------------------------------------------------------------------------------------------------


def _seed(tensor: TensorBase, gradient: TensorBase | None) -> tuple[Edge, Array]:
    """The edge of an output with the gradient that enters there."""
    edge, array = tensor.edge(), tensor.array
    if edge is None:
        raise GradientError(
            "backward() of a tensor that requires no gradient", next="set requires_grad on a leaf it uses"
        )
    if gradient is None:
        if array.size != 1:
            raise GradientError(
                f"backward() without a gradient needs a tensor of one element, this one has shape {array.shape}",
                next="reduce it with .sum() or .mean(), or pass gradient=",
            )
        ones = empty(array.shape, array.dtype, array.device)
        registry["fill"](out=ones, value=1, shape=array.shape, dtype=array.dtype)
        units.add(ones)
        return edge, ones
    given = gradient.array
    if given.shape != array.shape:
        raise ShapeError(f"the gradient has shape {given.shape}, the tensor has {array.shape}")
    return edge, given if given.dtype is array.dtype else registry["cast"](given, dtype=array.dtype)


def _listed(what: str, given: Any, optional: bool = False) -> list[Any]:
    """One tensor or several as a list, with Nones if these are `optional`."""
    if isinstance(given, TensorBase):
        return [given]
    found = list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        if not (isinstance(each, TensorBase) or (optional and each is None)):
            raise GradientError(f"{what} is a value of type {type(each).__name__}", next="give tensors")
    return found


def _roots(tensors: TensorBase | Sequence[TensorBase], gradients: Any, create_graph: bool) -> list[tuple[Edge, Array]]:
    if create_graph:
        raise GradientError("create_graph is not supported: gradients are not themselves differentiable")
    outputs = _listed("an output", tensors)
    given = [None] if gradients is None else _listed("a gradient", gradients, optional=True)
    if len(given) == 1 and given[0] is None:
        given *= len(outputs)
    if len(given) != len(outputs):
        raise GradientError(f"{len(outputs)} tensors with {len(given)} gradients")
    return [_seed(t, g) for t, g in zip(outputs, given, strict=True)]


def backward(
    tensors: TensorBase | Sequence[TensorBase],
    gradient: TensorBase | Sequence[TensorBase | None] | None = None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> None:
    """Accumulate the gradient of one tensor or several into `.grad` of the leaves they depend on.

    Args:
        gradient: the gradient of the final value with respect to each; may be left out for one-element tensors.
        retain_graph: keep the recorded graph for another call.
        create_graph: not supported.

    Raises:
        GradientError: for a tensor that requires no gradient, a second pass over a released graph, create_graph.
    """
    run_backward(_roots(tensors, gradient, create_graph), retain_graph=retain_graph)


def grad(
    outputs: TensorBase | Sequence[TensorBase],
    inputs: TensorBase | Sequence[TensorBase],
    grad_outputs: TensorBase | Sequence[TensorBase | None] | None = None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Any, ...]:
    """The gradients of `outputs` with respect to `inputs`, without touching any `.grad`.

    Raises:
        GradientError: if an input requires no gradient, or is unused and `allow_unused` is not set.
    """
    wanted = _listed("an input", inputs)
    edges = [t.edge() for t in wanted]
    present = [e for e in edges if e is not None]
    if len(present) != len(edges):
        raise GradientError("grad() of an input that requires no gradient", next="set requires_grad_() on it first")
    roots = _roots(outputs, grad_outputs, create_graph)
    unique = list(dict.fromkeys(present))
    found = dict(zip(unique, run_backward(roots, retain_graph=retain_graph, capture=unique), strict=True))
    result = tuple(found[e] for e in present)
    if not allow_unused and any(g is None for g in result):
        raise GradientError("an input of grad() is not used by the outputs", next="pass allow_unused=True")
    return tuple(None if g is None else TensorBase.wrap(g) for g in result)
