"""Activation checkpointing: record a function without keeping what its backward needs, and run it again to get that.

The first run records nodes whose contexts are dropped. When backward reaches the first of them, the function runs once
more, with the random generators set back and autocast as it was, and the contexts it saves are matched to the nodes by
the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genesis import random
from genesis.array import Spec
from genesis.autograd.autocast import resumed, settings
from genesis.autograd.graph import Saved
from genesis.autograd.modes import enable_grad
from genesis.autograd.record import TensorBase, saving_calls
from genesis.errors import GradientError
from genesis.random import Generator

Call = tuple[Spec | None, ...]  # what a repeated call is recognised by: its inputs' shapes and dtypes


class _Frame:
    """One checkpointed call: how to repeat it, and what its calls saved when it was repeated."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        given = (*args, *kwargs.values())
        generators = [random.default_generator, *(g for g in given if isinstance(g, Generator))]
        self.rng = [(g, g.get_state()) for g in generators]
        self.versions = [(t, t.array.storage.version) for t in given if isinstance(t, TensorBase)]
        self.autocast = settings()
        self.calls: list[Call] = []
        self.saved: dict[int, Saved] = {}

    def drop(self, saved: Saved) -> Callable[[], Saved]:
        """While recording: keep only the number of the call; gives what the call saved when it was repeated, once."""
        index = len(self.calls)
        self.calls.append(saved.context.input_specs)

        def take() -> Saved:
            if index not in self.saved:
                self._run_again()
            return self.saved.pop(index)

        return take

    def _run_again(self) -> None:
        if any(t.array.storage.version != version for t, version in self.versions):
            raise GradientError("an input of a checkpointed function was changed in place before backward")
        repeated: list[Saved] = []

        def keep(saved: Saved) -> Callable[[], Saved]:
            repeated.append(saved)
            return lambda: saved

        now, outer = [(g, g.get_state()) for g, _ in self.rng], saving_calls.intercept
        _restore(self.rng)
        saving_calls.intercept = keep
        try:
            with enable_grad(), resumed(self.autocast):
                kwargs = {name: _detached(value) for name, value in self.kwargs.items()}
                self.function(*[_detached(a) for a in self.args], **kwargs)
        finally:
            saving_calls.intercept = outer
            _restore(now)
        if self.calls != [saved.context.input_specs for saved in repeated]:
            raise GradientError(
                f"a checkpointed function made {len(self.calls)} recorded calls at first and {len(repeated)} when run"
                " again, or the same number on other shapes or dtypes",
                next="make it depend on its arguments and the seeded generators only",
            )
        self.saved = dict(enumerate(repeated))


def _restore(states: list[tuple[Generator, dict[str, int]]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _detached(value: Any) -> Any:
    """A leaf over the same values, requiring a gradient where the original did: backward stops there."""
    if not isinstance(value, TensorBase):
        return value
    leaf = TensorBase.wrap(value.array)
    leaf._requires_grad = value.requires_grad
    return leaf


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, keeping only its arguments for backward.

    The function is called twice and must do the same both times; draws from the default generator, and from generators
    among the arguments, repeat.

    Raises:
        GradientError: in backward, if the second call records other calls than the first or an argument was changed.
    """
    frame = _Frame(function, args, kwargs)
    outer = saving_calls.intercept
    saving_calls.intercept = frame.drop
    try:
        with resumed(frame.autocast):  # casts that were kept before would not be recorded as in the second call
            return function(*args, **kwargs)
    finally:
        saving_calls.intercept = outer
