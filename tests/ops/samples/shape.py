"""Samples of views and of the ops that move elements; the oracles are numpy's own functions, or index each element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.errors import IndexRangeError, ShapeError
from genesis.shapes import contiguous_strides
from tests.ops.sampling import INTS, Case, Rows, normal, small_cases

WHOLE = (*INTS, "bool")
Cases = Callable[[np.random.Generator], list[Case]]


def on(*calls: tuple[tuple[int, ...], dict[str, Any]]) -> Cases:
    """One case for each (shape, attributes)."""
    return lambda rng: [Case((normal(rng, *shape),), attrs) for shape, attrs in calls]


def wrong(of: tuple[int, ...], kind: type[Exception], message: str, **attrs: Any) -> tuple[Any, ...]:
    """An error case on zeros of shape `of`."""
    return Case((np.zeros(of),), attrs), kind, message


# --- Views ------------------------------------------------------------------------------------------------------------

RESHAPES = on(
    ((2, 3, 4), {"shape": (6, 4)}), ((2, 3, 4), {"shape": (2, 12)}), ((2, 3, 4), {"shape": (24,)}),
    ((2, 3, 4), {"shape": (2, 3, 2, 2)}), ((2, 3, 4), {"shape": (1, 2, 3, 1, 4)}), ((2, 3, 4), {"shape": (4, 3, 2)}),
    ((1,), {"shape": ()}), ((), {"shape": (1, 1)}), ((0, 3), {"shape": (3, 0, 2)}), ((1, 6, 1), {"shape": (2, 3)}),
)  # fmt: skip

PERMUTES = on(
    ((2, 3, 4), {"dims": (2, 0, 1)}), ((2, 3, 4), {"dims": (0, 1, 2)}), ((2, 3), {"dims": (1, 0)}),
    ((), {"dims": ()}), ((0, 2), {"dims": (1, 0)}), ((2, 1, 3, 2), {"dims": (3, 1, 0, 2)}),
)  # fmt: skip

EXPANDS = on(
    ((3, 1), {"shape": (3, 4)}), ((3,), {"shape": (2, 3)}), ((), {"shape": (2, 2)}), ((1, 1), {"shape": (1, 1)}),
    ((1, 2), {"shape": (0, 2)}), ((2, 1, 3), {"shape": (5, 2, 4, 3)}),
)  # fmt: skip

SLICES = on(
    ((5, 4), {"items": (2,)}), ((5, 4), {"items": ((1, 2, 2), 3)}), ((5, 4), {"items": (None, (0, 5, 1), None, 0)}),
    ((5, 4), {"items": ()}), ((7,), {"items": ((0, 3, 3),)}), ((5, 4), {"items": ((5, 0, 1),)}),
    ((), {"items": (None,)}),
    ((0, 2), {"items": ((0, 0, 1), 1)}), ((3, 2, 4), {"items": ((2, 1, 1), (0, 0, 1), (1, 2, 2))}),
)  # fmt: skip


def slice_oracle(x: np.ndarray, items: tuple[Any, ...]) -> np.ndarray:
    """By taking the listed indices of one dimension after the other."""
    axis = 0
    for item in items:
        if item is None:
            x = np.expand_dims(x, axis)
        elif isinstance(item, int):
            x = np.take(x, item, axis)
            axis -= 1
        else:
            start, count, step = item
            x = np.take(x, [start + i * step for i in range(count)], axis)
        axis += 1
    return x


DIAGONALS = on(
    *(((3, 4), {"offset": k, "dim1": 0, "dim2": 1}) for k in (0, 1, 3, 4, 7, -1, -2, -3)),
    ((2, 3, 3), {"offset": 0, "dim1": 1, "dim2": 2}),
    ((2, 3, 4), {"offset": 1, "dim1": 2, "dim2": 0}),
    ((0, 2), {"offset": 0, "dim1": 0, "dim2": 1}),
)


def diagonal_oracle(x: np.ndarray, offset: int, dim1: int, dim2: int) -> np.ndarray:
    x = np.moveaxis(x, (dim1, dim2), (-2, -1))
    reached = [i for i in range(x.shape[-2]) if 0 <= i + offset < x.shape[-1]]
    return x[..., reached, [i + offset for i in reached]]


UNFOLDS = on(
    ((7,), {"dim": 0, "size": 3, "step": 2}), ((7,), {"dim": 0, "size": 3, "step": 1}),
    ((2, 5), {"dim": 1, "size": 2, "step": 3}), ((5, 2), {"dim": 0, "size": 5, "step": 1}),
    ((4, 0), {"dim": 0, "size": 1, "step": 1}),
)  # fmt: skip


def unfold_oracle(x: np.ndarray, dim: int, size: int, step: int) -> np.ndarray:
    starts = range(0, x.shape[dim] - size + 1, step)
    return np.stack([np.moveaxis(np.take(x, range(s, s + size), dim), dim, -1) for s in starts], dim)


# --- Windows ----------------------------------------------------------------------------------------------------------


def addresses(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> list[int]:
    """The element that each index reaches, row-major."""
    return [offset + sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(shape)]


WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((12,), {"shape": (3, 4), "strides": (4, 1), "offset": 0}),
    ((3, 4), {"shape": (2, 2), "strides": (5, 2), "offset": 1}),
    ((3, 4), {"shape": (4, 3), "strides": (1, 4), "offset": 0}),
    ((3, 4), {"shape": (), "strides": (), "offset": 7}),
    ((3, 4), {"shape": (0, 2), "strides": (1, 1), "offset": 3}),
    ((2, 0), {"shape": (0,), "strides": (1,), "offset": 0}),
    ((3, 4), {"shape": (12,), "strides": (1,), "offset": 0}),
]
OVERLAPPING: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((8,), {"shape": (4, 3), "strides": (1, 1), "offset": 1}),
    ((3, 4), {"shape": (2, 3, 2), "strides": (0, 2, 3), "offset": 2}),
]


def as_strided_oracle(x: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> np.ndarray:
    return x.ravel()[addresses(shape, strides, offset)].reshape(shape) if math.prod(shape) else np.zeros(shape, x.dtype)


def scatter_oracle(
    x: np.ndarray, src: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> np.ndarray:
    flat = x.ravel().copy()
    for place, value in zip(addresses(shape, strides, offset), src.ravel(), strict=True):
        flat[place] = value
    return flat.reshape(x.shape)


def scatters(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *shape), normal(rng, *attrs["shape"])), attrs) for shape, attrs in WINDOWS]


def backward_oracle(
    g: np.ndarray,
    strides: tuple[int, ...],
    offset: int,
    source_shape: tuple[int, ...],
    source_strides: tuple[int, ...],
) -> np.ndarray:
    places = addresses(source_shape, source_strides, 0)
    reached = addresses(g.shape, strides, offset)
    found = [sum(v for r, v in zip(reached, g.ravel(), strict=True) if r == p) / places.count(p) for p in places]
    return np.array(found, float).reshape(source_shape)


def backwards(rng: np.random.Generator) -> list[Case]:
    cases = [
        Case(
            (normal(rng, *attrs["shape"]),),
            {
                "strides": attrs["strides"],
                "offset": attrs["offset"],
                "source_shape": shape,
                "source_strides": contiguous_strides(shape),
            },
        )
        for shape, attrs in WINDOWS + OVERLAPPING
    ]
    sources: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = [
        ((4, 3), (1, 4), (2,), 3),  # a transposed source
        ((2, 3), (0, 1), (3,), 0),  # an expanded source: equal shares
        ((3,), (2,), (2,), -1),  # a window that starts before the source and falls into its gaps
        ((2, 2), (5, 2), (4,), 1),  # and one that leaves it
    ]
    for source_shape, source_strides, shape, offset in sources:
        attrs = {"strides": (1,), "offset": offset, "source_shape": source_shape, "source_strides": source_strides}
        cases.append(Case((normal(rng, *shape),), attrs))
    return cases


# --- Joining and moving -----------------------------------------------------------------------------------------------


def cats(rng: np.random.Generator) -> list[Case]:
    groups: list[tuple[list[tuple[int, ...]], int]] = [
        ([(2, 3), (4, 3)], 0), ([(2, 3), (2, 1), (2, 2)], 1), ([(3,)], 0), ([(0,), (2, 3), (1, 3)], 0),
        ([(2, 0), (2, 3)], 1), ([(0,), (0,)], 0), ([(2, 2, 2), (2, 2, 2)], 2), ([(1,)] * 5, 0),
    ]  # fmt: skip
    return [Case(tuple(normal(rng, *shape) for shape in shapes), {"dim": dim}) for shapes, dim in groups]


def cat_oracle(*arrays: np.ndarray, dim: int) -> np.ndarray:
    kept = [a for a in arrays if a.shape != (0,)] or [arrays[0]]
    return np.concatenate(kept, dim)


FLIPS = on(
    ((3, 4), {"dims": (0,)}), ((3, 4), {"dims": (0, 1)}), ((3, 4), {"dims": ()}), ((1,), {"dims": (0,)}),
    ((0, 2), {"dims": (0,)}), ((), {"dims": ()}),
)  # fmt: skip

ROLLS = on(
    ((3, 4), {"shifts": (1,), "dims": (0,)}), ((3, 4), {"shifts": (-2, 9), "dims": (0, 1)}),
    ((3, 4), {"shifts": (1, 4), "dims": (1, 1)}), ((5,), {"shifts": (0,), "dims": (0,)}),
    ((0, 2), {"shifts": (1,), "dims": (0,)}),
)  # fmt: skip


def roll_oracle(x: np.ndarray, shifts: tuple[int, ...], dims: tuple[int, ...]) -> np.ndarray:
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        x = np.take(x, [(i - shift) % size for i in range(size)], dim)
    return x


TRIANGLES = on(
    *(((3, 5), {"diagonal": k}) for k in (0, 1, -1, 4, 5, -2, -3, -7)),
    ((2, 4, 3), {"diagonal": 0}), ((1, 1), {"diagonal": 0}), ((0, 3), {"diagonal": 0}),
)  # fmt: skip


def triangle(lower: bool) -> Callable[..., np.ndarray]:
    def oracle(x: np.ndarray, diagonal: int) -> np.ndarray:
        row, column = np.indices(x.shape[-2:])
        inside = column - row <= diagonal if lower else column - row >= diagonal
        return np.where(inside, x, np.zeros((), x.dtype))

    return oracle


PADS = on(
    ((2, 3), {"widths": ((0, 0), (1, 2)), "value": 0.0}), ((2, 3), {"widths": ((2, 1), (0, 1)), "value": -1.0}),
    ((), {"widths": (), "value": 1.0}), ((0, 2), {"widths": ((1, 1), (0, 0)), "value": 2.0}),
)  # fmt: skip


def pad_oracle(x: np.ndarray, widths: tuple[tuple[int, int], ...], value: float) -> np.ndarray:
    return np.pad(x, widths, constant_values=value) if x.ndim else x


ROWS = [
    Rows(
        "reshape",
        lambda x, shape: np.array(x.ravel()).reshape(shape),
        RESHAPES,
        int_dtypes=WHOLE,
        errors=(
            wrong(
                (2, 3), ShapeError, r"shape \(4, 2\) has 8 elements, the tensor of shape \(2, 3\) has 6", shape=(4, 2)
            ),
        ),
    ),
    # the gradient on contiguous inputs: others may rightly be refused
    Rows("reshape", lambda x, shape: np.reshape(x, shape), RESHAPES, grads=RESHAPES, strided=False),
    Rows(
        "permute",
        lambda x, dims: np.einsum(x, list(range(x.ndim)), list(dims)),
        PERMUTES,
        int_dtypes=WHOLE,
        grads=PERMUTES,
        errors=(
            wrong((2, 3), ShapeError, r"\(0, 0\) does not name each of the 2 dimensions", dims=(0, 0)),
            wrong((2, 3), ShapeError, r"\(0,\) does not name", dims=(0,)),
        ),
    ),
    Rows(
        "expand",
        lambda x, shape: x * np.ones(shape, x.dtype) if x.dtype != bool else x & np.ones(shape, bool),
        EXPANDS,
        int_dtypes=WHOLE,
        grads=EXPANDS,
        errors=(wrong((2, 3), ShapeError, r"\(2, 3\) does not expand to \(4, 3\)", shape=(4, 3)),),
    ),
    Rows(
        "slice",
        slice_oracle,
        SLICES,
        int_dtypes=WHOLE,
        grads=SLICES,
        errors=(
            wrong((2, 3), IndexRangeError, r"2 is out of range for dimension 0 of size 2", items=(2,)),
            wrong((2, 3), IndexRangeError, r"\(1, 2, 2\) is out of range for dimension 1", items=(0, (1, 2, 2))),
            wrong((2,), IndexRangeError, r"too many indices for 1 dimensions", items=(0, 0)),
        ),
    ),
    Rows(
        "diagonal",
        diagonal_oracle,
        DIAGONALS,
        grads=DIAGONALS,
        errors=(wrong((2, 3), ShapeError, "dimension 1 .* named twice", offset=0, dim1=1, dim2=1),),
    ),
    Rows(
        "unfold",
        unfold_oracle,
        UNFOLDS,
        grads=UNFOLDS,
        errors=(wrong((4,), ShapeError, "size 5 and step 1 do not suit dimension 0 of size 4", dim=0, size=5, step=1),),
    ),
    Rows(
        "as_strided",
        as_strided_oracle,
        on(*WINDOWS, *OVERLAPPING),
        int_dtypes=WHOLE,
        grads=on(*WINDOWS, *OVERLAPPING),
        strided=False,  # the result depends on where the input's elements lie
        errors=(
            wrong((4,), ShapeError, "reach outside a storage of 4 elements", shape=(3,), strides=(2,), offset=0),
            wrong((4,), ShapeError, "reach outside", shape=(1,), strides=(1,), offset=-1),
            wrong((4,), ShapeError, "as_strided: shape .2,. and strides .-1,.", shape=(2,), strides=(-1,), offset=1),
        ),
    ),
    Rows(
        "as_strided_backward",
        backward_oracle,
        backwards,
        grads=lambda rng: [c for c in small_cases(backwards)(rng) if 0 not in c.attrs["source_strides"]],
        reduction=lambda case: max(1, np.size(case.inputs[0])),
        errors=(
            (
                Case((np.zeros(2),), {"strides": (), "offset": 0, "source_shape": (3,), "source_strides": (1,)}),
                ShapeError,
                r"strides \(\) .* gradient of shape \(2,\)",
            ),
            (
                Case((np.zeros(2),), {"strides": (1,), "offset": 0, "source_shape": (3,), "source_strides": ()}),
                ShapeError,
                r"source strides \(\) .* shape \(3,\)",
            ),
        ),
    ),
    Rows(
        "as_strided_scatter",
        scatter_oracle,
        scatters,
        int_dtypes=WHOLE,
        grads=scatters,
        strided=False,
        exact=True,
        errors=(
            (
                Case((np.zeros(4), np.zeros(2)), {"shape": (3,), "strides": (1,), "offset": 0}),
                ShapeError,
                r"the window has shape \(3,\), the source has \(2,\)",
            ),
            (
                Case((np.zeros(4), np.zeros((2, 2))), {"shape": (2, 2), "strides": (1, 1), "offset": 0}),
                ShapeError,
                "share memory",
            ),
        ),
    ),
    Rows(
        "cat",
        cat_oracle,
        cats,
        int_dtypes=WHOLE,
        grads=cats,
        exact=True,
        errors=(
            (Case((np.zeros((2, 3)), np.zeros((2, 4))), {"dim": 0}), ShapeError, "differ outside dimension 0"),
            (Case((np.zeros((2, 3)), np.zeros(3)), {"dim": 0}), ShapeError, "differ outside dimension 0"),
            (Case((np.zeros((2, 3)),), {"dim": 2}), ShapeError, "dimension 2 is out of range"),
        ),
    ),
    Rows(
        "flip",
        lambda x, dims: x[tuple(slice(None, None, -1) if d in dims else slice(None) for d in range(x.ndim))],
        FLIPS,
        int_dtypes=WHOLE,
        grads=FLIPS,
        exact=True,
        errors=(wrong((2, 3), ShapeError, r"dimensions \(1, 1\)", dims=(1, 1)),),
    ),
    Rows(
        "roll",
        roll_oracle,
        ROLLS,
        int_dtypes=WHOLE,
        grads=ROLLS,
        exact=True,
        errors=(wrong((2, 3), ShapeError, "2 shifts .* 1 dimensions", shifts=(1, 2), dims=(0,)),),
    ),
    *(
        Rows(
            name,
            triangle(lower),
            TRIANGLES,
            int_dtypes=WHOLE,
            grads=TRIANGLES,
            exact=True,
            extremes=False,  # where an element stands decides, not its value
            errors=(wrong((3,), ShapeError, "needs at least 2 dimensions", diagonal=0),),
        )
        for name, lower in (("tril", True), ("triu", False))
    ),
    Rows(
        "pad",
        pad_oracle,
        PADS,
        int_dtypes=INTS[:-1],
        grads=PADS,
        exact=True,
        errors=(wrong((2, 3), ShapeError, "do not suit shape", widths=((0, 0),), value=0.0),),
    ),
]
