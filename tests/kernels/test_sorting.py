"""Sorting, indexing and masks of many tiles, which the samples of the registry are too small for.

Tile sizes are reduced here, so that arrays small enough for the interpreter take many programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import backend_for
from genesis.dtypes import DType, as_dtype, bfloat16, float32, float64, int32
from genesis.errors import IndexRangeError, ShapeError
from genesis.indexing import plan_get
from genesis.kernels.index import radix_sort as radix
from genesis.kernels.index import segment, select
from genesis.kernels.index import sort as sorting
from genesis.kernels.pointwise.elementwise import copy
from genesis.op import registry
from tests.ops.devices import CUDA


def on_device(values: np.ndarray, dtype: DType | None = None) -> Array:
    array = empty(values.shape, dtype or as_dtype(values.dtype), CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


@pytest.fixture(autouse=True)
def forget_calls() -> Iterator[None]:
    """Launches that were recorded with other tile sizes must not be replayed."""
    backend: Any = backend_for(CUDA)
    backend._calls.clear()
    backend._calls_into.clear()
    yield
    backend._calls.clear()
    backend._calls_into.clear()


@pytest.fixture
def radix_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "MAX_LINE", 0)
    monkeypatch.setattr(radix, "TILE", 256)
    monkeypatch.setattr(radix, "COUNT_TILE", 512)
    monkeypatch.setattr(sorting, "SHORT", 0)


def specials(dtype: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values with ties, both zeros, infinities and NaN, or the ends of an integer type."""
    kind = as_dtype(dtype)
    if kind.is_floating_point:
        halves = np.round(rng.standard_normal(shape) * 4) / 2
        halves[rng.random(shape) < 0.2] = -0.0
        for value in (np.nan, np.inf, -np.inf, -np.nan):
            halves[rng.random(shape) < 0.05] = value
        return halves.astype(kind.numpy)
    limits = np.iinfo(kind.numpy) if dtype != "bool" else None
    x = rng.integers(-9, 9, shape) if limits is None or limits.min < 0 else rng.integers(0, 9, shape)
    x = x.astype(kind.numpy)
    if limits is not None:
        x[rng.random(shape) < 0.1] = limits.max
        x[rng.random(shape) < 0.1] = limits.min
    return x


def by_reference(name: str, *inputs: np.ndarray, **attrs: Any) -> Any:
    """The op on the CPU."""
    from genesis.array import from_numpy

    found = registry[name](*(from_numpy(x.copy()) for x in inputs), **attrs)
    return tuple(f.numpy() for f in found) if isinstance(found, tuple) else found.numpy()


def bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


@pytest.mark.sample(cases=6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("descending", [False, True])
def test_radix_sort_is_stable_and_orders_nan_last(radix_only: None, dtype: str, descending: bool) -> None:
    axis = 0 if descending else 1
    x = specials(dtype, np.random.default_rng(1), 2, 2600)  # 11 tiles, and 8 states are looked at together
    x = x.T if descending else x
    found = registry["sort"](on_device(x), axis=axis, descending=descending)
    expected = by_reference("sort", x, axis=axis, descending=descending)
    assert np.array_equal(found[1].numpy(), expected[1])
    assert bits(found[0].numpy()) == bits(expected[0])


@pytest.mark.sample(cases=10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [129, 1500, 4001])
def test_a_program_sorts_a_line(dtype: str, length: int) -> None:
    descending = length == 1500
    x = specials(dtype, np.random.default_rng(length), 3, length)
    found = registry["sort"](on_device(x), axis=1, descending=descending)
    expected = by_reference("sort", x, axis=1, descending=descending)
    assert np.array_equal(found[1].numpy(), expected[1])
    assert bits(found[0].numpy()) == bits(expected[0])
    some = registry["topk"](on_device(x), k=70, axis=1, largest=descending)
    assert np.array_equal(some[1].numpy(), expected[1][:, :70])
    assert bits(some[0].numpy()) == bits(expected[0][:, :70])


@pytest.mark.parametrize("dtype", ["float64", "int64"])
@pytest.mark.parametrize("length", [5, 300])
def test_ranks_of_wide_types(dtype: str, length: int) -> None:
    x = specials(dtype, np.random.default_rng(2), 2, length)
    found = registry["sort"](on_device(x), axis=1)
    assert np.array_equal(found[1].numpy(), by_reference("sort", x, axis=1)[1])


@pytest.mark.sample(cases=2)
@pytest.mark.sample
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float64"])
@pytest.mark.parametrize("largest", [False, True])
def test_topk_of_a_long_line_by_tiles(monkeypatch: pytest.MonkeyPatch, dtype: str, largest: bool) -> None:
    """The last of the tiles has fewer elements than are wanted of it."""
    monkeypatch.setattr(radix, "MAX_LINE", 4096)
    x = specials(dtype, np.random.default_rng(3), 2, 20 * 4096 + 30)
    found = registry["topk"](on_device(x), k=60, axis=1, largest=largest)
    expected = by_reference("topk", x, k=60, axis=1, largest=largest)
    assert np.array_equal(found[1].numpy(), expected[1])
    assert bits(found[0].numpy()) == bits(expected[0])


@pytest.mark.parametrize("width", [1, 3, 130])
@pytest.mark.parametrize("rows", [1, 40])
def test_runs_that_cross_windows(width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few targets for many positions: most runs are longer than a window, some longer than all parts of one load."""
    monkeypatch.setattr(segment, "PARTS", 2)
    monkeypatch.setattr(segment, "window_of", lambda count, width: (16, segment.columns(width, 128), 4))
    rng = np.random.default_rng(rows)
    ids, g = rng.integers(0, rows, 150), rng.standard_normal((150, width))
    expected = np.zeros((rows, width))
    np.add.at(expected, ids, g)
    found = registry["embedding_backward"](on_device(g), on_device(ids), rows=rows).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    start = rng.standard_normal((rows, width))
    target = on_device(start)
    registry["index_put_"](target, on_device(g), on_device(ids), dims=(0,), accumulate=True)
    np.testing.assert_allclose(target.numpy(), start + expected, rtol=0, atol=1e-12)


def test_the_sum_of_a_row_is_reproducible_and_independent_of_other_rows() -> None:
    rng = np.random.default_rng(5)
    g = rng.standard_normal((64, 96)).astype(np.float32)
    ids = rng.integers(0, 4, 64)
    first = registry["embedding_backward"](on_device(g), on_device(ids), rows=4).numpy()
    again = registry["embedding_backward"](on_device(g), on_device(ids), rows=4).numpy()
    assert bits(first) == bits(again)


def test_last_writes_stay_by_radix_order(radix_only: None) -> None:
    rng = np.random.default_rng(6)
    ids, values, x = rng.integers(-50, 50, 400), rng.standard_normal((400, 2)), rng.standard_normal((50, 2))
    found = registry["index_put"](on_device(x), on_device(values), on_device(ids), dims=(0,))
    expected = x.copy()
    for i, row in zip(ids, values, strict=True):
        expected[i] = row
    assert np.array_equal(found.numpy(), expected)


def test_six_index_arrays() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 3, 2, 3, 2, 2))
    indices = [rng.integers(-n, n, 9) for n in x.shape]
    given = [on_device(i) for i in indices]
    dims = tuple(range(6))
    assert np.array_equal(registry["index_get"](on_device(x), *given, dims=dims).numpy(), x[tuple(indices)])
    found = registry["index_put"](on_device(x), 1.0, *given, dims=dims, accumulate=True).numpy()
    expected = x.copy()
    np.add.at(expected, tuple(indices), 1.0)
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_unique_and_bincount_by_radix_order(radix_only: None) -> None:
    rng = np.random.default_rng(8)
    x = specials("float32", rng, 3, 50)
    size = int(registry["unique_count"](on_device(x)).item())
    expected = by_reference("unique", x, size=size)
    values, inverse, counts = (f.numpy() for f in registry["unique"](on_device(x), size=size))
    assert np.array_equal(values, expected[0], equal_nan=True)
    assert np.array_equal(counts, expected[2])
    assert np.array_equal(inverse[~np.isnan(x)], expected[1][~np.isnan(x)])
    # the reference does not say which NaN is which; here they keep their order
    assert inverse[np.isnan(x)].tolist() == list(range(size - int(np.isnan(x).sum()), size))
    ids, weights = rng.integers(0, 7, 500), rng.standard_normal(500)
    found = registry["bincount"](on_device(ids), on_device(weights), size=9).numpy()
    np.testing.assert_allclose(found, np.bincount(ids, weights, 9), atol=1e-13)


# --- Masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [select.SUMS, 4])
def test_the_indices_of_a_mask_of_several_tiles(monkeypatch: pytest.MonkeyPatch, counts: int) -> None:
    monkeypatch.setattr(select, "TILE", 64)
    monkeypatch.setattr(select, "SUMS", counts)  # 11 tiles are summed by one program, or by three
    mask = np.random.default_rng(9).random((20, 31)) < 0.3
    plan = plan_get(on_device(np.zeros(mask.shape)), on_device(mask))
    assert np.array_equal(plan.indices[0].numpy(), np.nonzero(mask)[0])
    assert np.array_equal(plan.indices[1].numpy(), np.nonzero(mask)[1])


def test_selections_of_any_count_share_one_launch() -> None:
    """The second and later ones are launched as the first one was prepared, and take as many elements as they have."""
    x = np.random.default_rng(3).standard_normal((3, 3000))
    select._plans.clear()
    for share in (0.5, 0.0, 1.0, 0.1):
        mask = np.random.default_rng(4).random(x.shape) < share
        array = on_device(mask)
        offsets = registry["mask_offsets"](array)
        found = registry["masked_select"](on_device(x), array, offsets, count=int(mask.sum()))
        assert np.array_equal(found.numpy(), x[mask])
    assert len(select._plans) == 1
    assert not any(plan for key, plan in backend_for(CUDA)._calls_into.items() if key[0].name == "masked_select")


@pytest.mark.parametrize("given", [4, 8])
def test_a_wrong_size_is_reported(given: int) -> None:
    mask = on_device(np.arange(12) % 2 == 0)
    registry["nonzero"](mask, size=given)
    with pytest.raises(ShapeError, match=f"nonzero: .*6 elements.*{given}"):
        mask.numpy()
    mask.numpy()  # once


# --- Indices out of range ---------------------------------------------------------------------------------------------


def calls() -> dict[str, tuple[Any, str]]:
    x, g, i = on_device(np.ones((4, 3))), on_device(np.ones((2, 3))), on_device(np.array([1, 4]))
    low = on_device(np.array([-5, 0], np.int32))
    run = registry
    return {
        "get": (lambda: run["index_get"](x, i, dims=(0,)), "index_get: index 4 .* dimension 0 of size 4"),
        "negative": (lambda: run["index_get"](x, low, dims=(0,), named=(2,)), "index -5 .* dimension 2 of size 4"),
        "put": (lambda: run["index_put"](x, 7.0, i, dims=(0,)), "index_put: index 4 .* dimension 0"),
        "add": (lambda: run["index_put_"](x, g, i, dims=(0,), accumulate=True), "index_put_: index 4"),
        "backward": (
            lambda: run["index_get_backward"](g, i, dims=(0,), shape=(4, 3)),
            "index_get_backward: index 4 .* dimension 0",
        ),
        "embedding": (lambda: run["embedding"](i, x), "embedding: index 4 .* use 0 to 3"),
        "embedding_backward": (lambda: run["embedding_backward"](g, i, rows=4), "embedding_backward: index 4"),
        "bincount": (lambda: run["bincount"](i, size=4), "bincount: index 4"),
    }


def wait() -> None:
    """Wait for the kernels, which raises what they reported."""
    on_device(np.zeros(1)).numpy()


@pytest.mark.parametrize(
    "name", ["get", "negative", "put", "add", "backward", "embedding", "embedding_backward", "bincount"]
)
def test_index_errors_are_raised_at_the_next_synchronisation(name: str) -> None:
    call, message = calls()[name]
    call()
    with pytest.raises(IndexRangeError, match=message):
        wait()
    wait()  # raised once


def test_bad_indices_read_zeros_and_write_nothing() -> None:
    x, bad = on_device(np.arange(1.0, 5.0)), on_device(np.array([2, 9, -7]))
    got = registry["index_get"](x, bad, dims=(0,))
    put = registry["index_put"](x, -1.0, bad, dims=(0,))
    with pytest.raises(IndexRangeError):
        wait()
    assert got.numpy().tolist() == [3, 0, 0]
    assert put.numpy().tolist() == [1, 2, -1, 4]


# --- Transposed copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "order"), [((70, 40), (1, 0)), ((3, 70, 40), (0, 2, 1)), ((20, 3, 33), (2, 1, 0))])
@pytest.mark.parametrize("dtype", [float32, bfloat16, float64, int32])
def test_transposed_copy(shape: tuple[int, ...], order: tuple[int, ...], dtype: DType) -> None:
    values = np.random.default_rng(4).integers(-99, 99, shape).astype(dtype.numpy)
    x = on_device(values)
    turned = x.view(tuple(shape[d] for d in order), tuple(x.strides[d] for d in order))
    out = empty(turned.shape, float64, CUDA)
    copy(out, turned)
    assert np.array_equal(out.numpy(), values.transpose(order).astype(np.float64))
