"""Per-thread switches: recording (no_grad, enable_grad, inference_mode), anomaly detection, exact sums."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from genesis.backend import mode
from genesis.backend import mode as anomaly_state
from genesis.errors import DTypeError
from genesis.keywords import refuse_unknown


def is_grad_enabled() -> bool:
    """Whether ops are recorded for backward in this thread."""
    return mode.grad


class Switch:
    """Sets one field of the thread's state inside a block or a decorated function. It may nest and be re-entered.

    In a decorated generator or coroutine function, the state is set while its own code runs, not between its steps.
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
        """A copy with its own stack of outer states, because several threads may run a decorated function at once."""
        switch = copy.copy(self)
        switch._outer = []
        return switch

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` wrapped so that the state is set while it runs.

        Raises DTypeError for a class, an asynchronous generator function, or a value that is not callable.
        """
        name = type(self).__name__
        if inspect.isclass(function) or inspect.isasyncgenfunction(function) or not callable(function):
            kind = "a class" if inspect.isclass(function) else getattr(function, "__name__", type(function).__name__)
            raise DTypeError(f"{name} decorates functions and generators, not {kind}", next="decorate its methods")
        # The body of a generator or coroutine runs when it is stepped, not when it is called.
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
        """Run each step of a generator or coroutine inside the switch, and pass thrown errors on to it."""
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
            with self._fresh():  # the code in its `finally` is its own code, too
                generator.close()


@types.coroutine
def _resumed(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    return (yield from steps)


class Bare(Switch):
    """A switch that also decorates without parentheses: `@no_grad`. It checks its keywords itself, which is faster."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return cls()(args[0])
        if kwargs:
            refuse_unknown(cls.__name__, cls.__init__, kwargs)
        return super().__new__(cls)


def _as_bool(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, int, np.bool_)) or value not in (0, 1):
        raise DTypeError(f"{name} takes True or False, got {value!r}")
    return bool(value)


class set_grad_enabled(Switch):  # noqa: N801  torch's name
    """Set recording to `mode` from the call on, until the end of the block, or inside the decorated function.

    Raises:
        DTypeError: if `mode` is not a bool.
    """

    def __init__(self, mode: bool) -> None:
        super().__init__(_as_bool("set_grad_enabled", mode))
        self._before: bool | None = is_grad_enabled()
        self._set(self.value)

    @staticmethod
    def _set(value: bool) -> None:
        mode.grad = value

    def __enter__(self) -> None:
        before, self._before = self._before, None
        super().__enter__()
        if before is not None:  # the call already set the state, so the block restores the one before the call
            self._outer[-1] = before

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._before is not None:  # a decorator must not change the state before the function runs
            self._set(self._before)
            self._before = None
        return super().__call__(function)


class no_grad(Bare):  # noqa: N801
    """Switch recording off inside the block."""

    def __init__(self) -> None:
        super().__init__(False)


class enable_grad(Bare):  # noqa: N801
    """Switch recording on inside the block, even within no_grad."""

    def __init__(self) -> None:
        super().__init__(True)


class inference_mode(Bare):  # noqa: N801
    """The same as no_grad, under torch's other name. `mode=False` switches recording on."""

    def __init__(self, mode: bool = True) -> None:
        super().__init__(not _as_bool("inference_mode", mode))


class detect_anomaly(Bare):  # noqa: N801
    """Stop backward at the first op that produces a NaN. The error names the op and the line of its forward call.

    With `check_nan=False`, only the lines are recorded, for other errors of backward.
    """

    field = "anomaly"

    def __init__(self, check_nan: bool = True) -> None:
        self.check_nan = _as_bool("detect_anomaly", check_nan)
        super().__init__(True)

    def __enter__(self) -> None:
        self._outer.append((mode.anomaly, mode.check_nan))
        mode.anomaly, mode.check_nan = self.value, self.check_nan

    def __exit__(self, *error: object) -> None:
        mode.anomaly, mode.check_nan = self._outer.pop()


class set_detect_anomaly(detect_anomaly):  # noqa: N801
    """Set anomaly detection to `mode` from the call on, or until the end of the block; see `detect_anomaly`."""

    def __init__(self, mode: bool, check_nan: bool = True) -> None:
        super().__init__(check_nan)
        self.value = _as_bool("set_detect_anomaly", mode)
        self._outer.append((anomaly_state.anomaly, anomaly_state.check_nan))
        anomaly_state.anomaly, anomaly_state.check_nan = self.value, self.check_nan

    def __enter__(self) -> None:
        """Do nothing more: the call has set the state, and the end of the block restores it."""


class fixed_weights(Switch):  # noqa: N801
    """With True, the caller promises that no kernel of a graph captured inside the block writes a linear or norm weight
    that a layer of the same graph reads. Few-row kernels then load weights before the preceding kernel has finished.
    """

    field = "fixed_weights"


class exact(Bare):  # noqa: N801
    """Compute the sums of a language model's forward pass in the order that docs/decisions/0014-exact.md states. This
    covers matmuls, norms, attention, the head and its log-probabilities. Other reductions (`sum`, `softmax`,
    `cross_entropy` of logits) keep their own orders.

    On a GPU, a row's results then do not depend on the other rows of a call, their number, or the length of the prompt
    pass: sampling token by token and one pass over the whole text give the same log-probabilities, bit for bit. This
    holds for bfloat16 on one GPU model with one version of Triton; the CPU ignores the switch. Backward passes run
    without it, except for the recomputation of checkpointed functions. `mode=False` switches it off.

    Raises:
        DTypeError: if `mode` is not a bool.
    """

    field = "exact"

    def __init__(self, mode: bool = True) -> None:
        super().__init__(_as_bool("exact", mode))
