"""Custom differentiable functions: a class with `forward` and `backward`, as in torch.autograd.Function."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from genesis.array import Array, Spec
from genesis.autograd.graph import BaseNode, Edge
from genesis.autograd.modes import is_grad_enabled, no_grad
from genesis.autograd.record import TensorBase, _rebase, as_gradient, as_tensor
from genesis.errors import GradientError, UsageError
from genesis.op import BackwardStep, registry


class FunctionContext:
    """Values that `forward` saves for `backward`, also in attributes that users add.

    `needs_input_grad` has a flag for each argument of forward: whether it requires a gradient.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.materialize_grads = True
        self._saved: tuple[tuple[TensorBase | None, int], ...] = ()
        self._dirty: tuple[TensorBase, ...] = ()
        self._constant: tuple[TensorBase, ...] = ()
        self._outs: tuple[Any, ...] = ()
        self._node: Callable[[], BaseNode | None] = lambda: None

    def save_for_backward(self, *tensors: Any) -> None:
        """Save arguments or results for backward, which raises an error if one was changed in place."""
        for t in tensors:
            if t is not None and not isinstance(t, TensorBase):
                what = f"save_for_backward() takes tensors, got a {type(t).__name__}"
                raise UsageError(what, next="set other values as attributes of ctx")
        self._saved = tuple((t, 0 if t is None else t.array.storage.version) for t in tensors)

    def save_for_forward(self, *tensors: TensorBase | None) -> None:
        """Accept tensors for forward-mode differentiation, which does not exist: nothing is kept."""

    def mark_dirty(self, *tensors: TensorBase) -> None:
        """Name the arguments that forward changes in place. Forward must return them."""
        self._dirty = tensors

    def mark_non_differentiable(self, *tensors: TensorBase) -> None:
        """Name the results that require no gradient."""
        self._constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether backward gets zeros, and not None, for results that nothing depends on."""
        self.materialize_grads = value

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        for t, version in self._saved:
            if t is not None and t.array.storage.version != version:
                raise GradientError(
                    f"a saved tensor of shape {t.array.shape} was changed in place", next="clone() it first"
                )
        return tuple(self._with_history(t) for t, _ in self._saved)

    def _with_history(self, tensor: TensorBase | None) -> Any:
        """Return a saved tensor with its history: for a result, this node, which did not exist in forward."""
        node, index = self._node(), next((i for i, o in enumerate(self._outs) if o is tensor), None)
        if tensor is None or node is None or index is None or tensor.node is not None:
            return tensor
        is_differentiable = tensor.array.dtype.is_floating_point and not _is_among(tensor, self._constant)
        return TensorBase.wrap(tensor.array, node, index) if is_differentiable else tensor


FunctionCtx = FunctionContext


class _FunctionNode(BaseNode):
    __slots__ = ("context", "function", "input_specs")

    def __init__(
        self,
        function: type[Function],
        context: FunctionContext,
        edges: tuple[Edge | None, ...],
        specs: tuple[Spec | None, ...],
        input_specs: tuple[Spec | None, ...],
    ) -> None:
        super().__init__(function.__name__, edges, specs)
        self.function, self.input_specs = function, input_specs
        self.context: FunctionContext | None = context

    def apply(self, grads: list[Array | None], step: BackwardStep) -> Sequence[Array | None]:
        if self.context is None:
            raise self.released()
        device = next(g.device for g in grads if g is not None)
        output_grads: list[Any] = []  # zeros for an output that nothing depends on
        for grad, spec in zip(grads, self.specs, strict=True):
            if grad is None and spec is not None and self.context.materialize_grads:
                grad = registry["fill"](value=0, shape=spec.shape, dtype=spec.dtype, device=device)
            output_grads.append(None if grad is None else as_tensor(grad))
        input_grads = self.function.backward(self.context, *output_grads)
        input_grads = tuple(input_grads) if isinstance(input_grads, (tuple, list)) else (input_grads,)
        count = len(self.edges)
        if len(input_grads) < count or any(g is not None for g in input_grads[count:]):
            raise GradientError(f"{self.name}.backward returned {len(input_grads)} gradients for {count} arguments")
        return [self._fit(i, g) for i, g in enumerate(input_grads[:count])]

    def _fit(self, i: int, grad: Any) -> Array | None:
        spec = self.input_specs[i]
        if grad is None:
            return None
        if not isinstance(grad, TensorBase):
            place = f"argument {i}" if spec is None else f"argument {i} of shape {spec.shape}"
            raise GradientError(f"{self.name}.backward returned {type(grad).__name__} for {place}")
        if spec is None:
            raise GradientError(f"{self.name}.backward returned a gradient for argument {i}, which is not a tensor")
        if self.edges[i] is None:
            return None
        array = as_gradient(grad)
        if array.shape != spec.shape:
            array = self._summed(i, array, spec)
        return array if array.dtype is spec.dtype else registry["cast"](array, dtype=spec.dtype)

    def _summed(self, i: int, array: Array, spec: Spec) -> Array:
        """Sum the gradient of a broadcast argument."""
        extra = array.ndim - len(spec.shape)
        if extra < 0 or any(s not in (1, n) for s, n in zip(spec.shape, array.shape[extra:], strict=True)):
            raise GradientError(f"{self.name}.backward returned {array.shape} for argument {i} of shape {spec.shape}")
        return registry["sum_to_shape"](array, shape=spec.shape)  # type: ignore[no-any-return]

    def release(self) -> None:
        self.context = None


class _OnceNode(BaseNode):
    """The history of gradients that `once_differentiable` computed: differentiating them is an error."""

    __slots__ = ()

    def apply(self, grads: list[Array | None], step: BackwardStep) -> Sequence[Array | None]:
        raise GradientError(
            f"{self.name} is marked once_differentiable, and its gradient was differentiated",
            next="leave create_graph out, or remove the decorator",
        )


def once_differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a `backward` whose result cannot be differentiated. It runs without recording.

    As in torch, differentiating its gradients is an error if the incoming gradients require a gradient.
    """

    @functools.wraps(function)
    def once(ctx: FunctionContext, *grads: Any) -> Any:
        with no_grad():
            result = function(ctx, *grads)
        if not is_grad_enabled():
            return result
        edges = tuple(g.edge() if isinstance(g, TensorBase) else None for g in grads)
        if all(e is None for e in edges):
            return result
        results = result if isinstance(result, tuple) else (result,)
        specs = tuple(r.array.spec if isinstance(r, TensorBase) else None for r in results)
        node = _OnceNode(function.__qualname__, edges, specs)
        marked = tuple(
            TensorBase.wrap(r.array, node, i) if isinstance(r, TensorBase) else r for i, r in enumerate(results)
        )
        return marked if isinstance(result, tuple) else marked[0]

    return once


def _specs(values: tuple[Any, ...]) -> tuple[Spec | None, ...]:
    return tuple(v.array.spec if isinstance(v, TensorBase) else None for v in values)


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    return any(value is each for each in values)


class Function:
    """Base class of custom functions: override `forward` and `backward` as static methods, and call `apply(*args)`.

    Example:
        >>> class Cube(genesis.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x**3
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         (x,) = ctx.saved_tensors
        ...         return 3 * x**2 * grad
        >>> x = genesis.tensor(2.0, requires_grad=True)
        >>> genesis.autograd.grad(Cube.apply(x), x)[0].item()
        12.0
    """

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Compute the result from `(ctx, *args)`, or from `args` alone with `setup_context`. The tape does not record
        inside.
        """
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what backward needs after forward, which then takes no ctx."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Any) -> Any:
        """Return a gradient or None per argument of forward; further ones must be None."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run forward and record this function as one node.

        Inside a checkpoint, its saved tensors are kept, while those that ops save are dropped.
        """
        has_setup = cls.setup_context is not Function.setup_context
        if has_setup:
            bound = inspect.signature(cls.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        edges = tuple(a.edge() if isinstance(a, TensorBase) and is_grad_enabled() else None for a in args)
        ctx = FunctionContext(tuple(isinstance(a, TensorBase) and a.requires_grad for a in args))
        with no_grad():
            if has_setup:
                result = cls.forward(*args, **kwargs)
                cls.setup_context(ctx, args, result)
            else:
                result = cls.forward(ctx, *args, **kwargs)
        outs = result if isinstance(result, tuple) else (result,)
        if any(not _is_among(d, outs) for d in ctx._dirty):
            raise GradientError(f"{cls.__name__}.forward does not return a tensor that it marked dirty")
        if not any(e is not None for e in edges):
            return result
        node = _FunctionNode(cls, ctx, edges, _specs(outs), _specs(args))
        ctx._outs, ctx._node = outs, weakref.ref(node)
        taped = tuple(_output(ctx, node, i, o) for i, o in enumerate(outs))
        return taped if isinstance(result, tuple) else taped[0]


def _output(ctx: FunctionContext, node: _FunctionNode, i: int, out: Any) -> Any:
    """One result of forward with its history. An argument that was changed in place gets a new history itself."""
    if not isinstance(out, TensorBase):
        return out
    is_differentiable = out.array.dtype.is_floating_point and not _is_among(out, ctx._constant)
    if not _is_among(out, ctx._dirty):
        return TensorBase.wrap(out.array, node, i) if is_differentiable else TensorBase.wrap(out.array)
    if out.owner.is_leaf and out.owner._requires_grad:
        raise GradientError(
            f"{node.name} changes a leaf that requires a gradient, or a view of one, in place",
            next="change it inside no_grad(), or work on a clone()",
        )
    if is_differentiable:
        _rebase(out, node, i)
    return out
