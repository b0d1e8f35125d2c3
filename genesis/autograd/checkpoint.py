"""Activation checkpointing: drop what a function saves for backward, and run the function again to recompute it.

The first run records nodes and drops their contexts. When backward reaches the first of these nodes, the function runs
a second time with the random generators and the autocast settings restored. Its contexts are matched to the nodes in
call order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from genesis import random
from genesis.array import Spec
from genesis.autograd.autocast import resumed, settings
from genesis.autograd.graph import Saved
from genesis.autograd.modes import enable_grad, exact
from genesis.autograd.record import TensorBase, saving_calls
from genesis.backend import mode
from genesis.errors import GradientError
from genesis.random import Generator

Call = tuple[Spec | None, ...]  # the shapes and dtypes of its inputs identify a repeated call


class Frame:
    """One checkpointed call: how to repeat it, and the contexts that the repetition saved."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], preserves_rng: bool = True,
        compares: bool = True, context: AbstractContextManager[Any] | None = None,
    ) -> None:  # fmt: skip
        self.function, self.args, self.kwargs = function, args, kwargs
        self.compares, self.context = compares, context or nullcontext()
        arguments = (*args, *kwargs.values())
        generators = [random.default_generator, *(g for g in arguments if isinstance(g, Generator))]
        self.rng = [(g, g.state(), g._base) for g in generators] if preserves_rng else []
        self.versions = [(t, t.array.storage.version) for t in arguments if isinstance(t, TensorBase)]
        self.autocast, self.exact = settings(), mode.exact
        self.calls: list[Call] = []
        self.saved: dict[int, Saved] = {}

    def drop(self, saved: Saved) -> Callable[[], Saved]:
        """Drop `saved` and keep only the call's number. The result recomputes and returns the context, once."""
        index = len(self.calls)
        self.calls.append(saved.context.input_specs)

        def take() -> Saved:
            if index not in self.saved:
                self._recompute()
            return self.saved.pop(index)

        return take

    def _recompute(self) -> None:
        if any(t.array.storage.version != version for t, version in self.versions):
            raise GradientError("an input of a checkpointed function was changed in place before backward")
        # Run the function with the recorded random state and autocast settings, and collect the contexts.
        repeated: list[Saved] = []

        def keep(saved: Saved) -> Callable[[], Saved]:
            repeated.append(saved)
            return lambda: saved

        now, outer = [(g, g.state(), g._base) for g, *_ in self.rng], saving_calls.intercept
        _restore(self.rng)
        saving_calls.intercept = keep
        try:
            with enable_grad(), resumed(self.autocast), exact(self.exact), self.context:
                kwargs = {name: _detached(value) for name, value in self.kwargs.items()}
                self.function(*[_detached(a) for a in self.args], **kwargs)
        finally:
            saving_calls.intercept = outer
            _restore(now)
        # The repeated calls must match the recorded ones.
        recomputed = [saved.context.input_specs for saved in repeated]
        if self.calls != recomputed if self.compares else len(recomputed) < len(self.calls):
            raise GradientError(
                f"a checkpointed function recorded {len(self.calls)} calls in forward and {len(repeated)} in backward,"
                " or the shapes or dtypes differ",
                next="make it depend on its arguments and the seeded generators only",
            )
        self.saved = dict(enumerate(repeated))


def _restore(states: list[tuple[Generator, dict[str, int], Any]]) -> None:
    for generator, state, base in states:
        generator.restore(state)
        generator._base = base


def _detached(value: Any) -> Any:
    """A leaf over the same values that requires a gradient if the original does. Backward stops at it."""
    if not isinstance(value, TensorBase):
        return value
    leaf = TensorBase.wrap(value.array)
    leaf._requires_grad = value.requires_grad
    return leaf


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` and keep only the arguments for backward.

    Backward calls the function a second time, and it must do the same again. Draws from the default generator, and from
    generators among the arguments, repeat.

    Raises:
        GradientError: in backward, if the second call records different ops or an argument was changed in place.
    """
    return run(Frame(function, args, kwargs))


def run(frame: Frame) -> Any:
    """Call the frame's function, and let backward repeat it."""
    outer = saving_calls.intercept
    saving_calls.intercept = frame.drop
    try:
        with resumed(frame.autocast):  # the second call has no cached casts either, so both record the same ops
            return frame.function(*frame.args, **frame.kwargs)
    finally:
        saving_calls.intercept = outer
