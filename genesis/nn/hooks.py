"""Hooks of modules: the handle that removes one, and how a module's backward is watched from the tape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from genesis.autograd import Function, FunctionContext
from genesis.autograd.graph import HookHandle
from genesis.autograd.modes import is_grad_enabled
from genesis.tensor import Tensor

_ids = itertools.count()

CallWatch = Callable[[Any], AbstractContextManager[None]]  # of a module, what is entered around its forward
call_watches: list[CallWatch] = []


@contextmanager
def watching_calls(watch: CallWatch) -> Iterator[None]:
    """Enter `watch(module)` around the forward of every module that is called inside the block.

    Unlike with a hook on a module, layers that are computed together still are: nobody calls them then.
    """
    call_watches.append(watch)
    try:
        yield
    finally:
        call_watches.remove(watch)


def hook_in(table: dict[int, Any], hook: Callable[..., Any]) -> HookHandle:
    """Put a hook of a module into the table of its kind."""
    number = next(_ids)
    table[number] = hook
    return HookHandle(lambda: table.pop(number, None))


class _Gate(Function):
    """The identity on several tensors; their gradients pass through `callback`, which may replace them."""

    @staticmethod
    def forward(ctx: FunctionContext, callback: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback  # type: ignore[attr-defined]
        return tuple(Tensor(t.array) for t in tensors)

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.callback(grads))  # type: ignore[attr-defined]


Gradients = tuple[Tensor | None, ...]


class BackwardWatch:
    """One call of a module under full backward hooks `hook(module, grad_input, grad_output)`.

    The module's tensor arguments and results pass through gates. The gate of the results keeps their gradients; the
    gate of the arguments then calls the hooks with both. Where no argument needs a gradient they run at the results.
    """

    def __init__(self, module: Any, hooks: list[Callable[..., Any]]) -> None:
        self.module, self.hooks = module, hooks
        self.grad_output: Gradients = ()
        self.gated: list[int] = []  # positions of the arguments that pass the gate
        self.count = 0

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, those that need a gradient replaced by gated ones."""
        self.count = len(args)
        if not is_grad_enabled():
            return args
        self.gated = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
        if not self.gated:
            return args
        passed = _Gate.apply(self._at_inputs, *(args[i] for i in self.gated))
        found = dict(zip(self.gated, passed, strict=True))
        return tuple(found.get(i, a) for i, a in enumerate(args))

    def outputs(self, result: Any) -> Any:
        """The result, its tensors replaced by gated ones; other structures than a tensor or a tuple are left alone."""
        parts = result if isinstance(result, tuple) else (result,)
        chosen = [i for i, t in enumerate(parts) if isinstance(t, Tensor) and t.requires_grad]
        if not is_grad_enabled() or not chosen:
            return result

        def at_outputs(grads: Gradients) -> Gradients:
            found = dict(zip(chosen, grads, strict=True))
            self.grad_output = tuple(found.get(i) for i in range(len(parts)))
            if not self.gated:
                self._call((None,) * self.count)
            return grads

        passed = dict(zip(chosen, _Gate.apply(at_outputs, *(parts[i] for i in chosen)), strict=True))
        replaced = tuple(passed.get(i, t) for i, t in enumerate(parts))
        return replaced if isinstance(result, tuple) else replaced[0]

    def _at_inputs(self, grads: Gradients) -> Gradients:
        found = dict(zip(self.gated, grads, strict=True))
        grad_input = self._call(tuple(found.get(i) for i in range(self.count)))
        return tuple(grad_input[i] for i in self.gated)

    def _call(self, grad_input: Gradients) -> Gradients:
        for hook in self.hooks:
            replaced = hook(self.module, grad_input, self.grad_output)
            if replaced is not None:
                grad_input = replaced if isinstance(replaced, tuple) else (replaced,)
        return grad_input
