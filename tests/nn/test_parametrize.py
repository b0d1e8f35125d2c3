"""Parametrized weights: what is trained, saved, assigned, shared and removed, and what the weights are."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.errors import UsageError
from genesis.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, a: Any) -> Any:
        return a.triu()


class Counted(nn.Module):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x.exp()


class Outer(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x[:, None] * y[None]

    def right_inverse(self, z: Any) -> Any:
        return z[:, 0], z[0]


class Cut(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:1]


def layer(n: int = 3, k: int = 3) -> nn.Linear:
    made = nn.Linear(k, n, dtype="float64")
    made.weight.data = genesis.tensor(np.random.default_rng(n + k).standard_normal((n, k)))
    return made


def test_a_parametrized_weight() -> None:
    made = layer()
    weight, whole = made.weight, made.weight.detach().clone()
    assert parametrize.register_parametrization(made, "weight", Symmetric()) is made
    assert made.parametrizations.weight.original is weight and type(made).__name__ == "ParametrizedLinear"
    assert isinstance(made, nn.Linear) and parametrize.type_before_parametrizations(made) is nn.Linear
    assert list(made.state_dict()) == ["bias", "parametrizations.weight.original"]
    expected = whole.triu() + whole.triu(1).mT
    assert (made.weight == expected).all()
    made(genesis.ones(1, 3, dtype="float64")).sum().backward()
    np.testing.assert_array_equal(weight.grad.numpy(), np.triu(np.full((3, 3), 2.0)) - np.eye(3))  # type: ignore[union-attr]
    made.weight = 3 * expected
    np.testing.assert_allclose(made.weight.detach().numpy(), 3 * expected.numpy())
    copied = copy.deepcopy(made)
    copied.parametrizations.weight.original.data.zero_()
    assert (copied.weight == 0).all() and (made.weight != 0).any()
    counted = Counted()
    parametrize.register_parametrization(made, "weight", counted)
    before = counted.calls
    with parametrize.cached():
        assert made.weight is made.weight
        with parametrize.cached():
            assert made.weight is made.weight
    assert counted.calls == before + 1 and made.weight is not made.weight
    with pytest.raises(UsageError, match="Counted does not define right_inverse"):
        made.weight = whole
    value = made.weight.detach()
    parametrize.remove_parametrizations(made, "weight")
    assert type(made) is nn.Linear and made.weight is weight and (weight == value).all()
    assert not parametrize.is_parametrized(made) and not hasattr(made, "parametrizations")


def test_several_originals_buffers_and_transfer() -> None:
    made = parametrize.register_parametrization(layer(), "weight", Outer())
    parametrize.register_parametrization(made, "bias", Counted())
    names = ["parametrizations.weight.original0", "parametrizations.weight.original1", "parametrizations.bias.original"]
    assert [n for n, _ in made.named_parameters()] == names
    assert parametrize.is_parametrized(made, "bias") and not parametrize.is_parametrized(made, "other")
    other = parametrize.transfer_parametrizations_and_params(made, layer(), "weight")
    assert other.parametrizations.weight.original1 is made.parametrizations.weight.original1
    assert (other.weight == made.weight).all() and not parametrize.is_parametrized(other, "bias")
    with pytest.raises(UsageError, match="2 originals"):
        parametrize.remove_parametrizations(made, "weight", leave_parametrized=False)
    value = made.weight.detach()
    parametrize.remove_parametrizations(made, "weight")
    assert isinstance(made.weight, nn.Parameter) and (made.weight == value).all() and parametrize.is_parametrized(made)
    norm = parametrize.register_parametrization(nn.BatchNorm1d(2), "running_mean", Counted())
    assert norm.running_mean.tolist() == [1, 1] and "parametrizations.running_mean.original" in norm.state_dict()
    parametrize.remove_parametrizations(norm, "running_mean", leave_parametrized=False)
    assert norm.running_mean.tolist() == [0, 0] and "running_mean" in dict(norm.named_buffers())


def test_what_cannot_be_meant() -> None:
    for call, message in (
        (lambda: parametrize.register_parametrization(layer(), "weight", Cut()), "has the shape"),
        (lambda: parametrize.register_parametrization(layer(), "weigth", Cut()), "no parameter or buffer 'weigth'"),
        (lambda: parametrize.remove_parametrizations(layer(), "weight"), "no parametrization of 'weight'"),
        (lambda: parametrizations.orthogonal(layer(), orthogonal_map="qr"), "orthogonal_map is 'qr'"),
        (lambda: parametrizations.orthogonal(layer(), "bias"), "two or more dimensions"),
        (lambda: parametrizations.spectral_norm(layer(), n_power_iterations=0), "n_power_iterations is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for norm in (parametrizations.spectral_norm, parametrizations.weight_norm):
        with pytest.raises(IndexError, match="got dim 2"):
            norm(layer(), dim=2)
    cut = parametrize.register_parametrization(layer(), "weight", Cut(), unsafe=True)
    assert cut.weight.shape == (1, 3)


@pytest.mark.parametrize(("dim", "axes"), [(0, 1), (1, 0), (None, (0, 1)), (-1, (0, 1))])
def test_weight_norm_splits_norms_and_directions(dim: int | None, axes: Any) -> None:
    whole = layer(4, 3).weight.detach().numpy().copy()
    made = parametrizations.weight_norm(layer(4, 3), dim=dim)
    norms = np.sqrt((whole**2).sum(axes, keepdims=isinstance(axes, int)))
    np.testing.assert_allclose(made.parametrizations.weight.original0.detach().numpy(), norms)
    np.testing.assert_allclose(made.weight.detach().numpy(), whole)
    made.parametrizations.weight.original1.data.mul_(7)
    np.testing.assert_allclose(made.weight.detach().numpy(), whole)
    old = {"bias": genesis.ones(4), "weight_g": genesis.tensor(2 * norms), "weight_v": genesis.tensor(whole)}
    made.load_state_dict(old)
    np.testing.assert_allclose(made.weight.detach().numpy(), 2 * whole)


@pytest.mark.parametrize("dim", [None, 1])
def test_spectral_norm_is_1(dim: int | None) -> None:
    made = parametrizations.spectral_norm(layer(4, 3), n_power_iterations=20, dim=dim)
    assert list(made.state_dict())[-2:] == ["parametrizations.weight.0._u", "parametrizations.weight.0._v"]
    assert np.linalg.svd(made.weight.detach().numpy())[1][0] == pytest.approx(1, abs=1e-6)
    made(genesis.ones(2, 3, dtype="float64")).sum().backward()
    assert made.parametrizations.weight.original.grad is not None
    u = made.eval().parametrizations.weight[0]._u.clone()
    _ = made.weight
    assert (made.parametrizations.weight[0]._u == u).all()
    vector = parametrizations.spectral_norm(nn.LayerNorm(4))
    assert vector.weight.tolist() == [0.5] * 4


@pytest.mark.parametrize("use_trivialization", [True, False])
@pytest.mark.parametrize("kind", ["matrix_exp", "cayley", "householder", None])
@pytest.mark.parametrize(("n", "k"), [(4, 4), (5, 3), (3, 5)])
def test_orthogonal_weights_stay_orthogonal(n: int, k: int, kind: str | None, use_trivialization: bool) -> None:
    made = layer(n, k)
    if kind in ("matrix_exp", "cayley") and not use_trivialization:
        with pytest.raises(NotImplementedError):
            parametrizations.orthogonal(made, orthogonal_map=kind, use_trivialization=False).weight = made.weight
    parametrizations.orthogonal(made, orthogonal_map=kind, use_trivialization=use_trivialization)
    optimizer = genesis.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(2):
        weight = made.weight
        product = weight.mT @ weight if n >= k else weight @ weight.mT
        np.testing.assert_allclose(product.detach().numpy(), np.eye(min(n, k)), atol=1e-12)
        (weight * genesis.arange(k)).sum().backward()
        optimizer.step()
    if use_trivialization:
        made.weight = genesis.eye(n, k, dtype="float64")
        np.testing.assert_allclose(made.weight.detach().numpy(), np.eye(n, k), atol=1e-12)
