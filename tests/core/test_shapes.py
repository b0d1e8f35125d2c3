"""Shapes and strides, against numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis import shapes
from genesis.errors import IndexRangeError, ShapeError

SIZES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def _strides(values: np.ndarray) -> tuple[int, ...]:
    return tuple(s // values.itemsize for s in values.strides)


@given(SIZES)
def test_contiguous_strides_are_numpys(shape: tuple[int, ...]) -> None:
    mine = shapes.contiguous_strides(shape)
    if 0 not in shape:
        theirs = _strides(np.zeros(shape))
        assert all(a == b for a, b, s in zip(mine, theirs, shape, strict=True) if s > 1)
    assert shapes.is_contiguous(shape, mine)
    assert shapes.numel(shape) == np.zeros(shape).size


@st.composite
def windows(draw: Any) -> np.ndarray:
    """Views of a numpy array: transposed, sliced, expanded."""
    values: np.ndarray = np.arange(120.0).reshape(2, 3, 4, 5)
    values = values.transpose(draw(st.permutations(range(4))))
    cuts = []
    for size in values.shape:
        start = draw(st.integers(0, size))
        cuts.append(slice(start, draw(st.integers(start, size)), draw(st.integers(1, 2))))
    values = values[tuple(cuts)]
    for axis in reversed(range(4)):
        if values.shape[axis] and draw(st.booleans()):
            values = values[(slice(None),) * axis + (0,)]
    if draw(st.booleans()):
        values = np.broadcast_to(values, (2, *values.shape))
    return values


@given(windows())
def test_is_contiguous_agrees_with_numpy(values: np.ndarray) -> None:
    assert shapes.is_contiguous(values.shape, _strides(values)) == values.flags.c_contiguous


@given(windows(), st.data())
def test_view_strides_finds_a_view_exactly_where_numpy_does(values: np.ndarray, data: Any) -> None:
    target = data.draw(factorizations(values.size))
    found = shapes.view_strides(values.shape, _strides(values), target)
    try:
        theirs = values.reshape(target, copy=False)
    except ValueError:
        assert found is None
        return
    if found is None:
        assert 0 in values.strides, "numpy merges expanded dimensions in more cases, and only these"
        return
    view = np.lib.stride_tricks.as_strided(values, target, tuple(s * values.itemsize for s in found))
    assert np.array_equal(view, theirs)


@st.composite
def factorizations(draw: Any, count: int) -> tuple[int, ...]:
    """A shape of `count` elements."""
    if count == 0:
        return tuple(draw(st.permutations([0, draw(st.integers(0, 3)), 2])))
    left, sizes = count, []
    while left > 1:
        divisors = [d for d in range(2, left + 1) if left % d == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        left //= sizes[-1]
    for _ in range(draw(st.integers(0, 2))):
        sizes.insert(draw(st.integers(0, len(sizes))), 1)
    return tuple(sizes)


@given(st.lists(SIZES, min_size=1, max_size=3))
def test_broadcasting_agrees_with_numpy(given_shapes: list[tuple[int, ...]]) -> None:
    try:
        want = np.broadcast_shapes(*given_shapes)
    except ValueError:
        with pytest.raises(ShapeError, match="do not broadcast"):
            shapes.broadcast_shapes(*given_shapes)
        return
    got = shapes.broadcast_shapes(*given_shapes)
    assert got == want
    for shape in given_shapes:
        strides = shapes.broadcast_strides(shape, shapes.contiguous_strides(shape), got)
        view = np.lib.stride_tricks.as_strided(
            np.arange(1.0 * max(shapes.numel(shape), 1)), got, [8 * s for s in strides]
        )
        assert np.array_equal(view, np.broadcast_to(np.arange(1.0 * shapes.numel(shape)).reshape(shape), got))


def test_errors_of_broadcasting_name_shapes_and_dimension() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\) and \(2, 4\) do not broadcast: dimension -1 is 3 against 4"):
        shapes.broadcast_shapes((2, 3), (2, 4))
    with pytest.raises(ShapeError, match=r"\(2,\) does not expand to \(3,\)"):
        shapes.broadcast_strides((2,), (1,), (3,))
    with pytest.raises(ShapeError, match=r"\(1, 2\) does not expand to \(2,\)"):
        shapes.broadcast_strides((1, 2), (2, 1), (2,))


def test_axes() -> None:
    assert [shapes.normalize_axis(a, 3) for a in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    assert shapes.normalize_axis(0, 0) == shapes.normalize_axis(-1, 0) == 0
    assert shapes.normalize_axes(None, 3) == (0, 1, 2)
    assert shapes.normalize_axes(-1, 3) == (2,)
    assert shapes.normalize_axes((2, 0), 3) == (0, 2)
    assert shapes.normalize_axes(0, 0) == shapes.normalize_axes((), 0) == ()
    for axis, ndim in ((3, 3), (-4, 3), (1, 0)):
        with pytest.raises(IndexRangeError, match=f"dimension {axis} is out of range for {ndim} dimensions"):
            shapes.normalize_axis(axis, ndim)
    with pytest.raises(ShapeError, match="appears twice"):
        shapes.normalize_axes((1, -2), 3)


def test_reduced_shape() -> None:
    assert shapes.reduced_shape((2, 3, 4), (0, 2), False) == (3,)
    assert shapes.reduced_shape((2, 3, 4), (0, 2), True) == (1, 3, 1)
    assert shapes.reduced_shape((), (), True) == ()


@pytest.mark.parametrize(
    ("shape", "count", "resolved"),
    [((2, -1), 6, (2, 3)), ((-1,), 0, (0,)), ((0, 3), 0, (0, 3)), ((), 1, ()), ((-1, 1), 1, (1, 1)), ((6,), 6, (6,))],
)
def test_resolve_shape(shape: tuple[int, ...], count: int, resolved: tuple[int, ...]) -> None:
    assert shapes.resolve_shape(shape, count) == resolved


@pytest.mark.parametrize(
    ("shape", "count", "said"),
    [
        ((-1, -1), 4, "at most one -1"),
        ((-2, 2), 4, "at least 0"),
        ((4, -1), 6, "does not fit 6"),
        ((0, -1), 0, "does not fit 0"),
        ((2, 2), 6, "has 4 elements, the tensor has 6"),
        ((), 2, "has 1 elements"),
    ],
)
def test_shapes_that_do_not_resolve(shape: tuple[int, ...], count: int, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        shapes.resolve_shape(shape, count)


def test_errors_show_shapes_as_tuples() -> None:
    shown = [str(ShapeError(f"a {shapes.Size(shape)}")) for shape in ((), (3,), (3, 4))]
    assert shown == ["a ()", "a (3,)", "a (3, 4)"]
    assert repr(shapes.Size((3, 4))) == "genesis.Size([3, 4])"
