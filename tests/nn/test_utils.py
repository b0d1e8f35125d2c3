"""Gradient clipping against torch's numbers, and parameters as one vector."""

from __future__ import annotations

import math

import numpy as np
import pytest

from genesis.errors import NumericError, ShapeError
from genesis.functions.create import tensor, zeros
from genesis.nn import utils
from genesis.tensor import Tensor
from tests.optim.trajectories import FIXTURE, inputs


def with_gradients(grads: list[np.ndarray], dtype: str = "float32") -> list[Tensor]:
    params = [zeros(*g.shape, dtype=dtype).requires_grad_() for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = tensor(g, dtype=dtype)
    return params


def first_gradients() -> list[np.ndarray]:
    return [g for g in inputs("SGD")[1][0] if g is not None]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf])
def test_norms_and_clipped_gradients_are_torchs(order: float, max_norm: float) -> None:
    with np.load(FIXTURE, allow_pickle=False) as stored:
        expected = stored[f"clip/{order}/{max_norm}"]
    params = with_gradients(first_gradients())
    norm = utils.clip_grad_norm_(params, max_norm, order)
    assert isinstance(norm, Tensor) and norm.shape == () and norm.dtype.name == "float32"
    assert norm.item() == pytest.approx(expected[0], rel=1e-6)
    found = np.concatenate([p.grad.numpy().reshape(-1) for p in params])
    np.testing.assert_allclose(found, expected[1:], rtol=1e-6)


def test_small_gradients_are_left_alone_to_the_bit() -> None:
    params = with_gradients(first_gradients())
    utils.clip_grad_norm_(params, 1e6)
    for p, g in zip(params, first_gradients(), strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), g)


def test_what_has_no_gradient_is_skipped() -> None:
    one = zeros(3).requires_grad_()
    assert utils.clip_grad_norm_(one, 1.0).item() == 0
    assert utils.clip_grad_norm_([], 1.0).item() == 0
    two = with_gradients([np.full((2,), 3.0)])[0]
    assert utils.clip_grad_norm_([one, two], 1e9).item() == pytest.approx(3 * math.sqrt(2))
    assert one.grad is None


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_accumulate_wide(dtype: str) -> None:
    """4096 squares of 0.5 would stop growing at 512 in bfloat16."""
    params = with_gradients([np.full((4096,), 0.5)], dtype)
    norm = utils.clip_grad_norm_(params, 16.0)
    assert norm.item() == 32.0 and norm.dtype.name == ("float64" if dtype == "float64" else "float32")
    assert params[0].grad.dtype.name == dtype
    np.testing.assert_allclose(params[0].grad.double().numpy(), 0.25, rtol=2**-8)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_norms(bad: float) -> None:
    params = with_gradients([np.array([1.0, bad]), np.array([2.0])])
    with pytest.raises(NumericError, match=r"total norm of order 2 .* (inf|nan)"):
        utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert params[1].grad.tolist() == [2.0]  # an error comes before any change
    assert not math.isfinite(utils.clip_grad_norm_(params, 1.0).item())


def test_clip_scale_is_at_most_one() -> None:
    assert utils.clip_scale(tensor(0.5), 1.0).item() == 1.0
    assert utils.clip_scale(tensor(4.0), 1.0).item() == pytest.approx(0.25, rel=1e-6)
    assert utils.clip_scale(tensor(0.0), 1.0).item() == 1.0


def test_clip_grad_value() -> None:
    params = with_gradients([np.array([[-3.0, 0.25], [0.75, math.inf]])])
    utils.clip_grad_value_(params, 0.5)
    assert params[0].grad.tolist() == [[-0.5, 0.25], [0.5, 0.5]]


def test_vectors_and_back() -> None:
    a, b = tensor([[1.0, 2.0]], requires_grad=True), tensor([3.0], requires_grad=True)
    vector = utils.parameters_to_vector([a, b])
    assert vector.tolist() == [1, 2, 3] and vector.requires_grad
    utils.vector_to_parameters(vector.detach() * 2, [a, b])
    assert a.tolist() == [[2, 4]] and b.tolist() == [6] and a.requires_grad
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        utils.vector_to_parameters(tensor([1.0]), [a, b])


def test_a_known_norm_scales_gradients_down_and_never_up() -> None:
    params = with_gradients([np.array([3.0, 4.0])])
    utils.clip_grads_with_norm_(params, 5.0, tensor(2.0))
    np.testing.assert_array_equal(params[0].grad.numpy(), [3, 4])
    utils.clip_grads_with_norm_(iter(params), 5.0, tensor(10.0))
    np.testing.assert_allclose(params[0].grad.numpy(), [1.5, 2], rtol=1e-6)
