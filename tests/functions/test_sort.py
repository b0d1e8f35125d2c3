"""Sorting, counting and finding as users call them: torch's answers, order of equals and NaN, sizes from values."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import genesis
from genesis.backend import cpu
from genesis.errors import DTypeError, IndexRangeError, ShapeError, UsageError
from genesis.functions.create import tensor
from tests.functions.torch_tables import difference, load

INPUTS, CALLS = load("sort")
NAMES = sorted({call["call"] for call in CALLS})


# --- torch's answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_values_types_shapes_gradients_and_refusals_are_torchs(name: str) -> None:
    calls = [call for call in CALLS if call["call"] == name]
    wrong = [f"{c['x']} {c['args']} {c['kwargs']}: {d}" for c in calls if (d := difference(c, INPUTS))]
    assert not wrong, "\n".join(wrong)


def test_the_table_covers_every_function() -> None:
    assert set(NAMES) == {"sort", "argsort", "topk", "nonzero", "bincount", "unique"}


def test_the_comparison_notices_another_order() -> None:
    call = copy.deepcopy(next(c for c in CALLS if c["call"] == "argsort" and c["x"] == "line"))
    assert difference(call, INPUTS) == ""
    order = call["outs"][0]["values"]
    order[0], order[1] = order[1], order[0]
    assert "elements differ" in difference(call, INPUTS)


# --- Order ------------------------------------------------------------------------------------------------------------


def _expected_order(values: np.ndarray, descending: bool) -> np.ndarray:
    """Stable, by comparing float64 values; NaN is the largest."""
    wide = values.astype(np.float64)

    def key(i: int) -> tuple[bool, float]:
        nan = bool(np.isnan(wide[i]))
        value = 0.0 if nan else float(wide[i])
        return (not nan, -value) if descending else (nan, value)

    return np.array(sorted(range(len(values)), key=key), np.int64)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("descending", [False, True])
@given(data=st.data())
def test_floats_sort_stably_with_nan_as_the_largest(dtype: Any, descending: bool, data: st.DataObject) -> None:
    some = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 6e-8, -6e-8]
    elements = st.one_of(st.sampled_from(some), st.floats(width=16))
    values = data.draw(hnp.arrays(np.float64, st.integers(0, 30), elements=elements)).astype(dtype)
    found = tensor(values).sort(descending=descending, stable=True)
    want = _expected_order(values, descending)
    np.testing.assert_array_equal(found.indices.numpy(), want)
    assert found.values.numpy().tobytes() == values[want].tobytes()
    k = data.draw(st.integers(0, len(values)))
    assert tensor(values).topk(k, largest=descending).indices.tolist() == want[:k].tolist()


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("descending", [False, True])
def test_integers_sort_over_their_whole_range(dtype: str, descending: bool) -> None:
    kind = np.dtype(dtype)
    ends = [0, 1] if dtype == "bool" else [np.iinfo(kind).min, -1 if kind.kind == "i" else 0, 0, np.iinfo(kind).max]
    values = np.random.default_rng(0).permutation(np.array(ends * 9, kind))
    found = tensor(values).sort(descending=descending)
    want = sorted(range(len(values)), key=lambda i: -int(values[i]) if descending else int(values[i]))
    assert found.indices.tolist() == want
    np.testing.assert_array_equal(found.values.numpy(), values[want])


@pytest.mark.parametrize("threads", [1, 3])
def test_large_sorts_are_stable_for_any_number_of_threads(threads: int) -> None:
    values = np.random.default_rng(1).integers(0, 50, (37, 5001)).astype(np.float32)
    before = cpu._workers.count
    try:
        cpu.set_threads(threads)
        found = tensor(values).sort(1)
        best = tensor(values).topk(40, 1)
        columns = tensor(values).argsort(0, descending=True)
    finally:
        cpu.set_threads(before)
    np.testing.assert_array_equal(found.indices.numpy(), np.argsort(values, axis=1, kind="stable"))
    np.testing.assert_array_equal(best.indices.numpy(), np.argsort(-values, axis=1, kind="stable")[:, :40])
    np.testing.assert_array_equal(columns.numpy(), np.argsort(-values, axis=0, kind="stable"))


def test_gradients_return_to_where_elements_came_from() -> None:
    x = tensor([[3.0, 1.0, 2.0], [4.0, 6.0, 5.0]], requires_grad=True)
    x.sort(1).values.backward(tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert x.grad.tolist() == [[3, 1, 2], [4, 6, 5]]
    x.grad = None
    genesis.topk(x, 1, dim=0).values.backward(tensor([[1.0, 2.0, 3.0]]))
    assert x.grad.tolist() == [[0, 0, 0], [1, 2, 3]]


# --- Sizes that depend on values --------------------------------------------------------------------------------------


def test_nonzero_of_a_strided_view() -> None:
    x = tensor(np.array([[0, 1, 2], [3, 0, 4]]))
    assert x.T.nonzero().tolist() == [[0, 1], [1, 0], [2, 0], [2, 1]]
    rows, columns = x[:, ::2].nonzero(as_tuple=True)
    assert (rows.tolist(), columns.tolist()) == ([0, 1, 1], [1, 0, 1])


def test_nan_is_not_zero_and_no_two_nans_are_equal() -> None:
    x = tensor([np.nan, 0.0, np.nan, -0.0])
    assert x.nonzero().tolist() == [[0], [2]]
    values, counts = x.unique(return_counts=True)
    assert (values.tolist()[0], counts.tolist()) == (0, [2, 1, 1])


def test_bincount_sums_weights_in_float64() -> None:
    x = tensor(np.zeros(3, np.int64))
    assert genesis.bincount(x, tensor([1.0, 2.0**-24, 2.0**-24])).tolist() == [1 + 2.0**-23]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: tensor([1.0]).topk(2), ShapeError, r"topk of shape \(1,\): dimension 0 has 1 elements, k is 2"),
        (lambda: tensor([1.0]).sort(1), IndexRangeError, r"sort of shape \(1,\): dimension 1"),
        (lambda: tensor([1.0]).sort(0, axis=0), UsageError, "sort got both dim and axis"),
        (lambda: tensor([1.0]).bincount(), DTypeError, "bincount takes integers"),
        (lambda: tensor([-1]).bincount(), IndexRangeError, "bincount: -1 is not between"),
        (lambda: tensor([1]).bincount(minlength=-1), UsageError, "minlength -1 is negative"),
        (lambda: genesis.nonzero([1]), DTypeError, "nonzero takes a tensor"),
    ],
)
def test_errors_name_function_and_values(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
