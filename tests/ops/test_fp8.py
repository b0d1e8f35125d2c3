"""Products in 8-bit floats against exact ones, within bounds that follow from e4m3; edges of its scales; gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import genesis
from genesis.array import from_numpy
from genesis.autograd import grad
from genesis.nn import functional as F
from genesis.ops.fp8 import quantize_rows, quantized, quantized_matmul
from genesis.ops.linear import linear

HALF = 2.0**-4  # of a unit in the last place of e4m3, relative to a number
LEAST = 2.0**-10  # half of its smallest step

Layer = Callable[[genesis.Tensor, list[genesis.Tensor], int], genesis.Tensor]


def rounding(x: np.ndarray, factors: np.ndarray | None = None) -> np.ndarray:
    """The most by which an element of x·diag(factors) is off."""
    x = np.abs(x if factors is None else x * factors)
    return np.asarray(HALF * x + LEAST * x.max(axis=-1, keepdims=True) / 224)


def bound(x: np.ndarray, dx: np.ndarray, w: np.ndarray, dw: np.ndarray) -> np.ndarray:
    """The most by which x·wᵀ is off: Σ |x|·dw + dx·|w| + dx·dw, and float32 for its sum."""
    x, w = np.abs(x), np.abs(w)
    return np.asarray(x @ dw.T + dx @ w.T + dx @ dw.T + 2.0**-20 * (x @ w.T))


def factors_of(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices whose rows and elements differ in size by powers of ten."""
    x, w = (rng.standard_normal((rows, k)) * np.exp(rng.normal(size=(rows, 1)) * 3) for rows in (m, n))
    return (x * np.exp(rng.normal(size=(m, k)))).astype(np.float32), w.astype(np.float32)


def exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(x.astype(np.float64) @ w.astype(np.float64))


@pytest.mark.parametrize(("m", "n", "k"), [(5, 16, 16), (33, 48, 272), (7, 32, 1040)])
def test_a_product_is_within_what_rounding_allows(m: int, n: int, k: int) -> None:
    x, w = factors_of(np.random.default_rng(0), m, n, k)
    allowed = bound(x, rounding(x), w, rounding(w))
    off = np.abs(linear(from_numpy(x), from_numpy(w), fp8=1).numpy() - exact(x, w.T))
    assert (off <= allowed).all()
    assert (off > allowed / 1000).any(), "the bound says nothing"
    wrong = np.abs(linear(from_numpy(4 * x), from_numpy(w), fp8=1).numpy() - exact(x, w.T))
    assert (wrong > allowed).any(), "a wrong scale would pass"


@pytest.mark.parametrize(("m", "n", "k"), [(5, 16, 16), (33, 48, 272), (7, 4096, 32)])
def test_the_input_gradient_is_within_what_rounding_allows(m: int, n: int, k: int) -> None:
    g, w = factors_of(np.random.default_rng(1), m, k, n)
    w = np.ascontiguousarray(w.T)  # [n, k], whose rows are quantised
    _, scale = quantized(w)
    inner = rounding(g, scale), rounding(w) / scale[:, None]
    allowed = bound(g * scale, inner[0], (w / scale[:, None]).T, inner[1].T)
    off = np.abs(quantized_matmul(from_numpy(g), from_numpy(w)).numpy() - exact(g, w))
    assert (off <= allowed).all()


def test_scales_use_the_upper_half_of_the_range() -> None:
    x = np.random.default_rng(2).standard_normal((200, 9)).astype(np.float32)
    x *= np.exp2(np.random.default_rng(3).integers(-100, 110, (200, 1))).astype(np.float32)
    x[0, 0], x[1, 0], x[2, 0] = 448, np.nextafter(np.float32(448), np.float32(449)), 224
    x[:3, 1:] = 0
    codes, scale = quantized(x)
    top = np.abs(codes.astype(np.float32)).max(axis=1)
    assert ((top >= 224) & (top <= 448)).all()
    assert np.array_equal(scale[:3], [1, 2, 0.5])
    assert np.array_equal(np.exp2(np.round(np.log2(scale))), scale), "scales are powers of two"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_without_a_scale(device: str) -> None:
    """Zeros, numbers at both ends, infinity and NaN, in a row of either factor."""
    x = np.ones((8, 32), np.float32)
    x[1], x[2, 3], x[3, 4] = 0, np.inf, np.nan
    x[4], x[5, :2], x[6, 7] = 1e-42, (3.4e38, -3.4e38), -np.inf
    t, w = genesis.tensor(x, device=device), genesis.ones(16, 32, device=device) * 0.5
    y = F.linear(t, w, fp8=1).cpu().numpy()
    assert np.array_equal(np.isnan(y).all(axis=1), [0, 0, 1, 1, 0, 0, 1, 0])
    assert np.array_equal(y[[0, 1, 7]], np.repeat([[16.0], [0.0], [16.0]], 16, 1))
    assert np.allclose(y[4], 16e-42, atol=2.0**-126 * 16)
    assert (np.abs(y[5]) < 3e38).all()
    bad = F.linear(genesis.ones(4, 32, device=device), genesis.tensor(x, device=device).repeat(2, 1), fp8=1)
    assert np.array_equal(np.isnan(bad.cpu().numpy()).all(axis=0), [0, 0, 1, 1, 0, 0, 1, 0] * 2)


def test_no_columns_and_no_rows() -> None:
    codes, scale = quantize_rows(from_numpy(np.zeros((3, 0), np.float32)))
    assert codes.shape == (3, 0)
    assert np.array_equal(scale.numpy(), np.full(3, 2.0**-126, np.float32))


# --- Gradients --------------------------------------------------------------------------------------------------------


def gradients(fp8: int, *, biased: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    made = {"x": rng.normal(size=(3, 7, 48)), "weight": rng.normal(size=(32, 48)), "bias": rng.normal(size=32)}
    leaves = {k: genesis.tensor(v.astype(np.float32), requires_grad=True) for k, v in made.items()}
    residual = genesis.tensor(rng.normal(size=(3, 7, 32)).astype(np.float32), requires_grad=True)
    y = F.linear(leaves["x"], leaves["weight"], leaves["bias"], residual, fp8=fp8)
    y.backward(genesis.tensor(rng.normal(size=(3, 7, 32)).astype(np.float32)))
    return {"y": y.detach().numpy(), "residual": residual.grad.numpy()} | {k: t.grad.numpy() for k, t in leaves.items()}


def test_only_the_product_and_the_input_gradient_are_rounded() -> None:
    ours, plain = gradients(1), gradients(0)
    for name in ("weight", "bias", "residual"):
        np.testing.assert_array_equal(ours[name], plain[name])
    for name in ("y", "x"):
        far = np.linalg.norm(ours[name] - plain[name]) / np.linalg.norm(plain[name])
        assert 1e-3 < far < 2 * HALF, name


def test_gradients_that_meet_are_added() -> None:
    """The input of two layers, one of them in 8-bit floats."""
    rng = np.random.default_rng(5)
    x = genesis.tensor(rng.normal(size=(6, 32)).astype(np.float32), requires_grad=True)
    w = [genesis.tensor(rng.normal(size=(16, 32)).astype(np.float32)) for _ in range(2)]
    parts = [grad([F.linear(x, w[i], fp8=1).sum()], [x])[0].numpy() for i in range(2)]
    both = grad([(F.linear(x, w[0], fp8=1) + F.linear(x, w[1], fp8=1)).sum()], [x])[0].numpy()
    np.testing.assert_allclose(both, parts[0] + parts[1], rtol=1e-6, atol=1e-5)


def test_neighbours_in_memory_give_the_same_result() -> None:
    rng = np.random.default_rng(6)
    whole = genesis.tensor(rng.normal(size=(48, 32)).astype(np.float32))
    x = genesis.tensor(rng.normal(size=(5, 32)).astype(np.float32))
    joined = F.packed_linear(x, [whole[:32], whole[32:]], fp8=1).numpy()
    apart = F.packed_linear(x, [whole[:32].clone(), whole[32:].clone()], fp8=1).numpy()
    np.testing.assert_array_equal(joined, apart)


# --- Which products ---------------------------------------------------------------------------------------------------


def linear_of(x: genesis.Tensor, weights: list[genesis.Tensor], fp8: int) -> genesis.Tensor:
    return F.linear(x, weights[0], fp8=fp8)


def packed_linear_of(x: genesis.Tensor, weights: list[genesis.Tensor], fp8: int) -> genesis.Tensor:
    return F.packed_linear(x, weights, fp8=fp8)


def norm_linear_of(x: genesis.Tensor, weights: list[genesis.Tensor], fp8: int) -> genesis.Tensor:
    return F.norm_linear(x, genesis.ones(x.shape[-1], device=x.device), weights, eps=1e-6, fp8=fp8)


def norm_mlp_of(x: genesis.Tensor, weights: list[genesis.Tensor], fp8: int) -> genesis.Tensor:
    gate, up, down = weights
    return F.norm_mlp(x, genesis.ones(x.shape[-1], device=x.device), [gate, up], [], down, eps=1e-6, fp8=fp8)


def in_steps_of(x: genesis.Tensor, weights: list[genesis.Tensor], fp8: int) -> genesis.Tensor:
    """As `norm_mlp_of`."""
    gate, up, down = weights
    return F.linear(F.swiglu(norm_linear_of(x, [gate, up], fp8)), down, None, x, fp8=fp8)


def apart(layer: Layer) -> Layer:
    return layer


def neighbours(layer: Layer) -> Layer:
    """The layer with gate and up next to each other in memory, as in an optimizer's buffers."""

    def joined(x: genesis.Tensor, weights: list[genesis.Tensor], fp8: int) -> genesis.Tensor:
        gate, up, down = weights
        whole = genesis.cat([gate, up])
        return layer(x, [whole[: len(gate)], whole[len(gate) :], down], fp8)

    return joined


def both_ways(device: str, layer: Layer, inner: int, outs: list[tuple[int, int]], fp8: int) -> tuple[bytes, bytes]:
    """A layer's result and the gradient of its input."""
    rng = np.random.default_rng(7)
    x = genesis.tensor(rng.normal(size=(5, inner)).astype(np.float32), device=device, requires_grad=True)
    weights = [genesis.tensor(rng.normal(size=shape).astype(np.float32), device=device) for shape in outs]
    y = layer(x, weights, fp8)
    y.backward(genesis.tensor(rng.normal(size=y.shape).astype(np.float32), device=device))
    return y.detach().cpu().numpy().tobytes(), x.grad.cpu().numpy().tobytes()


def test_nothing_is_quantized_unless_it_is_asked_for() -> None:
    rng = np.random.default_rng(8)
    x, *weights = (genesis.tensor(rng.normal(size=(n, 64)).astype(np.float32)) for n in (5, 64, 64, 64))
    scale = genesis.ones(64)
    for layer, found in (
        (linear_of, F.linear(x, weights[0])),
        (packed_linear_of, F.packed_linear(x, weights)),
        (norm_linear_of, F.norm_linear(x, scale, weights, eps=1e-6)),
        (norm_mlp_of, F.norm_mlp(x, scale, weights[:2], [], weights[2], eps=1e-6)),
    ):
        assert np.array_equal(found.numpy(), layer(x, weights, 0).numpy())
        assert not np.array_equal(found.numpy(), layer(x, weights, 1).numpy())


@pytest.mark.sample(cases=3)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layer", [linear_of, packed_linear_of, norm_linear_of])
@pytest.mark.parametrize(("inner", "out"), [(48, 64), (64, 48)])
def test_a_product_with_fewer_columns_stays_as_it_is(device: str, layer: Layer, inner: int, out: int) -> None:
    shapes = [(out, inner)] if layer is linear_of else [(out - 16, inner), (16, inner)]
    plain, whole, narrow, wide, above = (both_ways(device, layer, inner, shapes, fp8) for fp8 in (0, 1, 48, 64, 65))
    assert plain[0] != whole[0] and plain[1] != whole[1]
    assert narrow == whole
    assert wide == ((whole[0], plain[1]) if out > inner else (plain[0], whole[1]))
    assert above == plain


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lying", [apart, neighbours])
def test_each_product_of_a_gated_mlp_is_told_apart(device: str, lying: Callable[[Layer], Layer]) -> None:
    """Down forward and gate and up backward have 32 columns, SwiGLU's gradient 48, gate and up 96."""
    shapes = [(48, 32), (48, 32), (32, 48)]
    found = [both_ways(device, lying(norm_mlp_of), 32, shapes, fp8) for fp8 in (32, 48, 96, 97)]
    assert found == [both_ways(device, lying(in_steps_of), 32, shapes, fp8) for fp8 in (1, 33, 49, 0)]
    assert len({y for y, _ in found}) == 3, "down, gate and up"
    assert len({dx for _, dx in found}) == 4
