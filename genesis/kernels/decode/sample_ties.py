"""The draw of a row with so many candidates (equal logits, mostly) that they do not fit in a tile: one program bisects.

It passes over the whole row some twenty times for each bound, which takes milliseconds; few rows come here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.decode.sample_bins import (
    masses_of,
    ordered,
    ordered_back,
    reached_by,
    scores_of,
    share_of,
    weights_of,
)
from genesis.kernels.types import converted

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
