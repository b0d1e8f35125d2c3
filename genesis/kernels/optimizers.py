"""Twins of the optimizer steps: one launch over all elements, after one that makes the step's few constants.

Learning rate, step count and gradient scale may be numbers or 0-d arrays, which are never read back: a single program
computes from them, in float64, the constants that all elements share (powers of β, say). A gradient scale of NaN leaves
the step out: nothing is stored. Numbers change from step to step and would each leave a plan behind, so plans are kept
only where these inputs are arrays.

Norms are added up in float64 from partial sums at fixed cuts, so they do not depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.launch import clear, launch
from genesis.backend.cuda.signature import Double
from genesis.backend.cuda.twins import twin
from genesis.dtypes import DType, bfloat16, float32, float64
from genesis.kernels import maths
from genesis.kernels.elementwise import elementwise, positions
from genesis.kernels.indices import collapse, is_wide, offsets
from genesis.kernels.linalg import matmul_into
from genesis.kernels.random import counters, forget_plan, quads, words_of
from genesis.kernels.types import TRITON, converted, work_type
from genesis.shapes import Shape, numel

__all__: list[str] = []

Scalar = Any  # a Python number or a 0-d array

BLOCK = 1024  # elements a program of an elementwise step: 16 bytes an operand and thread, twice
SPAN = 1 << 15  # elements of which one program makes a partial sum
TILE_ROWS, TILE_COLUMNS = 16, 128  # of a matrix, for its row and column means


# --- Constants of a step ----------------------------------------------------------------------------------------------


@triton.jit
def scalar(x, IS_NUMBER: tl.constexpr):
    """A number, or the element of a 0-d array, in float64."""
    return tl.full((), x, tl.float64) if IS_NUMBER else converted(tl.load(x), tl.float64)


@triton.jit
def put(p_c, AT: tl.constexpr, value):
    tl.store(p_c + AT, converted(value, p_c.dtype.element_ty))


@triton.jit
def note(p_c, scale, IS_NUMBER: tl.constexpr):
    """The gradient scale in float64; it is noted whether it is a number, as otherwise the step is left out."""
    c = scalar(scale, IS_NUMBER)
    put(p_c, 9, (c == c).to(tl.float64))
    return c


@triton.jit
def wanted(m, p_c):
    """The mask of a store of a step, which holds nothing where the step is left out."""
    made = tl.zeros(m.shape, p_c.dtype.element_ty) + tl.load(p_c + 9)  # the interpreter cannot spread a scalar bool
    return m & (made != 0)


@triton.jit
def exact(x):
    """A number argument in float64."""
    return tl.full((), x, tl.float64)


@triton.jit
def sgd_constants(p_c, lr, step, scale, decay, NUMBERS: tl.constexpr):
    rate = scalar(lr, NUMBERS & 1)
    put(p_c, 0, 1 - rate * decay)
    put(p_c, 1, rate * note(p_c, scale, NUMBERS & 4))


@triton.jit
def momentum_constants(p_c, lr, step, scale, momentum, dampening, decay, NUMBERS: tl.constexpr):
    put(p_c, 0, scalar(lr, NUMBERS & 1))
    put(p_c, 1, note(p_c, scale, NUMBERS & 4))
    put(p_c, 2, exact(momentum))
    put(p_c, 3, 1 - exact(dampening))
    put(p_c, 4, exact(decay))
    put(p_c, 5, (scalar(step, NUMBERS & 2) <= 1).to(tl.float64))


@triton.jit
def adam_constants(p_c, lr, step, scale, beta1, beta2, eps, decay, L2: tl.constexpr, NUMBERS: tl.constexpr):
    rate, count, c = scalar(lr, NUMBERS & 1), scalar(step, NUMBERS & 2), note(p_c, scale, NUMBERS & 4)
    b1, b2 = exact(beta1), exact(beta2)
    root = maths.root(1 - maths.power(b2, count))
    pre = c * 0 + 1 if L2 else c  # with L2 the gradient is scaled when the decay is added
    put(p_c, 0, b1)
    put(p_c, 1, b2)
    put(p_c, 2, (1 - b1) * pre)
    put(p_c, 3, (1 - b2) * pre * pre)
    put(p_c, 4, exact(eps) * root)
    put(p_c, 5, rate / (1 - maths.power(b1, count)) * root)
    put(p_c, 6, 1 - rate * decay)
    put(p_c, 7, c)
    put(p_c, 8, exact(decay))


@triton.jit
def lion_constants(p_c, lr, step, scale, beta1, beta2, decay, NUMBERS: tl.constexpr):
    rate, c = scalar(lr, NUMBERS & 1), note(p_c, scale, NUMBERS & 4)
    b1, b2 = exact(beta1), exact(beta2)
    put(p_c, 0, b1)
    put(p_c, 1, b2)
    put(p_c, 2, (1 - b1) * c)
    put(p_c, 3, (1 - b2) * c)
    put(p_c, 4, rate)
    put(p_c, 5, 1 - rate * decay)


@triton.jit
def adafactor_constants(p_c, lr, step, scale, power, decay, NUMBERS: tl.constexpr):
    rate, count = scalar(lr, NUMBERS & 1), scalar(step, NUMBERS & 2)
    limit = 1 / maths.root(count)
    put(p_c, 0, note(p_c, scale, NUMBERS & 4))
    put(p_c, 1, maths.power(count, exact(power)))
    put(p_c, 2, 1 - rate * decay)
    put(p_c, 3, tl.where(limit < rate, limit, rate))


@triton.jit
def muon_constants(p_c, lr, step, scale, momentum, decay, ratio, NUMBERS: tl.constexpr):
    rate = scalar(lr, NUMBERS & 1)
    put(p_c, 0, (1 - exact(momentum)) * note(p_c, scale, NUMBERS & 4))
    put(p_c, 1, exact(momentum))
    put(p_c, 2, 1 - rate * decay)
    put(p_c, 3, rate * ratio)


def _constants(
    kernel: Any, dtype: DType, like: Array, lr: Scalar, step: Scalar, scale: Scalar, *rest: float, **flags: bool
) -> Array:
    """The constants of a step, on the device.

    Args:
        dtype: what they are rounded to, once.
        rest: the kernel's own numbers.
    """
    made = empty((10,), dtype, like.device)  # the last says whether the step is made
    given = (lr, step, scale)
    numbers = sum(1 << i for i, x in enumerate(given) if not isinstance(x, Array))
    if numbers:
        forget_plan()
    values = [x if isinstance(x, Array) else Double(x) for x in given]
    launch(kernel, 1, made, *values, *(Double(x) for x in rest), **flags, NUMBERS=numbers, num_warps=1)
    return made


@triton.jit
def _same(x):
    return x


@contextmanager
def _apart(*arrays: Array) -> Iterator[list[Array]]:
    """Arrays to change in place; expanded views, whose elements share memory, as copies that are written back."""
    own = [empty(x.shape, x.dtype, x.device) if x.overlaps_itself() else x for x in arrays]
    for x, copy in zip(arrays, own, strict=True):
        if copy is not x:
            elementwise(_same, copy, x)
    yield own
    for x, copy in zip(arrays, own, strict=True):
        if copy is not x:
            elementwise(_same, x, copy)


# --- Elementwise steps ------------------------------------------------------------------------------------------------


@triton.jit
def tile(p_x, o, m, WORK: tl.constexpr):
    return converted(tl.load(p_x + o, mask=m), WORK)


@triton.jit
def sgd(p_p, p_g, p_c, n, sizes, sp, sg, WORK: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr,
        BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    m = wanted(m, p_c)
    o_p = offsets(i, sizes, sp, DIMS)
    keep, take = tl.load(p_c), tl.load(p_c + 1)
    p = tl.load(p_p + o_p, mask=m)
    g = tile(p_g, offsets(i, sizes, sg, DIMS), m, WORK)
    tl.store(p_p + o_p, p * keep - g * take, mask=m)


@triton.jit
def sgd_momentum(p_p, p_g, p_b, p_c, n, sizes, sp, sg, sb, NESTEROV: tl.constexpr, WORK: tl.constexpr,
                 DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    m = wanted(m, p_c)
    o_p, o_b = offsets(i, sizes, sp, DIMS), offsets(i, sizes, sb, DIMS)
    rate, scale, mu, damp, decay = (
        tl.load(p_c), tl.load(p_c + 1), tl.load(p_c + 2), tl.load(p_c + 3), tl.load(p_c + 4),
    )  # fmt: skip
    p, b = tl.load(p_p + o_p, mask=m), tl.load(p_b + o_b, mask=m)
    g = tile(p_g, offsets(i, sizes, sg, DIMS), m, WORK) * scale + p * decay
    b = tl.where(tl.load(p_c + 5) != 0, g, b * mu + g * damp)
    update = g + b * mu if NESTEROV else b
    tl.store(p_b + o_b, b, mask=m)
    tl.store(p_p + o_p, p - update * rate, mask=m)


@triton.jit
def adam(p_p, p_g, p_m, p_v, p_c, n, sizes, sp, sg, sm, sv, L2: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr,
         WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, mask = positions(n, BLOCK, WIDE)
    mask = wanted(mask, p_c)
    o_p, o_m, o_v = offsets(i, sizes, sp, DIMS), offsets(i, sizes, sm, DIMS), offsets(i, sizes, sv, DIMS)
    b1, b2, k1, k2 = tl.load(p_c), tl.load(p_c + 1), tl.load(p_c + 2), tl.load(p_c + 3)
    small, alpha, keep = tl.load(p_c + 4), tl.load(p_c + 5), tl.load(p_c + 6)
    p = tl.load(p_p + o_p, mask=mask)
    m, v = tl.load(p_m + o_m, mask=mask), tl.load(p_v + o_v, mask=mask)
    g = tile(p_g, offsets(i, sizes, sg, DIMS), mask, WORK)
    if L2:
        g = p * tl.load(p_c + 8) + g * tl.load(p_c + 7)
    else:
        p = p * keep
    m = m * b1 + g * k1
    v = v * b2 + g * g * k2
    tl.store(p_m + o_m, m, mask=mask)
    tl.store(p_v + o_v, v, mask=mask)
    tl.store(p_p + o_p, p - maths.divide(m, maths.root(v) + small) * alpha, mask=mask)


@triton.jit
def lion(p_p, p_g, p_m, p_c, n, sizes, sp, sg, sm, WORK: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    i, mask = positions(n, BLOCK, WIDE)
    mask = wanted(mask, p_c)
    o_p, o_m = offsets(i, sizes, sp, DIMS), offsets(i, sizes, sm, DIMS)
    b1, b2, k1, k2 = tl.load(p_c), tl.load(p_c + 1), tl.load(p_c + 2), tl.load(p_c + 3)
    rate, keep = tl.load(p_c + 4), tl.load(p_c + 5)
    p, m = tl.load(p_p + o_p, mask=mask), tl.load(p_m + o_m, mask=mask)
    g = tile(p_g, offsets(i, sizes, sg, DIMS), mask, WORK)
    s = m * b1 + g * k1
    update = tl.where(s > 0, rate, tl.where(s < 0, -rate, s))  # 0 and NaN stay
    tl.store(p_p + o_p, p * keep - update, mask=mask)
    tl.store(p_m + o_m, m * b2 + g * k2, mask=mask)


def _step(kernel: Any, arrays: tuple[Array, ...], constants: Array, **flags: bool) -> None:
    """Launch an elementwise step on a parameter, its gradient and its states."""
    changed, grad = (arrays[0], *arrays[2:]), arrays[1]
    with _apart(*changed) as (param, *states):
        operands = (param, grad, *states)
        sizes, *strides = collapse(param.shape, *(x.strides for x in operands))
        launch(
            kernel, triton.cdiv(param.size, BLOCK), *operands, constants, param.size, sizes, *strides, **flags,
            WORK=TRITON[param.dtype.name], DIMS=len(sizes), WIDE=is_wide(sizes, *strides), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@twin("sgd_step")
def sgd_step(out: tuple[()], param: Array, grad: Array, lr: Scalar, grad_scale: Scalar, *, weight_decay: float) -> None:
    """p -= lr·(c·g + wd·p), c the `grad_scale`."""
    _step(sgd, (param, grad), _constants(sgd_constants, param.dtype, param, lr, 0, grad_scale, weight_decay))


@twin("sgd_momentum_step")
def sgd_momentum_step(
    out: tuple[()], param: Array, grad: Array, momentum_buffer: Array, lr: Scalar, step: Scalar, grad_scale: Scalar, *,
    momentum: float, dampening: float, nesterov: bool, weight_decay: float,
) -> None:  # fmt: skip
    """With g' = c·g + wd·p: b = g' at step 1, else b = μ·b + (1-δ)·g'; p -= lr·b, or lr·(g' + μ·b) with Nesterov."""
    made = _constants(
        momentum_constants, param.dtype, param, lr, step, grad_scale, momentum, dampening, weight_decay
    )  # fmt: skip
    _step(sgd_momentum, (param, grad, momentum_buffer), made, NESTEROV=nesterov)


@twin("adamw_step")
def adamw_step(
    out: tuple[()], param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, lr: Scalar, step: Scalar,
    grad_scale: Scalar, *, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
) -> None:  # fmt: skip
    """m = β1·m + (1-β1)·c·g, v = β2·v + (1-β2)·(c·g)², p = (1 - lr·wd)·p - α·m / (√v + ε·√b2)."""
    l2 = bool(weight_decay) and not decoupled
    made = _constants(
        adam_constants, param.dtype, param, lr, step, grad_scale, beta1, beta2, eps, weight_decay, L2=l2
    )  # fmt: skip
    _step(adam, (param, grad, exp_avg, exp_avg_sq), made, L2=l2)


@twin("lion_step")
def lion_step(
    out: tuple[()], param: Array, grad: Array, exp_avg: Array, lr: Scalar, grad_scale: Scalar, *,
    beta1: float, beta2: float, weight_decay: float,
) -> None:  # fmt: skip
    """p = (1 - lr·wd)·p - lr·sign(β1·m + (1-β1)·c·g), then m = β2·m + (1-β2)·c·g."""
    made = _constants(lion_constants, param.dtype, param, lr, 0, grad_scale, beta1, beta2, weight_decay)
    _step(lion, (param, grad, exp_avg), made)


# --- Sums of powers ---------------------------------------------------------------------------------------------------


@triton.jit
def power_sums(p_o, p_x, n, sizes, sx, order, ORDER: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr,
               WIDE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The sum of |x|^order over this program's span; ORDER is 2, or 0 for the largest |x| (NaN where one is), or 1."""
    i_program = tl.program_id(0)
    start = (i_program.to(tl.int64) if WIDE else i_program) * SPAN
    acc = tl.zeros((BLOCK,), WORK)
    for at in range(0, tl.minimum(n - start, SPAN), BLOCK):
        i = start + at + tl.arange(0, BLOCK)
        x = tl.abs(converted(tl.load(p_x + offsets(i, sizes, sx, DIMS), mask=i < n, other=0), WORK))
        if ORDER == 2:
            acc += x * x
        elif ORDER == 0:
            acc = tl.where((x > acc) | (x != x), x, acc)
        else:
            acc += tl.where(i < n, maths.power(x, tl.full(x.shape, order, WORK)), 0.0)
    wide = acc.to(tl.float64)
    if ORDER == 0:
        bad = tl.max((wide != wide).to(tl.int32), 0)
        found = tl.where(bad > 0, float("nan"), tl.max(tl.where(wide == wide, wide, 0.0), 0))
    else:
        found = tl.sum(wide, 0)
    tl.store(p_o + i_program, found)


@triton.jit
def norm_kernel(p_o, p_parts, count, order, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(p_parts + i, mask=i < count, other=0)
        acc = tl.where((x > acc) | (x != x), x, acc) if ORDER == 0 else acc + x
    if ORDER == 0:
        bad = tl.max((acc != acc).to(tl.int32), 0)
        y = tl.where(bad > 0, float("nan"), tl.max(tl.where(acc == acc, acc, 0.0), 0))
    else:
        y = tl.sum(acc, 0)
        y = maths.root(y) if ORDER == 2 else maths.power(y, 1 / exact(order))
    tl.store(p_o, converted(y, p_o.dtype.element_ty))


def _norm(out: Array, arrays: tuple[Array, ...], order: float) -> None:
    """(Σ |x|^order)^(1/order) over all arrays, into a 0-d array; partial sums are added in order, in float64."""
    counts = [triton.cdiv(x.size, SPAN) for x in arrays]
    parts = empty((max(sum(counts), 1),), float64, out.device)
    kind = {2.0: 2, math.inf: 0}.get(float(order), 1)
    at = 0
    for x, count in zip(arrays, counts, strict=True):
        work = work_type(x.dtype)
        sizes, sx = collapse(x.shape, x.strides)
        part = parts.view((count,), (1,), parts.offset + at)
        launch(
            power_sums, count, part, x, x.size, sizes, sx, Double(order) if work is float64 else float(order),
            ORDER=kind, WORK=TRITON[work.name], DIMS=len(sizes), WIDE=is_wide(sizes, sx), SPAN=SPAN,
            BLOCK=min(2048, max(16, triton.next_power_of_2(x.size))), num_warps=8,
        )  # fmt: skip
        at += count
    launch(
        norm_kernel, 1, out, parts, at, Double(order), ORDER=kind,
        BLOCK=min(4096, max(16, triton.next_power_of_2(at))), num_warps=8,
    )  # fmt: skip


@twin("total_norm")
def total_norm(out: Array, *arrays: Array, ord: float) -> None:
    """(Σ |x|^ord)^(1/ord) over all elements of all arrays, the largest |x| for an infinite order; 0 for no arrays."""
    full = tuple(x for x in arrays if x.size)
    if full:
        _norm(out, full, ord)
    else:
        clear(out)


# --- Adafactor --------------------------------------------------------------------------------------------------------


@triton.jit
def matrix_tile(tiles, sizes, DIMS: tl.constexpr, ROWS: tl.constexpr):
    """This program's matrix and its rows."""
    i_batch = tl.program_id(0).to(tl.int64) // tiles
    return i_batch, (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)


@triton.jit
def matrix_stats(p_p, p_g, p_row, p_columns, p_squares, p_c, rows, columns, tiles, sizes, bp, bg, br, sp, sg, sr,
                 WORK: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Move the row means to those of (c·g)²; leave column sums of these rows and Σ p²."""
    i_batch, i_row = matrix_tile(tiles, sizes, DIMS, ROWS)
    o_p, o_g = offsets(i_batch, sizes, bp, DIMS), offsets(i_batch, sizes, bg, DIMS)
    scale, weight = tl.load(p_c).to(WORK), tl.load(p_c + 1)
    of_rows = tl.zeros((ROWS,), WORK)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, columns, COLUMNS):
        i_column = first + tl.arange(0, COLUMNS)
        m = (i_row < rows)[:, None] & (i_column < columns)[None, :]
        r, c = i_row.to(tl.int64)[:, None], i_column.to(tl.int64)[None, :]
        g = converted(tl.load(p_g + o_g + r * sg[0] + c * sg[1], mask=m, other=0), WORK) * scale
        p = tl.load(p_p + o_p + r * sp[0] + c * sp[1], mask=m, other=0)
        of_rows += tl.sum(g * g, 1)
        total += tl.sum(tl.sum(p * p, 1).to(tl.float64), 0)
        o_c = tl.program_id(0).to(tl.int64) * columns + i_column
        tl.store(p_columns + o_c, tl.sum(g * g, 0), mask=i_column < columns)
    tl.store(p_squares + tl.program_id(0), total)
    p_r = p_row + offsets(i_batch, sizes, br, DIMS) + i_row.to(tl.int64) * sr
    old = tl.load(p_r, mask=i_row < rows).to(tl.float64)
    new = (1 - weight) * old + weight * (of_rows.to(tl.float64) / columns)
    tl.store(p_r, converted(new, WORK), mask=wanted(i_row < rows, p_c))


@triton.jit
def column_stats(p_col, p_factor, p_row, p_columns, p_c, rows, columns, tiles, sizes, bc, br, sc, sr, tiny,
                 WORK: tl.constexpr, DIMS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Move the column means; leave them divided by the mean of the row means."""
    i_batch = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m = i_column < columns
    weight = tl.load(p_c + 1)
    p_r = p_row + offsets(i_batch, sizes, br, DIMS)
    acc = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        acc += tl.load(p_r + i.to(tl.int64) * sr, mask=i < rows, other=0).to(tl.float64)
    mean = tl.sum(acc, 0) / rows
    mean = tl.where(mean < tiny, tl.full((), tiny, tl.float64), mean)
    sums = tl.zeros((COLUMNS,), tl.float64)
    for t in range(0, tiles):
        sums += tl.load(p_columns + (i_batch * tiles + t) * columns + i_column, mask=m, other=0).to(tl.float64)
    p_q = p_col + offsets(i_batch, sizes, bc, DIMS) + i_column.to(tl.int64) * sc
    new = (1 - weight) * tl.load(p_q, mask=m).to(tl.float64) + weight * (sums / rows)
    tl.store(p_q, converted(new, WORK), mask=wanted(m, p_c))
    tl.store(p_factor + i_batch * columns + i_column, converted(new / mean, WORK), mask=m)


@triton.jit
def relative(g, variance, tiny):
    """u = g / √max(v, tiny²)."""
    least = tl.full((), tiny, tl.float64) * tiny
    return maths.divide(g, maths.root(tl.where(variance < least, least.to(variance.dtype), variance)))


@triton.jit
def matrix_update(p_p, p_g, p_row, p_factor, p_squares, p_c, rows, columns, tiles, sizes, bp, bg, br, sp, sg, sr, tiny,
                  MEASURE: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """MEASURE: leave Σ u² of these rows; else p = keep·p - u·step, with the step size that stands in `p_squares`."""
    i_batch, i_row = matrix_tile(tiles, sizes, DIMS, ROWS)
    o_p, o_g = offsets(i_batch, sizes, bp, DIMS), offsets(i_batch, sizes, bg, DIMS)
    scale, keep = tl.load(p_c).to(WORK), tl.load(p_c + 2).to(WORK)
    row = tl.load(p_row + offsets(i_batch, sizes, br, DIMS) + i_row.to(tl.int64) * sr, mask=i_row < rows, other=1)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, columns, COLUMNS):
        i_column = first + tl.arange(0, COLUMNS)
        m = (i_row < rows)[:, None] & (i_column < columns)[None, :]
        r, c = i_row.to(tl.int64)[:, None], i_column.to(tl.int64)[None, :]
        g = converted(tl.load(p_g + o_g + r * sg[0] + c * sg[1], mask=m, other=0), WORK) * scale
        factor = tl.load(p_factor + i_batch * columns + i_column, mask=i_column < columns, other=1)
        u = relative(g, row[:, None] * factor[None, :], tiny)
        if MEASURE:
            total += tl.sum(tl.sum(u * u, 1).to(tl.float64), 0)
        else:
            o = o_p + r * sp[0] + c * sp[1]
            p = tl.load(p_p + o, mask=m)
            tl.store(p_p + o, p * keep - u * tl.load(p_squares).to(WORK), mask=wanted(m, p_c))
    if MEASURE:
        tl.store(p_squares + tl.program_id(0), total)


@triton.jit
def vector_stats(p_p, p_g, p_v, p_squares, p_measured, p_c, n, sizes, sp, sg, sv, tiny, WORK: tl.constexpr,
                 DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Move the second moment; leave Σ p² and Σ u²."""
    i, m = positions(n, BLOCK, WIDE)
    o_v = offsets(i, sizes, sv, DIMS)
    p = tl.load(p_p + offsets(i, sizes, sp, DIMS), mask=m, other=0)
    g = converted(tl.load(p_g + offsets(i, sizes, sg, DIMS), mask=m, other=0), WORK) * tl.load(p_c).to(WORK)
    weight = tl.load(p_c + 1)
    v = tl.load(p_v + o_v, mask=m, other=1)
    v = v * (1 - weight).to(WORK) + g * g * weight.to(WORK)
    tl.store(p_v + o_v, v, mask=wanted(m, p_c))
    u = relative(g, v, tiny)
    tl.store(p_squares + tl.program_id(0), tl.sum((p * p).to(tl.float64), 0))
    tl.store(p_measured + tl.program_id(0), tl.sum((u * u).to(tl.float64), 0))


@triton.jit
def vector_update(p_p, p_g, p_v, p_size, p_c, n, sizes, sp, sg, sv, tiny, WORK: tl.constexpr, DIMS: tl.constexpr,
                  WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    o_p = offsets(i, sizes, sp, DIMS)
    g = converted(tl.load(p_g + offsets(i, sizes, sg, DIMS), mask=m, other=0), WORK) * tl.load(p_c).to(WORK)
    u = relative(g, tl.load(p_v + offsets(i, sizes, sv, DIMS), mask=m, other=1), tiny)
    p = tl.load(p_p + o_p, mask=m)
    new = p * tl.load(p_c + 2).to(WORK) - u * tl.load(p_size).to(WORK)
    tl.store(p_p + o_p, new, mask=wanted(m, p_c))


@triton.jit
def step_size(p_o, p_squares, p_measured, p_c, count, n, least, d, BLOCK: tl.constexpr):
    """max(ε2, rms(p))·min(lr, 1/√t) / max(1, rms(u)/d), from the partial sums."""
    squares, measured = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)
        squares += tl.load(p_squares + i, mask=i < count, other=0)
        measured += tl.load(p_measured + i, mask=i < count, other=0)
    of_p = maths.root(tl.sum(squares, 0) / n)
    of_u = maths.root(tl.sum(measured, 0) / n) / d
    of_p = tl.where(of_p < least, tl.full((), least, tl.float64), of_p)
    of_u = tl.where(of_u < 1, 1.0, of_u)
    tl.store(p_o, of_p * tl.load(p_c + 3) / of_u)


def _tiny(dtype: DType, eps1: float | None) -> float:
    return Double(np.finfo(dtype.numpy).eps if eps1 is None else eps1)


def _step_size(squares: Array, measured: Array, constants: Array, n: int, eps2: float, d: float) -> Array:
    size = empty((1,), float64, squares.device)
    launch(
        step_size, 1, size, squares, measured, constants, squares.size, n, Double(eps2), Double(d),
        BLOCK=min(1024, max(16, triton.next_power_of_2(squares.size))),
    )  # fmt: skip
    return size


class _Matrices(NamedTuple):
    """How matrices lie: the dimensions before the last two, merged, and their strides for p, g and the states."""

    sizes: Shape
    batch: tuple[Shape, ...]
    rows: int
    columns: int
    tiles: int
    programs: int


def _matrices(param: Array, *others: Array) -> _Matrices:
    sizes, *batch = collapse(param.shape[:-2], *(x.strides[:-2] for x in (param, *others)))
    rows, columns = param.shape[-2:]
    tiles = triton.cdiv(rows, TILE_ROWS)
    return _Matrices(sizes, tuple(batch), rows, columns, tiles, tiles * numel(param.shape[:-2]))


@twin("adafactor_step")
def adafactor_step(
    out: tuple[()], param: Array, grad: Array, row_var: Array, col_var: Array, lr: Scalar, step: Scalar,
    grad_scale: Scalar, *, beta2_decay: float, eps1: float | None, eps2: float, d: float, weight_decay: float,
) -> None:  # fmt: skip
    """Adafactor for matrices; the reference has the formulas. Reads the gradient three times, the parameter twice."""
    if param.size == 0:
        return
    made = _constants(adafactor_constants, float64, param, lr, step, grad_scale, beta2_decay, weight_decay)
    with _apart(param, row_var, col_var) as (param, row_var, col_var):
        at = _matrices(param, grad, row_var, col_var)
        bp, bg, br, bc = at.batch
        sp, sg, sr, sc = param.strides[-2:], grad.strides[-2:], row_var.strides[-2], col_var.strides[-1]
        device, dtype, tiny = param.device, param.dtype, _tiny(param.dtype, eps1)
        squares, measured = empty((at.programs,), float64, device), empty((at.programs,), float64, device)
        sums = empty((at.programs, at.columns), dtype, device)
        factor = empty((at.programs // at.tiles, at.columns), dtype, device)
        common: dict[str, Any] = {"WORK": TRITON[dtype.name], "DIMS": len(at.sizes)}
        tile_sizes = {"ROWS": TILE_ROWS, "COLUMNS": min(TILE_COLUMNS, max(16, triton.next_power_of_2(at.columns)))}
        shape = (at.rows, at.columns, at.tiles, at.sizes)
        launch(
            matrix_stats, at.programs, param, grad, row_var, sums, squares, made, *shape, bp, bg, br, sp, sg, sr,
            **common, **tile_sizes,
        )  # fmt: skip
        launch(
            column_stats, (at.programs // at.tiles, triton.cdiv(at.columns, 64)), col_var, factor, row_var, sums, made,
            *shape, bc, br, sc, sr, tiny, **common, COLUMNS=64,
            BLOCK=min(1024, max(16, triton.next_power_of_2(at.rows))),
        )  # fmt: skip
        rest = (made, *shape, bp, bg, br, sp, sg, sr, tiny)
        launch(
            matrix_update,
            at.programs,
            param,
            grad,
            row_var,
            factor,
            measured,
            *rest,
            MEASURE=True,
            **common,
            **tile_sizes,
        )
        size = _step_size(squares, measured, made, param.size, eps2, d)
        launch(
            matrix_update, at.programs, param, grad, row_var, factor, size, *rest, MEASURE=False, **common, **tile_sizes
        )


@twin("adafactor_vector_step")
def adafactor_vector_step(
    out: tuple[()], param: Array, grad: Array, variance: Array, lr: Scalar, step: Scalar, grad_scale: Scalar, *,
    beta2_decay: float, eps1: float | None, eps2: float, d: float, weight_decay: float,
) -> None:  # fmt: skip
    """Adafactor for vectors and numbers: the second moment is kept whole."""
    if param.size == 0:
        return
    made = _constants(adafactor_constants, float64, param, lr, step, grad_scale, beta2_decay, weight_decay)
    with _apart(param, variance) as (param, variance):
        sizes, *strides = collapse(param.shape, param.strides, grad.strides, variance.strides)
        programs, tiny = triton.cdiv(param.size, BLOCK), _tiny(param.dtype, eps1)
        squares, measured = empty((programs,), float64, param.device), empty((programs,), float64, param.device)
        common: dict[str, Any] = {
            "WORK": TRITON[param.dtype.name], "DIMS": len(sizes), "WIDE": is_wide(sizes, *strides), "BLOCK": BLOCK,
        }  # fmt: skip
        rest = (made, param.size, sizes, *strides, tiny)
        launch(vector_stats, programs, param, grad, variance, squares, measured, *rest, **common)
        size = _step_size(squares, measured, made, param.size, eps2, d)
        launch(vector_update, programs, param, grad, variance, size, *rest, **common)


# --- Muon -------------------------------------------------------------------------------------------------------------


@triton.jit
def scaled_kernel(p_o, p_x, p_norm, n, sizes, so, sx, eps, WORK: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """x / max(norm, eps)."""
    i, m = positions(n, BLOCK, WIDE)
    norm = tl.load(p_norm)
    factor = 1 / tl.where(norm < eps, tl.full((), eps, tl.float64), norm)
    x = tile(p_x, offsets(i, sizes, sx, DIMS), m, WORK)
    tl.store(p_o + offsets(i, sizes, so, DIMS), x * factor.to(WORK), mask=m)


@triton.jit
def polynomial(p_o, p_gram, p_square, n, side, a, b, c, WORK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """a·I + b·G + c·G², which the matrix is multiplied with."""
    i, m = positions(n, BLOCK, WIDE)
    y = tl.load(p_square + i, mask=m) * c + tl.load(p_gram + i, mask=m) * b
    diagonal = tl.where(i // side == i % side, tl.full(i.shape, a, WORK), 0.0)
    tl.store(p_o + i, y + diagonal, mask=m)


@triton.jit
def muon_direction(p_o, p_g, p_b, p_c, n, sizes, so, sg, sb, NESTEROV: tl.constexpr, WORK: tl.constexpr,
                   DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    o_b = offsets(i, sizes, sb, DIMS)
    take, mu = tl.load(p_c), tl.load(p_c + 1)
    step = tile(p_g, offsets(i, sizes, sg, DIMS), m, WORK) * take
    b = tl.load(p_b + o_b, mask=m) * mu + step
    tl.store(p_b + o_b, b, mask=wanted(m, p_c))
    tl.store(p_o + offsets(i, sizes, so, DIMS), step + b * mu if NESTEROV else b, mask=m)


@triton.jit
def muon_update(p_p, p_u, p_c, n, sizes, sp, su, WORK: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    o_p = offsets(i, sizes, sp, DIMS)
    p, u = tl.load(p_p + o_p, mask=m), tl.load(p_u + offsets(i, sizes, su, DIMS), mask=m)
    tl.store(p_p + o_p, p * tl.load(p_c + 2) - u * tl.load(p_c + 3), mask=wanted(m, p_c))


def _turned(x: Array) -> Array:
    return x.view((x.shape[1], x.shape[0]), (x.strides[1], x.strides[0]))


def _orthogonalized(x: Array, coefficients: tuple[float, float, float], eps: float, iterations: int) -> Array:
    """`newton_schulz` of one matrix in float32 or float64; its memory may be that of the transpose."""
    work, device = work_type(x.dtype), x.device
    tall = x.shape[0] > x.shape[1]  # the smaller Gram matrix is the cheaper one
    source = _turned(x) if tall else x
    side = source.shape[0]
    y, other = (empty(source.shape, work, device) for _ in range(2))
    gram, square, factor = (empty((side, side), work, device) for _ in range(3))
    norm = empty((), float64, device)
    _norm(norm, (x,), 2)
    sizes, so, sx = collapse(y.shape, y.strides, source.strides)
    kind = TRITON[work.name]
    launch(
        scaled_kernel, triton.cdiv(y.size, BLOCK), y, source, norm, y.size, sizes, so, sx, Double(eps),
        WORK=kind, DIMS=len(sizes), WIDE=is_wide(sizes, so, sx), BLOCK=BLOCK,
    )  # fmt: skip
    numbers = [Double(k) if work is float64 else float(k) for k in coefficients]
    for _ in range(iterations):
        matmul_into(gram, y, _turned(y))
        matmul_into(square, gram, gram)
        launch(
            polynomial, triton.cdiv(side * side, BLOCK), factor, gram, square, side * side, side, *numbers,
            WORK=kind, WIDE=is_wide((side, side)), BLOCK=BLOCK,
        )  # fmt: skip
        matmul_into(other, factor, y)
        y, other = other, y
    return _turned(y) if tall else y


@twin("newton_schulz")
def newton_schulz(
    out: Array, x: Array, *, coefficients: tuple[float, float, float], eps: float, iterations: int
) -> None:
    """The orthogonal factor of a matrix, roughly, in float32 or wider (in tf32 where that is allowed)."""
    if x.size == 0:
        return
    found = _orthogonalized(x, coefficients, eps, iterations)
    elementwise(_same, out, found, work=found.dtype)


@twin("muon_step")
def muon_step(
    out: tuple[()], param: Array, grad: Array, momentum_buffer: Array, lr: Scalar, grad_scale: Scalar, *,
    momentum: float, nesterov: bool, weight_decay: float, lr_ratio: float, coefficients: tuple[float, float, float],
    eps: float, iterations: int,
) -> None:  # fmt: skip
    """b = μ·b + (1-μ)·c·g; p = (1 - lr·wd)·p - lr·ratio·orthogonalized(b, or (1-μ)·c·g + μ·b with Nesterov)."""
    if param.size == 0:
        return
    made = _constants(muon_constants, param.dtype, param, lr, 0, grad_scale, momentum, weight_decay, lr_ratio)
    with _apart(param, momentum_buffer) as (param, momentum_buffer):
        direction = empty(param.shape, param.dtype, param.device)
        sizes, *strides = collapse(param.shape, direction.strides, grad.strides, momentum_buffer.strides)
        common: dict[str, Any] = {"WORK": TRITON[param.dtype.name], "BLOCK": BLOCK}
        programs = triton.cdiv(param.size, BLOCK)
        launch(
            muon_direction, programs, direction, grad, momentum_buffer, made, param.size, sizes, *strides,
            NESTEROV=nesterov, DIMS=len(sizes), WIDE=is_wide(sizes, *strides), **common,
        )  # fmt: skip
        update = _orthogonalized(direction, coefficients, eps, iterations)
        sizes, *strides = collapse(param.shape, param.strides, update.strides)
        launch(
            muon_update, programs, param, update, made, param.size, sizes, *strides,
            DIMS=len(sizes), WIDE=is_wide(sizes, *strides), **common,
        )  # fmt: skip


# --- Stochastic rounding ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def rounding_kernel(p_o, p_x, n, s0, s1, f0, f1, sizes, sx, DIMS: tl.constexpr, COUNT: tl.constexpr):
    start, w0, w1, w2, w3 = words_of(s0, s1, f0, f1, COUNT)
    words = quads(w0, w1, w2, w3)
    noise = tl.interleave(words & 0xFFFF, words >> 16)
    i = start * 8 + tl.arange(0, 8 * COUNT)
    m = i < n
    x = tl.load(p_x + offsets(i, sizes, sx, DIMS), mask=m, other=0)
    bits = ((x.to(tl.uint32, bitcast=True) + noise) >> 16).to(tl.uint16)
    y = tl.where(tl.abs(x) < float("inf"), bits, converted(x, tl.bfloat16).to(tl.uint16, bitcast=True))
    tl.store(p_o + i, y.to(tl.bfloat16, bitcast=True), mask=m)


@twin("stochastic_round")
def stochastic_round(out: Array, x: Array, *, dtype: DType, seed: int, offset: int) -> None:
    """x rounded up or down at random, with odds that make the mean exact; eight elements a counter."""
    assert x.dtype is float32 and out.dtype is bfloat16 and out.is_contiguous
    sizes, sx = collapse(x.shape, x.strides)
    count = 128
    launch(
        rounding_kernel, triton.cdiv(x.size, 8 * count), out, x, x.size, *counters(seed, offset), sizes, sx,
        DIMS=len(sizes), COUNT=count,
    )  # fmt: skip
