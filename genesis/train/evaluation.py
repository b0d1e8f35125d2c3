"""Held-out loss, perplexity, bits per byte and token accuracy. The logits never exist whole here either."""

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
from genesis.train.ranks import ALONE, Ranks
from genesis.train.shards import loss_and_hits
from genesis.train.state import LanguageModel


@dataclass(frozen=True)
class Evaluation:
    """What was found on held-out text.

    Attributes:
        loss: mean cross entropy of a target token, in nats.
        bits_per_byte: loss in bits times targets per byte of the text that they stand for, which tokenizers of any
            kind share as a scale.
        targets, batches: how much was measured.
        token_accuracy: the share of targets that are the likeliest token.
        gzip_bits_per_byte: what `gzip -9` gets, None where that has no meaning.
        sets: the same of each named set; this is all of them together.
    """

    loss: float
    bits_per_byte: float
    targets: int
    batches: int
    token_accuracy: float
    gzip_bits_per_byte: float | None = None
    sets: Mapping[str, Evaluation] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """e^loss, inf where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def metrics(self, prefix: str = "eval/") -> dict[str, float | int]:
        """The figures under their names: `eval/loss`, …, and `eval/<name>/loss`, … of each set."""
        gzip = self.gzip_bits_per_byte
        own = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            **({} if gzip is None else {"gzip_bits_per_byte": gzip}),
            "token_accuracy": self.token_accuracy,
            "num_tokens": self.targets,
        }
        found = {prefix + name: value for name, value in own.items()}
        for name, each in self.sets.items():
            found |= each.metrics(f"{prefix}{name}/")
        return found


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
    """Measure `model` on held-out samples, in their own order, each set alone.

    Args:
        max_batches: of each set.
        stop: asked between batches; when it says so the measurement is given up and None returned.
        progress: takes the batches that were measured, and all.
        ranks: they share the batches.
    """
    was_training, sets, turns = model.training, {}, itertools.count()
    loaders = {
        name: PackedLoader(tokens, batch_size=batch_size, seq_len=seq_len, seed=0, shuffle=False)
        for name, tokens in (held_out.sets or {"": held_out.tokens}).items()
    }
    counts = {name: min(loader.num_batches(0), max_batches or sys.maxsize) for name, loader in loaders.items()}
    total = sum(counts.values())

    def goes_on() -> bool:
        if stop():
            return False
        progress(min(next(turns) * ranks.size, total), total)
        return True

    model.eval()
    try:
        for name, loader in loaders.items():
            measured = _measured(model, loader, counts[name], device, goes_on, ranks)
            if measured is None:
                return None
            sets[name] = measured
        progress(total, total)
    finally:
        model.train(was_training)
    gzip = held_out.gzip_bits_per_byte
    if not held_out.sets:
        return replace(sets[""], gzip_bits_per_byte=gzip)
    targets = sum(each.targets for each in sets.values())
    loss = math.fsum(each.loss * each.targets for each in sets.values()) / targets
    hits = math.fsum(each.token_accuracy * each.targets for each in sets.values())
    batches = sum(each.batches for each in sets.values())
    return Evaluation(loss, _bits(loss, held_out.tokens), targets, batches, hits / targets, gzip, sets)


def _measured(
    model: LanguageModel, loader: PackedLoader, count: int, device: Device, goes_on: Callable[[], bool], ranks: Ranks
) -> Evaluation | None:
    """The figures of the loader's first `count` batches."""
    losses, hits, targets = list[float](), 0.0, 0
    for first in range(0, count, ranks.size):
        if not goes_on():
            return None
        batches = [loader.batch(0, index) for index in range(first, min(first + ranks.size, count))]
        mine = batches[ranks.rank : ranks.rank + 1]
        figures = ranks.in_turn(loss_and_hits(model, mine[0], device) if mine else (0.0, 0.0))
        losses += figures[: ranks.size]
        hits += sum(figures[ranks.size :])
        targets += sum(batch.num_targets for batch in batches)
    loss = math.fsum(losses) / targets
    return Evaluation(loss, _bits(loss, loader.tokens), targets, count, hits / targets)


def _bits(loss: float, tokens: TokenSet) -> float:
    return loss / math.log(2) * tokens.num_targets / tokens.predicted_bytes
