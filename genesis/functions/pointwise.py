"""Functions generated from an op's record alone, under the record's public name: `exp`, `mul`, `relu` and others.

They take one tensor, or two operands, one of them possibly a number. Names that end in _ work in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genesis.autograd.record import TensorBase, apply, apply_
from genesis.functions.surface import Operand, Tensor, array_of, as_operand, check_operands, public
from genesis.op import Op, registry
from genesis.ops import activation as _activation  # noqa: F401  registers its ops
from genesis.ops import elementwise as _elementwise  # noqa: F401
from genesis.ops import special as _special  # noqa: F401

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def function_of(op: Op, **facts: Any) -> Callable[..., Any]:
    """Return the public function of an op, `f(x, *, out=None)` or `f(x, y, *, out=None)`; `facts` as for `public`."""

    def unary(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return apply(op, *check_operands(op.name, x), out=out)

    def binary(x: Operand, y: Operand, *, out: Tensor | None = None) -> Tensor:
        if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
            x, y = check_operands(op.name, x, y)
        return apply(op, x, y, out=out)

    function: Any = unary if op.operands == 1 else binary
    function.__name__ = function.__qualname__ = op.public or op.name
    function.__doc__ = op.reference.__doc__
    return public(**facts)(function)  # type: ignore[no-any-return]


def in_place_method_of(op: Op, **facts: Any) -> Callable[..., Any]:
    """Return the method `x.f_()` or `x.f_(y)`, which overwrites x with the result and returns x."""
    name = op.public or op.name

    def unary(x: Tensor) -> Tensor:
        array_of(x, op.name + "_")
        return apply_(op, x, x)

    def binary(x: Tensor, y: Operand) -> Tensor:
        array_of(x, op.name + "_")
        return apply_(op, x, x, as_operand(y, op.name + "_"))

    method: Any = unary if op.operands == 1 else binary
    method.__name__ = method.__qualname__ = name + "_"
    method.__doc__ = f"Compute `{name}` in place."
    return public(**facts)(method)  # type: ignore[no-any-return]


for _op in registry.values():
    if _op.public:
        _facts = {"method": _op.method, "nn": bool(_op.module)}
        globals()[_op.public] = function_of(_op, **_facts)
        if _op.in_place:
            globals()[f"{_op.public}_"] = in_place_method_of(_op, **_facts)
