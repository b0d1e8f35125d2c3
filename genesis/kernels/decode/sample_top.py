"""Candidates of a row with a small top-k, which need no sums over all tokens.

Chunks leave the greatest score of each group of ids. Of these about the k-th greatest is a bound which at least k
tokens reach, and few more where the likeliest tokens are in different groups: of k in n groups, n · ln(n / (n - k)).
Groups that reach it are read again, and no others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.decode.sample_bins import LEAST, ordered, scores_of
from genesis.kernels.types import converted

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
