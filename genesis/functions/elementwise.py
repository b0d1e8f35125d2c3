"""Elementwise functions on tensors, named and behaving as torch's; each is a method, too. Names in _ work in place."""

from __future__ import annotations

from typing import Any

from genesis.autograd.record import TensorBase, apply, apply_
from genesis.dtypes import BOOL, INTEGER, DType, as_dtype, result_type
from genesis.errors import DTypeError, ShapeError
from genesis.functions.arguments import fitting, publish
from genesis.functions.make import as_operand, binary, check_operands, inplace, inplace_two, unary
from genesis.functions.transfer import overwrite
from genesis.ops import elementwise as ops

METHODS = (
    "abs", "abs_", "add", "add_", "bitwise_and", "bitwise_and_", "bitwise_not", "bitwise_or", "bitwise_or_",
    "bitwise_xor", "bitwise_xor_", "ceil", "ceil_", "clamp", "clamp_", "clamp_max", "clamp_min",
    "clone", "copy_", "cos", "cos_", "div", "div_", "eq", "erf", "erf_", "exp", "exp2", "exp2_", "exp_", "expm1",
    "expm1_", "fill_", "floor", "floor_", "floor_divide", "floor_divide_", "ge", "gt", "isfinite", "isinf", "isnan",
    "le", "left_shift", "lerp", "lerp_", "log", "log10", "log10_", "log1p", "log1p_", "log2", "log2_", "log_",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "masked_fill_", "maximum",
    "minimum", "mul", "mul_", "ne", "neg", "neg_", "pow", "pow_", "reciprocal", "reciprocal_", "remainder",
    "remainder_", "right_shift", "round", "round_", "rsqrt", "rsqrt_", "sigmoid", "sigmoid_", "sign", "sign_",
    "sin", "sin_", "sqrt", "sqrt_", "square", "square_", "sub", "sub_", "tan", "tan_", "tanh", "tanh_", "trunc",
    "trunc_", "zero_",
)  # fmt: skip

__all__ = [*METHODS, "rsub", "to_dtype", "where"]  # noqa: PLE0604  METHODS holds names

neg, abs, sign, square, reciprocal = (unary(o) for o in (ops.neg, ops.abs, ops.sign, ops.square, ops.reciprocal))
exp, exp2, expm1 = (unary(o) for o in (ops.exp, ops.exp2, ops.expm1))
log, log2, log10, log1p = (unary(o) for o in (ops.log, ops.log2, ops.log10, ops.log1p))
sqrt, rsqrt = unary(ops.sqrt), unary(ops.rsqrt)
sin, cos, tan, tanh = (unary(o) for o in (ops.sin, ops.cos, ops.tan, ops.tanh))
sigmoid, erf = unary(ops.sigmoid), unary(ops.erf)
floor, ceil, trunc, round = (unary(o) for o in (ops.floor, ops.ceil, ops.trunc, ops.round))
isnan, isinf, isfinite = unary(ops.isnan), unary(ops.isinf), unary(ops.isfinite)
logical_not, bitwise_not = unary(ops.logical_not), unary(ops.bitwise_not)

mul, pow, remainder = binary(ops.mul), binary(ops.pow), binary(ops.remainder)
floor_divide = binary(ops.floor_divide)
maximum, minimum = binary(ops.maximum), binary(ops.minimum)
eq, ne, lt, le, gt, ge = (binary(o) for o in (ops.eq, ops.ne, ops.lt, ops.le, ops.gt, ops.ge))
logical_and, logical_or, logical_xor = (binary(o) for o in (ops.logical_and, ops.logical_or, ops.logical_xor))
bitwise_and, bitwise_or, bitwise_xor = (binary(o) for o in (ops.bitwise_and, ops.bitwise_or, ops.bitwise_xor))
left_shift, right_shift = binary(ops.left_shift), binary(ops.right_shift)

neg_, abs_, sign_, square_, reciprocal_ = (inplace(o) for o in (ops.neg, ops.abs, ops.sign, ops.square, ops.reciprocal))
exp_, exp2_, expm1_ = (inplace(o) for o in (ops.exp, ops.exp2, ops.expm1))
log_, log2_, log10_, log1p_ = (inplace(o) for o in (ops.log, ops.log2, ops.log10, ops.log1p))
sqrt_, rsqrt_ = inplace(ops.sqrt), inplace(ops.rsqrt)
sin_, cos_, tan_, tanh_ = (inplace(o) for o in (ops.sin, ops.cos, ops.tan, ops.tanh))
sigmoid_, erf_ = inplace(ops.sigmoid), inplace(ops.erf)
floor_, ceil_, trunc_, round_ = (inplace(o) for o in (ops.floor, ops.ceil, ops.trunc, ops.round))
mul_, pow_, remainder_ = inplace_two(ops.mul), inplace_two(ops.pow), inplace_two(ops.remainder)
floor_divide_ = inplace_two(ops.floor_divide)
bitwise_and_, bitwise_or_, bitwise_xor_ = (inplace_two(o) for o in (ops.bitwise_and, ops.bitwise_or, ops.bitwise_xor))


def _scaled(x: Any, y: Any, alpha: float) -> Any:
    """`alpha`·y as add and sub of x take it: in the type of the sum, which may hold more than y's own."""
    if not isinstance(y, TensorBase):
        return y * alpha
    kind = _common_type(x, y)
    if type(alpha) is float and not kind.is_floating_point:
        raise DTypeError(f"alpha is {alpha} for a sum of type {kind.name}", next="give an integer, or cast to a float")
    return apply(ops.mul, y if y.array.dtype is kind else apply(ops.cast, y, dtype=kind), alpha)


def _common_type(*operands: Any) -> DType:
    return result_type([v.array if isinstance(v, TensorBase) else v for v in operands])


def add(x: Any, y: Any, *, alpha: float = 1, out: Any = None) -> Any:
    """x + alpha·y."""
    if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
        x, y = check_operands("add", x, y)
    return apply(ops.add, x, y if alpha == 1 else _scaled(x, y, alpha), out=out)


def sub(x: Any, y: Any, *, alpha: float = 1, out: Any = None) -> Any:
    """x - alpha·y."""
    if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
        x, y = check_operands("sub", x, y)
    return apply(ops.sub, x, y if alpha == 1 else _scaled(x, y, alpha), out=out)


def add_(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """x += alpha·y, in place."""
    y = as_operand(y, "add_")
    return apply_(ops.add, x, x, y if alpha == 1 else _scaled(x, y, alpha))


def sub_(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """x -= alpha·y, in place."""
    y = as_operand(y, "sub_")
    return apply_(ops.sub, x, x, y if alpha == 1 else _scaled(x, y, alpha))


def rsub(x: Any, y: Any) -> Any:
    """y - x."""
    return apply(ops.sub, *check_operands("sub", y, x))


def div(x: Any, y: Any, *, rounding_mode: str | None = None, out: Any = None) -> Any:
    """x / y; `rounding_mode` "floor" or "trunc" keeps the operands' type."""
    x, y = check_operands("div", x, y)
    if rounding_mode == "floor":
        return apply(ops.floor_divide, x, y, out=out)
    if rounding_mode == "trunc":
        return apply(ops.cast, apply(ops.trunc, apply(ops.div, x, y)), dtype=_common_type(x, y), out=out)
    if rounding_mode is not None:
        raise DTypeError(f"rounding_mode {rounding_mode!r} is not None, 'floor' or 'trunc'")
    return apply(ops.div, x, y, out=out)


def div_(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """`div` in place; `rounding_mode` as there."""
    y = as_operand(y, "div_")
    if rounding_mode == "trunc" and x.array.dtype.is_floating_point:
        return apply_(ops.trunc, x, apply_(ops.div, x, x, y))
    if rounding_mode == "trunc":
        return copy_(x, div(x, y, rounding_mode="trunc"))
    if rounding_mode not in (None, "floor"):
        raise DTypeError(f"rounding_mode {rounding_mode!r} is not None, 'floor' or 'trunc'")
    return apply_(ops.div if rounding_mode is None else ops.floor_divide, x, x, y)


def clamp(x: Any, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
    """x limited to [min, max]: numbers or tensors, which broadcast and have gradients; None leaves a side open.

    The result has the common type of x and the bounds. Where min > max it is max.
    """
    return apply(ops.clamp, *_bounded("clamp", x, min, max), out=out)


def clamp_(x: Any, min: Any = None, max: Any = None) -> Any:
    """`clamp` in place."""
    return apply_(ops.clamp, x, *_bounded("clamp_", x, min, max))


def _bounded(name: str, x: Any, *bounds: Any) -> tuple[Any, ...]:
    if not isinstance(x, TensorBase):
        raise DTypeError(f"{name} takes a tensor, got {type(x).__name__}", next="wrap it with genesis.tensor()")
    given = [None if b is None else as_operand(b, name) for b in bounds]
    numbers = [b for b in given if b is not None and not isinstance(b, TensorBase)]
    if numbers:
        kind = _common_type(x, *(b for b in given if b is not None))
        for value in numbers:
            fitting(value, kind, name)
    return (x, *given)


def clamp_min(x: Any, min: Any, *, out: Any = None) -> Any:
    """x, or `min` where that is larger."""
    return clamp(x, min, out=out)


def clamp_max(x: Any, max: Any, *, out: Any = None) -> Any:
    """x, or `max` where that is smaller."""
    return clamp(x, None, max, out=out)


def lerp(x: Any, end: Any, weight: Any, *, out: Any = None) -> Any:
    """x + weight·(end - x)."""
    return apply(ops.lerp, *check_operands("lerp", x, end, weight), out=out)


def lerp_(x: Any, end: Any, weight: Any) -> Any:
    """`lerp` in place."""
    return apply_(ops.lerp, x, x, as_operand(end, "lerp_"), as_operand(weight, "lerp_"))


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where `condition` (bool) holds, else y."""
    condition, x, y = check_operands("where", condition, x, y)
    if not (isinstance(x, TensorBase) and isinstance(y, TensorBase)):
        kind = _common_type(x, y)
        fitting(x, kind, "where")
        fitting(y, kind, "where")
    return apply(ops.where, condition, x, y)


def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    """x with `value` where `mask` holds, in x's dtype and the broadcast shape."""
    return apply(ops.where, mask, _filling("masked_fill", x, mask, value), x)


def masked_fill_(x: Any, mask: Any, value: Any) -> Any:
    """`masked_fill` in place."""
    return apply_(ops.where, x, mask, _filling("masked_fill_", x, mask, value), x)


def _filling(name: str, x: Any, mask: Any, value: Any) -> Any:
    """The value in x's type: the elements that stay must not pass through another."""
    for operand in (x, mask):
        if not isinstance(operand, TensorBase):
            raise DTypeError(
                f"{name} takes tensors, got {type(operand).__name__}", next="wrap it with genesis.tensor()"
            )
    value, kind = as_operand(value, name), x.array.dtype
    if isinstance(value, TensorBase):
        if value.array.shape:
            raise ShapeError(f"{name}: the value has shape {value.array.shape}", next="use where(mask, value, x)")
        return to_dtype(value, kind)
    fitting(value, kind, name)
    return bool(value) if kind.category == BOOL else int(value) if kind.category == INTEGER else value


def to_dtype(x: Any, dtype: Any) -> Any:
    """x in another dtype; x itself where it has it already."""
    dtype = as_dtype(dtype)
    return x if x.array.dtype is dtype else apply(ops.cast, x, dtype=dtype)


def clone(x: Any) -> Any:
    """A copy in fresh contiguous memory, on the tape."""
    return apply(ops.copy, x)


def copy_(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Overwrite x with `source` (broadcast, cast to x's dtype), which may be on another device.

    Args:
        non_blocking: between a device and pinned memory of the same layout and dtype, do not wait.
    """
    source = as_operand(source, "copy_")
    if isinstance(source, TensorBase) and source.array.device != x.array.device:
        if x.requires_grad or source.requires_grad:  # on the tape the copy and the change are two steps
            source = source.to(device=x.array.device)  # type: ignore[attr-defined]
        else:
            overwrite(x.array, source.array, non_blocking)
            return x
    return apply_(ops.overwrite, x, x, source)


def fill_(x: Any, value: Any) -> Any:
    """Every element becomes `value`, a number or a tensor without dimensions."""
    value = as_operand(value, "fill_")
    fitting(value, x.array.dtype, "fill_")
    if isinstance(value, TensorBase) and value.array.shape:
        raise ShapeError(f"fill_ takes a number or a tensor without dimensions, got shape {value.array.shape}")
    return apply_(ops.overwrite, x, x, value)


def zero_(x: Any) -> Any:
    """Every element becomes 0."""
    return fill_(x, 0)


publish(
    globals(), __all__,
    pow={"exponent": "y"}, pow_={"exponent": "y"}, copy_={"other": "source", "src": "source"},
)  # fmt: skip
