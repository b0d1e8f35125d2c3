"""Cross-entropy: from logits in one pass over them, and from hidden states in chunks of tokens.

Reference: `genesis/ops/loss.py`.

One program reads a row of logits once, with a running maximum and one running sum per element of its tile (online
softmax). The fast exponential is exact enough, because its argument x - max is at most 0 and exact to half an ulp: the
error of a term e^d is below (|d| + 3)·2^-24·e^d, never more than 4 ulps of the sum.

The host never reads the number of valid tokens. A label out of range is reported as a fault (`backend.cuda.faults`),
and its row is ignored. Tiles: BLOCK logits of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import faults
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import DType, float32
from genesis.errors import UsageError
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, converted, float_argument, row_slice, work_type
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.index.segment import report_fault
from genesis.kernels.loss.labelled import (
    WORKSPACE,
    LabelledRows,
    Labels,
    begins_padding,
    can_limit,
    chunk_rows,
    first_top,
)
from genesis.kernels.loss.lm_head import Head, is_supported
from genesis.kernels.pointwise.elementwise import elementwise, identity
from genesis.ops.linalg import transposed
from genesis.ops.shape import contiguous

MANY_ROWS = 2048  # rows from which one warp reads a row
ROW_BLOCK = 4096  # logits per load, 8 KB of a 2-byte type
TILE = 2048  # logits per program of the backward pass


# --- Rows -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_label(p_labels, p_fault, i_row, step, ignore, classes, site):
    """Load the label of a row. Return it and whether it is valid: neither `ignore` nor out of range."""
    label = tl.load(p_labels + i_row * step).to(tl.int64)
    valid = label != ignore
    inside = (label >= 0) & (label < classes)
    report_fault(p_fault, site, label, valid & (inside == 0))
    return label, valid & inside


@triton.jit
def logsumexp(top, sums):
    """Return log Σ e^x, or NaN if all of x are infinite, like the reference."""
    return tl.where(tl.abs(top) == float("inf"), float("nan"), top + tl.log(sums))


@triton.jit
def load_logits(p_x, first, classes, step, BLOCK: tl.constexpr):
    i = first + tl.arange(0, BLOCK)  # [BLOCK]
    return tl.load(p_x + i.to(tl.int64) * step, mask=i < classes, other=-float("inf"))  # [BLOCK]


@triton.jit
def online_softmax(
    p_x, classes, step, MEAN: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr
):
    """Return (maximum, Σ e^(x - maximum), Σ x) of a row. Without MEAN the last is 0.

    With PREFETCH the next logits are loaded while the current ones are added. Otherwise an SM with few programs waits
    for memory half of the time.
    """
    top = tl.full((), -float("inf"), WORK)
    sums, plain = tl.zeros((BLOCK,), WORK), tl.zeros((BLOCK,), WORK)  # [BLOCK]
    if PREFETCH:
        b_next = load_logits(p_x, 0, classes, step, BLOCK)
    for first in range(0, classes, BLOCK):
        if PREFETCH:
            x = converted(b_next, WORK)  # [BLOCK]
            b_next = load_logits(p_x, first + BLOCK, classes, step, BLOCK)  # [BLOCK]
        else:
            x = converted(load_logits(p_x, first, classes, step, BLOCK), WORK)  # [BLOCK]
        higher = tl.maximum(top, tl.max(x, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # if all x are -inf, terms are 0, not NaN
        sums = sums * tl.exp(top - base) + tl.exp(x - base)  # [BLOCK]
        if MEAN:
            plain += tl.where(first + tl.arange(0, BLOCK) < classes, x, 0.0)  # [BLOCK]
        top = higher
    return top, tl.sum(sums, 0), tl.sum(plain, 0)


@triton.jit
def cross_entropy_kernel(p_loss, p_lse, p_x, p_labels, p_fault, classes, ignore, site, smoothing, z, sx, sc, sl,
                         SMOOTH: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr,
                         PREFETCH: tl.constexpr):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_x + i_row * sx
    label, valid = load_label(p_labels, p_fault, i_row, sl, ignore, classes, site)
    top, sums, plain = online_softmax(p_row, classes, sc, SMOOTH, WORK, BLOCK, PREFETCH)
    lse = logsumexp(top, sums)
    label_logit = converted(tl.load(p_row + label * sc, mask=valid, other=0), WORK)
    loss = (lse - label_logit) * (1 - smoothing) + lse * lse * z
    if SMOOTH:
        loss += (lse - plain / classes) * smoothing
    tl.store(p_lse + i_row, lse)
    tl.store(p_loss + i_row, tl.where(valid, loss, 0.0))


@triton.jit
def cross_entropy_backward_kernel(p_o, p_g, p_x, p_labels, p_lse, p_divisor, p_fault, classes, tiles, ignore, site,
                                  smoothing, z, sg, sx, sc, sl, se, WORK: tl.constexpr,
                                  BLOCK: tl.constexpr):  # fmt: skip
    """Store dx = g·(p·(1 + 2·z·l) - (1 - s)·onehot - s/V); g is divided by the element of `p_divisor`, if given."""
    i_row = (tl.program_id(0) // tiles).to(tl.int64)
    i = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m = i < classes
    label, valid = load_label(p_labels, p_fault, i_row, sl, ignore, classes, site)
    g, lse = converted(tl.load(p_g + i_row * sg), WORK), converted(tl.load(p_lse + i_row * se), WORK)
    if p_divisor is not None:
        g = maths.divide(g, converted(tl.load(p_divisor), WORK))
    read = i < tl.where(valid, classes, 0)  # [BLOCK]
    x = converted(tl.load(p_x + i_row * sx + i.to(tl.int64) * sc, mask=read, other=0), WORK)  # [BLOCK]
    d = tl.exp(x - lse) * (lse * z * 2 + 1) - tl.full((), smoothing, WORK) / classes  # [BLOCK]
    d -= tl.where(i == label, tl.full((), 1, WORK) - smoothing, 0.0)
    y = tl.where(valid, d * g, 0.0)  # [BLOCK]
    tl.store(p_o + i_row * classes + i, converted(y, p_o.dtype.element_ty), mask=m)


def _block(classes: int, work: DType, limit: int) -> int:
    return min(limit * 4 // work.itemsize, max(16, triton.next_power_of_2(classes)))


def _warps(block: int) -> int:
    return max(1, min(8, block // 1024))


@cuda_impl("cross_entropy")
def cross_entropy(
    out: tuple[Array, ...], logits: Array, labels: Array, ignore_index: int, label_smoothing: float, z_loss: float,
    mean: bool = False,
) -> None:  # fmt: skip
    rows, classes = logits.shape
    work, lse = work_type(logits.dtype), out[1]
    losses = empty((rows,), work, logits.device) if mean else out[0]
    few = rows < MANY_ROWS
    block = _block(classes, work, ROW_BLOCK if few else 1024)
    launch(
        cross_entropy_kernel, rows, losses, lse, logits, labels, faults.flag(out[0].device), classes, ignore_index,
        faults.site("cross_entropy", 1, classes), float_argument(label_smoothing, work), float_argument(z_loss, work),
        *logits.strides, labels.strides[0], SMOOTH=bool(label_smoothing), WORK=TRITON[work.name], BLOCK=block,
        PREFETCH=few, num_warps=_warps(block),
    )  # fmt: skip
    if mean:
        _sum_losses(out[0], losses, out[2], rows, labels, ignore_index)


def _sum_losses(
    loss: Array, losses: Array, divisor: Array | None, rows: int, labels: Array | None = None, ignore: int = 0
) -> None:
    step = 0 if labels is None else labels.strides[0]
    block = min(4096, max(16, triton.next_power_of_2(rows)))
    launch(sum_losses_kernel, 1, loss, losses, divisor, labels, rows, step, ignore, BLOCK=block, num_warps=8)


@cuda_impl("cross_entropy_backward")
def cross_entropy_backward(
    out: Array, g: Array, logits: Array, labels: Array, lse: Array, divisor: Array | None = None, *, ignore_index: int,
    label_smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    rows, classes = logits.shape
    work = work_type(logits.dtype)
    block = _block(classes, work, TILE)
    tiles = triton.cdiv(classes, block)
    launch(
        cross_entropy_backward_kernel, rows * tiles, out, g, logits, labels, lse, divisor, faults.flag(out.device),
        classes, tiles, ignore_index, faults.site("cross_entropy_backward", 1, classes),
        float_argument(label_smoothing, work), float_argument(z_loss, work), g.strides[0] if g.ndim else 0,
        *logits.strides, labels.strides[0], lse.strides[0],
        WORK=TRITON[work.name], BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


# --- From hidden states -----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "classes"])
def chunk_cross_entropy_kernel(p_loss, p_hits, p_d, p_x, p_numbers, p_row_labels, p_total, p_limit, first, p_g, classes,
                               sd, sg, GRADS: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store the losses of a chunk's rows of logits, at their places, and if `p_hits` is given, whether the label is the
    first class with the largest logit and the loss is not NaN. With GRADS overwrite the logits with their gradients in
    the type of `p_d`, times g if `p_g` is given; zeros follow the rows.

    A narrower gradient overwrites only logits of this tile or of tiles that were read before. Within a tile the barrier
    orders all loads before all stores.
    """
    i_local = tl.program_id(0).to(tl.int64)
    p_row, p_out = p_x + i_local * classes, p_d + i_local * sd
    is_there = first + i_local < tl.load(p_total)
    is_left_out = begins_padding(i_local, p_limit) if GRADS else is_there == 0
    if is_left_out:
        return
    i_row = tl.load(p_numbers + i_local, mask=is_there, other=0).to(tl.int64)
    label = tl.load(p_row_labels + i_local, mask=is_there, other=0)
    top, sums, _ = online_softmax(p_row, classes, 1, False, WORK, BLOCK, True)
    logit = tl.load(p_row + label)
    loss = logsumexp(top, sums) - logit
    tl.store(p_loss + i_row, loss, mask=is_there)
    if p_hits is not None:
        is_hit = (loss == loss) & (logit == top) & (first_top(p_row, label, BLOCK) < top)
        tl.store(p_hits + i_row, converted(is_hit, WORK), mask=is_there)
    if GRADS:
        # Triton gives tiles of one size the same layout. That of gradients would change the order of the sums above.
        HALF: tl.constexpr = BLOCK // 2
        for start in range(0, classes, HALF):
            i = start + tl.arange(0, HALF)  # [HALF]
            m = i < classes
            x = tl.load(p_row + i, mask=m, other=0)  # [HALF]
            tl.debug_barrier()
            d = tl.exp(x - top) * (1 / sums) - tl.where(i == label, 1.0, 0.0)  # [HALF]
            if p_g is not None:
                d *= converted(tl.load(p_g + i_row * sg), WORK)
            tl.store(p_out + i, converted(tl.where(is_there, d, 0.0), p_d.dtype.element_ty), mask=m)


@triton.jit
def negated(x):
    return -x


@triton.jit(do_not_specialize=["step", "ignore"])
def sum_losses_kernel(p_o, p_x, p_divisor, p_labels, n, step, ignore, BLOCK: tl.constexpr):
    """Store Σ x / divisor, computed in float64. With labels, the divisor is the number of those other than `ignore`,
    and is stored, too.
    """
    acc, count = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int32)  # [BLOCK]
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)  # [BLOCK]
        acc += tl.load(p_x + i, mask=i < n, other=0).to(tl.float64)  # [BLOCK]
        if p_labels is not None:
            label = tl.load(p_labels + i.to(tl.int64) * step, mask=i < n, other=0).to(tl.int64)
            count += ((i < n) & (label != ignore)).to(tl.int32)  # [BLOCK]
    total = tl.sum(acc, 0)
    if p_labels is not None:
        divisor = tl.sum(count, 0)
        tl.store(p_divisor, converted(divisor, p_divisor.dtype.element_ty))
        total = total / divisor.to(tl.float64)
    elif p_divisor is not None:
        total = total / converted(tl.load(p_divisor), tl.float64)
    tl.store(p_o, converted(total, p_o.dtype.element_ty))


@triton.jit(do_not_specialize=["number"])
def divisor_kernel(p_o, p_divisor, number):
    """Store the divisor, which is the element of `p_divisor` or `number`, and its inverse (0 for a divisor of 0)."""
    if p_divisor is not None:
        divisor = converted(tl.load(p_divisor), p_o.dtype.element_ty)
    else:
        divisor = converted(tl.full((), number, tl.float64), p_o.dtype.element_ty)
    tl.store(p_o, divisor)
    tl.store(p_o + 1, tl.where(divisor == 0, 0.0, 1 / tl.where(divisor == 0, 1.0, divisor)))


@cuda_impl("linear_cross_entropy")
def linear_cross_entropy(
    out: Array | tuple[Array, ...], x: Array, weight: Array, labels: Array, divisor: Array | float | None = None, *,
    ignore_index: int, with_grads: bool, weight_grad: bool = True, mean: bool = False, shift: int = 0,
    with_hits: bool = False,
) -> None:  # fmt: skip
    """Compute the cross-entropy of logits x·weightᵀ, summed and divided. With `with_grads` also compute dx and, with
    `weight_grad`, dweight, which takes one of the three GEMMs.

    Sums are float32 (float64 for float64). The gradients of the logits are rounded to x's type for the GEMMs. In
    `lm_head.py` dweight is rounded to bfloat16 after each chunk, which adds an error of half an ulp per chunk.
    """
    loss, dx, dw = (*out, None)[:3] if isinstance(out, tuple) else (out, None, None)
    found, dx = (dx, None) if with_hits else (None, dx)
    hits = found and empty(x.shape[:1], work_type(x.dtype), x.device)
    chosen = _chosen(x, weight, Labels(labels, shift, ignore_index, weight.shape[0]), with_grads)
    number, scale = _divisor(chosen.total if mean and divisor is None else divisor, x)
    _sum_losses(loss, _losses(dx, dw, x, weight, chosen, scale, hits), number, x.shape[0])
    if found and hits:
        _sum_losses(found, hits, None, x.shape[0])


def _clear(*results: Array | None) -> None:
    for result in results:
        if result is not None:
            clear(result)


def _divisor(divisor: Array | float | None, x: Array) -> tuple[Array | None, Array | float]:
    """Return the divisor and its inverse, one element each on the device, or (None, 1) for a plain sum."""
    if divisor is None:
        return None, 1.0
    memory, number = (divisor, 0.0) if isinstance(divisor, Array) else (None, Double(divisor))
    pair = empty((2,), work_type(x.dtype), x.device)
    launch(divisor_kernel, 1, pair, memory, number)
    return row_slice(pair, 0, 1), row_slice(pair, 1, 1)


@cuda_impl("linear_token_log_probs")
def linear_token_log_probs(
    out: Array | tuple[Array, ...], x: Array, weight: Array, labels: Array, *, ignore_index: int, shift: int,
    temperature: float, with_dx: bool,
) -> None:  # fmt: skip
    found, dx = out if isinstance(out, tuple) else (out, None)
    rows = Labels(labels, shift, ignore_index, weight.shape[0], "linear_token_log_probs", temperature)
    chosen = _chosen(x, weight, rows, with_dx)
    elementwise(negated, found, _losses(dx, None, x, weight, chosen, -1 / temperature), work=found.dtype)


@cuda_impl("linear_token_log_probs_backward")
def linear_token_log_probs_backward(
    out: Array | tuple[Array, ...], g: Array, x: Array, weight: Array, labels: Array, *, ignore_index: int, shift: int,
    temperature: float, needs: tuple[bool, bool],
) -> None:  # fmt: skip
    """Compute the logits again, because their gradients depend on g and no logits are kept."""
    results = iter(out if isinstance(out, tuple) else (out,))
    dx, dw = (next(results) if each else None for each in needs)
    name = "linear_token_log_probs_backward"
    rows = Labels(labels, shift, ignore_index, weight.shape[0], name, temperature, g)
    _losses(dx, dw, x, weight, _chosen(x, weight, rows, True), -1 / temperature)


def _chosen(x: Array, weight: Array, labels: Labels, with_grads: bool) -> LabelledRows:
    """Return the rows with a label, in chunks whose logits fit the workspace."""
    classes, work = weight.shape[0], work_type(x.dtype).itemsize
    row, is_limited = classes * work, can_limit(weight) and classes * work % 16 == 0
    if is_supported(x, weight):
        row, is_limited = classes * x.dtype.itemsize if with_grads else classes // 16, True
    return LabelledRows(labels, x.shape[0], chunk_rows(x.shape[0], row, WORKSPACE), is_limited=is_limited)


def _losses(
    dx: Array | None, dw: Array | None, x: Array, weight: Array, chosen: LabelledRows, scale: Array | float,
    hits: Array | None = None,
) -> Array:  # fmt: skip
    """Return the losses `[N]`, 0 without a label. Where given, store dx and dw, times `scale`, and `hits` `[N]`."""
    losses = empty(x.shape[:1], work_type(x.dtype), x.device)
    if mode.exact and not is_supported(x, weight):
        what = f"{chosen.settings.op}: genesis.exact needs bfloat16, rows that begin at multiples of 16 bytes and a GPU"
        raise UsageError(
            f"{what} with compute capability 9.0; got {x.dtype.name}", next="convert them, or leave genesis.exact"
        )
    is_empty = not weight.size or not x.shape[0]
    _clear(losses, hits, dx, dw if is_empty else None)
    if not is_empty:
        compute = _with_head if is_supported(x, weight) else _with_logits
        compute(losses, hits, dx, dw, x if x.strides[1] == 1 else contiguous(x), weight, chosen, scale)
    return losses


def _with_head(
    losses: Array, hits: Array | None, dx: Array | None, dw: Array | None, x: Array, weight: Array,
    chosen: LabelledRows, scale: Array | float,
) -> None:  # fmt: skip
    """Implement `_losses` for bfloat16 on a device with TMA (`lm_head.py`)."""
    head = Head(losses, x, weight, chosen, dx is not None or dw is not None, hits)
    for chunk in range(chosen.chunks):
        head.begin(chunk)
        head.forward(chunk)
        if dw is not None:
            chosen.gather(head.dense, x, chunk, head.factors)
        if head.memory is not None:
            add_gradients(dx, dw, head.memory, head.dense, weight, chosen, chunk, scale, head.factors)


def add_gradients(
    dx: Array | None, dw: Array | None, grads: Array, dense: Array, weight: Array, chosen: LabelledRows, chunk: int,
    scale: Array | float, factors: Array | None = None,
) -> None:  # fmt: skip
    """Add a chunk's part to dw and store its rows of dx, where given, times `scale`. This overwrites `dense`.

    Args:
        grads: gradients of the logits `[rows, classes]`; for dx, `factors` `[rows]` scale them.
        dense: the chunk's rows of x.
    """
    if dw is not None:
        limit = chosen.limit("k", chunk)
        matmul_into(dw, transposed(grads), dense, accumulate=chunk > 0, alpha=scale, one_chain=False, limit=limit)
    if dx is not None:
        limit = chosen.limit("m", chunk)
        matmul_into(dense, grads, weight, alpha=scale, row_scale=factors, one_chain=False, limit=limit)
        chosen.scatter(dx, dense, chunk)


def _with_logits(
    losses: Array, hits: Array | None, dx: Array | None, dw: Array | None, x: Array, weight: Array,
    chosen: LabelledRows, scale: Array | float,
) -> None:  # fmt: skip
    """Implement `_losses` for any type and layout. Gradients overwrite the logits."""
    classes, rows, device, work = weight.shape[0], chosen.rows, x.device, losses.dtype
    dense, logits = empty((rows, x.shape[1]), x.dtype, device), empty((rows, classes), work, device)
    ratio = work.itemsize // x.dtype.itemsize
    grads = Array(logits.storage, (rows, classes), (ratio * classes, 1), x.dtype, device, logits.offset * ratio)
    narrow = dw is not None and dw.dtype is not work and chosen.chunks > 1
    sum_dw = empty(dw.shape, work, device) if dw is not None and narrow else dw
    block, g = _block(classes, work, ROW_BLOCK), chosen.settings.weights
    # Compute the logits, losses and gradients of one chunk at a time.
    for chunk in range(chosen.chunks):
        chosen.gather(dense, x, chunk)
        limit = chosen.limit("m", chunk)
        matmul_into(logits, dense, transposed(weight), alpha=1 / chosen.settings.temperature, limit=limit)
        launch(
            chunk_cross_entropy_kernel, rows, losses, hits, grads, logits, *chosen.arguments(chunk), g, classes,
            ratio * classes, 0 if g is None else g.strides[0], GRADS=dx is not None or dw is not None,
            WORK=TRITON[work.name], BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        add_gradients(dx, sum_dw, grads, dense, weight, chosen, chunk, scale)
    if dw is not None and narrow and sum_dw is not None:
        elementwise(identity, dw, sum_dw, work=float32)
