"""The planner of reductions: layouts that name every element once, and cuts that cover all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from genesis.array import Array, empty
from genesis.backend import backend_for
from genesis.dtypes import DType, bfloat16, float32, int16
from genesis.kernels.reduce import plan as reduce_plan
from genesis.kernels.reduce import reduce
from genesis.kernels.reduce.plan import (
    PROGRAMS,
    Layout,
    Tiles,
    column_tiles,
    group_size,
    line_tiles,
    merge_tiles,
    norm_tiles,
    reduction_layout,
    reduction_tiles,
    row_tiles,
    scan_tiles,
)
from genesis.op import registry
from genesis.shapes import contiguous_strides, numel
from tests.ops.devices import CUDA


def addresses(sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Offsets in row-major order."""
    grid = np.indices(sizes).reshape(len(sizes), -1)
    return np.asarray(strides) @ grid


def reduced_by(layout: Layout, memory: np.ndarray) -> np.ndarray:
    """Sums of `memory` as the kernels would form them."""
    rows = addresses(layout.kept, layout.kept_in)[:, None] + addresses(layout.reduced, layout.reduced_in)[None, :]
    out = np.full(layout.results, np.nan)
    out[addresses(layout.kept, layout.kept_out)] = memory[rows].sum(axis=1)
    return out


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Memory, a view on it (permuted, stepped or repeated), and axes to reduce."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    base = contiguous_strides(tuple(shape[i] for i in order))
    strides = [0] * len(shape)
    for i, stride in zip(order, base, strict=True):
        strides[i] = stride * draw(st.sampled_from([1, 1, 2])) if draw(st.integers(0, 4)) else 0
    memory = np.arange(1.0, 1 + 2 * numel(shape) * 2)
    axes = tuple(i for i in range(len(shape)) if draw(st.booleans()))
    return memory, tuple(shape), tuple(strides), axes


@settings(max_examples=200, deadline=None)
@given(views(), st.booleans())
def test_a_layout_reduces_what_numpy_reduces(view: tuple, ordered: bool) -> None:
    memory, shape, strides, axes = view
    layout = reduction_layout(shape, strides, axes, ordered=ordered)
    x = np.lib.stride_tricks.as_strided(memory, shape, tuple(8 * s for s in strides))
    assert np.array_equal(reduced_by(layout, memory), x.sum(axis=axes).ravel())


def test_the_check_of_layouts_sees_a_wrong_stride() -> None:
    layout = reduction_layout((3, 4), (4, 1), (1,))
    wrong = layout._replace(kept_in=(3,))
    memory = np.arange(12.0)
    assert not np.array_equal(reduced_by(wrong, memory), memory.reshape(3, 4).sum(axis=1))


@pytest.mark.parametrize(
    ("shape", "strides", "axes", "inner", "dims"),
    [
        ((4, 5, 6), (30, 6, 1), (2,), True, (1, 1)),  # last
        ((4, 5, 6), (30, 6, 1), (0, 1), False, (1, 1)),  # first two: one run of rows
        ((4, 5, 6), (30, 6, 1), (1,), False, (2, 1)),  # middle
        ((4, 5, 6), (30, 6, 1), (0, 1, 2), True, (1, 1)),  # all
        ((4, 5), (1, 4), (0,), True, (1, 1)),  # a transposed matrix: the first dimension is contiguous
        ((4, 5), (0, 1), (0,), False, (1, 1)),  # repeated rows
    ],
)
def test_orientation(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...], inner: bool, dims: tuple[int, int]
) -> None:
    layout = reduction_layout(shape, strides, axes)
    assert (layout.inner, (len(layout.kept), len(layout.reduced))) == (inner, dims)


def test_indices_keep_row_major_order() -> None:
    transposed = reduction_layout((3, 4), (1, 3), (0, 1), ordered=True)
    assert addresses(transposed.reduced, transposed.reduced_in).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    free = reduction_layout((3, 4), (1, 3), (0, 1))
    assert free.reduced == (12,) and free.reduced_in == (1,)


def covered(cut: Tiles, elements: int) -> bool:
    """Whether the splits of a result take every element once, and none is idle."""
    starts = [s * cut.span for s in range(cut.splits)]
    total = sum(min(start + cut.span, elements) - start for start in starts)
    return cut.span % cut.block_r == 0 and total == elements and all(start < max(elements, 1) for start in starts)


SIZES = [1, 2, 7, 128, 896, 1000, 4864, 32768, 151_936, 1_835_008, (1 << 31) + 5]


@pytest.mark.parametrize("inner", [False, True])
def test_cuts_cover_every_element(inner: bool) -> None:
    for results, elements, itemsize, states in itertools.product(SIZES, SIZES, (1, 2, 4, 8), (1, 2, 3)):
        steps = ((elements,), (1,)) if inner else ((1,), (results,))
        layout = Layout((results,), steps[0], (1,), (elements,), steps[1], inner)
        cut = reduction_tiles(layout, itemsize, states)
        assert covered(cut, elements), (layout, cut)
        assert cut.block_k & (cut.block_k - 1) == 0 and cut.block_r & (cut.block_r - 1) == 0
        assert cut.block_k * cut.block_r * itemsize <= 1 << 16
        assert -(-results // cut.block_k) * cut.splits <= max(PROGRAMS, -(-results // cut.block_k))


def test_the_check_of_cuts_sees_a_gap() -> None:
    assert not covered(Tiles(1, 64, 2, 64, 1), 129)
    assert not covered(Tiles(1, 64, 3, 64, 1), 128)


def test_few_results_are_split_and_many_are_not() -> None:
    def cut(shape: tuple[int, ...], axes: tuple[int, ...]) -> Tiles:
        return reduction_tiles(reduction_layout(shape, contiguous_strides(shape), axes), 4)

    big = (16, 2048, 4864)
    assert cut(big, (0, 1, 2)).splits > 500
    assert cut(big, (0, 1)).splits > 8
    assert cut(big, (2,)).splits == cut(big, (1,)).splits == 1
    assert cut((4, 512, 896), (2,)).splits == 1


def on_device(values: np.ndarray, dtype: DType = float32) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


def test_indices_are_found_in_groups_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties and NaN in several groups, in the last one, which is not full, and rows of nothing but infinities."""
    monkeypatch.setattr(reduce_plan, "GROUP_PER_BYTE", 64)  # 256 elements
    x = np.random.default_rng(5).integers(-3, 4, (9, 1900)).astype(np.float32)
    x[0, [1300, 700, 1899]] = 9
    x[1, [1899, 1100]] = np.nan
    x[2, 1899] = 9
    x[3], x[4], x[5, 255:257] = -np.inf, np.inf, -9
    cut = row_tiles(reduction_layout(x.shape, contiguous_strides(x.shape), (1,), ordered=True), 4)
    assert cut is not None and cut.block_r // group_size(cut, 4) == 8
    for name, oracle in (("max_with_indices", np.argmax), ("min_with_indices", np.argmin)):
        values, indices = registry[name](on_device(x), axis=1)
        expected = oracle(x, axis=1)
        assert np.array_equal(indices.numpy(), expected)
        assert np.array_equal(values.numpy(), x[np.arange(9), expected], equal_nan=True)


def columns(length: int) -> np.ndarray:
    """Three blocks of columns with ties, NaN, infinities and an extreme in the last row."""
    x = np.random.default_rng(5).integers(-3, 4, (3, length, 20)).astype(np.float32)
    x[0, [length - 1, 17, 70], 0] = 9
    x[1, [length - 2, 33], 1] = np.nan
    x[2, length - 1, 2] = -9
    x[0, :, 3], x[0, :, 4], x[1, 40:, 5] = -np.inf, np.inf, np.nan
    x[2, :, 6] = -np.inf
    x[2, 77, 6] = np.nan
    return x


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("length", [96, 101])  # full groups, and a partial one
def test_indices_are_found_in_groups_of_a_column(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(reduce, "column_tiles", lambda layout, itemsize: Tiles(8, 8, 1, 0, 4))
    x = columns(length)
    for dtype in (bfloat16, float32, int16):
        y = x if dtype.is_floating_point else np.nan_to_num(x, posinf=30000, neginf=-(1 << 15)).astype(np.int16)
        for name, oracle in (("max_with_indices", np.argmax), ("min_with_indices", np.argmin)):
            values, indices = registry[name](on_device(y, dtype), axis=1)
            expected = oracle(y, axis=1)
            assert np.array_equal(indices.numpy(), expected), (dtype, name)
            found = np.take_along_axis(y, expected[:, None], 1)[:, 0]
            assert np.array_equal(values.numpy().astype(y.dtype), found, equal_nan=True)
        assert np.array_equal(registry["argmax"](on_device(y, dtype), axis=1).numpy(), y.argmax(axis=1))


def test_only_long_columns_of_narrow_elements_are_searched_in_groups() -> None:
    def cut(shape: tuple[int, ...], axis: int, itemsize: int) -> Tiles | None:
        return column_tiles(reduction_layout(shape, contiguous_strides(shape), (axis,), ordered=True), itemsize)

    big = (16, 2048, 4864)
    assert cut(big, 1, 2) is not None
    assert cut(big, 1, 4) is cut(big, 2, 2) is cut((4, 512, 896), 1, 2) is None


@pytest.mark.full
@pytest.mark.parametrize("inner", [False, True])
def test_scans_and_merges_cover_their_lines(inner: bool) -> None:
    for lines, length in itertools.product(SIZES[:-1], SIZES):
        assert covered(scan_tiles(lines, length, inner), length)
        again = merge_tiles(lines, min(length, PROGRAMS))
        assert again.block_k * again.block_r <= 1024 and again.span >= min(length, PROGRAMS)


def test_a_tile_holds_a_whole_line_only_if_it_fits_in_registers() -> None:
    for length, itemsize, inner, arrays in itertools.product(SIZES, (2, 4, 8), (False, True), (1, 2)):
        cut = line_tiles(1000, length, itemsize, inner, arrays)
        assert not cut.one_pass or cut.block_r >= length
        registers = cut.block_k * cut.block_r * cut.unroll * arrays * (2 if itemsize == 8 else 1)
        assert registers <= 32 * 32 * cut.warps, (length, itemsize, inner, arrays, cut)


def test_norms_share_rows_among_a_fixed_number_of_programs() -> None:
    for rows, columns, itemsize in itertools.product((1, 3, 700, 16384, 1 << 20), (1, 64, 896, 4096, 20000), (2, 4, 8)):
        cut = norm_tiles(rows, columns, itemsize, backward=True)
        assert cut.one_pass == (cut.columns >= columns)
        assert 1 <= cut.programs <= max(rows, 1)
        assert cut.programs <= 132 * 16
