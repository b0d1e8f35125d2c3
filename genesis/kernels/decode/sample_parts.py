"""Shared parts of the kernels of `sample`: scores, weights, bins of scores, a row's settings and its random bits.

Scores are float32; wider and penalized logits are rounded. Tokens with equal scores are ordered by id. Weights are
probabilities relative to the likeliest token's, in float32. They are added as integers, in units of 2^-44, so that sums
are exact and do not depend on the order of atomics.

Bins divide the range of scores into equal parts. The range begins at the greatest score and ends at the score of weight
2^-44, or at the least score if that is greater. Lower scores have no bin and are not drawn.

A row with a small top-k needs no sums over all tokens. Chunks store the greatest score of each group of ids. A score
near the k-th greatest of these is a bound that at least k tokens reach. Few others reach it if the likeliest tokens are
spread over the groups: n · ln(n / (n - k)) tokens for n groups. Only groups that reach the bound are read again. With
other settings, too, groups that end below all wanted bins are not read, if programs have many of them.

A row without top-k, top-p and min-p needs neither bins nor candidates: it draws in the order of the ids, first a chunk
by the sum of its weights, then a token of the chunk.

If a row has more candidates than fit in a tile, mostly because logits are equal, one program bisects the scores. It
reads the whole row about twenty times for each bound, which takes milliseconds. Few rows need this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels import maths
from genesis.kernels.elements import converted
from genesis.kernels.pointwise.random import philox_rounds

LOG2_E = tl.constexpr(1.4426950408889634)
BINS = tl.constexpr(2048)
SPREAD = tl.constexpr(30.498)  # 44 ln 2
LEAST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32
ENOUGH = tl.constexpr(1e38)  # replaces infinity, whose product with 0 is NaN


@triton.jit
def scores_of(x, p_seen, at, m, penalty):
    """Return the scores of finite logits x at the offsets `at`, penalized for seen ids; LEAST where m is not set."""
    if p_seen is not None:
        wide = converted(x, tl.float64)
        changed = tl.where(wide > 0, wide / penalty, wide * penalty)
        x = tl.where(tl.load(p_seen + at, mask=m, other=0) != 0, changed, wide)
    if x.dtype == tl.float64:
        x = tl.minimum(tl.maximum(x, LEAST), -LEAST)
    score = converted(x, tl.float32)
    return tl.where(m, score, LEAST)


@triton.jit
def ordered(score):
    """Return int32 keys in the order of the float32 scores."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # gives 0 and -0 the same bits
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_back(key):
    """Return the float32 scores of `ordered` keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(score, top, scale):
    return tl.exp2((top - score) * -scale)


@triton.jit
def masses_of(weight, UNIT: tl.constexpr):
    """Return weights as integers. The likeliest token has UNIT, a power of 2."""
    return (weight * UNIT + 0.5).to(tl.int64)


@triton.jit
def bin_of(score, top, per_bin):
    """Return the bin of each score. Bin 0 begins at `top`."""
    return tl.minimum((top - score) * per_bin, BINS - 1.0).to(tl.int32)


@triton.jit
def settings_of(p_settings, p_top_k, row, vocabulary):
    """Load temperature, top-p and penalty as float64, min-p as float32, and the number of tokens that top-k leaves."""
    p = p_settings + row * 4
    temperature, top_p = converted(tl.load(p), tl.float64), converted(tl.load(p + 1), tl.float64)
    min_p, penalty = converted(tl.load(p + 2), tl.float32), converted(tl.load(p + 3), tl.float64)
    top_k = tl.load(p_top_k + row).to(tl.int64)
    most = tl.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    return temperature, top_p, min_p, penalty, most


@triton.jit
def facts_of_row(p_partials, fields, row, chunks, temperature, CHUNKS: tl.constexpr):
    """Reduce the results of a row's chunks. Return the greatest score, whether all logits are finite, the score at
    which the last bin ends, the bins per unit of score, log2(e) / temperature, and the weight of the likeliest tokens
    of all chunks.
    """
    i_c = tl.arange(0, CHUNKS)  # [CHUNKS]
    m_c = i_c < chunks  # [CHUNKS]
    p = p_partials + row * chunks + i_c
    best = tl.load(p, mask=m_c, other=-float("inf"))  # [CHUNKS]
    top = converted(tl.max(best, 0), tl.float32)
    least = converted(tl.min(tl.load(p + fields, mask=m_c, other=float("inf")), 0), tl.float32)
    is_finite = tl.max(tl.load(p + 2 * fields, mask=m_c, other=0), 0) == 0
    floor = tl.maximum(least, top - SPREAD * converted(temperature, tl.float32))
    spread = top - floor
    per_bin = tl.where(spread > 0, tl.minimum(BINS / tl.where(spread > 0, spread, 1.0), ENOUGH), 0.0)
    scale = scales_of(temperature)
    return top, is_finite, floor, per_bin, scale, tl.sum(weights_of(converted(best, tl.float32), top, scale), 0)


@triton.jit
def random_bits(p_keys, row):
    """Return the 53 bits of `genesis.ops.sample.uniforms` as uint64."""
    p = p_keys + row * 3
    seed, sequence, position = tl.load(p), tl.load(p + 1), tl.load(p + 2)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = sequence.to(tl.uint32), (sequence >> 32).to(tl.uint32)
    c0, c1, _, _ = philox_rounds(c0, c1, c2, c3, k0, k1)
    return (c0.to(tl.uint64) << 21) | (c1.to(tl.uint64) >> 11)


@triton.jit
def reached_by(share, whole):
    """Return the least integer that is at least share · whole."""
    return converted(maths.ceil(share * converted(whole, tl.float64)), tl.int64)


@triton.jit
def share_of(mass, bits):
    """Return the integer part of u · mass, where u is the uniform number with these 53 bits."""
    return tl.umulhi(bits << 11, mass.to(tl.uint64)).to(tl.int64)


# --- Draws in the order of the ids ------------------------------------------------------------------------------------


@triton.jit
def is_plain(top_p, min_p, most, vocabulary):
    """Return whether all tokens can be drawn."""
    return (most == vocabulary) & (top_p >= 1) & (min_p <= 0)


@triton.jit
def scales_of(temperature):
    """Return log2(e) / temperature in float32, with 1 for a temperature of 0."""
    temperature = converted(temperature, tl.float64)
    temperature = tl.where(temperature == 0, temperature + 1, tl.maximum(temperature, 1e-38))
    return converted(tl.full(temperature.shape, LOG2_E, tl.float64) / temperature, tl.float32)


@triton.jit
def units_of(b_x, UNIT: tl.constexpr):
    """Return numbers as integer weights, whose sum does not depend on the order."""
    return converted(converted(b_x, tl.float64) * UNIT, tl.int64)


@triton.jit
def place_in(b_unit, share):
    """Return the first index at which the cumulated integer weights exceed `share` of their sum, and the part of that
    index's weight that the share leaves, as a share of it.
    """
    b_height = tl.cumsum(b_unit, 0)
    total = tl.max(b_height, 0)
    target = tl.minimum(converted(share * converted(total, tl.float64), tl.int64), total - 1)
    b_is_below = b_height <= target
    before = tl.max(tl.where(b_is_below, b_height, 0), 0)
    own = tl.min(tl.where(b_is_below, total, b_height), 0) - before
    inside = (converted(target - before, tl.float64) + 0.5) / converted(tl.maximum(own, 1), tl.float64)
    return tl.sum(b_is_below.to(tl.int32), 0), inside


# --- Candidates of a small top-k --------------------------------------------------------------------------------------


GROUPS = 1024  # the most groups per row
TOKENS = tl.constexpr(2048)  # tokens that a program reads at a time


def group_of(vocabulary: int) -> int:
    """Return the number of ids per group."""
    return max(16, triton.next_power_of_2(triton.cdiv(vocabulary, GROUPS)))


@triton.jit
def is_small(most, vocabulary, G: tl.constexpr):
    """Return whether top-k leaves so few tokens that the candidates come from the groups."""
    return most <= tl.cdiv(vocabulary, 2 * G)


@triton.jit
def is_binned(temperature, top_p, min_p, most, vocabulary, G: tl.constexpr):
    """Return whether a row needs bins."""
    return (temperature > 0) & ((is_small(most, vocabulary, G) | is_plain(top_p, min_p, most, vocabulary)) == 0)


@triton.jit
def listed(p_listed, i_g, m):
    """List the groups i_g where m is set, for this program to read, and return their number."""
    tl.store(p_listed + tl.cumsum(m.to(tl.int32), 0) - 1, i_g, mask=m)
    tl.debug_barrier()
    return tl.sum(m.to(tl.int32), 0)


@triton.jit
def own_groups(p_listed, p_maxima, groups, is_listed, floor, top, per_bin, last, N: tl.constexpr):
    """Return the number of this program's groups. If they are listed, groups whose scores all lie behind the bin `last`
    are left out.
    """
    count = tl.cdiv(groups - tl.program_id(0), tl.num_programs(0))
    if is_listed:
        i_g = tl.program_id(0) + tl.arange(0, N) * tl.num_programs(0)  # [N]
        greatest = tl.load(p_maxima + i_g, mask=i_g < groups, other=LEAST)  # [N]
        m = (i_g < groups) & (greatest >= floor) & (bin_of(greatest, top, per_bin) <= last)
        count = listed(p_listed, i_g, m)
    return count


@triton.jit
def top_groups(p_maxima, p_listed, groups, most, N: tl.constexpr):
    """Find a score that at least `most` and about 5/4 · most groups reach. Return its `ordered` key and the number of
    these groups, and list them in `p_listed`. All programs of a row write the same list.
    """
    i_g = tl.arange(0, N)  # [N]
    m = i_g < groups  # [N]
    key = ordered(tl.load(p_maxima + i_g, mask=m, other=LEAST))  # [N]
    low, high = tl.min(key, 0).to(tl.int64), tl.max(key, 0).to(tl.int64) + 1
    count = tl.sum(m.to(tl.int32), 0)
    while (high - low > 1) & (count > most + (most >> 2)):
        middle = (low + high) >> 1
        number = tl.sum((m & (key >= middle.to(tl.int32))).to(tl.int32), 0)
        is_enough = number >= most
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        count = tl.where(is_enough, number, count)
    bound = low.to(tl.int32)
    return bound, listed(p_listed, i_g, m & (key >= bound))


@triton.jit
def scores_of_groups(p_listed, is_listed, first, count, p_logits, p_seen, start, vocabulary, penalty,
                     LOAD: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Return ids, a mask and scores of the groups from place `first` of `count` on, [TOKENS // G, G] each."""
    place = first + tl.arange(0, TOKENS // G)  # [TOKENS // G]
    group = tl.load(p_listed + place, mask=place < tl.where(is_listed, count, 0), other=0, cache_modifier=".cg")
    group = tl.where(is_listed, group, tl.program_id(0) + place * tl.num_programs(0))
    i = group[:, None] * G + tl.arange(0, G)[None, :]  # [TOKENS // G, G]
    m = (place < count)[:, None] & (i < vocabulary)
    x = converted(tl.load(p_logits + start + i, mask=m, other=0), LOAD)
    return i, m, scores_of(x, p_seen, start + i, m, penalty)


# --- Ties -------------------------------------------------------------------------------------------------------------


T = tl.constexpr(1024)


@triton.jit
def tokens_above(p_logits, p_seen, start, vocabulary, penalty, top, floor, scale, key, UNIT: tl.constexpr,
                 LOAD: tl.constexpr):  # fmt: skip
    """Return the number and mass of the tokens with scores above the score of `key`."""
    count, mass = tl.zeros((T,), tl.int64), tl.zeros((T,), tl.int64)  # [T] each
    for first in range(0, vocabulary, T):
        i = first + tl.arange(0, T)  # [T]
        m = i < vocabulary  # [T]
        x = converted(tl.load(p_logits + start + i, mask=m, other=0), LOAD)  # [T]
        score = scores_of(x, p_seen, start + i, m, penalty)  # [T]
        m = m & (score >= floor) & (ordered(score) > key)
        count += m.to(tl.int64)
        mass += tl.where(m, masses_of(weights_of(score, top, scale), UNIT), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def bisected(p_logits, p_seen, start, vocabulary, penalty, top, floor, scale, total, bits, top_p, min_p, most, is_cut,
             UNIT: tl.constexpr, LOAD: tl.constexpr):  # fmt: skip
    """Return the token that the row draws; see `resolved` for the arguments.

    Bisection finds the least key that has at most a target number of tokens, or mass, above it. This is done for top-k,
    top-p, min-p and the draw. The key belongs to the token that exceeds the target, and to its equals.
    """
    kept, target = total, most - 1
    key = ordered(top).to(tl.int64)
    mass, each = total * 0, total * 0
    # Find the bounds of top-k, top-p and min-p, then the key of the drawn token.
    for question in range(4):
        is_wanted = (question == 3) | ((question == 0) & is_cut)
        is_wanted = is_wanted | ((question == 1) & (top_p < 1)) | ((question == 2) & (min_p > 0))
        least = reached_by(top_p, kept)
        if question == 1:
            target = least - 1
        if question == 3:
            target = share_of(kept, bits)
        high = ordered(top).to(tl.int64)
        low = tl.where(is_wanted, ordered(floor).to(tl.int64) - 1, high)
        count, mass = total * 0, total * 0
        while low < high:
            middle = (low + high) >> 1
            number, sum_ = tokens_above(
                p_logits, p_seen, start, vocabulary, penalty, top, floor, scale, middle, UNIT, LOAD
            )
            next_weight = weights_of(ordered_back((middle + 1).to(tl.int32)), top, scale)
            is_enough = tl.where(question == 0, number, sum_) <= target
            is_enough = tl.where(question == 2, next_weight >= min_p, is_enough)
            low, high = tl.where(is_enough, low, middle + 1), tl.where(is_enough, middle, high)
            count, mass = tl.where(is_enough, number, count), tl.where(is_enough, sum_, mass)
        key = high
        each = tl.maximum(masses_of(weights_of(ordered_back(key.to(tl.int32)), top, scale), UNIT), 1)
        if is_wanted:
            if question == 0:
                kept = mass + (most - count) * each
            elif question == 1:
                kept = tl.minimum(kept, mass + (least - mass + each - 1) // each * each)
            elif question == 2:
                kept = tl.minimum(kept, mass)
    # Find the drawn token among its equals, which are ordered by id.
    rest = (target - mass) // each  # equal tokens with lower ids
    token = rest * 0
    for first in range(0, vocabulary, T):
        i = first + tl.arange(0, T)  # [T]
        m = i < vocabulary  # [T]
        x = converted(tl.load(p_logits + start + i, mask=m, other=0), LOAD)  # [T]
        equal = (m & (ordered(scores_of(x, p_seen, start + i, m, penalty)) == key)).to(tl.int64)  # [T]
        token += tl.sum(tl.where((equal > 0) & (tl.cumsum(equal, 0) - equal == rest), i, 0), 0)
        rest -= tl.sum(equal, 0)  # negative once the token is found
    return token
