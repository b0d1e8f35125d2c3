"""The walk backward: gradients on their way from the loss to the leaves.

It is iterative (a chain of 10,000 ops is fine). A node runs once all its consumers have run; among those that are
ready, leaves go first, so that a gradient which is added up elsewhere is not kept until the end, and then the node that
was recorded last. Gradients that meet are added in that order, so results are reproducible.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from genesis.array import Array
from genesis.autograd.engine import AccumulateNode, BaseNode, Edge, tape_watches
from genesis.autograd.homes import HomeUse, is_same_window
from genesis.autograd.modes import is_anomaly_enabled
from genesis.errors import GradientError, NumericError
from genesis.op import Taken, registry

__all__ = ["Arrivals", "Walk", "run_backward", "units"]

units: weakref.WeakSet[Array] = weakref.WeakSet()  # the 1s with which walks start at losses


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


class Walk:
    """The gradients of one walk that have arrived at nodes which have not run yet.

    Attributes:
        grads: by node, a gradient for each of its outputs.
        owned: edges whose gradient may be written over: a sum that the walk made, or one in a leaf's place.
        uses: by leaf, the use of its place for a gradient of this walk.
        totals: leaves for which a vjp took the gradient of walks before, so that theirs includes it.
    """

    def __init__(self, retain_graph: bool, to_leaves: bool) -> None:
        self.retain_graph, self.to_leaves = retain_graph, to_leaves
        self.grads: dict[BaseNode, list[Array | None]] = {}
        self.owned: set[Edge] = set()
        self.uses: dict[BaseNode, HomeUse] = {}
        self.totals: set[BaseNode] = set()

    def arrived(self, edge: Edge) -> Array | None:
        """What arrived at an edge so far."""
        slots = self.grads.get(edge.node)
        return None if slots is None else slots[edge.slot]

    def add(self, edge: Edge, grad: Array, is_own: bool = False) -> None:
        """Add a gradient to what arrived at an edge: the first is kept as it is, sums are ours to add into."""
        slots = self.grads.setdefault(edge.node, [None] * len(edge.node.specs))
        have = slots[edge.slot]
        if have is None:
            slots[edge.slot] = grad
            if not is_own:
                return
        else:
            have.storage.backend.join()  # either may have been made beside
            if edge in self.owned:
                registry["add"](have, grad, out=have)
            else:
                slots[edge.slot] = registry["add"](have, grad, out=grad if is_own else self.lend(edge))
        self.owned.add(edge)

    def lend(self, edge: Edge) -> Array | None:
        """The place of a leaf's gradient, if it is free, for the one gradient or sum of this walk."""
        node = edge.node
        if not self.to_leaves or not isinstance(node, AccumulateNode) or node.hooks or node in self.uses:
            return None
        use = node.leaf.lend()
        if use is None:
            return None
        self.uses[node] = use
        return use.array

    def held(self, edge: Edge) -> Array | None:
        """A leaf's gradient of walks before, once; a hook is to see the gradient of this walk alone."""
        node = edge.node
        if not self.to_leaves or not isinstance(node, AccumulateNode) or node.hooks or node in self.totals:
            return None
        found = node.leaf.held()
        if found is None or found.spec != node.specs[0] or not found.is_contiguous:
            return None
        self.totals.add(node)
        return found

    def pop(self, node: BaseNode) -> list[Array | None] | None:
        """The gradients of a node that is about to run."""
        slots = self.grads.pop(node, None)
        if slots is not None and self.owned:
            for slot in range(len(slots)):
                self.owned.discard(Edge(node, slot))
        return slots

    def step(self, node: BaseNode, slots: list[Array | None]) -> None:
        """Run one node and pass its gradients on."""
        arrivals = Arrivals(self, node)
        produced = node.apply(slots, arrivals)
        if is_anomaly_enabled():
            _check_finite(node, produced)
        for i, (edge, grad) in enumerate(zip(node.edges, produced, strict=False)):
            if edge is not None and grad is not None:
                self.add(edge, *arrivals.settled(i, edge, grad))
        arrivals.finish(produced)
        if not self.retain_graph:
            node.release()


class Arrivals:
    """What one vjp may ask of the walk, for `Context.place` and `Context.take`.

    Attributes:
        lent: the places that the node's forward wrote outputs into.
    """

    __slots__ = ("given", "lent", "node", "taken", "walk")

    def __init__(self, walk: Walk, node: BaseNode) -> None:
        self.walk, self.node = walk, node
        self.given: dict[int, Array] = {}  # places, by input
        self.taken: dict[int, Array] = {}
        self.lent: Mapping[int, HomeUse] = {}

    @property
    def is_last(self) -> bool:
        return not self.walk.retain_graph

    def is_unit(self, grad: Array) -> bool:
        """See Context.is_unit."""
        return grad in units

    @property
    def is_total(self) -> bool:
        """Of a leaf: whether its gradient includes that of walks before."""
        return self.node in self.walk.totals

    def place(self, i: int) -> Array | None:
        """See Context.place."""
        edge = self.node.edges[i]
        if edge is None or self.walk.arrived(edge) is not None:
            return None
        place = self.walk.lend(edge)
        if place is not None:
            self.given[i] = place
        return place

    def take(self, i: int) -> Taken | None:
        """See Context.take."""
        edge = self.node.edges[i]
        if edge is None:
            return None
        found, is_own = self.walk.arrived(edge), edge in self.walk.owned
        if found is not None:
            found.storage.backend.join()
            self.walk.grads[edge.node][edge.slot] = None
            self.walk.owned.discard(edge)
        else:
            found, is_own = self.walk.held(edge), True
        if found is None:
            return None
        self.taken[i] = found
        return Taken(found, is_own)

    def settled(self, i: int, edge: Edge, grad: Array) -> tuple[Array, bool]:
        """The gradient of input `i` as it is passed on, and whether it is the walk's to write over."""
        place = self.given.get(i)
        if place is not None:
            if is_same_window(place, grad):
                return grad, True
            del self.walk.uses[edge.node]
        for use in self.lent.values():
            if is_same_window(use.array, grad):  # made in forward
                if not self.walk.to_leaves or edge.node.hooks:
                    return registry["copy"](grad), True  # it goes to the user, whose memory stays as it is
                use.is_movable = False
                self.walk.uses[edge.node] = use
                return grad, True
        return grad, i in self.taken

    def finish(self, produced: Sequence[Array | None]) -> None:
        """Give places back that got nothing."""
        for i in self.taken:
            assert produced[i] is not None, f"{self.node.name} took the gradient of input {i} and gave none back"
        for i in self.given:
            edge = self.node.edges[i]
            if edge is not None and produced[i] is None:
                del self.walk.uses[edge.node]


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
    with tape_watches[0].walks() if tape_watches else nullcontext():
        return _walked(roots, retain_graph, capture)


def _walked(
    roots: Sequence[tuple[Edge, Array]], retain_graph: bool, capture: Sequence[Edge] | None
) -> list[Array | None]:
    waiting = _consumers([edge for edge, _ in roots])
    walk = Walk(retain_graph, to_leaves=capture is None)
    for edge, grad in roots:
        walk.add(edge, grad)
    wanted = {edge: i for i, edge in enumerate(capture or ())}
    running = set(waiting) if capture is None else _leading_to(capture, list(waiting))
    found: list[Array | None] = [None] * len(wanted)
    ready = [(_turn(node), node) for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        slots = walk.pop(node)
        if slots is not None:
            _run_hooks(node, slots)
            for slot, value in enumerate(slots):
                if (index := wanted.get(Edge(node, slot))) is not None:
                    found[index] = value
            if node in running:
                if tape_watches:
                    with tape_watches[0].runs(node):
                        walk.step(node, slots)
                else:
                    walk.step(node, slots)
        for below in (e.node for e in node.edges if e is not None):
            waiting[below] -= 1
            if waiting[below] == 0:
                heapq.heappush(ready, (_turn(below), below))
    for _, grad in roots[:1]:
        grad.storage.backend.join()
    return found


def _turn(node: BaseNode) -> tuple[bool, int]:
    """What nodes that are ready are sorted by: a leaf was seen first in some walk before, and must not wait."""
    return not isinstance(node, AccumulateNode), -node.sequence


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
