"""CUDA implementations of the roundings of float32 to bfloat16: at random, and into a weight and a 16-bit residual.

Other kernels use their parts: `at_random` and `draws`, `join` and `split`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, bfloat16, float32
from genesis.kernels.elements import collapse, converted, needs_int64, offsets
from genesis.kernels.optim.step_constants import apart
from genesis.kernels.pointwise.elementwise import positions
from genesis.kernels.pointwise.random import counters, philox, quads, words_of

BLOCK = 1024


# --- Parts ------------------------------------------------------------------------------------------------------------


@triton.jit
def join(w, residual):
    """The float32 numbers whose bits are (w << 16) + residual."""
    bits = (w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + residual.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """float32 as bfloat16, rounded to nearest and halves away from zero, and the residual, as int16."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), bits.to(tl.int16)


@triton.jit
def spread(w0, w1, w2, w3):
    """Eight half-words of each counter in element order."""
    words = quads(w0, w1, w2, w3)
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def draws(start, s0, s1, COUNT: tl.constexpr):
    """The noise of this program's 8·COUNT elements, from counter `start` of the whole on."""
    first = tl.program_id(0).to(tl.int64) * COUNT + start
    w0, w1, w2, w3 = philox(s0, s1, (first + tl.arange(0, COUNT)).to(tl.uint64))
    return spread(w0, w1, w2, w3)


@triton.jit
def at_random(x, noise):
    """float32 rounded to bfloat16 by 16 random bits; infinities and NaN stay."""
    bits = ((x.to(tl.uint32, bitcast=True) + noise) >> 16).to(tl.uint16)
    kept = converted(x, tl.bfloat16).to(tl.uint16, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), bits, kept).to(tl.bfloat16, bitcast=True)


# --- The CUDA implementations -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def rounding_kernel(p_o, p_x, n, s0, s1, f0, f1, sizes, sx, COUNT: tl.constexpr):
    start, w0, w1, w2, w3 = words_of(s0, s1, f0, f1, COUNT)
    i = start * 8 + tl.arange(0, 8 * COUNT)
    x = tl.load(p_x + offsets(i, sizes, sx), mask=i < n, other=0)
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


@triton.jit
def join_kernel(p_o, p_w, p_r, n, sizes, so, sw, sr, INT64: tl.constexpr, BLOCK: tl.constexpr):
    i, m = positions(n, BLOCK, INT64)
    w = tl.load(p_w + offsets(i, sizes, sw), mask=m)
    r = tl.load(p_r + offsets(i, sizes, sr), mask=m)
    tl.store(p_o + offsets(i, sizes, so), join(w, r), mask=m)


@triton.jit
def split_kernel(p_x, p_w, p_r, n, sizes, sx, sw, sr, INT64: tl.constexpr, BLOCK: tl.constexpr):
    i, m = positions(n, BLOCK, INT64)
    w, r = split(tl.load(p_x + offsets(i, sizes, sx), mask=m))
    tl.store(p_w + offsets(i, sizes, sw), w, mask=m)
    tl.store(p_r + offsets(i, sizes, sr), r, mask=m)


def _launch(kernel: object, whole: Array, weight: Array, residual: Array) -> None:
    sizes, *strides = collapse(whole.shape, whole.strides, weight.strides, residual.strides)
    launch(
        kernel, triton.cdiv(whole.size, BLOCK), whole, weight, residual, whole.size, sizes, *strides,
        INT64=needs_int64(sizes, *strides), BLOCK=BLOCK,
    )  # fmt: skip


@cuda_impl("join_master")
def join_master(out: Array, weight: Array, residual: Array) -> None:
    _launch(join_kernel, out, weight, residual)


@cuda_impl("split_master")
def split_master(out: tuple[()], weight: Array, residual: Array, master: Array) -> None:
    with apart(weight, residual) as (weight, residual):
        _launch(split_kernel, master, weight, residual)
