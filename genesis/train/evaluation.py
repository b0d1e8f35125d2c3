"""Held-out loss, perplexity, bits per byte and token accuracy. The logits are never materialized in full."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from genesis.backend import Device
from genesis.data.documents import TokenSet
from genesis.data.loader import PackedLoader
from genesis.data.pipeline import HeldOut
from genesis.train.objective import LanguageModel, Objective
from genesis.train.ranks import ALONE, Ranks
from genesis.train.step import measure


@dataclass(frozen=True)
class Evaluation:
    """The results on held-out text.

    Attributes:
        loss: mean loss per target; for next tokens the cross entropy in nats.
        targets: number of measured targets.
        batches: number of measured batches.
        figures: the objective's figures, as means over targets.
        bits_per_byte: bits per byte of the predicted text, which is comparable across tokenizers. None if the loss is
            not a cross entropy.
        gzip_bits_per_byte: the result of `gzip -9`; None if it has no meaning for the data.
        sets: the results of each named set; the other attributes cover all sets.
        sums: sum of each figure over the targets.
    """

    loss: float
    targets: int
    batches: int
    figures: Mapping[str, float]
    bits_per_byte: float | None = None
    gzip_bits_per_byte: float | None = None
    sets: Mapping[str, Evaluation] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def perplexity(self) -> float:
        """Return e^loss, inf on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def metrics(self, prefix: str = "eval/") -> dict[str, float | int]:
        """Return the results under their names: `eval/loss`, …, and `eval/<name>/loss`, … for each set."""
        bits, gzip = self.bits_per_byte, self.gzip_bits_per_byte
        own = {
            "loss": self.loss,
            **({} if bits is None else {"perplexity": self.perplexity, "bits_per_byte": bits}),
            **({} if gzip is None else {"gzip_bits_per_byte": gzip}),
            **self.figures,
            "num_tokens": self.targets,
        }
        found = {prefix + name: value for name, value in own.items()}
        for name, each in self.sets.items():
            found |= each.metrics(f"{prefix}{name}/")
        return found


def evaluate(
    objective: Objective,
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
    """Measure `model` on held-out samples in their original order, each set separately.

    Args:
        max_batches: limit per set.
        stop: called between batches; if it returns true, `evaluate` gives up and returns None.
        progress: called with the number of measured batches and the total.
        ranks: share the batches.
    """
    was_training, sets, turns = model.training, {}, itertools.count()
    loaders = {
        name: PackedLoader(tokens, batch_size=batch_size, seq_len=seq_len, seed=0, shuffle=False)
        for name, tokens in (held_out.sets or {"": held_out.tokens}).items()
    }
    counts = {name: min(loader.num_batches(0), max_batches or sys.maxsize) for name, loader in loaders.items()}
    total = sum(counts.values())

    def may_continue() -> bool:
        if stop():
            return False
        progress(min(next(turns) * ranks.size, total), total)
        return True

    # Measure each set; the ranks take the batches in turn.
    model.eval()
    try:
        for name, loader in loaders.items():
            measured = _measure_batches(objective, model, loader, counts[name], device, may_continue, ranks)
            if measured is None:
                return None
            sets[name] = measured
        progress(total, total)
    finally:
        model.train(was_training)
    gzip = held_out.gzip_bits_per_byte if objective.is_cross_entropy else None
    if not held_out.sets:
        return replace(sets[""], gzip_bits_per_byte=gzip)
    # The totals over all sets are means weighted by targets.
    targets, batches = (sum(getattr(each, name) for each in sets.values()) for name in ("targets", "batches"))
    loss = math.fsum(each.loss * each.targets for each in sets.values()) / targets
    sums = {name: math.fsum(each.sums[name] for each in sets.values()) for name in objective.held_out_figures}
    figures = objective.means(sums, targets)
    return Evaluation(loss, targets, batches, figures, _bits(objective, loss, held_out.tokens), gzip, sets, sums)


def _measure_batches(
    objective: Objective,
    model: LanguageModel,
    loader: PackedLoader,
    count: int,
    device: Device,
    may_continue: Callable[[], bool],
    ranks: Ranks,
) -> Evaluation | None:
    """Return the results of the loader's first `count` batches, or None if `may_continue` returns false."""
    names = objective.held_out_figures
    losses, sums, targets = list[float](), dict.fromkeys(names, 0.0), 0
    for first in range(0, count, ranks.size):
        if not may_continue():
            return None
        batches = [loader.batch(0, index) for index in range(first, min(first + ranks.size, count))]
        mine = batches[ranks.rank : ranks.rank + 1]
        own = measure(objective, model, mine[0], device) if mine else [0.0] * (1 + len(names))
        values = ranks.in_turn(own)
        losses += values[: ranks.size]
        for number, name in enumerate(names, start=1):
            sums[name] += sum(values[number * ranks.size : (number + 1) * ranks.size])
        targets += sum(map(objective.num_targets, batches))
    loss = math.fsum(losses) / targets
    bits = _bits(objective, loss, loader.tokens)
    return Evaluation(loss, targets, count, objective.means(sums, targets), bits, sums=sums)


def _bits(objective: Objective, loss: float, tokens: TokenSet) -> float | None:
    if not objective.is_cross_entropy:
        return None
    return loss / math.log(2) * tokens.num_targets / tokens.predicted_bytes
