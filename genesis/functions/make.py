"""Factories of public functions from ops: the function form, which is also the method, and the in-place form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genesis.autograd.record import TensorBase, apply, apply_
from genesis.errors import DTypeError
from genesis.functions.arguments import Operand, Tensor, plain
from genesis.op import Op

NUMBERS = (float, int, bool)
Made = Callable[..., Any]


def as_operand(value: Any, name: str) -> Any:
    """A tensor, or a Python number (numpy scalars become one).

    Raises:
        DTypeError: for anything else, naming the function.
    """
    if isinstance(value, TensorBase) or type(value) in NUMBERS:
        return value
    found = plain(value)
    if found is not None:
        return found
    raise DTypeError(
        f"{name} takes tensors and numbers, got {type(value).__name__}", next="wrap it with genesis.tensor()"
    )


def check_operands(name: str, *values: Any) -> tuple[Any, ...]:
    """All operands checked, at least one of them a tensor."""
    tensors = 0
    for v in values:
        tensors += isinstance(v, TensorBase)
    if tensors == len(values):  # nothing to convert, nothing to refuse
        return values
    checked = tuple([as_operand(v, name) for v in values])
    if not tensors:
        raise DTypeError(f"{name} needs at least one tensor", next="wrap a number with genesis.tensor()")
    return checked


def _named(function: Made, op: Op, suffix: str = "") -> Made:
    name = op.public or op.name
    function.__name__ = function.__qualname__ = name + suffix
    function.__doc__ = f"`{name}` in place." if suffix else op.reference.__doc__
    return function


def unary(op: Op) -> Made:
    """`f(x, *, out=None)`."""

    def function(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return apply(op, *check_operands(op.name, x), out=out)

    return _named(function, op)


def binary(op: Op) -> Made:
    """`f(x, y, *, out=None)`; one operand may be a number."""

    def function(x: Operand, y: Operand, *, out: Tensor | None = None) -> Tensor:
        if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
            x, y = check_operands(op.name, x, y)
        return apply(op, x, y, out=out)

    return _named(function, op)


def inplace(op: Op) -> Made:
    """`x.f_()`: overwrites x with the result and returns x."""

    def function(x: Tensor) -> Tensor:
        return apply_(op, _target(x, op), x)

    return _named(function, op, "_")


def inplace_two(op: Op) -> Made:
    """`x.f_(y)`: overwrites x with the result and returns x."""

    def function(x: Tensor, y: Operand) -> Tensor:
        return apply_(op, _target(x, op), x, as_operand(y, op.name + "_"))

    return _named(function, op, "_")


def _target(x: Any, op: Op) -> Any:
    if not isinstance(x, TensorBase):
        raise DTypeError(f"{op.name}_ takes a tensor, got {type(x).__name__}", next="wrap it with genesis.tensor()")
    return x
