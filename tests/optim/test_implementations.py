"""plain, foreach and fused agree; results depend neither on threads nor on how a buffer is cut into tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from genesis import optim
from genesis.array import Array, from_numpy
from genesis.backend import cpu
from genesis.functions.create import tensor
from genesis.op import registry
from genesis.ops.gradients import total_norm
from genesis.optim.optimizer import Optimizer
from genesis.tensor import Tensor

KINDS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ELEMENTWISE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    *((each.__name__, {"lr": 0.05}) for each in optim.OPTIMIZERS.values() if each.elementwise),
)
MATRICES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Adafactor", {"weight_decay": 0.1}),
    ("Muon", {}),
    ("Muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
)
SHAPES = ((40, 30), (17,), (), (30, 40), (3, 5, 7))


def trained(name: str, settings: dict[str, Any], scale: Any = None, steps: int = 5) -> list[Tensor]:
    """Parameters after some steps on random gradients; the third has none in step 2."""
    rng = np.random.default_rng(3)
    params: list[Tensor] = [tensor(rng.standard_normal(s).astype(np.float32), requires_grad=True) for s in SHAPES]
    made: Optimizer = getattr(optim, name)(params, **settings)
    for step in range(steps):
        made.zero_grad()
        for i, p in enumerate(params):
            grad = tensor(rng.standard_normal(p.shape).astype(np.float32))
            p.grad = None if (i, step) == (2, 1) else grad
        made.step(grad_scale=scale)
    return params


def values(params: list[Tensor]) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1) for p in params])


@pytest.mark.parametrize(("name", "settings"), ELEMENTWISE)
def test_elementwise_rules_agree_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    plain, foreach, fused = (values(trained(name, {**settings, **kind})) for kind in KINDS.values())
    np.testing.assert_array_equal(foreach, fused)
    np.testing.assert_array_equal(plain, fused)


@pytest.mark.parametrize(("name", "settings"), ELEMENTWISE)
def test_with_a_gradient_scale_only_the_scaling_is_rounded_differently(name: str, settings: dict[str, Any]) -> None:
    scale = tensor(0.37)
    plain, foreach, fused = (values(trained(name, {**settings, **kind}, scale)) for kind in KINDS.values())
    np.testing.assert_array_equal(foreach, fused)
    np.testing.assert_allclose(plain, fused, rtol=0, atol=5 * 2**-22)  # 5 steps, parameters below 4
    if name == "SGD":  # steps of the others do not depend on the size of gradients
        assert np.abs(plain - values(trained(name, {**settings, "foreach": False}))).max() > 1e-2


@pytest.mark.parametrize(("name", "settings"), MATRICES)
def test_matrix_rules_agree(name: str, settings: dict[str, Any]) -> None:
    plain, foreach, fused = (values(trained(name, {**settings, **kind})) for kind in KINDS.values())
    np.testing.assert_array_equal(foreach, fused)
    np.testing.assert_allclose(plain, fused, rtol=0, atol=2e-6)


ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


def elementwise_calls() -> dict[str, Any]:
    """Each elementwise op as `call(param, grad, state, state)`."""
    momentum = {"momentum": 0.9, "dampening": 0.1, "nesterov": True, "weight_decay": 0.1}
    return {
        "adamw": lambda p, g, m, v: registry["adamw_step"](p, g, m, v, 1e-2, 3, 0.7, **ADAM),
        "adam": lambda p, g, m, v: registry["adamw_step"](p, g, m, v, 1e-2, 3, 0.7, **{**ADAM, "decoupled": False}),
        "lion": lambda p, g, m, v: registry["lion_step"](
            p, g, m, 1e-2, 3, 0.7, beta1=0.9, beta2=0.99, weight_decay=0.1
        ),
        "sgd": lambda p, g, m, v: registry["sgd_step"](p, g, 1e-2, 3, 0.7, weight_decay=0.1),
        "momentum": lambda p, g, m, v: registry["sgd_momentum_step"](p, g, m, 1e-2, 2, 0.7, **momentum),
    }


def flat_arrays(size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(size).astype(np.float32) for _ in range(4)]
    made[3] = np.abs(made[3])
    made[1][::97] = 0
    return made


@pytest.fixture
def threads() -> Iterator[None]:
    before = cpu._workers.count
    yield
    cpu.set_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", elementwise_calls())
def test_threads_and_cuts_do_not_change_a_bit(name: str) -> None:
    """Sizes are odd, so that cuts fall inside vector registers and blocks."""
    call, size = elementwise_calls()[name], (1 << 18) + 12_345
    cpu.set_threads(1)
    expected = flat_arrays(size)
    call(*(from_numpy(x) for x in expected))
    for count in (2, 3):
        cpu.set_threads(count)
        found = flat_arrays(size)
        call(*(from_numpy(x) for x in found))
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), count
    pieces = flat_arrays(size)
    bounds = [0, 1, 8, 4097, 100_003, size]
    for a, b in itertools.pairwise(bounds):
        call(*(from_numpy(x[a:b]) for x in pieces))
    assert all(np.array_equal(a, b) for a, b in zip(pieces, expected, strict=True))


@pytest.mark.usefixtures("threads")
def test_the_norm_does_not_depend_on_threads() -> None:
    values = from_numpy(np.random.default_rng(1).standard_normal(9_000_001).astype(np.float32))
    found = set()
    for count in (1, 2, 3):
        cpu.set_threads(count)
        found.add(total_norm(values, ord=2.0).item())
    assert len(found) == 1
    assert found.pop() == pytest.approx(np.linalg.norm(values.view_np().astype(np.float64)), rel=1e-7)


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_a_narrow_gradient_counts_as_its_exact_value(wide: str, narrow: str) -> None:
    rng = np.random.default_rng(5)
    grad = tensor(rng.standard_normal(1000), dtype=narrow)
    results = []
    for given in (grad, grad.to(wide)):
        arrays = [from_numpy(rng_values.astype(wide)) for rng_values in np.random.default_rng(6).random((3, 1000))]
        registry["adamw_step"](arrays[0], given.array, arrays[1], arrays[2], 1e-2, 3, 0.7, **ADAM)
        results.append(arrays[0].view_np().copy())
    np.testing.assert_array_equal(*results)


def test_denormal_infinite_and_nan_averages_in_lion() -> None:
    tiny = np.float32(6e-45)  # the fourth number above 0
    grad = np.array([tiny, -tiny, 0.0, -0.0, np.inf, -np.inf, np.nan, 3e38], np.float32)
    param, average = np.zeros(8, np.float32), np.array(grad)
    registry["lion_step"](
        *(from_numpy(x) for x in (param, grad, average)), 0.5, 1, 1.0, beta1=0.5, beta2=0.99, weight_decay=0.0
    )
    np.testing.assert_array_equal(param, [-0.5, 0.5, 0, 0, -0.5, 0.5, np.nan, -0.5])


def test_learning_rate_step_and_scale_may_be_arrays() -> None:
    def run(*scalars: Any) -> np.ndarray:
        arrays = flat_arrays(100)
        registry["adamw_step"](*(from_numpy(x) for x in arrays), *scalars, **ADAM)
        return arrays[0]

    def number(value: float) -> Array:
        return from_numpy(np.array(value))

    np.testing.assert_array_equal(run(0.25, 3, 0.5), run(number(0.25), number(3.0), number(0.5)))
