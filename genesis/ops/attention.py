"""Scaled dot-product attention in blocks: causal, grouped-query, with document boundaries and sliding windows.

`attention` takes queries, keys and values. `attention_packed` takes them concatenated in one tensor, as a packed matmul
produces them, and returns the gradient in the same form.

The reference iterates over query blocks and reads only the keys that are visible to a block, as the kernel does. Scores
and sums are float32 or wider.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import is_split, one_blas_thread, parallel, scratch
from genesis.dtypes import INTEGER, float32, float64, int64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Context, Grads, gradient_like, op
from genesis.ops.blocks import BLOCK, upcast
from genesis.ops.elementwise import arange, cast, eq, exp, ge, gt, le, logical_and, logical_or, lt, mul, sub, where
from genesis.ops.linalg import matmul, transposed
from genesis.ops.reduce import logsumexp, sum_to_shape
from genesis.ops.reduce import sum as sum_of
from genesis.ops.rope import rope
from genesis.ops.shape import cat, permute, reshaped

BLOCK_QUERIES = 64  # small enough to skip many masked keys, large enough for efficient calls
KEY_BLOCK = 64  # keys per block inside `genesis.exact`, counted from a document's start
SAFE_SCORE = 40.0  # no maximum is subtracted from scores within ±40: e^±40 and their sums fit easily into float32


def by_token(x: Array, by_head: bool = True) -> Array:
    """Return a view of x `[B, H, T, D]` as `[B, T, H, D]` if `by_head`, else x."""
    if not by_head:
        return x
    (b, h, t, d), (sb, sh, st, sd) = x.shape, x.strides
    return x.view((b, t, h, d), (sb, st, sh, sd))


def _infer(
    q: Array, k: Array, v: Array, starts: Array | None = None, *, scale: float, causal: bool = True, window: int = 0,
    by_head: bool = False,
) -> tuple[Spec, Spec]:  # fmt: skip
    if by_head and q.ndim == k.ndim == v.ndim == 4:
        if q.shape[1] != k.shape[1]:
            raise ShapeError(f"attention by head takes as many key heads as query heads, got {q.shape} and {k.shape}")
        given, (q, k, v) = q.spec, (by_token(x) for x in (q, k, v))
        return given, _infer(q, k, v, starts, scale=scale, causal=causal, window=window)[1]
    if not (q.ndim == k.ndim == v.ndim == 4) or k.shape != v.shape:
        raise ShapeError(
            f"attention takes q [B, T, Hq, D] and k, v [B, S, Hkv, D], got {q.shape}, {k.shape}, {v.shape}"
        )
    (b, t, hq, d), (bk, s, hk, dk) = q.shape, k.shape
    if b != bk or d != dk or hk == 0 or hq % hk:
        raise ShapeError(
            f"attention: q {q.shape} and k {k.shape} differ in batch or head size, or {hq} is not a multiple of {hk}"
        )
    if causal and s < t:
        raise ShapeError(f"attention: causal attention with {t} queries needs at least as many keys, got {s}")
    if starts is not None and (starts.shape not in ((b, t), (b, t, 3)) or starts.dtype.category != INTEGER):
        what = f"attention: starts must be integers [{b}, {t}] or [{b}, {t}, 3], got {starts.dtype} {starts.shape}"
        raise ShapeError(what)
    if not q.dtype.is_floating_point or k.dtype is not q.dtype or v.dtype is not q.dtype:
        raise DTypeError(f"attention takes q, k, v of one float type, got {q.dtype}, {k.dtype}, {v.dtype}")
    return Spec(q.shape, q.dtype), Spec((b, hq, t), float64 if q.dtype is float64 else float32)


class _Block(NamedTuple):
    """Queries [first, last), and the keys [low, high) that any of them sees.

    `bias` `[queries, 1, n]` is -inf where a query does not see a key and 0 elsewhere, for the keys in `masked`. All
    other keys are visible to all queries. None if that holds for every key.
    """

    first: int
    last: int
    low: int
    high: int
    masked: slice
    bias: np.ndarray | None


@functools.cache
def _triangle(queries: int) -> np.ndarray:
    """Return the bias of consecutive queries over the keys after the first query; a query sees keys up to its own."""
    hidden = np.arange(queries - 1) >= np.arange(queries)[:, None, None]
    bias = np.where(hidden, np.float32(-np.inf), np.float32(0))
    bias.flags.writeable = False
    return bias


def _blocks(queries: int, keys: int, starts: np.ndarray | None, causal: bool, window: int) -> list[_Block]:
    """Return the query blocks of one sequence. Query i is at key position i + keys - queries."""
    shift = keys - queries
    result = []
    for first in range(0, queries, BLOCK_QUERIES):
        last = min(first + BLOCK_QUERIES, queries)
        same_document = starts is None or bool((starts[first:last] == starts[first]).all())
        hides = starts is not None and bool((starts[first:last, 1] < starts[first:last, 2]).any())
        # Most blocks need no mask for each pair of query and key.
        if causal and not window and same_document and not hides:
            low = 0 if starts is None else max(int(starts[first, 0]), 0)
            if low <= first + shift:
                masked = slice(first + shift + 1 - low, last + shift - low)
                result.append(_Block(first, last, low, last + shift, masked, _triangle(last - first)))
                continue
        # The general case: the visible range of each query.
        position = np.arange(first, last) + shift
        begin, gap, gap_end = np.zeros((3, last - first), np.int64) if starts is None else starts[first:last].T
        begin, gap_end = np.maximum(begin, 0), np.maximum(gap, gap_end)
        if window:
            bound = position - window + 1
            begin = np.maximum(begin, np.where(bound < gap_end, bound - (gap_end - gap), bound))
        end = position + 1 if causal else np.full(last - first, keys)
        low, high = int(begin.min(initial=keys)), int(end.max(initial=0))
        seen = np.arange(low, high)
        hidden = (seen < begin[:, None]) | (seen >= end[:, None])  # [queries, keys]
        hidden |= (seen >= gap[:, None]) & (seen < gap_end[:, None])
        columns = np.flatnonzero(hidden.any(axis=0))
        masked = slice(int(columns[0]), int(columns[-1]) + 1) if columns.size else slice(0)
        bias = np.where(hidden[:, None, masked], np.float32(-np.inf), np.float32(0)) if columns.size else None
        result.append(_Block(first, last, low, high, masked, bias))
    return result


def _all_blocks(
    q: np.ndarray, k: np.ndarray, starts: np.ndarray | None, causal: bool, window: int
) -> list[list[_Block]]:
    """Return the query blocks of every sequence; without document boundaries, all sequences share one list."""
    if starts is None:
        return [_blocks(q.shape[1], k.shape[1], None, causal, window)] * q.shape[0]
    if starts.ndim == 2:  # no query skips keys
        starts = np.stack([starts, 0 * starts, 0 * starts], -1)
    return [_blocks(q.shape[1], k.shape[1], row, causal, window) for row in starts]


def _by_group(x: np.ndarray, group: int, column: np.ndarray | float | None = None) -> np.ndarray:
    """Return `[tokens, heads·group, D]` as contiguous `[heads, tokens·group, D]`, in the dtype of scores.

    `column`, `[heads, tokens, group]` or a number, is appended to each row. The product of rows [x, c] and [y, 1] then
    adds c to x·y without another pass over the scores.
    """
    tokens, heads, size = x.shape
    width = size if column is None else size + 1
    grouped = np.empty((heads // group, tokens, group, width), np.float32 if x.dtype.itemsize == 2 else x.dtype)
    grouped[..., :size] = x.reshape(tokens, heads // group, group, size).transpose(1, 0, 2, 3)
    if column is not None:
        grouped[..., size] = column
    return grouped.reshape(heads // group, tokens * group, width)


def _from_group(x: np.ndarray, group: int) -> np.ndarray:
    """Invert `_by_group`, as a view where the strides allow it."""
    heads, rows, size = x.shape
    return (
        x.reshape(heads, rows // group, group, size).transpose(1, 0, 2, 3).reshape(rows // group, heads * group, size)
    )


def _product(x: np.ndarray, y: np.ndarray, workspace: np.ndarray) -> np.ndarray:
    """Return x·y in the memory of `workspace`, whose pages are already mapped."""
    shape = (*x.shape[:2], y.shape[2])
    product: np.ndarray = np.matmul(x, y, out=workspace[: x.shape[0] * x.shape[1] * y.shape[2]].reshape(shape))
    return product


def _scores(q: np.ndarray, k: np.ndarray, block: _Block, group: int, workspace: np.ndarray) -> np.ndarray:
    """Return scores `[heads, queries·group, keys]` of scaled queries, -inf where masked; k is `[heads, keys, D]`."""
    s = _product(q, k.transpose(0, 2, 1), workspace)
    if block.bias is not None:
        s.reshape(len(s), -1, group, s.shape[2])[..., block.masked] += block.bias
    return s


def _longest(x: np.ndarray) -> float:
    """Return the largest Euclidean norm of a row; NaN if any row contains NaN."""
    return math.sqrt(np.einsum("hrd,hrd->hr", x, x).max(initial=0))


def _shift(s: np.ndarray) -> np.ndarray:
    """Subtract each row's largest score and return it, `[..., 1]`; it is 0 for a row that sees no key."""
    top: np.ndarray = s.max(axis=-1, keepdims=True)
    top[np.isneginf(top)] = 0  # the row's weights become 0 instead of NaN
    s -= top
    return top


def _each_head(work: Callable[[int, slice, np.ndarray], None], q: np.ndarray, k: np.ndarray, matrices: int) -> None:
    """Call `work(b, key heads, workspace)` for every sequence and group of heads, in threads.

    `workspace` `[matrices, elements]` holds scores. Heads are grouped while their scores fill about one block: fewer
    and larger numpy calls, between which threads contend less for the interpreter's lock.
    """
    batch, keys, heads = k.shape[:3]
    dtype = np.dtype(np.float32) if q.dtype.itemsize == 2 else q.dtype
    scores = min(BLOCK_QUERIES, q.shape[1]) * (q.shape[2] // heads) * keys
    together = max(1, min(heads, BLOCK // max(scores, 1)))
    parts = [slice(h, min(h + together, heads)) for h in range(0, heads, together)]

    def process_parts(start: int, stop: int) -> None:
        with scratch((matrices, together * scores), dtype) as workspace:
            for i in range(start, stop):
                work(i // len(parts), parts[i % len(parts)], workspace)

    elements = q.size * keys
    if batch * len(parts) == 1 or not is_split(elements):
        process_parts(0, batch * len(parts))
        return
    with one_blas_thread():
        parallel(process_parts, batch * len(parts), elements)


def _flops(inputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    """Return the FLOPs of the two matmuls, half of them for causal attention."""
    q, k = (by_token(x, attrs.get("by_head", False)) for x in inputs[:2])
    full = 4 * q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1] * q.shape[3]
    return full // 2 if attrs.get("causal", True) else full


def _vjp(ctx: Context, g: Array, _: None) -> Grads:
    q, k, v, starts = (*ctx.inputs, None)[:4]
    dq, dk, dv = attention_backward(g, q, k, v, ctx.outputs[0], ctx.outputs[1], starts, **ctx.attrs)
    return (dq, dk, dv, None)[: len(ctx.inputs)]


@op(
    "attention",
    _infer,
    vjp=_vjp,
    saves=(0, 1, 2, 3, "out"),
    auxiliary=(1,),
    flops=lambda i, o, a: _flops(i, a),
    autocast="low_precision",
)
def attention(
    out: tuple[np.ndarray, np.ndarray],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    starts: np.ndarray | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    by_head: bool = False,
) -> None:
    """o = softmax(scale·q·kᵀ)·v over the visible keys; the second output is the LSE of the scores (no gradient).

    Args:
        q: `[B, T, Hq, D]`. Query i is at key position i + S - T.
        k: `[B, S, Hkv, D]`; query head h reads key head h // (Hq / Hkv).
        v: `[B, S, Hkv, D]`.
        starts: `[B, T]`, the first key position that each query sees (the start of its document), or None. `[B, T, 3]`
            also has the begin and the end of a range of earlier keys that the query skips. Windows do not count them.
        causal: mask the keys after the query.
        window: if positive, a query sees only the last `window` keys up to its own.
        by_head: q, k, v and o are `[B, H, T, D]`, with as many key heads as query heads.

    A query that sees no key returns 0. Source of forward and backward: Dao, "FlashAttention-2", 2023.
    """
    o, lse = out
    if by_head:
        o, q, k, v = (x.swapaxes(1, 2) for x in (o, q, k, v))
    group = q.shape[2] // k.shape[2]
    blocks = _all_blocks(q, k, starts, causal, window)

    factor = upcast(q[:0]).dtype.type(scale)

    def some_heads(b: int, heads: slice, workspace: np.ndarray) -> None:
        mine = slice(heads.start * group, heads.stop * group)
        qh, kh, vh = _by_group(q[b, :, mine], group), _by_group(k[b, :, heads], 1), _by_group(v[b, :, heads], 1, 1)
        qh *= factor
        # Cauchy-Schwarz bounds the scores. The comparison with NaN is false, so NaNs are shifted, too.
        shifted = not (_longest(qh) * _longest(kh) <= SAFE_SCORE)
        top = np.zeros((*qh.shape[:2], 1), qh.dtype)
        sums = np.zeros((*qh.shape[:2], vh.shape[2]), qh.dtype)  # of the weighted values, and of the weights
        # Accumulate the weighted values and the sum of weights, one block of queries at a time.
        for block in blocks[b]:
            if block.high <= block.low:
                continue
            rows, keys = slice(block.first * group, block.last * group), slice(block.low, block.high)
            s = _scores(qh[:, rows], kh[:, keys], block, group, workspace[0])
            if shifted:
                top[:, rows] = _shift(s)
            np.exp(s, out=s)
            np.matmul(s, vh[:, keys], out=sums[:, rows])
        # Normalize once, and store LSE and output.
        weighted, total = sums[..., :-1], sums[..., -1:]
        with np.errstate(divide="ignore"):
            lse[b, mine] = _from_group(top + np.log(total), group)[:, :, 0].T
        weighted /= np.where(total == 0, 1, total)
        o[b, :, mine] = _from_group(weighted, group)

    if q.size and k.size:
        _each_head(some_heads, q, k, 1)
    else:
        o.fill(0)
        lse.fill(-np.inf)


def unstacked(x: Array) -> list[Array]:
    """Return views of the entries of x `[..., n]` in its last dimension."""
    return [x.view(x.shape[:-1], x.strides[:-1], x.offset + i * x.strides[-1]) for i in range(x.shape[-1])]


def _visible(q: Array, keys: int, starts: Array | None, causal: bool, window: int) -> Array | None:
    """Return which keys each query sees, to broadcast to `[B, Hkv, G, T, S]`; None if all."""
    (batch, queries), device = q.shape[:2], q.device
    number = arange(start=0, step=1, count=keys, dtype=int64, device=device)
    position = reshaped(arange(start=keys - queries, step=1, count=queries, dtype=int64, device=device), (queries, 1))
    rules, bound = [le(number, position)] if causal else [], sub(position, window)
    if starts is not None:
        begin, *gap = (
            reshaped(x, (batch, 1, 1, queries, 1)) for x in ([starts] if starts.ndim == 2 else unstacked(starts))
        )
        rules.append(ge(number, begin))
        if gap:
            rules.append(logical_or(lt(number, gap[0]), ge(number, gap[1])))
            inside = logical_and(lt(gap[0], gap[1]), lt(bound, sub(gap[1], 1)))
            bound = where(inside, sub(bound, sub(gap[1], gap[0])), bound)
    if window:
        rules.append(gt(number, bound))
    return functools.reduce(logical_and, rules) if rules else None


def _backward_plain(
    g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, starts: Array | None = None, *,
    scale: float, causal: bool = True, window: int = 0, by_head: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """The gradients by ops on arrays, with all scores in memory."""
    if by_head:
        g, q, k, v, o = (permute(x, dims=(0, 2, 1, 3)) for x in (g, q, k, v, o))
        found = _backward_plain(g, q, k, v, o, lse, starts, scale=scale, causal=causal, window=window)
        return tuple([permute(d, dims=(0, 2, 1, 3)) for d in found])
    (batch, _, _, size), (keys, shared) = q.shape, k.shape[1:3]

    def grouped(x: Array) -> Array:  # [B, T, H, D] -> [B, Hkv, G, T, D]
        x = x if x.dtype is lse.dtype else cast(x, dtype=lse.dtype)
        parts = reshaped(x, (batch, x.shape[1], shared, x.shape[2] // max(shared, 1), size))
        return permute(parts, dims=(0, 2, 3, 1, 4))

    def back(x: Array, like: Array) -> Array:
        if x.shape[2] * shared != like.shape[2]:  # keys and values: summed over the queries that share them
            x = sum_to_shape(x, shape=(batch, shared, 1, *x.shape[3:]))
        d = reshaped(permute(x, dims=(0, 3, 1, 2, 4)), like.shape)
        return d if d.dtype is like.dtype else cast(d, dtype=like.dtype)

    gh, qh, kh, vh = (grouped(x) for x in (g, q, k, v))
    scores, seen = mul(matmul(qh, transposed(kh)), scale), _visible(q, keys, starts, causal, window)
    scores = scores if seen is None else where(seen, scores, -math.inf)
    total = logsumexp(scores, axes=-1, keepdim=True)
    p = exp(sub(scores, where(eq(total, -math.inf), 0.0, total)))
    dp = matmul(gh, transposed(vh))
    ds = mul(mul(p, sub(dp, sum_of(mul(dp, p), axes=-1, keepdim=True))), scale)
    grads = matmul(ds, kh), matmul(transposed(ds), qh), matmul(transposed(p), gh)
    return tuple([back(d, like) for d, like in zip(grads, (q, k, v), strict=True)])


def _packed_plain(
    g: Array, qkv: Array, o: Array, lse: Array, starts: Array | None = None, *tables: Array, heads: int,
    key_heads: int, **attrs: Any,
) -> Array:  # fmt: skip
    # With tables qkv is an auxiliary output, which has no history: reading it raises.
    parts = parts_of(qkv, heads, key_heads)
    d: Array = cat(*_backward_plain(g, *parts, o, lse, starts, **attrs), dim=2)
    return rope(d, *tables, inverse=True, heads=heads + key_heads) if tables else d


def _backward_infer(
    g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, starts: Array | None = None, **attrs: object
) -> tuple[Spec, ...]:
    return gradient_like("attention_backward", g, q, k, v)


@op("attention_backward", _backward_infer, plain=_backward_plain, flops=lambda i, o, a: 5 * _flops(i[1:3], a) // 2)
def attention_backward(
    out: tuple[np.ndarray, np.ndarray, np.ndarray],
    g: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    starts: np.ndarray | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    by_head: bool = False,
) -> None:
    """dv = pᵀ·g, ds = p·(g·vᵀ - delta), dq = scale·ds·k, dk = scale·dsᵀ·q with p = e^(s - lse), delta = Σ g·o."""
    dq, dk, dv = out
    if by_head:
        dq, dk, dv, g, q, k, v, o = (x.swapaxes(1, 2) for x in (*out, g, q, k, v, o))
    group = q.shape[2] // k.shape[2]
    blocks = _all_blocks(q, k, starts, causal, window)

    factor = upcast(q[:0]).dtype.type(scale)

    def some_heads(b: int, heads: slice, workspace: np.ndarray) -> None:
        mine, size = slice(heads.start * group, heads.stop * group), q.shape[3]
        kh, vh = _by_group(k[b, :, heads], 1, 1), _by_group(v[b, :, heads], 1, 1)
        # `scale` multiplies queries and results rather than scores; the matmuls add -lse and -delta
        sums = lse[b, mine].reshape(-1, group, q.shape[1]).transpose(0, 2, 1)
        qh = _by_group(q[b, :, mine], group, np.where(np.isneginf(sums), 0, -sums))
        qh[..., :size] *= factor
        gh = _by_group(g[b, :, mine], group, 0)
        gh[..., size] -= np.einsum("hqd,hqd->hq", gh[..., :size], _by_group(o[b, :, mine], group))
        dqh, dkh, dvh = (np.zeros((*x.shape[:2], size), x.dtype) for x in (qh, kh, vh))
        # For each block: p, dv, ds, dk and dq.
        for block in blocks[b]:
            if block.high <= block.low:
                continue
            rows, keys = slice(block.first * group, block.last * group), slice(block.low, block.high)
            p = _scores(qh[:, rows], kh[:, keys], block, group, workspace[0])
            np.exp(p, out=p)
            dvh[:, keys] += np.matmul(p.transpose(0, 2, 1), gh[:, rows, :size])
            ds = _product(gh[:, rows], vh[:, keys].transpose(0, 2, 1), workspace[1])
            ds *= p
            dkh[:, keys] += np.matmul(ds.transpose(0, 2, 1), qh[:, rows, :size])
            np.matmul(ds, kh[:, keys, :size], out=dqh[:, rows])
        dqh *= factor
        dq[b, :, mine] = _from_group(dqh, group)
        dk[b, :, heads], dv[b, :, heads] = dkh.transpose(1, 0, 2), dvh.transpose(1, 0, 2)

    if q.size and k.size:
        _each_head(some_heads, q, k, 2)
    else:
        for x in out:
            x.fill(0)


# --- Packed -----------------------------------------------------------------------------------------------------------


def parts_of(x: Array, heads: int, key_heads: int) -> tuple[Array, Array, Array]:
    """Return views of a packed array: queries `[B, T, Hq, D]`, keys and values `[B, T, Hkv, D]`."""

    def part(first: int, count: int) -> Array:
        return x.view((*x.shape[:2], count, x.shape[3]), x.strides, x.offset + first * x.strides[2])

    return part(0, heads), part(heads, key_heads), part(heads + key_heads, key_heads)


def _split(x: np.ndarray, heads: int, key_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return x[:, :, :heads], x[:, :, heads : heads + key_heads], x[:, :, heads + key_heads :]


def _check_tables(qkv: Array, tables: tuple[Array, ...]) -> None:
    if len(tables) not in (0, 2):
        raise ShapeError("attention_packed takes cos and sin together")
    if tables:
        rope.infer(qkv, *tables)


def _packed_infer(
    qkv: Array,
    starts: Array | None = None,
    *tables: Array,
    heads: int,
    key_heads: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
) -> tuple[Spec, ...]:
    if qkv.ndim != 4 or min(heads, key_heads) < 1 or qkv.shape[2] != heads + 2 * key_heads:
        raise ShapeError(
            f"attention_packed takes [B, T, Hq + 2·Hkv, D]; {heads} query and {key_heads} key heads, got {qkv.shape}"
        )
    _check_tables(qkv, tables)
    specs = _infer(*parts_of(qkv, heads, key_heads), starts, scale=scale, causal=causal, window=window)
    return (*specs, qkv.spec) if tables else specs


def _packed_flops(inputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    b, t, _, d = inputs[0].shape
    full: int = 4 * b * attrs["heads"] * t * t * d
    return full // 2 if attrs.get("causal", True) else full


def _packed_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    qkv, *rest = ctx.inputs
    o, lse, *rotated = ctx.outputs
    d = attention_packed_backward(g, rotated[0] if rotated else qkv, o, lse, *rest, **ctx.attrs)
    return d, *[None] * len(rest)


@op(
    "attention_packed",
    _packed_infer,
    vjp=_packed_vjp,
    # With tables (inputs 2 and 3), backward reads the rotated output instead of qkv.
    saves=lambda needs: (1, 2, 3, "out") if len(needs) > 2 else (0, 1, "out"),
    auxiliary=(1, 2),
    flops=lambda i, o, a: _packed_flops(i, a),
    autocast="low_precision",
    autocast_inputs=1,
)
def attention_packed(
    out: tuple[np.ndarray, ...],
    qkv: np.ndarray,
    starts: np.ndarray | None = None,
    *tables: np.ndarray,
    heads: int,
    key_heads: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
) -> None:
    """`attention` with queries, keys and values in one array: qkv `[B, T, Hq + 2·Hkv, D]`, o `[B, T, Hq, D]`.

    With `tables`, queries and keys are first rotated as by `rope`. The rotated array is then a third output, which
    backward saves instead of qkv: it reads each query many times, so rotating again would cost more than one write.
    The backward kernels apply the inverse RoPE to gradients without a separate pass.

    Args:
        tables: cos and sin of the angles, `[T, D/2]` or `[B, T, D/2]`, without gradient; or none.
        heads: number of query heads Hq, which come first in qkv.
        key_heads: number Hkv of key heads, which follow, and of value heads, which come last.
    """
    if tables:
        rope.reference(out[2], qkv, *tables, heads=heads + key_heads)
        qkv = out[2]
    parts = _split(qkv, heads, key_heads)
    attention.reference(out[:2], *parts, starts, scale=scale, causal=causal, window=window)


def _packed_backward_infer(
    g: Array,
    qkv: Array,
    o: Array,
    lse: Array,
    starts: Array | None = None,
    *tables: Array,
    heads: int,
    key_heads: int,
    **attrs: object,
) -> Spec:
    _check_tables(qkv, tables)
    gradient_like("attention_packed_backward", g, like=parts_of(qkv, heads, key_heads)[0])
    return Spec(qkv.shape, qkv.dtype)


@op(
    "attention_packed_backward",
    _packed_backward_infer,
    plain=_packed_plain,
    flops=lambda i, o, a: 5 * _packed_flops(i[1:2], a) // 2,
)
def attention_packed_backward(
    out: np.ndarray,
    g: np.ndarray,
    qkv: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    starts: np.ndarray | None = None,
    *tables: np.ndarray,
    heads: int,
    key_heads: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
) -> None:
    """`attention_backward` with dq, dk and dv concatenated in one array.

    With `tables`, qkv is the rotated array, and dq and dk receive the inverse RoPE: they are gradients of the unrotated
    array.
    """
    attrs: dict[str, Any] = {"scale": scale, "causal": causal, "window": window}
    parts = _split(qkv, heads, key_heads)
    if not tables:
        attention_backward.reference(_split(out, heads, key_heads), g, *parts, o, lse, starts, **attrs)
        return
    with scratch(out.shape, upcast(out[:0]).dtype) as rotated:  # rounded once, after the inverse RoPE
        attention_backward.reference(_split(rotated, heads, key_heads), g, *parts, o, lse, starts, **attrs)
        rope.reference(out, rotated, *tables, inverse=True, heads=heads + key_heads)
