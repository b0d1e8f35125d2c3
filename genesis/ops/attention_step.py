"""Attention of one new token per sequence over a KV cache, fused with the steps before it.

These are the norms of heads, RoPE, and the write of the token's key and value into the cache. A row of the batch is a
sequence. Its length is read from device memory, so no step synchronizes with the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import BOOL, INTEGER, DType, float8_e4m3fn, float32, int64
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import upcast

LARGEST = 448.0  # largest finite e4m3 value; an e4m3 cache clips to it


def _infer(
    qkv: Array,
    cache: Array,
    lengths: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    query_weight: Array | None = None,
    key_weight: Array | None = None,
    active: Array | None = None,
    *,
    scale: float,
    window: int = 0,
    eps: float = 0.0,
    early: bool = False,
) -> Spec:
    if qkv.ndim != 3 or cache.ndim != 5:
        raise ShapeError(f"attention_step takes qkv [B, Q + 2·K, D] and a cache [2, B, K, S, D], got {qkv.shape} and"
                         f" {cache.shape}")  # fmt: skip
    batch, packed_heads, size = qkv.shape
    key_heads, capacity = cache.shape[2:4]
    heads = packed_heads - 2 * key_heads
    if cache.shape != (2, batch, key_heads, capacity, size) or key_heads < 1 or heads < 1 or heads % key_heads:
        raise ShapeError(f"attention_step: a cache {cache.shape} does not fit qkv {qkv.shape}, {heads} query heads")
    for name, x in (("lengths", lengths), ("active", active)):
        if x is not None and (x.shape != (batch,) or x.dtype.category not in (INTEGER, BOOL)):
            raise ShapeError(f"attention_step: {name} must be integers [{batch}], got {x.dtype} {x.shape}")
    if lengths.dtype is not int64:
        raise DTypeError(f"attention_step takes int64 lengths, got {lengths.dtype}")
    _check_tables(cos, sin, capacity, size)
    if (query_weight is None) != (key_weight is None) or any(
        w is not None and w.shape != (size,) for w in (query_weight, key_weight)
    ):
        raise ShapeError(f"attention_step takes both norm weights with shape [{size}], or neither")
    _check_types(qkv.dtype, cache)
    return Spec((batch, heads, size), qkv.dtype)


def _check_tables(cos: Array | None, sin: Array | None, capacity: int, size: int) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ShapeError("attention_step takes cos and sin together")
    if size % 2 or cos.shape != sin.shape or cos.shape[1:] != (size // 2,) or cos.shape[0] < capacity:
        raise ShapeError(f"attention_step: cos {cos.shape}, sin {sin.shape} do not fit {capacity} positions of {size}")


def _check_types(dtype: DType, cache: Array) -> None:
    coded = cache.dtype is float8_e4m3fn and dtype.itemsize in (2, 4)
    if not dtype.is_floating_point or not (coded or cache.dtype is dtype):
        what = f"attention_step takes a cache of qkv's float type or {float8_e4m3fn.name}"
        raise DTypeError(f"{what}, got {cache.dtype} and {dtype}")
    if cache.overlaps_itself():
        raise ShapeError(f"attention_step: elements of a cache of strides {cache.strides} share memory")


def _flops(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    """Return the FLOPs of a full cache; actual lengths are not known here."""
    return 4 * outputs[0].size * inputs[1].shape[3]


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate each pair (x[i], x[i + D/2]) of heads `[heads, D]` by its angle."""
    left, right = np.split(x, 2, axis=1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=1)


def _normalised(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    normalised: np.ndarray = x * (1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps)) * upcast(weight)
    return normalised


@op("attention_step", _infer, mutates=(1,), flops=_flops)
def attention_step(
    out: np.ndarray,
    qkv: np.ndarray,
    cache: np.ndarray,
    lengths: np.ndarray,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    query_weight: np.ndarray | None = None,
    key_weight: np.ndarray | None = None,
    active: np.ndarray | None = None,
    *,
    scale: float,
    window: int = 0,
    eps: float = 0.0,
    early: bool = False,
) -> None:
    """o = softmax(scale·q·kᵀ)·v over the keys of each sequence: the cached ones and the new token's own. No gradient.

    With norm weights, queries and keys are normalised by head; with cos and sin they are then rotated. Key and value
    are written into the cache at the sequence's length. A row that is inactive, or whose cache is full, returns 0 and
    writes nothing. Cache contents from a row's length on are never read.

    Args:
        qkv: `[B, Q + 2·K, D]`, queries, keys and values of one token per sequence.
        cache: `[2, B, K, S, D]`, keys and values; in qkv's dtype or e4m3, which holds at most ±448.
        lengths: int64 `[B]`, tokens in the cache before this one, which is also the token's position.
        cos: cosines of the angles of each position, `[at least S, D/2]`.
        sin: sines, in the same shape.
        query_weight: weight `[D]` of the queries' RMSNorm by head, with `eps`.
        key_weight: weight `[D]` of the keys' RMSNorm by head.
        active: `[B]`, 0 for inactive rows; None means that all rows are active.
        window: if positive, a token sees only the last `window` keys up to its own.
        early: for CUDA graphs only: no earlier kernel writes an input other than qkv, so the kernel may read them
            while earlier kernels still run. Does not change the result.
    """
    key_heads, capacity = cache.shape[2:4]
    heads = qkv.shape[1] - 2 * key_heads
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length < capacity or (active is not None and not active[row]):
            out[row] = 0
            continue
        q, k, v = np.split(upcast(qkv[row]), [heads, heads + key_heads])
        if query_weight is not None and key_weight is not None:
            q, k = _normalised(q, query_weight, eps), _normalised(k, key_weight, eps)
        if cos is not None and sin is not None:
            q, k = (_rotated(x, upcast(cos[length]), upcast(sin[length])) for x in (q, k))
        low = max(0, length + 1 - window) if window else 0
        wide = q.dtype if q.dtype.itemsize > 4 else np.dtype(float32.numpy)
        before = cache[:, row, :, low:length].astype(wide)  # [2, K, n, D]
        keys, values = np.concatenate([before, np.stack([k, v])[:, :, None]], axis=2)
        scores = q.reshape(key_heads, -1, q.shape[1]) @ keys.swapaxes(1, 2) * wide.type(scale)  # [K, Q / K, n + 1]
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        out[row] = (weights @ values / weights.sum(axis=2, keepdims=True)).reshape(heads, -1)
        new = np.stack([k, v])
        cache[:, row, :, length] = np.clip(new, -LARGEST, LARGEST) if cache.dtype == float8_e4m3fn.numpy else new
