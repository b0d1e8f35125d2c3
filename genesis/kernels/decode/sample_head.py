"""The head of a generation step: computes float32 logits and draws from them without storing them.

Plain reference: genesis/ops/sample_head.py: `sample_head`.

The first kernel multiplies a tile of rows by a block of 128 classes and stores only the block's maximum and sum of
exponentials for each row. The second kernel has one program per row. It draws a block in proportion to the sums,
recomputes the logits of that block with the same chain of additions and thus the same bits, and draws one of its
classes. For 64 rows this reads 8 % of the weight again; stored logits would be written once and read three times.

Weights of classes are integers, so their sum does not depend on the order.

Tiles: BM rows, BN classes, BK elements along the width; TILES blocks of classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import bfloat16, float32
from genesis.errors import DeviceError, ShapeError
from genesis.kernels.decode.sample_parts import place_in, random_bits, scales_of, units_of
from genesis.kernels.dependents import allow_next, can_overlap, wait_for_previous
from genesis.kernels.elements import TRITON, as_matrix, converted
from genesis.kernels.loss.lm_head import log_prob, row_lse, tile_statistics
from genesis.ops.elementwise import copy
from genesis.ops.sample_head import BLOCK, unit_of
from genesis.ops.shape import contiguous


@triton.jit(do_not_specialize=["m", "n"])
def head_blocks_kernel(p_max, p_sum, d_x, d_w, p_settings, m, n, settings_stride, K: tl.constexpr, DOT: tl.constexpr,
                       OVERLAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Store the statistics of a block of classes for BM rows, [m, blocks] each."""
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    i_m, i_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)  # [BM], [BN]
    b_scale = scales_of(tl.load(p_settings + o_m * settings_stride, mask=o_m < m, other=1))  # [BM]
    b_acc = tl.zeros((BM, BN), tl.float32)  # [BM, BN]
    for i_k in range(0, K, BK):
        b_x, b_w = converted(d_x.load([i_m * BM, i_k]), DOT), converted(d_w.load([i_n * BN, i_k]), DOT)
        b_acc = tl.dot(b_x, b_w.T, b_acc, input_precision="ieee")  # [BM, BN]
    b_acc = tl.where((o_n < n)[None, :], b_acc, -float("inf"))  # [BM, BN]
    b_max, _, b_sum = tile_statistics(b_acc, b_scale[:, None])  # [BM] each
    o_s = o_m.to(tl.int64) * tiles_n + i_n  # [BM]
    tl.store(p_max + o_s, b_max, mask=o_m < m)
    tl.store(p_sum + o_s, b_sum, mask=o_m < m)


@triton.jit
def block_logits(p_x, p_w, o_n, n, stride, K: tl.constexpr, DOT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return the logits [BN] of a row x, with the bits that a tile of rows gives."""
    o_row, o_k = tl.arange(0, 16), tl.arange(0, BK)  # [16], [BK]
    b_acc = tl.zeros((16, BN), tl.float32)  # [16, BN]; the first row holds the logits
    for i_k in range(0, K, BK):
        m_k = i_k + o_k < K  # [BK]
        b_x = tl.load(
            p_x + o_row[:, None] * 0 + (i_k + o_k)[None, :], mask=(o_row == 0)[:, None] & m_k[None, :], other=0
        )
        p = p_w + o_n.to(tl.int64)[:, None] * stride + (i_k + o_k)[None, :]  # [BN, BK]
        b_w = tl.load(p, mask=(o_n < n)[:, None] & m_k[None, :], other=0)  # [BN, BK]
        b_acc = tl.dot(converted(b_x, DOT), converted(b_w, DOT).T, b_acc, input_precision="ieee")  # [16, BN]
    return tl.sum(tl.where((o_row == 0)[:, None], b_acc, 0.0), 0)


@triton.jit(do_not_specialize=["n", "blocks"])
def head_draw_kernel(p_tokens, p_log_probs, p_max, p_sum, p_x, p_w, p_keys, p_settings, n, blocks, sx, sw,
                     settings_stride, UNIT: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr, OVERLAP: tl.constexpr,
                     TILES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Draw the token of a row from the statistics of its blocks, and store its log-probability."""
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_settings + row * settings_stride)
    scale, is_greedy = scales_of(temperature), temperature == 0
    share = converted(random_bits(p_keys, row), tl.float64) * (2.0**-53)
    # Choose a block.
    o_t = tl.arange(0, TILES)  # [TILES]
    m_t = o_t < blocks
    b_max = tl.load(p_max + row * blocks + o_t, mask=m_t, other=-float("inf"))  # [TILES]
    b_sum = tl.load(p_sum + row * blocks + o_t, mask=m_t, other=0)  # [TILES]
    top, total, _ = row_lse(p_max + row * blocks, p_sum + row * blocks, -1, blocks, scale, TILES)
    is_finite = (tl.abs(top) < float("inf")) & (total < float("inf"))  # a NaN is in `total`
    b_part = tl.where(m_t, b_sum * tl.exp2((b_max - top) * scale), 0.0)  # [TILES]
    block, inside = place_in(units_of(tl.where(is_finite, b_part, 0.0), UNIT), share)
    block = tl.where(is_greedy, tl.min(tl.where(b_max == top, o_t, TILES - 1), 0), block)
    block = tl.minimum(block, blocks - 1)
    # Choose a class of the block.
    o_n = block * BN + tl.arange(0, BN)  # [BN]
    b_x = block_logits(p_x + row * sx, p_w, o_n, n, sw, K, DOT, BN, BK)  # [BN]
    b_x = tl.where(o_n < n, b_x, -float("inf"))
    best = tl.max(b_x, 0)
    at, _ = place_in(units_of(tl.where(is_finite, tl.exp2((b_x - best) * scale), 0.0), UNIT), inside)
    at = tl.where(is_greedy, tl.min(tl.where(b_x == best, tl.arange(0, BN), BN - 1), 0), at)
    token = tl.minimum(block * BN + at, n - 1)
    logit = tl.max(tl.where(o_n == token, b_x, -float("inf")), 0)
    tl.store(p_tokens + row, tl.where(is_finite, token, -1).to(tl.int64))
    tl.store(p_log_probs + row, tl.where(is_finite, log_prob(logit, top, total, scale), float("nan")))


@cuda_impl("sample_head")
def sample_head(out: tuple[Array, Array], hidden: Array, weight: Array, keys: Array, settings: Array) -> None:
    (rows, k), classes = hidden.shape, weight.shape[0]
    if not rows:
        return
    if backend_of(hidden.device).driver.properties.capability < (9, 0):
        raise DeviceError("sample_head needs compute capability 9.0 or higher", next="use the op sample on logits")
    if k * hidden.dtype.itemsize % 16:
        what = f"sample_head: rows of {k} values in {hidden.dtype}; the CUDA kernel needs multiples of 16 bytes"
        raise ShapeError(what, next="use a multiple of 8 values")
    hidden, weight, keys, settings = _aligned(hidden), _aligned(weight), contiguous(keys), contiguous(settings)
    blocks = triton.cdiv(classes, BLOCK)
    statistics = [empty((rows, blocks), float32, hidden.device) for _ in range(2)]
    size, kind = hidden.dtype.itemsize, hidden.dtype
    bm, bk = (16, 128) if rows <= 16 and size == 2 else (64 if rows <= 64 else 128, 128 // size)
    kind = float32 if is_interpreted() and kind is bfloat16 else kind
    common = {"K": k, "DOT": TRITON[kind.name], "OVERLAP": can_overlap(hidden), "BN": BLOCK, "BK": bk}
    launch(  # a warp has 16 rows; four lanes add a row's statistics
        head_blocks_kernel, triton.cdiv(rows, bm) * blocks, *statistics,
        Descriptor(hidden, hidden.shape, hidden.strides, (bm, bk)),
        Descriptor(weight, weight.shape, weight.strides, (BLOCK, bk)), settings, rows, classes, settings.strides[0],
        BM=bm, num_warps=bm // 16, num_stages=4 if bm == 64 else 3, **common,
    )  # fmt: skip
    launch(
        head_draw_kernel, rows, *out, *statistics, hidden, weight, keys, settings, classes, blocks, hidden.strides[0],
        weight.strides[0], settings.strides[0], UNIT=unit_of(classes), TILES=triton.next_power_of_2(blocks),
        num_warps=8 if rows <= 64 else 4, num_stages=3, **common,
    )  # fmt: skip


def _aligned(x: Array) -> Array:
    """Return a contiguous matrix that TMA can address: a copy if x is not."""
    x = as_matrix(contiguous(x))
    return x if is_describable(x, x.shape, x.strides) else copy(x)
