"""The paths of attention that small odd samples do not reach: tiles through TMA, several blocks of queries and keys
with document boundaries between and inside them, large heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, bfloat16, float16, float32, int64
from genesis.kernels.attention import attention as kernels
from genesis.kernels.attention.problem import AttentionTile, tiles_of
from genesis.ops.attention import attention, attention_backward, attention_packed, attention_packed_backward, parts_of
from genesis.ops.rope import rope

CUDA = Device("cuda", 0)
# A bound of the relative error in norm of results, whose terms are rounded to the type.
TOLERANCE = {bfloat16: 1e-2, float16: 1.5e-3, float32: 2e-5}
HEADS, KEY_HEADS = 2, 1


@pytest.fixture
def uses_tma(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernels that attention launches from here on go through TMA."""
    through_tma: list[bool] = []

    def spy(kernel: Any, *args: Any, **keywords: Any) -> None:
        if "TMA" in keywords:
            through_tma.append(keywords["TMA"])
        launch(kernel, *args, **keywords)

    monkeypatch.setattr(kernels, "launch", spy)
    return through_tma


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


def expected(qkv: np.ndarray, g: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Result and packed gradient in float64, from the whole matrix of scores; `mask` is `[B, T, T]`."""
    by_head = [np.moveaxis(x, 2, 0) for x in np.split(qkv, [HEADS, HEADS + KEY_HEADS], axis=2)]
    scale = qkv.shape[3] ** -0.5
    o, dq, dk, dv = np.empty_like(g), np.empty_like(g), *(np.zeros_like(x) for x in by_head[1:])
    for h, q in enumerate(by_head[0]):
        of = h * KEY_HEADS // HEADS
        k, v, gh = by_head[1][of], by_head[2][of], g[:, :, h]
        s = np.where(mask, scale * (q @ k.mT), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        o[:, :, h] = p @ v
        ds = p * (gh @ v.mT - (gh * o[:, :, h]).sum(-1, keepdims=True)) * scale
        dq[:, :, h] = ds @ k
        dk[of] += ds.mT @ q
        dv[of] += p.mT @ gh
    return o, np.concatenate((dq, np.moveaxis(dk, 0, 2), np.moveaxis(dv, 0, 2)), axis=2)


def documents(tokens: int) -> np.ndarray:
    """`doc_starts` of documents of uneven length, in two sequences; some boundaries are those of blocks."""
    borders = (0, 3, 64, 65, 130), (0, 128)
    return np.stack([np.asarray(b)[np.searchsorted(b, np.arange(tokens), side="right") - 1] for b in borders])


def branches(tokens: int) -> np.ndarray:
    """`doc_starts` with gaps: the second branch of a document skips the first one. Some gaps end inside blocks."""
    found = np.zeros((2, tokens, 3), np.int64)
    for sequence, parts in enumerate([[(5, 60, 30), (64, 64, 64)], [(20, 140, 70)]]):
        begin = 0
        for prompt, first, second in parts:
            gap, gap_end = begin + prompt, begin + prompt + first
            found[sequence, begin:, 0] = begin
            found[sequence, gap_end : gap_end + second, 1:] = gap, gap_end
            begin = gap_end + second
        found[sequence, begin:, 0] = begin
    return found


def visible(tokens: int, starts: np.ndarray | None, causal: bool, window: int) -> np.ndarray:
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    mask = np.broadcast_to((j <= i) if causal else (i == i), (2, tokens, tokens))
    if starts is not None and starts.ndim == 3:
        mask = mask & ((j < starts[..., 1:2]) | (j >= starts[..., 2:]))
        starts = starts[..., 0]
    mask = mask & (j >= starts[:, :, None]) if starts is not None else mask
    return mask & (np.flip(np.cumsum(np.flip(mask, 2), 2), 2) <= window) if window else mask


def off(found: Array, wanted: np.ndarray) -> float:
    """The relative error in norm."""
    return float(np.linalg.norm(found.numpy().astype(np.float64) - wanted) / np.linalg.norm(wanted))


class Case(NamedTuple):
    """Inputs of both passes, the mask of visible keys, and RoPE's angles, if there are any."""

    x: Array
    g: Array
    rest: tuple[Array | None, ...]
    attrs: dict[str, Any]
    mask: np.ndarray
    angles: np.ndarray | None


def rotated(x: np.ndarray, angles: np.ndarray, sign: int = 1) -> np.ndarray:
    """RoPE of queries and keys of a packed array in float64: pairs as complex numbers."""
    half, heads = x.shape[3] // 2, HEADS + KEY_HEADS
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(sign * 1j * angles)[..., None, :]
    return np.concatenate((np.concatenate((z.real, z.imag), 3)[:, :, :heads], x[:, :, heads:]), 2)


def case(
    size: int, dtype: DType, packed: bool | str, causal: bool, window: int, tokens: int = 150,
    rotation: str | None = None,
) -> Case:  # fmt: skip
    """`rotation` is "position" or "token": the angles are each position's or each token's. `packed` may be
    "branches".
    """
    rng = np.random.default_rng(size)
    x = on_gpu(rng.standard_normal((2, tokens, HEADS + 2 * KEY_HEADS, size)).astype(dtype.numpy), dtype)
    g = on_gpu(rng.standard_normal((2, tokens, HEADS, size)).astype(dtype.numpy), dtype)
    starts = (branches if packed == "branches" else documents)(tokens) if packed else None
    rest: tuple[Array | None, ...] = () if starts is None else (on_gpu(starts, int64),)
    angles = None
    if rotation is not None:
        angles = rng.uniform(-3, 3, ((2,) if rotation == "token" else ()) + (tokens, size // 2)).astype(np.float32)
        rest = (*(rest or (None,)), *(on_gpu(f(angles), float32) for f in (np.cos, np.sin)))
    attrs = {"heads": HEADS, "key_heads": KEY_HEADS, "scale": size**-0.5, "causal": causal, "window": window}
    return Case(x, g, rest, attrs, visible(tokens, starts, causal, window), angles)


def run(c: Case) -> tuple[Array, Array, Array]:
    """o, lse and the packed gradient; does not wait for the GPU."""
    o, lse, *kept = attention_packed(c.x, *c.rest, **c.attrs)
    return o, lse, attention_packed_backward(c.g, (kept or [c.x])[0], o, lse, *c.rest, **c.attrs)


def compare(c: Case, o: Array, dx: Array) -> None:
    """With `expected`, and with another run."""
    x, g = c.x.numpy().astype(np.float64), c.g.numpy().astype(np.float64)
    result, gradient = expected(x if c.angles is None else rotated(x, c.angles), g, c.mask)
    gradient = gradient if c.angles is None else rotated(gradient, c.angles, -1)
    for found, wanted in zip((o, dx), (result, gradient), strict=True):
        assert off(found, wanted) < TOLERANCE[c.x.dtype]
    assert run(c)[2].numpy().tobytes() == dx.numpy().tobytes()


def check(*what: Any) -> tuple[Array, Array, tuple[Array, Array, Array]]:
    """Compare what a `case` gives; the inputs and what both passes gave."""
    c = case(*what)
    o, lse, dx = run(c)
    compare(c, o, dx)
    return c.x, c.g, (o, lse, dx)


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize(
    ("size", "packed", "causal", "window"),
    [
        (64, False, True, 0), (64, True, True, 0), (64, True, True, 70), (200, False, False, 0),
        (64, "branches", True, 0), (64, "branches", True, 70),
    ],
)  # fmt: skip
def test_tiles_through_tma(uses_tma: list[bool], size: int, packed: bool | str, causal: bool, window: int) -> None:
    check(size, bfloat16, packed, causal, window)
    assert uses_tma
    assert all(uses_tma) or not is_interpreted()  # a GPU before Hopper has none


@pytest.mark.parametrize(("window", "tokens"), [(0, 350), (40, 350)])
def test_branches_skip_each_other(window: int, tokens: int) -> None:
    """Whole blocks of keys are skipped, too."""
    check(16, float32, "branches", True, window, tokens)


def test_all_keys_visible() -> None:
    check(16, bfloat16, False, False, 0)
    check(16, float32, False, False, 0, 70)


@pytest.mark.parametrize(
    ("size", "dtype", "rotation", "packed"),
    [(64, bfloat16, "token", True), (16, float16, "position", False), (32, float32, "token", False)],
)
def test_fused_rope(size: int, dtype: DType, rotation: str, packed: bool) -> None:
    """Forward gives the bits of `rope` and attention, one after the other."""
    c = case(size, dtype, packed, True, 0, 70, rotation)
    starts, cos, sin = c.rest
    o, lse, x = attention_packed(c.x, *c.rest, **c.attrs)
    compare(c, o, attention_packed_backward(c.g, x, o, lse, *c.rest, **c.attrs))
    apart = rope(c.x, cos, sin, heads=HEADS + KEY_HEADS)
    plain = attention_packed(*((apart,) if starts is None else (apart, starts)), **c.attrs)
    for found, wanted in zip((o, lse, x), (*plain, apart), strict=True):
        assert found.numpy().tobytes() == wanted.numpy().tobytes()


@pytest.mark.parametrize("programs", [1, 1024])
@pytest.mark.parametrize(("size", "passes"), [(32, 0), (24, 1)])
def test_inverse_rope_of_whole_heads_is_fused(
    size: int, passes: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the dK/dV kernel, or the one that adds up its splits; a padded head goes through `rope`."""
    calls: list[Any] = []

    def spy(*args: Any, **keywords: Any) -> None:
        calls.append(keywords)
        kernel(*args, **keywords)

    kernel = kernels.rope
    monkeypatch.setattr(kernels, "rope", spy)
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    c = case(size, float32, False, True, 0, 40 + len(str(programs)), "token")  # shapes not seen before: no replay
    o, _, dx = run(c)
    assert [k.get("inverse", False) for k in calls] == [False, *[True] * passes]
    compare(c, o, dx)


def test_parts_of_one_array_give_the_bits_of_three_arrays() -> None:
    x, g, (o, lse, dx) = check(32, float16, False, True, 0, 70)
    apart = [on_gpu(part.numpy().copy(), float16) for part in parts_of(x, HEADS, KEY_HEADS)]
    scale = 32**-0.5
    other, sums = attention(*apart, scale=scale)
    assert other.numpy().tobytes() == o.numpy().tobytes()
    grads = attention_backward(g, *apart, other, sums, scale=scale)
    assert np.concatenate([d.numpy() for d in grads], axis=2).tobytes() == dx.numpy().tobytes()
    assert sums.numpy().tobytes() == lse.numpy().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [bfloat16, float16, float32])
def test_head_sizes(size: int, dtype: DType) -> None:
    kinds = ((False, True, 0), (True, True, 0), (False, True, 100), (False, False, 0), ("branches", True, 0))
    cases = [case(size, dtype, *kind) for kind in kinds]
    cases.append(case(size, dtype, False, True, 0, 2100))  # the tiles of long sequences
    rotations = "token", "position", "token", "position", "token"
    cases += [case(size, dtype, *kind, 350, rotation) for kind, rotation in zip(kinds, rotations, strict=True)]
    cases.append(case(size, dtype, "branches", True, 90, 350, "position"))
    results = [run(c) for c in cases]  # before any is read: their kernels are compiled side by side
    for c, (o, _, dx) in zip(cases, results, strict=True):
        compare(c, o, dx)


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
            assert isinstance(tile, AttentionTile)
            assert (min(tile[:2]) + tile.stages * min(tile[:2])) * 4 * size <= 227 << 10


@pytest.mark.parametrize(("begin", "tokens", "window"), [(0, 70, 0), (61, 70, 0), (128, 1, 0), (100, 40, 50)])
def test_a_chunk_of_a_prompt_over_the_row_of_a_cache(
    begin: int, tokens: int, window: int, uses_tma: list[bool]
) -> None:
    """Queries behind earlier keys, which are read where the cache `[2, B, K, S, D]` has them."""
    rng = np.random.default_rng(begin)
    end, low = begin + tokens, max(0, begin + 1 - window) if window else 0
    values = rng.standard_normal((2, 2, KEY_HEADS, 160, 64)).astype(bfloat16.numpy)
    values[:, :, :, end:] = np.nan
    cache, q = on_gpu(values, bfloat16), on_gpu(rng.standard_normal((1, tokens, HEADS, 64)), bfloat16)
    s = cache.strides
    k, v = (
        cache.view((1, end - low, KEY_HEADS, 64), (s[1], s[3], s[2], s[4]), cache.offset + i * s[0] + s[1] + low * s[3])
        for i in range(2)
    )
    o, _ = attention(q, k, v, scale=0.125, causal=True, window=window)
    keys, queries = np.arange(end), np.arange(begin, end)[:, None]
    mask = (keys <= queries) & ((keys > queries - window) if window else True)
    x, y, z = (a.astype(np.float64) for a in (q.numpy()[0], values[0, 1, 0, :end], values[1, 1, 0, :end]))
    scores = np.where(mask, 0.125 * (x.swapaxes(0, 1) @ y.T), -np.inf)  # [Q, T, S]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    assert off(o, (p / p.sum(-1, keepdims=True) @ z).swapaxes(0, 1)[None]) < TOLERANCE[bfloat16]
    assert uses_tma
    assert all(uses_tma) or not is_interpreted()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_overlapped_wgmmas_give_the_same_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without the kernels of wgmma_backward.py both sides are the plain ones."""
    for packed, causal, window, tokens, rotation in (
        (True, True, 0, 200, "token"), (False, True, 70, 130, None), (False, False, 0, 64, "position"),
        ("branches", True, 0, 350, "token"),
    ):  # fmt: skip
        c = case(size, bfloat16, packed, causal, window, tokens, rotation)
        o, lse, *kept = attention_packed(c.x, *c.rest, **c.attrs)
        found = []
        for overlaps in (kernels.overlaps_wgmmas, lambda p, t: False):
            monkeypatch.setattr(kernels, "overlaps_wgmmas", overlaps)
            dx = on_gpu(np.full(c.x.shape, np.nan, bfloat16.numpy), bfloat16)
            kernels.attention_packed_backward(dx, c.g, (kept or [c.x])[0], o, lse, *c.rest, **c.attrs)
            found.append(dx.numpy().tobytes())
        assert found[0] == found[1]
        monkeypatch.undo()
