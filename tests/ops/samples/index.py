"""Samples of indexing by arrays; the oracles visit index by index, in order of position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from genesis.errors import DTypeError, IndexRangeError, ShapeError
from tests.ops.sampling import Case, Rows, integers, mask, normal, small_cases

WHOLES = ("int64", "uint8")
Shape = tuple[int, ...]

# (shape of x, indexed dimensions, shapes of the index arrays)
LAYOUTS: list[tuple[Shape, Shape, list[Shape]]] = [
    ((5,), (0,), [(3,)]),
    ((5,), (0,), [()]),
    ((5, 3), (0,), [(4,)]),
    ((5, 3), (1,), [(2, 2)]),
    ((4, 3, 2), (1,), [(5,)]),
    ((4, 3, 2), (0, 1), [(3,), (3,)]),
    ((4, 3, 2), (1, 2), [(2, 1), (3,)]),
    ((4, 3, 2), (0, 2), [(4,), (1,)]),
    ((4, 3, 2), (0, 1, 2), [(6,), (6,), ()]),
    ((4, 3, 2, 3), (1, 3), [(2, 2), (2,)]),
    ((3, 40), (0,), [(7,)]),  # wide rows are added run by run
    ((3, 2, 12), (1,), [(5,)]),
    ((2, 3, 2, 12), (0, 2), [(5,), (5,)]),
    ((5, 3), (0,), [(0,)]),
    ((0, 3), (0,), [(0, 2)]),
    ((2, 0), (0,), [(3,)]),
    ((9, 2), (0,), [(50,)]),
]


def indices_for(rng: np.random.Generator, shape: Shape, dims: Shape, index_shapes: list[Shape]) -> list[np.ndarray]:
    """Indices with repetitions and negatives."""
    pairs = zip(dims, index_shapes, strict=True)
    return [integers(rng, -shape[d], shape[d], *s) if 0 not in s else np.zeros(s, int) for d, s in pairs]


def visits(shape: Shape, dims: Shape, indices: tuple[np.ndarray, ...]) -> Iterator[tuple[Shape, Shape]]:
    """(place in the result, place in x), index positions in order, for each position the elements not indexed."""
    wide = np.broadcast_arrays(*indices)
    rest = [range(s) for d, s in enumerate(shape) if d not in dims]
    adjacent = list(dims) == list(range(dims[0], dims[-1] + 1))
    at = dims[0] if adjacent else 0
    for position in np.ndindex(wide[0].shape):
        chosen = dict(zip(dims, (int(i[position]) for i in wide), strict=True))
        for others in itertools.product(*rest):
            left = iter(others)
            source = tuple(chosen[d] % shape[d] if d in chosen else next(left) for d in range(len(shape)))
            yield (*others[:at], *position, *others[at:]), source


def result_shape(shape: Shape, dims: Shape, indices: tuple[np.ndarray, ...]) -> Shape:
    rest = tuple(s for d, s in enumerate(shape) if d not in dims)
    at = dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0
    return (*rest[:at], *np.broadcast_shapes(*(i.shape for i in indices)), *rest[at:])


# --- Get --------------------------------------------------------------------------------------------------------------


def gets(rng: np.random.Generator) -> list[Case]:
    return [
        Case((normal(rng, *shape), *indices_for(rng, shape, dims, given)), {"dims": dims})
        for shape, dims, given in LAYOUTS
    ]


def few(cases: list[Case]) -> list[Case]:
    """Those small enough for a Jacobian."""
    return [c for c in cases if all(np.size(x) <= 36 for x in c.inputs)]


def get_oracle(x: np.ndarray, *indices: np.ndarray, dims: Shape) -> np.ndarray:
    found = np.zeros(result_shape(x.shape, dims, indices), x.dtype)
    for place, source in visits(x.shape, dims, indices):
        found[place] = x[source]
    return found


def backwards(rng: np.random.Generator) -> list[Case]:
    cases = []
    for shape, dims, given in LAYOUTS:
        indices = indices_for(rng, shape, dims, given)
        g = normal(rng, *result_shape(shape, dims, tuple(indices)))
        cases.append(Case((g, *indices), {"dims": dims, "shape": shape}))
    return cases


def backward_oracle(g: np.ndarray, *indices: np.ndarray, dims: Shape, shape: Shape) -> np.ndarray:
    found = np.zeros(shape)
    for place, source in visits(shape, dims, indices):
        found[source] += g[place]
    return found


# --- Put --------------------------------------------------------------------------------------------------------------


def puts(rng: np.random.Generator, **attrs: Any) -> list[Case]:
    """Values of the full shape, broadcast ones, and a number."""
    cases = []
    for number, (shape, dims, given) in enumerate(LAYOUTS):
        indices = indices_for(rng, shape, dims, given)
        full = result_shape(shape, dims, tuple(indices))
        wanted = [full, (1,) * (number % 2) + full[number % 2 :] if full and 0 not in full else full]
        values: list[Any] = [normal(rng, *s) for s in dict.fromkeys(wanted)]
        cases += [Case((normal(rng, *shape), v, *indices), {"dims": dims, **attrs}) for v in (*values, 2.0)]
    return cases


def put_oracle(x: np.ndarray, values: Any, *indices: np.ndarray, dims: Shape, accumulate: bool = False) -> np.ndarray:
    found = x.copy()
    wide = np.broadcast_to(values, result_shape(x.shape, dims, indices))
    for place, target in visits(x.shape, dims, indices):
        found[target] = found[target] + wide[place] if accumulate else wide[place]
    return found


def repeats(case: Case) -> int:
    """How many values may meet in one element: that many roundings."""
    indices = [x for x in case.inputs if isinstance(x, np.ndarray) and x.dtype == np.int64]
    return 1 + np.broadcast(*indices).size if case.attrs.get("accumulate", True) else 1


PUT_ERRORS: tuple[tuple[Case, type[Exception], str], ...] = (
    (
        Case((np.zeros((2, 3)), 1.0, np.array([0, 2])), {"dims": (0,)}),
        IndexRangeError,
        "index 2 is out of range for dimension 0 of size 2",
    ),
    (
        Case((np.zeros((2, 3)), np.zeros(2), np.array([0, 1])), {"dims": (0,)}),
        ShapeError,
        r"values of shape \(2,\) do not broadcast to the indexed shape \(2, 3\)",
    ),
    (Case((np.zeros((2, 3)), 1.0, np.array([0.0])), {"dims": (0,)}), DTypeError, "float64, expected integers"),
)

# --- Masks ------------------------------------------------------------------------------------------------------------


def masks(rng: np.random.Generator) -> list[np.ndarray]:
    shapes: list[Shape] = [(7,), (3, 4), (2, 3, 4), (0,), (2, 0), (1,)]
    return [*(mask(rng, *s) for s in shapes), np.zeros((2, 2), bool), np.ones((2, 2), bool)]


def offsets_of(mask: np.ndarray) -> np.ndarray:
    """How many elements are true before each block of 4096, and in all."""
    flat = [bool(v) for v in mask.ravel()]
    return np.array([sum(flat[:start]) for start in range(0, len(flat), 4096)] + [sum(flat)], np.int64)


def selections(rng: np.random.Generator) -> list[Case]:
    """Values under masks of their shape; two blocks, whose border lies inside a row, among them."""
    found = [*masks(rng), mask(rng, 3, 2000)]
    return [Case((normal(rng, *m.shape), m, offsets_of(m)), {"count": int(m.sum())}) for m in found]


def spreads(rng: np.random.Generator) -> list[Case]:
    return [Case((case.inputs[0][case.inputs[1]], *case.inputs[1:])) for case in selections(rng)]


def spread_oracle(g: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    left = iter(g)
    return np.array([next(left) if v else 0 for v in mask.ravel()], g.dtype).reshape(mask.shape)


def positions(mask: np.ndarray, count: int) -> np.ndarray:
    found = [index for index in np.ndindex(mask.shape) if mask[index]]
    return np.array(found, np.int64).reshape(count, mask.ndim).T


ROWS = [
    Rows(
        "index_get",
        get_oracle,
        gets,
        int_dtypes=(*WHOLES, "bool"),
        grads=lambda rng: few(gets(rng)),
        exact=True,
        errors=(
            (
                Case((np.zeros((2, 3)), np.array([0, -4])), {"dims": (1,)}),
                IndexRangeError,
                "index -4 is out of range for dimension 1 of size 3",
            ),
            (
                Case((np.zeros((2, 3)), np.array([5])), {"dims": (1,), "named": (4,)}),
                IndexRangeError,
                "index 5 is out of range for dimension 4 of size 3",
            ),
            (Case((np.zeros((0, 3)), np.array([0])), {"dims": (0,)}), IndexRangeError, "dimension 0 of size 0"),
            (Case((np.zeros(3), np.array([True])), {"dims": (0,)}), DTypeError, "genesis.bool, expected integers"),
            (Case((np.zeros((2, 3)), np.array([0])), {"dims": (0, 1)}), ShapeError, "1 index arrays .* dimensions"),
            (
                Case((np.zeros((2, 3)), np.array([0, 1]), np.array([0, 1, 2])), {"dims": (0, 1)}),
                ShapeError,
                r"shapes \(2,\) and \(3,\) do not broadcast",
            ),
        ),
    ),
    Rows(
        "index_get_backward",
        backward_oracle,
        backwards,
        grads=small_cases(backwards),
        reduction=repeats,
        errors=(
            (
                Case((np.zeros((2, 3)), np.array([0])), {"dims": (0,), "shape": (4, 3)}),
                ShapeError,
                r"the gradient has shape \(2, 3\), expected \(1, 3\)",
            ),
        ),
    ),
    Rows(
        "index_put",
        put_oracle,
        puts,
        int_dtypes=(*WHOLES, "bool"),
        grads=lambda rng: few(puts(rng)),
        exact=True,
        errors=PUT_ERRORS,
    ),
    Rows(
        "index_put",
        put_oracle,
        lambda rng: puts(rng, accumulate=True),
        int_dtypes=WHOLES,
        grads=lambda rng: few(puts(rng, accumulate=True)),
        reduction=repeats,
    ),
    # an expanded target is refused; tests/functions/test_index.py writes into other views
    Rows("index_put_", put_oracle, puts, int_dtypes=(*WHOLES, "bool"), exact=True, errors=PUT_ERRORS, strided=False),
    Rows(
        "index_put_",
        put_oracle,
        lambda rng: puts(rng, accumulate=True),
        int_dtypes=WHOLES,
        reduction=repeats,
        strided=False,
    ),
    Rows(
        "mask_count",
        lambda mask: np.array(sum(bool(v) for v in mask.ravel())),
        lambda rng: [Case((m,)) for m in masks(rng)],
        dtypes=("float64",),
        errors=((Case((np.array([1, 0]),)), DTypeError, "takes a bool mask"),),
    ),
    Rows(
        "mask_indices",
        positions,
        lambda rng: [Case((m,), {"count": int(m.sum())}) for m in masks(rng)],
        dtypes=("float64",),
        errors=((Case((np.array([1.0]),), {"count": 1}), DTypeError, "takes a bool mask"),),
    ),
    Rows(
        "mask_offsets",
        offsets_of,
        lambda rng: [Case((m,)) for m in (*masks(rng), mask(rng, 3, 2000))],
        dtypes=("float64",),
        errors=((Case((np.array([1, 0]),)), DTypeError, "takes a bool mask"),),
    ),
    Rows(
        "masked_select",
        lambda x, mask, offsets, count: x[tuple(positions(mask, count))],
        selections,
        int_dtypes=(*WHOLES, "bool"),
        grads=lambda rng: few(selections(rng)),
        exact=True,
        errors=(
            (
                Case((np.zeros((2, 3)), np.zeros((3, 2), bool), np.array([0, 0])), {"count": 0}),
                ShapeError,
                r"a mask of shape \(3, 2\) .*\(2, 3\)",
            ),
            (
                Case((np.zeros(2), np.zeros(2, bool), np.array([0])), {"count": 0}),
                ShapeError,
                r"offsets \(1,\) .* \(2,\)",
            ),
            (Case((np.zeros(2), np.zeros(2), np.array([0, 0])), {"count": 0}), DTypeError, "takes a bool mask"),
        ),
    ),
    Rows(
        "masked_select_backward",
        spread_oracle,
        spreads,
        grads=small_cases(spreads),
        int_dtypes=WHOLES,
        exact=True,
        errors=(
            (
                Case((np.zeros((1, 2)), np.ones(2, bool), np.array([0, 2]))),
                ShapeError,
                r"gradient has shape \(1, 2\), expected a vector",
            ),
        ),
    ),
]
