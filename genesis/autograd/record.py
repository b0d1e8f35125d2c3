"""TensorBase (an Array with a place on the tape) and `apply`, which runs an op on tensors and records it.

In-place changes follow torch: a leaf that requires a gradient refuses them; a change through a view is written into the
history of the view's base, and other views of that base re-derive their history from it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from genesis.array import Array, Spec
from genesis.autograd.autocast import Kept, autocasting, fp32_type, low_precision_type, wanted_types
from genesis.autograd.graph import BaseNode, Edge, GradientSlot, Lease, Node, Saved, is_same_window
from genesis.autograd.modes import is_grad_enabled
from genesis.backend import mode
from genesis.dtypes import DType
from genesis.errors import GradientError
from genesis.op import BackwardStep, Op, execute, registry


class TensorBase:
    """The part of a Tensor that the tape needs. `genesis.Tensor` adds the operations.

    Attributes:
        array: the values.
        grad: the accumulated gradient of a leaf (a tensor), or None.
        node, output: the op that made this tensor, and which of its outputs it is; None for leaves.
        base: for a differentiable view, the tensor whose history it follows.
    """

    __slots__ = (
        "__weakref__",
        "_accumulate",
        "_gradient_slot",
        "_post_hooks",
        "_requires_grad",
        "_view_history",
        "array",
        "base",
        "grad",
        "history",
        "node",
        "output",
    )

    array: Array
    node: BaseNode | None
    output: int
    _concrete: type[TensorBase]

    def __init_subclass__(cls, concrete: bool = False, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if concrete:  # the class that `apply` makes its results of
            TensorBase._concrete = cls

    def __init__(
        self, array: Any = (), node: Any = None, output: Any = False, *more: Any, requires_grad: bool = False
    ) -> None:
        if type(array) is not Array:  # a user's call, not one of ours with (array, node, output)
            given = [v for v, absent in ((node, None), (output, False)) if v is not absent]
            array, node, output = self._array_of(array, *given, *more), None, 0
        self._begin(array, node, output)
        if requires_grad:
            self.requires_grad_()

    def _begin(self, array: Array, node: BaseNode | None, output: int) -> None:
        """Set all fields; results of ops are made by this alone, without the constructor's checks."""
        self.array, self.node, self.output = array, node, output
        self.grad: Any = None
        self.base: TensorBase | None = None
        self.history = 0  # counts in-place changes recorded on this tensor, when it is a base
        self._view_history = 0  # the base's count when this view last derived its history
        self._requires_grad = False
        self._accumulate: Edge | None = None  # to the node of this leaf, once it has one
        self._gradient_slot: GradientSlot | None = None  # where a first gradient is written (in a flat buffer), if set
        self._post_hooks: tuple[Callable[[Any], None], ...] = ()

    @staticmethod
    def _array_of(*data: Any) -> Array:
        """The values of a tensor that a user makes by the constructor."""
        raise NotImplementedError

    @staticmethod
    def wrap(array: Array, node: BaseNode | None = None, output: int = 0) -> Any:
        """A tensor over `array`, on the tape when `node` is given."""
        made = object.__new__(TensorBase._concrete)
        made._begin(array, node, output)
        return made

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad or self.current_node() is not None

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Mark a leaf of floats as needing a gradient, or not; the tensor itself. Raises: GradientError, for others."""
        if requires_grad and not self.array.dtype.is_floating_point:
            raise GradientError(f"{self.array.dtype} tensors have no gradient", next="use a float type")
        if not requires_grad and self.current_node() is not None:
            raise GradientError("a recorded result cannot stop requiring a gradient", next="use detach()")
        self._requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:
        return self.current_node() is None

    @property
    def owner(self) -> TensorBase:
        """The tensor whose memory and history a view shares; any other one itself."""
        return self if self.base is None else self.base

    def current_node(self) -> BaseNode | None:
        """The node that made this tensor, re-derived where its base was changed in place since."""
        base = self.base
        if base is not None and self._view_history != base.history:
            a = self.array
            attrs = {"shape": a.shape, "strides": a.strides, "offset": a.offset - base.array.offset}
            edge = base.edge()
            self.node = _node(registry["as_strided"], (edge,), (base.array,), (a,), attrs) if edge is not None else None
            self.output, self._view_history = 0, base.history
        return self.node

    def edge(self) -> Edge | None:
        """Where this tensor's gradient goes, or None when it needs none."""
        node = self.node if self.base is None else self.current_node()
        if node is not None:
            return Edge(node, self.output)
        if not self._requires_grad:
            return None
        if self._accumulate is None:
            self._accumulate = Edge(AccumulateNode(self), 0)
        return self._accumulate

    @property
    def _gradient_buffer(self) -> Array | None:
        """The memory of a leaf's gradient: contiguous, of its shape, and of its dtype or a wider one."""
        return None if self._gradient_slot is None else self._gradient_slot.array

    @_gradient_buffer.setter
    def _gradient_buffer(self, array: Array | None) -> None:
        self._gradient_slot = None if array is None else GradientSlot(array, array.dtype is not self.array.dtype)

    def claim_gradient_slot(self) -> Array | None:
        """The memory of the gradient, to be written now, see `GradientSlot.claim`; None where there is no slot."""
        return None if self._gradient_slot is None else self._gradient_slot.claim()

    def accumulate_grad(self, grad: Array, *more: Array) -> None:
        """Add a finished gradient, or the sum of several, to `.grad`; the leaf owns its gradient's memory."""
        if self.grad is not None:
            more = (grad, *more)
        elif self._gradient_slot is not None and is_same_window(grad, self._gradient_slot.array):  # it was made there
            self.grad = TensorBase.wrap(self._gradient_slot.array)
        elif self._gradient_slot is not None and self._gradient_slot.is_wider:
            wider = self._gradient_slot.array
            self.grad = TensorBase.wrap(registry["cast"](grad, dtype=wider.dtype, out=wider))
        elif more:  # the first two are added on their way to where the gradient stays
            self.grad = TensorBase.wrap(registry["add"](grad, more[0], out=self.claim_gradient_slot()))
            more = more[1:]
        else:
            self.grad = TensorBase.wrap(registry["copy"](grad, out=self.claim_gradient_slot()))
        for other in more:
            registry["add"](self.grad.array, other, out=self.grad.array)
        self._gradient_arrived()

    def _gradient_arrived(self) -> None:
        if self._post_hooks:
            self.grad.array.storage.backend.join_side_stream()  # it may have been made on the side stream
        for hook in self._post_hooks:
            hook(self)
        if self._gradient_slot is not None and self._gradient_slot.arrived is not None:
            self._gradient_slot.arrived()


class AccumulateNode(BaseNode):
    """The end of the tape at a leaf: hands the finished gradient over. It refers to the leaf weakly: no cycle delays
    the release of a leaf that nobody can reach any more.
    """

    __slots__ = ("leaf",)

    def __init__(self, leaf: TensorBase) -> None:
        super().__init__("accumulate", (), (Spec(leaf.array.shape, leaf.array.dtype),))
        self.leaf = weakref.ref(leaf)

    def apply(self, grads: list[Array | None], step: BackwardStep) -> tuple[()]:
        leaf, grad = self.leaf(), grads[0]
        if leaf is None or grad is None:
            return ()
        if not step.is_total or leaf.grad is None:
            leaf.accumulate_grad(grad)
            return ()
        held = leaf.grad.array
        if not is_same_window(held, grad):
            registry["copy"](grad, out=held)
        leaf._gradient_arrived()
        return ()

    def accumulated(self) -> Array | None:
        """The gradient of passes before."""
        leaf = self.leaf()
        return None if leaf is None or leaf.grad is None else leaf.grad.array

    def lease(self) -> Lease | None:
        """The use of the gradient slot, where it is free and no gradient was accumulated."""
        leaf = self.leaf()
        if leaf is None or leaf._gradient_slot is None or leaf.grad is not None:
            return None
        return leaf._gradient_slot.lease(is_movable=False)


class SavedCalls(threading.local):
    """Where what nodes save goes while a checkpoint replaces keeping it; see checkpoint.py."""

    intercept: Callable[[Saved], Callable[[], Saved]] | None = None


saving_calls = SavedCalls()

Edges = tuple[Edge | None, ...]


def _edges(inputs: tuple[Any, ...]) -> Edges | None:
    """Where the gradients of inputs go; None where none wants one, seen without a call each: this runs for every op."""
    edges, wanted = [], False
    for x in inputs:
        edge = None
        if isinstance(x, TensorBase) and (x._requires_grad or x.node is not None or x.base is not None):
            edge = x.edge()
            wanted = wanted or edge is not None
        edges.append(edge)
    return tuple(edges) if wanted else None


Leases = dict[int, Lease]


def _leases(op: Op, inputs: tuple[Any, ...]) -> Leases:
    """The gradient slots that outputs of `op` are made in, by output."""
    leases: Leases = {}
    for output, source in op.gradient_outputs:
        leaf = inputs[source]
        if isinstance(leaf, TensorBase) and leaf._gradient_slot and leaf.grad is None and leaf.requires_grad:
            lease = leaf._gradient_slot.lease(is_movable=True)
            if lease is not None:
                leases[output] = lease
    return leases


def _with_idle_memory(op: Op, inputs: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Inside the block, `op` may take its temporaries from memory next to the gradient slots that it writes."""
    for _, source in op.gradient_outputs:
        leaf = inputs[source]
        if isinstance(leaf, TensorBase) and leaf._gradient_slot is not None:
            memory = leaf._gradient_slot.idle_memory()
            if memory is not None:
                return memory.storage.backend.temporaries_from(memory)
    return nullcontext()


def _node(
    op: Op, edges: Edges, arrays: tuple[Any, ...], outs: tuple[Array, ...], attrs: dict[str, Any],
    leases: Leases | None = None,
) -> Node:  # fmt: skip
    """A recorded call of `op`."""
    context = op.context(arrays, outs, attrs, tuple([e is not None for e in edges]))
    if leases:
        context.leases = leases
    saved = Saved(context)
    specs = tuple([o.spec for o in outs])
    if saving_calls.intercept is not None:
        return Node(op, None, edges, specs, saving_calls.intercept(saved))
    return Node(op, saved, edges, specs)


def _cast(x: Any, dtype: DType | None) -> Any:
    """x in the type that autocast wants of it; of a parameter that stays as it is, one cast serves the whole block."""
    if dtype is None or not isinstance(x, TensorBase):
        return x
    if not (autocasting.keeps and x._requires_grad and x.node is None):
        return apply(registry["cast"], x, dtype=dtype)
    array, key = x.array, (id(x), dtype)
    known = autocasting.kept.get(key)
    if known is None or not known.serves(array, is_grad_enabled()):
        made = apply(registry["cast"], x, dtype=dtype)
        known = autocasting.kept[key] = Kept(x, array, array.storage.version, made)
    return known.made


def in_low_precision(*tensors: Any) -> tuple[Any, ...]:
    """Operands of a function that counts as a matmul, as autocast wants them."""
    return _all_cast(tensors, low_precision_type)


def in_fp32(*tensors: Any) -> tuple[Any, ...]:
    """Operands of a function made of several ops that as a whole needs range, as autocast wants them."""
    return _all_cast(tensors, fp32_type)


def _all_cast(tensors: tuple[Any, ...], wanted: Callable[[Array], DType | None]) -> tuple[Any, ...]:
    if not autocasting.low:
        return tensors
    return tuple([_cast(x, wanted(x.array)) if isinstance(x, TensorBase) else x for x in tensors])


def apply(op: Op, *inputs: Any, out: TensorBase | None = None, **attrs: Any) -> Any:
    """Run `op` on tensors (and numbers) and record it when a gradient may be asked for; one tensor, or several.

    Integer and bool outputs never require a gradient. A float result of an op that has no gradient does require one
    where its inputs do, and says so when backward reaches it.
    """
    found, tracked = [], False
    for x in inputs:
        if isinstance(x, TensorBase):
            found.append(x.array)
            tracked = tracked or x._requires_grad or x.node is not None or x.base is not None
        else:
            found.append(x)
    arrays = tuple(found)
    if out is not None:
        if is_grad_enabled() and any(isinstance(x, TensorBase) and x.requires_grad for x in (*inputs, out)):
            raise GradientError(
                f"{op.name}: out= does not record gradients", next="drop out=, or use it inside no_grad()"
            )
        execute(op, arrays, attrs, out.array)
        return out
    if autocasting.low and (wanted := wanted_types(op, arrays)):
        inputs = tuple([_cast(x, dtype) for x, dtype in zip(inputs, wanted, strict=True)])
        arrays = tuple([x.array if isinstance(x, TensorBase) else x for x in inputs])
    leases = _leases(op, inputs) if op.gradient_outputs and is_grad_enabled() else None
    if leases:
        with _with_idle_memory(op, inputs):
            results = execute(op, arrays, attrs, _outs(op, arrays, attrs, leases))
    else:
        results = execute(op, arrays, attrs)
    node = None
    if tracked and mode.grad:
        edges = _edges(inputs)
        if edges is not None and True in [r.dtype.is_floating_point for r in results]:
            node = _node(op, edges, arrays, results, attrs, leases)
    if len(results) == 1 and op.view is None:  # nearly all calls
        made = object.__new__(TensorBase._concrete)  # `wrap`, without its call
        made._begin(results[0], node, 0)
        return made
    tensors = tuple(
        TensorBase.wrap(r, node if r.dtype.is_floating_point and i not in op.auxiliary else None, i)
        for i, r in enumerate(results)
    )
    source = inputs[0] if op.view is not None else None
    if isinstance(source, TensorBase) and tensors[0].array.storage is source.array.storage:
        tensors[0].base = source.owner
        tensors[0]._view_history = source.owner.history
    return tensors[0] if len(tensors) == 1 else tensors


def _outs(op: Op, arrays: tuple[Any, ...], attrs: dict[str, Any], leases: Leases) -> tuple[Array | None, ...] | None:
    """The outputs' memory as `execute` takes it; None where the op has not those outputs, as its attributes say."""
    inferred = op.infer(*arrays, **attrs)
    count = 1 if isinstance(inferred, Spec) else len(inferred)
    if max(leases) >= count:
        leases.clear()
        return None
    return tuple([leases[i].array if i in leases else None for i in range(count)])


def apply_(op: Op, target: TensorBase, *inputs: Any, **attrs: Any) -> Any:
    """Run `op` and write the result into `target`, which takes the result's place on the tape.

    Args:
        target: overwritten; usually also among `inputs`.

    Raises:
        GradientError: if `target` is a leaf that requires a gradient, or a view of one, while recording.
    """
    recording = is_grad_enabled() and any(isinstance(x, TensorBase) and x.requires_grad for x in (target, *inputs))
    if recording:
        owner = target.owner
        if owner.is_leaf and owner._requires_grad:
            raise GradientError(
                f"{op.name}: a leaf that requires a gradient (or a view of one) cannot be changed in place",
                next="change it inside no_grad(), or work on a clone()",
            )
    arrays = tuple(x.array if isinstance(x, TensorBase) else x for x in inputs)
    if not (recording and target.array.dtype.is_floating_point):
        execute(op, arrays, attrs, target.array)
        return target
    edges = _edges(inputs) or (None,) * len(inputs)
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
        target.node, target.output = node, 0
        target.history += 1
        return
    a = target.array
    attrs = {"shape": a.shape, "strides": a.strides, "offset": a.offset - base.array.offset}
    edges = (base.edge(), Edge(node, 0))
    base.node = _node(registry["as_strided_scatter"], edges, (base.array, a), (base.array,), attrs)
    base.output = 0
    base.history += 1
