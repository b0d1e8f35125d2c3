"""Inclusive and exclusive scans along lines: one launch if the lines fill the GPU, else three.

Reference: `genesis/ops/reduce.py`: cumsum, prod_backward.

The three launches reduce every split of a line, scan these totals, and scan each split from its prefix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType
from genesis.kernels.reduce.plan import Layout, Tiles, is_inner, scan_tiles, zero_if_single
from genesis.kernels.reduce.reduction import ReduceSpec, load_type, partial_states, reduce_tile
from genesis.kernels.strides import collapse, needs_int64, offsets
from genesis.kernels.types import TRITON, converted
from genesis.shapes import Shape, numel

__all__ = ["scan_into"]


class Lines(NamedTuple):
    """Lines (`kept`) and the elements of each (`along`): merged dimensions, strides in input and result."""

    kept: Shape
    kept_in: Shape
    kept_out: Shape
    along: Shape
    along_in: Shape
    along_out: Shape


@tl.core.builtin
def scan_tile(x, AXIS, MERGE, REVERSE, _semantic=None, _generator=None):  # type: ignore[no-untyped-def]
    """`tl.associative_scan`, which does not unwrap a combine function that is a constexpr."""
    reverse = REVERSE.value
    return tl.associative_scan(x, AXIS, MERGE.value, reverse=reverse, _semantic=_semantic, _generator=_generator)


if is_interpreted():  # where tl.associative_scan would call MERGE for every element

    def scan_tile(x: Any, AXIS: Any, MERGE: Any, REVERSE: Any) -> Any:
        """The same on whole tiles: each element takes in the one 1, 2, 4, … before it (Hillis and Steele, 1986)."""
        axis, reverse = getattr(AXIS, "value", AXIS), getattr(REVERSE, "value", REVERSE)
        values = np.moveaxis(x.handle.data, axis, 0)
        values = values[::-1] if reverse else values
        make = type(x.handle)

        def tile(part: np.ndarray) -> Any:
            return tl.tensor(make(part, x.dtype), tl.block_type(x.dtype, list(part.shape)))

        distance = 1
        while distance < len(values):
            merged = MERGE(tile(np.roll(values, distance, 0)), tile(values)).handle.data
            values = np.concatenate([values[:distance], merged[distance:]])
            distance *= 2
        return tile(np.moveaxis(values[::-1] if reverse else values, 0, axis))


@triton.jit
def scan_kernel(p_o, p_x, p_prefix, nk, nr, span, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                READ: tl.constexpr, WORK: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr,
                EXCLUSIVE: tl.constexpr, INT64_K: tl.constexpr, INT64_R: tl.constexpr, BK: tl.constexpr,
                BR: tl.constexpr):  # fmt: skip
    """Scan a split of `span` elements of nk lines, from its prefix if one is given.

    `kept` and `along`: sizes, strides in x, and strides in the result, as in `Lines`.
    """
    program, split = tl.program_id(0), tl.program_id(1)
    if INT64_K:
        program = program.to(tl.int64)
    i_k = program * BK + tl.arange(0, BK)  # [BK]
    m_k = i_k < nk
    begin = (split.to(tl.int64) if INT64_R else split) * span
    end = tl.minimum(begin + span, nr)
    chunks = tl.cdiv(end - begin, BR)
    p_k = tl.expand_dims(p_x + offsets(i_k, kept[0], kept[1]), AXIS)
    q_k = tl.expand_dims(p_o + offsets(i_k, kept[0], kept[2]), AXIS)
    m_x = tl.expand_dims(m_k, AXIS)
    if p_prefix is None:
        carry = tl.full((BK,), IDENTITY, WORK)
    else:
        carry = tl.load(p_prefix + split.to(tl.int64) * nk + i_k, mask=m_k, other=0)
    SHIFT: tl.constexpr = (1 if REVERSE else -1) if EXCLUSIVE else 0
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSE else step
        r = begin + chunk * BR + tl.arange(0, BR)  # [BR]
        source = r + SHIFT
        m = m_x & tl.expand_dims((source >= begin) & (source < end), 1 - AXIS)
        x = tl.load(p_k + tl.expand_dims(offsets(source, along[0], along[1]), 1 - AXIS), mask=m, other=0)
        x = tl.where(m, converted(converted(x, READ), WORK), IDENTITY)  # [BK, BR] or [BR, BK]
        y = MERGE(tl.expand_dims(carry, AXIS), scan_tile(x, AXIS, MERGE, REVERSE))
        o = q_k + tl.expand_dims(offsets(r, along[0], along[2]), 1 - AXIS)
        tl.store(o, converted(y, p_o.dtype.element_ty), mask=m_x & tl.expand_dims(r < end, 1 - AXIS))
        carry = MERGE(carry, reduce_tile((x,), AXIS, MERGE)[0])


def scan_into(
    spec: ReduceSpec, out: Array, x: Array, axes: Shape, work: DType, *, reverse: bool = False, exclusive: bool = False
) -> None:
    """The scan of `spec` along the dimensions `axes` in row-major order.

    Args:
        out: of x's shape.
        work: the type of the accumulator.
        reverse: scan from the last element to the first.
        exclusive: each result leaves out its own element.
    """
    if out.size == 0:
        return
    keep = [i for i in range(x.ndim) if i not in axes]
    keep.sort(key=lambda i: (x.strides[i] != 0, -x.strides[i]))
    kept, kept_in, kept_out = _merged(x, out, keep)
    lines = Lines(kept, *zero_if_single(kept, kept_in, kept_out), *_merged(x, out, list(axes)))
    count, length = numel(lines.kept), numel(lines.along)
    inner = is_inner(lines.kept, lines.kept_in, lines.along, lines.along_in)
    cut = scan_tiles(count, length, inner)
    prefix = None
    if cut.splits > 1:
        layout = Layout(lines.kept, lines.kept_in, (1,) * len(lines.kept), lines.along, lines.along_in, inner)
        totals, *_ = partial_states(spec, x, layout, work, cut)
        assert totals is not None
        prefix = empty((cut.splits, count), work, x.device)
        splits = Lines((count,), (1,), (1,), (cut.splits,), (count,), (count,))
        small = scan_tiles(count, cut.splits, False, whole=True)
        _launch(spec, prefix, totals, None, splits, work, small, False, reverse, True)
    _launch(spec, out, x, prefix, lines, work, cut, inner, reverse, exclusive)


def _merged(x: Array, out: Array, dims: list[int]) -> tuple[Shape, Shape, Shape]:
    sizes, along_in, along_out = collapse(
        tuple(x.shape[i] for i in dims), tuple(x.strides[i] for i in dims), tuple(out.strides[i] for i in dims)
    )
    return sizes, along_in, along_out


def _launch(
    spec: ReduceSpec, out: Array, x: Array, prefix: Array | None, lines: Lines, work: DType, cut: Tiles, inner: bool,
    reverse: bool, exclusive: bool,
) -> None:  # fmt: skip
    count, length = numel(lines.kept), numel(lines.along)
    sizes = (*lines.kept, *lines.along)
    launch(
        scan_kernel, (triton.cdiv(count, cut.block_k), cut.splits), out, x, prefix, count, length, cut.span,
        (lines.kept, lines.kept_in, lines.kept_out), (lines.along, lines.along_in, lines.along_out), MERGE=spec.merge,
        IDENTITY=spec.identity, READ=TRITON[load_type(x.dtype).name], WORK=TRITON[work.name], AXIS=int(inner),
        REVERSE=reverse, EXCLUSIVE=exclusive,
        INT64_K=needs_int64(sizes, (*lines.kept_in, *lines.along_in), (*lines.kept_out, *lines.along_out)),
        INT64_R=needs_int64(lines.along, lines.along_in, lines.along_out), BK=cut.block_k, BR=cut.block_r,
        num_warps=cut.warps,
    )  # fmt: skip
