"""Module hooks: their tables and handles, and full backward hooks on top of the tape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from genesis.autograd import Function, FunctionContext
from genesis.autograd.graph import HookHandle
from genesis.autograd.modes import is_grad_enabled
from genesis.tensor import Tensor

_ids = itertools.count()

CallWatch = Callable[[Any], AbstractContextManager[None]]  # returns the context entered around a module's forward
call_watches: list[CallWatch] = []


@contextmanager
def watching_calls(watch: CallWatch) -> Iterator[None]:
    """Enter `watch(module)` around the forward of every module that is called inside the block.

    Unlike a hook, it does not prevent fusion. The modules of a fused call are not called and so not reported.
    """
    call_watches.append(watch)
    try:
        yield
    finally:
        call_watches.remove(watch)


class Hook(NamedTuple):
    """A registered hook: `kwargs` passes keywords to it, `always` calls it after an error, `before` is a pre-hook."""

    call: Callable[..., Any]
    kwargs: bool = False
    always: bool = False
    before: bool = False
    kind: str = ""  # of a state hook: "saves", "saved", "loads" or "loaded"


class Changes:
    """Counts the changes of all modules' attributes, parts and hooks, so that compiled functions notice them."""

    count = 0


changes = Changes()


def hook_in(table: dict[int, Hook], hook: Hook, prepend: bool = False) -> HookHandle:
    """Add a hook to one of a module's tables, or with `prepend` before the others."""
    number = next(_ids)
    others = dict(table) if prepend else {}
    if prepend:
        table.clear()
    table[number] = hook
    table.update(others)
    changes.count += 1

    def remove() -> None:
        table.pop(number, None)
        changes.count += 1

    return HookHandle(remove)


# Hooks on all modules. Each adds an empty call watch: calls check for watches anyway, so they need no further check.
everywhere: dict[str, dict[int, Hook]] = {"pre": {}, "forward": {}, "backward": {}}
everywhere_watches: list[CallWatch] = []  # one per hook on all modules; any prevents fusion


def hook_everywhere(table: str, hook: Hook) -> HookHandle:
    """Add a hook on all modules: "pre", "forward" or "backward"."""
    handle = hook_in(everywhere[table], hook)

    def remove() -> None:
        handle.remove()
        call_watches.remove(watch)
        everywhere_watches.remove(watch)

    def watch(module: Any) -> AbstractContextManager[None]:
        return nullcontext()

    call_watches.append(watch)
    everywhere_watches.append(watch)
    return HookHandle(remove)


def hooks_of(table: str, own: dict[int, Hook]) -> tuple[Hook, ...]:
    """The hooks on all modules, then a module's own."""
    return (*everywhere[table].values(), *own.values())


class _Gate(Function):
    """The identity on several tensors. In backward, `callback` sees all their gradients and may replace them."""

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

    The module's tensor arguments and results pass through gates. The gate of the results stores their gradients, and
    the gate of the arguments calls the hooks. If no argument requires a gradient, the first gate calls them.
    """

    def __init__(self, module: Any, hooks: Sequence[Hook]) -> None:
        self.module = module
        self.hooks = [h.call for h in hooks if not h.before]
        self.pre_hooks = [h.call for h in hooks if h.before]
        self.grad_output: Gradients = ()
        self.gated: list[int] = []  # positions of the gated arguments
        self.count = 0

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with a gate on those that require a gradient."""
        self.count = len(args)
        if not is_grad_enabled():
            return args
        self.gated = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
        if not self.gated:
            return args
        passed = _Gate.apply(self._at_inputs, *(args[i] for i in self.gated))
        by_position = dict(zip(self.gated, passed, strict=True))
        return tuple(by_position.get(i, a) for i, a in enumerate(args))

    def outputs(self, result: Any) -> Any:
        """Return the result with gates on its tensors. Only a tensor or a tuple of tensors is gated."""
        parts = result if isinstance(result, tuple) else (result,)
        chosen = [i for i, t in enumerate(parts) if isinstance(t, Tensor) and t.requires_grad]
        if not is_grad_enabled() or not chosen:
            return result

        def at_outputs(grads: Gradients) -> Gradients:
            by_position = dict(zip(chosen, grads, strict=True))
            self.grad_output = tuple(by_position.get(i) for i in range(len(parts)))
            for hook in self.pre_hooks:
                replaced = hook(self.module, self.grad_output)
                if replaced is not None:
                    self.grad_output = replaced if isinstance(replaced, tuple) else (replaced,)
            if not self.gated:
                self._call((None,) * self.count)
            return tuple(self.grad_output[i] for i in chosen)

        passed = dict(zip(chosen, _Gate.apply(at_outputs, *(parts[i] for i in chosen)), strict=True))
        replaced = tuple(passed.get(i, t) for i, t in enumerate(parts))
        return replaced if isinstance(result, tuple) else replaced[0]

    def _at_inputs(self, grads: Gradients) -> Gradients:
        by_position = dict(zip(self.gated, grads, strict=True))
        grad_input = self._call(tuple(by_position.get(i) for i in range(self.count)))
        return tuple(grad_input[i] for i in self.gated)

    def _call(self, grad_input: Gradients) -> Gradients:
        for hook in self.hooks:
            replaced = hook(self.module, grad_input, self.grad_output)
            if replaced is not None:
                grad_input = replaced if isinstance(replaced, tuple) else (replaced,)
        return grad_input
