"""Custom differentiable functions: a class with `forward` and `backward`, as in torch.autograd.Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genesis.array import Array, Spec
from genesis.autograd.graph import BaseNode, Edge
from genesis.autograd.modes import is_grad_enabled, no_grad
from genesis.autograd.record import TensorBase
from genesis.errors import GradientError
from genesis.op import BackwardStep, registry


class FunctionContext:
    """Values that `forward` saves for `backward`, also in attributes that users add.

    `needs_input_grad` has a flag for each argument of forward: whether its gradient will be used.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self._saved: tuple[tuple[TensorBase | None, int], ...] = ()

    def save_for_backward(self, *tensors: TensorBase | None) -> None:
        """Save tensors for backward, which raises an error if one was changed in place."""
        self._saved = tuple((t, 0 if t is None else t.array.storage.version) for t in tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        for t, version in self._saved:
            if t is not None and t.array.storage.version != version:
                raise GradientError(
                    f"a saved tensor of shape {t.array.shape} was changed in place", next="clone() it first"
                )
        return tuple(t for t, _ in self._saved)


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
        output_grads: list[Any] = []  # zeros for a float output that nothing depends on
        for grad, spec in zip(grads, self.specs, strict=True):
            if grad is None and spec is not None and spec.dtype.is_floating_point:
                grad = registry["fill"](value=0, shape=spec.shape, dtype=spec.dtype, device=device)
            output_grads.append(None if grad is None else TensorBase.wrap(grad))
        input_grads = self.function.backward(self.context, *output_grads)
        input_grads = input_grads if isinstance(input_grads, tuple) else (input_grads,)
        if len(input_grads) != len(self.edges):
            raise GradientError(
                f"{self.name}.backward returned {len(input_grads)} gradients for {len(self.edges)} arguments"
            )
        return [self._fit(i, g) for i, g in enumerate(input_grads)]

    def _fit(self, i: int, grad: Any) -> Array | None:
        spec = self.input_specs[i]
        if grad is None or spec is None or self.edges[i] is None:
            return None
        if not isinstance(grad, TensorBase) or grad.array.shape != spec.shape:
            returned = grad.array.shape if isinstance(grad, TensorBase) else type(grad).__name__
            raise GradientError(f"{self.name}.backward returned {returned} for argument {i} of shape {spec.shape}")
        array = grad.array
        return array if array.dtype is spec.dtype else registry["cast"](array, dtype=spec.dtype)

    def release(self) -> None:
        self.context = None


def _specs(values: tuple[Any, ...]) -> tuple[Spec | None, ...]:
    return tuple(v.array.spec if isinstance(v, TensorBase) else None for v in values)


class Function:
    """Base class of custom functions: override `forward` and `backward` as static methods, and call `apply(*args)`."""

    @staticmethod
    def forward(ctx: FunctionContext, *args: Any) -> Any:
        """Compute the result. The tape does not record inside."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Any) -> Any:
        """Return a gradient or None per argument of forward. `grads` has zeros for results that nothing depends on."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward and record this function as one node.

        Inside a checkpoint, its saved tensors are kept, while those that ops save are dropped.
        """
        edges = tuple(a.edge() if isinstance(a, TensorBase) and is_grad_enabled() else None for a in args)
        ctx = FunctionContext(tuple(e is not None for e in edges))
        with no_grad():
            result = cls.forward(ctx, *args)
        if not any(ctx.needs_input_grad):
            return result
        outs = result if isinstance(result, tuple) else (result,)
        node = _FunctionNode(cls, ctx, edges, _specs(outs), _specs(args))
        taped = tuple(
            TensorBase.wrap(o.array, node, i) if isinstance(o, TensorBase) and o.array.dtype.is_floating_point else o
            for i, o in enumerate(outs)
        )
        return taped if isinstance(result, tuple) else taped[0]
