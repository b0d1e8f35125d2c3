"""The divergence between a student and a teacher, from hidden states, in chunks of tokens.

Reference: `genesis/ops/distillation.py`, which has the formulas.

A chunk's logits of student and teacher are float32 (float64 for float64), because divergences are differences of
logits. One program per row reads both rows with running maxima and sums (online softmax), then once more for the
gradient, which overwrites the student's logits in the type of the GEMMs; the Jensen-Shannon divergence needs another
pass between the two. Rows without a label are left out (`labelled.py`).

Tiles: BLOCK logits of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float32
from genesis.kernels.elements import TRITON, converted, float_argument, row_slice, work_type
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.loss.labelled import WORKSPACE, LabelledRows, Labels, begins_padding, can_limit, chunk_rows
from genesis.kernels.loss.loss import ROW_BLOCK, _block, _clear, _divisor, _sum_losses, _warps, add_gradients
from genesis.kernels.pointwise.elementwise import elementwise, identity
from genesis.ops.distillation import FIGURES
from genesis.ops.linalg import transposed
from genesis.ops.shape import contiguous


@triton.jit
def rescaled(top, x):
    """Return the new maximum, the base of exponents (0 for -inf, so no NaN), and the factor that rescales sums."""
    higher = tl.maximum(top, tl.max(x, 0))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    return higher, base, tl.exp(top - base)


@triton.jit
def log_mixture(u, v, log_student, log_teacher):
    """Return log(e^(u + log_student) + e^(v + log_teacher))."""
    a, d = u + log_student, v + log_teacher - u - log_student
    return a + tl.maximum(d, 0.0) + tl.log(1 + tl.exp(-tl.abs(d)))


@triton.jit(do_not_specialize=["first", "tokens", "classes"])
def divergence_kernel(p_loss, p_figures, p_d, p_s, p_t, p_numbers, p_row_labels, p_total, p_limit, first, tokens,
                      classes, sd, beta, temperature, KIND: tl.constexpr, SCALED: tl.constexpr, GRADS: tl.constexpr,
                      WORK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store the divergence and the figures of a chunk's row of logits / T at its place, and with GRADS the gradient of
    the logits; zeros follow the rows.

    A narrower gradient overwrites only logits of this tile or of tiles that were read before. Within a tile the barrier
    orders all loads before all stores.

    Args:
        KIND: 0 forward KL, 1 reverse KL, 2 Jensen-Shannon.
        SCALED: whether the temperature is not 1; the figures then need their own normalizers.
    """
    i_local = tl.program_id(0).to(tl.int64)
    is_there = first + i_local < tl.load(p_total)
    is_left_out = begins_padding(i_local, p_limit) if GRADS else is_there == 0
    if is_left_out:
        return
    i_row = tl.load(p_numbers + i_local, mask=is_there, other=0).to(tl.int64)
    p_s, p_t, p_d = p_s + i_local * classes, p_t + i_local * classes, p_d + i_local * sd
    label = tl.load(p_row_labels + i_local, mask=is_there, other=0)
    read = tl.where(is_there, classes, 0)
    # Both normalizers, and Σ e^a·(a - b) of a KL divergence from a to b.
    top_s, top_t = tl.full((), -float("inf"), WORK), tl.full((), -float("inf"), WORK)
    sums_s, sums_t, cross = tl.zeros((BLOCK,), WORK), tl.zeros((BLOCK,), WORK), tl.zeros((BLOCK,), WORK)  # [BLOCK]
    plain_s, plain_t = tl.zeros((BLOCK,), WORK), tl.zeros((BLOCK,), WORK)  # [BLOCK], at temperature 1
    best = tl.zeros((), tl.int32)
    for start in range(0, read, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        m = i < classes
        s, t = tl.load(p_s + i, mask=m, other=-float("inf")), tl.load(p_t + i, mask=m, other=-float("inf"))  # [BLOCK]
        best = tl.where(tl.max(s, 0) > top_s, start + tl.argmax(s, 0), best)
        higher_s, base_s, by_s = rescaled(top_s, s)
        higher_t, base_t, by_t = rescaled(top_t, t)
        e_s, e_t = tl.exp(s - base_s), tl.exp(t - base_t)  # [BLOCK]
        sums_s, sums_t = sums_s * by_s + e_s, sums_t * by_t + e_t
        if KIND == 0:
            cross = cross * by_t + tl.where(m, e_t * (t - s), 0.0)
        if KIND == 1:
            cross = cross * by_s + tl.where(m, e_s * (s - t), 0.0)
        if SCALED:
            plain_s = plain_s * tl.exp((top_s - base_s) * temperature) + tl.exp((s - base_s) * temperature)
            plain_t = plain_t * tl.exp((top_t - base_t) * temperature) + tl.exp((t - base_t) * temperature)
        top_s, top_t = higher_s, higher_t
    total_s, total_t = tl.sum(sums_s, 0), tl.sum(sums_t, 0)
    log_s, log_t = tl.log(total_s), tl.log(total_t)
    lse_s, lse_t = top_s + log_s, top_t + log_t
    # The divergence; `of_student` is the Σ p·a that the gradient subtracts.
    if KIND == 0:
        of_student = tl.zeros((), WORK)
        loss = tl.sum(cross, 0) / total_t - lse_t + lse_s
    if KIND == 1:
        of_student = tl.sum(cross, 0) / total_s - lse_s + lse_t
        loss = of_student
    if KIND == 2:
        log_student, log_teacher = tl.log(1 - beta), tl.log(beta)
        b_p, b_q = tl.zeros((BLOCK,), WORK), tl.zeros((BLOCK,), WORK)  # [BLOCK]
        for start in range(0, read, BLOCK):
            i = start + tl.arange(0, BLOCK)  # [BLOCK]
            m = i < classes
            s, t = tl.load(p_s + i, mask=m, other=0), tl.load(p_t + i, mask=m, other=0)  # [BLOCK]
            u, v = s - top_s - log_s, t - top_t - log_t  # [BLOCK], more exact than s - lse_s
            log_m = log_mixture(u, v, log_student, log_teacher)
            b_p += tl.where(m, tl.exp(u) * (u - log_m), 0.0)
            b_q += tl.where(m, tl.exp(v) * (v - log_m), 0.0)
        of_student = tl.sum(b_p, 0)
        loss = (1 - beta) * of_student + beta * tl.sum(b_q, 0)
    # The figures at temperature 1.
    s_label, t_label = tl.load(p_s + label, mask=is_there, other=0), tl.load(p_t + label, mask=is_there, other=0)
    entropy_s, entropy_t = lse_s - s_label, lse_t - t_label
    if SCALED:
        entropy_s = tl.log(tl.sum(plain_s, 0)) + (top_s - s_label) * temperature
        entropy_t = tl.log(tl.sum(plain_t, 0)) + (top_t - t_label) * temperature
    agrees = tl.load(p_t + best, mask=is_there, other=0) == top_t
    tl.store(p_loss + i_row, loss, mask=is_there)
    tl.store(p_figures + i_row, entropy_s, mask=is_there)
    tl.store(p_figures + tokens + i_row, entropy_t, mask=is_there)
    tl.store(p_figures + 2 * tokens.to(tl.int64) + i_row, tl.where(agrees, 1.0, 0.0), mask=is_there)
    if GRADS:
        for start in range(0, classes, BLOCK):
            i = start + tl.arange(0, BLOCK)  # [BLOCK]
            m = i < classes
            s, t = tl.load(p_s + i, mask=i < read, other=0), tl.load(p_t + i, mask=i < read, other=0)  # [BLOCK]
            tl.debug_barrier()
            u, v = s - top_s - log_s, t - top_t - log_t  # [BLOCK]
            if KIND == 0:
                d = tl.exp(u) - tl.exp(v)
            if KIND == 1:
                d = tl.exp(u) * (u - v - of_student)
            if KIND == 2:
                d = tl.exp(u) * (u - log_mixture(u, v, log_student, log_teacher) - of_student) * (1 - beta)
            if SCALED:
                d = d / temperature
            tl.store(p_d + i, converted(tl.where(is_there, d, 0.0), p_d.dtype.element_ty), mask=m)


@cuda_impl("linear_distillation")
def linear_distillation(
    out: tuple[Array, ...], x: Array, weight: Array, teacher_x: Array, teacher_weight: Array, labels: Array,
    divisor: Array | float | None = None, *, beta: float, temperature: float, ignore_index: int, shift: int,
    with_grads: bool, weight_grad: bool = True,
) -> None:  # fmt: skip
    """The gradients of the logits are rounded to x's type for the GEMMs; dweight is accumulated in float32."""
    loss, figures, dx, dw = (*out, None, None)[:4]
    classes = min(weight.shape[0], teacher_weight.shape[0])
    tokens, device, work = x.shape[0], x.device, work_type(x.dtype)
    x, teacher_x = (a if a.strides[1] == 1 else contiguous(a) for a in (x, teacher_x))
    _clear(dx, dw if dw is not None and (dw.shape[0] > classes or not tokens) else None)
    number, scale = _divisor(divisor, x)
    head, teacher_head = row_slice(weight, 0, classes), row_slice(teacher_weight, 0, classes)
    rows = chunk_rows(tokens, classes * work.itemsize, WORKSPACE)
    is_limited = can_limit(head) and can_limit(teacher_head) and classes * work.itemsize % 16 == 0
    at = Labels(labels, shift, ignore_index, classes, "linear_distillation")
    chosen = LabelledRows(at, tokens, rows, is_limited=is_limited)
    sum_dw = None if dw is None else row_slice(dw, 0, classes)
    # Divergence, cross entropies and agreements of each row.
    columns = empty((1 + FIGURES, tokens), work, device)
    _clear(columns)
    students, teachers = (empty((rows, classes), work, device) for _ in range(2))
    dense, teacher_dense = (empty((rows, each.shape[1]), each.dtype, device) for each in (x, teacher_x))
    ratio = work.itemsize // x.dtype.itemsize
    d = Array(students.storage, (rows, classes), (ratio * classes, 1), x.dtype, device, students.offset * ratio)
    narrow = sum_dw is not None and sum_dw.dtype is not work and chosen.chunks > 1
    wide_dw = empty(sum_dw.shape, work, device) if sum_dw is not None and narrow else sum_dw
    block = _block(classes, work, ROW_BLOCK)
    for chunk in range(chosen.chunks):
        for hidden, w, rows_of, logits in (
            (x, head, dense, students), (teacher_x, teacher_head, teacher_dense, teachers)
        ):  # fmt: skip
            chosen.gather(rows_of, hidden, chunk)
            matmul_into(logits, rows_of, transposed(w), alpha=1 / temperature, limit=chosen.limit("m", chunk))
        launch(
            divergence_kernel, rows, columns, row_slice(columns, 1, FIGURES), d, students, teachers,
            *chosen.arguments(chunk), tokens, classes, ratio * classes, float_argument(beta, work),
            float_argument(temperature, work), KIND=2 if 0 < beta < 1 else int(beta), SCALED=temperature != 1,
            GRADS=dx is not None or dw is not None, WORK=TRITON[work.name], BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        add_gradients(dx, wide_dw, d, dense, head, chosen, chunk, scale)
    if sum_dw is not None and narrow and wide_dw is not None:
        elementwise(identity, sum_dw, wide_dw, work=float32)
    _sum_losses(loss, row_slice(columns, 0, 1), number, tokens)
    for i in range(FIGURES):
        _sum_losses(row_slice(figures, i, 1), row_slice(columns, 1 + i, 1), None, tokens)
