"""Errors for unknown keywords: a KeywordError that names the nearest parameter of the function or class.

`checked` and `check_calls` add only one call: they read the signature only after Python has refused the arguments.
Functions that also convert arguments are published by `genesis.functions.surface` instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from genesis.errors import unknown_keyword

P = ParamSpec("P")
R = TypeVar("R")


def refuse_unknown(name: str, function: Callable[..., Any], keywords: Iterable[str]) -> None:
    """Raise KeywordError for the first of `keywords` that `function` does not take; `name` is its public name."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = [each for each in names if each not in ("self", "_cls")]
    for keyword in keywords:
        if keyword not in names:
            raise unknown_keyword(name, keyword, names) from None


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with a KeywordError instead of Python's TypeError for an unknown keyword.

    An unknown keyword fails before the body runs, so a TypeError raised inside the body is never replaced.
    """

    @functools.wraps(function)
    def called(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except TypeError:
            refuse_unknown(function.__name__, function, keywords)
            raise

    return called


def _checked_constructor(kind: type[Any], name: str) -> Callable[..., Any]:
    """Return the checked `__init__` or `__new__` of a class; errors name the class that the caller used."""
    function = getattr(kind, name)

    @functools.wraps(function)
    def called(self: Any, /, *args: Any, **keywords: Any) -> Any:
        try:
            return function(self, *args, **keywords)
        except TypeError:
            called_type = self if isinstance(self, type) else type(self)
            refuse_unknown((called_type if getattr(called_type, name) is called else kind).__name__, function, keywords)
            raise

    return called


def check_calls(module: dict[str, Any], names: Iterable[str]) -> None:
    """Check keywords of the named functions and classes of a module (its `globals()`); other objects are unchanged.

    A class is changed in place, so subclasses that inherit its constructor are checked, too.
    """
    for name in names:
        value = module.get(name)
        if isinstance(value, FunctionType):
            module[name] = checked(value)
        elif isinstance(value, type):
            constructor = "__new__" if issubclass(value, tuple) else "__init__"
            if not hasattr(getattr(value, constructor), "__wrapped__"):
                wrapped = _checked_constructor(value, constructor)
                setattr(value, constructor, staticmethod(wrapped) if constructor == "__new__" else wrapped)
