"""What the launches of user ops share: operands made dense, grids and constants checked. Used on CUDA alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from genesis.array import Array, empty
from genesis.errors import UsageError, UserCode

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Grid

Rule = Callable[..., Any]
Constants = Mapping[str, Any] | Rule
Outs = Array | tuple[Array, ...]


def dense(x: Array) -> Array:
    """x, or a contiguous copy in memory that the running op has for itself."""
    if x.is_contiguous:
        return x
    from genesis.backend.cuda.dispatch import cuda_impl_named

    copied = empty(x.shape, x.dtype, x.device)
    cuda_impl_named("copy", "elementwise")(copied, x)
    return copied


def is_empty(out: Outs) -> bool:
    """Whether there is nothing to write."""
    return all(o.size == 0 for o in (out if isinstance(out, tuple) else (out,)))


def sizes_of(name: str, what: str, value: Any, *args: Any, **attrs: Any) -> Grid:
    """A grid or a block in three dimensions: a size, up to three, or a function that gives them."""
    with UserCode(f"the {what} of {name}"):
        found = value(*args, **attrs) if callable(value) else value
    sizes = found if isinstance(found, tuple | list) else (found,)
    if not 1 <= len(sizes) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes):
        raise UsageError(f"{name}: {what} must be up to three sizes, not {found!r}", next="divide with cdiv()")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def constants_of(
    name: str, constants: Constants | None, out: Outs, inputs: tuple[Array, ...], attrs: dict[str, Any]
) -> dict[str, Any]:
    """The constants of a call, by name."""
    with UserCode(f"the constants of {name}"):
        return dict(constants(out, *inputs, **attrs) if callable(constants) else constants or {})


def arguments_of(
    name: str, rule: Rule | None, out: Outs, inputs: tuple[Array, ...], attrs: dict[str, Any]
) -> tuple[Any, ...]:
    """A kernel's arguments: as the rule orders them, else outputs, inputs and the first output's number of elements."""
    if rule is not None:
        with UserCode(f"the arguments of {name}"):
            found = rule(out, *inputs, **attrs)
        return tuple(found) if isinstance(found, tuple | list) else (found,)
    if attrs:
        raise UsageError(f"{name} has arguments by keyword, and nothing says where its kernel takes them", where=name,
                         next="arguments=lambda out, x, scale: (out, x, out.size, scale)")  # fmt: skip
    outs = out if isinstance(out, tuple) else (out,)
    return (*outs, *inputs, outs[0].size)
