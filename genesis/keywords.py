"""One rule for keywords that a public function or class does not take: a KeywordError that names the nearest one.

`checked` and `check_calls` cost nothing but a call: the signature is read only where Python has refused the arguments.
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


def refuse_unknown(name: str, function: Callable[..., Any], given: Iterable[str]) -> None:
    """See that `function`, which the caller calls `name`, has a parameter for each keyword. Raises: KeywordError."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = [each for each in names if each not in ("self", "_cls")]
    for keyword in given:
        if keyword not in names:
            raise unknown_keyword(name, keyword, names) from None


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises KeywordError for a keyword that it does not take.

    Python cannot have run a function that has no parameter for a keyword, so no TypeError of its body is replaced.
    """

    @functools.wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        try:
            return function(*args, **given)
        except TypeError:
            refuse_unknown(function.__name__, function, given)
            raise

    return called


def _checked_constructor(kind: type[Any], name: str) -> Callable[..., Any]:
    """The same for a class's `__init__` or `__new__`, which speaks of the class that is called."""
    function = getattr(kind, name)

    @functools.wraps(function)
    def called(self: Any, /, *args: Any, **given: Any) -> Any:
        try:
            return function(self, *args, **given)
        except TypeError:
            made = self if isinstance(self, type) else type(self)
            refuse_unknown((made if getattr(made, name) is called else kind).__name__, function, given)
            raise

    return called


def check_calls(module: dict[str, Any], names: Iterable[str]) -> None:
    """Put functions and classes of a module (its `globals()`) under this rule; other names are left alone.

    A class is changed in place, so that its subclasses that have no constructor of their own follow the rule too.
    """
    for name in names:
        value = module.get(name)
        if isinstance(value, FunctionType):
            module[name] = checked(value)
        elif isinstance(value, type):
            constructor = "__new__" if issubclass(value, tuple) else "__init__"
            if not hasattr(getattr(value, constructor), "__wrapped__"):
                made = _checked_constructor(value, constructor)
                setattr(value, constructor, staticmethod(made) if constructor == "__new__" else made)
