"""Rows for arithmetic, powers, comparisons, logic, bits, selection, casts and copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from genesis import dtypes
from genesis.errors import DTypeError, NumericError, ShapeError
from tests.ops.sampling import FLOATS, INTS, Case, Rows, apart, integers, mask, normal, positive, uniform

Rng = np.random.Generator
Make = Callable[..., np.ndarray]

SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (17,), (), (1, 1), (2, 0, 3), (2, 3, 4))
PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((3, 1), (1, 9)),
    ((2, 3, 4), (3, 1)),
    ((), (5,)),
    ((), ()),
    ((0, 3), (2, 1, 3)),
)
GRADIENT_PAIRS = (((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2,)), ((2, 1, 2), (3, 1)), ((0, 2), (2,)))
ALL_INTS = (*INTS, "bool")

A, B = np.ones((2, 3)), np.ones((2, 4))
NO_TENSOR = (Case(("text",)), DTypeError, "operand of type str")
MISMATCH = (Case((A, B)), ShapeError, r"\(2, 3\) and \(2, 4\) do not broadcast")


def precise(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """`function` in extended precision, so that float64 is not compared with itself."""

    def oracle(*inputs: Any) -> np.ndarray:
        wide = [np.asarray(x, np.longdouble) for x in inputs]
        return np.asarray(function(*wide), np.float64)

    return oracle


# --- Functions that make rows -----------------------------------------------------------------------------------------


def unary(op: str, oracle: Callable[..., Any], make: Make = normal, grad_make: Make | None = None, **rest: Any) -> Rows:
    """An op of one operand; `grad_make` gives values away from kinks where `make` does not."""

    def cases(rng: Rng) -> list[Case]:
        return [Case((make(rng, *shape),)) for shape in SHAPES]

    def grads(rng: Rng) -> list[Case]:
        return [Case(((grad_make or make)(rng, *shape),)) for shape in ((2, 3), (), (1,), (0, 2))]

    rest.setdefault("errors", (NO_TENSOR,))
    return Rows(op, oracle, cases, grads=grads, **rest)


def binary(
    op: str,
    oracle: Callable[..., Any],
    left: Make = normal,
    right: Make = normal,
    numbers: tuple[Any, ...] = (2.5, 3),
    **rest: Any,
) -> Rows:
    """An op of two operands, also with a Python number on either side."""

    def cases(rng: Rng) -> list[Case]:
        pairs = [Case((left(rng, *a), right(rng, *b))) for a, b in PAIRS]
        swapped = [Case((left(rng, *b), right(rng, *a))) for a, b in PAIRS[1:5:3]]
        return [*pairs, *swapped, *(_beside(rng, n, (2, 3)) for n in numbers), *_before(rng, (4,))]

    def _beside(rng: Rng, number: Any, shape: tuple[int, ...]) -> Case:
        return Case((left(rng, *shape), number))

    def _before(rng: Rng, shape: tuple[int, ...]) -> list[Case]:
        return [Case((number, right(rng, *shape))) for number in numbers]

    def grads(rng: Rng) -> list[Case]:
        pairs = [Case((left(rng, *a), right(rng, *b))) for a, b in GRADIENT_PAIRS]
        return [*pairs, *(_beside(rng, n, (2, 2)) for n in numbers), *_before(rng, (3,))]

    rest.setdefault("errors", (MISMATCH,))
    rest.setdefault("grads", grads)
    return Rows(op, oracle, cases, **rest)


def predicate(op: str, oracle: Callable[..., Any], **rest: Any) -> Rows:
    """A comparison or logical op: whole numbers, so that operands meet; no gradient."""
    numbers = rest.pop("numbers", (1.0, 1))
    return binary(op, oracle, whole, whole, numbers, int_dtypes=ALL_INTS, grads=None, **rest)


def whole(rng: Rng, *shape: int) -> np.ndarray:
    """Small whole numbers, with zeros."""
    return np.asarray(np.rint(normal(rng, *shape)))


def between(rng: Rng, *shape: int) -> np.ndarray:
    """Values away from whole numbers and halves."""
    return np.asarray(integers(rng, -4, 4, *shape) + 0.5 * integers(rng, 0, 2, *shape) + 0.2)


def one_per_pair(seed: int) -> Make:
    """Values of two grids, by seed, that never meet: the operands of maximum keep a distance in every pair."""

    def make(rng: Rng, *shape: int) -> np.ndarray:
        return np.asarray(integers(rng, -6, 6, *shape) + 0.25 + 0.5 * seed)

    return make


def signed(rng: Rng, *shape: int) -> np.ndarray:
    """Values at least 0.5 away from 0."""
    return np.asarray(positive(rng, *shape) * np.where(mask(rng, *shape), 1, -1))


# --- Oracles ----------------------------------------------------------------------------------------------------------


def _each(function: Callable[[float, float], float]) -> Callable[..., np.ndarray]:
    """A function of two Python floats over broadcast arrays; integers go through numpy's integer division."""

    def oracle(a: Any, b: Any) -> np.ndarray:
        a, b = np.broadcast_arrays(a, b)
        values = [function(float(x), float(y)) for x, y in zip(a.ravel(), b.ravel(), strict=True)]
        whole_numbers = a.dtype.kind in "iub" and b.dtype.kind in "iub"
        return np.array(values, np.int64 if whole_numbers else np.float64).reshape(a.shape)

    return oracle


def _floor_divide(a: float, b: float) -> float:
    """floor(a / b) exactly; IEEE's answers for what has no quotient."""
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0):
        return math.nan
    if b == 0:
        return math.copysign(math.inf, a) * math.copysign(1, b)
    if math.isinf(a):
        return math.nan
    if math.isinf(b):
        return -1.0 if a != 0 and (a < 0) != (b < 0) else 0.0
    exact = Fraction(a) / Fraction(b)
    try:
        return float(math.floor(exact))
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _remainder(a: float, b: float) -> float:
    """a - b·floor(a / b) exactly: the sign of b, as in Python and torch."""
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or b == 0:
        return math.nan
    if math.isinf(b):
        return a if a == 0 or (a < 0) == (b < 0) else b
    return float(Fraction(a) - Fraction(b) * math.floor(Fraction(a) / Fraction(b)))


def _round(x: np.ndarray) -> np.ndarray:
    """Halves to the even neighbour."""
    low = np.floor(x)
    up = (x - low > 0.5) | ((x - low == 0.5) & (low % 2 == 1))
    return np.asarray(np.where(up, low + 1, low))


def _sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), np.where(np.isnan(x), x, e / (1 + e)))


def _extremum(first_wins: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def oracle(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(a, b)
        chosen = np.where(first_wins(a, b), a, b)
        return np.where(a != a, a, np.where(b != b, b, chosen))

    return oracle


def _power(a: Any, p: Any) -> Any:
    a, p = np.asarray(a), np.asarray(p)
    if a.dtype.kind in "iub" and p.dtype.kind in "iub":
        values = [_whole_power(int(x), int(n)) for x, n in np.broadcast(a, p)]
        return np.array(values, np.int64).reshape(np.broadcast_shapes(a.shape, p.shape))
    return precise(np.power)(a, p)


def _whole_power(x: int, n: int) -> int:
    if n < 0:
        return (x if n % 2 else 1) if x in (1, -1) else 0
    power: int = x**n
    return (power + (1 << 63)) % (1 << 64) - (1 << 63)  # wraps around as int64 does


def _clamp(x: Any, min: Any, max: Any) -> Any:
    low = x if min is None else np.where(x < min, min, x)
    return low if max is None else np.where(low > max, max, low)


def _cast(x: np.ndarray, dtype: dtypes.DType) -> np.ndarray:
    if dtype.is_floating_point:
        return x.astype(np.float64)
    return np.asarray(x != 0) if dtype.name == "bool" else np.trunc(x).astype(np.int64)


def _sign(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.bool_ else (x > 0).astype(np.int64) - (x < 0)


# --- Cases of ops that are neither unary nor binary -------------------------------------------------------------------


def _where_cases(rng: Rng) -> list[Case]:
    shapes = (((3, 4),) * 3, ((3, 1), (4,), (3, 4)), ((4,), (), (3, 1)), ((), (2,), (2,)), ((0,),) * 3, ((1,), (), ()))
    made = [Case((mask(rng, *c), normal(rng, *x), normal(rng, *y))) for c, x, y in shapes]
    return [*made, Case((mask(rng, 4), normal(rng, 4), 0.0)), Case((mask(rng, 2, 3), -1.5, normal(rng, 3)))]


def _where_grads(rng: Rng) -> list[Case]:
    shapes = (((2, 3),) * 3, ((2, 1), (3,), (2, 3)), ((3,), (), (2, 1)))
    return [Case((mask(rng, *c), normal(rng, *x), normal(rng, *y))) for c, x, y in shapes]


BOUNDS: tuple[tuple[Any, Any], ...] = ((-0.5, 0.75), (None, 1), (0, None), (2, 1))
# Shapes of x, min and max; an int stands for that number, None for an open side.
BOUNDED: tuple[tuple[Any, ...], ...] = (
    ((3, 4), (3, 4), (3, 4)),
    ((3, 4), (4,), None),
    ((4,), None, (3, 1)),
    ((2, 3), (), 1),
    ((2, 1), -1, (3,)),
    ((), (), ()),
    ((0, 3), (3,), (2, 1, 1)),
)


def _clamp_cases(rng: Rng) -> list[Case]:
    made = [Case((normal(rng, *shape), *b)) for b in BOUNDS for shape in SHAPES[:4]]
    return made + [Case(tuple(normal(rng, *s) if isinstance(s, tuple) else s for s in row)) for row in BOUNDED]


def _clamp_grads(rng: Rng) -> list[Case]:
    """Values and bounds of three grids, which never meet."""

    def grid(i: int, shape: Any) -> Any:
        return integers(rng, -4, 4, *shape) + (0.2, 0.5, 0.8)[i] if isinstance(shape, tuple) else shape

    made = [Case((apart(rng, 3, 4), *b)) for b in ((-0.6, 0.6), (None, 0.1), (0.1, None))]
    return made + [Case(tuple(grid(i, shape) for i, shape in enumerate(row))) for row in BOUNDED]


def _lerp_cases(rng: Rng, shapes: Any = PAIRS) -> list[Case]:
    made = [Case((normal(rng, *a), normal(rng, *b), uniform(rng, 0, 1, *b))) for a, b in shapes]
    return [*made, *(Case((normal(rng, 2, 3), normal(rng, 3), w)) for w in (0.25, 0.75, 1.0))]


def _overwrite_cases(rng: Rng) -> list[Case]:
    pairs = (((3, 4), (3, 4)), ((3, 4), (4,)), ((2, 3), ()), ((), ()), ((0, 2), (2,)), ((1,), (1, 1)[:1]))
    made = [Case((normal(rng, *a), normal(rng, *b))) for a, b in pairs]
    return [*made, Case((normal(rng, 3), 2)), Case((normal(rng, 2, 3), integers(rng, -5, 5, 3)))]


def _overwritten(x: np.ndarray, source: Any) -> np.ndarray:
    return np.broadcast_to(source, x.shape).astype(np.int64 if x.dtype.kind in "iu" else x.dtype)


def _fill_cases(rng: Rng) -> list[Case]:
    return [
        Case((), {"value": value, "shape": shape, "dtype": dtype})
        for dtype in dtypes.ALL
        for value, shape in ((1, (2, 3)), (0, ()), (3 if dtype is not dtypes.bool_ else True, (0, 2)))
    ]


def _filled(value: Any, shape: tuple[int, ...], dtype: dtypes.DType) -> np.ndarray:
    return np.full(shape, bool(value)) if dtype is dtypes.bool_ else np.full(shape, value)


def _cast_row(target: dtypes.DType) -> Rows:
    """Casts to one type: to floats from extremes, too; to integers from numbers that fit."""

    def cases(rng: Rng) -> list[Case]:
        return [Case((2 * normal(rng, *shape),), {"dtype": target}) for shape in SHAPES]

    def grads(rng: Rng) -> list[Case]:
        return [Case((normal(rng, 2, 3),), {"dtype": target})] if target is dtypes.float64 else []

    # what a float beyond the range of an integer type becomes is left to the processor
    extremes = target.category != dtypes.INTEGER
    errors = ((Case((A,), {"dtype": target, "out": np.ones(4)}), ShapeError, r"out has \(4,\)"),)
    dtypes_in = FLOATS if target is not dtypes.uint8 else ()
    return Rows("cast", _cast, cases, dtypes_in, ALL_INTS, grads, errors=errors, extremes=extremes, exact=not dtypes_in)


# --- Rows -------------------------------------------------------------------------------------------------------------


def _apart_cases(rng: Rng) -> list[Case]:
    """Quotients that are no integers, nor near one."""
    x, y = np.array([[0.7], [-2.6]]), np.array([2.0, -1.5, 0.8])
    return [Case((x, y)), Case((x, 2.0)), Case((1.7, y))]


ZERO_DIVISOR = Case((np.arange(3), np.zeros(3, np.int64)))


def _divides(name: str, oracle: Callable[..., Any], **rest: Any) -> Rows:
    error = (ZERO_DIVISOR, NumericError, f"{name}: an integer is divided by 0")
    return binary(name, oracle, right=signed, numbers=(2.5, 3), int_dtypes=INTS, errors=(MISMATCH, error), **rest)


ARITHMETIC = [
    binary("add", np.add, int_dtypes=INTS),
    binary("sub", np.subtract, int_dtypes=INTS, errors=(MISMATCH, (Case((A > 0, A > 0)), DTypeError, "bool"))),
    binary("mul", np.multiply, int_dtypes=INTS),
    binary("div", precise(np.divide), right=signed, int_dtypes=ALL_INTS),
    _divides("floor_divide", _each(_floor_divide), grads=_apart_cases),
    _divides("remainder", _each(_remainder)),
    binary("pow", _power, left=positive, numbers=(2.5, 3)),
    binary("maximum", _extremum(np.greater), one_per_pair(0), one_per_pair(1), (0.6, 3), int_dtypes=ALL_INTS),
    binary("minimum", _extremum(np.less), one_per_pair(0), one_per_pair(1), (0.6, 3), int_dtypes=ALL_INTS),
    Rows(
        "lerp",
        lambda x, end, w: x + w * (end - x),
        _lerp_cases,
        grads=lambda rng: _lerp_cases(rng, GRADIENT_PAIRS),
        errors=(
            (Case((A, B, 0.5)), ShapeError, "broadcast"),
            (Case((A, A.astype(np.float32), 0.5)), DTypeError, "one float type"),
            (Case((np.arange(3), np.arange(3), 0.5)), DTypeError, "lerp"),
        ),
        reduction=lambda case: 3,
        extremes=False,  # end - x overflows in float32 where it does not in float64
    ),
]


# Integer bases, and negative bases with whole exponents: rows of their own, as general powers of these do not exist.


def _power_cases(rng: Rng) -> list[Case]:
    constant = [Case((signed(rng, *shape), p)) for shape, p in (((3, 4), 2), ((5,), -3), ((2, 2), 0), ((4,), 0.0))]
    zeros = [Case((np.array([0.0, -0.0, 1.0, -2.0, -1e-12, 1e12, -np.inf, np.nan]), p)) for p in (2, 3, 4)]
    return [*constant, *zeros, Case((0, np.array([0.0, 1.0, 2.0]))), Case((normal(rng, 3), np.array([0, 1, 2])))]


def _power_grads(rng: Rng) -> list[Case]:
    return [Case((signed(rng, 3), 2)), Case((signed(rng, 3), -3)), Case((np.array([0.0, 1.5]), 0))]


def _whole_power_cases(rng: Rng) -> list[Case]:
    negative = Case((np.array([2, 1, -1, 0, -1, -3]), np.array([-1, -2, -3, -1, -4, -2])))
    return [Case((normal(rng, 3, 4), positive(rng, 4))), Case((signed(rng, 5), 3)), negative]


POWERS = [
    Rows(
        "pow",
        _power,
        _power_cases,
        grads=_power_grads,
        errors=((Case((np.arange(3), -1)), DTypeError, "negative power"),),
        extremes=False,  # the row above has them
    ),
    Rows("pow", _power, _whole_power_cases, dtypes=(), int_dtypes=INTS),
]

ROUNDING = [
    unary(name, oracle, lambda rng, *s: 3 * normal(rng, *s), between, int_dtypes=INTS)
    for name, oracle in (("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc), ("round", _round))
]

UNARY = [
    unary("neg", lambda x: 0 - x, int_dtypes=INTS, errors=((Case((A > 0,)), DTypeError, "neg does not take bool"),)),
    unary("abs", lambda x: np.where(x < 0, -x, x), grad_make=apart, int_dtypes=INTS),
    unary("sign", _sign, grad_make=apart, int_dtypes=ALL_INTS),
    unary("square", lambda x: x * x if x.dtype != np.bool_ else x.astype(np.int64), int_dtypes=ALL_INTS),
    unary("exp", precise(np.exp), int_dtypes=ALL_INTS),
    unary("exp2", precise(np.exp2), int_dtypes=ALL_INTS),
    unary("expm1", precise(np.expm1), int_dtypes=ALL_INTS),
    unary("log", precise(np.log), positive, int_dtypes=ALL_INTS),
    unary("log2", precise(np.log2), positive, int_dtypes=ALL_INTS),
    unary("log10", precise(np.log10), positive, int_dtypes=ALL_INTS),
    unary("log1p", precise(np.log1p), positive, int_dtypes=ALL_INTS),
    unary("sqrt", precise(np.sqrt), positive, int_dtypes=ALL_INTS),
    unary("rsqrt", precise(lambda x: 1 / np.sqrt(x)), positive, int_dtypes=ALL_INTS),
    unary("reciprocal", precise(lambda x: 1 / x), signed, int_dtypes=ALL_INTS),
    unary("sin", precise(np.sin), int_dtypes=ALL_INTS),
    unary("cos", precise(np.cos), int_dtypes=ALL_INTS),
    unary("tan", precise(np.tan), lambda rng, *s: uniform(rng, -1.2, 1.2, *s), int_dtypes=ALL_INTS),
    unary("tanh", precise(np.tanh), int_dtypes=ALL_INTS),
    unary("sigmoid", precise(_sigmoid), int_dtypes=ALL_INTS),
    unary("erf", np.vectorize(math.erf, otypes=[float]), lambda rng, *s: 2 * normal(rng, *s), int_dtypes=ALL_INTS),
]

PREDICATES = [
    predicate("eq", lambda a, b: ~(np.less(a, b) | np.greater(a, b) | np.not_equal(a, a) | np.not_equal(b, b))),
    predicate("ne", lambda a, b: np.less(a, b) | np.greater(a, b) | np.not_equal(a, a) | np.not_equal(b, b)),
    predicate("lt", lambda a, b: np.asarray(b) > a),
    predicate("le", lambda a, b: np.asarray(b) >= a),
    predicate("gt", lambda a, b: np.asarray(b) < a),
    predicate("ge", lambda a, b: np.asarray(b) <= a),
    predicate("logical_and", lambda a, b: (np.asarray(a) != 0) & (np.asarray(b) != 0)),
    predicate("logical_or", lambda a, b: (np.asarray(a) != 0) | (np.asarray(b) != 0)),
    predicate("logical_xor", lambda a, b: (np.asarray(a) != 0) != (np.asarray(b) != 0)),
]


TESTS = [
    replace(unary(name, oracle, whole, int_dtypes=ALL_INTS), grads=None)
    for name, oracle in (
        ("logical_not", lambda x: x == 0),
        ("isnan", lambda x: x != x),
        ("isinf", lambda x: abs(x.astype(np.float64)) == math.inf),
        ("isfinite", lambda x: abs(x.astype(np.float64)) < math.inf),
    )
]


def _bits(name: str, oracle: Callable[..., Any], right: Make = whole, ints: tuple[str, ...] = ALL_INTS) -> Rows:
    errors = (
        (Case((A, A)), DTypeError, f"{name} does not take float64"),
        (Case((np.arange(2), np.arange(3))), ShapeError, "broadcast"),
    )
    return binary(name, oracle, whole, right, (3,), dtypes=(), int_dtypes=ints, errors=errors, grads=None)


BITS = [
    _bits("bitwise_and", np.bitwise_and),
    _bits("bitwise_or", np.bitwise_or),
    _bits("bitwise_xor", np.bitwise_xor),
    _bits("left_shift", lambda a, b: a * 2**b, positive, INTS),
    _bits("right_shift", lambda a, b: a // 2**b, positive, INTS),
    Rows(
        "bitwise_not",
        lambda x: ~x,
        lambda rng: [Case((normal(rng, *s),)) for s in SHAPES],
        (),
        ALL_INTS,
        errors=((Case((A,)), DTypeError, "bitwise_not does not take float64"),),
    ),
]

SELECTION = [
    Rows("where", np.where, _where_cases, int_dtypes=INTS, grads=_where_grads, wrt=(1, 2), exact=True, errors=(
        (Case((A, A, A)), DTypeError, "bool condition"), (Case((A > 0, A, B)), ShapeError, "broadcast"))),
    Rows("clamp", _clamp, _clamp_cases, int_dtypes=INTS, grads=_clamp_grads, errors=(
        (Case((A, None, None)), ShapeError, "min, max or both"),
        (Case((A, B)), ShapeError, "broadcast"),
        (Case((A > 0, None, True)), DTypeError, "bool"))),
    Rows("copy", lambda x: x, lambda rng: [Case((normal(rng, *s),)) for s in SHAPES], int_dtypes=ALL_INTS, exact=True,
         grads=lambda rng: [Case((normal(rng, *s),)) for s in ((2, 3), (), (0,))],
         errors=((Case((A,), {"out": np.ones(4)}), ShapeError, r"copy: the result has shape \(2, 3\), out has \(4,\)"),
                 (Case((A,), {"out": np.ones((2, 3), np.int64)}), DTypeError, "does not fit"))),
    Rows("overwrite", _overwritten, _overwrite_cases, int_dtypes=INTS, exact=True, grads=_overwrite_cases,
         errors=((Case((np.ones(3), A)), ShapeError, r"\(2, 3\) does not expand to \(3,\)"),)),
    Rows("fill", _filled, _fill_cases, dtypes=("float64",), exact=True,
         errors=((Case((), {"value": 0, "shape": (-1,), "dtype": dtypes.float32}), ShapeError, "negative size"),)),
]  # fmt: skip

CASTS = [_cast_row(target) for target in dtypes.ALL]

ROWS = [*ARITHMETIC, *POWERS, *ROUNDING, *UNARY, *PREDICATES, *TESTS, *BITS, *SELECTION, *CASTS]
