"""Elementwise ops: arithmetic, powers, comparisons, logic, selection, casts and ranges.

Operands broadcast, results follow torch's dtype rule, and the tape sums gradients over broadcast dimensions. In the
gradient formulas, g is the gradient of the result and y the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import BOOL, INTEGER, DType, as_dtype, bool_, default_dtype, int64, result_type
from genesis.errors import DTypeError, NumericError, ShapeError
from genesis.op import Context, Grads, Op, Vjp, op
from genesis.ops.blocks import as_type, split, sweep
from genesis.ops.error_function import erf_values
from genesis.ops.formula import elementary
from genesis.shapes import Shape, broadcast_shapes

# --- Shape and dtype rules --------------------------------------------------------------------------------------------


def shape_of(inputs: tuple[Any, ...]) -> Shape:
    """Return the broadcast shape of the tensors among the operands. Raises DTypeError if there is none."""
    shapes = [x.shape for x in inputs if isinstance(x, Array)]
    if not shapes:
        raise DTypeError("at least one operand must be a tensor", next="wrap a number with genesis.tensor()")
    return broadcast_shapes(*shapes)


def common(*inputs: Any, **attrs: Any) -> Spec:
    """Return the spec of a result in the operands' common dtype."""
    dtype = result_type(inputs)
    return Spec(shape_of(inputs), dtype)


def floating(*inputs: Any, **attrs: Any) -> Spec:
    """Return the spec of a result in a float dtype; integers and bools compute in float32."""
    dtype = result_type(inputs)
    return Spec(shape_of(inputs), dtype if dtype.is_floating_point else default_dtype())


def predicate(*inputs: Any, **attrs: Any) -> Spec:
    """Return the spec of a bool result, for operands with a common dtype."""
    result_type(inputs)
    return Spec(shape_of(inputs), bool_)


def restricted(name: str, lowest: int, highest: int, hint: str) -> Callable[..., Spec]:
    """Return a rule like `common` that accepts only dtypes of certain categories."""

    def infer(*inputs: Any, **attrs: Any) -> Spec:
        spec = common(*inputs)
        if not lowest <= spec.dtype.category <= highest:
            raise DTypeError(f"{name} does not take {spec.dtype.name} tensors", next=hint)
        return spec

    return infer


def numeric(name: str) -> Callable[..., Spec]:
    """Return a rule like `common` for integers and floats."""
    return restricted(name, INTEGER, 2, "use logical ops, or cast with .to(...)")


def integral(name: str) -> Callable[..., Spec]:
    """Return a rule like `common` for bools and integers."""
    return restricted(name, BOOL, INTEGER, "cast to an integer type with .to(...)")


def whole_numbers(name: str) -> Callable[..., Spec]:
    """Return a rule like `common` for integers only."""
    return restricted(name, INTEGER, INTEGER, "cast first")


def sub_infer(*inputs: Any) -> Spec:
    """Check as `numeric` does, and refuse Python bools, too, as torch does."""
    spec = numeric("sub")(*inputs)
    if any(isinstance(x, bool) or (isinstance(x, Array) and x.dtype is bool_) for x in inputs):
        raise DTypeError("sub does not take bools", next="use logical_xor, or cast with .to(...)")
    return spec


def pow_infer(*inputs: Any) -> Spec:
    """Check as `numeric` does, and refuse negative integer powers of integers."""
    spec = numeric("pow")(*inputs)
    if spec.dtype.category == INTEGER and isinstance(inputs[1], int) and inputs[1] < 0:
        raise DTypeError(f"pow cannot raise integers to the negative power {inputs[1]}", next="cast to a float type")
    return spec


def square_infer(x: Any) -> Spec:
    """Return the spec of a square; bools count as integers."""
    dtype = result_type((x,))
    return Spec(shape_of((x,)), int64 if dtype is bool_ else dtype)


def lerp_infer(*inputs: Any) -> Spec:
    """Return the spec of `lerp`; all tensors must have the same float dtype, as in torch."""
    dtypes = {x.dtype for x in inputs if isinstance(x, Array)}
    if len(dtypes) != 1 or not result_type(inputs[:1]).is_floating_point:
        listed = ", ".join(sorted(d.name for d in dtypes))
        raise DTypeError(f"lerp takes tensors of one float type, got {listed}", next="cast with .to(...)")
    return Spec(shape_of(inputs), dtypes.pop())


def compute_type(*operands: Any) -> np.dtype:
    """Return the numpy dtype in which numpy operands meet, by torch's rule, for results of another dtype (bool)."""
    return result_type(Spec(x.shape, as_dtype(x.dtype)) if isinstance(x, np.ndarray) else x for x in operands).numpy


# --- Factories of ops -------------------------------------------------------------------------------------------------


def _register(
    name: str, doc: str, reference: Callable[..., None], infer: Callable[..., Spec], flops: int = 1, **rest: Any
) -> Op:
    """Register an op; `rest` overrides the defaults: a function, a method and a torch function of its name.

    `flops` counts per output element.
    """
    reference.__doc__ = doc
    facts: dict[str, Any] = {
        "public": name, "method": True, "torch": f"torch.{name}", "family": "elementwise", **rest,
    }  # fmt: skip
    if flops != 1:
        facts["flops"] = lambda inputs, outputs, attrs: flops * outputs[0].size
    return Op(name, reference, infer, elementwise=True, **facts)


# The public function is written by hand in `genesis.functions.elementwise`.
_WRITTEN: dict[str, Any] = {"public": "", "method": False}


def _unary(
    name: str, doc: str, infer: Callable[..., Spec], function: Callable[..., Any], vjp: Vjp | None = None, **rest: Any
) -> Op:
    """Register an op of one operand with a formula, which the reference sweeps in the result's dtype."""

    def reference(out: np.ndarray, x: Any) -> None:
        sweep(function, out, x)

    return _register(
        name, doc, reference, infer, vjp=vjp, swept=function, **{"in_place": True, "formula": function, **rest}
    )


def _binary(
    name: str, doc: str, infer: Callable[..., Spec], function: Callable[..., Any], vjp: Vjp | None = None, **rest: Any
) -> Op:
    """Register an op of two operands with a formula, which the reference sweeps in the result's dtype."""

    def reference(out: np.ndarray, x: Any, y: Any) -> None:
        sweep(function, out, x, y)

    return _register(name, doc, reference, infer, vjp=vjp, swept=function, **{"formula": function, **rest})


def _from_x(
    name: str, doc: str, infer: Callable[..., Spec], function: Callable[..., Any], derivative: Callable[[Array], Any],
    **rest: Any,
) -> Op:  # fmt: skip
    """Register an op of one operand with dx = g·derivative(x)."""
    return _unary(name, doc, infer, function, lambda ctx, g: (mul(g, derivative(ctx.inputs[0])),), saves=(0,), **rest)


def _from_y(name: str, doc: str, function: Callable[..., Any], derivative: Callable[[Any], Any], **rest: Any) -> Op:
    """Register an op of one operand, in a float dtype, with dx = g·derivative(y)."""

    def vjp(ctx: Context, g: Array) -> Grads:
        return (mul(g, derivative(ctx.outputs[0])),)

    return _unary(name, doc, floating, function, vjp, saves=("out",), **rest)


def _logarithm(name: str, doc: str, function: Callable[..., Any], denominator: Callable[[Array], Any]) -> Op:
    """Register a logarithm with dx = g / denominator(x)."""

    def vjp(ctx: Context, g: Array) -> Grads:
        return (div(g, denominator(ctx.inputs[0])),)

    return _unary(name, doc, floating, function, vjp, saves=(0,), flops=5, autocast="fp32")


def _rounding(name: str, doc: str, function: Callable[..., Any]) -> Op:
    """Register a rounding op; integers stay unchanged."""

    def rounded(x: Any, out: np.ndarray | None = None) -> Any:
        return np.positive(x, out=out) if x.dtype.kind in "iu" else function(x, out=out)

    return _unary(name, doc, numeric(name), rounded, _no_derivative, formula=function)


def _extremum(name: str, doc: str, function: Callable[..., Any], loses: Callable[[Any, Any], Array]) -> Op:
    """Register an op that selects one of two operands, which gets g; equal ones get half each; with NaN, both get g."""

    def vjp(ctx: Context, g: Array) -> Grads:
        x, y = ctx.inputs
        shared = where(eq(x, y), mul(g, 0.5), g)
        dx = where(loses(x, y), 0.0, shared) if ctx.needs[0] else None
        return dx, where(loses(y, x), 0.0, shared) if ctx.needs[1] else None

    return _binary(name, doc, common, function, vjp, saves=(0, 1))


def _test(name: str, doc: str, function: Callable[..., Any]) -> Op:
    def reference(out: np.ndarray, x: Any) -> None:
        dtype = compute_type(x)
        sweep(function, out, as_type(x, dtype), dtype=dtype)

    return _register(name, doc, reference, predicate, formula=function)


def _comparison(name: str, doc: str, function: Callable[..., Any]) -> Op:
    """Register a comparison, which casts both operands to their common dtype and returns bools."""

    def reference(out: np.ndarray, x: Any, y: Any) -> None:
        dtype = compute_type(x, y)
        sweep(function, out, as_type(x, dtype), as_type(y, dtype), dtype=dtype)

    return _register(name, doc, reference, predicate, formula=function)


# --- Copy, cast, fill, overwrite --------------------------------------------------------------------------------------


def _store(out: np.ndarray, x: Any) -> None:
    np.copyto(out, x, casting="unsafe")


@op("copy", lambda x: Spec(x.shape, x.dtype), vjp=lambda ctx, g: (g,), elementwise=True)
def copy(out: np.ndarray, x: np.ndarray) -> None:
    """y = x, in new contiguous memory, or in out's memory and dtype with out=. dx = g."""
    split(_store, out, x)


@op("cast", lambda x, dtype: Spec(x.shape, dtype), vjp=lambda ctx, g: (g,), elementwise=True)
def cast(out: np.ndarray, x: np.ndarray, dtype: DType) -> None:
    """y = x as `dtype`; float to integer truncates towards zero. dx = g, which the tape casts back."""
    split(_store, out, x)


def _fill_infer(*, value: float, shape: Shape, dtype: DType) -> Spec:
    if any(s < 0 for s in shape):
        raise ShapeError(f"fill: shape {tuple(shape)} has a negative size")
    return Spec(tuple(shape), dtype)


@op("fill", _fill_infer, elementwise=True)
def fill(out: np.ndarray, value: float, shape: Shape, dtype: DType) -> None:
    """Set every element to `value`."""
    out.fill(as_type(value, out.dtype))


def _zeros(like: Array) -> Array:
    zeros: Array = fill(value=0, shape=like.shape, dtype=like.dtype, device=like.device)
    return zeros


def _overwrite_infer(x: Array, source: Any) -> Spec:
    if isinstance(source, Array) and broadcast_shapes(x.shape, source.shape) != x.shape:
        raise ShapeError(f"shape {source.shape} does not expand to {x.shape}")
    return Spec(x.shape, x.dtype)


@op("overwrite", _overwrite_infer, vjp=lambda ctx, g: (_zeros(g) if ctx.needs[0] else None, g), elementwise=True)
def overwrite(out: np.ndarray, x: np.ndarray, source: Any) -> None:
    """y = source, in the shape and dtype of x, whose values are not read: copy_ and fill_. dx = 0, dsource = g."""
    split(_store, out, source if isinstance(source, np.ndarray) else as_type(source, out.dtype))


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def _mul_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·y, dy = g·x."""
    x, y = ctx.inputs
    return mul(g, y) if ctx.needs[0] else None, mul(g, x) if ctx.needs[1] else None


def _div_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g / y, dy = -g·x / y²."""
    x, y = ctx.inputs
    dx = div(g, y)
    return dx, neg(mul(dx, div(x, y))) if ctx.needs[1] else None


def _pow_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·p·x^(p-1), 0 where p = 0; dp = g·x^p·log x, 0 where x = 0 and p ≥ 0."""
    x, p = ctx.inputs
    return _pow_dx(g, x, p) if ctx.needs[0] else None, _pow_dp(g, x, p, ctx.outputs[0]) if ctx.needs[1] else None


def _pow_dx(g: Array, x: Any, p: Any) -> Array:
    if isinstance(p, Array):
        derivative = mul(pow(x, sub(p, 1)), p)
        return mul(g, where(eq(p, 0), 0.0, derivative))
    return _zeros(g) if p == 0 else mul(g, mul(x if p == 2 else pow(x, p - 1), p))


def _pow_dp(g: Array, x: Any, p: Array, result: Any) -> Array:
    logarithm: Any = math.nan
    if isinstance(x, Array):
        # Replaces log(0) before the multiplication by x^p = 0, which would give NaN.
        # An integer x is cast first: its logarithm would be float32.
        base = x if x.dtype is g.dtype else cast(x, dtype=g.dtype)
        logarithm = where(logical_and(eq(x, 0), ge(p, 0)), 0.0, log(base))
    elif x == 0:
        logarithm = where(ge(p, 0), 0.0, -math.inf)
    elif x > 0:
        logarithm = math.log(x)
    return mul(g, mul(result, logarithm))


def _remainder_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g, dy = -g·floor(x / y)."""
    x, y = ctx.inputs
    return g, neg(mul(g, floor_divide(x, y))) if ctx.needs[1] else None


def _no_derivative(ctx: Context, g: Array) -> Grads:
    """dx = 0 and dy = 0, because the op is piecewise constant."""
    return tuple(_zeros(g) if needs else None for needs in ctx.needs)


def _power(x: Any, p: Any, out: np.ndarray | None = None) -> Any:
    """x^p. An integer to a negative power is 0, except for 1 and -1, as in torch."""
    # np.power takes up to 60 ns for a negative float.
    if isinstance(p, np.floating) and p in (2, 3, 4):
        square = np.multiply(x, x, out=out if p == 2 else None)
        return square if p == 2 else np.multiply(square, x if p == 3 else square, out=out)
    if x.dtype.kind not in "i" or not np.any(p < 0):
        return np.power(x, p, out=out)
    units = np.where(x == 1, 1, np.where(x == -1, 1 - 2 * (p & 1), 0))
    result = np.where(p < 0, units, np.power(x, np.maximum(p, 0)))
    return np.positive(result.astype(x.dtype), out=out)


def _without_zero(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `function` with a NumericError for a division of integers by 0."""

    def divide(x: Any, y: Any, out: np.ndarray | None = None) -> Any:
        if y.dtype.kind in "iu" and not np.all(y) and np.broadcast(x, y).size:
            raise NumericError(f"{name}: an integer is divided by 0", next="mask the zeros, or divide floats")
        return function(x, y, out=out)

    return divide


_floor_divide = _without_zero(np.floor_divide, "floor_divide")
_remainder = _without_zero(np.remainder, "remainder")

add = _binary("add", "x + y.", common, np.add, lambda ctx, g: (g, g), **_WRITTEN)
sub = _binary("sub", "x - y.", sub_infer, np.subtract, lambda ctx, g: (g, neg(g) if ctx.needs[1] else None), **_WRITTEN)
mul = _binary(
    "mul",
    "x·y.",
    common,
    np.multiply,
    _mul_vjp,
    saves=lambda needs: tuple(i for i in (0, 1) if needs[1 - i]),  # each for the gradient of the other
    in_place=True,
)
div = _binary(
    "div",
    "x / y, in a float type.",
    floating,
    np.divide,
    _div_vjp,
    saves=lambda needs: (0, 1) if needs[1] else (1,),
    **_WRITTEN,
)
floor_divide = _binary(
    "floor_divide", "x / y rounded down.", numeric("floor_divide"), _floor_divide, _no_derivative, in_place=True,
    formula=np.floor_divide,
)  # fmt: skip
remainder = _binary(
    "remainder",
    "x - y·floor(x / y): it has the sign of y.",
    numeric("remainder"),
    _remainder,
    _remainder_vjp,
    saves=lambda needs: (0, 1) if needs[1] else (),
    in_place=True,
    formula=np.remainder,
)
pow = _binary(
    "pow",
    "x^y.",
    pow_infer,
    _power,
    _pow_vjp,
    saves=lambda needs: (0, 1, "out") if needs[1] else (0, 1),
    flops=10,
    autocast="fp32",
    formula=np.power,
    **_WRITTEN,
)


def _lerp_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·(1-w), dend = g·w, dw = g·(end - x)."""
    x, end, w = ctx.inputs
    dx = mul(g, sub(1.0, w) if isinstance(w, Array) else 1.0 - w) if ctx.needs[0] else None
    return dx, mul(g, w) if ctx.needs[1] else None, mul(g, sub(end, x)) if ctx.needs[2] else None


def _interpolate(x: Any, end: Any, w: Any, out: np.ndarray | None = None) -> Any:
    step = end - x
    result = np.where(np.abs(w) < 0.5, x + w * step, end - (1 - w) * step)
    return np.positive(result, out=out)


@op(
    "lerp",
    lerp_infer,
    vjp=_lerp_vjp,
    saves=lambda needs: ((0, 1) if needs[2] else ()) + ((2,) if needs[0] or needs[1] else ()),
    flops=lambda inputs, outputs, attrs: 3 * outputs[0].size,
    elementwise=True,
    formula=_interpolate,
    torch="torch.lerp",
)
def lerp(out: np.ndarray, x: np.ndarray, end: Any, weight: Any) -> None:
    """y = x + w·(end - x), computed from the nearer end, as in torch, so that w = 1 gives exactly `end`."""
    sweep(_interpolate, out, x, end, weight)


# --- Unary ------------------------------------------------------------------------------------------------------------


def negative_values(x: Any, out: np.ndarray | None = None) -> Any:
    """-x, as a multiplication: np.negative mixes up elements if x and out both have gaps (seen in numpy 2.4)."""
    return np.multiply(x, as_type(-1, x.dtype), out=out)


def sigmoid_values(x: Any, out: np.ndarray | None = None) -> Any:
    """1 / (1 + e^-x), in the input's dtype; e^-x may overflow to inf, which correctly gives 0."""
    y = np.multiply(x, -1.0, out=out)
    y = np.exp(y, out=out)
    y = np.add(y, 1, out=out)
    return np.divide(1, y, out=out)


@elementary
def reciprocal_values(x: Any, out: np.ndarray | None = None) -> Any:
    """1 / x; np.reciprocal takes 1.7 times as long."""
    return np.divide(1, x, out=out)


def _sign(x: Any, out: np.ndarray | None = None) -> Any:
    """-1, 0 or 1; 0 for NaN, as in torch; a bool is unchanged."""
    if x.dtype == np.bool_:
        return np.logical_or(x, False, out=out)
    return np.subtract(x > 0, x < 0, out=out, dtype=x.dtype) if x.dtype.kind != "u" else np.minimum(x, 1, out=out)


neg: Op = _unary("neg", "-x.", numeric("neg"), negative_values, lambda ctx, g: (neg(g),), formula=np.negative)
sign = _unary("sign", "-1, 0 or 1.", common, _sign, _no_derivative, formula=np.sign)
abs = _from_x("abs", "|x|.", numeric("abs"), np.abs, sign)
square = _from_x("square", "x².", square_infer, np.square, lambda x: mul(x, 2), autocast="fp32")
exp = _from_y("exp", "e^x.", np.exp, lambda y: y, flops=4, autocast="fp32")
exp2 = _from_y("exp2", "2^x.", np.exp2, lambda y: mul(y, math.log(2)), flops=4)
expm1 = _from_y("expm1", "e^x - 1, exact near 0.", np.expm1, lambda y: add(y, 1), flops=5, autocast="fp32")
log = _logarithm("log", "The natural logarithm.", np.log, lambda x: x)
log2 = _logarithm("log2", "The logarithm to base 2.", np.log2, lambda x: mul(x, math.log(2)))
log10 = _logarithm("log10", "The logarithm to base 10.", np.log10, lambda x: mul(x, math.log(10)))
log1p = _logarithm("log1p", "log(1 + x), exact near 0.", np.log1p, lambda x: add(x, 1))
sqrt = _unary(
    "sqrt", "√x.", floating, np.sqrt, lambda ctx, g: (div(mul(g, 0.5), ctx.outputs[0]),), saves=("out",), flops=2
)
rsqrt = _from_y(
    "rsqrt",
    "1 / √x.",
    lambda x, out=None: np.divide(1.0, np.sqrt(x), out=out),
    lambda y: mul(mul(mul(y, y), y), -0.5),
    flops=3,
    autocast="fp32",
)
reciprocal = _from_y("reciprocal", "1 / x.", reciprocal_values, lambda y: neg(mul(y, y)), autocast="fp32")
sin = _from_x("sin", "The sine.", floating, np.sin, lambda x: cos(x), flops=8)  # noqa: PLW0108  defined below
cos: Op = _from_x("cos", "The cosine.", floating, np.cos, lambda x: neg(sin(x)), flops=8)
tan = _from_y("tan", "The tangent.", np.tan, lambda y: add(mul(y, y), 1), flops=8, autocast="fp32")
tanh = _from_y("tanh", "The hyperbolic tangent.", np.tanh, lambda y: sub(1, mul(y, y)), flops=8, module="Tanh")
sigmoid = _from_y("sigmoid", "1 / (1 + e^-x).", sigmoid_values, lambda y: mul(y, sub(1, y)), flops=6, module="Sigmoid")
erf = _from_x(
    "erf",
    "The error function: 2/√π·∫ e^-t² dt from 0 to x.",
    floating,
    erf_values,
    lambda x: mul(exp(neg(mul(x, x))), 2 / math.sqrt(math.pi)),
    flops=20,
)
floor = _rounding("floor", "x rounded down.", np.floor)
ceil = _rounding("ceil", "x rounded up.", np.ceil)
trunc = _rounding("trunc", "x rounded towards 0.", np.trunc)
round = _rounding("round", "x rounded to the nearest integer, halves to the even one.", np.rint)


# --- Comparisons, extrema, logic, bits --------------------------------------------------------------------------------

eq = _comparison("eq", "Whether x = y.", np.equal)
ne = _comparison("ne", "Whether x ≠ y.", np.not_equal)
lt = _comparison("lt", "Whether x < y.", np.less)
le = _comparison("le", "Whether x ≤ y.", np.less_equal)
gt = _comparison("gt", "Whether x > y.", np.greater)
ge = _comparison("ge", "Whether x ≥ y.", np.greater_equal)
maximum = _extremum("maximum", "The larger of x and y; NaN where one is NaN.", np.maximum, lt)
minimum = _extremum("minimum", "The smaller of x and y; NaN where one is NaN.", np.minimum, gt)
logical_and = _comparison("logical_and", "Whether x and y are both not 0.", np.logical_and)
logical_or = _comparison("logical_or", "Whether x or y is not 0.", np.logical_or)
logical_xor = _comparison("logical_xor", "Whether just one of x and y is not 0.", np.logical_xor)
logical_not = _test("logical_not", "Whether x is 0.", np.logical_not)
# Comparisons replace numpy's isnan and isinf, which write between the elements of an out with gaps (numpy 2.4).
isnan = _test("isnan", "Whether x is NaN.", lambda x, out=None: np.not_equal(x, x, out=out))
isinf = _test("isinf", "Whether x is ∞ or -∞.", lambda x, out=None: np.equal(np.abs(x), np.inf, out=out))
isfinite = _test(
    "isfinite", "Whether x is neither NaN nor infinite.", lambda x, out=None: np.less(np.abs(x), np.inf, out=out)
)
bitwise_and = _binary(
    "bitwise_and", "The bits that x and y share.", integral("bitwise_and"), np.bitwise_and, in_place=True
)
bitwise_or = _binary("bitwise_or", "The bits of x or y.", integral("bitwise_or"), np.bitwise_or, in_place=True)
bitwise_xor = _binary(
    "bitwise_xor", "The bits that x and y do not share.", integral("bitwise_xor"), np.bitwise_xor, in_place=True
)
bitwise_not = _unary("bitwise_not", "The bits of x inverted.", integral("bitwise_not"), np.invert, in_place=False)
left_shift = _binary(
    "left_shift",
    "x·2^y of integers: the bits of x moved up by y.",
    whole_numbers("left_shift"),
    np.left_shift,
    in_place=True,
    torch="torch.bitwise_left_shift",
)
right_shift = _binary(
    "right_shift",
    "x / 2^y of integers, rounded down.",
    whole_numbers("right_shift"),
    np.right_shift,
    in_place=True,
    torch="torch.bitwise_right_shift",
)


# --- Selection --------------------------------------------------------------------------------------------------------


def _where_infer(condition: Any, x: Any, y: Any) -> Spec:
    if not isinstance(condition, Array) or condition.dtype is not bool_:
        raise DTypeError("where takes a bool condition", next="compare first, for example x > 0")
    return Spec(shape_of((condition, x, y)), result_type((x, y)))


def _where_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g where the condition is true, dy = g where it is false; 0 elsewhere."""
    condition = ctx.inputs[0]
    return None, where(condition, g, 0.0) if ctx.needs[1] else None, where(condition, 0.0, g) if ctx.needs[2] else None


@op("where", _where_infer, vjp=_where_vjp, saves=(0,), elementwise=True, formula=np.where, torch="torch.where")
def where(out: np.ndarray, condition: np.ndarray, x: Any, y: Any) -> None:
    """y = x where `condition` is true, else y."""
    split(_select, out, condition, as_type(x, out.dtype), as_type(y, out.dtype))


def _select(out: np.ndarray, condition: np.ndarray, x: Any, y: Any) -> None:
    if isinstance(x, np.ndarray) and np.may_share_memory(out, x):  # in place: out already holds x
        np.copyto(out, y, where=~condition)
        return
    if np.may_share_memory(out, condition):
        condition = condition.copy()
    np.copyto(out, y)
    np.copyto(out, x, where=condition)


def _clamp_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g inside the bounds (inclusive), dmin = g where x < min < max, dmax = g where x > max or min > max."""
    x, low, high = ctx.inputs
    dx, dmin, dmax = g if low is None else where(ge(x, low), g, 0.0), None, None
    dx = dx if high is None else where(le(x, high), dx, 0.0)
    if ctx.needs[1]:
        dmin = where(lt(x, low), g, 0.0)
        dmin = dmin if high is None else where(_below(low, high), dmin, 0.0)
    if ctx.needs[2]:
        above = gt(x, high)
        dmax = where(above if low is None else logical_or(above, _below(high, low)), g, 0.0)
    return dx, dmin, dmax


def _below(x: Any, y: Any) -> Array:
    return lt(x, y) if isinstance(x, Array) else gt(y, x)


def _clamp_infer(x: Array, min: Any = None, max: Any = None) -> Spec:
    if min is None and max is None:
        raise ShapeError("clamp needs min, max or both")
    return numeric("clamp")(x, *(b for b in (min, max) if b is not None))


def _clamped(x: Any, low: Any, high: Any, out: np.ndarray | None = None) -> Any:
    return np.minimum(np.maximum(x, low), high, out=out)


@op("clamp", _clamp_infer, vjp=_clamp_vjp, saves=(0, 1, 2), elementwise=True, formula=_clamped)
def clamp(out: np.ndarray, x: np.ndarray, min: Any = None, max: Any = None) -> None:
    """y = min(max(x, min), max); a bound of None is open. NaN in x or in a bound gives NaN."""
    if max is None:
        sweep(np.maximum, out, x, min)
    elif min is None:
        sweep(np.minimum, out, x, max)
    else:
        sweep(_clamped, out, x, min, max)


# --- Ranges -----------------------------------------------------------------------------------------------------------


def _ramp_infer(*, count: int, dtype: DType, **attrs: float) -> Spec:
    if count < 0:
        raise ShapeError(f"a range cannot have {count} elements", next="choose a step that leads from start to end")
    if dtype.name == "bool":
        raise DTypeError("a range cannot have the dtype bool", next="use an integer or float dtype")
    return Spec((count,), dtype)


@op("arange", _ramp_infer)
def arange(out: np.ndarray, start: float, step: float, count: int, dtype: DType) -> None:
    """start + step·i for i = 0 … count - 1, in float64, or exactly if start and step are integers."""
    np.copyto(out, np.arange(count) * step + start, casting="unsafe")


@op("linspace", _ramp_infer)
def linspace(out: np.ndarray, start: float, end: float, count: int, dtype: DType) -> None:
    """`count` evenly spaced values from start to end, both included, in float64: each half from its own end."""
    i, step = np.arange(count), np.longdouble((float(end) - float(start)) / max(count - 1, 1))  # one rounding
    values = np.where(i < max(count // 2, 1), start + i * step, end - (count - 1 - i) * step)
    np.copyto(out, values.astype(np.float64), casting="unsafe")
