"""Switches of recording, per thread: no_grad, enable_grad, inference_mode, anomaly detection."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from genesis.backend import mode
from genesis.errors import DTypeError
from genesis.keywords import refuse_unknown


def is_grad_enabled() -> bool:
    """Whether ops record what backward needs."""
    return mode.grad


def is_anomaly_enabled() -> bool:
    """Whether backward checks every gradient for NaN."""
    return mode.anomaly


class Switch:
    """Sets one field of the thread's state inside a block or a decorated function; nests and re-enters.

    A decorated generator or coroutine function has the state set while its own code runs, and not between its steps.
    """

    field = "grad"

    def __init__(self, value: bool) -> None:
        self.value = value
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        self._outer.append(getattr(mode, self.field))
        setattr(mode, self.field, self.value)

    def __exit__(self, *error: object) -> None:
        setattr(mode, self.field, self._outer.pop())

    def _fresh(self) -> Switch:
        """Its own memory of the outer state: a decorated function may run in several threads at once."""
        switch = copy.copy(self)
        switch._outer = []
        return switch

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the state set while it runs.

        Raises: DTypeError, for a class, an asynchronous generator function, and what cannot be called.
        """
        name = type(self).__name__
        if inspect.isclass(function) or inspect.isasyncgenfunction(function) or not callable(function):
            kind = "a class" if inspect.isclass(function) else getattr(function, "__name__", type(function).__name__)
            raise DTypeError(f"{name} decorates functions and generators, got {kind}", next="decorate its methods")
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def stepped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                return (yield from self._steps(function(*args, **kwargs)))

            return stepped
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                return await _resumed(self._steps(function(*args, **kwargs)))

            return awaited

        @functools.wraps(function)
        def switched(*args: Any, **kwargs: Any) -> Any:
            with self._fresh():
                return function(*args, **kwargs)

        return switched

    def _steps(self, generator: Any) -> Generator[Any, Any, Any]:
        """The same generator (or coroutine), each step of it inside the switch; errors thrown in reach it."""
        step, sent = generator.send, None
        try:
            while True:
                with self._fresh():
                    try:
                        item = step(sent)
                    except StopIteration as end:
                        return end.value
                try:
                    step, sent = generator.send, (yield item)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step, sent = generator.throw, error
        finally:
            with self._fresh():  # what its `finally` does counts as its own code
                generator.close()


@types.coroutine
def _resumed(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    return (yield from steps)


class Bare(Switch):
    """A switch that also decorates without parentheses: `@no_grad`; a block begins without `keywords`' further call."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and not named and callable(given[0]):
            return cls()(given[0])
        if named:
            refuse_unknown(cls.__name__, cls.__init__, named)
        return super().__new__(cls)


def _truth(name: str, value: Any) -> bool:
    """Raises: DTypeError, for what is neither a bool nor 0 or 1."""
    if not isinstance(value, (bool, int, np.bool_)) or value not in (0, 1):
        raise DTypeError(f"{name} takes True or False, got {value!r}")
    return bool(value)


class set_grad_enabled(Switch):  # noqa: N801  torch's name
    """Recording is `mode` from the call on; as a context manager until the block ends, as a decorator in the function.

    Raises:
        DTypeError: if `mode` is no bool.
    """

    def __init__(self, mode: bool) -> None:
        super().__init__(_truth("set_grad_enabled", mode))
        self._before: bool | None = is_grad_enabled()
        self._set(self.value)

    @staticmethod
    def _set(value: bool) -> None:
        mode.grad = value

    def __enter__(self) -> None:
        before, self._before = self._before, None
        super().__enter__()
        if before is not None:  # the call has set the state already: the block ends with the one before the call
            self._outer[-1] = before

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._before is not None:  # what decorates a function does not act before that runs
            self._set(self._before)
            self._before = None
        return super().__call__(function)


class no_grad(Bare):  # noqa: N801
    """Nothing is recorded inside the block."""

    def __init__(self) -> None:
        super().__init__(False)


class enable_grad(Bare):  # noqa: N801
    """Recording is on inside the block, also within no_grad."""

    def __init__(self) -> None:
        super().__init__(True)


class inference_mode(Bare):  # noqa: N801
    """no_grad under torch's other name; `mode=False` leaves recording on."""

    def __init__(self, mode: bool = True) -> None:
        super().__init__(not _truth("inference_mode", mode))


class detect_anomaly(Bare):  # noqa: N801
    """Backward stops at the first op that makes a NaN and names it, with the line of its forward call."""

    field = "anomaly"

    def __init__(self, mode: bool = True) -> None:
        super().__init__(_truth("detect_anomaly", mode))


class fixed_weights(Switch):  # noqa: N801
    """With True, a promise of the caller: nothing that is captured in one graph inside the block writes a weight, or a
    norm's, that a linear layer reads in it. Kernels of few rows then load them before the kernel ahead is done.
    """

    field = "fixed_weights"
