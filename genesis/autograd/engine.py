"""The backward engine: it carries gradients from the loss to the leaves. `backward` and `grad` start a pass.

The engine is iterative, so a chain of 10,000 ops is fine. A node runs once all its consumers have run. Among ready
nodes leaves run first, so that a finished gradient is accumulated and freed early, and then the node recorded last.
This order fixes the order of every sum of gradients, so results are reproducible.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from genesis.array import Array, empty
from genesis.autograd.autocast import autocasting, resumed, settings
from genesis.autograd.graph import BaseNode, Edge, is_same_window, tape_watches
from genesis.autograd.record import AccumulateNode, TensorBase, apply, as_tensor, taped
from genesis.backend import mode
from genesis.errors import GradientError, NumericError, ShapeError, UsageError
from genesis.op import Accumulated, GradientLease, current_tracer, registry

units: weakref.WeakSet[Array] = weakref.WeakSet()  # gradients of 1 with which passes start at a scalar loss


def _consumers(roots: Sequence[Edge]) -> dict[BaseNode, int]:
    """The number of edges of the reachable graph that lead into each node."""
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
    """The subset of `nodes` that must run for gradients to reach `targets`."""
    ends = {edge.node for edge in targets}
    leading: set[BaseNode] = set()
    for node in sorted(nodes, key=lambda n: n.sequence):  # the inputs of a node were recorded before it
        if any(edge is not None and (edge.node in ends or edge.node in leading) for edge in node.edges):
            leading.add(node)
    return leading


class BackwardPass:
    """The gradients that one backward pass has accumulated for nodes that have not run yet.

    Attributes:
        grads: a gradient for each output, by node.
        owned: edges whose gradient the engine may overwrite: a sum it made, or a gradient in a slot.
        leases: the lease of each leaf's gradient slot in this pass.
        totals: leaves whose vjp already added the gradient of earlier passes.
    """

    def __init__(self, retain_graph: bool, to_leaves: bool) -> None:
        self.retain_graph, self.to_leaves = retain_graph, to_leaves
        self.grads: dict[BaseNode, list[Array | None]] = {}
        self.owned: set[Edge] = set()
        self.leases: dict[BaseNode, GradientLease] = {}
        self.totals: set[BaseNode] = set()

    def accumulated(self, edge: Edge) -> Array | None:
        """The gradient accumulated for an edge so far."""
        grads = self.grads.get(edge.node)
        return None if grads is None else grads[edge.output]

    def add(self, edge: Edge, grad: Array, is_own: bool = False) -> None:
        """Accumulate a gradient. The first of an edge is kept uncopied; later ones are added in place to a sum."""
        node, output = edge
        grads = self.grads.get(node)
        if grads is None:
            grads = self.grads[node] = [None] * len(node.specs)
        have = grads[output]
        if have is None:
            grads[output] = grad
            if not is_own:
                return
        else:
            have.storage.backend.join_side_stream()  # the side stream may have computed either
            if edge in self.owned:
                registry["add"](have, grad, out=have)
            else:
                grads[output] = registry["add"](have, grad, out=grad if is_own else self.lease(edge))
        self.owned.add(edge)

    def lease(self, edge: Edge) -> Array | None:
        """Lease the gradient slot of a leaf for this pass. None if it is in use or the edge leads to no leaf."""
        node = edge.node
        if not self.to_leaves or not isinstance(node, AccumulateNode) or node.hooks or node in self.leases:
            return None
        lease = node.lease()
        if lease is None:
            return None
        self.leases[node] = lease
        return lease.array

    def take_earlier_gradient(self, edge: Edge) -> Array | None:
        """A leaf's gradient from earlier passes, once. None if the leaf has hooks: they see this pass's gradient."""
        node = edge.node
        if not self.to_leaves or not isinstance(node, AccumulateNode) or node.hooks or node in self.totals:
            return None
        earlier = node.accumulated()
        if earlier is None or earlier.spec != node.specs[0] or not earlier.is_contiguous:
            return None
        self.totals.add(node)
        return earlier

    def pop(self, node: BaseNode) -> list[Array | None] | None:
        """Remove and return the gradients of a node that is about to run."""
        grads = self.grads.pop(node, None)
        if grads is not None and self.owned:
            for output in range(len(grads)):
                self.owned.discard(Edge(node, output))
        return grads

    def run(self, node: BaseNode, grads: list[Array | None]) -> None:
        """Run one node and pass its gradients on."""
        if isinstance(node, AccumulateNode):
            node.receive(grads, node in self.totals)
            return
        step = _Step(self, node)
        produced = node.apply(grads, step)
        if mode.anomaly:
            _check_finite(node, produced)
        is_plain = not (step.slots or step.taken or step.leases)  # nothing to resolve: nearly all nodes
        for i, (edge, grad) in enumerate(zip(node.edges, produced, strict=False)):
            if edge is not None and grad is not None:
                if is_plain:
                    self.add(edge, grad)
                else:
                    self.add(edge, *step.resolve(i, edge, grad))
        if not is_plain:
            step.finish(produced)
        if not self.retain_graph:
            node.release()


_NONE: Mapping[int, Any] = {}


class _Step:
    """One node's step of a backward pass: the engine's services for its vjp, see `op.BackwardStep`."""

    __slots__ = ("current", "leases", "node", "slots", "taken")

    def __init__(self, current: BackwardPass, node: BaseNode) -> None:
        self.current, self.node = current, node
        self.slots: Mapping[int, Array] = _NONE  # gradient slots passed to the vjp, by input
        self.taken: tuple[int, ...] = ()  # inputs whose accumulated gradient the vjp took
        self.leases: Mapping[int, GradientLease] = _NONE

    @property
    def is_last(self) -> bool:
        return not self.current.retain_graph

    def is_unit(self, grad: Array) -> bool:
        """See Context.is_unit."""
        return grad in units

    def gradient_slot(self, i: int) -> Array | None:
        """See Context.gradient_slot."""
        edge = self.node.edges[i]
        if edge is None or self.current.accumulated(edge) is not None:
            return None
        slot = self.current.lease(edge)
        if slot is not None:
            self.slots = {**self.slots, i: slot}
        return slot

    def take_accumulated(self, i: int) -> Accumulated | None:
        """See Context.take_accumulated."""
        edge = self.node.edges[i]
        if edge is None or getattr(current_tracer(), "is_functional", False):  # a graph holds no op that adds to memory
            return None
        gradient, is_own = self.current.accumulated(edge), edge in self.current.owned
        if gradient is not None:
            gradient.storage.backend.join_side_stream()
            self.current.grads[edge.node][edge.output] = None
            self.current.owned.discard(edge)
        else:
            gradient, is_own = self.current.take_earlier_gradient(edge), True
        if gradient is None:
            return None
        self.taken += (i,)
        return Accumulated(gradient, is_own)

    def resolve(self, i: int, edge: Edge, grad: Array) -> tuple[Array, bool]:
        """Return the gradient of input `i` to accumulate, and whether the engine may overwrite it."""
        slot = self.slots.get(i)
        if slot is not None:
            if is_same_window(slot, grad):
                return grad, True
            del self.current.leases[edge.node]
        for lease in self.leases.values():
            if is_same_window(lease.array, grad):  # forward computed it
                if not self.current.to_leaves or edge.node.hooks:
                    return registry["copy"](grad), True  # the user keeps it, and the slot is reused
                lease.is_movable = False
                self.current.leases[edge.node] = lease
                return grad, True
        return grad, i in self.taken

    def finish(self, produced: Sequence[Array | None]) -> None:
        """Release the gradient slots that the vjp did not fill."""
        for i in self.taken:
            assert produced[i] is not None, f"{self.node.name} took the gradient of input {i} and returned none"
        for i in self.slots:
            edge = self.node.edges[i]
            if edge is not None and produced[i] is None:
                del self.current.leases[edge.node]


# The function that returns a recorded pass (see double.py) and the context that traces its ops. The package sets it.
recorded_pass: list[Callable[[bool, bool], tuple[BackwardPass, AbstractContextManager[None]]]] = []


def run_backward(
    roots: Sequence[tuple[Edge, Array]],
    *,
    retain_graph: bool = False,
    capture: Sequence[Edge] | None = None,
    create_graph: bool = False,
) -> list[Array | None]:
    """Run backward from `roots` to the leaves, or to the edges in `capture`.

    Args:
        roots: edges, each with the gradient that enters it.
        retain_graph: keep what nodes saved, for another pass.
        capture: edges whose gradients are returned, None for an edge without one. Leaves then accumulate nothing.
        create_graph: record the pass, so that its gradients have gradients; see double.py.
    """
    current, surroundings = BackwardPass(retain_graph, capture is None), []
    if create_graph:
        current, trace = recorded_pass[0](retain_graph, capture is None)
        surroundings.append(trace)
    if autocasting.low:  # hooks and custom functions compute in the types of their arguments
        surroundings.append(resumed(settings()._replace(low={})))
    if tape_watches:
        surroundings.append(tape_watches[0].runs_backward())
    before, mode.grad = mode.grad, create_graph  # hooks and custom functions are recorded with the pass
    was_exact, mode.exact = mode.exact, False  # gradients may be summed in any order
    try:
        if not surroundings:
            return _run_nodes(current, roots, capture)
        with ExitStack() as stack:
            for each in surroundings:
                stack.enter_context(each)
            return _run_nodes(current, roots, capture)
    finally:
        mode.grad, mode.exact = before, was_exact


def _run_nodes(
    current: BackwardPass, roots: Sequence[tuple[Edge, Array]], capture: Sequence[Edge] | None
) -> list[Array | None]:
    """Run the nodes that `roots` reach; return the gradients of the edges in `capture`."""
    # Count consumers, seed the roots, and find the nodes that the captured edges depend on.
    waiting = _consumers([edge for edge, _ in roots])
    for edge, grad in roots:
        current.add(edge, grad)
    wanted = {edge: i for i, edge in enumerate(capture or ())}
    running = None if capture is None else _leading_to(capture, list(waiting))
    captured: list[Array | None] = [None] * len(wanted)
    # Run ready nodes in priority order; each finished node may make its inputs ready.
    ready = [(node.rank, node) for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        grads = current.pop(node)
        if grads is not None:
            if node.hooks:
                _run_hooks(node, grads)
            if wanted:
                for output, value in enumerate(grads):
                    if (index := wanted.get(Edge(node, output))) is not None:
                        captured[index] = value
            if running is None or node in running:
                if tape_watches:
                    with tape_watches[0].runs(node):
                        current.run(node, grads)
                else:
                    current.run(node, grads)
        for source in node.edges:
            if source is not None:
                below = source.node
                waiting[below] -= 1
                if waiting[below] == 0:
                    heapq.heappush(ready, (below.rank, below))
    for _, grad in roots[:1]:
        grad.storage.backend.join_side_stream()
    return captured


def _run_hooks(node: BaseNode, grads: list[Array | None]) -> None:
    for output, hook in tuple(node.hooks):
        grad = grads[output]
        replaced = None if grad is None else hook(grad)
        if grad is None or replaced is None:
            continue
        if replaced.shape != grad.shape:
            raise GradientError(
                f"a hook on the gradient of {node.name} returned shape {replaced.shape}, expected {grad.shape}"
            )
        grads[output] = replaced if replaced.dtype is grad.dtype else registry["cast"](replaced, dtype=grad.dtype)


def _check_finite(node: BaseNode, produced: Sequence[Array | None]) -> None:
    if not mode.check_nan:
        return
    for i, grad in enumerate(produced):
        if grad is not None and grad.dtype.is_floating_point and bool(np.isnan(grad.numpy().astype(np.float64)).any()):
            raise NumericError(
                f"the gradient of {node.name} for its input {i} is NaN",
                where=node.line or "the forward call was recorded without anomaly detection",
                next="print the values that reach this op",
            )


# --- What users call --------------------------------------------------------------------------------------------------


def _seed(tensor: TensorBase, gradient: TensorBase | None, create_graph: bool) -> tuple[Edge, Array]:
    """The edge of an output and the gradient that enters it."""
    edge, array = tensor.edge(), tensor.array
    if edge is None:
        raise GradientError(
            "backward() on a tensor that does not require a gradient", next="set requires_grad on a leaf it uses"
        )
    if gradient is None:
        if array.size != 1:
            raise GradientError(
                f"backward() without a gradient needs one element, and this tensor has shape {array.shape}",
                next="reduce it with .sum() or .mean(), or pass gradient=",
            )
        ones = empty(array.shape, array.dtype, array.device)
        registry["fill"](out=ones, value=1, shape=array.shape, dtype=array.dtype)
        units.add(ones)
        return edge, ones
    if gradient.array.shape != array.shape:
        raise ShapeError(f"the gradient has shape {gradient.array.shape}, and the tensor has shape {array.shape}")
    if create_graph and gradient.requires_grad:
        if gradient.array.dtype is not array.dtype:
            gradient = apply(registry["cast"], gradient, dtype=array.dtype)
        source = gradient.edge()
        assert source is not None
        return edge, taped(gradient.array, source, None)
    seed = gradient.array
    return edge, seed if seed.dtype is array.dtype else registry["cast"](seed, dtype=array.dtype)


def _as_list(role: str, tensors: Any, optional: bool = False) -> list[Any]:
    if isinstance(tensors, TensorBase):
        return [tensors]
    listed = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    for each in listed:
        if not (isinstance(each, TensorBase) or (optional and each is None)):
            what = f"{role} is a value of type {type(each).__name__}"
            raise UsageError(what, next="pass tensors")
    return listed


def _roots(tensors: TensorBase | Sequence[TensorBase], gradients: Any, create_graph: bool) -> list[tuple[Edge, Array]]:
    if isinstance(tensors, TensorBase) and (gradients is None or isinstance(gradients, TensorBase)):
        return [_seed(tensors, gradients, create_graph)]
    outputs = _as_list("an output", tensors)
    seeds = [None] if gradients is None else _as_list("a gradient", gradients, optional=True)
    if len(seeds) == 1 and seeds[0] is None:
        seeds *= len(outputs)
    if len(seeds) != len(outputs):
        raise GradientError(f"got {len(outputs)} tensors and {len(seeds)} gradients", next="pass one per tensor")
    return [_seed(t, g, create_graph) for t, g in zip(outputs, seeds, strict=True)]


def backward(
    tensors: TensorBase | Sequence[TensorBase],
    grad_tensors: TensorBase | Sequence[TensorBase | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: TensorBase | Sequence[TensorBase | None] | None = None,
    inputs: TensorBase | Sequence[TensorBase] | None = None,
) -> None:
    """Accumulate the gradient of one tensor or several into `.grad` of the leaves they depend on.

    Args:
        grad_tensors: gradient that enters each tensor; optional for one-element tensors.
        retain_graph: keep the recorded graph for another pass; by default, if `create_graph` is set.
        create_graph: record the pass, so that the gradients can be differentiated.
        grad_variables: older name of `grad_tensors`.
        inputs: accumulate only into these tensors; by default into all leaves.

    Raises:
        GradientError: if a tensor does not require a gradient, or the graph was released.
    """
    if grad_variables is not None:
        if grad_tensors is not None:
            raise UsageError("backward() got grad_tensors and grad_variables", next="pass grad_tensors only")
        grad_tensors = grad_variables
    keeps = create_graph if retain_graph is None else retain_graph
    roots = _roots(tensors, grad_tensors, create_graph)
    if inputs is None:
        run_backward(roots, retain_graph=keeps, create_graph=create_graph)
        return
    wanted = _as_list("an input", inputs)
    if not wanted:
        raise GradientError("backward() got an empty list of inputs", next="leave inputs= out, or name some tensors")
    edges = list(dict.fromkeys(_wanted_edges(wanted)))
    grads = dict(
        zip(edges, run_backward(roots, retain_graph=keeps, capture=edges, create_graph=create_graph), strict=True)
    )
    for tensor in dict.fromkeys(wanted):
        grad = grads[tensor.edge()]
        if grad is not None and create_graph:
            tensor.grad = (
                as_tensor(grad) if tensor.grad is None else apply(registry["add"], tensor.grad, as_tensor(grad))
            )
        elif grad is not None:
            tensor.accumulate_grad(grad)


def _wanted_edges(tensors: Sequence[TensorBase]) -> list[Edge]:
    edges = [t.edge() for t in tensors]
    present = [e for e in edges if e is not None]
    if len(present) != len(edges):
        raise GradientError(
            "grad() on an input that does not require a gradient", next="call requires_grad_() on it first"
        )
    return present


def grad(
    outputs: TensorBase | Sequence[TensorBase],
    inputs: TensorBase | Sequence[TensorBase],
    grad_outputs: TensorBase | Sequence[TensorBase | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """Return the gradients of `outputs` with respect to `inputs`, without changing any `.grad`.

    Args:
        grad_outputs: gradient that enters each output; optional for one-element outputs.
        retain_graph: keep the recorded graph for another pass; by default, if `create_graph` is set.
        create_graph: record the pass, so that the gradients can be differentiated.
        only_inputs: must be True.
        allow_unused: return None for an input that the outputs do not use; by default the value of
            `materialize_grads`.
        is_grads_batched: must be False, because `vmap` does not exist.
        materialize_grads: return zeros instead of None.

    Raises:
        GradientError: if an input does not require a gradient, or is unused and `allow_unused` is not set.

    Example:
        >>> x = genesis.tensor(3.0, requires_grad=True)
        >>> (slope,) = genesis.autograd.grad(x**3, x, create_graph=True)
        >>> genesis.autograd.grad(slope, x)[0].item()
        18.0
    """
    if is_grads_batched:
        raise UsageError("grad() takes no batch of gradients", next="call it once per gradient, with retain_graph=True")
    if not only_inputs:
        raise UsageError("grad() computes gradients of its inputs only", next="use backward() for all leaves")
    if materialize_grads and allow_unused is False:
        raise UsageError("materialize_grads=True needs unused inputs to be allowed", next="leave allow_unused out")
    wanted = _as_list("an input", inputs)
    present = _wanted_edges(wanted)
    roots = _roots(outputs, grad_outputs, create_graph)
    unique = list(dict.fromkeys(present))
    keeps = create_graph if retain_graph is None else retain_graph
    gradients = run_backward(roots, retain_graph=keeps, capture=unique, create_graph=create_graph)
    by_edge = dict(zip(unique, gradients, strict=True))
    result = tuple(by_edge[e] for e in present)
    if not (allow_unused or materialize_grads) and any(g is None for g in result):
        raise GradientError("the outputs of grad() do not use one of its inputs", next="pass allow_unused=True")
    return tuple(
        as_tensor(g) if g is not None else _zeros_like(t.array) if materialize_grads else None
        for g, t in zip(result, wanted, strict=True)
    )


def _zeros_like(a: Array) -> Any:
    return as_tensor(registry["fill"](value=0, shape=a.shape, dtype=a.dtype, device=a.device))
