"""CUDA implementations of attention: a forward kernel (online softmax) and two backward kernels (recomputed scores).

Plain reference: genesis/ops/attention.py: `attention`, `attention_backward`, `attention_packed`,
`attention_packed_backward`.

For each block of queries, the forward and dQ kernels loop over the blocks of keys in its visible range. For each block
of keys, the dK/dV kernel loops over the blocks of queries that see it. Every result therefore has one writer, and the
same inputs give the same bits without atomics. Blocks outside the visible range are skipped. Only blocks on its edge
(the diagonal, document boundaries, the window's end) need a mask. For causal self-attention with heads of 65 to 256 on
Hopper, the dK/dV kernel runs first and spills ds, so that dQ is a single GEMM; see spilled_ds.py.

Grouped-query attention: the query heads of a group share a key head, so dK and dV are sums over the group. One program
sums over the whole group. Where that leaves too few programs to fill the GPU, each program sums over some of the heads,
and `attention_bwd_reduce_splits` adds the partial sums in order.

RoPE: the forward pass rotates queries and keys with `rope` first. The backward pass reads the rotated values, because
the dK/dV kernel loads each tile of queries once per block of keys, by TMA, which can only copy. Gradients go through
the inverse RoPE in the registers of the kernel that stores them, before they are rounded.

Scores are in units of log2: e^x = 2^(x·log2 e), and the scale includes that factor. Operands of dots have the inputs'
type (weights and ds are rounded to it, as tensor cores require); accumulators are float32. A dot of float32 inputs is
three dots of their tf32 parts, whose error is as small as that of a float32 sum, or one dot where tf32 is allowed.
float64 is computed in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.backend.cuda.tma import Descriptor
from genesis.dtypes import bfloat16, int32
from genesis.errors import UsageError
from genesis.kernels.attention.flash import (
    attention_bwd_delta,
    attention_bwd_dkdv,
    attention_bwd_dq,
    attention_bwd_reduce_splits,
    attention_fwd,
)
from genesis.kernels.attention.problem import (
    EXACT_SIZES,
    AttentionTile,
    Problem,
    padded_head_dim,
    problem_of,
    tiles_of,
)
from genesis.kernels.attention.spilled_ds import (
    DS_TILE,
    HEAD_DIMS,
    attention_bwd_dq_from_ds,
    ds_buffer_shape,
    ds_chunks_of,
)
from genesis.kernels.attention.warp_specialized import forward_ws_into
from genesis.kernels.attention.wgmma_backward import (
    VECTOR_LAYOUT,
    attention_bwd_dkdv_wgmma,
    attention_bwd_dq_wgmma,
    overlaps_wgmmas,
)
from genesis.kernels.elements import work_type
from genesis.kernels.norm.rope import rope
from genesis.kernels.pointwise.elementwise import elementwise, identity
from genesis.ops.attention import by_token, parts_of
from genesis.ops.shape import contiguous

PROGRAMS = 1024  # dK/dV programs that balance a triangle of work over the SMs


def _tiles(q: Array, p: Problem) -> tuple[AttentionTile, AttentionTile, AttentionTile]:
    shared = backend_of(q.device).driver.properties.shared_memory
    return tiles_of(q.dtype, p.head_dim, p.tokens, p.keys, shared, p.uses_tma and p.is_hopper)


def _options(t: AttentionTile) -> dict[str, int]:
    options = {"num_warps": t.warps, "num_stages": t.stages}
    return {**options, "maxnreg": t.registers} if t.registers else options


def forward_into(
    o: Array, lse: Array, q: Array, k: Array, v: Array, doc_starts: Array | None, scale: float, causal: bool,
    window: int, tile: AttentionTile | None = None,
) -> None:  # fmt: skip
    """Launch the fastest forward kernel for the arguments, or `attention_fwd` with the given tile."""
    p = problem_of(scale, causal, window, doc_starts, q, k, v)
    if tile is None and mode.exact:
        if q.dtype is not bfloat16:
            raise UsageError(
                f"attention: genesis.exact computes in bfloat16, got {q.dtype.name}", next="convert the inputs"
            )
        tile = _tiles(q, p)[0]._replace(**EXACT_SIZES)
    elif tile is None and doc_starts is None and forward_ws_into(o, lse, q, k, v, causal, p):
        return
    t = tile or _tiles(q, p)[0]
    blocks = triton.cdiv(p.tokens, t.queries)
    launch(
        attention_fwd, blocks * p.batches * p.heads, o, lse, p.tiled(q, t.queries), p.tiled(k, t.keys),
        p.tiled(v, t.keys), doc_starts, p.sizes,
        p.head_dim, p.scales[:2], (o.strides, q.strides, k.strides, v.strides, p.doc_starts_strides),
        TILE=(t.queries, t.keys, p.padded), **p.constants, **_options(t),
    )  # fmt: skip


@cuda_impl("attention")
def attention(
    out: tuple[Array, Array], q: Array, k: Array, v: Array, doc_starts: Array | None = None, *, scale: float,
    causal: bool = True, window: int = 0, by_head: bool = False,
) -> None:  # fmt: skip
    lse = out[1]
    o, q, k, v = (by_token(x, by_head) for x in (out[0], q, k, v))
    if q.size and k.size:
        forward_into(o, lse, q, k, v, doc_starts, scale, causal, window)
    else:
        clear(o)
        elementwise(identity, lse, -math.inf)


def heads_per_program(programs: int, group: int) -> int:
    """Return how many query heads of a group one program of the dK/dV kernel sums over."""
    return -(-group // max(1, min(group, PROGRAMS // max(programs, 1))))


class _Rope(NamedTuple):
    """Contiguous cos and sin for the inverse RoPE; `stride` elements separate two sequences, 0 if they share them."""

    cos: Array | None = None
    sin: Array | None = None
    stride: int = 0


def _rope_of(tables: tuple[Array, ...]) -> _Rope:
    if not tables:
        return _Rope()
    cos, sin = (contiguous(t) for t in tables)
    return _Rope(cos, sin, cos.shape[1] * cos.shape[2] if cos.ndim == 3 and cos.shape[0] > 1 else 0)


def backward_into(
    grads: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    doc_starts: Array | None, scale: float, causal: bool, window: int,
    tiles: tuple[AttentionTile, AttentionTile] | None = None, group_part: int | None = None,
    tables: tuple[Array, ...] = (),
) -> None:  # fmt: skip
    """Launch the backward kernels.

    Args:
        grads: dq, dk and dv, contiguous or views of a packed array.
        tiles: tiles of the dQ and dK/dV kernels, instead of the table's. Setting them disables spilling.
        group_part: query heads of a group per dK/dV program, instead of `heads_per_program`. Disables spilling too.
        tables: cos and sin; dq and dk are then gradients before RoPE. Heads must fill their tiles, because several
            threads hold the columns of a pair in padded heads.
    """
    p = problem_of(scale, causal, window, doc_starts, q, k, v, g)
    t, dkdv_tile = tiles or _tiles(q, p)[1:]
    assert t.queries % dkdv_tile.queries == 0, (t, dkdv_tile)
    assert not tables or p.head_dim == padded_head_dim(p.head_dim)
    if tiles is None and group_part is None and _spills_ds(p):
        _spilled_backward_into(grads, g, q, k, v, o, lse, doc_starts, scale, window, tables)
        return
    rope_tables, stats = _rope_of(tables), _stats(p, t.queries, doc_starts, q)
    blocks, overlaps = triton.cdiv(p.tokens, t.queries), overlaps_wgmmas(p, t)
    launch(
        attention_bwd_dq_wgmma if overlaps else attention_bwd_dq, blocks * p.batches * p.heads, grads[0], *stats,
        p.tiled(q, t.queries, overlaps), p.tiled(g, t.queries, overlaps), p.tiled(k, t.keys, overlaps),
        p.tiled(v, t.keys, overlaps), g, o, lse, doc_starts, *rope_tables, p.sizes,
        p.head_dim, p.scales,
        (*(x.strides for x in (grads[0], g, q, k, v, o, lse)), p.doc_starts_strides),
        TILE=(t.queries, t.keys, p.padded, t.stages), **p.constants, **_options(t),
    )  # fmt: skip
    _launch_dkdv(grads[1], grads[2], p, t.queries, dkdv_tile, rope_tables, stats, g, q, k, v, group_part)


class _Stats(NamedTuple):
    """Outputs of `store_lse_and_delta` for the dK/dV kernel; only the first exists without documents and window."""

    lse_and_delta: Array
    extents: Array | None
    left: Array | None


def _stats(p: Problem, queries: int, doc_starts: Array | None, q: Array) -> _Stats:
    """Allocate the outputs for blocks of `queries` queries."""
    blocks = triton.cdiv(p.tokens, queries)
    lse_and_delta = empty((2, p.batches * p.heads * blocks * queries), work_type(q.dtype), q.device)
    if doc_starts is None and p.window is None:
        return _Stats(lse_and_delta, None, None)
    shapes = (2 * p.left_bounds, p.batches * blocks), (p.left_bounds, p.batches * blocks * queries)
    return _Stats(lse_and_delta, *(empty(shape, int32, q.device) for shape in shapes))


def _launch_dkdv(
    dk: Array, dv: Array, p: Problem, stats_queries: int, tile: AttentionTile, rope_tables: _Rope, stats: _Stats,
    g: Array, q: Array, k: Array, v: Array, group_part: int | None = None, ds: Array | None = None,
) -> None:  # fmt: skip
    """Launch `attention_bwd_dkdv`, which spills ds into `ds` if that is given. Where several programs share a group,
    `attention_bwd_reduce_splits` follows and applies the inverse RoPE. A block of `stats` has `stats_queries` queries.
    """
    blocks = triton.cdiv(p.keys, tile.keys)
    programs = blocks * p.batches * p.key_heads
    group_part = group_part or heads_per_program(programs, p.group)
    splits = triton.cdiv(p.group, group_part)
    parts = [empty((splits, *x.shape), work_type(q.dtype), q.device) if splits > 1 else x for x in (dk, dv)]
    overlaps = overlaps_wgmmas(p, tile)
    launch(
        attention_bwd_dkdv_wgmma if overlaps else attention_bwd_dkdv, programs * splits, *parts,
        p.tiled(q, tile.queries, overlaps), p.tiled(g, tile.queries, overlaps), p.tiled(k, tile.keys, overlaps),
        p.tiled(v, tile.keys, overlaps), ds,
        *p.vectors(stats.lse_and_delta, tile.queries, VECTOR_LAYOUT if overlaps else ""), *stats[1:],
        *(rope_tables if splits == 1 else _Rope()), (p.tokens, p.keys, p.batches, p.key_heads, p.group, group_part),
        p.head_dim, p.scales, (parts[0].strides[-4:], *(x.strides for x in (g, q, k, v))),
        TILE=(tile.queries, tile.keys, p.padded, tile.stages), RATIO=stats_queries // tile.queries,
        HAS_GAPS=p.left_bounds > 1, **p.constants, **_options(tile),
    )  # fmt: skip
    if splits > 1:
        rows, columns = p.batches * p.keys * p.key_heads, triton.next_power_of_2(triton.cdiv(p.head_dim, 2))
        height = max(1, 512 // columns)
        launch(  # the heads of a token are contiguous
            attention_bwd_reduce_splits, triton.cdiv(rows, height), dk, dv, *parts, *rope_tables, rows, p.keys,
            p.key_heads, dk.strides[1], SIZE=p.head_dim, SPLITS=splits, ROWS=height, PADDED=columns,
        )  # fmt: skip


# --- Backward with spilled ds -----------------------------------------------------------------------------------------

# By largest padded head dimension: tiles of `attention_bwd_dq_from_ds`, and of the dK/dV kernel that stores ds.
SPILL_TILES = {
    128: (AttentionTile(2 * DS_TILE, DS_TILE, 4, 3), AttentionTile(DS_TILE, DS_TILE, 4, 2)),
    256: (AttentionTile(2 * DS_TILE, DS_TILE, 8, 3), AttentionTile(DS_TILE, DS_TILE, 8, 2)),
}


def _spills_ds(p: Problem) -> bool:
    """Return whether spilling ds is profitable and the kernels support the problem."""
    return p.is_hopper and p.uses_tma and p.head_dim in HEAD_DIMS and p.constants["CAUSAL"] and p.tokens == p.keys


def _part(x: Array, rows: slice, heads: slice | None = None, dim: int = 2) -> Array:
    """Return a view of some sequences, and of some heads in dimension `dim`."""
    shape, offset = list(x.shape), x.offset + rows.start * x.strides[0]
    shape[0] = rows.stop - rows.start
    if heads is not None:
        shape[dim] = heads.stop - heads.start
        offset += heads.start * x.strides[dim]
    return x.view(tuple(shape), x.strides, offset)


def _spilled_backward_into(
    grads: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    doc_starts: Array | None, scale: float, window: int, tables: tuple[Array, ...],
) -> None:  # fmt: skip
    """For each chunk, compute LSE and delta, then dK/dV while spilling ds, then dQ from ds."""
    sizes = (*q.shape[:3], k.shape[2], q.dtype.itemsize)
    group, ds = sizes[2] // sizes[3], empty(ds_buffer_shape(*sizes), q.dtype, q.device)
    for rows, key_heads in ds_chunks_of(*sizes):
        heads = slice(key_heads.start * group, key_heads.stop * group)
        dq, g_part, q_part, o_part = (_part(x, rows, heads) for x in (grads[0], g, q, o))
        dk, dv, k_part, v_part = (_part(x, rows, key_heads) for x in (*grads[1:], k, v))
        lse_part, starts_part = _part(lse, rows, heads, 1), None if doc_starts is None else _part(doc_starts, rows)
        tables_part = [_part(x, rows) if x.ndim == 3 and x.shape[0] > 1 else x for x in tables]
        ds_part = _part(ds, slice(0, (rows.stop - rows.start) * (heads.stop - heads.start)))
        _spilled_chunk_into(
            (dq, dk, dv), ds_part, g_part, q_part, k_part, v_part, o_part, lse_part, starts_part, scale, window,
            _rope_of(tuple(tables_part)),
        )  # fmt: skip


def _spilled_chunk_into(
    grads: tuple[Array, Array, Array], ds: Array, g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    doc_starts: Array | None, scale: float, window: int, rope_tables: _Rope,
) -> None:  # fmt: skip
    """Compute one chunk. All chunks reuse the memory of `ds`."""
    p = problem_of(scale, True, window, doc_starts, q, k, v, g)
    t, dkdv_tile = next(tiles for size, tiles in SPILL_TILES.items() if p.padded <= size)
    blocks, stats = triton.cdiv(p.tokens, t.queries), _stats(p, t.queries, doc_starts, q)
    launch(
        attention_bwd_delta, blocks * p.batches * p.heads, *stats, g, o, lse, doc_starts,
        (p.tokens, p.keys, p.batches, p.heads, p.window), p.head_dim,
        (g.strides, o.strides, lse.strides, p.doc_starts_strides), WORK=p.constants["DOT"][1], BM=t.queries,
        BD=p.padded, num_warps=8,
    )  # fmt: skip
    _launch_dkdv(*grads[1:], p, t.queries, dkdv_tile, rope_tables, stats, g, q, k, v, ds=ds)
    ds_tiles = Descriptor(ds, ds.shape, ds.strides, (1, t.keys, t.queries)) if p.uses_tma else ds
    launch(
        attention_bwd_dq_from_ds, blocks * p.batches * p.heads, grads[0], ds, ds_tiles, p.tiled(k, t.keys), doc_starts,
        *rope_tables, (p.tokens, p.batches, p.heads, p.group, p.window), p.head_dim,
        p.scales[2], (grads[0].strides, k.strides, p.doc_starts_strides), TMA=p.uses_tma, DOT=p.constants["DOT"],
        BM=t.queries, BD=p.padded, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


@cuda_impl("attention_backward")
def attention_backward(
    out: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    doc_starts: Array | None = None, *, scale: float, causal: bool = True, window: int = 0, by_head: bool = False,
) -> None:  # fmt: skip
    if q.size and k.size:
        dq, dk, dv, g, q, k, v, o = (by_token(x, by_head) for x in (*out, g, q, k, v, o))
        backward_into((dq, dk, dv), g, q, k, v, o, lse, doc_starts, scale, causal, window)
    else:
        for x in out:
            clear(x)


@cuda_impl("attention_packed")
def attention_packed(
    out: tuple[Array, ...], qkv: Array, doc_starts: Array | None = None, *tables: Array, heads: int, key_heads: int,
    scale: float, causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """Apply `attention` to views of one array, after RoPE of queries and keys if cos and sin are given."""
    if tables:
        rope(out[2], qkv, *tables, heads=heads + key_heads)
        qkv = out[2]
    attention(out[:2], *parts_of(qkv, heads, key_heads), doc_starts, scale=scale, causal=causal, window=window)


@cuda_impl("attention_packed_backward")
def attention_packed_backward(
    out: Array, g: Array, qkv: Array, o: Array, lse: Array, doc_starts: Array | None = None, *tables: Array, heads: int,
    key_heads: int, scale: float, causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """Write the gradients into views of one array, with the inverse RoPE of dq and dk if cos and sin are given."""
    grads, parts = parts_of(out, heads, key_heads), parts_of(qkv, heads, key_heads)
    fused = tables if qkv.shape[3] == padded_head_dim(qkv.shape[3]) else ()
    if qkv.size:
        backward_into(grads, g, *parts, o, lse, doc_starts, scale, causal, window, tables=fused)
    if tables and not fused:
        rotated = parts_of(out, heads + key_heads, key_heads)[0]
        rope(rotated, rotated, *tables, inverse=True)
