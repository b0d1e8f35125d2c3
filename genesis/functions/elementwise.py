"""Elementwise functions that add something to their op: named and behaving as torch's; names in _ work in place.

Those that add nothing are in `pointwise.py`.
"""

from __future__ import annotations

from typing import Any

from genesis import dtypes
from genesis.autograd.record import TensorBase, apply, apply_
from genesis.dtypes import BOOL, INTEGER, DType, as_dtype
from genesis.errors import DTypeError, ShapeError
from genesis.functions.pointwise import made_in_place, made_of
from genesis.functions.surface import (
    DTypeLike,
    Operand,
    Tensor,
    array_of,
    as_operand,
    check_operands,
    fitting,
    plain,
    public,
)
from genesis.functions.transfer import overwrite
from genesis.op import Op
from genesis.ops import elementwise as ops

_EXPONENT = {"exponent": "y"}
pow = made_of(ops.pow, keywords=_EXPONENT)
pow_ = made_in_place(ops.pow, keywords=_EXPONENT)


def _scaled(x: Any, y: Any, alpha: float) -> Any:
    """`alpha`·y as add and sub of x take it: in the type of the sum, which may hold more than y's own."""
    if not isinstance(y, TensorBase):
        return y * alpha
    kind = _common_type(x, y)
    if type(alpha) is float and not kind.is_floating_point:
        raise DTypeError(f"alpha is {alpha} for a sum of type {kind.name}", next="give an integer, or cast to a float")
    return apply(ops.mul, y if y.array.dtype is kind else apply(ops.cast, y, dtype=kind), alpha)


def _common_type(*operands: Any) -> DType:
    return dtypes.result_type([v.array if isinstance(v, TensorBase) else v for v in operands])


@public(method=False)
def result_type(*operands: Any) -> DType:
    """The type that arithmetic on tensors and numbers gives: `result_type(x, 2.5)`, or one sequence of them."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    arrays = [x.array if isinstance(x, TensorBase) else x for x in given]
    if not arrays:
        raise DTypeError("result_type of no operands")
    return dtypes.result_type([v if (v := plain(x)) is not None else x for x in arrays])


def _sum(op: Op, sign: str) -> tuple[Any, Any]:
    """The function that adds, or subtracts, a multiple of its second operand, and the one that does so in place."""

    def plain(x: Operand, y: Operand, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
            x, y = check_operands(op.name, x, y)
        return apply(op, x, y if alpha == 1 else _scaled(x, y, alpha), out=out)

    def in_place(x: Tensor, y: Operand, *, alpha: float = 1) -> Tensor:
        y = as_operand(y, op.name + "_")
        return apply_(op, x, x, y if alpha == 1 else _scaled(x, y, alpha))

    plain.__name__, plain.__doc__ = op.name, f"x {sign} alpha·y."
    in_place.__name__, in_place.__doc__ = f"{op.name}_", f"x {sign}= alpha·y, in place."
    return public(plain), public(in_place)


add, add_ = _sum(ops.add, "+")
sub, sub_ = _sum(ops.sub, "-")


@public
def div(x: Operand, y: Operand, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
    """x / y; `rounding_mode` "floor" or "trunc" keeps the operands' type."""
    x, y = check_operands("div", x, y)
    if rounding_mode == "floor":
        return apply(ops.floor_divide, x, y, out=out)
    if rounding_mode == "trunc":
        return apply(ops.cast, apply(ops.trunc, apply(ops.div, x, y)), dtype=_common_type(x, y), out=out)
    if rounding_mode is not None:
        raise DTypeError(f"rounding_mode {rounding_mode!r} is not None, 'floor' or 'trunc'")
    return apply(ops.div, x, y, out=out)


@public
def div_(x: Tensor, y: Operand, *, rounding_mode: str | None = None) -> Tensor:
    """`div` in place; `rounding_mode` as there."""
    y = as_operand(y, "div_")
    if rounding_mode == "trunc" and x.array.dtype.is_floating_point:
        return apply_(ops.trunc, x, apply_(ops.div, x, x, y))
    if rounding_mode == "trunc":
        return copy_(x, div(x, y, rounding_mode="trunc"))
    if rounding_mode not in (None, "floor"):
        raise DTypeError(f"rounding_mode {rounding_mode!r} is not None, 'floor' or 'trunc'")
    return apply_(ops.div if rounding_mode is None else ops.floor_divide, x, x, y)


@public(also=("clip",))
def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None, *, out: Tensor | None = None) -> Tensor:
    """x limited to [min, max]: numbers or tensors, which broadcast and have gradients; None leaves a side open.

    The result has the common type of x and the bounds. Where min > max it is max.
    """
    return apply(ops.clamp, *_bounded("clamp", x, min, max), out=out)


@public
def clamp_(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """`clamp` in place."""
    return apply_(ops.clamp, x, *_bounded("clamp_", x, min, max))


def _bounded(name: str, x: Any, *bounds: Any) -> tuple[Any, ...]:
    array_of(x, name)
    given = [None if b is None else as_operand(b, name) for b in bounds]
    numbers = [b for b in given if b is not None and not isinstance(b, TensorBase)]
    if numbers:
        kind = _common_type(x, *(b for b in given if b is not None))
        for value in numbers:
            fitting(value, kind, name)
    return (x, *given)


@public
def clamp_min(x: Tensor, min: Operand, *, out: Tensor | None = None) -> Tensor:
    """x, or `min` where that is larger."""
    return clamp(x, min, out=out)


@public
def clamp_max(x: Tensor, max: Operand, *, out: Tensor | None = None) -> Tensor:
    """x, or `max` where that is smaller."""
    return clamp(x, None, max, out=out)


@public
def lerp(x: Operand, end: Operand, weight: Operand, *, out: Tensor | None = None) -> Tensor:
    """x + weight·(end - x)."""
    return apply(ops.lerp, *check_operands("lerp", x, end, weight), out=out)


@public
def lerp_(x: Tensor, end: Operand, weight: Operand) -> Tensor:
    """`lerp` in place."""
    return apply_(ops.lerp, x, x, as_operand(end, "lerp_"), as_operand(weight, "lerp_"))


@public(method=False)
def where(condition: Tensor, x: Operand, y: Operand) -> Tensor:
    """x where `condition` (bool) holds, else y."""
    condition, x, y = check_operands("where", condition, x, y)
    if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
        kind = _common_type(x, y)
        fitting(x, kind, "where")
        fitting(y, kind, "where")
    return apply(ops.where, condition, x, y)


@public
def masked_fill(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    """x with `value` where `mask` holds, in x's dtype and the broadcast shape."""
    return apply(ops.where, mask, _filling("masked_fill", x, mask, value), x)


@public
def masked_fill_(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    """`masked_fill` in place."""
    return apply_(ops.where, x, mask, _filling("masked_fill_", x, mask, value), x)


def _filling(name: str, x: Any, mask: Any, value: Any) -> Any:
    """The value in x's type: the elements that stay must not pass through another."""
    array_of(mask, name)
    value, kind = as_operand(value, name), array_of(x, name).dtype
    if isinstance(value, TensorBase):
        if value.array.shape:
            raise ShapeError(f"{name}: the value has shape {value.array.shape}", next="use where(mask, value, x)")
        return to_dtype(value, kind)
    fitting(value, kind, name)
    return bool(value) if kind.category == BOOL else int(value) if kind.category == INTEGER else value


def to_dtype(x: Tensor, dtype: DTypeLike) -> Tensor:
    """x in another dtype; x itself where it has it already."""
    dtype = as_dtype(dtype)
    return x if x.array.dtype is dtype else apply(ops.cast, x, dtype=dtype)


@public
def clone(x: Tensor) -> Tensor:
    """A copy in fresh contiguous memory, on the tape."""
    return apply(ops.copy, x)


@public(keywords={"other": "source", "src": "source"})
def copy_(x: Tensor, source: Operand, non_blocking: bool = False) -> Tensor:
    """Overwrite x with `source` (broadcast, cast to x's dtype), which may be on another device.

    `non_blocking`: between a device and pinned memory of the same layout and dtype, do not wait.
    """
    source = as_operand(source, "copy_")
    if isinstance(source, TensorBase) and source.array.device != x.array.device:
        if x.requires_grad or source.requires_grad:  # on the tape the copy and the change are two steps
            source = source.to(device=x.array.device)  # type: ignore[attr-defined]
        else:
            overwrite(x.array, source.array, non_blocking)
            return x
    return apply_(ops.overwrite, x, x, source)


@public
def fill_(x: Tensor, value: Operand) -> Tensor:
    """Every element becomes `value`, a number or a tensor without dimensions."""
    value = as_operand(value, "fill_")
    fitting(value, x.array.dtype, "fill_")
    if isinstance(value, TensorBase) and value.array.shape:
        raise ShapeError(f"fill_ takes a number or a tensor without dimensions, got shape {value.array.shape}")
    return apply_(ops.overwrite, x, x, value)


@public
def zero_(x: Tensor) -> Tensor:
    """Every element becomes 0."""
    return fill_(x, 0)
