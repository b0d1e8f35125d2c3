"""TensorBase (an Array with a position on the tape) and `apply`, which runs an op on tensors and records it.

In-place changes follow torch. A leaf that requires a gradient refuses them. A change through a view enters the history
of the view's base, and other views of that base re-derive their history from it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Self

from genesis.array import _HELD, Array, Spec, constant, empty, empty_strided, is_sole_owner, overlap_in_part
from genesis.autograd.autocast import CachedCast, autocasting, fp32_type, low_precision_type, wanted_types
from genesis.autograd.graph import BaseNode, Edge, GradientSlot, Lease, Node, Saved, is_same_window
from genesis.autograd.modes import is_grad_enabled
from genesis.backend import mode
from genesis.dtypes import DType
from genesis.errors import DeviceError, DTypeError, GradientError, ShapeError
from genesis.op import Op, common_device, current_tracer, execute, registry, tracing
from genesis.shapes import Shape, is_contiguous, preserved_strides


class TensorBase:
    """The part of a Tensor that the tape needs. `genesis.Tensor` adds the operations.

    Attributes:
        array: values of the tensor.
        grad: accumulated gradient of a leaf (a tensor), or None.
        node: recorded op that produced this tensor; None for a leaf.
        output: index of this tensor among the outputs of `node`.
        base: tensor whose history a differentiable view follows.
    """

    __slots__ = (
        "__weakref__",
        "_accumulate",
        "_grad",
        "_gradient_slot",
        "_post_hooks",
        "_requires_grad",
        "_view_history",
        "array",
        "base",
        "history",
        "node",
        "output",
    )

    array: Array
    node: BaseNode | None
    output: int
    _concrete: type[TensorBase]

    def __init_subclass__(cls, concrete: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if concrete:  # the class of the results of `apply`
            TensorBase._concrete = cls

    def __init__(
        self, array: Any = (), node: Any = None, output: Any = False, *more: Any, requires_grad: bool = False
    ) -> None:
        if type(array) is not Array and not isinstance(
            array, Array
        ):  # a call by a user, not an internal one with (array, node, output)
            data = [v for v, absent in ((node, None), (output, False)) if v is not absent]
            array, node, output = self._array_of(array, *data, *more), None, 0
        self._begin(array, node, output)
        if requires_grad:
            self.requires_grad_()

    def _begin(self, array: Array, node: BaseNode | None, output: int) -> None:
        """Set all fields. Op results use only this method and skip the constructor's checks."""
        self.array, self.node, self.output = array, node, output
        self._grad: Any = None
        self.base: TensorBase | None = None
        self.history = 0  # counts in-place changes recorded on this tensor, when it is a base
        self._view_history = 0  # the base's count when this view last derived its history
        self._requires_grad = False
        self._accumulate: Edge | None = None  # to the AccumulateNode of this leaf, made on first use
        self._gradient_slot: GradientSlot | None = None  # memory for the first gradient, in a flat buffer
        self._post_hooks: tuple[Callable[[Any], None], ...] = ()

    @staticmethod
    def _array_of(*data: Any) -> Array:
        """The values of a tensor that a user constructs."""
        raise NotImplementedError

    def take_memory(self, array: Array) -> None:
        """Continue over other memory, for `x.data = …`. Raises GradientError if a recorded result would change shape.

        A leaf in an optimizer's flat buffer returns there at the next step, with its new values.
        """
        own, node = self.array, self.current_node()
        if array is own or (array.dtype is own.dtype and is_same_window(array, own)):
            return
        is_alike = array.spec == own.spec and array.device == own.device
        if node is not None and not is_alike:
            raise GradientError(
                f"a recorded result cannot change from {own.shape}, {own.dtype} to {array.shape}, {array.dtype}",
                next="detach() it first",
            )
        if not is_alike:
            self._accumulate = self._gradient_slot = None
        self.array, self.base = array, None

    @staticmethod
    def wrap(array: Array, node: BaseNode | None = None, output: int = 0) -> Any:
        """Return a tensor over `array`, recorded as an output of `node` if there is one."""
        tensor = object.__new__(TensorBase._concrete)
        tensor._begin(array, node, output)
        return tensor

    def set_grad(self, grad: Any) -> None:
        """Set `.grad`. Raises DTypeError, ShapeError or DeviceError unless `grad` is None or a tensor like this one."""
        if grad is not None:
            if not isinstance(grad, TensorBase) or grad is self:
                shown = "the tensor itself" if grad is self else f"a {type(grad).__name__}"
                raise DTypeError(f".grad is set to {shown}", next="assign another tensor or None")
            own, given = self.array, grad.array
            wider = self._gradient_slot.array.dtype if self._gradient_slot is not None else own.dtype
            if given.shape != own.shape:
                raise ShapeError(f".grad of shape {given.shape} does not suit a tensor of shape {own.shape}")
            if given.dtype not in (own.dtype, wider):
                raise DTypeError(f".grad is {given.dtype}, the tensor {own.dtype}", next="cast it with .to()")
            if given.device != own.device:
                raise DeviceError(f".grad is on {given.device}, the tensor on {own.device}", next="move it with .to()")
        self._grad = grad

    grad: Any = property(attrgetter("_grad"), set_grad, doc="The accumulated gradient, or None.")

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad or self.current_node() is not None

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether a float leaf requires a gradient, and return the tensor. Raises GradientError for others."""
        if requires_grad and not self.array.dtype.is_floating_point:
            raise GradientError(f"{self.array.dtype} tensors have no gradient", next="use a float type")
        if not requires_grad and self.current_node() is not None:
            raise GradientError("a recorded result always requires a gradient", next="use detach()")
        self._requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:
        return self.current_node() is None

    @property
    def owner(self) -> TensorBase:
        """The base of a view, or the tensor itself."""
        return self if self.base is None else self.base

    def current_node(self) -> BaseNode | None:
        """The node that produced this tensor, re-derived if its base was changed in place."""
        base = self.base
        if base is not None and self._view_history != base.history:
            a = self.array
            attrs = {"shape": a.shape, "strides": a.strides, "offset": a.offset - base.array.offset}
            edge = base.edge()
            self.node = _node(registry["as_strided"], (edge,), (base.array,), (a,), attrs) if edge is not None else None
            self.output, self._view_history = 0, base.history
        return self.node

    def edge(self) -> Edge | None:
        """The edge that receives this tensor's gradient, or None if it does not require one."""
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
        """The memory of a leaf's gradient: contiguous, with its shape, in its dtype or a wider one."""
        return None if self._gradient_slot is None else self._gradient_slot.array

    @_gradient_buffer.setter
    def _gradient_buffer(self, array: Array | None) -> None:
        self._gradient_slot = None if array is None else GradientSlot(array, array.dtype is not self.array.dtype)

    def claim_gradient_slot(self) -> Array | None:
        """Claim the memory of the gradient, see `GradientSlot.claim`. None for a leaf without a slot."""
        return None if self._gradient_slot is None else self._gradient_slot.claim()

    def accumulate_grad(self, grad: Array, *more: Array) -> None:
        """Add one gradient or several to `.grad`. The leaf owns the memory of its gradient."""
        if self.grad is not None:
            more = (grad, *more)
        elif self._gradient_slot is not None and is_same_window(grad, self._gradient_slot.array):  # already in place
            self._grad = TensorBase.wrap(self._gradient_slot.array)
        elif self._gradient_slot is not None and self._gradient_slot.is_wider:
            wider = self._gradient_slot.array
            self._grad = TensorBase.wrap(registry["cast"](grad, dtype=wider.dtype, out=wider))
        elif more:  # adding the first two straight into the slot saves a copy
            self._grad = TensorBase.wrap(registry["add"](grad, more[0], out=self.claim_gradient_slot()))
            more = more[1:]
        else:
            self._grad = TensorBase.wrap(registry["copy"](grad, out=self.claim_gradient_slot()))
        for other in more:
            registry["add"](self.grad.array, other, out=self.grad.array)
        self._gradient_arrived()

    def _gradient_arrived(self) -> None:
        if self._post_hooks:
            self.grad.array.storage.backend.join_side_stream()  # the side stream may have computed it
        for hook in self._post_hooks:
            hook(self)
        if self._gradient_slot is not None and self._gradient_slot.arrived is not None:
            self._gradient_slot.arrived()


class AccumulateNode(BaseNode):
    """The end of the tape at a leaf, which receives the finished gradient. It refers to the leaf weakly, so that no
    reference cycle delays freeing the leaf.
    """

    __slots__ = ("leaf",)

    def __init__(self, leaf: TensorBase) -> None:
        super().__init__("accumulate", (), (Spec(leaf.array.shape, leaf.array.dtype),))
        self.leaf = weakref.ref(leaf)
        self.rank -= 1 << 62  # before all other nodes, although the sequence number may be low

    def receive(self, grads: list[Array | None], is_total: bool) -> None:
        """Accumulate the gradient in `grads`, the only reference to it; `is_total` if it contains the
        gradient of earlier passes.
        """
        leaf, grad = self.leaf(), grads.pop()
        if leaf is None or grad is None:
            return
        held = leaf._grad
        if held is not None and is_total:
            if not is_same_window(held.array, grad):
                registry["copy"](grad, out=held.array)
        elif (
            held is None
            and leaf._gradient_slot is None
            and sys.getrefcount(grad) == _HELD
            and is_sole_owner(grad)  # nobody else can see it: no copy
        ):
            leaf._grad = TensorBase.wrap(grad)
        else:
            leaf.accumulate_grad(grad)
            return
        leaf._gradient_arrived()

    def accumulated(self) -> Array | None:
        """The gradient that earlier passes accumulated."""
        leaf = self.leaf()
        return None if leaf is None or leaf.grad is None else leaf.grad.array

    def lease(self) -> Lease | None:
        """Lease the gradient slot. None if it is in use or the leaf already has a gradient."""
        leaf = self.leaf()
        if leaf is None or leaf._gradient_slot is None or leaf.grad is not None:
            return None
        return leaf._gradient_slot.lease(is_movable=False)


class SavedCalls(threading.local):
    """The hook by which a checkpoint intercepts what nodes save; see checkpoint.py."""

    intercept: Callable[[Saved], Callable[[], Saved]] | None = None


saving_calls = SavedCalls()

Edges = tuple[Edge | None, ...]


def _edges(inputs: tuple[Any, ...]) -> Edges | None:
    """The edges of the inputs, or None if no input requires a gradient. Fields are read inline: every op runs this."""
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
    """Lease the gradient slots into which `op` writes its outputs, by output."""
    leases: Leases = {}
    for output, source in op.gradient_outputs:
        leaf = inputs[source]
        if isinstance(leaf, TensorBase) and leaf._gradient_slot and leaf.grad is None and leaf.requires_grad:
            lease = leaf._gradient_slot.lease(is_movable=True)
            if lease is not None:
                leases[output] = lease
    return leases


def _with_idle_memory(op: Op, inputs: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Inside the block, `op` may allocate temporaries in idle memory next to the gradient slots that it writes."""
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
    """Record a call of `op`."""
    context = op.context(arrays, outs, attrs, tuple([e is not None for e in edges]))
    if leases:
        context.leases = leases
    saved = Saved(context)
    specs = tuple([o.spec for o in outs])
    if saving_calls.intercept is not None:
        return Node(op, None, edges, specs, saving_calls.intercept(saved))
    return Node(op, saved, edges, specs)


def _cast(x: Any, dtype: DType | None) -> Any:
    """Cast `x` to `dtype`, or return it if `dtype` is None. Casts of an unchanged parameter are cached in the block."""
    if dtype is None or not isinstance(x, TensorBase):
        return x
    if not (autocasting.keeps and x._requires_grad and x.node is None):
        return apply(registry["cast"], x, dtype=dtype)
    array, key = x.array, (id(x), dtype)
    cached = autocasting.casts.get(key)
    if cached is None or not cached.serves(array, is_grad_enabled()):
        cast = apply(registry["cast"], x, dtype=dtype)
        cached = autocasting.casts[key] = CachedCast(x, array, array.storage.version, cast)
    return cached.cast


def in_low_precision(*tensors: Any) -> tuple[Any, ...]:
    """Cast the operands of a function that autocast treats as a matmul."""
    return _all_cast(tensors, low_precision_type)


def in_fp32(*tensors: Any) -> tuple[Any, ...]:
    """Cast the operands of a function of several ops that as a whole needs the range of float32."""
    return _all_cast(tensors, fp32_type)


def _all_cast(tensors: tuple[Any, ...], wanted: Callable[[Array], DType | None]) -> tuple[Any, ...]:
    if not autocasting.low:
        return tensors
    return tuple([_cast(x, wanted(x.array)) if isinstance(x, TensorBase) else x for x in tensors])


class Taped(Array):
    """An array of a recorded backward pass: `edge` receives its gradient, `tape` records; see double.py."""

    __slots__ = ("edge", "tape")

    edge: Edge
    tape: Any

    def view(self, shape: Shape, strides: Shape, offset: int | None = None) -> Array:
        """Return another window, recorded as an `as_strided` view."""
        start = 0 if offset is None else offset - self.offset
        attrs = {"shape": shape, "strides": strides, "offset": start}
        with tracing(None):
            return self.tape.call(registry["as_strided"], (self,), attrs, None)[0]  # type: ignore[no-any-return]


def as_tensor(gradient: Array) -> Any:
    """Return a gradient as a tensor, with its history if the pass is recorded."""
    if isinstance(gradient, Taped):
        return TensorBase.wrap(constant(gradient), gradient.edge.node, gradient.edge.output)
    return TensorBase.wrap(gradient)


def as_gradient(tensor: TensorBase) -> Array:
    """Return a tensor that a hook or a custom function computed as a gradient; a recorded pass keeps its history."""
    tracer, a = current_tracer(), tensor.array
    edge = None if tracer is None else tensor.edge()
    return a if edge is None else taped(a, edge, tracer)


def taped(array: Array, edge: Edge, tape: Any) -> Taped:
    """Return a window on the same elements that has a history."""
    result = Taped(array.storage, array.shape, array.strides, array.dtype, array.device, array.offset)
    result.edge, result.tape = edge, tape
    return result


def apply(op: Op, *inputs: Any, out: TensorBase | None = None, **attrs: Any) -> Any:
    """Run `op` on tensors and numbers, and record it if an input requires a gradient. Returns one tensor or several.

    Integer and bool outputs never require a gradient. A float result of an op without a gradient requires one if its
    inputs do, and backward raises an error when it reaches the op.
    """
    # Unwrap the arrays, and see whether an input may require a gradient.
    unwrapped, tracked, is_strided = [], False, False
    for x in inputs:
        if isinstance(x, TensorBase):
            array = x.array
            unwrapped.append(array)
            is_strided = is_strided or array.strides.__class__ is tuple
            tracked = tracked or x._requires_grad or x.node is not None or x.base is not None
        else:
            unwrapped.append(x)
    arrays = tuple(unwrapped)
    if out is not None:
        if is_grad_enabled() and any(isinstance(x, TensorBase) and x.requires_grad for x in (*inputs, out)):
            raise GradientError(
                f"{op.name}: out= does not record gradients", next="remove out=, or use it inside no_grad()"
            )
        execute(op, arrays, attrs, _destination(op, arrays, attrs, out))
        return out
    if autocasting.low and (wanted := wanted_types(op, arrays)):
        inputs = tuple([_cast(x, dtype) for x, dtype in zip(inputs, wanted, strict=True)])
        arrays = tuple([x.array if isinstance(x, TensorBase) else x for x in inputs])
    # Run the op; it may write gradients that forward computes straight into their slots.
    leases = _leases(op, inputs) if op.gradient_outputs and is_grad_enabled() else None
    if leases:
        with _with_idle_memory(op, inputs):
            results = execute(op, arrays, attrs, _outs(op, arrays, attrs, leases))
    else:
        results = execute(op, arrays, attrs, _in_order(op, arrays, attrs) if is_strided and op.elementwise else None)
    node = None
    if tracked and mode.grad:
        edges = _edges(inputs)
        if edges is not None and True in [r.dtype.is_floating_point for r in results]:
            node = _node(op, edges, arrays, results, attrs, leases)
    if len(results) == 1 and op.view is None:  # nearly all calls
        tensor = object.__new__(TensorBase._concrete)  # `wrap` inlined, to save a call
        tensor._begin(results[0], node, 0)
        return tensor
    tensors = tuple([
        TensorBase.wrap(r, node if r.dtype.is_floating_point and i not in op.auxiliary else None, i)
        for i, r in enumerate(results)
    ])  # fmt: skip
    source = inputs[0] if op.view is not None else None
    if isinstance(source, TensorBase) and tensors[0].array.storage is source.array.storage:
        tensors[0].base = source.owner
        tensors[0]._view_history = source.owner.history
    return tensors[0] if len(tensors) == 1 else tensors


def _in_order(op: Op, arrays: tuple[Any, ...], attrs: dict[str, Any]) -> Array | None:
    """Memory for an elementwise result that stores dimensions in the order of the operands; None if it is row-major."""
    strided = [(x.shape, x.strides) for x in arrays if isinstance(x, Array)]
    is_plain = op.name == "copy" or registry.get(op.name) is not op  # a user's kernel may write row-major only
    if is_plain or (len(strided) == 1 and is_contiguous(*strided[0])):
        return None
    spec = op.infer(*arrays, **attrs)
    if not isinstance(spec, Spec):
        return None
    strides = preserved_strides(spec.shape, *strided)
    if is_contiguous(spec.shape, strides):
        return None
    return empty_strided(spec.shape, strides, spec.dtype, common_device(op.name, arrays))


def _destination(op: Op, arrays: tuple[Any, ...], attrs: dict[str, Any], out: TensorBase) -> Array:
    """Return the memory of `out=`; an empty tensor takes new memory of the result's shape.

    Raises:
        ShapeError: if the memory overlaps a part of an input's memory.
    """
    if 0 in out.array.shape:
        spec = op.infer(*arrays, **{name: value for name, value in attrs.items() if name != "device"})
        if isinstance(spec, Spec) and spec.shape != out.array.shape:
            out.array = empty(spec.shape, out.array.dtype, out.array.device)
    if any(isinstance(x, Array) and overlap_in_part(x, out.array) for x in arrays):
        raise ShapeError(f"{op.name}: out shares a part of an input's memory", next="clone() the input")
    return out.array


def _outs(op: Op, arrays: tuple[Any, ...], attrs: dict[str, Any], leases: Leases) -> tuple[Array | None, ...] | None:
    """The memory of the outputs for `execute`, or None if the op with these attributes lacks the leased outputs."""
    inferred = op.infer(*arrays, **attrs)
    count = 1 if isinstance(inferred, Spec) else len(inferred)
    if max(leases) >= count:
        leases.clear()
        return None
    return tuple([leases[i].array if i in leases else None for i in range(count)])


def apply_(op: Op, target: TensorBase, *inputs: Any, **attrs: Any) -> Any:
    """Run `op`, write the result into `target`, and record `target` as the result.

    Args:
        target: tensor to overwrite, usually also one of `inputs`.

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
    """The inputs, with copies of those that backward reads and that writing `target` will overwrite."""
    kept = op.context(arrays, (target,), attrs, tuple(e is not None for e in edges)).inputs
    return tuple(
        registry["copy"](a) if isinstance(k, Array) and k.storage is target.storage else a
        for a, k in zip(arrays, kept, strict=True)
    )


def _rebase(target: TensorBase, node: BaseNode, output: int = 0) -> None:
    """Set the new history of `target` and, if it is a view, of its base."""
    base = target.base
    if base is None:
        target.node, target.output = node, output
        target.history += 1
        return
    a = target.array
    attrs = {"shape": a.shape, "strides": a.strides, "offset": a.offset - base.array.offset}
    edges = (base.edge(), Edge(node, output))
    base.node = _node(registry["as_strided_scatter"], edges, (base.array, a), (base.array,), attrs)
    base.output = 0
    base.history += 1
