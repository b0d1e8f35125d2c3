"""Recorded backward passes: gradients that have gradients themselves (`create_graph=True`).

Vjps call ops on arrays. In a recorded pass a tracer sees these calls: arrays that depend on the graph are `Taped`, and
each op on such an array becomes a node of the tape. An op without a vjp is replaced by its plain formula (`Op.plain`),
which computes auxiliary results of forward (statistics, log-sums) again. A vjp that differentiates such a result
itself raises a GradientError that names the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genesis.array import Array, constant
from genesis.autograd.engine import BackwardPass, _check_finite, _Step
from genesis.autograd.graph import BaseNode, Edge, Node
from genesis.autograd.record import AccumulateNode, Taped, _node, apply, as_tensor, taped
from genesis.backend import mode
from genesis.errors import GradientError
from genesis.op import BackwardStep, Context, Op, execute, registry, tracing


class Tape:
    """The tracer of a recorded pass; `node` is the name of the node that runs."""

    node = ""

    def call(self, op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any) -> tuple[Array, ...]:
        """Run an op, and record it if an input is taped."""
        edges = tuple([x.edge if isinstance(x, Taped) else None for x in inputs])
        if not any(edges):
            return execute(op, inputs, attrs, out)
        if op.mutates or (out is not None and not (isinstance(out, tuple) and out.count(None) == len(out))):
            what = f"{self.node} has no second derivative: its backward pass writes into memory ({op.name})"
            raise GradientError(what, next=NEXT)
        if op.vjp is None and op.plain is not None:
            with tracing(self):
                result = op.plain(*inputs, **attrs)
            return result if isinstance(result, tuple) else (result,)
        plain = tuple([constant(x) if isinstance(x, Array) else x for x in inputs])
        results = execute(op, plain, attrs)
        if not any(r.dtype.is_floating_point for r in results):
            return results
        node = _node(op, edges, plain, results, attrs)
        return tuple([
            taped(r, Edge(node, i), self) if r.dtype.is_floating_point and i not in op.auxiliary else r
            for i, r in enumerate(results)
        ])  # fmt: skip


NEXT = "compute this part of the loss with plain functions"


class _Barrier(BaseNode):
    """Stands for an auxiliary result of forward, whose own dependence on the inputs is not recorded."""

    __slots__ = ()

    def apply(self, grads: list[Array | None], step: BackwardStep) -> Sequence[Array | None]:
        raise GradientError(f"{self.name} has no second derivative: its backward pass is one fused op", next=NEXT)


class _RecordedStep(_Step):
    """A step whose vjp gets no memory to reuse, because a later pass still reads what it would overwrite."""

    @property
    def is_last(self) -> bool:
        return False

    def is_unit(self, grad: Array) -> bool:
        return False

    def gradient_slot(self, i: int) -> None:
        return None

    def take_accumulated(self, i: int) -> None:
        return None


class RecordedPass(BackwardPass):
    """A backward pass whose ops are recorded. Gradients are summed into new memory."""

    def __init__(self, retain_graph: bool, to_leaves: bool) -> None:
        super().__init__(retain_graph, to_leaves)
        self.tape = Tape()

    def add(self, edge: Edge, grad: Array, is_own: bool = False) -> None:
        if isinstance(grad, Taped):
            grad.tape = self.tape
        grads = self.grads.setdefault(edge.node, [None] * len(edge.node.specs))
        have = grads[edge.output]
        grads[edge.output] = grad if have is None else registry["add"](have, grad)

    def run(self, node: BaseNode, grads: list[Array | None]) -> None:
        if isinstance(node, AccumulateNode):
            self._accumulate(node, grads[0])
            return
        step, self.tape.node = _RecordedStep(self, node), node.name
        produced = node.apply(grads, step, self._prepared) if isinstance(node, Node) else node.apply(grads, step)
        if mode.anomaly:
            _check_finite(node, produced)
        for edge, grad in zip(node.edges, produced, strict=False):
            if edge is not None and grad is not None:
                self.add(edge, grad)
        if not self.retain_graph:
            node.release()

    def _prepared(self, node: Node, context: Context) -> Context:
        """Give what the node saved its history: inputs come from the node's edges, results from the node itself."""

        def with_history(x: Any, edge: Edge | None) -> Any:
            is_float = isinstance(x, Array) and x.dtype.is_floating_point
            return taped(x, edge, self.tape) if is_float and edge is not None else x

        inputs = [with_history(x, edge) for x, edge in zip(context.inputs, node.edges, strict=True)]
        barrier = _Barrier(node.name, node.edges, node.specs) if node.op.auxiliary else None
        outputs = [
            with_history(x, Edge(barrier if barrier is not None and i in node.op.auxiliary else node, i))
            for i, x in enumerate(context.outputs)
        ]
        return Context(tuple(inputs), tuple(outputs), context.attrs, context.needs, context.input_specs)

    @staticmethod
    def _accumulate(node: AccumulateNode, grad: Array | None) -> None:
        leaf = node.leaf()
        if leaf is not None and grad is not None:
            new = as_tensor(grad)
            leaf.grad = new if leaf.grad is None else apply(registry["add"], leaf.grad, new)
            leaf._gradient_arrived()
