"""genesis.func: gradients of functions, nested, with auxiliary results, and modules called with other parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis import func, nn
from genesis.errors import GenesisError, UsageError
from tests.autograd.scenarios import leaf


def test_nested_gradients() -> None:
    x = genesis.tensor(2.0)
    third = func.grad(func.grad(func.grad(lambda x: x**4)))(x)
    assert third.item() == 48
    assert not third.requires_grad
    assert x.grad is None


def test_argnums_and_trees() -> None:
    def f(p: Any, x: Any) -> Any:
        return (p["w"] * x + p["b"][0]).sum()

    p, x = {"w": genesis.tensor([1.0, 2.0]), "b": [genesis.tensor(3.0)]}, genesis.tensor([4.0, 5.0])
    (gp, gx), value = func.grad_and_value(f, argnums=(0, 1))(p, x)
    assert gp["w"].tolist() == [4, 5]
    assert gp["b"][0].item() == 2
    assert gx.tolist() == [1, 2]
    assert value.item() == 20
    grads, aux = func.grad(lambda x: ((x * x).sum(), x + 1), has_aux=True)(x)
    assert grads.tolist() == [8, 10]
    assert aux.tolist() == [5, 6]
    assert not aux.requires_grad
    assert func.grad(lambda x, y: y.sum(), argnums=0)(x, x).tolist() == [0, 0]


def test_the_outer_tape_sees_the_gradient() -> None:
    x, w = leaf(genesis, 1, 2), leaf(genesis, 3, 4)
    slope = func.grad(lambda x: (w * x**3).sum())(x)
    slope.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [18, 48])
    np.testing.assert_allclose(w.grad.numpy(), [3, 12])
    with genesis.no_grad():
        assert not func.grad(lambda x: (w * x**3).sum())(x).requires_grad


def test_vjp() -> None:
    x, y = genesis.tensor([1.0, 2.0]), genesis.tensor([3.0, 4.0])
    value, pull, aux = func.vjp(lambda x, y: ((x * y, x + y), "aux"), x, y, has_aux=True)
    assert aux == "aux"
    assert [v.tolist() for v in value] == [[3, 8], [4, 6]]
    ones = genesis.ones(2)
    for _ in range(2):  # the graph is kept
        assert [g.tolist() for g in pull((ones, ones))] == [[4, 5], [2, 3]]
    with pytest.raises(UsageError):
        pull(ones)


@pytest.mark.parametrize("result", [3.0, genesis.ones(2), None])
def test_what_is_not_one_number_is_refused(result: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        func.grad(lambda x: result)(genesis.ones(2))
    assert isinstance(caught.value, GenesisError)


def test_functional_call_and_the_gradients_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight  # tied
    names = {name: genesis.zeros_like(p) for name, p in model.named_parameters()}
    x = genesis.ones(1, 2)
    before = model(x).detach()
    assert func.functional_call(model, names, x).tolist() == [[0, 0]]
    np.testing.assert_array_equal(model(x).detach().numpy(), before.numpy())
    grads = func.grad(lambda p: func.functional_call(model, p, (x,)).sum())({k: v + 1 for k, v in names.items()})
    assert grads.keys() == names.keys()
    assert grads["1.bias"].tolist() == [1, 1]
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="twice"):
        func.functional_call(model, (names, names), x)
    with pytest.raises(RuntimeError, match="unknown names"):
        func.functional_call(model, {"other": x}, x, strict=True)
