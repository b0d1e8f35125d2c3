"""RMSNorm, LayerNorm and their gradients, over the last dimension. Statistics are float32 or wider.

Reference: `genesis/ops/norm.py`: rms_norm, rms_norm_backward, rms_norm_scale, layer_norm, layer_norm_backward.

Forward reads and writes once. A row longer than a program's registers is read again, from cache. Backward has a fixed
number of programs, which loop over the rows, store dx and accumulate partial gradients of the parameters in registers.
A second kernel adds these partial sums in fixed order, without atomics.

x is [n, h]. Tiles: BN rows x BH columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float32
from genesis.kernels import maths
from genesis.kernels.dependents import FEW_ROWS, allow_next, can_overlap, wait_for_previous
from genesis.kernels.elements import (
    TRITON,
    collapse,
    converted,
    float_argument,
    needs_int64,
    offsets,
    program_indices,
    work_type,
)
from genesis.kernels.reduce.plan import norm_tiles
from genesis.shapes import contiguous_strides, numel

# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def rsqrt(mean, eps):
    """Return 1 / sqrt(mean + eps)."""
    return maths.divide(tl.full(mean.shape, 1, mean.dtype), maths.root(mean + tl.full(mean.shape, eps, mean.dtype)))


@triton.jit
def row_sum(x, EXACT: tl.constexpr):
    """Return the sums of the rows of a tile; with EXACT their bits do not depend on the tile."""
    if EXACT:
        return maths.order_free_sum(x, 1)
    else:
        return tl.sum(x, 1)


@triton.jit
def load_parameter(p, i_h, m_h, step, WORK: tl.constexpr):
    """Load a parameter as a tile [1, BH], in the layout of the tiles that it multiplies."""
    return converted(tl.load(p + (i_h * step)[None, :], mask=m_h[None, :], other=0), WORK)


@triton.jit
def apply_norm(x, m, r, p_w, p_b, i_h, m_h, dw, db, CENTRED: tl.constexpr):
    """Return (x - m)·r·w + b, or x·r·w, of a tile x [BN, BH]."""
    w = load_parameter(p_w, i_h, m_h, dw, x.dtype)  # [1, BH]
    if CENTRED:
        return (x - m[:, None]) * r[:, None] * w + load_parameter(p_b, i_h, m_h, db, x.dtype)
    else:
        return x * r[:, None] * w


@triton.jit
def norm_forward_kernel(p_y, p_m, p_r, p_x, p_w, p_b, n, h, eps, sizes, sx, dx, dw, db, CENTRED: tl.constexpr,
                        WORK: tl.constexpr, INT64: tl.constexpr, ONE_PASS: tl.constexpr, OVERLAP: tl.constexpr,
                        EXACT: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    i_n = program_indices(BN, INT64)  # [BN]
    i_h = tl.arange(0, BH)  # [BH]
    m_n, m_h = i_n < n, i_h < h  # [BN], [BH]
    count = tl.full((BN,), 1, WORK) * h  # [BN]
    p_n = (p_x + offsets(i_n, sizes, sx))[:, None]  # [BN, 1]
    q_n = (p_y + i_n * h)[:, None]  # [BN, 1]
    m = m_n[:, None] & m_h[None, :]  # [BN, BH]
    x = converted(tl.load(p_n + (i_h * dx)[None, :], mask=m, other=0), WORK)  # [BN, BH]
    # Compute the mean and 1 / rms.
    mean = tl.zeros((BN,), WORK)  # [BN]
    if CENTRED:
        total = x
        if not ONE_PASS:
            for first in range(BH, h, BH):
                m_f = m_n[:, None] & (first + i_h < h)[None, :]
                total += converted(tl.load(p_n + ((first + i_h) * dx)[None, :], mask=m_f, other=0), WORK)  # [BN, BH]
        mean = maths.divide(row_sum(total, EXACT), count)  # [BN]
    c = tl.where(m, x - mean[:, None], 0)  # [BN, BH]
    square = c * c  # [BN, BH]
    if not ONE_PASS:
        for first in range(BH, h, BH):
            m_f = m_n[:, None] & (first + i_h < h)[None, :]
            z = converted(tl.load(p_n + ((first + i_h) * dx)[None, :], mask=m_f, other=0), WORK)  # [BN, BH]
            z = tl.where(m_f, z - mean[:, None], 0)
            square += z * z
    r = rsqrt(maths.divide(row_sum(square, EXACT), count), eps)  # [BN]
    tl.store(p_r + i_n, r, mask=m_n)
    if CENTRED:
        tl.store(p_m + i_n, mean, mask=m_n)
    # Normalise and store.
    y = apply_norm(x, mean, r, p_w, p_b, i_h, m_h, dw, db, CENTRED)  # [BN, BH]
    tl.store(q_n + i_h[None, :], converted(y, p_y.dtype.element_ty), mask=m)
    if not ONE_PASS:
        for first in range(BH, h, BH):
            i_f = first + i_h
            m_f = m_n[:, None] & (i_f < h)[None, :]
            x = converted(tl.load(p_n + (i_f * dx)[None, :], mask=m_f, other=0), WORK)  # [BN, BH]
            y = apply_norm(x, mean, r, p_w, p_b, i_f, i_f < h, dw, db, CENTRED)  # [BN, BH]
            tl.store(q_n + i_f[None, :], converted(y, p_y.dtype.element_ty), mask=m_f)


@triton.jit
def load_normalized(p_g, p_x, w, i_h, m, mean, r, dg, dx, WORK: tl.constexpr):
    """Load a tile [BN, BH] and return g, n = (x - mean)·r and g·w. Elements outside the mask are 0."""
    g = converted(tl.load(p_g + (i_h * dg)[None, :], mask=m, other=0), WORK)  # [BN, BH]
    x = converted(tl.load(p_x + (i_h * dx)[None, :], mask=m, other=0), WORK)  # [BN, BH]
    if mean is not None:
        x = tl.where(m, x - mean[:, None], 0)
    return g, x * r[:, None], g * w


@triton.jit
def load_plus(p_plus, o_n, i_h, m, dp, WORK: tl.constexpr):
    """Load a tile [BN, BH] of the gradient to which dx is added, or return zeros if there is none."""
    if p_plus is not None:
        return converted(tl.load((p_plus + o_n)[:, None] + (i_h * dp)[None, :], mask=m, other=0), WORK)
    else:
        return tl.zeros(m.shape, WORK)


@triton.jit
def norm_backward_kernel(p_d, p_dw, p_db, p_y, p_g, p_x, p_plus, p_w, p_m, p_r, shape, sizes, sg, sx, sp, sm, sr,
                         steps, WORK: tl.constexpr, INT64: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
                         STAGES: tl.constexpr):  # fmt: skip
    """Store dx of the tiles program, program + programs, … and this program's partial sums of dw, if `p_dw` is given,
    and db. If `p_y` is given, also store n·w.
    """
    n, h = shape
    dg, dx, dp, dw = steps
    program = tl.program_id(0)
    i_h = tl.arange(0, BH)  # [BH]
    m_h = i_h < h
    count = tl.full((BN,), 1, WORK) * h  # [BN]
    w = load_parameter(p_w, i_h, m_h, dw, WORK)  # [1, BH]
    acc_w, acc_b = tl.zeros((BN, BH), WORK), tl.zeros((BN, BH), WORK)  # [BN, BH]
    i_tile_row = tl.arange(0, BN)  # [BN]
    if INT64:
        i_tile_row = i_tile_row.to(tl.int64)
    for tile in tl.range(program, tl.cdiv(n, BN), tl.num_programs(0), num_stages=STAGES):
        i_n = tile * BN + i_tile_row  # [BN]
        m_n = i_n < n
        m = m_n[:, None] & m_h[None, :]  # [BN, BH]
        r = tl.load(p_r + offsets(i_n, sizes, sr), mask=m_n, other=0)  # [BN]
        mean = None
        if p_m is not None:
            mean = tl.load(p_m + offsets(i_n, sizes, sm), mask=m_n, other=0)  # [BN]
        g_n = (p_g + offsets(i_n, sizes, sg))[:, None]  # [BN, 1]
        x_n = (p_x + offsets(i_n, sizes, sx))[:, None]  # [BN, 1]
        before = load_plus(p_plus, offsets(i_n, sizes, sp), i_h, m, dp, WORK)  # [BN, BH]
        g, z, gw = load_normalized(g_n, x_n, w, i_h, m, mean, r, dg, dx, WORK)  # [BN, BH]
        if p_dw is not None:
            acc_w += g * z  # [BN, BH]
        d = gw - z * maths.divide(tl.sum(gw * z, 1), count)[:, None]  # [BN, BH]
        if p_m is not None:
            acc_b += g  # [BN, BH]
            d -= maths.divide(tl.sum(gw, 1), count)[:, None]
        d = d * r[:, None] + before  # [BN, BH]
        tl.store((p_d + i_n * h)[:, None] + i_h[None, :], converted(d, p_d.dtype.element_ty), mask=m)
        if p_y is not None:
            tl.store((p_y + i_n * h)[:, None] + i_h[None, :], converted(z * w, p_y.dtype.element_ty), mask=m)
    # Store the partial sums of the parameters.
    o = program.to(tl.int64) * h + i_h
    if p_dw is not None:
        tl.store(p_dw + o, tl.sum(acc_w, 0), mask=m_h)
    if p_m is not None:
        tl.store(p_db + o, tl.sum(acc_b, 0), mask=m_h)


@triton.jit
def norm_backward_rows_kernel(p_d, p_g, p_x, p_plus, p_w, p_m, p_r, shape, sizes, sg, sx, sp, sm, sr, dg, dx, dp, dw,
                              WORK: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Store dx of one row that is longer than a program's registers."""
    h = shape[1]
    i_n = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # [1]
    r = tl.load(p_r + offsets(i_n, sizes, sr))  # [1]
    mean = None
    if p_m is not None:
        mean = tl.load(p_m + offsets(i_n, sizes, sm))
    g_n = (p_g + offsets(i_n, sizes, sg))[:, None]
    x_n = (p_x + offsets(i_n, sizes, sx))[:, None]
    # Compute the means over the row, then dx.
    acc_gw, acc_gwz = tl.zeros((1, BH), WORK), tl.zeros((1, BH), WORK)  # [1, BH] each
    for first in range(0, h, BH):
        i_h = first + tl.arange(0, BH)  # [BH]
        m = (i_h < h)[None, :]
        w = load_parameter(p_w, i_h, i_h < h, dw, WORK)  # [1, BH]
        _, z, gw = load_normalized(g_n, x_n, w, i_h, m, mean, r, dg, dx, WORK)  # [1, BH]
        acc_gw += gw
        acc_gwz += gw * z
    count = tl.full((1,), 1, WORK) * h
    mean_gwz = maths.divide(tl.sum(acc_gwz, 1), count)[:, None]  # [1, 1]
    mean_gw = maths.divide(tl.sum(acc_gw, 1), count)[:, None]
    for first in range(0, h, BH):
        i_h = first + tl.arange(0, BH)  # [BH]
        m = (i_h < h)[None, :]
        w = load_parameter(p_w, i_h, i_h < h, dw, WORK)  # [1, BH]
        _, z, gw = load_normalized(g_n, x_n, w, i_h, m, mean, r, dg, dx, WORK)  # [1, BH]
        d = gw - z * mean_gwz  # [1, BH]
        if p_m is not None:
            d -= mean_gw
        d = d * r[:, None] + load_plus(p_plus, offsets(i_n, sizes, sp), i_h, m, dp, WORK)  # [1, BH]
        tl.store(p_d + (i_n * h)[:, None] + i_h[None, :], converted(d, p_d.dtype.element_ty), mask=m)


@triton.jit
def norm_backward_columns_kernel(p_dw, p_db, p_g, p_x, p_m, p_r, shape, sizes, sg, sx, sm, sr, dg, dx,
                                 BH: tl.constexpr):  # fmt: skip
    """Store one program's partial sums of dw and db for BH columns."""
    n, h = shape
    WORK: tl.constexpr = p_dw.dtype.element_ty
    i_h = tl.program_id(0) * BH + tl.arange(0, BH)  # [BH]
    m_h = i_h < h
    acc_w, acc_b = tl.zeros((1, BH), WORK), tl.zeros((1, BH), WORK)  # [1, BH] each
    for row in range(tl.program_id(1), n, tl.num_programs(1)):
        i_n = row + tl.arange(0, 1).to(tl.int64)
        r = tl.load(p_r + offsets(i_n, sizes, sr))
        m = m_h[None, :]
        g = converted(tl.load((p_g + offsets(i_n, sizes, sg))[:, None] + (i_h * dg)[None, :], mask=m), WORK)  # [1, BH]
        x = converted(tl.load((p_x + offsets(i_n, sizes, sx))[:, None] + (i_h * dx)[None, :], mask=m), WORK)  # [1, BH]
        if p_m is not None:
            x -= tl.load(p_m + offsets(i_n, sizes, sm))[:, None]
            acc_b += g
        acc_w += g * (x * r[:, None])  # [1, BH]
    o = tl.program_id(1).to(tl.int64) * h + i_h
    tl.store(p_dw + o, tl.sum(acc_w, 0), mask=m_h)
    if p_m is not None:
        tl.store(p_db + o, tl.sum(acc_b, 0), mask=m_h)


@triton.jit
def sum_rows_kernel(p_o, p_x, n, h, step, BN: tl.constexpr, BH: tl.constexpr):
    """Store the sums of BH columns of `[n, h]`. Each column has BN accumulators, each for every BN-th row."""
    i_h = tl.program_id(0) * BH + tl.arange(0, BH)  # [BH]
    i_n = tl.arange(0, BN)  # [BN]
    m_h = (i_h < h)[None, :]
    total = tl.zeros((BN, BH), p_x.dtype.element_ty)  # [BN, BH]
    for first in range(0, n, BN):
        i_row = first + i_n
        total += tl.load(p_x + (i_row * h)[:, None] + i_h[None, :], mask=(i_row < n)[:, None] & m_h, other=0)
    tl.store(p_o + i_h * step, converted(tl.sum(total, 0), p_o.dtype.element_ty), mask=i_h < h)


@triton.jit
def rms_norm_scale_kernel(p_y, p_x, p_w, p_r, n, h, sizes, sx, sr, dx, dw, WORK: tl.constexpr, INT64: tl.constexpr,
                          BN: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Store x·r·w of a tile."""
    i_n = program_indices(BN, INT64)  # [BN]
    i_h = tl.program_id(1) * BH + tl.arange(0, BH)  # [BH]
    m_n, m_h = i_n < n, i_h < h
    m = m_n[:, None] & m_h[None, :]
    r = tl.load(p_r + offsets(i_n, sizes, sr), mask=m_n, other=0)  # [BN]
    x = converted(tl.load((p_x + offsets(i_n, sizes, sx))[:, None] + (i_h * dx)[None, :], mask=m, other=0), WORK)
    y = x * r[:, None] * load_parameter(p_w, i_h, m_h, dw, WORK)  # [BN, BH]
    tl.store((p_y + i_n * h)[:, None] + i_h[None, :], converted(y, p_y.dtype.element_ty), mask=m)


# --- Launching them ---------------------------------------------------------------------------------------------------


def _forward(
    y: Array, mean: Array | None, rstd: Array, x: Array, weight: Array, bias: Array | None, eps: float
) -> None:  # fmt: skip
    h, n = x.shape[-1], numel(x.shape[:-1])
    if n == 0:
        return
    work = work_type(x.dtype)
    cut = norm_tiles(n, h, x.dtype.itemsize)
    sizes, sx = collapse(x.shape[:-1], x.strides[:-1])
    launch(
        norm_forward_kernel, triton.cdiv(n, cut.rows), y, mean, rstd, x, weight, bias, n, h, float_argument(eps, work),
        sizes, sx, x.strides[-1], weight.strides[0], bias.strides[0] if bias is not None else 1,
        CENTRED=bias is not None, WORK=TRITON[work.name],
        INT64=needs_int64((*sizes, h), (*sx, x.strides[-1]), contiguous_strides((*sizes, h))), ONE_PASS=cut.one_pass,
        OVERLAP=n <= FEW_ROWS and can_overlap(x), EXACT=mode.exact and work is float32, BN=cut.rows, BH=cut.columns,
        num_warps=cut.warps,
    )  # fmt: skip


def _backward(
    outs: tuple[Array, ...], g: Array, x: Array, weight: Array, mean: Array | None, rstd: Array, plus: Array | None,
    y: Array | None = None,
) -> None:  # fmt: skip
    """Store dx + plus, optionally dw and, with a mean, db. If `y` is given, also store the result of forward."""
    d, *parameters = outs
    h, n = x.shape[-1], numel(x.shape[:-1])
    if h == 0:
        return
    work = work_type(x.dtype)
    cut = norm_tiles(n, h, x.dtype.itemsize, backward=True)
    # Launch one pass over short rows, or kernels for long rows and their columns; then add the partial sums.
    partials = [empty((cut.programs, h), work, x.device) for _ in parameters]
    partial_w, partial_b, *_ = *partials, None, None
    ms = mean.strides if mean is not None else rstd.strides
    ps = plus.strides if plus is not None else g.strides
    sizes, sg, sx, sp, sm, sr = collapse(x.shape[:-1], g.strides[:-1], x.strides[:-1], ps[:-1], ms, rstd.strides)
    steps = (g.strides[-1], x.strides[-1], ps[-1], weight.strides[0])
    if cut.one_pass:
        wide = needs_int64(
            (*sizes, h), (*sg, steps[0]), (*sx, steps[1]), (*sp, steps[2]), contiguous_strides((*sizes, h))
        )
        launch(
            norm_backward_kernel, cut.programs, d, partial_w, partial_b, y, g, x, plus, weight, mean, rstd, (n, h),
            sizes, sg, sx, sp, sm, sr, steps, WORK=TRITON[work.name], INT64=wide, BN=cut.rows, BH=cut.columns,
            STAGES=cut.stages, num_warps=cut.warps,
        )  # fmt: skip
    else:
        if y is not None:
            rms_norm_scale(y, x, weight, rstd)
        launch(
            norm_backward_rows_kernel, n, d, g, x, plus, weight, mean, rstd, (n, h), sizes, sg, sx, sp, sm, sr, *steps,
            WORK=TRITON[work.name], BH=cut.columns, num_warps=cut.warps,
        )  # fmt: skip
        if partials:
            launch(
                norm_backward_columns_kernel, (triton.cdiv(h, cut.columns), cut.programs), partial_w, partial_b, g, x,
                mean, rstd, (n, h), sizes, sg, sx, sm, sr, *steps[:2], BH=cut.columns, num_warps=cut.warps,
            )  # fmt: skip
    for partial, out in zip(partials, parameters, strict=True):
        sum_partials(out, partial)


def sum_partials(out: Array, partial: Array) -> None:
    """Store the sums of the columns of `[programs, h]`, in fixed order. A tile has up to 512 rows of whole columns."""
    programs, h = partial.shape
    rows = min(triton.next_power_of_2(max(programs, 1)), 512)
    columns = max(8, min(32, 4096 // rows))
    launch(
        sum_rows_kernel, triton.cdiv(h, columns), out, partial, programs, h, out.strides[0], BN=rows, BH=columns,
        num_warps=8 if rows * columns >= 2048 else 4,
    )  # fmt: skip


@cuda_impl("rms_norm")
def rms_norm(out: tuple[Array, Array], x: Array, weight: Array, eps: float) -> None:
    _forward(out[0], None, out[1], x, weight, None, eps)


@cuda_impl("rms_norm_scale")
def rms_norm_scale(out: Array, x: Array, weight: Array, rstd: Array) -> None:
    h, n = x.shape[-1], numel(x.shape[:-1])
    if n * h == 0:
        return
    sizes, sx, sr = collapse(x.shape[:-1], x.strides[:-1], rstd.strides)
    columns = min(triton.next_power_of_2(h), 1024)
    rows = min(2048 // columns, triton.next_power_of_2(n))
    launch(
        rms_norm_scale_kernel, (triton.cdiv(n, rows), triton.cdiv(h, columns)), out, x, weight, rstd, n, h, sizes, sx,
        sr, x.strides[-1], weight.strides[0], WORK=TRITON[work_type(x.dtype).name], BN=rows, BH=columns,
        INT64=needs_int64((*sizes, h), (*sx, x.strides[-1]), contiguous_strides((*sizes, h))), num_warps=4,
    )  # fmt: skip


@cuda_impl("rms_norm_backward")
def rms_norm_backward(
    out: Array | tuple[Array, ...], g: Array, x: Array, weight: Array, rstd: Array, plus: Array | None = None,
    with_result: bool = False, learns: bool = True,
) -> None:  # fmt: skip
    """Store dx = r·(g·w - n·mean(g·w·n)) + plus with n = x·r, and optionally dw = Σ rows g·n and n·w."""
    outs = out if isinstance(out, tuple) else (out,)
    _backward(outs[: 1 + learns], g, x, weight, None, rstd, plus, outs[-1] if with_result else None)


@cuda_impl("layer_norm")
def layer_norm(out: tuple[Array, Array, Array], x: Array, weight: Array, bias: Array, eps: float) -> None:
    _forward(out[0], out[1], out[2], x, weight, bias, eps)


@cuda_impl("layer_norm_backward")
def layer_norm_backward(
    out: tuple[Array, Array, Array], g: Array, x: Array, weight: Array, mean: Array, rstd: Array,
    plus: Array | None = None,
) -> None:  # fmt: skip
    _backward(out, g, x, weight, mean, rstd, plus)
