"""Attention of a step in blocks of keys: the reference's values; a row has the same bits alone and with others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.autograd.modes import exact, no_grad
from genesis.backend import Device, backend_for
from genesis.dtypes import DType, bfloat16, float32, int64
from genesis.kernels.decode.attention_step import attention_step_into
from genesis.ops.attention_step import attention_step

CUDA, CAPACITY = Device("cuda", 0), 256


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float32)


class Rows:
    """Sequences of `lengths` tokens; the cache holds NaN from there on."""

    def __init__(self, lengths: list[int], heads: int, key_heads: int, size: int, has_norms: bool) -> None:
        rng, rows = np.random.default_rng(1), len(lengths)
        cache = rng.normal(size=(2, rows, key_heads, CAPACITY, size))
        for row, length in enumerate(lengths):
            cache[:, row, :, length:] = np.nan
        self.lengths, self.cache = np.array(lengths), on_gpu(cache, bfloat16)
        self.qkv = on_gpu(rng.normal(size=(rows, heads + 2 * key_heads, size)), bfloat16)
        angles = rng.normal(size=(CAPACITY, size // 2))
        self.tables = on_gpu(np.cos(angles), float32), on_gpu(np.sin(angles), float32)
        norms = (on_gpu(rng.normal(size=size), bfloat16) for _ in range(2))
        self.norms: tuple[Any, Any] = tuple(norms) if has_norms else (None, None)  # type: ignore[assignment]
        self.shape = (rows, heads, size)

    def run(self, rows: slice, **how: Any) -> tuple[np.ndarray, np.ndarray]:
        """Results and the cache afterwards, of some of the rows."""
        lengths, qkv = self.lengths[rows], on_gpu(wide(self.qkv)[rows], bfloat16)
        cache, out = on_gpu(wide(self.cache)[:, rows], bfloat16), on_gpu(np.full(self.shape, np.nan)[rows], bfloat16)
        with no_grad(), exact():
            attention_step_into(out, qkv, cache, on_gpu(lengths, int64), *self.tables, *self.norms, None, **how)
        return wide(out), wide(cache)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(14, 2, 64), (4, 4, 16), pytest.param(20, 1, 128, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("window", "has_norms"), [(0, False), (50, True)])
def test_values_and_rows(heads: int, key_heads: int, size: int, window: int, has_norms: bool) -> None:
    how = {"scale": 0.25, "window": window, "eps": 1e-6}
    rows = Rows([0, 63, 64, 200], heads, key_heads, size, has_norms)
    found, kept = rows.run(slice(None), **how)
    want, cache = np.empty(rows.shape, np.float32), wide(rows.cache)
    norms = [None if each is None else wide(each) for each in rows.norms]
    attention_step.reference(want, wide(rows.qkv), cache, rows.lengths, *map(wide, rows.tables), *norms, None, **how)
    np.testing.assert_allclose(found, want, rtol=2.0**-6, atol=2.0**-6)
    np.testing.assert_allclose(kept, cache, rtol=2.0**-8)
    for row in range(len(rows.lengths)):
        alone, _ = rows.run(slice(row, row + 1), **how)
        np.testing.assert_array_equal(alone[0], found[row])
