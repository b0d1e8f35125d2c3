"""Initialization: distributions, seeds, fans, and that nothing is recorded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from genesis.errors import ShapeError, UsageError
from genesis.functions.create import zeros
from genesis.nn import Linear, RMSNorm, init
from genesis.nn.parameter import Parameter
from genesis.random import Generator, get_state, manual_seed


def values(make: Any, *shape: int, **settings: Any) -> np.ndarray:
    parameter = Parameter(zeros(*shape))
    assert make(parameter, **settings) is parameter
    assert parameter.is_leaf and parameter.requires_grad and parameter.grad is None
    return np.asarray(parameter.detach().numpy())


SHAPE = (300, 200)
FEW = 5 / math.sqrt(60_000)  # five standard errors of a mean of that many


def test_constants() -> None:
    assert (values(init.zeros_, 3) == 0).all() and (values(init.ones_, 3) == 1).all()
    assert (values(init.constant_, 3, val=2.5) == 2.5).all()


def test_identities_pass_their_input_on() -> None:
    np.testing.assert_array_equal(values(init.eye_, 2, 3), np.eye(2, 3))
    for size in ((4, 2, 3), (4, 3, 2, 4), (2, 2, 1, 3, 5)):
        found = values(init.dirac_, *size, groups=2)
        expected = np.zeros(size, np.float32)
        for out in range(size[0]):
            if out % (size[0] // 2) < size[1]:
                expected[(out, out % (size[0] // 2), *(n // 2 for n in size[2:]))] = 1
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ShapeError, match="3 output channels into 2"):
        init.dirac_(zeros(3, 1, 1), groups=2)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (2, 3, 4), (6, 1)])
def test_orthogonal_matrices(shape: tuple[int, ...]) -> None:
    found = values(init.orthogonal_, *shape, gain=2.0).reshape(shape[0], -1).astype(np.float64)
    small = found @ found.T if found.shape[0] < found.shape[1] else found.T @ found
    np.testing.assert_allclose(small, 4 * np.eye(len(small)), atol=1e-5)
    short = init.orthogonal_(zeros(*shape, dtype="bfloat16"))
    assert short.dtype.name == "bfloat16" and short.float().norm().item() > 0.9


def test_sparse_matrices() -> None:
    found = values(init.sparse_, 10, 4, sparsity=0.25, std=3.0)
    assert ((found == 0).sum(0) == 3).all() and 1 < found[found != 0].std() < 6
    assert (init.sparse_(zeros(0, 2), 0.5) == 0).all()


@pytest.mark.parametrize("make", [init.eye_, init.dirac_, init.orthogonal_, lambda t: init.sparse_(t, 0.5)])
def test_dimensions_of_whole_matrices(make: Any) -> None:
    with pytest.raises(ShapeError, match="dimensions, not of shape"):
        make(zeros(3))


def test_uniform_and_normal() -> None:
    u = values(init.uniform_, *SHAPE, a=-2.0, b=4.0)
    assert u.min() >= -2 and u.max() < 4 and u.mean() == pytest.approx(1, abs=FEW * math.sqrt(3))
    n = values(init.normal_, *SHAPE, mean=1.0, std=0.5)
    assert n.mean() == pytest.approx(1, abs=FEW * 0.5) and n.std() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("mean", "std", "a", "b"), [(0, 1, -2, 2), (0, 0.02, -0.06, 0.06), (3, 2, 0, 4), (0, 1, 1, 1.5)]
)
def test_truncated_normal_has_the_moments_of_its_distribution(mean: float, std: float, a: float, b: float) -> None:
    found = values(init.trunc_normal_, *SHAPE, mean=mean, std=std, a=a, b=b).astype(np.float64)
    grid = np.linspace(a, b, 200_001)
    density = np.exp(-0.5 * ((grid - mean) / std) ** 2)
    density /= density.sum()
    expected = (grid * density).sum()
    deviation = math.sqrt(((grid - expected) ** 2 * density).sum())
    assert found.min() >= np.float32(a) and found.max() <= np.float32(b)
    assert found.mean() == pytest.approx(expected, abs=FEW * deviation)
    assert found.std() == pytest.approx(deviation, rel=0.02)
    below = np.quantile(found, [0.01, 0.3, 0.9])
    exact = np.interp([0.01, 0.3, 0.9], np.cumsum(density), grid)
    np.testing.assert_allclose(below, exact, atol=0.03 * (b - a))


def test_the_inverse_of_the_normal_distribution_is_accurate() -> None:
    from genesis.functions.create import tensor

    x = np.linspace(-6, 6, 121)
    p = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    np.testing.assert_allclose(init._probit(tensor(p)).numpy(), x, rtol=2e-9, atol=2e-9)


@pytest.mark.parametrize(
    ("make", "settings", "deviation", "bound"),
    [
        (init.xavier_uniform_, {}, math.sqrt(2 / 500), math.sqrt(6 / 500)),
        (init.xavier_normal_, {"gain": 2.0}, 2 * math.sqrt(2 / 500), None),
        (init.kaiming_uniform_, {}, math.sqrt(2 / 200), math.sqrt(6 / 200)),
        (init.kaiming_uniform_, {"a": math.sqrt(5)}, 1 / math.sqrt(600), 1 / math.sqrt(200)),
        (init.kaiming_normal_, {"mode": "fan_out", "nonlinearity": "relu"}, math.sqrt(2 / 300), None),
        (init.kaiming_normal_, {"nonlinearity": "linear"}, math.sqrt(1 / 200), None),
    ],
)
def test_scaled_initializations(make: Any, settings: dict[str, Any], deviation: float, bound: float | None) -> None:
    found = values(make, *SHAPE, **settings)
    assert found.std() == pytest.approx(deviation, rel=0.02) and abs(found.mean()) < FEW * deviation
    assert bound is None or np.abs(found).max() <= bound * (1 + 1e-6)


def test_fans_count_the_receptive_field() -> None:
    assert init._calculate_fan_in_and_fan_out(zeros(4, 3, 5, 2)) == (30, 40)
    with pytest.raises(ShapeError, match="fan-in"):
        init.xavier_normal_(zeros(3))


def test_skip_init_leaves_memory_and_generators_alone() -> None:
    manual_seed(5)
    before = get_state()
    with init.skip_init():
        with init.skip_init():
            layer = Linear(4, 4)
        for make in (
            init.uniform_,
            init.normal_,
            init.trunc_normal_,
            init.ones_,
            init.xavier_normal_,
            init.orthogonal_,
            init.eye_,
        ):
            assert (values(make, 3, 3) == 0).all()
    assert get_state() == before and layer.weight.shape == (4, 4)
    assert (values(init.ones_, 3) == 1).all()
    with pytest.raises(ZeroDivisionError), init.skip_init():
        _ = 1 / 0
    assert (values(init.normal_, 3) != 0).all()


def test_skip_init_says_where_weights_are_made() -> None:
    with init.skip_init(dtype="bfloat16"):
        with init.skip_init("cpu", "float64"):
            inner = Linear(4, 4)
        layers = Linear(4, 4), RMSNorm(4), Linear(4, 4, dtype="float32")
    assert [layer.weight.dtype.name for layer in (inner, *layers)] == ["float64", "bfloat16", "bfloat16", "float32"]
    assert Linear(4, 4).weight.dtype.name == "float32"


def test_gains() -> None:
    assert init.calculate_gain("relu") == math.sqrt(2) and init.calculate_gain("tanh") == 5 / 3
    assert init.calculate_gain("leaky_relu") == pytest.approx(math.sqrt(2 / 1.0001))
    assert init.calculate_gain("conv1d") == init.calculate_gain("conv_transpose3d") == 1
    with pytest.raises(UsageError, match="slope of leaky_relu is True"):
        init.calculate_gain("leaky_relu", True)
    with pytest.raises(UsageError, match="'other'"):
        init.calculate_gain("other")
    with pytest.raises(UsageError, match="mode"):
        init.kaiming_normal_(zeros(2, 2), mode="fan")
    with pytest.raises(UsageError, match=r"\[2\.0, 1\.0\]"):
        init.trunc_normal_(zeros(2), a=2.0, b=1.0)


@pytest.mark.parametrize(
    "make",
    [init.uniform_, init.normal_, init.trunc_normal_, init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_,
     init.kaiming_normal_, init.orthogonal_],
)  # fmt: skip
def test_seeds_decide(make: Any) -> None:
    first, second = (values(make, 5, 4, generator=Generator(3)) for _ in range(2))
    other = values(make, 5, 4, generator=Generator(4))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    manual_seed(3)
    np.testing.assert_array_equal(values(make, 5, 4), first)
