"""CUDA implementations of embedding look-up and its gradient: a gather of rows, and sums of rows over sorted ids.

Up to RANKED ids are sorted in one launch: each finds its rank by comparing itself with all others, out of the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import faults
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import int32
from genesis.kernels.index.index import gather, places_of, sorted_places
from genesis.kernels.index.radix_sort import are_less
from genesis.kernels.index.segment import Sorted, add_rows, report, rows_of
from genesis.kernels.strides import collapse, offsets

__all__ = ["embedding", "embedding_add_", "embedding_backward"]

RANKED = 8192  # ids; the comparisons grow with the square
EXACT = 1 << 24  # whole numbers below it are exact in float32
MINE, OTHERS = 32, 256  # ids that a program ranks, and compares with at once


@triton.jit
def key_of(p_ids, p_fault, i, count, rows, site, sizes, strides, DIMS: tl.constexpr):
    """ids[i]: `rows` for one that is out of range, which is reported unless `p_fault` is None; 2^24 beyond the last."""
    m = i < count
    key = tl.load(p_ids + offsets(i, sizes, strides, DIMS), mask=m, other=0)
    good = (key >= 0) & (key < rows)
    if p_fault is not None:
        report(p_fault, site, key, m & (good == 0))
    return tl.where(m, tl.where(good, key, rows).to(tl.int32), 16777216)


@triton.jit(do_not_specialize=["rows", "site"])
def rank_ids(p_keys, p_order, p_ids, p_fault, count, rows, site, sizes, strides, DIMS: tl.constexpr, BI: tl.constexpr,
             BJ: tl.constexpr):  # fmt: skip
    """Ids and their positions, stored at their ranks in the stable rising order. BI divides BJ."""
    start = tl.program_id(0) * BI
    i = start + tl.arange(0, BI)
    key = key_of(p_ids, p_fault, i, count, rows, site, sizes, strides, DIMS)
    mine = key.to(tl.float32)[:, None]
    own = start // BJ * BJ  # the tile that holds these ids
    before = tl.zeros([BI, BJ], tl.float32)
    for j in range(0, count, BJ):  # smaller ones, and equal ones in the tiles before
        other = key_of(p_ids, None, j + tl.arange(0, BJ), count, rows, 0, sizes, strides, DIMS)
        before += are_less(other.to(tl.float32)[None, :], mine + tl.where(j < own, 1.0, 0.0), True)
    at = own + tl.arange(0, BJ)
    other = key_of(p_ids, None, at, count, rows, 0, sizes, strides, DIMS)
    before += ((other[None, :] == key[:, None]) & (at[None, :] < i[:, None])).to(tl.float32)
    rank = tl.sum(before, 1).to(tl.int32)
    tl.store(p_keys + rank, key, mask=i < count)
    tl.store(p_order + rank, i, mask=i < count)


def _sorted_ids(op: str, ids: Array, rows: int, width: int) -> Sorted:
    if ids.size > RANKED or rows >= EXACT:
        return sorted_places(places_of(op, (ids,), (rows,), (1,), negative=False), max(rows, 1), width)
    keys, order = (empty(ids.shape, int32, ids.device) for _ in range(2))
    sizes, strides = collapse(ids.shape, ids.strides)
    launch(
        rank_ids, triton.cdiv(ids.size, MINE), keys, order, ids, faults.flag(ids.device), ids.size, rows,
        faults.site(op, 0, rows), sizes, strides, DIMS=len(sizes), BI=MINE, BJ=OTHERS, num_warps=4,
    )  # fmt: skip
    return Sorted(keys, order, rows, width)


def _add(op: str, target: Array, g: Array, ids: Array, add: bool) -> None:
    """target[ids] (+)= g, rows of equal ids in order of position."""
    rows, width = target.shape
    if g.size:
        found = rows_of(ids.shape, g.strides[:-1], (width,), target.strides[1:], g.strides[-1:])
        add_rows(target, g, _sorted_ids(op, ids, rows, target.strides[0]), found, add=add)


@cuda_impl("embedding")
def embedding(out: Array, ids: Array, weight: Array) -> None:
    """y[...] = weight[ids[...]]."""
    places = places_of("embedding", (ids,), weight.shape[:1], weight.strides[:1], negative=False)
    gather(out, weight, places, ((), ()), (weight.shape[1:], weight.strides[1:]))


@cuda_impl("embedding_backward")
def embedding_backward(out: Array, g: Array, ids: Array, rows: int) -> None:
    """dweight[r] = the sum of g over the places where ids = r, in order of position."""
    clear(out)
    _add("embedding_backward", out, g, ids, add=False)


@cuda_impl("embedding_add_")
def embedding_add_(out: tuple[()], total: Array, g: Array, ids: Array) -> None:
    """total[r] += the sum of g over the places where ids = r, in order of position."""
    _add("embedding_add_", total, g, ids, add=True)
