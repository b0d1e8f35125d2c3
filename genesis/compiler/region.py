"""A compiled region: the graph of a traced function as one op outside the registry, its backward pass as another.

Forward and backward are traced together. What backward reads of forward is another output of the forward op, or is
computed again by elementwise ops from values that are stored: the cut of the joint graph that moves the fewest bytes
(min-cut rematerialization, as in PyTorch's AOTAutograd).
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import ref

from genesis.array import Array, Spec
from genesis.autograd.double import Tape
from genesis.autograd.engine import run_backward
from genesis.autograd.graph import BaseNode, Edge, Node
from genesis.autograd.record import AccumulateNode, TensorBase, _edges, _node, taped
from genesis.backend import mode
from genesis.compiler.graph import Call, Graph, Value
from genesis.compiler.program import Program, Replayed
from genesis.compiler.trace import Trace, active, decomposed
from genesis.errors import GradientError
from genesis.op import Context, current_tracer, registry

_numbers = itertools.count(1)


class Region:
    """The program of a function for one set of guarded facts.

    Args:
        name: name of the function, for profiles and errors.
        trace: the finished trace of the forward pass.
        outputs: tensors that the function returned, without duplicates.
        sources: edges at which the traced tape ends, each with the index of its input.
        schedule: returns the program of a name and a graph.
        replays: whether the programs run as CUDA graphs.

    Attributes:
        programs: the program of forward, and that of backward if there is one.
    """

    def __init__(
        self, name: str, trace: Trace, outputs: Sequence[TensorBase], sources: Sequence[tuple[Edge, int]],
        schedule: Callable[[str, Graph], Program], replays: bool,
    ) -> None:  # fmt: skip
        values = [trace.read(t.array) for t in outputs]
        self.differentiable = [i for i, t in enumerate(outputs) if sources and t.edge() is not None]
        writes, arguments = trace.changed(), list(trace.graph.inputs)
        seeds, grads = list[Value](), list[Value | None]()
        if self.differentiable:
            seeds, grads = _backward(trace, [outputs[i] for i in self.differentiable], [e for e, _ in sources])
        inputs = [*arguments, *(value for _, value in trace.captured)]
        results = [*values, *(g for g in grads if g is not None)]
        joint = decomposed(Graph([*inputs, *seeds], trace.graph.calls, results, writes)).without_common_calls()
        storages = [id(t.array.storage) for t in outputs]
        self.joint = joint.with_own_memory(storages, [v for x, v in trace.captured if id(x) in trace.constants])
        self.values, gradients = self.joint.outputs[: len(values)], self.joint.outputs[len(values) :]
        name, self.saved, self.programs = f"{name} {next(_numbers)}", list[Value](), list[Program]()
        if self.differentiable:
            self.saved, later = saved_values(self.joint, inputs, self.values, gradients)
            self.programs.append(schedule(f"{name} backward", Graph([*self.saved, *seeds], later, gradients)))
            # Forward stores copies of what backward reads and it changes in place.
            copies = {old: Value.like(old) for old, _ in self.joint.writes if old in self.saved}
            self.joint.calls[:0] = [Call(registry["copy"], (old,), {}, (v,)) for old, v in copies.items()]
            self.saved = [copies.get(v, v) for v in self.saved]
            self.gradient_inputs = [i for (_, i), g in zip(sources, grads, strict=True) if g is not None]
        graph = Graph(inputs, self.joint.calls, [*self.values, *self.saved], self.joint.writes)
        forward = schedule(name, graph.without_dead_calls())
        self.programs.insert(0, forward)
        self.runners = [Replayed(each) if replays else each for each in self.programs]
        if self.differentiable:
            stored = {v: f"out{i}" if len(forward.results) > 1 else "out" for i, v in enumerate(forward.results)}
            forward.op.vjp = self._vjp
            forward.op.saves = tuple(inputs.index(v) if v in inputs else stored[v] for v in self.saved)

    # --- Running ------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run on the tensors or arrays of the inputs; return the tensors of the outputs."""
        arrays = tuple([x.array if isinstance(x, TensorBase) else x for x in tensors])
        forward, results = self.programs[0], self.runners[0].launch(arrays)
        node: Node | None = None
        if self.differentiable and mode.grad:
            edges = _edges(tuple(tensors))
            if edges is not None:
                # `_recorded_vjp` reads all inputs that still exist.
                found = [(ref(x), x.storage.version, edge) for x, edge in zip(arrays, edges, strict=True)]
                node = _node(forward.op, edges, arrays, results, {"inputs": found})
                node.specs = tuple([Spec(v.shape, v.dtype) for v in self.values])
        outputs = forward.outputs(arrays, results)[: len(self.values)]
        return [TensorBase.wrap(x, node if i in self.differentiable else None, i) for i, x in enumerate(outputs)]

    def _vjp(self, ctx: Context, *grads: Array | None) -> tuple[Array | None, ...]:
        forward, incoming = self.programs[0], []
        for i in self.differentiable:
            grad, value = grads[i], self.values[i]
            if grad is None:
                grad = registry["fill"](value=0, shape=value.shape, dtype=value.dtype, device=value.device)
            incoming.append(grad if grad.is_contiguous else registry["copy"](grad))
        if isinstance(current_tracer(), Tape):
            return self._recorded_vjp(ctx, incoming)
        roots = dict(zip((*forward.inputs, *forward.results), (*ctx.inputs, *ctx.outputs), strict=True))
        inputs = [*(roots[v] for v in self.saved), *incoming]
        return self._of_all_inputs(ctx, self.programs[1].outputs(inputs, self.runners[1].launch(inputs)))

    def _of_all_inputs(self, ctx: Context, gradients: Sequence[Array]) -> tuple[Array | None, ...]:
        found = dict(zip(self.gradient_inputs, gradients, strict=True))
        return tuple([found.get(i) for i in range(len(ctx.inputs))])

    def _recorded_vjp(self, ctx: Context, incoming: list[Array]) -> tuple[Array | None, ...]:
        """Compute the gradients from all inputs by single ops, which are differentiable themselves."""
        found = []
        for x, (kept, version, edge) in zip(ctx.inputs, ctx.attrs["inputs"], strict=True):
            if x is None:
                x = kept()
                if x is None or x.storage.version != version or self.programs[0].changed:
                    what = f"{self.programs[0].op.name}: its second derivative needs an input that was freed or changed"
                    raise GradientError(what, next="keep the input, or call the function without compile")
                x = taped(x, edge, current_tracer()) if edge is not None else x
            found.append(x)
        return self._of_all_inputs(ctx, self.joint.run_ops([*found, *incoming])[len(self.values) :])


def _backward(
    trace: Trace, outputs: Sequence[TensorBase], sources: Sequence[Edge]
) -> tuple[list[Value], list[Value | None]]:
    """Trace the backward pass; return the values of the incoming and of the resulting gradients."""
    with active(trace):
        seeds = [trace.input(Value.new(*t.array.spec, t.array.device)) for t in outputs]
        roots = [(edge, seed) for t, seed in zip(outputs, seeds, strict=True) if (edge := t.edge()) is not None]
        grads = run_backward(roots, retain_graph=True, capture=list(sources))
    return [trace.read(s) for s in seeds], [None if g is None else trace.read(g) for g in grads]


def tape_ends(outputs: Sequence[TensorBase], began: int) -> list[Edge]:
    """Return the edges at which the tape that was recorded after node number `began` ends, in order of discovery."""
    ends, seen = dict[Edge, None](), set[BaseNode]()
    stack = [edge for t in outputs if (edge := t.edge()) is not None]
    while stack:
        edge = stack.pop()
        node = edge.node
        if isinstance(node, AccumulateNode) or node.sequence <= began:
            ends[edge] = None
        elif node not in seen:
            seen.add(node)
            stack += [e for e in node.edges if e is not None]
    return list(ends)


# --- What backward keeps of forward -----------------------------------------------------------------------------------

# Elementwise ops that numpy computes about as fast as it copies. On the CPU others are not computed again.
CHEAP = frozenset((
    "copy", "cast", "fill", "add", "sub", "mul", "neg", "abs", "square", "maximum", "minimum", "where", "eq", "ne",
    "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clamp", "sign", "relu",
))  # fmt: skip
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
SELECTIONS = frozenset(("amax", "amin", "max_with_indices", "min_with_indices", "sort", "topk"))
ARITHMETIC = frozenset(("copy", "cast", "index_get", "neg", "add", "sub", "mul", "div"))
_ENDLESS = 1 << 62
_Node = tuple[Value | None, int]
_SOURCE: _Node = (None, 0)
_SINK: _Node = (None, 1)


def saved_values(
    joint: Graph, inputs: Sequence[Value], outputs: Sequence[Value], gradients: Sequence[Value]
) -> tuple[list[Value], list[Call]]:
    """Return the roots that forward stores for backward, and the calls of backward.

    Args:
        joint: the calls of both passes; its inputs are `inputs` and the incoming gradients.
        inputs: inputs of forward.
        outputs: outputs of forward.
        gradients: the results of backward.
    """
    # Split the calls by whether they depend on an incoming gradient.
    own = set(inputs)
    forward: set[Value] = set(inputs)
    for call in joint.calls:
        if forward.issuperset(call.reads):
            forward.update(call.outputs)
    wanted = {v.root for v in gradients}
    read = [v for call in joint.calls_for(wanted, forward) for v in call.reads]
    needed = forward.intersection((*wanted, *read))
    own_results = {v.root for v in outputs}
    # Calls that forward does not need are computed in backward in any case.
    fixed = {call for call in joint.calls_for(own_results) if not can_repeat(call)}
    # Forward also compares elements with a reduction's result, or with what follows from one of the elements, such as
    # the largest one: backward may round the same expression otherwise, and then finds no element that equals it.
    reduced = {v for call in fixed for v in call.outputs}
    selected = {v for call in fixed if call.op.name in SELECTIONS for v in call.outputs}
    for call in joint.calls:
        if call.op.name in COMPARISONS and not (reduced.isdisjoint(call.reads) and selected.isdisjoint(call.reads)):
            fixed.add(call)
        elif call.op.name in ARITHMETIC and not selected.isdisjoint(call.reads):
            selected.update(call.outputs)
    saved = _cut(joint.makers, needed, own | own_results, fixed)
    order = [v for v in (*inputs, *(o for call in joint.calls for o in call.outputs)) if v in saved]
    return order, joint.calls_for(wanted, saved)


def can_repeat(call: Call) -> bool:
    """Whether backward may compute a call of forward again."""
    is_fast = call.outputs[0].device.type != "cpu" or call.op.name in CHEAP
    return call.op.name in ("fill", "arange") or (call.op.elementwise and len(call.outputs) == 1 and is_fast)


def _cut(
    makers: Mapping[Value, Call], needed: Collection[Value], stored: Collection[Value], fixed: Collection[Call]
) -> set[Value]:
    """Return the values of the cheapest cut between what cannot be computed again and what backward needs.

    Each value is a pair of nodes joined by an edge whose capacity is its bytes: written and read, or only read if
    forward stores it anyway. Calls in `fixed` are not computed again.
    """
    flow: defaultdict[_Node, dict[_Node, int]] = defaultdict(dict)

    def edge(a: _Node, b: _Node, capacity: int) -> None:
        flow[a][b] = capacity
        flow[b].setdefault(a, 0)

    # A value v enters at (v, 0) and leaves at (v, 1).
    stack, seen = list(needed), set()
    for v in needed:
        edge((v, 1), _SINK, _ENDLESS)
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        edge((v, 0), (v, 1), max(1, v.nbytes) * (1 if v in stored else 2))
        call = makers.get(v)
        if call is None or call in fixed:
            edge(_SOURCE, (v, 0), _ENDLESS)
            continue
        for u in call.reads:
            edge((u, 1), (v, 0), _ENDLESS)
            stack.append(u)
    # Augment shortest paths until the source does not reach the sink.
    while _SINK in (before := _reached(flow)):
        path, node = [], _SINK
        while (previous := before[node]) is not None:
            path.append((previous, node))
            node = previous
        amount = min(flow[a][b] for a, b in path)
        for a, b in path:
            flow[a][b] -= amount
            flow[b][a] += amount
    return {v for v in seen if (v, 0) in before and (v, 1) not in before}


def _reached(flow: Mapping[_Node, dict[_Node, int]]) -> dict[_Node, _Node | None]:
    """The nodes that the source still reaches, each with the node before it."""
    before: dict[_Node, _Node | None] = {_SOURCE: None}
    queue = deque([_SOURCE])
    while queue:
        a = queue.popleft()
        for b, capacity in flow[a].items():
            if capacity > 0 and b not in before:
                before[b] = a
                queue.append(b)
    return before
