"""The paths of attention that small odd samples do not reach: tiles through the copy engine, several blocks of queries
and keys with document borders between and inside them, heads that are divided for the cache's sake, large heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, bfloat16, float16, float32, int64
from genesis.kernels import attention as kernels
from genesis.kernels import attention_tiles
from genesis.kernels.attention_tiles import Tile, tiles_of, together
from genesis.ops.attention import attention, attention_backward, attention_packed, attention_packed_backward, parts_of

CUDA = Device("cuda", 0)
# A bound of the relative error in norm of results, whose terms are rounded to the type.
TOLERANCE = {bfloat16: 1e-2, float16: 1.5e-3, float32: 2e-5}
HEADS, KEY_HEADS = 2, 1


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernels that attention launches from here on go through the copy engine."""
    seen: list[bool] = []

    def spy(kernel: Any, *args: Any, **keywords: Any) -> None:
        if "BOXES" in keywords:
            seen.append(keywords["BOXES"])
        launch(kernel, *args, **keywords)

    monkeypatch.setattr(kernels, "launch", spy)
    return seen


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


def expected(qkv: np.ndarray, g: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Result and packed gradient in float64, from the whole matrix of scores; `seen` is `[B, T, T]`."""
    q, k, v = np.split(qkv, [HEADS, HEADS + KEY_HEADS], axis=2)
    group, scale = HEADS // KEY_HEADS, qkv.shape[3] ** -0.5
    kw, vw = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    s = np.where(seen[:, None], scale * np.einsum("bthd,bshd->bhts", q, kw), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("bhts,bshd->bthd", p, vw)
    ds = p * (np.einsum("bthd,bshd->bhts", g, vw) - np.einsum("bthd,bthd->bht", g, o)[..., None]) * scale
    shape = (*k.shape[:2], KEY_HEADS, group, k.shape[3])
    dk = np.einsum("bhts,bthd->bshd", ds, q).reshape(shape).sum(3)
    dv = np.einsum("bhts,bthd->bshd", p, g).reshape(shape).sum(3)
    return o, np.concatenate((np.einsum("bhts,bshd->bthd", ds, kw), dk, dv), axis=2)


def documents(tokens: int) -> np.ndarray:
    """Starts of documents of uneven length, in two rows; some borders fall on those of blocks."""
    borders = (0, 3, 64, 65, 130), (0, 128)
    return np.stack([np.asarray(b)[np.searchsorted(b, np.arange(tokens), side="right") - 1] for b in borders])


def visible(tokens: int, starts: np.ndarray | None, causal: bool, window: int) -> np.ndarray:
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    seen = np.broadcast_to((j <= i) if causal else (i == i), (2, tokens, tokens))
    seen = seen & (j > i - window) if window else seen
    return seen & (j >= starts[:, :, None]) if starts is not None else seen


def off(found: Array, wanted: np.ndarray) -> float:
    """The relative error in norm."""
    return float(np.linalg.norm(found.numpy().astype(np.float64) - wanted) / np.linalg.norm(wanted))


def check(
    size: int, dtype: DType, packed: bool, causal: bool, window: int, tokens: int = 150
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Compare forward and backward with `expected`, and two runs with each other; gives what backward took."""
    rng = np.random.default_rng(size)
    x = on_gpu(rng.standard_normal((2, tokens, HEADS + 2 * KEY_HEADS, size)).astype(dtype.numpy), dtype)
    g = on_gpu(rng.standard_normal((2, tokens, HEADS, size)).astype(dtype.numpy), dtype)
    starts = documents(tokens) if packed else None
    rest = () if starts is None else (on_gpu(starts, int64),)
    attrs = {"heads": HEADS, "key_heads": KEY_HEADS, "scale": size**-0.5, "causal": causal, "window": window}
    o, lse = attention_packed(x, *rest, **attrs)
    dx = attention_packed_backward(g, x, o, lse, *rest, **attrs)
    wide = (x.numpy().astype(np.float64), g.numpy().astype(np.float64))
    for found, wanted in zip((o, dx), expected(*wide, visible(tokens, starts, causal, window)), strict=True):
        assert off(found, wanted) < TOLERANCE[dtype]
    again = attention_packed_backward(g, x, *attention_packed(x, *rest, **attrs), *rest, **attrs)
    assert again.numpy().tobytes() == dx.numpy().tobytes()
    return x, g, (o, lse, dx)


@pytest.mark.parametrize(("packed", "causal", "window"), [(False, True, 0), (True, True, 0), (True, True, 70)])
def test_tiles_through_the_copy_engine(boxes: list[bool], packed: bool, causal: bool, window: int) -> None:
    check(64, bfloat16, packed, causal, window)
    assert boxes
    assert all(boxes) or not is_interpreted()  # a GPU before Hopper has none


def test_all_keys_seen() -> None:
    check(16, bfloat16, False, False, 0)
    check(16, float32, False, False, 0, 70)


def test_parts_of_one_array_give_the_bits_of_three_arrays() -> None:
    x, g, (o, lse, dx) = check(32, float16, False, True, 0, 70)
    apart = [on_gpu(part.numpy().copy(), float16) for part in parts_of(x, HEADS, KEY_HEADS)]
    scale = 32**-0.5
    other, sums = attention(*apart, scale=scale)
    assert other.numpy().tobytes() == o.numpy().tobytes()
    grads = attention_backward(g, *apart, other, sums, scale=scale)
    assert np.concatenate([d.numpy() for d in grads], axis=2).tobytes() == dx.numpy().tobytes()
    assert sums.numpy().tobytes() == lse.numpy().tobytes()


def test_heads_divided_for_the_cache_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    before = check(16, bfloat16, True, True, 0)[2]
    calls = []

    def few(rows: float, heads: int, bytes_per_row: int, section: int = 0) -> int:
        calls.append(heads)
        return 3  # divides no number of heads here

    monkeypatch.setattr(kernels, "together", few)
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    x, g = (on_gpu(np.zeros(shape, bfloat16.numpy), bfloat16) for shape in ((2, 150, 4, 16), (2, 150, 2, 16)))
    rng = np.random.default_rng(16)
    for array in (x, g):
        backend_for(CUDA).from_numpy(rng.standard_normal(array.shape).astype(bfloat16.numpy), array)
    o, lse, dx = (empty(a.shape, a.dtype, CUDA) for a in before)
    starts, parts = on_gpu(documents(150), int64), parts_of(x, HEADS, KEY_HEADS)
    kernels.forward_into(o, lse, *parts, starts, 0.25, True, 0)
    kernels.backward_into(parts_of(dx, HEADS, KEY_HEADS), g, *parts, o, lse, starts, 0.25, True, 0)
    assert calls == [4, 4, 2]
    assert o.numpy().tobytes() == before[0].numpy().tobytes()
    np.testing.assert_allclose(
        dx.numpy().astype(np.float32), before[2].numpy().astype(np.float32), rtol=0.02, atol=0.02
    )


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [bfloat16, float16, float32])
def test_head_sizes(size: int, dtype: DType) -> None:
    for packed, causal, window in ((False, True, 0), (True, True, 0), (False, True, 100), (False, False, 0)):
        check(size, dtype, packed, causal, window)
    check(size, dtype, False, True, 0, 2100)  # the tiles of long sequences


def test_tiles_fit_shared_memory() -> None:
    for dtype in (bfloat16, float32):
        for size, shared in ((64, 100 << 10), (128, 163 << 10), (256, 163 << 10), (256, 227 << 10)):
            forward, queries, keys = tiles_of(dtype, size, 4096, 4096, shared, False)
            row = 2 * size * dtype.itemsize
            assert (forward.queries + forward.stages * forward.keys) * row <= shared
            assert (queries.queries + queries.stages * queries.keys) * row <= shared
            assert (keys.keys + keys.stages * keys.queries) * row <= shared
            assert queries.queries % keys.queries == 0
    for size in (64, 128, 256):
        for tile in tiles_of(bfloat16, size, 4096, 4096, 227 << 10, True):
            assert isinstance(tile, Tile)
            assert (min(tile[:2]) + tile.stages * min(tile[:2])) * 4 * size <= 227 << 10


def test_only_large_heads_of_many_are_divided() -> None:
    row = 2 * 128 * 2
    assert together(8192, 32, row) == attention_tiles.together(8192, 32, row) == 2
    assert together(8192, 8, row) == 8  # all of them fit
    assert together(1024, 1000, row) == 1000  # short ones: the order by length matters more
    assert together(1 << 20, 32, row) == 1
