"""CUDA implementations of attention: forward with a running softmax, backward by two kernels that make the scores anew.

Forward and the gradient of the queries go query block by query block over the keys that the block may see; gradients
of keys and values go key block by key block over the queries that may see it. So each result has one writer, nothing
is added atomically, and the same inputs give the same bits. Blocks that nobody sees are skipped; those that all see
whole need no mask, the others (the diagonal, document borders, the window's end) do. With heads of 65 to 128 on
Hopper, the kernel of the keys comes first and leaves what the queries' gradient is one product with; see
`attention_gathered`.

Query heads of a group share a key head. Its gradients are sums over the group: one program adds them, or, where
programs would be too few to fill the GPU, several add some heads each and `add_splits` their parts, in order.

Rotary positions: forward, `rope` turns queries and keys before, and backward reads what it wrote, because the kernel of
the keys loads each tile of queries once for every block of keys, by TMA, which only copies. Gradients are
turned back in registers by the kernel that stores them, before they are rounded.

Scores and weights are in units of log2: e^x = 2^(x·log2 e), and the factor joins the scale. Products take tiles of the
inputs' type (weights and their gradients are rounded to it, as tensor cores need) and accumulate in float32; float32
inputs are multiplied exactly, or in tf32 where that is allowed; float64 stays float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import Double, clear, launch
from genesis.backend.cuda.tma import Descriptor
from genesis.dtypes import float32, float64, int32
from genesis.kernels.attention.backward import add_splits, key_kernel, query_kernel, row_kernel
from genesis.kernels.attention.ds_chunks import HEADS, SIDE, held_shape, portions
from genesis.kernels.attention.forward import forward_kernel
from genesis.kernels.attention.problem import Call, call_of
from genesis.kernels.attention.rope import rope
from genesis.kernels.attention.spilled_ds import gather_kernel
from genesis.kernels.attention.tiles import Tile, padded, sections, tiles_of
from genesis.kernels.attention.warp_specialized import forward_specialized_into
from genesis.kernels.gemm.transpose import LEAST, gains, transposed_copy
from genesis.kernels.pointwise.elementwise import elementwise
from genesis.kernels.types import work_type
from genesis.ops.attention import parts_of
from genesis.ops.shape import contiguous

__all__ = ["backward_into", "forward_into"]

PROGRAMS = 1024  # of the kernel for keys' gradients: that many even out triangles of work over the SMs


@triton.jit
def _same(x):
    return x


def _tiles(q: Array, c: Call) -> tuple[Tile, Tile, Tile]:
    shared = backend_of(q.device).driver.properties.shared_memory
    return tiles_of(q.dtype, c.size, c.tokens, c.keys, shared, c.boxes and c.hopper)


def _options(t: Tile) -> dict[str, int]:
    """Constants and options of a launch."""
    options = {"BM": t.queries, "BN": t.keys, "num_warps": t.warps, "num_stages": t.stages}
    return {**options, "maxnreg": t.registers} if t.registers else options


def _side_by_side(k: Array, c: Call) -> Array:
    """The keys, turned over in memory so that they lie side by side in it, where `q·kᵀ` gains more from it than that
    costs; see `gains`.
    """
    batches, keys, heads, size = k.shape
    straight = min(k.strides) >= 0 and k.strides[3] == 1 != k.strides[1] and min(keys, size) >= LEAST
    exact = k.dtype is float32 and c.constants["PRECISION"] == "ieee"
    if not (exact and straight and gains(k.size, k.size * c.tokens * c.group)):
        return k
    memory = empty((batches, heads, size, keys), k.dtype, k.device)
    by_batch, by_head, by_column, by_key = memory.strides
    turned = memory.view(k.shape, (by_batch, by_key, by_head, by_column))
    done = transposed_copy(turned, k)
    assert done, k
    return turned


def forward_into(
    o: Array, lse: Array, q: Array, k: Array, v: Array, starts: Array | None, scale: float, causal: bool, window: int,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Launch the forward kernel, with a tile of one's own if given."""
    c = call_of(scale, causal, window, starts, q, k, v)
    if tile is None and starts is None and forward_specialized_into(o, lse, q, k, v, causal, c):
        return
    t, k = tile or _tiles(q, c)[0], _side_by_side(k, c)
    blocks = triton.cdiv(c.tokens, t.queries)
    launch(
        forward_kernel, blocks * c.batches * c.heads, o, lse, c.tile(q, t.queries),
        c.tile(k, t.keys), c.tile(v, t.keys), starts, c.tokens, c.keys, c.batches, c.heads, c.group,
        *sections(c.keys / c.group, c.batches * c.heads, c.row, blocks), c.size, c.window, c.factor, c.sign, o.strides,
        q.strides, k.strides, v.strides, c.ss, **c.constants, **_options(t),
    )  # fmt: skip


@cuda_impl("attention")
def attention(
    out: tuple[Array, Array], q: Array, k: Array, v: Array, starts: Array | None = None, *, scale: float,
    causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """o = softmax(scale·q·kᵀ)·v over the visible keys, and the log of each softmax sum."""
    o, lse = out
    if q.size and k.size:
        forward_into(o, lse, q, k, v, starts, scale, causal, window)
    else:
        clear(o)
        elementwise(_same, lse, -math.inf)


def splits_of(programs: int, group: int) -> int:
    """How many query heads of a group one program adds up."""
    return -(-group // max(1, min(group, PROGRAMS // max(programs, 1))))


class _Turn(NamedTuple):
    """What rotates gradients back: contiguous tables, and the elements from one sequence's to the next one's."""

    cos: Array | None = None
    sin: Array | None = None
    spread: int = 0


def _turn(tables: tuple[Array, ...]) -> _Turn:
    """The same of cos and sin, or of none."""
    if not tables:
        return _Turn()
    cos, sin = (contiguous(t) for t in tables)
    return _Turn(cos, sin, cos.shape[1] * cos.shape[2] if cos.ndim == 3 and cos.shape[0] > 1 else 0)


def backward_into(
    grads: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    starts: Array | None, scale: float, causal: bool, window: int, tiles: tuple[Tile, Tile] | None = None,
    each: int | None = None, tables: tuple[Array, ...] = (),
) -> None:  # fmt: skip
    """Launch the backward kernels, with tiles for queries and keys, and heads a program, of one's own if given.

    Args:
        grads: dq, dk and dv, contiguous, or the parts of a packed array.
        tables: cos and sin; dq and dk are then gradients before that rotation, which q and k are behind. Only for heads
            that fill their tiles: in padded ones, the columns of a pair lie in several threads.
    """
    c = call_of(scale, causal, window, starts, q, k, v, g)
    t, s = tiles or _tiles(q, c)[1:]
    assert t.queries % s.queries == 0, (t, s)
    assert not tables or c.size == padded(c.size)
    if tiles is None and each is None and _is_gathered(c):
        _gathered_into(grads, g, q, k, v, o, lse, starts, scale, window, tables)
        return
    turn, left = _turn(tables), _left(c, t.queries, starts, q)
    _query_gradient(grads[0], c, t, turn, left, g, q, k, v, o, lse, starts, scale)
    _key_gradients(grads[1], grads[2], c, t.queries, s, turn, left, g, q, k, v, scale, each)


class _Left(NamedTuple):
    """What is left for the kernel of the keys; see `row_numbers`."""

    rows: Array
    low: Array | None
    high: Array | None
    first: Array | None


def _left(c: Call, queries: int, starts: Array | None, q: Array) -> _Left:
    """Memory for it, where a block has so many queries."""
    blocks = triton.cdiv(c.tokens, queries)
    rows = empty((2, c.batches * c.heads * blocks * queries), work_type(q.dtype), q.device)
    if starts is None and c.window is None:
        return _Left(rows, None, None, None)
    sizes = (c.batches * blocks, c.batches * blocks, c.batches * blocks * queries)
    return _Left(rows, *(empty((1, n), int32, q.device) for n in sizes))


def _number(x: float, like: Array) -> float:
    return Double(x) if like.dtype is float64 else float(x)


def _query_gradient(
    dq: Array, c: Call, t: Tile, turn: _Turn, left: _Left, g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    starts: Array | None, scale: float,
) -> None:  # fmt: skip
    """Launch `query_kernel`."""
    blocks = triton.cdiv(c.tokens, t.queries)
    launch(
        query_kernel, blocks * c.batches * c.heads, dq, *left, c.tile(q, t.queries), c.tile(g, t.queries),
        c.tile(k, t.keys), c.tile(v, t.keys), g, o, lse, starts, *turn, c.tokens, c.keys, c.batches, c.heads, c.group,
        *sections(c.keys / c.group, c.batches * c.heads, c.row, blocks, 32 << 20), c.size, c.window, c.factor, c.sign,
        _number(scale, q), dq.strides, g.strides, q.strides, k.strides, v.strides, o.strides, lse.strides, c.ss,
        **c.constants, **_options(t),
    )  # fmt: skip


def _key_gradients(
    dk: Array, dv: Array, c: Call, queries: int, s: Tile, turn: _Turn, left: _Left, g: Array, q: Array, k: Array,
    v: Array, scale: float, each: int | None = None, ds: Array | None = None,
) -> None:  # fmt: skip
    """Launch `key_kernel`, and `add_splits` where the heads of a group are divided; the last one turns dk.

    Args:
        queries: of a block of what is left.
        each: query heads of a group that one program adds up.
        ds: where it is left, too.
    """
    blocks = triton.cdiv(c.keys, s.keys)
    programs = blocks * c.batches * c.key_heads
    each = each or splits_of(programs, c.group)
    splits = triton.cdiv(c.group, each)
    parts = [empty((splits, *x.shape), work_type(q.dtype), q.device) if splits > 1 else x for x in (dk, dv)]
    first = None if left.first is None else c.numbers(left.first, s.queries)[0]
    launch(
        key_kernel, programs * splits, *parts, c.tile(q, s.queries), c.tile(g, s.queries), c.tile(k, s.keys),
        c.tile(v, s.keys), ds, *c.numbers(left.rows, s.queries), first, left.low, left.high,
        *(turn if splits == 1 else _Turn()), c.tokens, c.keys, c.batches, c.key_heads, c.group, each,
        *sections(each * c.tokens, c.batches * c.key_heads * splits, c.row, blocks), c.size, c.factor, c.sign,
        _number(scale, q), parts[0].strides[-4:], g.strides, q.strides, k.strides, v.strides, **c.constants,
        **_options(s), RATIO=queries // s.queries,
    )  # fmt: skip
    if splits > 1:
        rows, columns = c.batches * c.keys * c.key_heads, triton.next_power_of_2(triton.cdiv(c.size, 2))
        height = max(1, 512 // columns)
        launch(  # the heads of a token lie side by side
            add_splits, triton.cdiv(rows, height), dk, dv, *parts, *turn, rows, c.keys, c.key_heads, dk.strides[1],
            SIZE=c.size, SPLITS=splits, ROWS=height, PADDED=columns,
        )  # fmt: skip


# --- Backward with the gradient of the scores in memory ---------------------------------------------------------------

LEAVING = Tile(SIDE, SIDE, 4, 2)  # of `key_kernel` that leaves ds
GATHERING = Tile(2 * SIDE, SIDE, 4, 3)  # of `gather_kernel`


def _is_gathered(c: Call) -> bool:
    """Whether that pays, and the kernels can do it."""
    return c.hopper and c.boxes and c.size in HEADS and c.constants["CAUSAL"] and c.tokens == c.keys


def _part(x: Array, rows: slice, heads: slice | None = None, dim: int = 2) -> Array:
    """These sequences and heads of an array whose dimension `dim` is that of heads."""
    shape, offset = list(x.shape), x.offset + rows.start * x.strides[0]
    shape[0] = rows.stop - rows.start
    if heads is not None:
        shape[dim] = heads.stop - heads.start
        offset += heads.start * x.strides[dim]
    return x.view(tuple(shape), x.strides, offset)


def _gathered_into(
    grads: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    starts: Array | None, scale: float, window: int, tables: tuple[Array, ...],
) -> None:  # fmt: skip
    """Portion by portion: the numbers of rows, `key_kernel`, which leaves ds, and `gather_kernel`."""
    sizes = (*q.shape[:3], k.shape[2], q.dtype.itemsize)
    group, held = sizes[2] // sizes[3], empty(held_shape(*sizes), q.dtype, q.device)
    for rows, mine in portions(*sizes):
        theirs = slice(mine.start * group, mine.stop * group)
        dq, g_part, q_part, o_part = (_part(x, rows, theirs) for x in (grads[0], g, q, o))
        dk, dv, k_part, v_part = (_part(x, rows, mine) for x in (*grads[1:], k, v))
        lse_part, starts_part = _part(lse, rows, theirs, 1), None if starts is None else _part(starts, rows)
        turned = [_part(x, rows) if x.ndim == 3 and x.shape[0] > 1 else x for x in tables]
        heads = slice(0, (rows.stop - rows.start) * (theirs.stop - theirs.start))
        _gathered_part(
            (dq, dk, dv), _part(held, heads), g_part, q_part, k_part, v_part, o_part, lse_part, starts_part, scale,
            window, _turn(tuple(turned)),
        )  # fmt: skip


def _gathered_part(
    grads: tuple[Array, Array, Array], ds: Array, g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    starts: Array | None, scale: float, window: int, turn: _Turn,
) -> None:  # fmt: skip
    """One portion, whose ds goes to memory that all take in turn."""
    c, t = call_of(scale, True, window, starts, q, k, v, g), GATHERING
    blocks, left = triton.cdiv(c.tokens, t.queries), _left(c, t.queries, starts, q)
    launch(
        row_kernel, blocks * c.batches * c.heads, *left, g, o, lse, starts, c.tokens, c.keys, c.batches, c.heads,
        c.size, c.window, g.strides, o.strides, lse.strides, c.ss, WORK=c.constants["WORK"], BM=t.queries,
        HEAD=c.constants["HEAD"], num_warps=8,
    )  # fmt: skip
    _key_gradients(*grads[1:], c, t.queries, LEAVING, turn, left, g, q, k, v, scale, ds=ds)
    boxes = Descriptor(ds, ds.shape, ds.strides, (1, t.keys, t.queries)) if c.boxes else ds
    names = ("BOXES", "TYPE", "WORK", "PRECISION", "HEAD")
    launch(
        gather_kernel, blocks * c.batches * c.heads, grads[0], ds, boxes, c.tile(k, t.keys), starts, *turn, c.tokens,
        c.batches, c.heads, c.group, c.batches * c.heads, 0, c.size, c.window, _number(scale, q), grads[0].strides,
        k.strides, c.ss, **{n: c.constants[n] for n in names}, BM=t.queries, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


@cuda_impl("attention_backward")
def attention_backward(
    out: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    starts: Array | None = None, *, scale: float, causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """With p = e^(s - lse) and c = Σ g·o: dv = pᵀ·g, ds = p·(g·vᵀ - c), dq = scale·ds·k, dk = scale·dsᵀ·q."""
    if q.size and k.size:
        backward_into(out, g, q, k, v, o, lse, starts, scale, causal, window)
    else:
        for x in out:
            clear(x)


@cuda_impl("attention_packed")
def attention_packed(
    out: tuple[Array, ...], qkv: Array, starts: Array | None = None, *tables: Array, heads: int, key_heads: int,
    scale: float, causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """The same of views of one array, in which queries and keys are rotated first where there are tables."""
    if tables:
        rope(out[2], qkv, *tables, heads=heads + key_heads)
        qkv = out[2]
    attention(out[:2], *parts_of(qkv, heads, key_heads), starts, scale=scale, causal=causal, window=window)


@cuda_impl("attention_packed_backward")
def attention_packed_backward(
    out: Array, g: Array, qkv: Array, o: Array, lse: Array, starts: Array | None = None, *tables: Array, heads: int,
    key_heads: int, scale: float, causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """The same into views of one array, dq and dk turned back where there are tables."""
    grads, parts = parts_of(out, heads, key_heads), parts_of(qkv, heads, key_heads)
    inside = tables if qkv.shape[3] == padded(qkv.shape[3]) else ()
    if qkv.size:
        backward_into(grads, g, *parts, o, lse, starts, scale, causal, window, tables=inside)
    if tables and not inside:
        turned = parts_of(out, heads + key_heads, key_heads)[0]
        rope(turned, turned, *tables, inverse=True)
