"""Switches of recording, per thread: no_grad, enable_grad, inference_mode, anomaly detection."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

__all__ = [
    "detect_anomaly",
    "enable_grad",
    "inference_mode",
    "is_anomaly_enabled",
    "is_grad_enabled",
    "mode",
    "no_grad",
    "set_grad_enabled",
]


class Mode(threading.local):
    """The switches of each thread; what runs for every op reads them here, without a call."""

    grad = True
    anomaly = False


mode = Mode()


def is_grad_enabled() -> bool:
    """Whether ops record what backward needs."""
    return mode.grad


def is_anomaly_enabled() -> bool:
    """Whether backward checks every gradient for NaN."""
    return mode.anomaly


class Switch:
    """Sets one field of the thread's state inside a block or a decorated function; nests and re-enters.

    A decorated generator function has the state set while its own code runs, and not between its steps.
    """

    field = "grad"

    def __init__(self, value: bool) -> None:
        self.value = value
        self._outer: list[bool] = []

    def __enter__(self) -> None:
        self._outer.append(getattr(mode, self.field))
        setattr(mode, self.field, self.value)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(mode, self.field, self._outer.pop())

    def _fresh(self) -> Switch:
        """Its own memory of the outer state: a decorated function may run in several threads at once."""
        switch = copy.copy(self)
        switch._outer = []
        return switch

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(function):
            return functools.wraps(function)(lambda *args, **kwargs: self._steps(function(*args, **kwargs)))

        @functools.wraps(function)
        def switched(*args: Any, **kwargs: Any) -> Any:
            with self._fresh():
                return function(*args, **kwargs)

        return switched

    def _steps(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same generator, each step of it inside the switch."""
        sent = None
        try:
            while True:
                with self._fresh():
                    try:
                        item = generator.send(sent)
                    except StopIteration as end:
                        return end.value
                sent = yield item
        finally:
            generator.close()


class set_grad_enabled(Switch):  # noqa: N801  torch's name
    """Recording is `mode` inside the block."""

    def __init__(self, mode: bool) -> None:
        super().__init__(mode)


class no_grad(Switch):  # noqa: N801
    """Nothing is recorded inside the block."""

    def __init__(self) -> None:
        super().__init__(False)


class enable_grad(Switch):  # noqa: N801
    """Recording is on inside the block, also within no_grad."""

    def __init__(self) -> None:
        super().__init__(True)


class inference_mode(Switch):  # noqa: N801
    """no_grad under torch's other name; `mode=False` leaves recording on."""

    def __init__(self, mode: bool = True) -> None:
        super().__init__(not mode)


class detect_anomaly(Switch):  # noqa: N801
    """Backward stops at the first op that makes a NaN and names it, with the line of its forward call."""

    field = "anomaly"

    def __init__(self, mode: bool = True) -> None:
        super().__init__(mode)
