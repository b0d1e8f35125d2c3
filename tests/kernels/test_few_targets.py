"""Scatter-adds onto few targets: which kernels they take, and what these compute."""

from __future__ import annotations

import numpy as np
import pytest

import genesis
from genesis.errors import IndexRangeError
from genesis.functions.index import index_add, scatter_add, scatter_add_
from genesis.kernels.index import segment
from genesis.kernels.index.segment import (
    few_targets_kernel,
    few_targets_reduce_kernel,
    few_targets_tile,
    is_profitable,
)
from genesis.shapes import Shape


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that scatter-adds launch from here on, sorted ones as well."""
    kernels: list[object] = []
    launch = segment.launch

    def spy(kernel: object, *args: object, **keywords: object) -> None:
        kernels.append(kernel)
        launch(kernel, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(segment, "launch", spy)
    return kernels


def added(x: np.ndarray, dim: int, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """x in float64 with values[…] added at index[…] along dim, for an index of the values' shape."""
    found, at = x.astype(np.float64), list(np.indices(index.shape))
    at[dim] = np.where(index < 0, index + x.shape[dim], index)
    np.add.at(found, tuple(at), values.astype(np.float64))
    return found


@pytest.mark.sample
@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize(
    "x, dim, index, kernels",
    [((40, 3), 1, (40, 70), 1), ((3, 40), 0, (70, 40), 1), ((2, 5, 9), 1, (2, 33, 8), 1), ((70, 6), 0, (50, 5), 1),
     ((1, 6), 0, (6000, 6), 2), ((3, 1), 1, (3, 9000), 2), ((7,), 0, (4000,), 2), ((4, 130), 1, (3, 90), 1)],
)  # fmt: skip
def test_scatter_add(
    x: Shape, dim: int, index: Shape, kernels: int, dtype: str, in_place: bool, launched: list[object]
) -> None:
    rng = np.random.default_rng(3)
    target, source = (genesis.tensor(rng.normal(size=s).astype(np.float32), dtype=dtype) for s in (x, index))
    places = rng.integers(-x[dim], x[dim], index)
    want = added(target.numpy(), dim, places, source.numpy())
    there = target.to("cuda")
    found = (scatter_add_ if in_place else scatter_add)(
        there, dim, genesis.tensor(places).to("cuda"), source.to("cuda")
    )
    rounding = {"float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-10}[dtype]
    sizes = added(np.abs(target.numpy().astype(np.float64)), dim, places, np.abs(source.numpy()))
    assert (np.abs(found.numpy().astype(np.float64) - want) <= rounding * np.abs(want) + 1e-6 * sizes).all()
    assert launched == [few_targets_kernel, few_targets_reduce_kernel][:kernels]


@pytest.mark.parametrize(
    ("x", "dim", "count"), [((50, 36), 0, 79), ((20, 9), 1, 40), ((2, 3, 5), 1, 300), ((4,), 0, 9)]
)
def test_index_add(x: Shape, dim: int, count: int, launched: list[object]) -> None:
    rng = np.random.default_rng(4)
    shape = (*x[:dim], count, *x[dim + 1 :])
    target, source = (genesis.tensor(rng.normal(size=s).astype(np.float32)) for s in (x, shape))
    places = rng.integers(0, x[dim], count)
    spread = np.broadcast_to(places.reshape([count if d == dim else 1 for d in range(len(x))]), shape)
    found = index_add(target.to("cuda"), dim, genesis.tensor(places).to("cuda"), source.to("cuda"))
    np.testing.assert_allclose(found.numpy(), added(target.numpy(), dim, spread, source.numpy()), 1e-5, 1e-5)
    assert launched[0] is few_targets_kernel


def test_many_targets_are_sorted(launched: list[object]) -> None:
    x = genesis.zeros((1000000, 2), device="cuda")
    index = genesis.tensor(np.array([[5, 6], [5, 7]])).to("cuda")
    found = scatter_add(x, 0, index, genesis.ones((2, 2), device="cuda")).numpy()
    assert (found[5, 0], found[6, 1], found[7, 1], found.sum()) == (2, 1, 1, 4)
    assert launched == [segment.segment_sum_kernel]


@pytest.mark.parametrize(
    "lines, count, targets, along_count, is_shared, want",
    [(440, 1808, 478, False, False, True), (34768, 2876, 3, True, False, True), (646, 279, 50, False, True, True),
     (440, 1808, 2000, False, False, False), (100000, 3, 478, True, False, False),
     (4096, 20000, 50, False, True, False), (30, 56, 73299, False, True, False), (8, 8192, 4, False, True, True),
     (64, 65536, 16, False, True, False), (1, 100000, 64, False, True, False)],
)  # fmt: skip
def test_where_comparing_is_profitable(
    lines: int, count: int, targets: int, along_count: bool, is_shared: bool, want: bool
) -> None:
    tile = few_targets_tile(lines, targets, along_count)
    assert is_profitable(lines, count, targets, tile, is_shared) == want


def test_an_index_out_of_range_is_reported() -> None:
    index = genesis.tensor(np.array([[0, 1], [0, -4]])).to("cuda")
    found = scatter_add(genesis.zeros((3, 2), device="cuda"), 0, index, genesis.ones((2, 2), device="cuda"))
    with pytest.raises(IndexRangeError, match="-4"):
        found.numpy()


def test_what_is_not_a_number_stays_with_its_target() -> None:
    values = genesis.tensor(np.array([[np.nan, 1.0], [2.0, np.inf]], np.float32)).to("cuda")
    index = genesis.tensor(np.array([[0, 1], [2, 2]])).to("cuda")
    found = scatter_add(genesis.zeros((3, 2), device="cuda"), 0, index, values).numpy()
    assert np.array_equal(found, [[np.nan, 0], [0, 1], [2, np.inf]], equal_nan=True)
