"""Gate and up with SwiGLU in the epilogue: where one kernel computes it, and its results on several tiles."""

from __future__ import annotations

import numpy as np
import pytest

import genesis.kernels.gemm.norm_linear as cuda_impls
from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.dtypes import DType, bfloat16, float16, float32
from genesis.kernels.gemm.gated import SwigluTile, gemm_swiglu_into
from genesis.ops.norm_linear import norm_mlp

CUDA = Device("cuda", 0)
SMALL = SwigluTile(32, 16, 16, 4, 2, group=2)


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


def expected(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=-1)
    found: np.ndarray = gate / (1 + np.exp(-gate)) * up
    return found


@pytest.mark.parametrize("dtype", [bfloat16, float16])
@pytest.mark.parametrize("tile", [SMALL, SMALL._replace(slices=1), SMALL._replace(bm=16, bn=32, slices=4), None])
def test_more_than_one_tile(tile: SwigluTile | None, dtype: DType) -> None:
    """Rows, columns and steps that the tiles do not divide, and more tiles than the programs that take them."""
    m, f, k = 70, 72, 40
    rng = np.random.default_rng(3)
    x, w = on_gpu(rng.normal(size=(m, k)), dtype), on_gpu(rng.normal(size=(2 * f, k)) / np.sqrt(k), dtype)
    h, gate_up = (on_gpu(np.full((m, n), np.nan), dtype) for n in (f, 2 * f))
    assert gemm_swiglu_into(h, gate_up, x, w, tile)
    step = 2.0**-8 if dtype is bfloat16 else 2.0**-11
    want = wide(x) @ wide(w).T
    np.testing.assert_allclose(wide(gate_up), want, rtol=step, atol=1e-5)
    np.testing.assert_allclose(wide(h), expected(wide(gate_up)), rtol=1.01 * step, atol=1e-6)


def test_what_tma_cannot_address() -> None:
    """Nothing is written then."""

    def taken(dtype: DType, f: int, k: int, transposed: bool = False) -> bool:
        x, w = on_gpu(np.ones((3, k)), dtype), on_gpu(np.ones((2 * f, k)), dtype)
        if transposed:
            w = on_gpu(np.ones((k, 2 * f)), dtype)
            w = w.view((2 * f, k), (1, 2 * f))
        h, gate_up = on_gpu(np.full((3, f), 7), dtype), on_gpu(np.full((3, 2 * f), 7), dtype)
        done = gemm_swiglu_into(h, gate_up, x, w)
        assert done or ((h.numpy() == 7).all() and (gate_up.numpy() == 7).all())
        return done

    assert taken(bfloat16, 8, 16)
    assert not taken(float32, 8, 16)
    assert not taken(bfloat16, 4, 16)
    assert not taken(bfloat16, 8, 12)
    assert not taken(bfloat16, 8, 16, transposed=True)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_contiguous_weights_use_one_kernel(
    bias: bool, apart: bool, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def spy(h: Array, gate_up: Array, x: Array, weight: Array) -> bool:
        calls.append(gemm_swiglu_into(h, gate_up, x, weight))
        return calls[-1]

    monkeypatch.setattr(cuda_impls, "gemm_swiglu_into", spy)
    rng, f, k = np.random.default_rng(5), 24, 16
    both = on_gpu(rng.normal(size=(2 * f + apart, k)) / 4, bfloat16)
    rows = [both.view((f, k), (k, 1), start * k) for start in (0, f + apart)]
    x, scale, down = (on_gpu(rng.normal(size=s), bfloat16) for s in ((2, 5, k), (k,), (k, f)))
    biases = [on_gpu(rng.normal(size=f), bfloat16) for _ in range(2)] if bias else []
    y, _, gate_up, *kept = norm_mlp(x, scale, down, None, *rows, *biases, eps=1e-6, keep=keep)
    assert calls == ([] if bias or apart else [True])
    n = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(scale)
    if kept:
        np.testing.assert_allclose(wide(kept[0]), n, rtol=2.0**-8)
        n = wide(kept[0])
        np.testing.assert_allclose(wide(kept[1]), expected(wide(gate_up)), rtol=1.01 * 2.0**-8, atol=1e-6)
    want = np.concatenate([n @ wide(w).T for w in rows], -1)
    want += np.concatenate([wide(b) for b in biases]) if bias else 0
    np.testing.assert_allclose(wide(gate_up), want, rtol=2.0**-7, atol=0.05)
    want = wide(x) + expected(wide(gate_up)) @ wide(down).T
    np.testing.assert_allclose(
        wide(y), want, rtol=2.0**-7, atol=2.0**-8 * np.abs(expected(wide(gate_up))).sum(-1).max()
    )
