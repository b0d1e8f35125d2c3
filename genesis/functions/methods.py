"""The methods of Tensor that are functions, too, one and the same object; and its operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from genesis.functions import (  # noqa: F401  they enter the tables
    create,
    elementwise,
    exchange,
    index,
    linalg,
    pointwise,
    random,
    reduce,
    shape,
)
from genesis.functions.surface import Operand, Tensor, bare, methods

# torch's further names of methods.
_ALIASES = {
    "absolute": "abs",
    "clip": "clamp",
    "clip_": "clamp_",
    "divide": "div",
    "multiply": "mul",
    "negative": "neg",
    "subtract": "sub",
}


# Operators, by the function that they call. Those of the first two tables have a form in place, too.
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
    """== or !=: a tensor is not equal to what is neither a tensor nor a number."""

    @functools.wraps(function)
    def compared(x: Tensor, y: Any) -> Any:
        if y is None or isinstance(y, (str, type)):
            return NotImplemented
        return function(x, y)

    return compared


def _operators() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The special methods. They take the plain functions: they have neither keywords nor integers to read."""
    for symbol, name in (_COMMUTING | _REFLECTED | _PLAIN).items():
        yield f"__{symbol}__", bare(methods[name])
    for symbol, name in (_COMMUTING | _REFLECTED).items():
        function = bare(methods[name])
        yield f"__r{symbol}__", function if symbol in _COMMUTING else _reflected(function)
        yield f"__i{symbol}__", bare(methods[f"{name}_"])
    for symbol in ("eq", "ne"):
        yield f"__{symbol}__", _comparison(bare(methods[symbol]))
    yield from (("__getitem__", index.getitem), ("__setitem__", index.setitem))


class Methods:
    """Base of Tensor."""

    __slots__ = ()


methods |= {alias: methods[name] for alias, name in _ALIASES.items()}
for _name, _method in (*methods.items(), *_operators()):
    setattr(Methods, _name, _method)
