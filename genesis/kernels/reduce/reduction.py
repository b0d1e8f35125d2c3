"""Reductions as the GPU runs them: one kernel that folds elements into a state, and one that merges states.

A `Recipe` says what is folded. Its state is a tuple of tiles: one for sums and extrema, value and position for argmax,
count, mean and squared distances for a variance, maximum and scaled sum for logsumexp. The same kernel serves inner
(AXIS 1, tile [K, R]) and outer reductions (AXIS 0, tile [R, K]): the dimension next in memory is the tile's last.
Where few results have many elements, each program writes its state and a second launch merges them in fixed order. (A
last program that merges would save that launch, about 1 us, at the price of a counter in memory which every replay
must find at zero.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import Double, launch
from genesis.dtypes import DType, float64, int32, int64
from genesis.kernels.reduce.plan import Layout, Tiles, merge_tiles, tiles
from genesis.kernels.strides import is_wide, offsets
from genesis.kernels.types import TRITON, converted, work_type

__all__ = ["Recipe", "first_state", "fold_into", "number", "partials", "reads", "reduced"]


class Recipe(NamedTuple):
    """A reduction, as functions under `triton.jit` of states (tuples of tiles).

    Attributes:
        init: (full tile of the identity, positions) -> the state of nothing.
        step: (state, x, positions, chunk number, argument) -> the state with one more element in each lane.
        merge: (*state, *state) -> state, as `tl.reduce` takes it; the left one comes first.
        collapse: (state, axis) -> the state of an axis's lanes together, where that costs less than `merge` by pairs.
        finish: (state, argument) -> result.
        identity: what the state's first tile starts from.
        states: number of tiles in the state.
    """

    init: Any
    step: Any
    merge: Any
    finish: Any
    identity: float
    states: int = 1
    collapse: Any = None


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def chosen(m, new, old, STATES: tl.constexpr):
    """`new` where the mask says so."""
    if STATES == 1:
        return (tl.where(m, new[0], old[0]),)
    elif STATES == 2:
        return (tl.where(m, new[0], old[0]), tl.where(m, new[1], old[1]))
    else:
        return (tl.where(m, new[0], old[0]), tl.where(m, new[1], old[1]), tl.where(m, new[2], old[2]))


@tl.core.builtin
def reduced(state, AXIS, MERGE, _semantic=None, _generator=None):  # type: ignore[no-untyped-def]
    """`tl.reduce` with a function that came as a constant, which it does not open itself."""
    return tl.reduce(state, AXIS, MERGE.value, _semantic=_semantic, _generator=_generator)


if is_interpreted():  # which would call MERGE for every element

    def reduced(state: Any, AXIS: Any, MERGE: Any) -> Any:
        """The same on whole tiles: halves are merged until one is left."""
        axis = getattr(AXIS, "value", AXIS)
        values = [tile.handle.data for tile in state]
        kinds = [tile.dtype for tile in state]
        make = type(state[0].handle)

        def tile(value: np.ndarray, kind: Any) -> Any:
            return tl.tensor(make(value, kind), tl.block_type(kind, list(value.shape)))

        while values[0].shape[axis] > 1:
            halves = [np.split(v, 2, axis) for v in values]
            sides = [tile(h[side], kind) for side in (0, 1) for h, kind in zip(halves, kinds, strict=True)]
            merged = MERGE(*sides)
            values = [t.handle.data for t in (merged if isinstance(merged, tuple) else (merged,))]
        return tuple(tile(v.squeeze(axis), kind) for v, kind in zip(values, kinds, strict=True))


@triton.jit
def collapsed(state, AXIS: tl.constexpr, MERGE: tl.constexpr, COLLAPSE: tl.constexpr):
    """The state of all lanes along AXIS."""
    if COLLAPSE is None:
        return reduced(state, AXIS, MERGE)
    else:
        return COLLAPSE(state, AXIS)


@triton.jit
def store_results(p_o, p_i, state, o, m, argument, FINISH: tl.constexpr):
    """Results, and positions where they are asked for."""
    if p_o is not None:
        tl.store(p_o + o, converted(FINISH(state, argument), p_o.dtype.element_ty), mask=m)
    if p_i is not None:
        tl.store(p_i + o, state[1].to(tl.int64), mask=m)


@triton.jit
def fold(p_o, p_i, p_a, p_b, p_c, p_x, nk, nr, span, argument, sizes_k, sx, so, sizes_r, sr,
         INIT: tl.constexpr, STEP: tl.constexpr, MERGE: tl.constexpr, COLLAPSE: tl.constexpr, FINISH: tl.constexpr,
         IDENTITY: tl.constexpr, STATES: tl.constexpr, READ: tl.constexpr, WORK: tl.constexpr, AXIS: tl.constexpr,
         KDIMS: tl.constexpr, RDIMS: tl.constexpr, LOOP: tl.constexpr, TAIL: tl.constexpr, WIDE_K: tl.constexpr,
         WIDE_R: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    program, split = tl.program_id(0), tl.program_id(1)
    if WIDE_K:
        program = program.to(tl.int64)
    begin, length = 0, nr
    if p_a is not None:
        begin = (split.to(tl.int64) if WIDE_R else split) * span
        length = tl.minimum(span, nr - begin)
        if TAIL == 16:  # or the compiler would not know that whole vectors are masked together
            length = tl.multiple_of(length, 16)
    i_k = program * BK + tl.arange(0, BK)
    m_k = i_k < nk
    p_k = tl.expand_dims(p_x + offsets(i_k, sizes_k, sx, KDIMS), AXIS)
    m_x = tl.expand_dims(m_k, AXIS)
    i_r = begin + tl.arange(0, BR)
    if WIDE_R:
        i_r = i_r.to(tl.int64)
    ROWS: tl.constexpr = BK if AXIS == 1 else BR
    COLUMNS: tl.constexpr = BR if AXIS == 1 else BK
    state = INIT(tl.full((ROWS, COLUMNS), IDENTITY, WORK), tl.expand_dims(i_r, 1 - AXIS))
    if LOOP:
        for chunk in range(0, length // BR):  # whole ones need no mask along R, so odd lengths are loaded in vectors
            r = i_r + chunk * BR
            o_r = tl.expand_dims(offsets(r, sizes_r, sr, RDIMS), 1 - AXIS)
            x = converted(tl.load(p_k + o_r, mask=m_x), READ)
            state = STEP(state, x, tl.expand_dims(r, 1 - AXIS), chunk, argument)
    if TAIL:
        last = length // BR if LOOP else 0
        r = i_r + last * BR
        m = m_x & tl.expand_dims(last * BR + tl.arange(0, BR) < length, 1 - AXIS)
        o_r = tl.expand_dims(offsets(r, sizes_r, sr, RDIMS), 1 - AXIS)
        x = converted(tl.load(p_k + o_r, mask=m, other=0), READ)
        state = chosen(m, STEP(state, x, tl.expand_dims(r, 1 - AXIS), last, argument), state, STATES)
    state = collapsed(state, AXIS, MERGE, COLLAPSE)
    if p_a is None:
        store_results(p_o, p_i, state, offsets(i_k, sizes_k, so, KDIMS), m_k, argument, FINISH)
    else:
        o = split.to(tl.int64) * nk + i_k
        tl.store(p_a + o, state[0], mask=m_k)
        if p_b is not None:
            tl.store(p_b + o, state[1], mask=m_k)
        if p_c is not None:
            tl.store(p_c + o, state[2], mask=m_k)


@triton.jit
def load_states(p_a, p_b, p_c, o, m):
    a = tl.load(p_a + o, mask=m, other=0)
    if p_b is None:
        return (a,)
    elif p_c is None:
        return (a, tl.load(p_b + o, mask=m, other=0))
    else:
        return (a, tl.load(p_b + o, mask=m, other=0), tl.load(p_c + o, mask=m, other=0))


@triton.jit
def merged(left, right, MERGE: tl.constexpr, STATES: tl.constexpr):
    """MERGE of two states; always a tuple."""
    if STATES == 1:
        return (MERGE(left[0], right[0]),)
    elif STATES == 2:
        return MERGE(left[0], left[1], right[0], right[1])
    else:
        return MERGE(left[0], left[1], left[2], right[0], right[1], right[2])


@triton.jit
def merge(p_o, p_i, p_a, p_b, p_c, nk, ns, argument, sizes_k, so, INIT: tl.constexpr, MERGE: tl.constexpr,
          COLLAPSE: tl.constexpr, FINISH: tl.constexpr, IDENTITY: tl.constexpr, STATES: tl.constexpr,
          WORK: tl.constexpr, INDEX: tl.constexpr, KDIMS: tl.constexpr, LOOP: tl.constexpr, WIDE_K: tl.constexpr,
          BK: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    if WIDE_K:
        program = program.to(tl.int64)
    i_k = program * BK + tl.arange(0, BK)
    i_s = tl.arange(0, BS)
    m_k = i_k < nk
    LAST: tl.constexpr = 0x7FFFFFFF if tl.int32 == INDEX else 0x7FFFFFFFFFFFFFFF
    state = INIT(tl.full((BS, BK), IDENTITY, WORK), tl.full((BS, 1), LAST, INDEX))
    m = m_k[None, :] & (i_s < ns)[:, None]
    o = i_s.to(tl.int64)[:, None] * nk + i_k[None, :]
    state = chosen(m, load_states(p_a, p_b, p_c, o, m), state, STATES)
    if LOOP:
        for chunk in range(1, tl.cdiv(ns, BS)):
            s = chunk * BS + i_s
            m = m_k[None, :] & (s < ns)[:, None]
            o = s.to(tl.int64)[:, None] * nk + i_k[None, :]
            state = chosen(m, merged(state, load_states(p_a, p_b, p_c, o, m), MERGE, STATES), state, STATES)
    state = collapsed(state, 0, MERGE, COLLAPSE)
    store_results(p_o, p_i, state, offsets(i_k, sizes_k, so, KDIMS), m_k, argument, FINISH)


# --- Launching them ---------------------------------------------------------------------------------------------------


def reads(dtype: DType) -> DType:
    """What elements are turned into right after the load: float32 for 2-byte floats, int32 for narrow integers."""
    if dtype.is_floating_point:
        return work_type(dtype)
    return int64 if dtype is int64 else int32


def number(value: float, work: DType) -> float:
    """A Python number as a kernel's argument, in float64 where the work is."""
    return Double(value) if work is float64 else float(value)


def fold_into(
    recipe: Recipe,
    out: Array | None,
    x: Array,
    layout: Layout,
    work: DType,
    *,
    positions: Array | None = None,
    argument: float = 0.0,
    cut: Tiles | None = None,
) -> None:
    """Reduce `x`: every element of `out` is written, from the identity where there is nothing to reduce.

    Args:
        out: contiguous results, or None where only positions are asked for.
        work: the type of the state's values.
        positions: int64 positions (of recipes whose second state they are).
        argument: what `step` and `finish` get.
        cut: tile sizes; chosen by shape unless given.
    """
    if layout.results == 0:
        return
    cut = cut or tiles(layout, x.dtype.itemsize, recipe.states)
    if cut.splits == 1:
        _launch_fold(recipe, (out, positions), (None, None, None), x, layout, work, argument, cut)
        return
    parts = partials(recipe, x, layout, work, cut, argument=argument)
    again = merge_tiles(layout.results, cut.splits)
    launch(
        merge, triton.cdiv(layout.results, again.keep), out, positions, *parts, layout.results, cut.splits,
        number(argument, work), layout.kept, layout.kept_out,
        INIT=recipe.init, MERGE=recipe.merge, COLLAPSE=recipe.collapse, FINISH=recipe.finish, IDENTITY=recipe.identity,
        STATES=recipe.states, WORK=TRITON[work.name], INDEX=TRITON[_index(layout).name], KDIMS=len(layout.kept),
        LOOP=again.fold < cut.splits, WIDE_K=is_wide(layout.kept, layout.kept_out), BK=again.keep, BS=again.fold,
        num_warps=again.warps,
    )  # fmt: skip


def partials(
    recipe: Recipe, x: Array, layout: Layout, work: DType, cut: Tiles, *, argument: float = 0.0
) -> tuple[Array | None, Array | None, Array | None]:
    """The states of every split, as arrays [splits, results] in the layout's order of results."""
    shape = (cut.splits, layout.results)
    types = (work, _index(layout) if recipe.states == 2 and recipe.finish is first_state else work, work)
    a, b, c = (empty(shape, t, x.device) if i < recipe.states else None for i, t in enumerate(types))
    _launch_fold(recipe, (None, None), (a, b, c), x, layout, work, argument, cut)
    return a, b, c


def _tail(elements: int, fold: int) -> int:
    """0 where tiles fit, else what is known to divide the rest: 16 or 1."""
    return 0 if elements % fold == 0 else 16 if elements % 16 == 0 else 1


def _index(layout: Layout) -> DType:
    """The type of positions."""
    return int64 if is_wide(layout.reduced, layout.steps) else int32


def _launch_fold(
    recipe: Recipe,
    outs: tuple[Array | None, Array | None],
    parts: tuple[Array | None, ...],
    x: Array,
    layout: Layout,
    work: DType,
    argument: float,
    cut: Tiles,
) -> None:
    launch(
        fold, (triton.cdiv(layout.results, cut.keep), cut.splits), *outs, *parts, x, layout.results, layout.elements,
        cut.span, number(argument, work), layout.kept, layout.kept_in, layout.kept_out, layout.reduced, layout.steps,
        INIT=recipe.init, STEP=recipe.step, MERGE=recipe.merge, COLLAPSE=recipe.collapse, FINISH=recipe.finish,
        IDENTITY=recipe.identity, STATES=recipe.states, READ=TRITON[reads(x.dtype).name], WORK=TRITON[work.name],
        AXIS=int(layout.inner), KDIMS=len(layout.kept), RDIMS=len(layout.reduced), LOOP=layout.elements >= cut.fold,
        TAIL=_tail(layout.elements, cut.fold),
        WIDE_K=is_wide((*layout.kept, *layout.reduced), (*layout.kept_in, *layout.steps))
        or is_wide(layout.kept, layout.kept_out),
        WIDE_R=is_wide(layout.reduced, layout.steps), BK=cut.keep, BR=cut.fold, num_warps=cut.warps,
    )  # fmt: skip


@triton.jit
def first_state(state, argument):
    return state[0]
