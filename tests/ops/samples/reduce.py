"""Samples of reductions; the oracles are numpy's float64 reductions, written out where numpy has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.errors import DTypeError, IndexRangeError, ShapeError
from tests.ops.sampling import INTS, Case, Rows, apart, integers, mask, normal, positive, small_cases

WHOLE = ("int64", "int8", "uint8", "bool")
TRUTHS = ("int64", "int8", "bool")  # of uint8 any and all make uint8, as torch does
LAYOUTS = ((None, False), (None, True), (0, False), (-1, True), ((0,), False), ((1, 2), False), ((0, -1), True))
LAYOUTS += (((0, -1), False), ((0, 1, 2), False), ((), False))


def count_of(case: Case) -> int:
    """How many elements each result is made of."""
    shape = np.shape(case.inputs[0])
    axes = axes_of(case.inputs[0], case.attrs.get("axes"))
    return max(1, math.prod(shape[i] for i in (range(len(shape)) if axes is None else axes)))


def axes_of(x: Any, axes: Any) -> tuple[int, ...] | None:
    """numpy's `axis`: it knows no dimension 0 of a 0-d array."""
    if axes is None:
        return None
    listed = (axes,) if isinstance(axes, int) else axes
    return tuple(listed) if np.ndim(x) else ()


def along(function: Callable[..., Any]) -> Callable[..., Any]:
    """A numpy reduction under the op's attribute names."""

    def oracle(x: np.ndarray, axes: Any = None, keepdim: bool = False, **attrs: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(x, axis=axes_of(x, axes), keepdims=keepdim, **attrs)

    return oracle


def layouts(values: Callable[..., np.ndarray], *, empty: bool = True, **attrs: Any) -> Callable[..., list[Case]]:
    """Reductions over none, one, several and all dimensions, both ways of keeping them, and odd sizes."""

    def cases(rng: np.random.Generator) -> list[Case]:
        found = [Case((values(rng, 3, 4, 5),), {"axes": a, "keepdim": keep, **attrs}) for a, keep in LAYOUTS]
        shapes: list[tuple[tuple[int, ...], Any]] = [
            ((), None), ((), 0), ((1,), 0), ((1, 1), None), ((7, 1, 3), 1), ((2, 3, 2, 3), (0, 2)),
            ((2, 3, 2, 3), (1, 3)),
            ((300, 20), 0), ((300, 3), 0), ((20, 300), 1), ((2, 130, 17), 1),
        ]  # fmt: skip
        if empty:
            shapes += [((0,), 0), ((0, 3), 0), ((0, 3), 1), ((2, 0, 3), (0, 1)), ((2, 0, 3), None)]
        else:
            shapes += [((0, 3), 1), ((2, 0, 3), (0, 2))]
        return found + [Case((values(rng, *shape),), {"axes": axes, **attrs}) for shape, axes in shapes]

    return cases


def small(values: Callable[..., np.ndarray], **attrs: Any) -> Callable[..., list[Case]]:
    """Cases for the gradient check."""

    def cases(rng: np.random.Generator) -> list[Case]:
        options: list[dict[str, Any]] = [
            {"axes": None}, {"axes": 1}, {"axes": -1, "keepdim": True}, {"axes": (0, 2)},
            {"axes": (0, 2), "keepdim": True},
        ]  # fmt: skip
        return [
            *(Case((values(rng, 2, 3, 2),), option | attrs) for option in options),
            Case((values(rng, 4),), {"axes": 0, **attrs}),
            Case((values(rng),), {"axes": None, **attrs}),
        ]

    return cases


def spread_cases(rng: np.random.Generator) -> list[Case]:
    """Corrections below, at and above the count."""
    usual = layouts(normal, correction=1)(rng)
    return usual + [Case((normal(rng, 4, 3),), {"axes": 0, "correction": c}) for c in (0, 2, 0.5, 4, 5)]


def variance(x: np.ndarray, axis: Any, keepdims: bool, correction: float) -> Any:
    """From the definition: numpy's var takes no correction above the count."""
    if x.size == 0:
        return np.full(x.sum(axis=axis, keepdims=keepdims).shape, np.nan)
    away = np.square(x - x.mean(axis=axis, keepdims=True))
    free = x.size / max(np.sum(x, axis=axis).size, 1) - correction
    return away.sum(axis=axis, keepdims=keepdims) / np.float64(max(free, 0))


def spread_small(rng: np.random.Generator) -> list[Case]:
    """Without the cases that have no degree of freedom left."""
    return [c for c in small(apart, correction=1)(rng) if count_of(c) > 1] + [
        Case((normal(rng, 5),), {"axes": 0, "correction": 0}),
        Case((normal(rng, 5, 2),), {"axes": 0, "correction": 2.5}),
    ]


def logsumexp(x: np.ndarray, axis: Any, keepdims: bool) -> Any:
    """About the mean, not the maximum: the samples are small."""
    if x.size == 0:
        return np.log(np.exp(x).sum(axis=axis, keepdims=keepdims))
    centre = x.mean(axis=axis, keepdims=True)
    return np.log(np.exp(x - centre).sum(axis=axis, keepdims=keepdims)) + centre.mean(axis=axis, keepdims=keepdims)


def norms(p: float) -> Callable[[np.random.Generator], list[Case]]:
    return layouts(normal, empty=p >= 0 and not math.isinf(p), p=p)


def norm(x: np.ndarray, axis: Any, keepdims: bool, p: float) -> Any:
    """From the definition."""
    size = np.abs(x)
    if math.isinf(p):
        return (np.max if p > 0 else np.min)(size, axis=axis, keepdims=keepdims)
    if p == 0:
        return (x != 0).astype(np.float64).sum(axis=axis, keepdims=keepdims)
    return (size**p).sum(axis=axis, keepdims=keepdims) ** (1 / p)


ORDERS = (2.0, 1.0, 3.0, 0.5, 1.5, math.inf, -math.inf, 0.0, -1.0)


def norm_cases(rng: np.random.Generator) -> list[Case]:
    zeros = [Case((np.zeros((2, 3)),), {"axes": 1, "p": p}) for p in (2.0, 1.0, 3.0, math.inf, 0.0)]
    return [case for p in ORDERS for case in norms(p)(rng)[:: 1 if p == 2 else 5]] + zeros


def norm_small(rng: np.random.Generator) -> list[Case]:
    return [case for p in ORDERS for case in small(apart, p=p)(rng)[:: 1 if p == 2 else 2]]


def first_of(best: Callable[..., Any]) -> Callable[..., Any]:
    """The first position that holds the extreme value, by comparing."""

    def oracle(x: np.ndarray, axis: int | None = None, keepdim: bool = False) -> Any:
        if axis is None:
            found = np.int64(np.flatnonzero(x.ravel() == best(x))[0])
            return np.full((1,) * x.ndim, found) if keepdim else found
        if x.ndim == 0:
            return np.int64(0)
        hits = x == best(x, axis=axis, keepdims=True)
        ranks = np.where(
            hits, np.arange(x.shape[axis]).reshape([-1] + [1] * (x.ndim - 1 - axis % x.ndim)), x.shape[axis]
        )
        return ranks.min(axis=axis, keepdims=keepdim)

    return oracle


def chosen_by(best: Callable[..., Any]) -> Callable[..., Any]:
    """Values, and positions by `first_of`."""

    def oracle(x: np.ndarray, axis: int, keepdim: bool = False) -> Any:
        values = best(x, axis=axis if x.ndim else None, keepdims=keepdim)
        return values, first_of(best)(x, axis, keepdim)

    return oracle


def line_cases(values: Callable[..., np.ndarray]) -> Callable[[np.random.Generator], list[Case]]:
    """Along each dimension, with ties among small integers too."""

    def cases(rng: np.random.Generator) -> list[Case]:
        found = [
            Case((values(rng, 3, 4, 5),), {"axis": axis, "keepdim": keepdim})
            for axis in (0, 1, -1)
            for keepdim in (False, True)
        ]
        ties = [Case((integers(rng, 0, 3, 6, 7),), {"axis": axis}) for axis in (0, 1)]
        shapes = [((), 0), ((1,), 0), ((0, 3), 1), ((2, 0, 3), -1), ((40, 70), 0), ((40, 70), 1)]
        return found + ties + [Case((values(rng, *shape),), {"axis": axis}) for shape, axis in shapes]

    return cases


def position_cases(rng: np.random.Generator) -> list[Case]:
    whole = [
        Case((normal(rng, *shape),), {"axis": None, "keepdim": keepdim})
        for shape in ((), (1,), (3, 4), (2, 3, 4))
        for keepdim in (False, True)
    ]
    return line_cases(normal)(rng) + whole


def line_small(rng: np.random.Generator) -> list[Case]:
    return [
        Case((apart(rng, 2, 3, 4),), {"axis": 1}),
        Case((apart(rng, 2, 3, 4),), {"axis": -1, "keepdim": True}),
        Case((apart(rng, 5),), {"axis": 0}),
        Case((apart(rng),), {"axis": 0}),
    ]


def put(values: np.ndarray, indices: np.ndarray, axis: int, size: int) -> Any:
    """Element by element."""
    if values.ndim == 0:
        return values
    axis %= values.ndim
    out = np.zeros((*values.shape[:axis], size, *values.shape[axis + 1 :]), values.dtype)
    for at in np.ndindex(values.shape):
        out[(*at[:axis], indices[at], *at[axis + 1 :])] = values[at]
    return out


def put_cases(rng: np.random.Generator) -> list[Case]:
    order = np.argsort(rng.random((3, 6, 2)), axis=1)
    return [
        Case((normal(rng, 3, 6, 2), order), {"axis": 1, "size": 6}),
        Case((normal(rng, 3, 2, 2), order[:, :2]), {"axis": -2, "size": 6}),
        Case((normal(rng, 1, 4), integers(rng, 0, 5, 1, 4)), {"axis": 0, "size": 5}),
        Case((normal(rng, 0, 4), integers(rng, 0, 5, 0, 4)), {"axis": 0, "size": 5}),
        Case((normal(rng), integers(rng, 0, 1)), {"axis": 0, "size": 1}),
    ]


def with_zeros(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values in [0.5, 3) with zeros among them: none, one or several in a line."""
    return np.where(mask(rng, *shape) & mask(rng, *shape), 0.0, positive(rng, *shape))


def prod_backward(g: np.ndarray, x: np.ndarray, axes: Any = None) -> Any:
    """The product of the others, element by element."""
    axes = axes_of(x, axes)
    reduced = range(x.ndim) if axes is None else [a % x.ndim for a in axes]
    out = np.array(g)
    for at in np.ndindex(x.shape):
        for other in np.ndindex(x.shape):
            same_line = all(at[i] == other[i] for i in range(x.ndim) if i not in reduced)
            if same_line and other != at:
                out[at] *= x[other]
    return out


def prod_backward_cases(rng: np.random.Generator) -> list[Case]:
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((4, 3), None), ((4, 3), 0), ((4, 3), 1), ((2, 3, 2), (0, 2)), ((5,), -1), ((), None), ((0, 3), 0), ((1, 3), 0),
    ]  # fmt: skip
    return [Case((normal(rng, *shape), with_zeros(rng, *shape)), {"axes": axes}) for shape, axes in shapes]


def cumsum(x: np.ndarray, axis: int, reverse: bool = False) -> Any:
    """By a product with a triangular matrix of ones."""
    if x.ndim == 0:
        return x if x.dtype.kind == "f" else x.astype(np.int64)
    lines = np.moveaxis(x, axis, -1)
    ones = np.tri(x.shape[axis], dtype=x.dtype if x.dtype.kind == "f" else np.int64)
    return np.moveaxis(lines @ (ones if reverse else ones.T), -1, axis)


def cumsum_cases(rng: np.random.Generator) -> list[Case]:
    shapes = [((3, 4, 5), 0), ((3, 4, 5), 1), ((3, 4, 5), -1), ((6,), 0), ((), 0), ((1,), -1), ((0, 3), 0), ((0, 3), 1)]
    return [Case((normal(rng, *s),), {"axis": a, "reverse": r}) for s, a in shapes for r in (False, True)]


def to_shape(x: np.ndarray, shape: tuple[int, ...]) -> Any:
    """From the left: extra dimensions go, then those of size 1 are summed."""
    while x.ndim > len(shape):
        x = x.sum(axis=0)
    for i, size in enumerate(shape):
        if size == 1:
            x = x.sum(axis=i, keepdims=True)
    return x


def to_shape_cases(rng: np.random.Generator) -> list[Case]:
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((3, 4), (4,)), ((3, 4), (1, 4)), ((3, 4), (3, 1)), ((3, 4), ()), ((3, 4), (3, 4)), ((2, 3, 4), (3, 1)),
        ((2, 3, 4), (2, 1, 4)), ((2, 3, 4), (1, 3, 1)), ((), ()), ((1, 1), (1,)), ((0, 3), (3,)), ((0, 3), (1, 3)),
        ((3, 0), (3, 1)), ((0, 3), (0, 1)), ((300, 20), (20,)), ((300, 3), (3,)), ((2, 200, 3, 5), (200, 1, 5)),
    ]  # fmt: skip
    return [Case((normal(rng, *source),), {"shape": target}) for source, target in pairs]


BAD_DIM: tuple[Case, type[Exception], str] = (
    Case((np.zeros((2, 3)),), {"axes": 2}),
    IndexRangeError,
    r"of shape \(2, 3\): dimension 2 is out of range for 2 dimensions",
)
TWICE = (Case((np.zeros((2, 3)),), {"axes": (0, -2)}), ShapeError, r"of shape \(2, 3\): a dimension appears twice")
NOTHING = (
    Case((np.zeros((0, 3)),), {"axes": 0}),
    ShapeError,
    r"\(0, 3\) over dimensions \(0,\)",
)


def whole_numbers(op: str, **attrs: Any) -> tuple[Case, type[Exception], str]:
    return Case((np.ones(3, np.int64),), attrs), DTypeError, f"{op} takes float tensors, got int64"


def with_attrs(error: tuple[Case, type[Exception], str], **attrs: Any) -> tuple[Case, type[Exception], str]:
    return Case(error[0].inputs, error[0].attrs | attrs), error[1], error[2]


def _bad_line(op: str) -> tuple[tuple[Case, type[Exception], str], ...]:
    return (
        (Case((np.zeros((2, 3)),), {"axis": -3}), IndexRangeError, rf"{op} of shape \(2, 3\): dimension -3 is out of"),
        (Case((np.zeros((2, 0)),), {"axis": 1}), ShapeError, rf"{op} of shape \(2, 0\) over dimensions \(1,\)"),
    )


ROWS: list[Rows] = [
    Rows(
        "sum_to_shape", to_shape, to_shape_cases, int_dtypes=INTS, reduction=lambda c: c.inputs[0].size,
        grads=lambda rng: [c for c in to_shape_cases(rng) if 0 < c.inputs[0].size < 30],
        errors=(
            (Case((np.zeros((2, 3)),), {"shape": (2,)}), ShapeError, r"sum_to_shape: \(2,\) does not broadcast"),
            (Case((np.zeros(3),), {"shape": (1, 3)}), ShapeError, r"\(1, 3\) does not broadcast to \(3,\)"),
        ),
    ),
    Rows(
        "sum", along(np.sum), layouts(normal), int_dtypes=WHOLE, grads=small(normal), reduction=count_of,
        errors=(BAD_DIM, TWICE),
    ),
    Rows(
        "mean", along(np.mean), lambda rng: [c for c in layouts(normal)(rng) if c.inputs[0].size],
        grads=small(normal), reduction=count_of, errors=(BAD_DIM, TWICE, whole_numbers("mean")),
    ),
    Rows(
        "count_nonzero", along(lambda x, **k: (x != 0).sum(**k)), layouts(with_zeros),
        int_dtypes=WHOLE, errors=(BAD_DIM,), exact=True,
    ),
    Rows(
        "var", along(variance), spread_cases, grads=spread_small, reduction=count_of,
        errors=(with_attrs(BAD_DIM, correction=1), whole_numbers("var", correction=1)),
    ),
    Rows(
        "std", along(lambda x, **k: np.sqrt(variance(x, **k))), spread_cases, grads=spread_small, reduction=count_of,
        errors=(with_attrs(BAD_DIM, correction=1), whole_numbers("std", correction=1)),
    ),
    Rows(
        "prod", along(np.prod), lambda rng: [c for c in layouts(positive)(rng) if count_of(c) < 30],
        int_dtypes=("int64", "int32", "bool"), reduction=count_of,
        grads=lambda rng: small(positive)(rng) + small(with_zeros)(rng), errors=(BAD_DIM, TWICE),
    ),
    Rows(
        "prod_backward", prod_backward, prod_backward_cases, reduction=lambda c: c.inputs[0].size,
        errors=((Case((np.zeros(3), np.zeros(4))), ShapeError, r"prod_backward: gradient \(3,\)"),),
    ),
    Rows(
        "amax", along(np.max), layouts(normal, empty=False), int_dtypes=WHOLE, grads=small(apart),
        errors=(BAD_DIM, NOTHING), exact=True,
    ),
    Rows(
        "amin", along(np.min), layouts(normal, empty=False), int_dtypes=WHOLE, grads=small(apart),
        errors=(BAD_DIM, NOTHING), exact=True,
    ),
    Rows("argmax", first_of(np.max), position_cases, int_dtypes=WHOLE, errors=_bad_line("argmax"), exact=True),
    Rows("argmin", first_of(np.min), position_cases, int_dtypes=WHOLE, errors=_bad_line("argmin"), exact=True),
    Rows(
        "max_with_indices", chosen_by(np.max), line_cases(normal), int_dtypes=WHOLE, grads=line_small,
        errors=_bad_line("max_with_indices"), exact=True,
    ),
    Rows(
        "min_with_indices", chosen_by(np.min), line_cases(normal), int_dtypes=WHOLE, grads=line_small,
        errors=_bad_line("min_with_indices"), exact=True,
    ),
    Rows(
        "put_along_axis", put, put_cases, grads=small_cases(put_cases), exact=True,
        errors=(
            (Case((np.zeros(3), np.zeros(4, np.int64)), {"axis": 0, "size": 4}), ShapeError, "differ in shape"),
            (Case((np.zeros(3), np.zeros(3)), {"axis": 0, "size": 4}), DTypeError, "takes int64 indices, got float64"),
            (Case((np.zeros(3), np.zeros(3, np.int64)), {"axis": 1, "size": 4}), IndexRangeError, "put_along_axis of"),
        ),
    ),
    Rows("any", along(np.any), layouts(with_zeros), int_dtypes=TRUTHS, errors=(BAD_DIM,), exact=True),
    Rows("all", along(np.all), layouts(with_zeros), int_dtypes=TRUTHS, errors=(BAD_DIM,), exact=True),
    Rows(
        "logsumexp", along(logsumexp), layouts(normal), grads=small(normal), reduction=count_of,
        errors=(BAD_DIM, TWICE),
    ),
    Rows(
        "norm", along(norm), norm_cases, grads=norm_small, reduction=count_of,
        errors=(
            with_attrs(BAD_DIM, p=2.0),
            whole_numbers("norm", p=2.0),
            (Case((np.zeros((0, 3)),), {"axes": 0, "p": math.inf}), ShapeError, "norm with p = inf of shape"),
        ),
    ),
    Rows(
        "cumsum", cumsum, cumsum_cases, int_dtypes=WHOLE, reduction=lambda c: max(1, *np.shape(c.inputs[0]), 1),
        grads=lambda rng: [c for c in cumsum_cases(rng) if 0 < c.inputs[0].size < 10]
        + [Case((normal(rng, 3, 4),), {"axis": 0}), Case((normal(rng, 3, 4),), {"axis": 1, "reverse": True})],
        errors=((Case((np.zeros((2, 3)),), {"axis": 2}), IndexRangeError, r"cumsum of shape \(2, 3\): dimension 2"),),
    ),
]  # fmt: skip
