"""Log-probabilities of given ids: several sequences in one forward pass, logits only where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import genesis
from genesis.nn import functional as F
from genesis_models.blocks import CausalLM
from genesis_models.engine.engine import check_prompt

PACKED = 4096  # tokens of a forward pass, unless one sequence has more
SCORED = 256  # positions whose logits are there at a time


class Score(NamedTuple):
    """The log-probability of an id after those before it, and the likeliest ids with theirs."""

    log_prob: float
    top: list[tuple[int, float]]


def scores(model: CausalLM, sequences: Sequence[tuple[Sequence[int], int]], top: int = 0) -> Iterator[list[Score]]:
    """For each sequence the scores of its ids from a position on.

    Args:
        sequences: ids, and the first position that is scored; before the first id there is nothing, so at least 1.
        top: how many of the likeliest ids are told.

    Raises:
        UsageError: more ids than the context holds. ModelError: an id beyond the vocabulary.
    """
    for ids, _ in sequences:
        for part in (ids[:-1], ids[-1:]) if len(ids) > 1 else ():
            check_prompt(model, part, room=0)
    was_training = model.training
    model.eval()
    try:
        # Where rotary angles depend on a sequence's length, one that is longer than trained passes alone.
        for batch in _packed(sequences, min(PACKED, model.config.packed_length)):
            yield from _scored(model, batch, top)
    finally:
        model.train(was_training)


def _packed(sequences: Sequence[tuple[Sequence[int], int]], most: int) -> Iterator[list[tuple[Sequence[int], int]]]:
    """The sequences in order, as many together as a forward pass of `most` tokens takes."""
    batch: list[tuple[Sequence[int], int]] = []
    for each in sequences:
        if batch and sum(len(ids) for ids, _ in batch) + len(each[0]) > most:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _scored(model: CausalLM, batch: list[tuple[Sequence[int], int]], top: int) -> Iterator[list[Score]]:
    counts = [max(0, len(ids) - max(first, 1)) for ids, first in batch]
    if not any(counts):
        yield from ([] for _ in batch)
        return
    inputs = [np.asarray(ids[:-1], np.int64) for ids, _ in batch]
    begins = np.cumsum([0, *map(len, inputs)])
    rows = np.concatenate([np.arange(e - n, e) for e, n in zip(begins[1:], counts, strict=True)])
    wanted = np.concatenate(
        [np.asarray(ids[len(ids) - n :], np.int64) for (ids, _), n in zip(batch, counts, strict=True)]
    )
    device = model.model.embed_tokens.weight.device
    positions = np.concatenate([np.arange(len(each)) for each in inputs])
    with genesis.no_grad():
        ids = genesis.tensor(np.concatenate(inputs)[None], device=device)
        places = genesis.tensor(positions[None], device=device) if len(batch) > 1 else None
        hidden = model.hidden_states(ids, places)[0]  # [T, H]
        found: list[Score] = []
        for begin in range(0, len(rows), SCORED):
            part = genesis.tensor(rows[begin : begin + SCORED], device=device)
            chances = F.log_softmax(model.logits(hidden[part]).float(), 1)
            ids = genesis.tensor(wanted[begin : begin + SCORED], device=device)
            chosen = chances.gather(1, ids[:, None])[:, 0].cpu().numpy().tolist()
            tops: list[list[tuple[int, float]]] = [[] for _ in chosen]
            if top:
                values, likeliest = (each.cpu().numpy().tolist() for each in genesis.topk(chances, top))
                tops = [[*zip(i, v, strict=True)] for i, v in zip(likeliest, values, strict=True)]
            found += map(Score, chosen, tops)
    for end, count in zip(np.cumsum(counts), counts, strict=True):
        yield found[end - count : end]
