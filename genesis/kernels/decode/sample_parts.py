"""What the kernels of `sample` share: scores, weights, bins of scores, the settings of a row and its random bits.

Scores are float32: of wider logits, and of penalized ones, the rounded values; equal ones are drawn in order of ids.
Weights are probabilities relative to the likeliest token's. They are computed in float64 and added up as integers, in
units of 2^-44, so that sums are exact and do not depend on the order of atomics.

Bins divide the scores from the greatest down to that of weight 2^-44 (or to the least score, if that comes first) into
equal parts. Scores below have no bin and are not drawn.

A row with a small top-k needs no sums over all tokens. Chunks leave the greatest score of each group of ids. Of these
about the k-th greatest is a bound which at least k tokens reach, and few more where the likeliest tokens are in
different groups: of k in n groups, n · ln(n / (n - k)). Groups that reach it are read again, and no others.

A row with so many candidates (equal logits, mostly) that they do not fit in a tile is bisected by one program. It
passes over the whole row some twenty times for each bound, which takes milliseconds; few rows come here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels import maths
from genesis.kernels.elements import converted
from genesis.kernels.pointwise.random import mul_hi_lo

BINS = tl.constexpr(2048)
SPREAD = tl.constexpr(30.498)  # 44 ln 2
LEAST = tl.constexpr(-3.4028234663852886e38)  # of float32
ENOUGH = tl.constexpr(1e300)  # instead of an infinity, whose product with 0 is NaN


@triton.jit
def scores_of(x, p_seen, at, m, penalty):
    """Logits x at the offsets `at`, penalized where they were seen; the least number where m is not set."""
    if p_seen is not None:
        wide = converted(x, tl.float64)
        changed = tl.where(wide > 0, wide / penalty, wide * penalty)
        x = tl.where(tl.load(p_seen + at, mask=m, other=0) != 0, changed, wide)
    score = converted(tl.minimum(tl.maximum(x, LEAST), -LEAST), tl.float32)
    return tl.where(m, tl.where(score == 0, 0.0, score), LEAST)  # 0 and -0 are equal, and so must their bits be


@triton.jit
def ordered(score):
    """An int32 that orders as the float32 does."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_back(key):
    """The float32 of such an int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(score, top, rate):
    return maths.exp((converted(score, tl.float64) - top) * rate)


@triton.jit
def masses_of(weight, UNIT: tl.constexpr):
    """Weights as integers; UNIT is that of the likeliest token."""
    return (weight * UNIT + 0.5).to(tl.int64)


@triton.jit
def bin_of(score, top, per_bin):
    """The bin of each score from `top` down to the last bin's."""
    return tl.minimum((top - converted(score, tl.float64)) * per_bin, BINS - 1.0).to(tl.int32)


@triton.jit
def settings_of(p_settings, p_top_k, row, vocabulary):
    """Temperature, top-p, min-p and penalty as float64, and how many tokens top-k leaves."""
    p = p_settings + row * 4
    temperature, top_p = converted(tl.load(p), tl.float64), converted(tl.load(p + 1), tl.float64)
    min_p, penalty = converted(tl.load(p + 2), tl.float64), converted(tl.load(p + 3), tl.float64)
    top_k = tl.load(p_top_k + row).to(tl.int64)
    most = tl.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    return temperature, top_p, min_p, penalty, most


@triton.jit
def facts_of_row(p_partials, fields, row, chunks, temperature, CHUNKS: tl.constexpr):
    """From what the chunks of a row gave: greatest score, its first id, whether all are finite, the score where the
    last bin ends, bins a unit of score, and 1 / temperature."""
    i_c = tl.arange(0, CHUNKS)  # [CHUNKS]
    m_c = i_c < chunks
    p = p_partials + row * chunks + i_c
    best = tl.load(p, mask=m_c, other=-float("inf"))
    first = tl.load(p + fields, mask=m_c, other=0)
    least = tl.min(tl.load(p + 2 * fields, mask=m_c, other=float("inf")), 0)
    is_finite = tl.max(tl.load(p + 3 * fields, mask=m_c, other=0), 0) == 0
    top = tl.max(best, 0)
    token = tl.min(tl.where(m_c & (best == top), first, float("inf")), 0)
    floor = tl.maximum(least, top - SPREAD * temperature)
    spread = top - floor
    per_bin = tl.where(spread > 0, tl.minimum(BINS / tl.where(spread > 0, spread, 1.0), ENOUGH), 0.0)
    rate = tl.where(temperature > 0, tl.minimum(1.0 / tl.where(temperature > 0, temperature, 1.0), ENOUGH), 0.0)
    return top, converted(token, tl.int64), is_finite, floor, per_bin, rate


@triton.jit
def random_bits(p_keys, row):
    """The 53 bits of `genesis.ops.sample.uniforms`, as uint64."""
    p = p_keys + row * 3
    seed, sequence, position = tl.load(p), tl.load(p + 1), tl.load(p + 2)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = sequence.to(tl.uint32), (sequence >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = mul_hi_lo(c0, 0xD2511F53)
        high1, low1 = mul_hi_lo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0.to(tl.uint64) + tl.full((), 0x9E3779B9, tl.uint64)).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + tl.full((), 0xBB67AE85, tl.uint64)).to(tl.uint32)
    return (c0.to(tl.uint64) << 21) | (c1.to(tl.uint64) >> 11)


@triton.jit
def reached_by(share, whole):
    """The least integer that is at least share · whole."""
    return converted(maths.ceil(share * converted(whole, tl.float64)), tl.int64)


@triton.jit
def share_of(mass, bits):
    """The integer below u · mass of the uniform number u that the 53 bits are."""
    return tl.umulhi(bits << 11, mass.to(tl.uint64)).to(tl.int64)


# --- Candidates of a small top-k --------------------------------------------------------------------------------------


GROUPS = 1024  # of a row, at most
TOKENS = tl.constexpr(2048)  # that a program reads at a time


def group_of(vocabulary: int) -> int:
    """Ids of a group."""
    return max(16, triton.next_power_of_2(triton.cdiv(vocabulary, GROUPS)))


@triton.jit
def is_small(most, vocabulary, G: tl.constexpr):
    """Whether top-k leaves so few tokens that candidates are found this way."""
    return most <= tl.cdiv(vocabulary, 2 * G)


@triton.jit
def top_groups(p_maxima, p_listed, groups, most, N: tl.constexpr):
    """A score, as `ordered` has it, that at least `most` and about 5/4 · most groups reach; these, listed and counted.

    All programs of a row write the same list.
    """
    i_g = tl.arange(0, N)  # [N]
    m = i_g < groups
    key = ordered(tl.load(p_maxima + i_g, mask=m, other=LEAST))
    low, high = tl.min(key, 0).to(tl.int64), tl.max(key, 0).to(tl.int64) + 1
    count = tl.sum(m.to(tl.int32), 0)
    while (high - low > 1) & (count > most + (most >> 2)):
        middle = (low + high) >> 1
        number = tl.sum((m & (key >= middle.to(tl.int32))).to(tl.int32), 0)
        is_enough = number >= most
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        count = tl.where(is_enough, number, count)
    bound = low.to(tl.int32)
    m = m & (key >= bound)
    tl.store(p_listed + tl.cumsum(m.to(tl.int32), 0) - 1, i_g, mask=m)
    tl.debug_barrier()  # the program reads its list
    return bound, count


@triton.jit
def gather_top(p_candidates, p_count, p_listed, p_logits, p_seen, start, vocabulary, penalty, bound, count, worker,
               workers, G: tl.constexpr, MANY: tl.constexpr, LOAD: tl.constexpr):  # fmt: skip
    """Add this program's candidates of the listed groups: tokens that reach the bound."""
    i_n = tl.arange(0, TOKENS)  # [TOKENS]
    for first in range(worker * (TOKENS // G), count, workers * (TOKENS // G)):
        place = first + i_n // G
        i = tl.load(p_listed + place, mask=place < count, other=0, cache_modifier=".cg") * G + i_n % G
        m = (place < count) & (i < vocabulary)
        x = converted(tl.load(p_logits + start + i, mask=m, other=0), LOAD)
        key = ordered(scores_of(x, p_seen, start + i, m, penalty))
        m = m & (key >= bound)
        slot = tl.atomic_add(p_count + tl.zeros((TOKENS,), tl.int32), 1, mask=m, sem="relaxed")
        packed = ((~key).to(tl.int64) << 32) | i.to(tl.int64)
        tl.store(p_candidates + slot, packed, mask=m & (slot < MANY))


# --- Ties -------------------------------------------------------------------------------------------------------------


T = tl.constexpr(1024)


@triton.jit
def tokens_above(p_logits, p_seen, start, vocabulary, penalty, top, floor, rate, key, UNIT: tl.constexpr,
                 LOAD: tl.constexpr):  # fmt: skip
    """Number and mass of the tokens whose scores are above that of `key`."""
    count, mass = tl.zeros((T,), tl.int64), tl.zeros((T,), tl.int64)
    for first in range(0, vocabulary, T):
        i = first + tl.arange(0, T)  # [T]
        m = i < vocabulary
        x = converted(tl.load(p_logits + start + i, mask=m, other=0), LOAD)
        score = scores_of(x, p_seen, start + i, m, penalty)
        m = m & (converted(score, tl.float64) >= floor) & (ordered(score) > key)
        count += m.to(tl.int64)
        mass += tl.where(m, masses_of(weights_of(score, top, rate), UNIT), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def bisected(p_logits, p_seen, start, vocabulary, penalty, top, floor, rate, total, bits, top_p, min_p, most, is_cut,
             UNIT: tl.constexpr, LOAD: tl.constexpr):  # fmt: skip
    """The token that the row draws; arguments as in `resolved`.

    Four times the least key is found that has no more than so many tokens (or so much mass) above it: for top-k, top-p,
    min-p, and the draw. It belongs to the token with which the bound is exceeded, and to its equals.
    """
    kept, target = total, most - 1
    key = ordered(converted(top, tl.float32)).to(tl.int64)
    mass, each = total * 0, total * 0
    for question in range(4):
        is_wanted = (question == 3) | ((question == 0) & is_cut)
        is_wanted = is_wanted | ((question == 1) & (top_p < 1)) | ((question == 2) & (min_p > 0))
        least = reached_by(top_p, kept)
        if question == 1:
            target = least - 1
        if question == 3:
            target = share_of(kept, bits)
        high = ordered(converted(top, tl.float32)).to(tl.int64)
        low = tl.where(is_wanted, ordered(converted(floor, tl.float32)).to(tl.int64) - 1, high)  # may be rounded up
        count, mass = total * 0, total * 0
        while low < high:
            middle = (low + high) >> 1
            number, sum_ = tokens_above(
                p_logits, p_seen, start, vocabulary, penalty, top, floor, rate, middle, UNIT, LOAD
            )
            next_weight = weights_of(ordered_back((middle + 1).to(tl.int32)), top, rate)
            is_enough = tl.where(question == 0, number, sum_) <= target
            is_enough = tl.where(question == 2, next_weight >= min_p, is_enough)
            low, high = tl.where(is_enough, low, middle + 1), tl.where(is_enough, middle, high)
            count, mass = tl.where(is_enough, number, count), tl.where(is_enough, sum_, mass)
        key = high
        each = tl.maximum(masses_of(weights_of(ordered_back(key.to(tl.int32)), top, rate), UNIT), 1)
        if is_wanted:
            if question == 0:
                kept = mass + (most - count) * each
            elif question == 1:
                kept = tl.minimum(kept, mass + (least - mass + each - 1) // each * each)
            elif question == 2:
                kept = tl.minimum(kept, mass)
    rest = (target - mass) // each  # of the equal tokens, those with lower ids
    token = rest * 0
    for first in range(0, vocabulary, T):
        i = first + tl.arange(0, T)
        m = i < vocabulary
        x = converted(tl.load(p_logits + start + i, mask=m, other=0), LOAD)
        equal = (m & (ordered(scores_of(x, p_seen, start + i, m, penalty)) == key)).to(tl.int64)
        token += tl.sum(tl.where((equal > 0) & (tl.cumsum(equal, 0) - equal == rest), i, 0), 0)
        rest -= tl.sum(equal, 0)  # below 0 once it was found
    return token
