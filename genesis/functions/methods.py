"""The methods of Tensor, which are the same objects as the functions, and its operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from genesis.functions import forms, index, linalg, matrices, matrix_norms  # noqa: F401  importing them fills the tables
from genesis.functions.surface import Operand, Tensor, bare, methods

# Operators and the functions that they call. Those in the first two tables also have an in-place form.
_COMMUTING = {"add": "add", "mul": "mul", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_REFLECTED = {
    "sub": "sub",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
_PLAIN = {
    **{name: name for name in ("neg", "abs", "lt", "le", "gt", "ge", "matmul")},
    "invert": "bitwise_not",
}


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def swapped(x: Tensor, y: Operand) -> Tensor:
        return function(y, x)

    return swapped


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return == or != with NotImplemented for None, strings and types."""

    @functools.wraps(function)
    def compared(x: Tensor, y: Any) -> Any:
        if y is None or isinstance(y, (str, type)):
            return NotImplemented
        return function(x, y)

    return compared


def _operators() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the special methods. They call the bare functions, because operators pass neither keywords nor integers."""
    for symbol, name in (_COMMUTING | _REFLECTED | _PLAIN).items():
        yield f"__{symbol}__", bare(methods[name])
    for symbol, name in (_COMMUTING | _REFLECTED).items():
        function = bare(methods[name])
        yield f"__r{symbol}__", function if symbol in _COMMUTING else _reflected(function)
        yield f"__i{symbol}__", bare(methods[f"{name}_"])
    yield from (("__rdiv__", _reflected(bare(methods["div"]))), ("__rmatmul__", _reflected(bare(methods["matmul"]))))
    for symbol in ("eq", "ne"):
        yield f"__{symbol}__", _comparison(bare(methods[symbol]))
    yield from (("__getitem__", index.getitem), ("__setitem__", index.setitem))


class Methods:
    """Base class of Tensor that holds its methods."""

    __slots__ = ()


for _name, _method in (*methods.items(), *_operators()):
    setattr(Methods, _name, _method)
