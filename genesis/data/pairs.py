"""Samples of two sequences: the two answers of a pair, or a judged answer and another prompt's answer.

Both sequences begin with the prompt. They are adjacent in the stream, so they always share a row. `share_prompts`
leaves out the prompt of the second sequence, whose tokens then attend to the first one's prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.data.documents import Ints, TokenSet
from genesis.errors import DataError

_BLOCK = 4096  # samples


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Return the ranges start … start + count - 1, concatenated, int64 `[sum of counts]`."""
    before = np.cumsum(counts) - counts
    found: Ints = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return found


def _copied(tokens: TokenSet, starts: Ints, counts: Ints, splits: Ints) -> TokenSet:
    """Return samples that join parts of the stream, int64 `[S, parts]`, and are split at `splits`."""
    lengths = counts.sum(1)
    mask = None if tokens.mask is None else _gathered(tokens.mask, starts, counts)
    stream, first = _gathered(tokens.stream, starts, counts), np.cumsum(lengths) - lengths
    return replace(tokens, stream=stream, starts=first, lengths=lengths, mask=mask, splits=splits)


def _gathered(values: npt.NDArray[Any], starts: Ints, counts: Ints) -> npt.NDArray[Any]:
    """Return parts of `values`, int64 `[S, parts]`, concatenated. Indices exist for a few samples at a time."""
    blocks = [slice(first, first + _BLOCK) for first in range(0, max(len(starts), 1), _BLOCK)]
    return np.concatenate([values[ranges(starts[block].reshape(-1), counts[block].reshape(-1))] for block in blocks])


def share_prompts(tokens: TokenSet) -> TokenSet:
    """Return samples whose second sequence leaves out the prompt, except for its last token, which predicts the answer.

    What is left out is the common beginning of both sequences up to the last token before the first target of either.
    """
    assert tokens.splits is not None and tokens.mask is not None
    begins = np.stack([tokens.starts, tokens.starts + tokens.splits], axis=1)  # [S, 2]
    targets = np.append(np.flatnonzero(tokens.mask), len(tokens.mask))
    prompts = (targets[np.searchsorted(targets, begins)] - begins).min(1)
    prompts = np.minimum(prompts, np.minimum(tokens.splits, tokens.lengths - tokens.splits))
    first, second = (_gathered(tokens.stream, begins[:, i : i + 1], prompts[:, None]) for i in (0, 1))
    differ, before = np.flatnonzero(first != second), np.cumsum(prompts) - prompts
    common = np.append(differ, len(first))[np.searchsorted(differ, before)] - before
    shared = np.maximum(np.minimum(common, prompts) - 1, 0)
    counts = np.stack([tokens.splits, tokens.lengths - tokens.splits - shared], axis=1)
    begins[:, 1] += shared
    return replace(_copied(tokens, begins, counts, tokens.splits), shared=shared)


def fit_pairs(tokens: TokenSet, seq_len: int) -> tuple[TokenSet, npt.NDArray[np.bool_]]:
    """Truncate pairs that are longer than a row: cut both answers after the largest number of tokens that fits.

    Returns:
        All pairs, and a mask `[S]` of those that still have two different answers with a target each.
    """
    assert tokens.splits is not None
    shared = np.zeros_like(tokens.splits) if tokens.shared is None else tokens.shared
    first, last, room = tokens.splits, tokens.lengths - tokens.splits, seq_len + shared
    shorter = np.minimum(first, last + shared)
    most = np.where(2 * shorter <= room, room - shorter, room // 2)
    kept = np.stack([np.minimum(first, most), np.clip(most - shared, 1, last)], axis=1)
    is_cut = tokens.lengths > seq_len
    kept[~is_cut] = np.stack([first, last], axis=1)[~is_cut]
    begins = np.stack([tokens.starts, tokens.starts + first], axis=1)
    found = _copied(tokens, begins, kept, kept[:, 0])
    assert found.splits is not None
    middle, ends = found.starts + found.splits, found.starts + found.lengths
    is_left = (found.targets_between(found.starts, middle) > 0) & (found.targets_between(middle, ends) > 0)
    for n in np.flatnonzero(is_cut & (kept[:, 0] == kept[:, 1] + shared)).tolist():
        sides = (found.stream[found.starts[n] + shared[n] : middle[n]], found.stream[middle[n] : ends[n]])
        is_left[n] &= not np.array_equal(*sides)
    return found, is_left


def mismatched(tokens: TokenSet, seq_len: int) -> TokenSet:
    """Append to each judged answer a second sequence: its prompt with the answer of the sample before it.

    KTO estimates the KL divergence from them. The first sample gets the last one's answer. The appended sequence is cut
    where the row ends; each sample has at most `seq_len` // 2 tokens, so at least one token of the answer remains. Both
    sequences share the prompt.

    Raises:
        DataError: there is only one sample.
    """
    if len(tokens) < 2:
        what = "the objective compares each answer with the answer to another prompt, but the set has a single answer"
        raise DataError(what, next="add records of judged answers, or hold out more")
    assert tokens.mask is not None
    targets = np.flatnonzero(tokens.mask)
    first_target = targets[np.searchsorted(targets, tokens.starts)]
    prompts, ends = first_target - tokens.starts, tokens.starts + tokens.lengths
    others = np.minimum(np.roll(ends - first_target, 1), seq_len - tokens.lengths - prompts)
    starts = np.stack([tokens.starts, tokens.starts, np.roll(first_target, 1)], axis=1)
    counts = np.stack([tokens.lengths, prompts, others], axis=1)
    return share_prompts(_copied(tokens, starts, counts, tokens.lengths))
