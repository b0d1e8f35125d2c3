"""TensorBase (an Array with a place on the tape) and `apply`, which runs an op on tensors and records it.

In-place changes follow torch: a leaf that requires a gradient refuses them; a change through a view is written into the
history of the view's base, and other views of that base re-derive their history from it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from genesis.array import Array
from genesis.autograd.engine import AccumulateNode, BaseNode, Edge, Node, Saved
from genesis.autograd.modes import is_grad_enabled
from genesis.errors import GradientError
from genesis.op import Op, Spec, execute, registry

__all__ = ["SavedCalls", "TensorBase", "apply", "apply_", "saving_calls"]


class TensorBase:
    """The part of a Tensor that the tape needs. `genesis.Tensor` adds the operations.

    Attributes:
        array: the values.
        grad: the accumulated gradient of a leaf (a tensor), or None.
        node, slot: the op that made this tensor, and which of its outputs it is; None for leaves.
        base: for a differentiable view, the tensor whose history it follows.
    """

    __slots__ = (
        "__weakref__",
        "_accumulate",
        "_grad_home",
        "_post_hooks",
        "_requires_grad",
        "_view_history",
        "array",
        "base",
        "grad",
        "history",
        "node",
        "slot",
    )

    _concrete: type[TensorBase]

    def __init_subclass__(cls, concrete: bool = False, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if concrete:  # the class that `apply` makes its results of
            TensorBase._concrete = cls

    @staticmethod
    def wrap(array: Array, node: BaseNode | None = None, slot: int = 0) -> Any:
        """A tensor over `array`, on the tape when `node` is given."""
        self = object.__new__(TensorBase._concrete)
        TensorBase._setup(self, array, node, slot)
        return self

    def _setup(self, array: Array, node: BaseNode | None = None, slot: int = 0, requires_grad: bool = False) -> None:
        self.array, self.node, self.slot = array, node, slot
        self.grad: Any = None
        self.base: TensorBase | None = None
        self.history = 0  # counts in-place changes recorded on this tensor, when it is a base
        self._view_history = 0  # the base's count when this view last derived its history
        self._requires_grad = requires_grad
        self._accumulate: AccumulateNode | None = None
        self._grad_home: Array | None = None  # where a first gradient is written (a place in a flat buffer), if set
        self._post_hooks: list[Callable[[Any], None]] = []

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad or self.current_node() is not None

    @property
    def is_leaf(self) -> bool:
        return self.current_node() is None

    def current_node(self) -> BaseNode | None:
        """The node that made this tensor, re-derived where its base was changed in place since."""
        base = self.base
        if base is not None and self._view_history != base.history:
            a = self.array
            attrs = {"shape": a.shape, "strides": a.strides, "offset": a.offset - base.array.offset}
            edge = base.edge()
            self.node = _node(registry["as_strided"], (edge,), (base.array,), (a,), attrs) if edge is not None else None
            self.slot, self._view_history = 0, base.history
        return self.node

    def edge(self) -> Edge | None:
        """Where this tensor's gradient goes, or None when it needs none."""
        node = self.current_node()
        if node is not None:
            return Edge(node, self.slot)
        if not self._requires_grad:
            return None
        if self._accumulate is None:
            # The node refers to the leaf weakly: no cycle delays the release of a leaf that nobody can reach any more.
            self._accumulate = AccumulateNode(Spec(self.array.shape, self.array.dtype), _Receiver(self))
        return Edge(self._accumulate, 0)

    def accumulate_grad(self, grad: Array, *more: Array) -> None:
        """Add a finished gradient, or the sum of several, to `.grad`; the leaf owns its gradient's memory."""
        if self.grad is not None:
            more = (grad, *more)
        elif more:  # the first two are added on their way to where the gradient stays
            self.grad = TensorBase.wrap(registry["add"](grad, more[0], out=self._grad_home))
            more = more[1:]
        else:
            self.grad = TensorBase.wrap(registry["copy"](grad, out=self._grad_home))
        for other in more:
            registry["add"](self.grad.array, other, out=self.grad.array)
        for hook in tuple(self._post_hooks):
            hook(self)


class _Receiver:
    """Hands a gradient to a leaf while the leaf lives."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: TensorBase) -> None:
        self.leaf = weakref.ref(leaf)

    def __call__(self, grad: Array) -> None:
        leaf = self.leaf()
        if leaf is not None:
            leaf.accumulate_grad(grad)


class SavedCalls(threading.local):
    """Where what nodes save goes while a checkpoint replaces keeping it; see checkpoint.py."""

    intercept: Callable[[Saved], Callable[[], Saved]] | None = None


saving_calls = SavedCalls()

Edges = tuple[Edge | None, ...]


def _edges(inputs: tuple[Any, ...]) -> Edges:
    return tuple([x.edge() if isinstance(x, TensorBase) else None for x in inputs])


def _node(op: Op, edges: Edges, arrays: tuple[Any, ...], outs: tuple[Array, ...], attrs: dict[str, Any]) -> Node:
    """A recorded call of `op`."""
    saved = Saved(op.context(arrays, outs, attrs, tuple([e is not None for e in edges])))
    specs = tuple([o.spec for o in outs])
    if saving_calls.intercept is not None:
        return Node(op, None, edges, specs, saving_calls.intercept(saved))
    return Node(op, saved, edges, specs)


def apply(op: Op, *inputs: Any, out: TensorBase | None = None, **attrs: Any) -> Any:
    """Run `op` on tensors (and numbers) and record it when a gradient may be asked for.

    Returns:
        One tensor, or a tuple of them; integer and bool outputs never require a gradient. A float result of an op that
        has no gradient does require one where its inputs do, and says so when backward reaches it.
    """
    arrays = tuple([x.array if isinstance(x, TensorBase) else x for x in inputs])
    if out is not None:
        return _apply_out(op, inputs, arrays, out, attrs)
    results = execute(op, arrays, attrs)
    node = None
    if is_grad_enabled():
        edges = _edges(inputs)
        if any(edges) and any(r.dtype.is_floating_point for r in results):
            node = _node(op, edges, arrays, results, attrs)
    if len(results) == 1 and op.view is None:  # nearly all calls
        return TensorBase.wrap(results[0], node if results[0].dtype.is_floating_point else None)
    tensors = tuple(
        TensorBase.wrap(r, node if r.dtype.is_floating_point and i not in op.auxiliary else None, i)
        for i, r in enumerate(results)
    )
    if op.view is not None:
        _follow_base(tensors[0], inputs[0])
    return tensors[0] if len(tensors) == 1 else tensors


def _follow_base(view: TensorBase, source: Any) -> None:
    if isinstance(source, TensorBase) and view.array.storage is source.array.storage:
        view.base = source.base if source.base is not None else source
        view._view_history = view.base.history


def _apply_out(op: Op, inputs: tuple[Any, ...], arrays: tuple[Any, ...], out: TensorBase, attrs: dict[str, Any]) -> Any:
    if is_grad_enabled() and any(isinstance(x, TensorBase) and x.requires_grad for x in (*inputs, out)):
        raise GradientError(f"{op.name}: out= does not record gradients", next="drop out=, or use it inside no_grad()")
    execute(op, arrays, attrs, out.array)
    return out


def apply_(op: Op, target: TensorBase, *inputs: Any, **attrs: Any) -> Any:
    """Run `op` and write the result into `target`, which takes the result's place on the tape.

    Args:
        target: overwritten; usually also among `inputs`.

    Raises:
        GradientError: if `target` is a leaf that requires a gradient, or a view of one, while recording.
    """
    recording = is_grad_enabled() and any(isinstance(x, TensorBase) and x.requires_grad for x in (target, *inputs))
    if recording:
        owner = target.base if target.base is not None else target
        if owner.is_leaf and owner._requires_grad:
            raise GradientError(
                f"{op.name}: a leaf that requires a gradient (or a view of one) cannot be changed in place",
                next="change it inside no_grad(), or work on a clone()",
            )
    arrays = tuple(x.array if isinstance(x, TensorBase) else x for x in inputs)
    if not (recording and target.array.dtype.is_floating_point):
        execute(op, arrays, attrs, target.array)
        return target
    edges = _edges(inputs)
    before = _kept_from_change(op, edges, arrays, attrs, target.array)
    execute(op, arrays, attrs, target.array)
    _rebase(target, _node(op, edges, before, (target.array,), attrs))
    return target


def _kept_from_change(
    op: Op, edges: Edges, arrays: tuple[Any, ...], attrs: dict[str, Any], target: Array
) -> tuple[Any, ...]:
    """The inputs with copies of those that backward will read and that a change of `target` is about to overwrite."""
    kept = op.context(arrays, (target,), attrs, tuple(e is not None for e in edges)).inputs
    return tuple(
        registry["copy"](a) if isinstance(k, Array) and k.storage is target.storage else a
        for a, k in zip(arrays, kept, strict=True)
    )


def _rebase(target: TensorBase, node: Node) -> None:
    """Give `target` its new history, and its base's when it is a view."""
    base = target.base
    if base is None:
        target.node, target.slot = node, 0
        target.history += 1
        return
    a = target.array
    attrs = {"shape": a.shape, "strides": a.strides, "offset": a.offset - base.array.offset}
    edges = (base.edge(), Edge(node, 0))
    base.node = _node(registry["as_strided_scatter"], edges, (base.array, a), (base.array,), attrs)
    base.slot = 0
    base.history += 1
