"""Complex tensors for rotary embeddings: numpy's values, gradients of the pairs, views and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn

RNG = np.random.default_rng(0)
PAIRS = RNG.standard_normal((2, 3, 4, 2))
Z = PAIRS[..., 0] + 1j * PAIRS[..., 1]
TURN = np.exp(1j * np.arange(12.0).reshape(3, 4))


def made() -> tuple[Any, Any]:
    angles = genesis.arange(12.0, dtype="float64").view(3, 4)
    return genesis.view_as_complex(genesis.tensor(PAIRS)), genesis.polar(genesis.ones_like(angles), angles)


@pytest.mark.parametrize(
    "compute",
    [
        lambda z, f: z * f, lambda z, f: f * 1j, lambda z, f: 2.5 * f, lambda z, f: z.conj(),
        lambda z, f: abs(z), lambda z, f: z.real, lambda z, f: z.imag,
        lambda z, f: f.reshape(-1, 2), lambda z, f: f[:, None, -2:], lambda z, f: z[..., 1], lambda z, f: z[1, :, 2],
        lambda z, f: f.transpose(0, 1) if isinstance(f, genesis.Tensor) else f.T,
    ],
)  # fmt: skip
def test_values_are_those_of_numpy(compute: Callable[..., Any]) -> None:
    np.testing.assert_allclose(compute(*made()).numpy(), compute(Z, TURN), rtol=1e-12)


def test_real_operands_join_in_either_place() -> None:
    _, f = made()
    factors = genesis.arange(4)
    for product in (f * factors, factors * f):
        np.testing.assert_allclose(product.numpy(), TURN * np.arange(4), rtol=1e-12, atol=1e-15)


def test_shapes_and_types() -> None:
    z, f = made()
    assert (f.unsqueeze(-1).shape, f[None].expand(5, 3, 4).shape, z.flatten(1).shape) == ((3, 4, 1), (5, 3, 4), (2, 12))
    assert (z.permute(2, 0, 1).shape, f.unsqueeze(0).squeeze(0).shape, len(z), z.ndim) == ((4, 2, 3), (3, 4), 2, 3)
    assert f.dtype is genesis.complex128
    assert f.to(genesis.complex64).dtype is genesis.cfloat
    assert genesis.is_complex(f)
    assert not genesis.is_complex(f.real)
    assert repr(f[0, :2]) == "tensor([1.0000+0.0000j, 0.5403+0.8415j])"


def test_the_gradient_goes_through_the_pairs() -> None:
    def loss(x: Any) -> Any:
        z = genesis.view_as_complex(x)
        return (z.conj() * (3 * z)).abs().sum() + genesis.view_as_real(z * made()[1]).pow(3).sum()

    assert genesis.autograd.gradcheck(loss, (genesis.tensor(PAIRS, requires_grad=True),))
    zero = genesis.zeros(1, 2, requires_grad=True)
    genesis.view_as_complex(zero).abs().sum().backward()
    assert zero.grad.tolist() == [[0.0, 0.0]]


def test_pairs_share_memory_and_move_with_a_module() -> None:
    pairs = genesis.zeros(2, 2)
    z = genesis.view_as_complex(pairs)
    z.real[0] = 5
    assert pairs.tolist() == [[5.0, 0.0], [0.0, 0.0]]
    assert genesis.view_as_real(z).data_ptr() == pairs.data_ptr()
    module = nn.Module()
    module.register_buffer("turn", z, persistent=False)
    assert module.double().turn.tolist() == [5, 0]
    assert genesis.tensor([1, 2]).to(genesis.complex64).tolist() == [1, 2]
    assert genesis.tensor([-1.0, float("nan")]).angle()[0].item() == pytest.approx(np.pi)
    assert genesis.view_as_complex(genesis.zeros(0, 2)).shape == (0,)


@pytest.mark.parametrize(
    ("compute", "error"),
    [
        (lambda z: genesis.sum(z), TypeError),
        (lambda z: z + z, TypeError),
        (lambda z: z.to(genesis.float32), TypeError),
        (lambda z: genesis.ones(2) @ z, TypeError),
        (lambda z: genesis.zeros(2, dtype=genesis.complex64), TypeError),
        (lambda z: genesis.imag(genesis.ones(2)), TypeError),
        (lambda z: genesis.complex(genesis.ones(1), genesis.ones(1).double()), TypeError),
        (lambda z: genesis.polar(genesis.tensor([1]), genesis.tensor([1])), TypeError),
        (lambda z: genesis.view_as_complex(genesis.ones(3, 3)), RuntimeError),
        (lambda z: genesis.view_as_complex(genesis.ones(2, 4).t()), RuntimeError),
        (lambda z: z.view(5), RuntimeError),
    ],
)  # fmt: skip
def test_what_complex_tensors_cannot_do_is_an_error(compute: Callable[[Any], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        compute(made()[0])
