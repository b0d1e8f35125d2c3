"""Kernels that round float32 to bfloat16: stochastically, or to a weight with a 16-bit residual.

Reference: `genesis/ops/rounding.py`. Optimizer kernels share `at_random` and `draws`, `join` and `split`. Tiles have
BLOCK elements, or eight for each of COUNT counters of the random stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, bfloat16, float32, int16
from genesis.kernels.elements import collapse, converted, needs_int64, offsets
from genesis.kernels.optim.step_constants import updated_in_place
from genesis.kernels.pointwise.elementwise import elementwise, positions
from genesis.kernels.pointwise.random import counters, philox, quads, words_of

BLOCK = 1024


# --- Parts ------------------------------------------------------------------------------------------------------------


@triton.jit
def join(w, residual):
    """Return the float32 numbers with the bits (w << 16) + residual."""
    bits = (w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + residual.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """Return float32 as bfloat16, rounded to nearest with halves away from zero, and as the residual in int16."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), bits.to(tl.int16)


@triton.jit
def spread(w0, w1, w2, w3):
    """Return the eight half-words of each counter, in the order of elements."""
    words = quads(w0, w1, w2, w3)  # [4·COUNT]
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def draws(start, s0, s1, COUNT: tl.constexpr):
    """Return the noise of this program's 8·COUNT elements. The noise of all programs begins at counter `start`."""
    first = tl.program_id(0).to(tl.int64) * COUNT + start
    w0, w1, w2, w3 = philox(s0, s1, (first + tl.arange(0, COUNT)).to(tl.uint64))  # [COUNT] each
    return spread(w0, w1, w2, w3)


@triton.jit
def at_random(x, noise):
    """Return float32 rounded to bfloat16 by 16 random bits. Infinities and NaN are kept."""
    bits = ((x.to(tl.uint32, bitcast=True) + noise) >> 16).to(tl.uint16)
    kept = converted(x, tl.bfloat16).to(tl.uint16, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), bits, kept).to(tl.bfloat16, bitcast=True)


# --- The CUDA implementations -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def rounding_kernel(p_o, p_x, n, p_m, sm, s0, s1, f0, f1, sizes, sx, COUNT: tl.constexpr):
    start, w0, w1, w2, w3 = words_of(p_m, sm, s0, s1, f0, f1, COUNT)  # scalar, then [COUNT] each
    i = start * 8 + tl.arange(0, 8 * COUNT)  # [8·COUNT]
    x = tl.load(p_x + offsets(i, sizes, sx), mask=i < n, other=0)  # [8·COUNT]
    tl.store(p_o + i, at_random(x, spread(w0, w1, w2, w3)), mask=i < n)


@cuda_impl("stochastic_round")
def stochastic_round(out: Array, x: Array, *, dtype: DType, seed: int, offset: int) -> None:
    assert x.dtype is float32 and out.dtype is bfloat16 and out.is_contiguous
    sizes, sx = collapse(x.shape, x.strides)
    count = 128
    launch(
        rounding_kernel, triton.cdiv(x.size, 8 * count), out, x, x.size, *counters(seed, offset), sizes, sx,
        COUNT=count,
    )  # fmt: skip


@cuda_impl("join_master")
def join_master(out: Array, weight: Array, residual: Array) -> None:
    elementwise(join, out, weight, residual, work=int16, condition_type=bfloat16)


@triton.jit
def split_kernel(p_x, p_w, p_r, n, sizes, sx, sw, sr, INT64: tl.constexpr, BLOCK: tl.constexpr):
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    w, r = split(tl.load(p_x + offsets(i, sizes, sx), mask=m))  # [BLOCK] each
    tl.store(p_w + offsets(i, sizes, sw), w, mask=m)
    tl.store(p_r + offsets(i, sizes, sr), r, mask=m)


@cuda_impl("split_master")
def split_master(out: tuple[()], weight: Array, residual: Array, master: Array) -> None:
    with updated_in_place(weight, residual) as (weight, residual):
        sizes, *strides = collapse(master.shape, master.strides, weight.strides, residual.strides)
        launch(
            split_kernel, triton.cdiv(master.size, BLOCK), master, weight, residual, master.size, sizes, *strides,
            INT64=needs_int64(sizes, *strides), BLOCK=BLOCK,
        )  # fmt: skip
