"""The two kernels of every reduction: one accumulates elements into a state, the other merges partial states. Two more
kernels find the minimum or maximum with its index.

Reference: the reductions of `genesis/ops/reduce.py`. The file `reduce.py` here defines each reduction's `ReduceSpec`.

The state of a reduction is a tuple of tiles: one tile for sums, minima and maxima; value and index for argmax; count,
mean and squared deviations for a variance; maximum and scaled sum for logsumexp. One kernel supports inner (AXIS 1,
tile [BK, BR]) and outer reductions (AXIS 0, tile [BR, BK]), so that the last dimension of a tile is contiguous in
memory. If few results have many elements, the elements are split among programs, which store their states, and a second
launch merges these in fixed order. Merging in the program that finishes last would save that launch, about 1 us, but
needs a counter in memory that is zero at every replay.

The minimum or maximum of a group of elements costs one instruction per element. For rows that fit in registers, and for
long columns, only the first group that contains the result is loaded again, to find its index. All other layouts have a
state of (value, index).

Tiles: BK results x BR elements, BS splits x BK results, or groups of G elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, int32, int64
from genesis.kernels.elements import TRITON, converted, float_argument, needs_int64, offsets, program_indices, work_type
from genesis.kernels.reduce.plan import COLUMN_GROUP, Layout, Tiles, group_size, merge_tiles, reduction_tiles

# --- What defines a reduction -----------------------------------------------------------------------------------------


@triton.jit
def init_value(z, r):
    return (z,)


@triton.jit
def take_value(x, TYPE: tl.constexpr, argument):
    return converted(x, TYPE)


@triton.jit
def finish_first(state, argument):
    return state[0]


class ReduceSpec(NamedTuple):
    """A reduction, defined by functions under `triton.jit`. Its state is a tuple of tiles."""

    merge: Any  # (*state, *state) -> state, the combine function of `tl.reduce`; the left operand comes first
    identity: float  # value of the tile that `init` gets
    take: Any = take_value  # (elements x, type of the state, argument) -> the tile that is merged into a state of one
    finish: Any = finish_first  # (state, argument) -> result
    init: Any = init_value  # (tile of the identity, indices) -> the initial state
    # (state, x, indices, chunk number, argument) -> the state after a tile of elements x, instead of `take`
    step: Any = None
    states: int = 1  # tiles in the state
    # (state, axis) -> the state reduced along an axis, if that costs less than `merge` by pairs
    reduce_axis: Any = None


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def select_state(m, new, old):
    """Return `new` where m is set, `old` elsewhere."""
    state = ()
    for j in tl.static_range(len(old)):
        state += (tl.where(m, new[j], old[j]),)
    return state


@triton.jit
def next_state(state, x, r, chunk, argument, MERGE: tl.constexpr, TAKE: tl.constexpr, STEP: tl.constexpr):
    """Return the state after a tile of elements x."""
    if STEP is None:
        return (MERGE(state[0], TAKE(x, state[0].dtype, argument)),)
    else:
        return STEP(state, x, r, chunk, argument)


@tl.core.builtin
def reduce_tile(state, AXIS, MERGE, _semantic=None, _generator=None):  # type: ignore[no-untyped-def]
    """Call `tl.reduce`, which does not unwrap a combine function that is a constexpr."""
    return tl.reduce(state, AXIS, MERGE.value, _semantic=_semantic, _generator=_generator)


if is_interpreted():  # the interpreter's tl.reduce calls MERGE for every element

    def reduce_tile(state: Any, AXIS: Any, MERGE: Any) -> Any:
        """Reduce whole tiles: merge halves until one element is left."""
        axis = getattr(AXIS, "value", AXIS)
        values = [tile.handle.data for tile in state]
        kinds = [tile.dtype for tile in state]
        make = type(state[0].handle)

        def tile(value: np.ndarray, kind: Any) -> Any:
            if value.ndim == 0:
                return tl.tensor(make(value.reshape(1), kind), kind)
            return tl.tensor(make(value, kind), tl.block_type(kind, list(value.shape)))

        while values[0].shape[axis] > 1:
            halves = [np.split(v, 2, axis) for v in values]
            sides = [tile(h[side], kind) for side in (0, 1) for h, kind in zip(halves, kinds, strict=True)]
            merged = MERGE(*sides)
            values = [t.handle.data for t in (merged if isinstance(merged, tuple) else (merged,))]
        return tuple(tile(v.squeeze(axis), kind) for v, kind in zip(values, kinds, strict=True))


@triton.jit
def reduce_state(state, AXIS: tl.constexpr, MERGE: tl.constexpr, REDUCE_AXIS: tl.constexpr):
    """Return the state reduced along AXIS."""
    if REDUCE_AXIS is None:
        return reduce_tile(state, AXIS, MERGE)
    else:
        return REDUCE_AXIS(state, AXIS)


@triton.jit
def reduce_kernel(outs, p_x, nk, nr, span, argument, kept, reduced, INIT: tl.constexpr, TAKE: tl.constexpr,
                  STEP: tl.constexpr, MERGE: tl.constexpr, REDUCE_AXIS: tl.constexpr, FINISH: tl.constexpr,
                  IDENTITY: tl.constexpr, READ: tl.constexpr, WORK: tl.constexpr, AXIS: tl.constexpr,
                  LOOP: tl.constexpr, TAIL: tl.constexpr, INT64_K: tl.constexpr, INT64_R: tl.constexpr,
                  BK: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Reduce nr elements for each of nk results. If FINISH is None, reduce a split of `span` elements to states.

    Args:
        outs: results and their indices, either of which may be None; without FINISH one array per tile of a state.
        kept: sizes of the kept dimensions, their strides in x, and their strides in the result.
        reduced: sizes of the reduced dimensions, and their strides in x.
    """
    program, split = tl.program_id(0), tl.program_id(1)
    if INT64_K:
        program = program.to(tl.int64)
    begin, length = 0, nr
    if FINISH is None:
        begin = (split.to(tl.int64) if INT64_R else split) * span
        length = tl.minimum(span, nr - begin)
        if TAIL == 16:  # lets the compiler mask whole vectors
            length = tl.multiple_of(length, 16)
    i_k = program * BK + tl.arange(0, BK)  # [BK]
    m_k = i_k < nk  # [BK]
    p_k = tl.expand_dims(p_x + offsets(i_k, kept[0], kept[1]), AXIS)  # [BK, 1] or [1, BK]
    m_x = tl.expand_dims(m_k, AXIS)  # [BK, 1] or [1, BK]
    i_r = begin + tl.arange(0, BR)  # [BR]
    if INT64_R:
        i_r = i_r.to(tl.int64)  # [BR]
    ROWS: tl.constexpr = BK if AXIS == 1 else BR
    COLUMNS: tl.constexpr = BR if AXIS == 1 else BK
    state = INIT(tl.full((ROWS, COLUMNS), IDENTITY, WORK), tl.expand_dims(i_r, 1 - AXIS))
    # Accumulate full chunks, without a mask along R so that odd lengths load as vectors, then the rest.
    if LOOP:
        for chunk in range(0, length // BR):
            r = i_r + chunk * BR  # [BR]
            o_r = tl.expand_dims(offsets(r, reduced[0], reduced[1]), 1 - AXIS)  # [1, BR] or [BR, 1]
            x = converted(tl.load(p_k + o_r, mask=m_x), READ)  # [BK, BR] or [BR, BK]
            state = next_state(state, x, tl.expand_dims(r, 1 - AXIS), chunk, argument, MERGE, TAKE, STEP)
    if TAIL:
        last = length // BR if LOOP else 0
        r = i_r + last * BR  # [BR]
        m = m_x & tl.expand_dims(last * BR + tl.arange(0, BR) < length, 1 - AXIS)  # [BK, BR] or [BR, BK]
        o_r = tl.expand_dims(offsets(r, reduced[0], reduced[1]), 1 - AXIS)
        x = converted(tl.load(p_k + o_r, mask=m, other=0), READ)  # [BK, BR] or [BR, BK]
        new = next_state(state, x, tl.expand_dims(r, 1 - AXIS), last, argument, MERGE, TAKE, STEP)
        state = select_state(m, new, state)
    state = reduce_state(state, AXIS, MERGE, REDUCE_AXIS)  # tiles [BK]
    if FINISH is None:
        o = split.to(tl.int64) * nk + i_k  # [BK]
        for j in tl.static_range(len(outs)):
            tl.store(outs[j] + o, state[j], mask=m_k)
    else:
        store_results(outs, state, offsets(i_k, kept[0], kept[2]), m_k, argument, FINISH)


@triton.jit
def load_states(parts, o, m):
    state = ()
    for j in tl.static_range(len(parts)):
        state += (tl.load(parts[j] + o, mask=m, other=0),)
    return state


@triton.jit
def merge_states(left, right, MERGE: tl.constexpr):
    """Return MERGE of two states as a tuple, also for one tile."""
    if len(left) == 1:
        return (MERGE(left[0], right[0]),)
    else:
        return MERGE(*left, *right)


@triton.jit
def merge_kernel(outs, parts, nk, ns, argument, sizes, so, INIT: tl.constexpr, MERGE: tl.constexpr,
                 REDUCE_AXIS: tl.constexpr, FINISH: tl.constexpr, IDENTITY: tl.constexpr, WORK: tl.constexpr,
                 INDEX: tl.constexpr, LOOP: tl.constexpr, INT64_K: tl.constexpr, BK: tl.constexpr,
                 BS: tl.constexpr):  # fmt: skip
    """Merge the states [ns, nk] of `reduce_kernel` and store results and indices."""
    i_k = program_indices(BK, INT64_K)  # [BK]
    i_s = tl.arange(0, BS)  # [BS]
    m_k = i_k < nk  # [BK]
    LAST: tl.constexpr = 0x7FFFFFFF if tl.int32 == INDEX else 0x7FFFFFFFFFFFFFFF
    state = INIT(tl.full((BS, BK), IDENTITY, WORK), tl.full((BS, 1), LAST, INDEX))
    m = m_k[None, :] & (i_s < ns)[:, None]  # [BS, BK]
    o = i_s.to(tl.int64)[:, None] * nk + i_k[None, :]  # [BS, BK]
    state = select_state(m, load_states(parts, o, m), state)
    if LOOP:
        for chunk in range(1, tl.cdiv(ns, BS)):
            s = chunk * BS + i_s  # [BS]
            m = m_k[None, :] & (s < ns)[:, None]  # [BS, BK]
            o = s.to(tl.int64)[:, None] * nk + i_k[None, :]  # [BS, BK]
            state = select_state(m, merge_states(state, load_states(parts, o, m), MERGE), state)
    state = reduce_state(state, 0, MERGE, REDUCE_AXIS)  # tiles [BK]
    store_results(outs, state, offsets(i_k, sizes, so), m_k, argument, FINISH)


@triton.jit
def store_results(outs, state, o, m, argument, FINISH: tl.constexpr):
    """Store results and indices, unless they are None."""
    if outs[0] is not None:
        tl.store(outs[0] + o, converted(FINISH(state, argument), outs[0].dtype.element_ty), mask=m)
    if outs[1] is not None:
        tl.store(outs[1] + o, state[1].to(tl.int64), mask=m)


# --- Launching them ---------------------------------------------------------------------------------------------------


def load_type(dtype: DType) -> DType:
    """Return the type to which loaded elements are cast: float32 for 2-byte floats, int32 for narrow integers."""
    if dtype.is_floating_point:
        return work_type(dtype)
    return int64 if dtype is int64 else int32


def reduce_into(
    spec: ReduceSpec, out: Array | None, x: Array, layout: Layout, work: DType, *, indices: Array | None = None,
    argument: float = 0.0,
) -> None:  # fmt: skip
    """Reduce `x` into `out`. A result without elements is the result of the identity.

    Args:
        out: contiguous results, or None to compute only indices.
        work: type of the state.
        indices: int64 indices, for specs whose second tile holds them.
        argument: last argument of `step` and `finish`.
    """
    if layout.results == 0:
        return
    cut = reduction_tiles(layout, x.dtype.itemsize, spec.states)
    if cut.splits == 1:
        _launch_reduce(spec, (out, indices), x, layout, work, argument, cut)
        return
    parts = partial_states(spec, x, layout, work, cut, argument=argument)
    tiles = merge_tiles(layout.results, cut.splits)
    launch(
        merge_kernel, triton.cdiv(layout.results, tiles.block_k), (out, indices), parts, layout.results, cut.splits,
        float_argument(argument, work), layout.kept, layout.kept_out, INIT=spec.init, MERGE=spec.merge,
        REDUCE_AXIS=spec.reduce_axis, FINISH=spec.finish, IDENTITY=spec.identity, WORK=TRITON[work.name],
        INDEX=TRITON[_index(layout).name], LOOP=tiles.block_r < cut.splits,
        INT64_K=needs_int64(layout.kept, layout.kept_out), BK=tiles.block_k, BS=tiles.block_r, num_warps=tiles.warps,
    )  # fmt: skip


def partial_states(
    spec: ReduceSpec, x: Array, layout: Layout, work: DType, cut: Tiles, *, argument: float = 0.0
) -> tuple[Array, ...]:
    """Return the states of all splits as arrays [splits, results], in the layout's order of results."""
    types = (work, _index(layout) if spec.states == 2 and spec.finish is finish_first else work, work)
    parts = tuple(empty((cut.splits, layout.results), t, x.device) for t in types[: spec.states])
    _launch_reduce(spec._replace(finish=None), parts, x, layout, work, argument, cut)
    return parts


def _tail(elements: int, block_r: int) -> int:
    """Return 0 if `block_r` divides `elements`, otherwise a known divisor of the remainder, 16 or 1."""
    return 0 if elements % block_r == 0 else 16 if elements % 16 == 0 else 1


def _index(layout: Layout) -> DType:
    return int64 if layout.int64_r else int32


def _launch_reduce(
    spec: ReduceSpec, outs: tuple[Array | None, ...], x: Array, layout: Layout, work: DType, argument: float, cut: Tiles
) -> None:
    launch(
        reduce_kernel, (triton.cdiv(layout.results, cut.block_k), cut.splits), outs, x, layout.results,
        layout.elements, cut.span, float_argument(argument, work), *layout.strided, INIT=spec.init, TAKE=spec.take,
        STEP=spec.step, MERGE=spec.merge, REDUCE_AXIS=spec.reduce_axis, FINISH=spec.finish, IDENTITY=spec.identity,
        READ=TRITON[load_type(x.dtype).name], WORK=TRITON[work.name], AXIS=int(layout.inner),
        LOOP=layout.elements >= cut.block_r, TAIL=_tail(layout.elements, cut.block_r), INT64_K=layout.int64_k,
        INT64_R=layout.int64_r, BK=cut.block_k, BR=cut.block_r, num_warps=cut.warps,
    )  # fmt: skip


# --- Minimum or maximum with its index --------------------------------------------------------------------------------


@triton.jit
def is_best(x, best):
    """Return where x equals `best` or is NaN."""
    return (x == best) | (x != x)


@triton.jit
def row_argminmax_kernel(p_o, p_i, p_x, nk, nr, kept, reduced, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                         READ: tl.constexpr, INT64_K: tl.constexpr, INT64_R: tl.constexpr, BK: tl.constexpr,
                         GROUPS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    i_k = program_indices(BK, INT64_K)  # [BK]
    m_k = i_k < nk  # [BK]
    p_k = p_x + offsets(i_k, kept[0], kept[1])  # [BK]
    i_g = tl.arange(0, G)  # [G]
    first = tl.arange(0, GROUPS) * G  # [GROUPS]
    if INT64_R:
        first = first.to(tl.int64)
    i_r = first[:, None] + i_g[None, :]  # [GROUPS, G]
    m = m_k[:, None, None] & (i_r < nr)[None, :, :]  # [BK, GROUPS, G]
    x = converted(tl.load(p_k[:, None, None] + offsets(i_r, reduced[0], reduced[1])[None, :, :], mask=m, other=0), READ)
    x = tl.where(m, x, tl.full((1, 1, 1), IDENTITY, READ))  # [BK, GROUPS, G]
    # Find the best value, then its first index in the first group that contains it.
    in_groups = reduce_tile((x,), 2, MERGE)[0]  # [BK, GROUPS]
    best = reduce_tile((in_groups,), 1, MERGE)[0]  # [BK]
    if GROUPS == 1:
        wins = m & is_best(x, best[:, None, None])  # [BK, GROUPS, G]
        at = tl.min(tl.min(tl.where(wins, i_r[None, :, :], GROUPS * G), 2), 1)  # [BK]
    else:
        begin = tl.min(tl.where(is_best(in_groups, best[:, None]), first[None, :], GROUPS * G), 1)  # [BK]
        r = tl.minimum(begin, (GROUPS - 1) * G)[:, None] + i_g[None, :]  # [BK, G]
        m_r = m_k[:, None] & (r < nr)  # [BK, G]
        y = converted(tl.load(p_k[:, None] + offsets(r, reduced[0], reduced[1]), mask=m_r, other=0), READ)  # [BK, G]
        at = tl.min(tl.where(m_r & is_best(y, best[:, None]), r, GROUPS * G), 1)  # [BK]
    store_results((p_o, p_i), (best, at), offsets(i_k, kept[0], kept[2]), m_k, 0, finish_first)


@triton.jit
def column_argminmax_kernel(p_o, p_i, p_x, nk, nr, kept, reduced, STEP: tl.constexpr, MERGE: tl.constexpr,
                            IDENTITY: tl.constexpr, READ: tl.constexpr, EVEN: tl.constexpr, INT64_K: tl.constexpr,
                            INT64_R: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Loop down BK columns in chunks of BR groups of G rows. With EVEN, G · BR divides the number of rows."""
    i_k = program_indices(BK, INT64_K)  # [BK]
    m_k = i_k < nk  # [BK]
    p_k = p_x + offsets(i_k, kept[0], kept[1])  # [BK]
    i_b = tl.arange(0, BR)[:, None]  # [BR, 1]
    if INT64_R:
        i_b = i_b.to(tl.int64)
    best, group = tl.full((BR, BK), IDENTITY, READ), tl.zeros((BR, BK), i_b.dtype) + i_b  # [BR, BK]
    for chunk in range(0, tl.cdiv(nr, G * BR)):
        i_g = chunk * BR + i_b  # [BR, 1]
        best_of_group = tl.full((BR, BK), IDENTITY, READ)  # [BR, BK]
        for j in tl.static_range(G):
            p = p_k[None, :] + offsets(i_g * G + j, reduced[0], reduced[1])  # [BR, BK]
            if EVEN:
                x = converted(tl.load(p, mask=m_k[None, :]), READ)  # [BR, BK]
            else:
                m = m_k[None, :] & (i_g * G + j < nr)
                x = tl.where(m, converted(tl.load(p, mask=m, other=0), READ), tl.full((1, 1), IDENTITY, READ))
            best_of_group = MERGE(best_of_group, x)  # [BR, BK]
        best, group = STEP((best, group), best_of_group, i_g, 0, 0)  # [BR, BK] each
    # Find the best value of each column, then its first index in the first group that contains it.
    column = reduce_tile((best,), 0, MERGE)[0]  # [BK]
    end = tl.cdiv(nr, G) * G
    begin = tl.min(tl.where(is_best(best, column[None, :]), group, end), 0) * G  # [BK]
    r = begin[None, :] + tl.arange(0, G)[:, None]  # [G, BK]
    m = m_k[None, :] & (r < nr)  # [G, BK]
    x = converted(tl.load(p_k[None, :] + offsets(r, reduced[0], reduced[1]), mask=m, other=0), READ)  # [G, BK]
    at = tl.min(tl.where(m & is_best(x, column[None, :]), r, end), 0)  # [BK]
    store_results((p_o, p_i), (column, at), offsets(i_k, kept[0], kept[2]), m_k, 0, finish_first)


def column_min_max(
    spec: ReduceSpec, merge: Any, values: Array | None, indices: Array, x: Array, layout: Layout, cut: Tiles
) -> None:
    """The same as `row_min_max` for columns, with tiles from `column_tiles`."""
    launch(
        column_argminmax_kernel, triton.cdiv(layout.results, cut.block_k), values, indices, x, layout.results,
        layout.elements, *layout.strided, STEP=spec.step, MERGE=merge, IDENTITY=spec.identity,
        READ=TRITON[load_type(x.dtype).name], EVEN=layout.elements % (COLUMN_GROUP * cut.block_r) == 0,
        INT64_K=layout.int64_k, INT64_R=layout.int64_r, BK=cut.block_k, BR=cut.block_r, G=COLUMN_GROUP,
        num_warps=cut.warps,
    )  # fmt: skip


def row_min_max(
    merge: Any, identity: float, values: Array | None, indices: Array, x: Array, layout: Layout, cut: Tiles
) -> None:
    """Store the minima or maxima of rows and their first indices. NaN beats every element.

    Args:
        merge: elementwise minimum or maximum that propagates NaN.
        identity: value that every element beats.
        values: contiguous results, or None to store only indices.
        indices: int64 indices.
        cut: tiles from `row_tiles`.
    """
    if layout.results == 0:
        return
    group = group_size(cut, x.dtype.itemsize)
    launch(
        row_argminmax_kernel, triton.cdiv(layout.results, cut.block_k), values, indices, x, layout.results,
        layout.elements, *layout.strided, MERGE=merge, IDENTITY=identity, READ=TRITON[load_type(x.dtype).name],
        INT64_K=layout.int64_k, INT64_R=layout.int64_r, BK=cut.block_k, GROUPS=cut.block_r // group, G=group,
        num_warps=cut.warps,
    )  # fmt: skip
