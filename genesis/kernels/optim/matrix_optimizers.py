"""Optimizer steps of whole matrices: Adafactor in four launches after its constants, and Muon, built around matmuls.

Reference: `genesis/ops/matrix_optimizers.py`, with the formulas. Sums over a parameter are accumulated in float64 from
partial sums with fixed boundaries, so they do not depend on timing.

Tiles: BLOCK elements; for Adafactor's matrices ROWS x COLUMNS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, float64
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, collapse, converted, float_argument, needs_int64, offsets, work_type
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.optim.gradients import norm_into
from genesis.kernels.optim.step_constants import (
    DeviceScalar,
    begin_step,
    exact,
    scalar,
    step_constants,
    step_mask,
    store_constant,
    updated_in_place,
)
from genesis.kernels.pointwise.elementwise import elementwise, identity, positions
from genesis.ops.linalg import transposed
from genesis.shapes import numel

BLOCK = 1024  # elements per program of elementwise kernels
TILE_ROWS, TILE_COLUMNS = 16, 128  # tile of a matrix in the kernels of row and column means


# --- Adafactor --------------------------------------------------------------------------------------------------------


@triton.jit
def adafactor_constants(p_c, p_s, lr, step, scale, first, each, hyper, choices,
                        NUMBERS: tl.constexpr):  # fmt: skip
    power, decay = hyper
    rate, count = scalar(lr, NUMBERS & 1), scalar(step, NUMBERS & 2)
    limit = 1 / maths.root(count)
    store_constant(p_c, 0, begin_step(p_c, p_s, step, scale, first, each, NUMBERS))
    store_constant(p_c, 1, maths.power(count, exact(power)))
    store_constant(p_c, 2, 1 - rate * decay)
    store_constant(p_c, 3, tl.where(limit < rate, limit, rate))


@triton.jit
def matrix_tile(tiles, ROWS: tl.constexpr):
    """Return the index of this program's matrix and the indices of its rows."""
    i_batch = tl.program_id(0).to(tl.int64) // tiles
    return i_batch, (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)  # scalar, [ROWS]


@triton.jit
def gradient_at(p_g, i_row, first, rows, columns, sg, scale, WORK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile of c·g, its column indices, its mask, and int64 indices of rows and columns for addresses."""
    i_column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
    m = (i_row < rows)[:, None] & (i_column < columns)[None, :]  # [ROWS, COLUMNS]
    r, c = i_row.to(tl.int64)[:, None], i_column.to(tl.int64)[None, :]  # [ROWS, 1], [1, COLUMNS]
    g = converted(tl.load(p_g + r * sg[0] + c * sg[1], mask=m, other=0), WORK) * scale  # [ROWS, COLUMNS]
    return g, i_column, m, r, c


@triton.jit
def matrix_stats(p_p, p_g, p_row, p_columns, p_squares, p_c, rows, columns, tiles, sizes, bp, bg, br, sp, sg, sr,
                 WORK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Update the moving row means of (c·g)². Store this tile's column sums and its Σ p²."""
    i_batch, i_row = matrix_tile(tiles, ROWS)
    o_p, o_g = offsets(i_batch, sizes, bp), offsets(i_batch, sizes, bg)
    scale, weight = tl.load(p_c).to(WORK), tl.load(p_c + 1)
    of_rows = tl.zeros((ROWS,), WORK)  # [ROWS]
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, columns, COLUMNS):
        g, i_column, m, r, c = gradient_at(p_g + o_g, i_row, first, rows, columns, sg, scale, WORK, COLUMNS)
        p = tl.load(p_p + o_p + r * sp[0] + c * sp[1], mask=m, other=0)  # [ROWS, COLUMNS]
        of_rows += tl.sum(g * g, 1)  # [ROWS]
        total += tl.sum(tl.sum(p * p, 1).to(tl.float64), 0)
        o_c = tl.program_id(0).to(tl.int64) * columns + i_column  # [COLUMNS]
        tl.store(p_columns + o_c, tl.sum(g * g, 0), mask=i_column < columns)
    tl.store(p_squares + tl.program_id(0), total)
    p_r = p_row + offsets(i_batch, sizes, br) + i_row.to(tl.int64) * sr  # [ROWS]
    old = tl.load(p_r, mask=i_row < rows).to(tl.float64)  # [ROWS]
    new = (1 - weight) * old + weight * (of_rows.to(tl.float64) / columns)
    tl.store(p_r, converted(new, WORK), mask=step_mask(i_row < rows, p_c))


@triton.jit
def column_stats(p_col, p_factor, p_row, p_columns, p_c, rows, columns, tiles, sizes, bc, br, sc, sr, tiny,
                 WORK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Update the moving column means. Store them, divided by the mean of the row means, as factors."""
    i_batch = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    m = i_column < columns
    weight = tl.load(p_c + 1)
    p_r = p_row + offsets(i_batch, sizes, br)
    acc = tl.zeros((BLOCK,), tl.float64)  # [BLOCK]
    for first in range(0, rows, BLOCK):
        i = first + tl.arange(0, BLOCK)  # [BLOCK]
        acc += tl.load(p_r + i.to(tl.int64) * sr, mask=i < rows, other=0).to(tl.float64)
    mean = tl.sum(acc, 0) / rows
    mean = tl.where(mean < tiny, tl.full((), tiny, tl.float64), mean)
    sums = tl.zeros((COLUMNS,), tl.float64)  # [COLUMNS]
    for t in range(0, tiles):
        sums += tl.load(p_columns + (i_batch * tiles + t) * columns + i_column, mask=m, other=0).to(tl.float64)
    p_q = p_col + offsets(i_batch, sizes, bc) + i_column.to(tl.int64) * sc  # [COLUMNS]
    new = (1 - weight) * tl.load(p_q, mask=m).to(tl.float64) + weight * (sums / rows)  # [COLUMNS]
    tl.store(p_q, converted(new, WORK), mask=step_mask(m, p_c))
    tl.store(p_factor + i_batch * columns + i_column, converted(new / mean, WORK), mask=m)


@triton.jit
def relative(g, variance, tiny):
    """Return u = g / √max(v, tiny²)."""
    least = tl.full((), tiny, tl.float64) * tiny
    return maths.divide(g, maths.root(tl.where(variance < least, least.to(variance.dtype), variance)))


@triton.jit
def matrix_update(p_p, p_g, p_row, p_factor, p_squares, p_c, rows, columns, tiles, sizes, bp, bg, br, sp, sg, sr, tiny,
                  MEASURE: tl.constexpr, WORK: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """With MEASURE store Σ u² of these rows; otherwise p = keep·p - u·step, with the step size from `p_squares`."""
    i_batch, i_row = matrix_tile(tiles, ROWS)
    o_p, o_g = offsets(i_batch, sizes, bp), offsets(i_batch, sizes, bg)
    scale, keep = tl.load(p_c).to(WORK), tl.load(p_c + 2).to(WORK)
    row = tl.load(p_row + offsets(i_batch, sizes, br) + i_row.to(tl.int64) * sr, mask=i_row < rows, other=1)  # [ROWS]
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, columns, COLUMNS):
        g, i_column, m, r, c = gradient_at(p_g + o_g, i_row, first, rows, columns, sg, scale, WORK, COLUMNS)
        factor = tl.load(p_factor + i_batch * columns + i_column, mask=i_column < columns, other=1)  # [COLUMNS]
        u = relative(g, row[:, None] * factor[None, :], tiny)  # [ROWS, COLUMNS]
        if MEASURE:
            total += tl.sum(tl.sum(u * u, 1).to(tl.float64), 0)
        else:
            o = o_p + r * sp[0] + c * sp[1]  # [ROWS, COLUMNS]
            p = tl.load(p_p + o, mask=m)  # [ROWS, COLUMNS]
            tl.store(p_p + o, p * keep - u * tl.load(p_squares).to(WORK), mask=step_mask(m, p_c))
    if MEASURE:
        tl.store(p_squares + tl.program_id(0), total)


@triton.jit
def vector_stats(p_p, p_g, p_v, p_squares, p_measured, p_c, n, sizes, sp, sg, sv, tiny, WORK: tl.constexpr,
                 INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Update the second moment. Store this block's Σ p² and Σ u²."""
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    o_v = offsets(i, sizes, sv)
    p = tl.load(p_p + offsets(i, sizes, sp), mask=m, other=0)  # [BLOCK]
    g = converted(tl.load(p_g + offsets(i, sizes, sg), mask=m, other=0), WORK) * tl.load(p_c).to(WORK)  # [BLOCK]
    weight = tl.load(p_c + 1)
    v = tl.load(p_v + o_v, mask=m, other=1)  # [BLOCK]
    v = v * (1 - weight).to(WORK) + g * g * weight.to(WORK)
    tl.store(p_v + o_v, v, mask=step_mask(m, p_c))
    u = relative(g, v, tiny)  # [BLOCK]
    tl.store(p_squares + tl.program_id(0), tl.sum((p * p).to(tl.float64), 0))
    tl.store(p_measured + tl.program_id(0), tl.sum((u * u).to(tl.float64), 0))


@triton.jit
def vector_update(p_p, p_g, p_v, p_size, p_c, n, sizes, sp, sg, sv, tiny, WORK: tl.constexpr,
                  INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    o_p = offsets(i, sizes, sp)
    g = converted(tl.load(p_g + offsets(i, sizes, sg), mask=m, other=0), WORK) * tl.load(p_c).to(WORK)  # [BLOCK]
    u = relative(g, tl.load(p_v + offsets(i, sizes, sv), mask=m, other=1), tiny)  # [BLOCK]
    p = tl.load(p_p + o_p, mask=m)  # [BLOCK]
    new = p * tl.load(p_c + 2).to(WORK) - u * tl.load(p_size).to(WORK)
    tl.store(p_p + o_p, new, mask=step_mask(m, p_c))


@triton.jit
def step_size(p_o, p_squares, p_measured, p_c, count, n, least, d, BLOCK: tl.constexpr):
    """Store max(ε2, rms(p))·min(lr, 1/√t) / max(1, rms(u)/d), computed from the partial sums."""
    squares, measured = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)  # [BLOCK] each
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)  # [BLOCK]
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


@cuda_impl("adafactor_step")
def adafactor_step(
    out: tuple[()], param: Array, grad: Array, row_var: Array, col_var: Array, lr: DeviceScalar, step: DeviceScalar,
    grad_scale: DeviceScalar, *, beta2_decay: float, eps1: float | None, eps2: float, d: float, weight_decay: float,
) -> None:  # fmt: skip
    """Adafactor for matrices. It reads the gradient three times and the parameter twice."""
    if param.size == 0:
        return
    values, _ = step_constants(adafactor_constants, float64, param, (lr, step, grad_scale), (beta2_decay, weight_decay))
    with updated_in_place(param, row_var, col_var) as (param, row_var, col_var):
        # Merge the dimensions before the last two; p, g and the states each have strides for them.
        sizes, bp, bg, br, bc = collapse(param.shape[:-2], *(x.strides[:-2] for x in (param, grad, row_var, col_var)))
        sp, sg, sr, sc = param.strides[-2:], grad.strides[-2:], row_var.strides[-2], col_var.strides[-1]
        (rows, columns), matrices = param.shape[-2:], numel(param.shape[:-2])
        tiles = triton.cdiv(rows, TILE_ROWS)
        programs, shape = matrices * tiles, (rows, columns, tiles, sizes)
        device, dtype, tiny = param.device, param.dtype, _tiny(param.dtype, eps1)
        squares, measured = empty((programs,), float64, device), empty((programs,), float64, device)
        sums, factor = empty((programs, columns), dtype, device), empty((matrices, columns), dtype, device)
        work: dict[str, Any] = {"WORK": TRITON[dtype.name]}
        common = work | {"ROWS": TILE_ROWS, "COLUMNS": min(TILE_COLUMNS, max(16, triton.next_power_of_2(columns)))}
        launch(
            matrix_stats, programs, param, grad, row_var, sums, squares, values, *shape, bp, bg, br, sp, sg, sr,
            **common,
        )  # fmt: skip
        launch(
            column_stats, (matrices, triton.cdiv(columns, 64)), col_var, factor, row_var, sums, values, *shape, bc, br,
            sc, sr, tiny, **work, COLUMNS=64, BLOCK=min(1024, max(16, triton.next_power_of_2(rows))),
        )  # fmt: skip
        operands = (values, *shape, bp, bg, br, sp, sg, sr, tiny)
        launch(matrix_update, programs, param, grad, row_var, factor, measured, *operands, MEASURE=True, **common)
        size = _step_size(squares, measured, values, param.size, eps2, d)
        launch(matrix_update, programs, param, grad, row_var, factor, size, *operands, MEASURE=False, **common)


@cuda_impl("adafactor_vector_step")
def adafactor_vector_step(
    out: tuple[()], param: Array, grad: Array, variance: Array, lr: DeviceScalar, step: DeviceScalar,
    grad_scale: DeviceScalar, *, beta2_decay: float, eps1: float | None, eps2: float, d: float, weight_decay: float,
) -> None:  # fmt: skip
    if param.size == 0:
        return
    values, _ = step_constants(adafactor_constants, float64, param, (lr, step, grad_scale), (beta2_decay, weight_decay))
    with updated_in_place(param, variance) as (param, variance):
        sizes, *strides = collapse(param.shape, param.strides, grad.strides, variance.strides)
        programs, tiny = triton.cdiv(param.size, BLOCK), _tiny(param.dtype, eps1)
        squares, measured = empty((programs,), float64, param.device), empty((programs,), float64, param.device)
        common: dict[str, Any] = {
            "WORK": TRITON[param.dtype.name], "INT64": needs_int64(sizes, *strides), "BLOCK": BLOCK,
        }  # fmt: skip
        operands = (values, param.size, sizes, *strides, tiny)
        launch(vector_stats, programs, param, grad, variance, squares, measured, *operands, **common)
        size = _step_size(squares, measured, values, param.size, eps2, d)
        launch(vector_update, programs, param, grad, variance, size, *operands, **common)


# --- Muon -------------------------------------------------------------------------------------------------------------


@triton.jit
def muon_constants(p_c, p_s, lr, step, scale, first, each, hyper, choices, NUMBERS: tl.constexpr):
    momentum, decay, ratio = hyper
    rate = scalar(lr, NUMBERS & 1)
    store_constant(p_c, 0, (1 - exact(momentum)) * begin_step(p_c, p_s, step, scale, first, each, NUMBERS))
    store_constant(p_c, 1, exact(momentum))
    store_constant(p_c, 2, 1 - rate * decay)
    store_constant(p_c, 3, rate * ratio)


@triton.jit
def scaled_kernel(p_o, p_x, p_norm, n, sizes, so, sx, eps, WORK: tl.constexpr, INT64: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    norm = tl.load(p_norm)
    factor = 1 / tl.where(norm < eps, tl.full((), eps, tl.float64), norm)
    x = converted(tl.load(p_x + offsets(i, sizes, sx), mask=m), WORK)  # [BLOCK]
    tl.store(p_o + offsets(i, sizes, so), x * factor.to(WORK), mask=m)


@triton.jit
def polynomial(p_o, p_gram, p_square, n, side, a, b, c, WORK: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr):
    """Store a·I + b·G + c·G², by which the iteration multiplies the matrix."""
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    y = tl.load(p_square + i, mask=m) * c + tl.load(p_gram + i, mask=m) * b  # [BLOCK]
    diagonal = tl.where(i // side == i % side, tl.full(i.shape, a, WORK), 0.0)  # [BLOCK]
    tl.store(p_o + i, y + diagonal, mask=m)


@triton.jit
def muon_direction(p_o, p_g, p_b, p_c, n, sizes, so, sg, sb, NESTEROV: tl.constexpr, WORK: tl.constexpr,
                   INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    o_b = offsets(i, sizes, sb)
    take, mu = tl.load(p_c), tl.load(p_c + 1)
    step = converted(tl.load(p_g + offsets(i, sizes, sg), mask=m), WORK) * take  # [BLOCK]
    b = tl.load(p_b + o_b, mask=m) * mu + step  # [BLOCK]
    tl.store(p_b + o_b, b, mask=step_mask(m, p_c))
    tl.store(p_o + offsets(i, sizes, so), step + b * mu if NESTEROV else b, mask=m)


@triton.jit
def muon_update(p_p, p_u, p_c, n, sizes, sp, su, WORK: tl.constexpr, INT64: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    o_p = offsets(i, sizes, sp)
    p, u = tl.load(p_p + o_p, mask=m), tl.load(p_u + offsets(i, sizes, su), mask=m)  # [BLOCK] each
    tl.store(p_p + o_p, p * tl.load(p_c + 2) - u * tl.load(p_c + 3), mask=step_mask(m, p_c))


def _orthogonalized(x: Array, coefficients: tuple[float, float, float], eps: float, iterations: int) -> Array:
    """Return `newton_schulz` of one matrix, in float32 or float64. The result may be a transposed view."""
    work, device = work_type(x.dtype), x.device
    tall = x.shape[0] > x.shape[1]  # the smaller of the two Gram matrices is cheaper
    source = x if tall else transposed(x)
    side = source.shape[1]
    y, other = (empty(source.shape, work, device) for _ in range(2))  # tall, so that no GEMM has two K-major operands
    gram, square, factor = (empty((side, side), work, device) for _ in range(3))
    norm = empty((), float64, device)
    norm_into(norm, (x,), 2)
    sizes, so, sx = collapse(y.shape, y.strides, source.strides)
    kind = TRITON[work.name]
    launch(
        scaled_kernel, triton.cdiv(y.size, BLOCK), y, source, norm, y.size, sizes, so, sx, Double(eps),
        WORK=kind, INT64=needs_int64(sizes, so, sx), BLOCK=BLOCK,
    )  # fmt: skip
    numbers = [float_argument(k, work) for k in coefficients]
    for _ in range(iterations):
        matmul_into(gram, transposed(y), y)
        matmul_into(square, gram, gram)
        launch(
            polynomial, triton.cdiv(side * side, BLOCK), factor, gram, square, side * side, side, *numbers,
            WORK=kind, INT64=needs_int64((side, side)), BLOCK=BLOCK,
        )  # fmt: skip
        matmul_into(other, y, factor)
        y, other = other, y
    return y if tall else transposed(y)


@cuda_impl("newton_schulz")
def newton_schulz(
    out: Array, x: Array, *, coefficients: tuple[float, float, float], eps: float, iterations: int
) -> None:
    """Store the approximate orthogonal factor of a matrix, computed in float32 or wider (in tf32 where allowed)."""
    if x.size == 0:
        return
    orthogonal = _orthogonalized(x, coefficients, eps, iterations)
    elementwise(identity, out, orthogonal, work=orthogonal.dtype)


@cuda_impl("muon_step")
def muon_step(
    out: tuple[()], param: Array, grad: Array, momentum_buffer: Array, lr: DeviceScalar, step: DeviceScalar,
    grad_scale: DeviceScalar, *, momentum: float, nesterov: bool, weight_decay: float, lr_ratio: float,
    coefficients: tuple[float, float, float], eps: float, iterations: int,
) -> None:  # fmt: skip
    if param.size == 0:
        return
    hyper = momentum, weight_decay, lr_ratio
    values, _ = step_constants(muon_constants, param.dtype, param, (lr, step, grad_scale), hyper)
    with updated_in_place(param, momentum_buffer) as (param, momentum_buffer):
        direction = empty(param.shape, param.dtype, param.device)
        sizes, *strides = collapse(param.shape, direction.strides, grad.strides, momentum_buffer.strides)
        common: dict[str, Any] = {"WORK": TRITON[param.dtype.name], "BLOCK": BLOCK}
        programs = triton.cdiv(param.size, BLOCK)
        launch(
            muon_direction, programs, direction, grad, momentum_buffer, values, param.size, sizes, *strides,
            NESTEROV=nesterov, INT64=needs_int64(sizes, *strides), **common,
        )  # fmt: skip
        update = _orthogonalized(direction, coefficients, eps, iterations)
        sizes, *strides = collapse(param.shape, param.strides, update.strides)
        launch(
            muon_update, programs, param, update, values, param.size, sizes, *strides,
            INT64=needs_int64(sizes, *strides), **common,
        )  # fmt: skip
