"""Functions made of ops: values against numpy or stored ones, gradients against differences, derived forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.autograd import gradcheck
from genesis.errors import DTypeError, GradientError, ShapeError
from genesis.functions.forms import ALIASES

RNG = np.random.default_rng(45)
X = RNG.standard_normal((3, 4))
Y = RNG.standard_normal((3, 4))
V = RNG.standard_normal(5)
WITH_NAN = np.where(RNG.random((3, 5)) < 0.3, np.nan, RNG.standard_normal((3, 5)))
INTS = RNG.integers(-4, 5, (3, 6))
g = genesis.tensor


def values(result: Any) -> Any:
    """Tensors as numpy arrays, in sequences too."""
    if isinstance(result, (tuple, list)):
        return [values(each) for each in result]
    return result.detach().numpy() if isinstance(result, genesis.Tensor) else result


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        return
    expected = np.asarray(expected)
    assert found.shape == expected.shape and found.dtype.kind == expected.dtype.kind
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


# Each row: the call on tensors, and its result by numpy.
ROWS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "fmod": (lambda: genesis.fmod(g(X), g(Y)), lambda: np.fmod(X, Y)),
    "fmod of integers": (lambda: genesis.fmod(g(INTS), 3), lambda: np.fmod(INTS, 3)),
    "copysign": (lambda: genesis.copysign(g(X), g([0.0, -0.0, 1, -1])), lambda: np.copysign(X, [0.0, -0.0, 1, -1])),
    "hypot": (lambda: genesis.hypot(g(X), g(Y)), lambda: np.hypot(X, Y)),
    "gcd": (lambda: genesis.gcd(g(INTS), g(INTS[:1])), lambda: np.gcd(INTS, INTS[:1])),
    "lcm": (lambda: genesis.lcm(g(INTS), g(INTS[:1])), lambda: np.lcm(INTS, INTS[:1])),
    "logaddexp": (lambda: genesis.logaddexp(g(X * 900), g(Y * 900)), lambda: np.logaddexp(X * 900, Y * 900)),
    "heaviside": (lambda: genesis.heaviside(g(INTS), g([5])), lambda: np.heaviside(INTS, 5).astype(int)),
    "sinc": (lambda: genesis.sinc(g(np.rint(X) / 2)), lambda: np.sinc(np.rint(X) / 2)),
    "nan_to_num": (
        lambda: genesis.nan_to_num(g(np.array([np.nan, np.inf, -np.inf, 1.0])), 2.0, 3.0, -4.0),
        lambda: np.array([2.0, 3, -4, 1]),
    ),
    "addcmul": (lambda: genesis.addcmul(g(X), g(Y), g(Y), value=2), lambda: X + 2 * Y * Y),
    "nansum": (lambda: genesis.nansum(g(WITH_NAN), 1), lambda: np.nansum(WITH_NAN, 1)),
    "nanmean": (lambda: genesis.nanmean(g(WITH_NAN), 1), lambda: np.nanmean(WITH_NAN, 1)),
    "nanquantile": (
        lambda: genesis.nanquantile(g(WITH_NAN), g(np.array([0.2, 0.7])), 1),
        lambda: np.nanquantile(WITH_NAN, [0.2, 0.7], 1),
    ),
    "cov": (lambda: genesis.cov(g(X)), lambda: np.cov(X)),
    "corrcoef": (lambda: genesis.corrcoef(g(X)), lambda: np.corrcoef(X)),
    "trapezoid": (lambda: genesis.trapezoid(g(X), g(V[:4])), lambda: np.trapezoid(X, V[:4])),
    "diff": (lambda: genesis.diff(g(X), 2, prepend=g(Y)), lambda: np.diff(X, 2, prepend=Y)),
    "cumprod": (lambda: genesis.cumprod(g(X), 1), lambda: np.cumprod(X, 1)),
    "logcumsumexp": (lambda: genesis.logcumsumexp(g(V * 900), 0), lambda: np.logaddexp.accumulate(V * 900)),
    "cummax": (lambda: genesis.cummax(g([1, 3, 3, 2, 4]), 0), lambda: ([1, 3, 3, 3, 4], [0, 1, 2, 2, 4])),
    "cummin of NaN": (
        lambda: genesis.cummin(g([2.0, math.nan, 1.0]), 0),
        lambda: ([2.0, math.nan, math.nan], [0, 1, 1]),
    ),
    "median": (lambda: genesis.median(g([[4, 1, 3, 2]]), 1), lambda: ([2], [3])),
    "median of NaN": (lambda: genesis.median(g([3.0, math.nan, 1.0])), lambda: np.float64(math.nan)),
    "nanmedian": (lambda: genesis.nanmedian(g([3.0, math.nan, 1.0])), lambda: 1.0),
    "mode": (lambda: genesis.mode(g([[2, 5, 5, 2, 1]])), lambda: ([2], [3])),
    "kthvalue": (lambda: genesis.kthvalue(g([5, 1, 4]), 2), lambda: (4, 2)),
    "searchsorted": (
        lambda: genesis.searchsorted(g(np.sort(INTS)), g(INTS[:, :2]), right=True),
        lambda: [np.searchsorted(np.sort(line), line[:2], side="right") for line in INTS],
    ),
    "bucketize": (lambda: genesis.bucketize(g(X), g(np.sort(V))), lambda: np.searchsorted(np.sort(V), X)),
    "histc": (
        lambda: genesis.histc(g(X), 5, -2, 2),
        lambda: np.histogram(X, 5, (-2, 2))[0].astype(float),
    ),
    "isin": (lambda: genesis.isin(g(INTS), g([1, -2])), lambda: np.isin(INTS, [1, -2])),
    "unique_consecutive": (
        lambda: genesis.unique_consecutive(g([1, 1, 2, 2, 1]), return_inverse=True, return_counts=True),
        lambda: ([1, 2, 1], [0, 0, 1, 1, 2], [2, 2, 1]),
    ),
    "hstack": (lambda: genesis.hstack([g(X), g(Y)]), lambda: np.hstack([X, Y])),
    "dstack": (lambda: genesis.dstack([g(X), g(Y)]), lambda: np.dstack([X, Y])),
    "column_stack": (lambda: genesis.column_stack([g(V), g(V)]), lambda: np.column_stack([V, V])),
    "tensor_split": (lambda: genesis.tensor_split(g(V), 3), lambda: np.array_split(V, 3)),
    "tile": (lambda: genesis.tile(g(X), (2, 1, 2)), lambda: np.tile(X, (2, 1, 2))),
    "rot90": (lambda: genesis.rot90(g(X), 3), lambda: np.rot90(X, 3, (0, 1))),
    "diag": (lambda: genesis.diag(g(V), -2), lambda: np.diag(V, -2)),
    "block_diag": (lambda: genesis.block_diag(g([[1, 2]]), g(3)), lambda: [[1, 2, 0], [0, 0, 3]]),
    "tril_indices": (lambda: genesis.tril_indices(3, 4, 1), lambda: np.stack(np.tril_indices(3, 1, 4))),
    "meshgrid": (lambda: genesis.meshgrid(g(V), g(V[:2]), indexing="xy"), lambda: list(np.meshgrid(V, V[:2]))),
    "cartesian_prod": (lambda: genesis.cartesian_prod(g([1, 2]), g([3, 4])), lambda: [[1, 3], [1, 4], [2, 3], [2, 4]]),
    "take": (lambda: genesis.take(g(X), g([[0, -1]])), lambda: np.take(X, [[0, -1]])),
    "tensordot": (lambda: genesis.tensordot(g(X), g(Y), ([0], [0])), lambda: np.tensordot(X, Y, ([0], [0]))),
    "kron": (lambda: genesis.kron(g(X), g(V)), lambda: np.kron(X, V)),
    "cross": (lambda: genesis.cross(g(X), g(Y), 0), lambda: np.cross(X, Y, axis=0)),
    "inner": (lambda: genesis.inner(g(X), g(Y)), lambda: np.inner(X, Y)),
    "cdist": (lambda: genesis.cdist(g(X), g(Y), 1), lambda: np.abs(X[:, None] - Y).sum(-1)),
    "vander": (lambda: genesis.vander(g(V), 3), lambda: np.vander(V, 3)),
    "logspace": (
        lambda: genesis.logspace(0, 2, 5, dtype=genesis.float64),
        lambda: np.logspace(0, 2, 5),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_values_are_numpys(row: str) -> None:
    found, expected = ROWS[row]
    with np.errstate(all="ignore"):
        assert_same(values(found()), expected())


@pytest.mark.parametrize("how", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_quantiles_are_numpys(how: Any) -> None:
    q = np.array([0.0, 0.3, 0.5, 1.0])
    found = genesis.quantile(g(X), g(q), 1, interpolation=how)
    assert_same(values(found), np.quantile(X, q, 1, method=how))
    assert math.isnan(genesis.quantile(g([1.0, math.nan]), 0.5).item())


@pytest.mark.parametrize("how", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_elements_reduced_into_one_position(how: str, include_self: bool) -> None:
    index = np.array([0, 2, 0, 0, 2])
    reduced: Any = {"sum": np.sum, "prod": np.prod, "mean": np.mean, "amax": np.max, "amin": np.min}[how]
    x, expected = X[0], X[0].copy()
    for at in (0, 2):
        expected[at] = reduced([*([x[at]] if include_self else []), *V[index == at]])
    assert_same(values(genesis.scatter_reduce(g(x), 0, g(index), g(V), how, include_self=include_self)), expected)

    def call(a: genesis.Tensor, b: genesis.Tensor) -> genesis.Tensor:
        return genesis.scatter_reduce(a, 0, g(index), b, how, include_self=include_self)

    assert gradcheck(call, (g(x, requires_grad=True), g(V, requires_grad=True)))


GRADIENTS: dict[str, Callable[[genesis.Tensor], Any]] = {
    "fmod": lambda x: genesis.fmod(x, -0.7),
    "xlogy": lambda x: genesis.xlogy(x, x.abs()),
    "logaddexp": lambda x: genesis.logaddexp(x, x.flip(0)),
    "cumprod": lambda x: genesis.cumprod(x, 1),
    "logcumsumexp": lambda x: genesis.logcumsumexp(x, 1),
    "cummax": lambda x: genesis.cummax(x, 1).values,
    "quantile": lambda x: genesis.quantile(x, 0.3, 1),
    "median": lambda x: genesis.median(x, 1).values,
    "diag_embed": genesis.diag_embed,
    "slice_scatter": lambda x: genesis.slice_scatter(x, x[:, :2], 1, 1, 4, 2),
    "cdist": lambda x: genesis.cdist(x, x.flip(0) + 1),
    "renorm": lambda x: genesis.renorm(x, 2, 0, 0.5),
    "in place": lambda x: (x * 2).cumprod_(1).fmod_(3).clamp_min_(-1),
    "shape in place": lambda x: (x * x).unsqueeze_(0).transpose_(0, 1).mul_(x.unsqueeze(1)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_differences(name: str) -> None:
    assert gradcheck(GRADIENTS[name], (g(X, requires_grad=True),))


def test_narrow_floats_round_once() -> None:
    x, y = (g(v).bfloat16() for v in (X, Y))
    for name in ("logaddexp", "hypot"):
        call = getattr(genesis, name)
        assert genesis.equal(call(x, y), call(x.float(), y.float()).bfloat16())


# --- Derived forms ----------------------------------------------------------------------------------------------------


def test_out_receives_the_result() -> None:
    out = genesis.empty(3, 4, dtype=genesis.float64)
    assert genesis.fmod(g(X), 0.7, out=out) is out
    assert_same(values(out), np.fmod(X, 0.7))
    pair = genesis.empty(3, 4, dtype=genesis.float64), genesis.empty(3, 4, dtype=genesis.int64)
    assert genesis.cummax(g(X), 1, out=pair).values is pair[0] and pair[1].any()
    with pytest.raises(DTypeError, match="does not fit"):
        genesis.fmod(g(X), 0.7, out=genesis.empty(3, 4, dtype=genesis.int64))


def test_methods_in_place_overwrite_the_tensor() -> None:
    x = g(X)
    view = x[0]
    assert x.gt_(0) is x and x.dtype == genesis.float64
    assert_same(values(view), (X[0] > 0).astype(float))
    with pytest.raises(DTypeError, match="does not fit"):
        g([1, 2]).atan2_(g([1.0, 2.0]))
    with pytest.raises(ShapeError, match="the result has shape"):
        g(V[:4]).fmod_(g(X))
    with pytest.raises(GradientError, match="leaf"):
        g(X, requires_grad=True).cumprod_(0)


def test_views_in_place_keep_the_memory() -> None:
    x = genesis.zeros(2, 3)
    row = x[1]
    assert x.t_() is x and x.shape == (3, 2)
    x[0, 1] = 5
    assert row.tolist() == [5, 0, 0]
    with pytest.raises(GradientError, match="leaf"):
        genesis.zeros(2, requires_grad=True).unsqueeze_(0)


def test_aliases_are_the_same_functions() -> None:
    for alias, name in ALIASES.items():
        for place in (genesis, genesis.Tensor):
            for end in ("", "_"):
                if hasattr(place, name + end) and hasattr(place, alias + end):
                    assert getattr(place, alias + end) is getattr(place, name + end)
    assert g([3]).greater_equal(3).all() and genesis.concatenate([g([1]), g([2])]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda x: x.exponential_(2.0), 0.5, 0.5),
        (lambda x: x.geometric_(0.25), 4, math.sqrt(12)),
        (lambda x: x.log_normal_(0, 0.5), math.exp(0.125), 0.604),
        (lambda x: genesis.poisson(x.fill_(40.0)), 40, math.sqrt(40)),
    ],
)
def test_drawn_values_have_their_moments(draw: Callable[[Any], Any], mean: float, deviation: float) -> None:
    genesis.manual_seed(1)
    drawn = draw(genesis.empty(20_000, dtype=genesis.float64))
    assert abs(drawn.mean().item() - mean) < 5 * deviation / math.sqrt(20_000)
    assert abs(drawn.std().item() / deviation - 1) < 0.05
