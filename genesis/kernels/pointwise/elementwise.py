"""Elementwise ops: kernels that apply a function of tiles to operands of any layout.

Reference: `genesis/ops/elementwise.py`, under the same names. The functions are written from the formulas of op records
(`genesis.kernels.formulas`), so an op with a formula needs no code here.

Dimensions are merged first. Operands with the same memory layout become one-dimensional and load as vectors. Others are
read in tiles of rows and columns: broadcast operands in place, transposed ones along their own contiguous dimension.
Python scalars are arguments, not constants, so that a new value does not recompile the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend import OpLike
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import DType, bool_, result_type
from genesis.kernels.elements import (
    TRITON,
    collapse,
    converted,
    float_argument,
    in_order,
    needs_int64,
    offsets,
    program_indices,
    work_type,
)
from genesis.kernels.formulas import tile_function
from genesis.ops.blocks import as_type
from genesis.shapes import broadcast_strides

# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def positions(n, BLOCK: tl.constexpr, INT64: tl.constexpr):
    """Return the linear indices [BLOCK] of this program's tile, and their mask."""
    i = program_indices(BLOCK, INT64)  # [BLOCK]
    return i, i < n


@triton.jit
def apply(outs, values, F: tl.constexpr):
    """Return the tuple of results of F, in the types of `outs`."""
    if len(outs) == 1:
        return (converted(F(*values), outs[0].dtype.element_ty),)
    else:
        results = F(*values)
        cast = ()
        for k in tl.static_range(len(outs)):
            cast += (converted(results[k], outs[k].dtype.element_ty),)
        return cast


@triton.jit
def flat_tile(outs, operands, i, m, sizes, so, strides, F: tl.constexpr, SCALARS: tl.constexpr, WORK: tl.constexpr,
              FIRST: tl.constexpr):  # fmt: skip
    values = ()
    for k in tl.static_range(len(operands)):
        if SCALARS & (1 << k):
            values += (tl.full(i.shape, operands[k], FIRST if k == 0 else WORK),)
        else:
            x = tl.load(operands[k] + offsets(i, sizes, strides[k]), mask=m)  # [BLOCK]
            values += (converted(x, FIRST if k == 0 else WORK),)
    results = apply(outs, values, F)
    for k in tl.static_range(len(outs)):
        tl.store(outs[k] + offsets(i, sizes, so), results[k], mask=m)


@triton.jit
def flat_kernel(outs, operands, n, sizes, so, strides, F: tl.constexpr, SCALARS: tl.constexpr, WORK: tl.constexpr,
                FIRST: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store F of the operands, in row-major order of the merged dimensions `sizes`."""
    i = program_indices(BLOCK, INT64)  # [BLOCK]
    # The mask of a length that is not a multiple of 16 would prevent wide loads.
    if tl.program_id(0) < n // BLOCK:
        flat_tile(outs, operands, i, None, sizes, so, strides, F, SCALARS, WORK, FIRST)
    else:
        flat_tile(outs, operands, i, i < n, sizes, so, strides, F, SCALARS, WORK, FIRST)


@triton.jit
def rows_kernel(outs, operands, rows_count, columns, batch, rows, so, strides, F: tl.constexpr, SCALARS: tl.constexpr,
                WORK: tl.constexpr, FIRST: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Store F of the operands in tiles of rows and columns.

    Args:
        batch, rows: sizes of the merged dimensions before the columns; a tile has rows of one batch element.
        so, strides: strides of the results and of each operand, over batch, rows and columns.
    """
    blocks_r, blocks_c = tl.cdiv(rows_count, R), tl.cdiv(columns, C)
    program = tl.program_id(0)
    b, r, c = program // (blocks_r * blocks_c), program // blocks_c % blocks_r, program % blocks_c
    if INT64:
        b, r, c = b.to(tl.int64), r.to(tl.int64), c.to(tl.int64)
    r, c = r * R + tl.arange(0, R), c * C + tl.arange(0, C)  # [R], [C]
    m = (r < rows_count)[:, None] & (c < columns)[None, :]  # [R, C]
    values = ()
    for k in tl.static_range(len(operands)):
        if SCALARS & (1 << k):
            values += (tl.full((R, C), operands[k], FIRST if k == 0 else WORK),)
        else:
            p_x = operands[k] + offsets(b, batch, strides[k][0]) + offsets(r, rows, strides[k][1])[:, None]  # [R, 1]
            x = tl.load(p_x + (c * strides[k][2])[None, :], mask=m)  # [R, C]
            values += (converted(x, FIRST if k == 0 else WORK),)
    results = apply(outs, values, F)
    o = offsets(b, batch, so[0]) + offsets(r, rows, so[1])[:, None] + (c * so[2])[None, :]  # [R, C]
    for k in tl.static_range(len(outs)):
        tl.store(outs[k] + o, results[k], mask=m)


# --- Launching them ---------------------------------------------------------------------------------------------------


def scalar_argument(value: Any, work: DType) -> Any:
    """Return a Python number as a kernel's argument: a float, or an integer cast like the reference's."""
    if not work.is_floating_point:
        with np.errstate(invalid="ignore"):  # numpy warns when it casts NaN to an integer
            return int(as_type(value, work.numpy))
    return float_argument(value, work)


def elementwise(
    function: Any, out: Array | tuple[Array, ...], *operands: Any, work: DType | None = None,
    condition_type: DType | None = None,
) -> None:  # fmt: skip
    """Compute `out = function(*operands)` element by element, with broadcasting.

    Args:
        function: function of tiles, under `triton.jit`.
        out: the result, or results with the same strides.
        operands: arrays or numbers.
        work: type of the computation; by default out's type (float32 for 2-byte floats).
        condition_type: type of the first operand, if it differs.
    """
    outs = out if isinstance(out, tuple) else (out,)
    y = outs[0]
    work = work_type(y.dtype if work is None else work)
    arrays = [x for x in operands if isinstance(x, Array)]
    if function is identity and arrays and arrays[0].dtype is y.dtype:
        work = y.dtype  # no conversions
    broadcast = [broadcast_strides(x.shape, x.strides, y.shape) for x in arrays]
    order = sorted(range(y.ndim), key=lambda d: -y.strides[d])  # neighbours in memory are neighbours in a tile
    sizes, so, *merged = collapse(*(tuple([each[d] for d in order]) for each in (y.shape, y.strides, *broadcast)))
    array_strides = iter(merged)
    strides = [next(array_strides) if isinstance(x, Array) else (0,) * len(sizes) for x in operands]
    values = tuple([x if isinstance(x, Array) else scalar_argument(x, work) for x in operands])
    constants: dict[str, Any] = {
        "F": function, "SCALARS": sum(1 << i for i, x in enumerate(operands) if not isinstance(x, Array)),
        "WORK": TRITON[work.name], "FIRST": TRITON[(condition_type or work).name],
        "INT64": needs_int64(sizes, so, *merged), "num_warps": 4,
    }  # fmt: skip
    *before, columns = range(len(sizes))
    rows = next((d for d in before for s in merged if s[d] == 1 and s[columns] > 1), None)
    is_transposed = rows is not None and min(sizes[rows], sizes[columns]) >= 16
    # Rows whose length is not a multiple of 16 do not load as vectors, but a contiguous array as a whole does.
    if not is_transposed and (len(sizes) == 1 or sizes[columns] < 32 or sizes[columns] % 16):
        steps = [in_order(sizes, s) for s in (so, *strides)]
        launch(
            flat_kernel, triton.cdiv(y.size, 1024), outs, values, y.size, sizes, steps[0], tuple(steps[1:]),
            BLOCK=1024, **constants,
        )  # fmt: skip
        return
    if is_transposed:  # tiles have 64 bytes or more along both contiguous dimensions
        side = {1: 128, 2: 64}.get(max(x.dtype.itemsize for x in (*outs, *arrays)), 32)
        parts, tile = ([d for d in before if d != rows], [rows]), (side, side)
    else:  # one tile may have rows of several dimensions
        c = min((1024, 512, 256, 128, 64, 32), key=lambda c: -(-sizes[columns] // c) * c)
        parts, tile = ([], before), (1024 // c, c)
    of_batch, of_rows = (lambda each, ds=ds: tuple([each[d] for d in ds]) for ds in parts)
    batch, row_sizes = of_batch(sizes) or (1,), of_rows(sizes)
    parts_of = [(of_batch(s) or (0,), of_rows(s), s[columns]) for s in (so, *strides)]
    blocks = triton.cdiv(math.prod(row_sizes), tile[0]) * triton.cdiv(sizes[columns], tile[1])
    launch(
        rows_kernel, math.prod(batch) * blocks, outs, values, math.prod(row_sizes), sizes[columns], batch, row_sizes,
        parts_of[0], tuple(parts_of[1:]), R=tile[0], C=tile[1], **constants,
    )  # fmt: skip


@triton.jit
def identity(x):
    return x


# --- The CUDA implementations -----------------------------------------------------------------------------------------


@triton.jit
def cube(x):
    return x * x * x


class Expression(NamedTuple):
    """The computation of an elementwise op for one type of results.

    Attributes:
        operands: numbers, and arrays or graph values, which have a dtype and a shape.
        work: type of the computation.
        condition_type: type of the first operand.
    """

    function: Any
    operands: tuple[Any, ...]
    work: DType
    condition_type: DType


def expression(op: OpLike, dtype: DType, *operands: Any, is_several: bool = False) -> Expression:
    """Return the computation of an op with a formula.

    Results of type bool, and several results, are computed in the common type of the operands. Squares and cubes, by
    far the most frequent powers, are products.
    """
    work = result_type(operands) if is_several or dtype is bool_ else dtype
    name, function, first = op.name, None, work_type(work)
    # A fast division gives 0 for divisors above 2^126, which is correct only for formulas that divide by e^x + 1.
    is_fast = work_type(dtype) is not dtype and name not in ("div", "reciprocal", "rsqrt")
    form = "bools" if work is bool_ else "fast" if is_fast else "exact"
    if name == "where":
        first = bool_
    elif name == "clamp" and None in operands:
        x, low, high = (*operands, None)[:3]
        name, operands = ("maximum", (x, low)) if high is None else ("minimum", (x, high))
    elif name == "pow" and isinstance(operands[1], (int, float)) and operands[1] in (2, 3):
        name, function, operands = "square", cube if operands[1] == 3 else None, operands[:1]
    return Expression(function or tile_function(name, form), operands, work_type(work), first)


def implementation(op: OpLike) -> Callable[..., None]:
    """Return the CUDA implementation of an op with a formula."""

    def run(out: Array | tuple[Array, ...], *operands: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        found = expression(op, first.dtype, *operands, is_several=isinstance(out, tuple))
        elementwise(found.function, out, *found.operands, work=found.work, condition_type=found.condition_type)

    return run


@cuda_impl("copy", "cast")
def copy(out: Array, x: Array, dtype: DType | None = None) -> None:
    """Copy x in out's dtype."""
    elementwise(identity, out, x, work=x.dtype)


@cuda_impl("overwrite")
def overwrite(out: Array, x: Array, source: Any) -> None:
    """Copy `source`. The values of x are not read."""
    elementwise(identity, out, source, work=source.dtype if isinstance(source, Array) else out.dtype)


@cuda_impl("fill")
def fill(out: Array, value: float, shape: Any, dtype: DType) -> None:
    if out.is_contiguous and value == 0 and math.copysign(1, value) > 0:
        clear(out)
    else:
        elementwise(identity, out, value)


# --- Ranges, in float64 or exact integers -----------------------------------------------------------------------------


TILE = 1024


@triton.jit(do_not_specialize=["start", "step", "count", "end"])
def arange_kernel(p_o, start, step, end, count, TYPE: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr):
    """Store start + step · i. With ENDS the second half is counted from `end`."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    y = tl.full([T], start, TYPE) + tl.full([T], step, TYPE) * i.to(TYPE)  # [T]
    if ENDS:
        back = tl.full([T], end, TYPE) - tl.full([T], step, TYPE) * (count - 1 - i).to(TYPE)  # [T]
        y = tl.where(i < tl.maximum(count // 2, 1), y, back)
    tl.store(p_o + i, converted(y, p_o.dtype.element_ty), mask=i < count)


@cuda_impl("arange")
def arange(out: Array, start: float, step: float, count: int, dtype: DType) -> None:
    exact = isinstance(start, int) and isinstance(step, int)
    bounds = (int(start), int(step)) if exact else (Double(start), Double(step))
    launch(
        arange_kernel, triton.cdiv(count, TILE), out, *bounds, bounds[0], count, TYPE=tl.int64 if exact else tl.float64,
        ENDS=False, T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("linspace")
def linspace(out: Array, start: float, end: float, count: int, dtype: DType) -> None:
    step = (float(end) - float(start)) / max(count - 1, 1)
    launch(
        arange_kernel, triton.cdiv(count, TILE), out, Double(start), Double(step), Double(end), count, TYPE=tl.float64,
        ENDS=True, T=TILE, num_warps=4,
    )  # fmt: skip
