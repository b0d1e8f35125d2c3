"""Reductions as users call them: torch's answers, forms and refusals; accuracy; what gradients are at kinks."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.backend import cpu
from genesis.errors import DTypeError, GradientError, IndexRangeError, ShapeError, UsageError
from genesis.functions.create import tensor
from tests.functions.torch_tables import difference, load

INPUTS, CALLS = load("reduce")
NAMES = sorted({call["call"] for call in CALLS})


# --- torch's answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_values_types_shapes_gradients_and_refusals_are_torchs(name: str) -> None:
    calls = [call for call in CALLS if call["call"] == name]
    wrong = [f"{c['x']} {c['args']} {c['kwargs']}: {d}" for c in calls if (d := difference(c, INPUTS))]
    assert not wrong, "\n".join(wrong)


def test_the_table_covers_every_reduction() -> None:
    assert set(NAMES) == {
        "sum", "mean", "prod", "amax", "amin", "any", "all", "var", "std", "norm", "logsumexp", "max", "min", "argmax",
        "argmin", "cumsum", "count_nonzero",
    }  # fmt: skip


def _spoiled(change: str) -> dict[str, Any]:
    call = copy.deepcopy(next(c for c in CALLS if c["call"] == "max" and c["x"] == "ties" and c["args"] == [0]))
    if change == "value":
        call["outs"][0]["values"][0] += 1e-3
    elif change == "index":
        call["outs"][1]["values"][0] += 1
    elif change == "dtype":
        call["outs"][0]["dtype"] = "float64"
    elif change == "shape":
        call["outs"][0] |= {"shape": [1, 4], "values": [call["outs"][0]["values"]]}
    elif change == "gradient":
        call["grad"][0][0] += 1e-3
    elif change == "outputs":
        call["outs"].pop()
    elif change == "error":
        call["error"] = "RuntimeError"
    elif change == "accepted":
        call["args"] = [7]
    return call


@pytest.mark.parametrize("change", ["value", "index", "dtype", "shape", "gradient", "outputs", "error", "accepted"])
def test_the_comparison_with_torch_notices(change: str) -> None:
    assert difference(_spoiled(""), INPUTS) == ""
    assert difference(_spoiled(change), INPUTS)


# --- Forms ------------------------------------------------------------------------------------------------------------


def test_axis_is_another_name_for_dim() -> None:
    x = tensor([[1.0, 2.0], [3.0, 5.0]])
    assert x.sum(axis=0).tolist() == x.sum(0).tolist() == [4, 7]
    assert x.max(axis=1).indices.tolist() == [1, 1]
    assert x.cumsum(axis=1).tolist() == [[1, 3], [3, 8]]
    assert genesis.norm(x, axis=1, keepdim=True).shape == (2, 1)
    with pytest.raises(UsageError, match="sum got both dim and axis"):
        x.sum(0, axis=1)


def test_max_has_three_forms() -> None:
    x = tensor([[1.0, 4.0], [3.0, 2.0]])
    assert genesis.max(x).item() == 4
    values, indices = genesis.max(x, 1)
    assert (values.tolist(), indices.tolist()) == ([4, 3], [1, 0])
    assert genesis.min(x, dim=0).values.tolist() == [1, 2]
    assert genesis.max(x, tensor([[2.0, 2.0]])).tolist() == [[2, 4], [3, 2]]
    assert genesis.min(x, other=tensor(2.5)).tolist() == [[1, 2.5], [2.5, 2]]
    with pytest.raises(UsageError, match="maximum of two tensors takes no dim"):
        genesis.max(x, 1, other=x)


def test_function_and_method_are_one() -> None:
    assert genesis.Tensor.sum is genesis.sum
    assert genesis.Tensor.var is genesis.var


def test_sum_to_size_is_the_way_back_from_broadcasting() -> None:
    x = tensor(np.ones((2, 3, 4), np.float32), requires_grad=True)
    y = x.sum_to_size(3, 1)
    assert y.tolist() == [[8], [8], [8]]
    y.backward(tensor([[1.0], [2.0], [3.0]]))
    assert x.grad.tolist() == np.broadcast_to([[1], [2], [3]], (2, 3, 4)).tolist()


def test_out_receives_the_result_and_records_nothing() -> None:
    out = genesis.empty((2,))
    assert genesis.sum(tensor([[1.0, 2.0], [3.0, 4.0]]), 1, out=out) is out
    assert out.tolist() == [3, 7]
    with pytest.raises(GradientError, match="out= does not record"):
        genesis.mean(tensor([1.0], requires_grad=True), out=genesis.empty(()))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: tensor([1, 2]).mean(), DTypeError, "mean takes float tensors, got int64"),
        (lambda: tensor([1.0]).sum(1), IndexRangeError, r"sum of shape \(1,\): dimension 1 is out of range"),
        (lambda: tensor([[1.0]]).sum((0, 0)), ShapeError, r"sum of shape \(1, 1\): a dimension appears twice"),
        (lambda: genesis.zeros((0,)).amax(), ShapeError, "amax of shape .* no elements to choose from"),
        (lambda: genesis.zeros((3, 0)).argmax(1), ShapeError, "argmax of shape .* no elements"),
        (lambda: tensor([1.0]).norm("nuc"), DTypeError, "'nuc'"),
        (lambda: tensor([1.0]).cumsum(), UsageError, "cumsum needs a dimension"),
        (lambda: genesis.sum([1.0]), DTypeError, "sum takes a tensor, got list"),
        (lambda: genesis.sum(tensor([[1.0]])).sum_to_size(2), ShapeError, "sum_to_shape"),
    ],
)
def test_errors_name_function_and_values(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


# --- Values that are easy to get wrong --------------------------------------------------------------------------------


def test_two_byte_floats_accumulate_in_float32() -> None:
    for dtype in ("float16", "bfloat16"):
        ones = genesis.ones((70_000,), dtype=dtype)
        assert ones.mean().item() == 1
        assert ones.var(correction=0).item() == 0
        assert genesis.ones((1000, 3), dtype=dtype).sum(0).tolist() == [1000] * 3
        assert genesis.full((4096,), 200.0, dtype=dtype).norm().item() == 12800  # the squares sum to 163,840,000


def test_small_integers_sum_in_int64() -> None:
    x = tensor(np.full(1000, 127, np.int8))
    assert (x.sum().item(), x.sum().dtype) == (127_000, genesis.int64)
    assert tensor(np.array([2**62, 2**62 - 1, 2**62])).prod(0).dtype is genesis.int64


def test_norms_beyond_the_range_of_float32_squares() -> None:
    assert tensor([3e30, 4e30]).norm().item() == pytest.approx(5e30, rel=1e-6)
    assert tensor([3e-30, 4e-30]).norm().item() == pytest.approx(5e-30, rel=1e-6)
    assert tensor([[3e30, 4e30], [3.0, 4.0]]).norm(dim=1).tolist() == pytest.approx([5e30, 5.0], rel=1e-6)
    assert math.isinf(tensor([math.inf, 1.0]).norm().item())
    assert math.isnan(tensor([math.nan, 1.0]).norm().item())


def test_variance_of_values_far_from_zero() -> None:
    x = tensor(np.float32(1e4) + np.array([0.0, 1.0, 2.0, 3.0] * 1000, np.float32))
    assert x.var(correction=0).item() == pytest.approx(1.25, rel=1e-6)


def test_logsumexp_neither_overflows_nor_underflows() -> None:
    x = tensor([[1000.0, 1000.0], [-1000.0, -1000.0], [-math.inf, 0.0]])
    assert x.logsumexp(1).tolist() == pytest.approx([1000 + math.log(2), -1000 + math.log(2), 0], rel=1e-6)


def test_uint8_truth_is_uint8() -> None:
    x = tensor(np.array([[0, 0], [3, 0]], np.uint8))
    assert (x.any(1).tolist(), x.any(1).dtype) == ([0, 1], genesis.uint8)
    assert (x.all().item(), x.all().dtype) == (0, genesis.uint8)


def test_nan_wins_every_extremum() -> None:
    x = tensor([[1.0, math.nan, 3.0], [math.inf, 2.0, math.nan]])
    for dim in (0, 1):
        assert np.isnan(x.amax(dim).numpy()).sum() == np.isnan(x.numpy()).any(axis=dim).sum()
    assert x.argmax(1).tolist() == x.argmin(1).tolist() == [1, 2]
    assert math.isnan(x.min().item())


def test_a_repeated_view_counts_each_repetition() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    x.expand(5000, 2).sum().backward()
    assert x.grad.tolist() == [5000, 5000]


# --- Gradients at kinks -----------------------------------------------------------------------------------------------


def test_equal_extremes_share_the_gradient_and_an_index_takes_it_all() -> None:
    x = tensor([[2.0, 1.0, 2.0], [0.0, 0.0, 0.0]], requires_grad=True)
    x.amax(1).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.array([[0.5, 0, 0.5], [1 / 3] * 3], np.float32))
    x.grad = None
    x.max(1).values.sum().backward()
    assert x.grad.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_product_with_zeros_has_its_gradient() -> None:
    x = tensor([[2.0, 3.0, 4.0], [0.0, 3.0, 4.0], [0.0, 0.0, 4.0]], requires_grad=True)
    x.prod(1).sum().backward()
    assert x.grad.tolist() == [[12, 8, 6], [12, 0, 0], [0, 0, 0]]


def test_zero_norms_and_deviations_have_gradient_zero() -> None:
    for make in (
        lambda x: x.norm(), lambda x: x.norm(1), lambda x: x.norm(3), lambda x: x.norm(math.inf), lambda x: x.std(),
    ):  # fmt: skip
        x = genesis.zeros((3,), requires_grad=True)
        make(x).backward()
        assert x.grad.tolist() == [0, 0, 0]


def test_a_fully_masked_row_has_gradient_zero() -> None:
    x = tensor([[-math.inf, -math.inf], [0.0, 0.0]], requires_grad=True)
    x.logsumexp(1).sum().backward()
    assert x.grad.tolist() == [[0, 0], [0.5, 0.5]]


# --- Large tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_large_reductions_are_right_and_independent_of_threads(dtype: str) -> None:
    values = np.random.default_rng(3).integers(-8, 9, (1201, 1033))  # small integers: every partial sum is exact
    x = tensor(values, dtype=dtype)
    checks = {
        "sum": (lambda: x.sum(0), values.sum(0)),
        "amax": (lambda: x.amax(1), values.max(1)),
        "argmax": (lambda: x.argmax(1), values.argmax(1)),
        "argmin": (lambda: x.argmin(), values.argmin()),
        "count": (lambda: x.count_nonzero(), (values != 0).sum()),
        "any": (lambda: (x > 7).any(0), (values > 7).any(0)),
        "cumsum": (lambda: x[:, :100].cumsum(0), values[:, :100].cumsum(0)),
    }
    before = cpu._workers.count
    try:
        for name, (compute, want) in checks.items():
            for threads in (1, 3):
                cpu.set_threads(threads)
                np.testing.assert_array_equal(compute().numpy(), want, err_msg=f"{name} with {threads} threads")
    finally:
        cpu.set_threads(before)
