"""Formulas: elementwise numpy functions, stated once in an op's record and computed in several ways.

A formula consists of operators, numpy's ufuncs, `np.where`, `astype` and the functions marked `elementary`. numpy runs
it on the CPU. `computed` runs it on other operands and passes the name of each step to a function, which writes a
kernel's source (`genesis.kernels.formulas`) or runs ops on arrays, which a second backward pass differentiates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.op import registry

Apply = Callable[..., Any]


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """An operand or an intermediate value of a formula; `apply(name, *operands)` returns the values of its steps."""

    def __init__(self, value: Any, apply: Apply) -> None:
        self.value, self.apply = value, apply

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Traced:
        assert method == "__call__", f"a formula cannot use {ufunc.__name__}.{method}"
        return self.step(ufunc.__name__, operands)

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Traced:
        return self.step(function.__name__, operands)

    def step(self, name: str, operands: tuple[Any, ...]) -> Traced:
        """Return the value of a step on numbers and traced values; `positive` only stores in `out`."""
        if name == "positive":
            return operands[0]
        values = [x.value if isinstance(x, Traced) else x for x in operands]
        return Traced(self.apply(name, *values), self.apply)

    def astype(self, dtype: Any) -> Traced:
        """Return the value in float64, or in the type of another value."""
        return self.step("astype", (self, dtype))

    @property
    def dtype(self) -> Traced:
        return self.step("dtype", (self,))


def elementary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a numpy function that a formula may call; its step has the function's name without `_values`."""
    name = function.__name__.removesuffix("_values")

    @functools.wraps(function)
    def called(x: Any, out: np.ndarray | None = None) -> Any:
        return x.step(name, (x,)) if isinstance(x, Traced) else function(x, out=out)

    return called


def computed(formula: Callable[..., Any], apply: Apply, *operands: Any) -> Any:
    """Return a formula's result, or its tuple of results; `apply` computes each step."""
    result = formula(*(Traced(x, apply) for x in operands))
    return tuple([each.value for each in result]) if isinstance(result, tuple) else result.value


_OPS = {"multiply": "mul", "subtract": "sub", "divide": "div", "negative": "neg", "less_equal": "le"}


def by_ops(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays that computes a formula by ops on arrays."""
    return functools.partial(computed, formula, lambda name, *x: registry[_OPS.get(name) or name](*x))
