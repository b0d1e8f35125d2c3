"""Token sampling on a GPU, in three launches. genesis/ops/sample.py has the reference and the meaning of the settings.

1. `chunk_kernel` finds in each chunk of a row the greatest and the least score, whether all logits are finite, and the
   greatest score of each group of ids. If any token can be drawn, it also sums the weights.
2. `bin_kernel` sums for each bin of scores the number of its tokens, or their weights (sample_parts.py). With many rows
   each program has its own bins in shared memory, and adds them to the row's at its end.
3. `draw_kernel` finds from these sums the bins in which top-k, top-p and the draw can end. The tokens of these bins
   become candidates, and the last program of a row sorts them. Groups that cannot have candidates are not read again.

Kernels read the settings of each row on the device, so one graph works for all settings. A row with a small top-k skips
2 and takes its candidates from the groups (sample_parts.py). A row that takes the likeliest token or may draw any token
skips 2 and needs no candidates: it chooses a chunk, then a token of the chunk. No row is sorted completely.

A token differs from the reference's only if the draw is within rounding of the border between two tokens. The rounding
is at most 2^-20 of u, because weights are float32. With penalties, which are rounded to float32, it is
1e-6 · the largest |score| / temperature.

Tiles: T ids of a chunk in groups of G; BINS bins; N candidates; B rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float32, float64, int32, int64
from genesis.kernels import maths
from genesis.kernels.decode.sample_parts import (
    BINS,
    LEAST,
    TOKENS,
    bin_of,
    bisected,
    facts_of_row,
    group_of,
    is_binned,
    is_plain,
    is_small,
    masses_of,
    ordered,
    ordered_back,
    own_groups,
    place_in,
    random_bits,
    reached_by,
    scales_of,
    scores_of,
    scores_of_groups,
    settings_of,
    share_of,
    top_groups,
    units_of,
    weights_of,
)
from genesis.kernels.dependents import allow_next, can_overlap, wait_for_previous
from genesis.kernels.elements import TRITON, converted, work_type
from genesis.ops.shape import contiguous

PROGRAMS = 264  # programs of the last launch: two per SM of an H100 or H200
BIN_PROGRAMS = 528  # programs of the second launch: four per SM
FEW_ROWS = 7  # rows up to which all bins are in global memory
LISTED = tl.constexpr(32)  # programs with more groups leave some out
FIELDS = 6  # of a chunk: greatest and least score, mark of bad logits, sum of weights, greatest logit, sum of exp
FEW = tl.constexpr(512)  # enough candidates for most rows
MANY = tl.constexpr(2048)  # the most candidates that are sorted; `bisected` handles more
PREFIX = tl.constexpr(1024)  # the largest top-k with which all remaining tokens become candidates, whatever they weigh
NOWHERE = tl.constexpr(-9)  # not a bin
MOST = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the largest int64


# --- Chunks and bins --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunks", "fields"])
def chunk_kernel(p_partials, p_maxima, p_tables, p_likely, p_counters, p_logits, p_settings, p_top_k, p_seen,
                 vocabulary, chunks, fields, HAS_LOG_PROBS: tl.constexpr, LOAD: tl.constexpr, OVERLAP: tl.constexpr,
                 T: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Reduce one chunk of T ids in groups of G. The first chunk of a row also clears the counters of later kernels."""
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = chunk * T + tl.arange(0, T)  # [T]
    m = i < vocabulary  # [T]
    at = row * vocabulary + i
    x = converted(tl.load(p_logits + at, mask=m, other=0), LOAD)  # [T]
    temperature, top_p, min_p, penalty, most = settings_of(p_settings, p_top_k, row, vocabulary)
    if p_seen is None and LOAD.primitive_bitwidth == 32:
        score = tl.where(m, tl.minimum(tl.maximum(x, LEAST), -LEAST), LEAST)  # [T]; -0 is as good as 0 here
    else:
        score = scores_of(x, p_seen, at, m, penalty)  # [T]
    # Store the greatest score of each group and the chunk's results.
    greatest_of_group = tl.max(tl.reshape(score, (T // G, G)), 1) + 0.0  # [T / G], without -0
    best = tl.max(greatest_of_group, 0)
    tl.store(p_maxima + (row * chunks + chunk) * (T // G) + tl.arange(0, T // G), greatest_of_group)
    p = p_partials + row * chunks + chunk
    tl.store(p, converted(best, tl.float64))
    tl.store(p + fields, converted(tl.min(tl.where(m, score, float("inf")), 0), tl.float64))
    is_bad = tl.sum(x * 0, 0) != 0  # NaN if a logit is NaN or infinite
    tl.store(p + 2 * fields, converted(is_bad.to(tl.int32), tl.float64))
    if (temperature > 0) & is_plain(top_p, min_p, most, vocabulary):
        weight = tl.exp2((score - best) * scales_of(temperature))  # [T], 0 behind the end
        tl.store(p + 3 * fields, converted(tl.sum(weight, 0), tl.float64))
    if HAS_LOG_PROBS:
        greatest = tl.max(tl.where(m, x, -float("inf")), 0)
        sum_exp = tl.sum(tl.where(m, maths.exp(x - greatest), 0), 0)
        tl.store(p + 4 * fields, converted(greatest, tl.float64))
        tl.store(p + 5 * fields, converted(sum_exp, tl.float64))
    if chunk == 0:
        tl.store(p_counters + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        if is_binned(temperature, top_p, min_p, most, vocabulary, G):
            tl.store(p_tables + row * 2 * BINS + tl.arange(0, 2 * BINS), tl.zeros((2 * BINS,), tl.int64))
            tl.store(p_likely + row, tl.zeros((), tl.int64))


@triton.jit
def shared_bins():
    """Return the address of a table [2, BINS] of 0 in shared memory: low halves, 16 KiB later the high halves."""
    at = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b64 bins[4096]; mov.u32 $0, bins; }", "=r", [], tl.int32, is_pure=False, pack=1
    )
    o_word = at + 8 * tl.arange(0, 2 * BINS)  # [2 * BINS]
    tl.inline_asm_elementwise("st.shared.b64 [$1], 0; // $0", "=r,r", [o_word], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return at


@triton.jit
def add_to_bins(p, at, i, number, m, SHARED: tl.constexpr):
    """Add numbers to the elements i of a table at p, or at the address `at` of shared memory, whose fast additions have
    32 bits: the low half passes on its carry.
    """
    if SHARED:
        tl.inline_asm_elementwise(
            """{ .reg .pred some; .reg .b32 low, high, old; mov.b64 {low, high}, $2; mov.u32 old, 0;
            setp.ge.s32 some, $1, 0;
            @some atom.shared.add.u32 old, [$1], low;
            add.cc.u32 old, old, low; addc.u32 high, high, 0; setp.ne.and.u32 some, high, 0, some;
            @some red.shared.add.u32 [$1 + 16384], high; mov.u32 $0, 0; }""",
            "=r,r,l", [tl.where(m, at + 4 * i, -1), number], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_add(p + tl.where(m, i, 0), number, mask=m & (number > 0), sem="relaxed")


@triton.jit
def add_shared_bins(p, at):
    """Add a table in shared memory to the one at p."""
    tl.debug_barrier()
    i = tl.arange(0, 2 * BINS)  # [2 * BINS]
    text: tl.constexpr = "{ .reg .b32 a, b; ld.shared.u32 a, [$1]; ld.shared.u32 b, [$1 + 16384]; mov.b64 $0, {a, b}; }"
    number = tl.inline_asm_elementwise(text, "=l,r", [at + 4 * i], tl.int64, is_pure=False, pack=1)
    tl.atomic_add(p + i, number, mask=number > 0, sem="relaxed")


@triton.jit(do_not_specialize=["chunks", "fields"])
def bin_kernel(p_tables, p_likely, p_listed, p_maxima, p_partials, p_logits, p_settings, p_top_k, p_seen, vocabulary,
               chunks, fields, LOAD: tl.constexpr, OVERLAP: tl.constexpr, UNIT: tl.constexpr, T: tl.constexpr,
               G: tl.constexpr, CHUNKS: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Sum the tokens and masses of the bins, and the mass of the tokens that min-p keeps. Tokens are counted if top-k
    is set, and masses are added unless top-k leaves only a few tokens.
    """
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    temperature, top_p, min_p, penalty, most = settings_of(p_settings, p_top_k, row, vocabulary)
    if is_binned(temperature, top_p, min_p, most, vocabulary, G):
        top, is_finite, floor, per_bin, scale, sure = facts_of_row(p_partials, fields, row, chunks, temperature, CHUNKS)
        if is_finite:
            p, start, groups, at = p_tables + row * 2 * BINS, row * vocabulary, chunks * (T // G), 0
            p_listed += row * 2 * groups + tl.program_id(0) * tl.cdiv(groups, tl.num_programs(0))
            has_masses = (most == vocabulary) | (most > PREFIX)
            # Tokens of at least the weight `least` are added to bins, none behind the bin `last`. Without top-p, tokens
            # that min-p drops do not count; 2 drops all, because no weight exceeds 1. With top-p, the tokens below
            # `least` together weigh less than what top-p drops.
            least, last = tl.where(has_masses, tl.where(top_p < 1, 0.0, min_p), 2.0), BINS - 1
            if most == vocabulary:
                if top_p < 1:
                    dropped = converted(1 - top_p, tl.float32) * sure * (1 - 2.0**-10) - 2.0**-14
                    least = tl.maximum(dropped, 0.0) / vocabulary
                else:
                    last = tl.minimum((2.0**-16 - tl.log2(min_p)) / scale * per_bin + 1, BINS - 1.0).to(tl.int32)
            p_maxima += row * groups
            is_listed = groups > LISTED * tl.num_programs(0)
            count = own_groups(p_listed, p_maxima, groups, is_listed, floor, top, per_bin, last, CHUNKS * (T // G))
            if SHARED:
                at = shared_bins()
            likely, rest = tl.zeros((TOKENS // 8,), tl.int64), tl.zeros((TOKENS // 8,), tl.int64)  # of 8 tokens each
            for first in tl.range(0, count, TOKENS // G, num_stages=3):
                _, m, score = scores_of_groups(
                    p_listed, is_listed, first, count, p_logits, p_seen, start, vocabulary, penalty, LOAD, G
                )
                m = m & (score >= floor)  # [TOKENS // G, G]
                i_bin = bin_of(score, top, per_bin)
                if most < vocabulary:
                    add_to_bins(p, at, i_bin, tl.full(i_bin.shape, 1, tl.int64), m, SHARED)
                if has_masses | (min_p > 0):
                    weight = tl.where(m, weights_of(score, top, scale), 0.0)
                    mass = masses_of(weight, UNIT)
                    add_to_bins(p, at, BINS + i_bin, mass, m & (weight >= least), SHARED)
                    rest += tl.sum(tl.reshape(tl.where(weight < least, mass, 0), (TOKENS // 8, 8)), 1)
                    if min_p > 0:
                        likely += tl.sum(tl.reshape(tl.where(weight >= min_p, mass, 0), (TOKENS // 8, 8)), 1)
            if SHARED:
                add_shared_bins(p, at)
            if (top_p < 1) & (most == vocabulary):  # the last bin has the mass of tokens that top-p drops in any case
                tl.atomic_add(p + 2 * BINS - 1, tl.sum(rest, 0), sem="relaxed")
            if min_p > 0:
                tl.atomic_add(p_likely + row, tl.sum(likely, 0), sem="relaxed")


# --- The draw ---------------------------------------------------------------------------------------------------------


@triton.jit
def sum_to(cumulated, i_bin):
    """Return the sum over all bins up to i_bin."""
    return tl.sum(tl.where(tl.arange(0, BINS) == i_bin, cumulated, 0), 0)


@triton.jit
def first_above(cumulated, target):
    """Return the first bin at which the cumulated sum exceeds `target`."""
    return tl.minimum(tl.sum((cumulated <= target).to(tl.int32), 0), BINS - 1)


@triton.jit
def ranges_of(counts, masses, likely, bits, top_p, most, vocabulary):
    """Return the bins in which the draw and top-p can end (first and last of each) and the bin in which top-k ends.
    Their tokens are candidates.

    Args:
        counts: cumulated tokens, [BINS].
        masses: cumulated masses, [BINS].
        likely: mass that min-p keeps.
    """
    total, number = tl.max(masses, 0), tl.max(counts, 0)
    k_bin = first_above(counts, most - 1)
    if most <= tl.minimum(PREFIX, vocabulary - 1):  # all remaining tokens are candidates
        draw_first, draw_last, p_first, p_last = k_bin * 0, k_bin, k_bin * 0 + NOWHERE, k_bin * 0 + NOWHERE
        k_bin = k_bin * 0 + NOWHERE
    else:
        is_cut = most < number
        k_bin = tl.where(is_cut, k_bin, NOWHERE)
        low = tl.where(is_cut, sum_to(masses, k_bin - 1), total)  # bounds of the remaining mass
        high = tl.where(is_cut, sum_to(masses, k_bin), total)
        p_first, p_last = k_bin * 0 + NOWHERE, k_bin * 0 + NOWHERE
        if top_p < 1:
            least, most_ = reached_by(top_p, low), reached_by(top_p, high)
            p_first, p_last = first_above(masses, least - 1), first_above(masses, most_ - 1)
            low, high = tl.minimum(low, least), tl.minimum(high, sum_to(masses, p_last))
        low, high = tl.minimum(low, likely), tl.minimum(high, likely)
        draw_first, draw_last = first_above(masses, share_of(low, bits)), first_above(masses, share_of(high, bits))
    return draw_first, draw_last, p_first, p_last, k_bin


@triton.jit
def is_within(i_bin, draw_first, draw_last, p_first, p_last, k_bin):
    within = ((i_bin >= draw_first) & (i_bin <= draw_last)) | ((i_bin >= p_first) & (i_bin <= p_last))
    return within | (i_bin == k_bin)


@triton.jit
def first_sorted(x, i_n, count):
    """Return x [N] with its first `count` elements sorted. The other elements must be equal to each other and greater.

    This is a bitonic sort in loops. `tl.sort` unrolls the loops and takes seconds to compile.
    """
    size = 2
    while size < 2 * count:
        distance = size // 2
        while distance > 0:
            other = tl.gather(x, i_n ^ distance, 0)  # [N]
            takes_less = ((i_n & distance) == 0) == ((i_n & size) == 0)  # [N]
            x = tl.where(takes_less, tl.minimum(x, other), tl.maximum(x, other))  # [N]
            distance //= 2
        size *= 2
    return x


@triton.jit
def resolved(p_candidates, count, counts_aside, masses_aside, likely, total, bits, top, per_bin, scale, top_p, min_p,
             most, is_cut, UNIT: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Draw a token from at most N candidates.

    Args:
        counts_aside: cumulated tokens that are not candidates, [BINS]; None if all tokens that top-k can leave are
            candidates.
        masses_aside: cumulated masses of these tokens, [BINS]; None as above.
        likely: mass that min-p keeps; None if it follows from the candidates.
        total: mass of all tokens; with `is_cut` the remaining mass follows from the candidates instead.
    """
    # Sort the candidates and cumulate their masses.
    i_n = tl.arange(0, N)  # [N]
    m = i_n < count  # [N]
    packed = first_sorted(tl.load(p_candidates + i_n, mask=m, other=MOST), i_n, count)  # [N]
    score = tl.where(m, ordered_back(~(packed >> 32).to(tl.int32)), top)  # [N]
    weight = weights_of(score, top, scale)  # [N]
    mass = tl.where(m, masses_of(weight, UNIT), 0)  # [N]
    place, cumulated = i_n, tl.cumsum(mass, 0)
    if counts_aside is not None:
        i_bin = bin_of(score, top, per_bin)  # [N]
        place = i_n + tl.gather(counts_aside, i_bin, 0)  # [N], in the order of all tokens
        cumulated += tl.gather(masses_aside, i_bin, 0)  # [N]
    # Apply top-k, top-p and min-p to the mass, then draw.
    left = tl.max(tl.where(m & (place < most), cumulated, 0), 0)
    remaining = tl.where(is_cut, left, total)
    kept = remaining
    if top_p < 1:
        is_reached = m & (cumulated >= reached_by(top_p, remaining))  # [N]
        kept = tl.minimum(kept, tl.min(tl.where(is_reached, cumulated, MOST), 0))
    if likely is not None:
        kept = tl.minimum(kept, likely)
    else:
        kept = tl.minimum(kept, tl.sum(tl.where(weight >= min_p, mass, 0), 0))
    drawn = tl.sum((m & (cumulated <= share_of(kept, bits))).to(tl.int32), 0)
    drawn = tl.minimum(drawn, count - 1)
    return tl.sum(tl.where(i_n == drawn, packed & 0xFFFFFFFF, 0), 0)


@triton.jit
def drawn_from(p_candidates, count, counts_aside, masses_aside, likely, total, bits, top, per_bin, scale, top_p, min_p,
               most, is_cut, p_logits, p_seen, start, vocabulary, penalty, floor, UNIT: tl.constexpr,
               LOAD: tl.constexpr):  # fmt: skip
    """Draw a token from any number of candidates; see `resolved` for the arguments."""
    if count <= FEW:
        token = resolved(
            p_candidates, count, counts_aside, masses_aside, likely, total, bits, top, per_bin, scale, top_p, min_p,
            most, is_cut, UNIT, FEW,
        )  # fmt: skip
    elif count <= MANY:
        token = resolved(
            p_candidates, count, counts_aside, masses_aside, likely, total, bits, top, per_bin, scale, top_p, min_p,
            most, is_cut, UNIT, MANY,
        )  # fmt: skip
    else:
        token = bisected(
            p_logits, p_seen, start, vocabulary, penalty, top, floor, scale, total, bits, top_p, min_p, most, is_cut,
            UNIT, LOAD,
        )  # fmt: skip
    return token


@triton.jit
def store_row(p_tokens, p_log_probs, p_partials, p_logits, row, token, is_finite, vocabulary, chunks, fields,
              HAS_LOG_PROBS: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Store the token of a row, and its log-probability from the sums of the chunks."""
    tl.store(p_tokens + row, tl.where(is_finite, token, -1))
    if HAS_LOG_PROBS:
        i_c = tl.arange(0, CHUNKS)  # [CHUNKS]
        p = p_partials + 4 * fields + row * chunks + i_c
        greatest = tl.load(p, mask=i_c < chunks, other=-float("inf"))  # [CHUNKS]
        most = tl.max(greatest, 0)
        sum_exp = tl.sum(tl.load(p + fields, mask=i_c < chunks, other=0) * maths.exp(greatest - most), 0)
        x = converted(tl.load(p_logits + row * vocabulary + tl.where(is_finite, token, 0)), tl.float64)
        log_prob = tl.where(is_finite, x - most - maths.log(sum_exp), float("nan"))
        tl.store(p_log_probs + row, converted(log_prob, p_log_probs.dtype.element_ty))


@triton.jit
def draw_from_chunks(p_partials, fields, p_logits, p_seen, row, chunks, vocabulary, bits, top, temperature, penalty,
                     LOAD: tl.constexpr, UNIT: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Choose a chunk, then a token of the chunk: the likeliest, or by the weights in the order of the ids."""
    is_greedy, scale, inside = temperature == 0, scales_of(temperature), temperature
    i_c = tl.arange(0, CHUNKS)  # [CHUNKS]
    p = p_partials + row * chunks + i_c
    best = tl.load(p, mask=i_c < chunks, other=-float("inf"))  # [CHUNKS]
    chunk = tl.min(tl.where(best == top, i_c, CHUNKS), 0)
    if not is_greedy:
        part = tl.load(p + 3 * fields, mask=i_c < chunks, other=0) * tl.exp2(converted(best - top, tl.float32) * scale)
        chunk, inside = place_in(units_of(part, UNIT), converted(bits, tl.float64) * (2.0**-53))
    i = tl.minimum(chunk, chunks - 1) * T + tl.arange(0, T)  # [T]
    m = i < vocabulary  # [T]
    x = converted(tl.load(p_logits + row * vocabulary + i, mask=m, other=0), LOAD)  # [T]
    score = scores_of(x, p_seen, row * vocabulary + i, m, penalty)  # [T]
    most = tl.max(score, 0)
    token = tl.min(tl.where(score == most, i, vocabulary - 1), 0)
    if not is_greedy:
        at, _ = place_in(units_of(tl.exp2((score - most) * scale), UNIT), inside)
        token = tl.minimum(chunk * T + at, vocabulary - 1)
    return token.to(tl.int64)


@triton.jit(do_not_specialize=["chunks", "fields"])
def draw_kernel(p_tokens, p_log_probs, p_candidates, p_listed, p_maxima, p_tables, p_likely, p_counters, p_partials,
                p_logits, p_keys, p_settings, p_top_k, p_seen, vocabulary, chunks, fields,
                HAS_LOG_PROBS: tl.constexpr, LOAD: tl.constexpr, OVERLAP: tl.constexpr, UNIT: tl.constexpr,
                T: tl.constexpr, G: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Gather candidates. The last program of a row draws."""
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    temperature, top_p, min_p, penalty, most = settings_of(p_settings, p_top_k, row, vocabulary)
    top, is_finite, floor, per_bin, scale, _ = facts_of_row(p_partials, fields, row, chunks, temperature, CHUNKS)
    worker, workers, start, token = tl.program_id(0), tl.num_programs(0), row * vocabulary, row * 0
    bits, is_last = random_bits(p_keys, row), worker == 0
    if (temperature == 0) | is_plain(top_p, min_p, most, vocabulary) | (is_finite == 0):
        if is_last & is_finite:
            token = draw_from_chunks(
                p_partials, fields, p_logits, p_seen, row, chunks, vocabulary, bits, top, temperature, penalty, LOAD,
                UNIT, T, CHUNKS,
            )  # fmt: skip
    else:
        groups = chunks * (T // G)
        p_candidates, p_counters = p_candidates + row * MANY, p_counters + row * 2
        p_maxima, p_listed = p_maxima + row * groups, p_listed + row * 2 * groups
        o_bin, p_bin = tl.arange(0, BINS), p_tables + row * 2 * BINS + tl.arange(0, BINS)  # [BINS] each
        likely = tl.where(min_p > 0, tl.load(p_likely + row), MOST)
        # Find the bins whose tokens are candidates, and the groups that may have them. If top-k leaves few tokens, the
        # first programs share the groups that reach a bound.
        is_few = is_small(most, vocabulary, G)
        draw_first, draw_last, p_first, p_last, k_bin = 0, BINS, NOWHERE, NOWHERE, NOWHERE
        if is_few:
            bound, count = top_groups(p_maxima, p_listed, groups, most, CHUNKS * (T // G))
            is_listed, least, begin = is_few, ordered_back(bound), worker
            workers = tl.minimum(tl.cdiv(count, TOKENS // G), workers)
            step = workers
        else:
            counts, masses = tl.cumsum(tl.load(p_bin), 0), tl.cumsum(tl.load(p_bin + BINS), 0)  # [BINS] each
            draw_first, draw_last, p_first, p_last, k_bin = ranges_of(
                counts, masses, likely, bits, top_p, most, vocabulary
            )
            p_listed += worker * tl.cdiv(groups, workers)
            last = tl.maximum(tl.maximum(draw_last, p_last), k_bin)
            is_listed, least, begin, step = groups > LISTED * workers, floor, worker * 0, worker * 0 + 1
            count = own_groups(p_listed, p_maxima, groups, is_listed, floor, top, per_bin, last, CHUNKS * (T // G))
        # Store this program's candidates before it is counted; the row's last program draws.
        for first in tl.range(begin * (TOKENS // G), count, step * (TOKENS // G), num_stages=3):
            i, m, score = scores_of_groups(
                p_listed, is_listed, first, count, p_logits, p_seen, start, vocabulary, penalty, LOAD, G
            )
            i_bin = bin_of(score, top, per_bin)  # [TOKENS // G, G]
            m = m & (score >= least) & is_within(i_bin, draw_first, draw_last, p_first, p_last, k_bin)
            slot = tl.atomic_add(p_counters + i * 0, 1, mask=m, sem="relaxed")  # [TOKENS // G, G]
            packed = ((~ordered(score)).to(tl.int64) << 32) | i.to(tl.int64)
            tl.store(p_candidates + slot, packed, mask=m & (slot < MANY))
        tl.debug_barrier()
        is_last = worker < workers
        if is_last:
            is_last = tl.atomic_add(p_counters + 1, 1, sem="acq_rel") == workers - 1
        if is_last:
            number = tl.load(p_counters)
            if is_few:
                token = drawn_from(
                    p_candidates, number, None, None, None, row * 0, bits, top, per_bin, scale, top_p, min_p, most,
                    is_few, p_logits, p_seen, start, vocabulary, penalty, floor, UNIT, LOAD,
                )  # fmt: skip
            else:
                count_of_bin, mass_of_bin = tl.load(p_bin), tl.load(p_bin + BINS)  # [BINS] each
                within = is_within(o_bin, draw_first, draw_last, p_first, p_last, k_bin)  # [BINS]
                counts_aside = tl.cumsum(tl.where(within, 0, count_of_bin), 0)  # [BINS]
                masses_aside = tl.cumsum(tl.where(within, 0, mass_of_bin), 0)  # [BINS]
                is_cut = (most <= tl.minimum(PREFIX, vocabulary - 1)) | (most < tl.sum(count_of_bin, 0))
                token = drawn_from(
                    p_candidates, number, counts_aside, masses_aside, likely, tl.sum(mass_of_bin, 0), bits, top,
                    per_bin, scale, top_p, min_p, most, is_cut, p_logits, p_seen, start, vocabulary, penalty, floor,
                    UNIT, LOAD,
                )  # fmt: skip
    if is_last:
        store_row(
            p_tokens, p_log_probs, p_partials, p_logits, row, token, is_finite, vocabulary, chunks, fields,
            HAS_LOG_PROBS, CHUNKS,
        )  # fmt: skip


# --- Launches ---------------------------------------------------------------------------------------------------------


@cuda_impl("sample")
def sample_on_device(
    out: tuple[Array, Array],
    logits: Array,
    keys: Array,
    settings: Array,
    top_k: Array,
    seen: Array | None = None,
    log_probs: bool = False,
) -> None:
    rows, vocabulary = logits.shape
    device = logits.device
    logits, keys, settings, top_k = (contiguous(x) for x in (logits, keys, settings, top_k))
    seen = None if seen is None else contiguous(seen)
    tile = min(1024 if rows <= 2 else 2048, max(16, triton.next_power_of_2(vocabulary)))
    chunks = triton.cdiv(vocabulary, tile)
    group = min(tile, group_of(vocabulary))
    groups = chunks * (tile // group)
    # Programs per row, so few that all programs of a launch run at once.
    binning, drawing = (max(1, min(chunks, n // max(rows, 1))) for n in (BIN_PROGRAMS, PROGRAMS))
    partials, maxima = empty((FIELDS, rows, chunks), float64, device), empty((rows, groups), float32, device)
    listed, counters = empty((rows, 2 * groups), int32, device), empty((rows, 2), int32, device)
    tables, likely = empty((rows, 2, BINS.value), int64, device), empty((rows,), int64, device)
    candidates = empty((rows, MANY.value), int64, device)
    sizes = (vocabulary, chunks, rows * chunks)
    common = {"LOAD": TRITON[work_type(logits.dtype).name], "OVERLAP": can_overlap(logits), "T": tile, "G": group}
    # The weights add up to at most 2^62, and the likeliest token's weight is at most 2^44.
    unit = float(2 ** min(44, 62 - (vocabulary - 1).bit_length()))
    later = {"UNIT": unit, "CHUNKS": triton.next_power_of_2(chunks), **common}
    warps = max(1, min(8 if rows <= 8 else 2, tile // 256))
    launch(
        chunk_kernel, (chunks, rows), partials, maxima, tables, likely, counters, logits, settings, top_k, seen,
        *sizes, HAS_LOG_PROBS=log_probs, **common, num_warps=warps,
    )  # fmt: skip
    launch(
        bin_kernel, (binning, rows), tables, likely, listed, maxima, partials, logits, settings, top_k, seen, *sizes,
        SHARED=rows > FEW_ROWS and not is_interpreted(), **later, num_warps=8, maxnreg=64 if rows > FEW_ROWS else 128,
    )  # fmt: skip
    launch(
        draw_kernel, (drawing, rows), *out, candidates, listed, maxima, tables, likely, counters, partials, logits,
        keys, settings, top_k, seen, *sizes, HAS_LOG_PROBS=log_probs, **later, num_warps=8, maxnreg=128,
    )  # fmt: skip


# --- The update of rows after a draw ----------------------------------------------------------------------------------


ROWS = 512  # rows that the program updates at a time


@triton.jit
def next_tokens_kernel(p_drawn, p_log_probs, p_stops, p_tokens, p_lengths, p_left, p_keys, p_seen, p_ring,
                       p_ring_log_probs, p_step, rows, places, vocabulary, STOPS: tl.constexpr,
                       HAS_LOG_PROBS: tl.constexpr, OVERLAP: tl.constexpr, N: tl.constexpr,
                       B: tl.constexpr):  # fmt: skip
    """Update all rows in one program.

    Args:
        vocabulary: ids per row of `p_seen`; 0 if tokens are not marked.
        STOPS: stop ids per row, in a tile of N columns.
    """
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    step = tl.load(p_step)
    place = (step % places) * rows
    for start in range(0, rows, B):
        i_b = start + tl.arange(0, B)  # [B]
        m_b = i_b < rows  # [B]
        token = tl.load(p_drawn + i_b, mask=m_b, other=-1)  # [B]
        left = tl.load(p_left + i_b, mask=m_b, other=0)  # [B]
        length = tl.load(p_lengths + i_b, mask=m_b, other=0)  # [B]
        position = tl.load(p_keys + i_b * 3 + 2, mask=m_b, other=0)  # [B]
        # Find rows that stop, then store tokens and counters of active rows.
        is_active = left > 0
        is_stop = token == -1  # [B]
        if STOPS > 0:
            i_n = tl.arange(0, N)  # [N]
            m = m_b[:, None] & (i_n < STOPS)[None, :]  # [B, N]
            stop = tl.load(p_stops + i_b[:, None] * STOPS + i_n[None, :], mask=m, other=-1)  # [B, N]
            is_stop = is_stop | (tl.max((stop == token[:, None]).to(tl.int32), 1) > 0)  # [B]
        tl.debug_barrier()  # finishes all loads before any store
        tl.store(p_ring + place + i_b, tl.where(is_active, token, -2), mask=m_b)
        if HAS_LOG_PROBS:
            log_prob = tl.load(p_log_probs + i_b, mask=m_b, other=0)  # [B]
            shown = tl.where(is_active, log_prob, float("nan"))
            tl.store(p_ring_log_probs + place + i_b, shown, mask=m_b)
        tl.store(p_left + i_b, tl.where(is_stop, 0, left - 1), mask=m_b & is_active)
        m_token = m_b & is_active & (token != -1)  # [B]
        tl.store(p_tokens + i_b, token, mask=m_token)
        tl.store(p_lengths + i_b, length + 1, mask=m_token)
        tl.store(p_keys + i_b * 3 + 2, position + 1, mask=m_token)
        if vocabulary > 0:
            marked = tl.full((B,), 1, tl.int1)
            tl.store(p_seen + i_b.to(tl.int64) * vocabulary + token, marked, mask=m_token)
    tl.debug_barrier()
    tl.store(p_step, step + 1)


@cuda_impl("next_tokens")
def next_tokens(
    out: tuple[()], drawn: Array, log_probs: Array, stops: Array, tokens: Array, lengths: Array, left: Array,
    keys: Array, seen: Array, ring: Array, ring_log_probs: Array, step: Array,
) -> None:  # fmt: skip
    (places, rows), (_, count) = ring.shape, stops.shape
    height = min(ROWS, max(2, triton.next_power_of_2(rows)))
    launch(
        next_tokens_kernel, 1, drawn, log_probs, stops, tokens, lengths, left, keys, seen, ring, ring_log_probs, step,
        rows, places, seen.shape[1], STOPS=count, HAS_LOG_PROBS=bool(log_probs.size), OVERLAP=can_overlap(drawn),
        N=max(2, triton.next_power_of_2(count)), B=height, num_warps=max(1, min(height // 32, 8)),
    )  # fmt: skip
