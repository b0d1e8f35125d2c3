"""Random ops: Philox in registers, from the seed and the counters that `genesis.random` assigns.

Reference: `genesis/ops/random.py`, under the same names.

A program computes whole counters and reorders their words to element order, so no counter is computed twice. Integers
and uniforms equal the CPU's bit for bit. Normals are computed in float64, as on the CPU, and rounded once. The
logarithm, sine and cosine of libdevice may differ from numpy's by an ulp of float64, which changes about one of 2^28
float32 results. An error for invalid data would need a synchronisation. Instead, invalid elements become NaN and
invalid samples -1.

Seeds and offsets change with every call, so kernels do not specialize on them, and calls keep a launch plan only if
they have a position.

Tiles: COUNT counters, which give 2·COUNT values of 64 bits or 4·COUNT values of 32 bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from genesis.array import Array, empty
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import forget_plan, launch
from genesis.dtypes import DType, float64, int64
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, collapse, converted, float_argument, offsets, work_type
from genesis.kernels.pointwise.elementwise import elementwise, identity
from genesis.ops.random import UNIFORM_BITS
from genesis.shapes import Shape, contiguous_strides, numel

COUNTERS = 256  # counters per program, two per thread
_TURN = tl.constexpr(2 * math.pi)


# --- The generator ----------------------------------------------------------------------------------------------------


@triton.jit
def mul_rn(x, y):
    """Return x·y, rounded. It is never contracted with the next addition, because the CPU rounds both."""
    return libdevice.mul_rn(x, y)


if is_interpreted():
    mul_rn = maths.in_numpy(np.multiply)


@triton.jit
def to_uint64(low, high):
    """Return the uint64 with these low and high words, int32 or uint32."""
    return low.to(tl.uint32, bitcast=True).to(tl.uint64) | (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)


@triton.jit
def mul_hi_lo(x, M: tl.constexpr):
    """Return the high and low words of x·M."""
    p = x.to(tl.uint64) * tl.full((), M, tl.uint64)
    return (p >> 32).to(tl.uint32), p.to(tl.uint32)


@triton.jit
def philox_rounds(c0, c1, c2, c3, k0, k1):
    """Return the four words of each counter of four words; all are uint32, and so is the key of two words."""
    for _ in tl.static_range(10):
        high0, low0 = mul_hi_lo(c0, 0xD2511F53)
        high1, low1 = mul_hi_lo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0.to(tl.uint64) + tl.full((), 0x9E3779B9, tl.uint64)).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + tl.full((), 0xBB67AE85, tl.uint64)).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def philox(seed_low, seed_high, counter):
    """Return the four words (uint32) of each counter (uint64); see `genesis.random`."""
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    k0, k1 = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    return philox_rounds(c0, c1, c0 * 0, c0 * 0, k0, k1)


@triton.jit
def plus_position(p_position, at, low, high):
    """Return the uint64 of two words, plus element `at` of the position, if there is one."""
    n = to_uint64(low, high)
    if p_position is not None:
        n += tl.load(p_position + at).to(tl.uint64, bitcast=True)
    return n


@triton.jit
def words_at(p_position, sm, seed_low, seed_high, first_low, first_high, counter):
    """Return the four words of each counter of a call. Its counters begin at its first counter plus the position's."""
    first = plus_position(p_position, 0, first_low, first_high)
    seed = plus_position(p_position, sm, seed_low, seed_high)
    s0, s1 = seed.to(tl.uint32).to(tl.int32, bitcast=True), (seed >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    return philox(s0, s1, first + counter.to(tl.uint64))


@triton.jit
def words_of(p_position, sm, seed_low, seed_high, first_low, first_high, COUNT: tl.constexpr):
    """Return the index of this program's first counter in the call, and the words of COUNT counters, each [COUNT]."""
    start = tl.program_id(0).to(tl.int64) * COUNT
    counter = start + tl.arange(0, COUNT)  # [COUNT]
    w0, w1, w2, w3 = words_at(p_position, sm, seed_low, seed_high, first_low, first_high, counter)  # [COUNT] each
    return start, w0, w1, w2, w3


@triton.jit
def quads(w0, w1, w2, w3):
    """Return the four values of each counter in element order, [4 · COUNT]."""
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # [4 · COUNT]


@triton.jit
def to_float64(x):
    return x.to(tl.int64).to(tl.float64)


# --- Creation ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def uniform_kernel(p_o, n, p_m, sm, s0, s1, f0, f1, step, width, low, end, below, STANDARD: tl.constexpr,
                   BITS: tl.constexpr, WORK: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    start, w0, w1, w2, w3 = words_of(p_m, sm, s0, s1, f0, f1, COUNT)  # scalar, then [COUNT] each
    if BITS == 53:
        draws = tl.interleave(to_uint64(w0, w1), to_uint64(w2, w3))  # [2 · COUNT]
        u = converted((draws >> 11).to(tl.int64), WORK)  # [2 · COUNT]
        i = start * 2 + tl.arange(0, 2 * COUNT)  # [2 · COUNT]
    else:
        u = converted((quads(w0, w1, w2, w3) >> (32 - BITS)).to(tl.int32), WORK)  # [4 · COUNT]
        i = start * 4 + tl.arange(0, 4 * COUNT)  # [4 · COUNT]
    u = u * step
    if not STANDARD:
        u = mul_rn(u, tl.full(u.shape, width, WORK)) + low
        u = converted(converted(u, p_o.dtype.element_ty), WORK)
        u = tl.where(u >= end, below, u)  # rounding may reach the open end
    tl.store(p_o + i, converted(u, p_o.dtype.element_ty), mask=i < n)


@triton.jit
def box_muller(a, b, std, mean):
    """Return two normal variates computed from two uniform ones in (0, 1) (Box and Muller, 1958)."""
    radius = mul_rn(maths.root(maths.log(a) * -2.0), tl.full(a.shape, std, tl.float64))
    angle = b * _TURN
    return mul_rn(radius, maths.cos(angle)) + mean, mul_rn(radius, maths.sin(angle)) + mean


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def normal_kernel(p_o, n, p_m, sm, s0, s1, f0, f1, mean, std, DOUBLE: tl.constexpr, COUNT: tl.constexpr):
    start, w0, w1, w2, w3 = words_of(p_m, sm, s0, s1, f0, f1, COUNT)  # scalar, then [COUNT] each
    if DOUBLE:
        a = (to_float64(to_uint64(w0, w1) >> 11) + 0.5) * 1.1102230246251565e-16  # 2^-53
        b = (to_float64(to_uint64(w2, w3) >> 11) + 0.5) * 1.1102230246251565e-16  # [COUNT]
        even, odd = box_muller(a, b, std, mean)  # [COUNT] each
        y = tl.interleave(even, odd)  # [2 · COUNT]
        i = start * 2 + tl.arange(0, 2 * COUNT)  # [2 · COUNT]
    else:
        a, b = (to_float64(w0) + 0.5) * 2.3283064365386963e-10, (to_float64(w1) + 0.5) * 2.3283064365386963e-10  # 2^-32
        c, d = (to_float64(w2) + 0.5) * 2.3283064365386963e-10, (to_float64(w3) + 0.5) * 2.3283064365386963e-10
        z0, z1 = box_muller(a, b, std, mean)  # [COUNT] each
        z2, z3 = box_muller(c, d, std, mean)  # [COUNT] each
        y = quads(z0, z1, z2, z3)  # [4 · COUNT]
        i = start * 4 + tl.arange(0, 4 * COUNT)  # [4 · COUNT]
    tl.store(p_o + i, converted(y, p_o.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1", "low0", "low1", "span0", "span1"])
def randint_kernel(p_o, n, p_m, sm, s0, s1, f0, f1, low0, low1, span0, span1, WHOLE: tl.constexpr, FLIP: tl.constexpr,
                   COUNT: tl.constexpr):  # fmt: skip
    """Store low + draw mod span, or mod 2^64 with WHOLE. FLIP inverts the top bit, so signed order becomes unsigned."""
    start, w0, w1, w2, w3 = words_of(p_m, sm, s0, s1, f0, f1, COUNT)  # scalar, then [COUNT] each
    draw = tl.interleave(to_uint64(w0, w1), to_uint64(w2, w3))  # [2 · COUNT]
    if not WHOLE:
        draw = draw % to_uint64(span0, span1)
    draw = draw + to_uint64(low0, low1)
    if FLIP:
        draw = draw ^ tl.full((), 1 << 63, tl.uint64)
    y = draw.to(tl.int64, bitcast=True)
    if p_o.dtype.element_ty.primitive_bitwidth == 16 and p_o.dtype.element_ty.is_floating():
        y = y.to(tl.float32)
    i = start * 2 + tl.arange(0, 2 * COUNT)  # [2 · COUNT]
    tl.store(p_o + i, converted(y, p_o.dtype.element_ty), mask=i < n)


# --- Bernoulli and dropout --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def bernoulli_kernel(p_o, p_p, n, p_m, sm, s0, s1, f0, f1, sizes, sp, COUNT: tl.constexpr):
    start, w0, w1, w2, w3 = words_of(p_m, sm, s0, s1, f0, f1, COUNT)  # scalar, then [COUNT] each
    i = start * 4 + tl.arange(0, 4 * COUNT)  # [4 · COUNT]
    m = i < n
    chance = converted(tl.load(p_p + offsets(i, sizes, sp), mask=m), tl.float64)  # [4 · COUNT]
    hit = (to_float64(quads(w0, w1, w2, w3)) < chance * 4294967296.0).to(tl.float32)  # [4 · COUNT]
    y = tl.where((chance >= 0) & (chance <= 1), hit, float("nan"))
    tl.store(p_o + i, converted(y, p_o.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1", "limit"])
def dropout_kernel(
    p_o, p_x, n, p_m, sm, s0, s1, f0, f1, limit, scale, sizes, so, sx, WORK: tl.constexpr, COUNT: tl.constexpr
):
    start, w0, w1, w2, w3 = words_of(p_m, sm, s0, s1, f0, f1, COUNT)  # scalar, then [COUNT] each
    i = start * 4 + tl.arange(0, 4 * COUNT)  # [4 · COUNT]
    m = i < n
    x = converted(tl.load(p_x + offsets(i, sizes, sx), mask=m), WORK)  # [4 · COUNT]
    kept = quads(w0, w1, w2, w3) >= limit.to(tl.uint32, bitcast=True)  # [4 · COUNT]
    y = tl.where(kept, tl.full(x.shape, scale, WORK), 0.0) * x  # [4 · COUNT]
    tl.store(p_o + offsets(i, sizes, so), converted(y, p_o.dtype.element_ty), mask=m)


@triton.jit
def kept_from(p_position, FIRST: tl.constexpr, LIMIT: tl.constexpr, counter):
    """Return whether dropout keeps the element of each of the four words. Counters begin at FIRST plus the position."""
    first = tl.load(p_position).to(tl.uint64, bitcast=True) + tl.full((), FIRST, tl.uint64)
    seed = tl.load(p_position + 1)
    words = philox(seed.to(tl.int32), (seed >> 32).to(tl.int32), first + counter.to(tl.uint64))
    limit = tl.full((), LIMIT, tl.uint32)
    return words[0] >= limit, words[1] >= limit, words[2] >= limit, words[3] >= limit


@triton.jit
def kept(p_position, e, FIRST: tl.constexpr, LIMIT: tl.constexpr):
    """Return whether dropout keeps the elements e."""
    k0, k1, k2, k3 = kept_from(p_position, FIRST, LIMIT, e // 4)
    word = e % 4
    return tl.where(word < 2, tl.where(word == 0, k0, k1), tl.where(word == 2, k2, k3))


@triton.jit
def kept_fours(p_position, e, FIRST: tl.constexpr, LIMIT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return whether dropout keeps e, e + 1, e + 2 and e + 3, in a tile whose last dimension is four times longer."""
    k0, k1, k2, k3 = kept_from(p_position, FIRST, LIMIT, e // 4)
    if not ALIGNED:
        n0, n1, n2, _ = kept_from(p_position, FIRST, LIMIT, e // 4 + 1)
        two, one = e % 4 >= 2, e % 2 == 1
        k0, k1, k2, k3, k4 = (
            tl.where(two, k2, k0), tl.where(two, k3, k1), tl.where(two, n0, k2), tl.where(two, n1, k3),
            tl.where(two, n2, n0),
        )  # fmt: skip
        k0, k1, k2, k3 = tl.where(one, k1, k0), tl.where(one, k2, k1), tl.where(one, k3, k2), tl.where(one, k4, k3)
    return quads(k0, k1, k2, k3)


# --- Multinomial ------------------------------------------------------------------------------------------------------


@triton.jit
def cdf_kernel(p_cdf, p_total, p_p, n, needed, sr, sn, BLOCK: tl.constexpr):
    """Store the cumulative sums of a row's weights (an unnormalised CDF) and its total.

    A category of weight 0 has the value of the last category before it with a positive weight, or -inf, regardless of
    rounding. The total is NaN for weights that cannot be sampled.
    """
    i_row = tl.program_id(0).to(tl.int64)
    before = tl.full((), 0.0, tl.float64)
    last = tl.full((), -float("inf"), tl.float64)
    bad = tl.full((), 0, tl.int32)
    positive = tl.full((), 0, tl.int64)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)  # [BLOCK]
        w = converted(tl.load(p_p + i_row * sr + i.to(tl.int64) * sn, mask=i < n, other=0), tl.float64)  # [BLOCK]
        bad += tl.sum(((w >= 0) & (w < float("inf")) == 0).to(tl.int32))
        positive += tl.sum((w > 0).to(tl.int64))
        sums = before + tl.cumsum(w, 0)  # [BLOCK]
        cdf = tl.where(w > 0, sums, -float("inf"))
        cdf = tl.maximum(tl.associative_scan(cdf, 0, maths.maximum), last)  # [BLOCK]
        tl.store(p_cdf + i_row * n + i, cdf, mask=i < n)
        last = tl.maximum(last, tl.max(cdf, 0))
        before += tl.sum(w, 0)
    tl.store(p_total + i_row, tl.where((bad > 0) | (positive < needed), float("nan"), last))


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def sample_cdf_kernel(
    p_o, p_cdf, p_total, n, samples, p_m, sm, s0, s1, f0, f1, STEPS: tl.constexpr, COUNT: tl.constexpr
):
    """Store for each sample the first category whose CDF exceeds the draw, found by bisection."""
    i_row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)  # [COUNT]
    m = i < samples
    at = i_row * samples + i
    w0, w1, w2, w3 = words_at(p_m, sm, s0, s1, f0, f1, at // 2)  # [COUNT] each
    draw = tl.where(at % 2 == 0, to_uint64(w0, w1), to_uint64(w2, w3))  # [COUNT]
    total = tl.load(p_total + i_row)
    target = to_float64(draw >> 11) * 1.1102230246251565e-16 * total  # [COUNT]
    low = tl.zeros((COUNT,), tl.int32)  # [COUNT]; the CDF of every category before `low` is at most the target
    high = low + (n - 1)
    for _ in range(STEPS):
        middle = (low + high) // 2
        end = tl.load(p_cdf + i_row * n + middle)  # [COUNT]
        # Rounding may give a target equal to the total. It selects the first category that reaches the total.
        past = (end <= target) & (end < total)
        low = tl.where(past, tl.minimum(middle + 1, high), low)
        high = tl.where(past, high, middle)
    tl.store(p_o + at, tl.where(total == total, low, -1).to(tl.int64), mask=m)


@triton.jit(do_not_specialize=["s0", "s1", "f0", "f1"])
def gumbel_keys_kernel(p_key, p_p, size, n, p_m, sm, s0, s1, f0, f1, sr, sn, COUNT: tl.constexpr):
    """Store the keys -log(u) / w as ordered bits of float64. Their order samples without replacement (Gumbel trick)."""
    start, w0, w1, w2, w3 = words_of(p_m, sm, s0, s1, f0, f1, COUNT)  # scalar, then [COUNT] each
    i = start * 4 + tl.arange(0, 4 * COUNT)  # [4 · COUNT]
    m = i < size
    a = (to_float64(quads(w0, w1, w2, w3)) + 0.5) * 2.3283064365386963e-10  # [4 · COUNT]
    w = converted(tl.load(p_p + (i // n) * sr + (i % n) * sn, mask=m, other=1), tl.float64)  # [4 · COUNT]
    key = tl.where(w > 0, -maths.log(a) / tl.where(w > 0, w, 1.0), float("inf"))  # [4 · COUNT]
    tl.store(p_key + i, key.to(tl.int64, bitcast=True), mask=m)


@triton.jit
def samples_of(total, order):
    """Return the samples of a row, or -1 if its total is NaN."""
    return tl.where(total == total, order, -1)


# --- The CUDA implementations -----------------------------------------------------------------------------------------


def number_words(value: int) -> tuple[int, int]:
    """Return the low and high words of a 64-bit integer as int32."""
    low, high = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


def counters(seed: int, offset: int, position: Array | None = None) -> tuple[Any, ...]:
    """Return position, its stride, seed and first counter as kernel arguments."""
    if position is None:
        forget_plan()
    place = (None, 0) if position is None else (position, position.strides[0])
    return (*place, *number_words(seed), *number_words(offset))


def _programs(n: int, each: int) -> int:
    return triton.cdiv(n, COUNTERS * each)


@cuda_impl("uniform")
def uniform(
    out: Array, position: Array | None = None, *, seed: int, offset: int, shape: Shape, dtype: DType, low: float,
    high: float,
) -> None:  # fmt: skip
    bits = UNIFORM_BITS[dtype.name]
    work = work_type(dtype)
    end = dtype.numpy.type(high)
    below = np.nextafter(end, dtype.numpy.type(low))
    launch(
        uniform_kernel, _programs(out.size, 2 if bits == 53 else 4), out, out.size, *counters(seed, offset, position),
        *(float_argument(v, work) for v in (2.0**-bits, high - low, low, end, below)), STANDARD=(low, high) == (0, 1),
        BITS=bits, WORK=TRITON[work.name], COUNT=COUNTERS,
    )  # fmt: skip


@cuda_impl("normal")
def normal(
    out: Array, position: Array | None = None, *, seed: int, offset: int, shape: Shape, dtype: DType, mean: float,
    std: float,
) -> None:  # fmt: skip
    double = dtype is float64
    launch(
        normal_kernel, _programs(out.size, 2 if double else 4), out, out.size, *counters(seed, offset, position),
        Double(mean), Double(std), DOUBLE=double, COUNT=COUNTERS,
    )  # fmt: skip


def _integers(
    out: Array, position: Array | None, seed: int, offset: int, low: int, span: int, flip: bool = False
) -> None:
    launch(
        randint_kernel, _programs(out.size, 2), out, out.size, *counters(seed, offset, position), *number_words(low),
        *number_words(span), WHOLE=span == 1 << 64, FLIP=flip, COUNT=COUNTERS,
    )  # fmt: skip


@cuda_impl("randint")
def randint(
    out: Array, position: Array | None = None, *, seed: int, offset: int, shape: Shape, dtype: DType, low: int,
    high: int,
) -> None:  # fmt: skip
    _integers(out, position, seed, offset, low, high - low)


@cuda_impl("randperm")
def randperm(out: Array, position: Array | None = None, *, seed: int, offset: int, n: int, dtype: DType) -> None:
    from genesis.kernels.index.radix_sort import argsort_keys

    if n == 0:
        return
    keys = empty((1, n), int64, out.device)
    _integers(keys, position, seed, offset, 0, 1 << 64, flip=True)
    _, order = argsort_keys(keys, 64, True, keep_keys=False)
    elementwise(identity, out, order.view((n,), (1,)), work=order.dtype)


@cuda_impl("bernoulli")
def bernoulli(out: Array, p: Array, position: Array | None = None, *, seed: int, offset: int) -> None:
    """Store 1 where a 32-bit draw is below p·2^32, 0 elsewhere, and NaN where p is not a probability."""
    sizes, sp = collapse(out.shape, p.strides)
    launch(
        bernoulli_kernel, _programs(out.size, 4), out, p, out.size, *counters(seed, offset, position), sizes, sp,
        COUNT=COUNTERS,
    )  # fmt: skip


@cuda_impl("dropout")
def dropout(out: Array, x: Array, position: Array | None = None, *, p: float, seed: int, offset: int) -> None:
    sizes, so, sx = collapse(out.shape, out.strides, x.strides)
    work = work_type(x.dtype)
    scale = float_argument(1 / (1 - p) if p < 1 else 0, work)  # p = 1 drops all
    limit, _ = number_words(min(int(p * 2.0**32), 0xFFFFFFFF))
    launch(
        dropout_kernel, _programs(out.size, 4), out, x, out.size, *counters(seed, offset, position), limit, scale,
        sizes, so, sx, WORK=TRITON[work.name], COUNT=COUNTERS,
    )  # fmt: skip


@cuda_impl("multinomial")
def multinomial(
    out: Array, p: Array, position: Array | None = None, *, num_samples: int, replacement: bool, seed: int, offset: int
) -> None:
    """Store `num_samples` categories for each row of weights, or -1 for rows that the reference refuses."""
    from genesis.kernels.index.radix_sort import argsort_keys

    n, rows = p.shape[-1], numel(p.shape[:-1])
    if rows == 0:
        return
    sr, sn = (p.strides[0] if p.ndim == 2 else 0), p.strides[-1]
    drawn = counters(seed, offset, position)
    is_independent = replacement or num_samples == 1
    total = empty((rows,), float64, out.device)
    cdf = empty((rows, n), float64, out.device)
    block = min(1024, max(16, triton.next_power_of_2(n)))
    launch(cdf_kernel, rows, cdf, total, p, n, 1 if is_independent else num_samples, sr, sn, BLOCK=block)
    if is_independent:
        count = min(128, triton.next_power_of_2(num_samples))
        launch(
            sample_cdf_kernel, (triton.cdiv(num_samples, count), rows), out, cdf, total, n, num_samples, *drawn,
            STEPS=max(1, n.bit_length()), COUNT=count,
        )  # fmt: skip
        return
    # Sort Gumbel keys, which reuse the memory of the CDF, and take the first categories.
    keys = Array(cdf.storage, (rows, n), contiguous_strides((rows, n)), int64, out.device, cdf.offset)
    launch(gumbel_keys_kernel, _programs(rows * n, 4), keys, p, rows * n, n, *drawn, sr, sn, COUNT=COUNTERS)
    _, order = argsort_keys(keys, 64, True, keep_keys=False)
    samples = out.view((rows, num_samples), (num_samples, 1))
    first = order.view((rows, num_samples), (n, 1))
    elementwise(samples_of, samples, total.view((rows, 1), (1, 0)), first, work=int64, condition_type=float64)
