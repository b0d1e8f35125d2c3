"""Elementwise functions that do more than call one op, with torch's names and semantics.

Names that end in _ work in place. Functions generated from op records alone are in `pointwise.py`.
"""

from __future__ import annotations

from typing import Any

from genesis import dtypes
from genesis.autograd.record import TensorBase, apply, apply_
from genesis.dtypes import BOOL, INTEGER, DType, as_dtype
from genesis.errors import DTypeError, ShapeError
from genesis.functions.pointwise import function_of, in_place_method_of
from genesis.functions.surface import (
    DTypeLike,
    Operand,
    Tensor,
    array_of,
    as_operand,
    check_operands,
    fitting,
    functions,
    plain,
    public,
)
from genesis.functions.transfer import overwrite
from genesis.op import Op
from genesis.ops import elementwise as ops

_EXPONENT = {"exponent": "y"}
pow = function_of(ops.pow, keywords=_EXPONENT)
pow_ = in_place_method_of(ops.pow, keywords=_EXPONENT)


def _scaled(x: Any, y: Any, alpha: float) -> Any:
    """Return `alpha`·y for x ± alpha·y, in the dtype of the sum, which may be wider than y's own."""
    if not isinstance(y, TensorBase):
        return y * alpha
    kind = _common_type(x, y)
    if type(alpha) is float and not kind.is_floating_point:
        raise DTypeError(f"alpha is {alpha}, but the sum is {kind.name}", next="pass an integer, or cast to a float")
    alpha = alpha if kind.category else bool(alpha)
    return apply(ops.mul, y if y.array.dtype is kind else apply(ops.cast, y, dtype=kind), alpha)


def _common_type(*operands: Any) -> DType:
    return dtypes.result_type([v.array if isinstance(v, TensorBase) else v for v in operands])


@public(method=False)
def result_type(*operands: Any) -> DType:
    """Return the dtype of arithmetic on tensors and numbers: `result_type(x, 2.5)`, or on one sequence of them."""
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    arrays = [x.array if isinstance(x, TensorBase) else x for x in values]
    if not arrays:
        raise DTypeError("result_type needs at least one operand")
    return dtypes.result_type([v if (v := plain(x)) is not None else x for x in arrays])


def _sum(op: Op, sign: str) -> tuple[Any, Any]:
    """Return the functions for x ± alpha·y: the plain one and the in-place one."""

    def plain(x: Operand, y: Operand, *, alpha: float = 1, out: Tensor | None = None) -> Tensor:
        if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
            x, y = check_operands(op.name, x, y)
        return apply(op, x, y if alpha == 1 else _scaled(x, y, alpha), out=out)

    def in_place(x: Tensor, y: Operand, *, alpha: float = 1) -> Tensor:
        y = as_operand(y, op.name + "_")
        return apply_(op, x, x, y if alpha == 1 else _scaled(x, y, alpha))

    plain.__name__, plain.__doc__ = op.name, f"Return x {sign} alpha·y."
    in_place.__name__, in_place.__doc__ = f"{op.name}_", f"Compute x {sign}= alpha·y in place."
    return public(plain), public(in_place)


add, add_ = _sum(ops.add, "+")
sub, sub_ = _sum(ops.sub, "-")


@public
def div(x: Operand, y: Operand, *, rounding_mode: str | None = None, out: Tensor | None = None) -> Tensor:
    """Return x / y; `rounding_mode` "floor" or "trunc" rounds the quotient and keeps the operands' dtype."""
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
    """Compute `div` in place."""
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
    """Return x limited to [min, max]; None leaves a side open.

    Bounds are numbers, or tensors, which broadcast and receive gradients. The result has the common dtype of x and the
    bounds. Where min > max, it is max.
    """
    return apply(ops.clamp, *_bounded("clamp", x, min, max), out=out)


@public
def clamp_(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """Compute `clamp` in place."""
    return apply_(ops.clamp, x, *_bounded("clamp_", x, min, max))


def _bounded(name: str, x: Any, *bounds: Any) -> tuple[Any, ...]:
    array_of(x, name)
    limits = [None if b is None else as_operand(b, name) for b in bounds]
    numbers = [b for b in limits if b is not None and not isinstance(b, TensorBase)]
    if numbers:
        kind = _common_type(x, *(b for b in limits if b is not None))
        for value in numbers:
            fitting(value, kind, name)
    return (x, *limits)


@public
def clamp_min(x: Tensor, min: Operand, *, out: Tensor | None = None) -> Tensor:
    """Return the larger of x and `min`, element by element."""
    if isinstance(min, TensorBase) and array_of(x, "clamp_min").dtype.category == BOOL:
        return apply(ops.maximum, x, min, out=out)
    return clamp(x, min, out=out)


@public
def clamp_max(x: Tensor, max: Operand, *, out: Tensor | None = None) -> Tensor:
    """Return the smaller of x and `max`, element by element."""
    if isinstance(max, TensorBase) and array_of(x, "clamp_max").dtype.category == BOOL:
        return apply(ops.minimum, x, max, out=out)
    return clamp(x, None, max, out=out)


@public
def lerp(x: Operand, end: Operand, weight: Operand, *, out: Tensor | None = None) -> Tensor:
    """Return x + weight·(end - x)."""
    return apply(ops.lerp, *check_operands("lerp", x, end, weight), out=out)


@public
def lerp_(x: Tensor, end: Operand, weight: Operand) -> Tensor:
    """Compute `lerp` in place."""
    return apply_(ops.lerp, x, x, as_operand(end, "lerp_"), as_operand(weight, "lerp_"))


@public(method=False, out=True)
def where(condition: Tensor, x: Operand | None = None, y: Operand | None = None) -> Any:
    """Return x where `condition` (bool) is true, else y; without both, the indices of `nonzero(as_tuple=True)`."""
    if x is None and y is None:
        return functions["nonzero"](condition, as_tuple=True)
    condition, x, y = check_operands("where", condition, x, y)
    if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
        kind = _common_type(x, y)
        fitting(x, kind, "where")
        fitting(y, kind, "where")
    return apply(ops.where, condition, x, y)


@public
def masked_fill(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    """Return x with `value` where `mask` is true, in x's dtype and the broadcast shape."""
    return apply(ops.where, mask, _filling("masked_fill", x, mask, value), x)


@public
def masked_fill_(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    """Compute `masked_fill` in place."""
    return apply_(ops.where, x, mask, _filling("masked_fill_", x, mask, value), x)


def _filling(name: str, x: Any, mask: Any, value: Any) -> Any:
    """Return the value in x's dtype, so that the other elements are not cast to another."""
    array_of(mask, name)
    value, kind = as_operand(value, name), array_of(x, name).dtype
    if isinstance(value, TensorBase):
        if value.array.shape:
            raise ShapeError(f"{name}: the value has shape {value.array.shape}", next="use where(mask, value, x)")
        return to_dtype(value, kind)
    fitting(value, kind, name)
    return bool(value) if kind.category == BOOL else int(value) if kind.category == INTEGER else value


def to_dtype(x: Tensor, dtype: DTypeLike) -> Tensor:
    """Return x in another dtype, or x itself if it has that dtype."""
    dtype = as_dtype(dtype)
    return x if x.array.dtype is dtype else apply(ops.cast, x, dtype=dtype)


@public(memory_format=True)
def clone(x: Tensor) -> Tensor:
    """Return a copy whose dimensions are stored in the order of x's; autograd records it."""
    if array_of(x, "clone").is_contiguous:
        return apply(ops.copy, x)
    return apply(ops.cast, x, dtype=x.array.dtype)  # unlike a copy, it keeps the order


@public(keywords={"other": "source", "src": "source"})
def copy_(x: Tensor, source: Operand, non_blocking: bool = False) -> Tensor:
    """Overwrite x with `source`, which broadcasts, is cast to x's dtype, and may be on another device.

    `non_blocking`: do not block on a copy between a device and pinned memory of the same layout and dtype.
    """
    source = as_operand(source, "copy_")
    if isinstance(source, TensorBase) and source.array.device != x.array.device:
        if x.requires_grad or source.requires_grad:  # recorded as two steps: the copy and the in-place change
            source = source.to(device=x.array.device)  # type: ignore[attr-defined]
        else:
            overwrite(x.array, source.array, non_blocking)
            return x
    return apply_(ops.overwrite, x, x, source)


@public
def fill_(x: Tensor, value: Operand) -> Tensor:
    """Set every element to `value`, a number or a 0-d tensor."""
    value = as_operand(value, "fill_")
    fitting(value, x.array.dtype, "fill_")
    if isinstance(value, TensorBase) and value.array.shape:
        raise ShapeError(f"fill_ takes a number or a 0-d tensor, got shape {value.array.shape}")
    return apply_(ops.overwrite, x, x, value)


@public
def zero_(x: Tensor) -> Tensor:
    """Set every element to 0."""
    return fill_(x, 0)
