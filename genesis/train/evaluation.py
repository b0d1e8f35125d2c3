"""Held-out loss, perplexity and bits per byte. The logits never exist whole here either."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from genesis.backend import Device
from genesis.data.loader import PackedLoader
from genesis.data.pipeline import HeldOut
from genesis.train.ranks import ALONE, Ranks
from genesis.train.shards import summed_loss
from genesis.train.state import LanguageModel

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """What was found on held-out text.

    Attributes:
        loss: mean cross entropy of a target token, in nats.
        bits_per_byte: loss in bits times targets per byte of the text that they stand for, which tokenizers of any
            kind share as a scale.
        targets, batches: how much was measured.
    """

    loss: float
    bits_per_byte: float
    targets: int
    batches: int

    @property
    def perplexity(self) -> float:
        """e^loss, inf where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    model: LanguageModel,
    held_out: HeldOut,
    *,
    batch_size: int,
    seq_len: int,
    max_batches: int | None,
    device: Device,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks = ALONE,
) -> Evaluation | None:
    """Measure `model` on held-out samples, in their own order.

    Args:
        stop: asked between batches; when it says so the measurement is given up and None returned.
        progress: takes the batches that were measured, and all.
        ranks: they share the batches.
    """
    loader = PackedLoader(held_out.tokens, batch_size=batch_size, seq_len=seq_len, seed=0, shuffle=False)
    count = loader.num_batches(0)
    count = count if max_batches is None else min(count, max_batches)
    losses, targets, was_training = [], 0, model.training
    model.eval()
    try:
        for first in range(0, count, ranks.size):
            if stop():
                return None
            progress(first, count)
            batches = [loader.batch(0, index) for index in range(first, min(first + ranks.size, count))]
            mine = batches[ranks.rank : ranks.rank + 1]
            losses += ranks.in_turn([summed_loss(model, batch, device) for batch in mine] or [0.0])
            targets += sum(batch.num_targets for batch in batches)
        progress(count, count)
    finally:
        model.train(was_training)
    mean = math.fsum(losses) / targets
    all_targets = held_out.tokens.num_targets
    bits = mean / math.log(2) * all_targets / held_out.tokens.predicted_bytes
    return Evaluation(mean, bits, targets, count)
