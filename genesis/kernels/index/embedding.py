"""Embedding look-up and its gradient: a gather of rows, and sums of rows over sorted ids.

Reference: `genesis/ops/embedding.py`: embedding, embedding_backward, embedding_add_.

Up to `RANK_SORT_MAX` ids are sorted in one launch by rank: each id is compared with all others, which stay in cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import faults
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import int32
from genesis.kernels.index.index import gather, index_arrays, sorted_index_keys
from genesis.kernels.index.radix_sort import are_less
from genesis.kernels.index.segment import SortedKeys, report_fault, rows_of, scatter_add_rows
from genesis.kernels.strides import collapse, offsets

RANK_SORT_MAX = 8192  # ids; comparisons grow with the square
EXACT = 1 << 24  # integers below it are exact in float32
BI, BJ = 32, 256  # ids that a program ranks, and ids it compares them with at a time


@triton.jit
def key_of(p_ids, p_fault, i, count, rows, site, sizes, strides):
    """ids[i]; `rows` for one out of range, which is reported if `p_fault` is given; 2^24 beyond the last."""
    m = i < count
    key = tl.load(p_ids + offsets(i, sizes, strides), mask=m, other=0)
    good = (key >= 0) & (key < rows)
    if p_fault is not None:
        report_fault(p_fault, site, key, m & (good == 0))
    return tl.where(m, tl.where(good, key, rows).to(tl.int32), 16777216)


@triton.jit(do_not_specialize=["rows", "site"])
def rank_ids_kernel(p_keys, p_order, p_ids, p_fault, count, rows, site, sizes, strides, BI: tl.constexpr,
                    BJ: tl.constexpr):  # fmt: skip
    """Sort ids and their positions: a stable sort by rank. BI divides BJ."""
    start = tl.program_id(0) * BI
    i = start + tl.arange(0, BI)
    key = key_of(p_ids, p_fault, i, count, rows, site, sizes, strides)
    own_key = key.to(tl.float32)[:, None]
    own_tile = start // BJ * BJ  # start of the tile that holds these ids
    before = tl.zeros([BI, BJ], tl.float32)  # [BI, BJ]
    for j in range(0, count, BJ):  # smaller ids, and equal ids in earlier tiles
        other = key_of(p_ids, None, j + tl.arange(0, BJ), count, rows, 0, sizes, strides)
        before += are_less(other.to(tl.float32)[None, :], own_key + tl.where(j < own_tile, 1.0, 0.0), True)
    at = own_tile + tl.arange(0, BJ)
    other = key_of(p_ids, None, at, count, rows, 0, sizes, strides)
    before += ((other[None, :] == key[:, None]) & (at[None, :] < i[:, None])).to(tl.float32)
    rank = tl.sum(before, 1).to(tl.int32)  # [BI]
    tl.store(p_keys + rank, key, mask=i < count)
    tl.store(p_order + rank, i, mask=i < count)


def _sorted_ids(op: str, ids: Array, rows: int, width: int) -> SortedKeys:
    if ids.size > RANK_SORT_MAX or rows >= EXACT:
        return sorted_index_keys(index_arrays(op, (ids,), (rows,), (1,), negative=False), max(rows, 1), width)
    keys, order = (empty(ids.shape, int32, ids.device) for _ in range(2))
    sizes, strides = collapse(ids.shape, ids.strides)
    launch(
        rank_ids_kernel, triton.cdiv(ids.size, BI), keys, order, ids, faults.flag(ids.device), ids.size, rows,
        faults.site(op, 0, rows), sizes, strides, BI=BI, BJ=BJ, num_warps=4,
    )  # fmt: skip
    return SortedKeys(keys, order, rows, width)


def _add(op: str, target: Array, g: Array, ids: Array, add: bool) -> None:
    """target[ids] = or += g; rows of equal ids are added in order of position."""
    rows, width = target.shape
    if g.size:
        found = rows_of(ids.shape, g.strides[:-1], (width,), target.strides[1:], g.strides[-1:])
        scatter_add_rows(target, g, _sorted_ids(op, ids, rows, target.strides[0]), found, add=add)


@cuda_impl("embedding")
def embedding(out: Array, ids: Array, weight: Array) -> None:
    """y[...] = weight[ids[...]]."""
    index = index_arrays("embedding", (ids,), weight.shape[:1], weight.strides[:1], negative=False)
    gather(out, weight, index, ((), ()), (weight.shape[1:], weight.strides[1:]))


@cuda_impl("embedding_backward")
def embedding_backward(out: Array, g: Array, ids: Array, rows: int) -> None:
    """dweight[r] = the sum of g over the positions where ids = r, in order."""
    clear(out)
    _add("embedding_backward", out, g, ids, add=False)


@cuda_impl("embedding_add_")
def embedding_add_(out: tuple[()], total: Array, g: Array, ids: Array) -> None:
    """total[r] += the sum of g over the positions where ids = r, in order."""
    _add("embedding_add_", total, g, ids, add=True)
