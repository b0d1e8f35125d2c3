"""What users call: the functions of `genesis`, the methods of Tensor and the functions of `genesis.nn.functional`.

A function that is made of an op alone comes from the op's record (`pointwise.py`). One that adds something is written,
and `@public` at its definition says the same facts. Everything else is generated from the three tables: modules
export them, `Methods` binds them, and `make stubs` writes their signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from genesis.functions.arguments import normalized

F = TypeVar("F", bound=Callable[..., Any])

functions: dict[str, Any] = {}  # by name in `genesis`
methods: dict[str, Any] = {}  # by name in Tensor
functional: dict[str, Any] = {}  # by name in `genesis.nn.functional`


def registered(
    made: F,
    name: str,
    keywords: dict[str, str] | None = None,
    *,
    function: bool = True,
    method: bool = True,
    nn: bool = False,
    also: tuple[str, ...] = (),
) -> F:
    """`made` with its arguments normalized (see `arguments.py`), entered in the tables.

    Args:
        keywords: further keywords with the parameters they mean.
        function, method, nn: whether it is one of `genesis`, of Tensor, of `genesis.nn.functional`. A name with a
            trailing underscore works in place, and is a method alone.
        also: further names of the function in `genesis`.
    """
    found = normalized(made, **(keywords or {}))
    found.keywords = keywords or {}
    is_in_place = name[-1] == "_"
    tables = ((functions, function and not is_in_place), (methods, method), (functional, nn and not is_in_place))
    for table, takes in tables:
        if takes:
            assert name not in table, f"{name} is public twice"
            table[name] = found
    functions.update(dict.fromkeys(also, found))
    return found  # type: ignore[no-any-return]


@overload
def public(made: F, /) -> F: ...


@overload
def public(
    *,
    function: bool = True,
    method: bool = True,
    nn: bool = False,
    also: tuple[str, ...] = (),
    keywords: dict[str, str] | None = None,
) -> Callable[[F], F]: ...


def public(made: Any = None, /, *, keywords: dict[str, str] | None = None, **facts: Any) -> Any:
    """Decorator: a public function, with the arguments of `registered`."""

    def register(written: Any) -> Any:
        return registered(written, written.__name__, keywords, **facts)

    return register if made is None else register(made)


def layer_function(written: F) -> F:
    """Decorator: a function of `genesis.nn.functional` alone."""
    return public(function=False, method=False, nn=True)(written)
