"""Everything that a run must get back to go on bit by bit, and H, the hash that says whether it did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from genesis.array import Array
from genesis.data.loader import PackedLoader
from genesis.files.hashing import StateHash
from genesis.optim import Optimizer
from genesis.tensor import Tensor
from genesis.train.objective import LanguageModel, NextTokens, Objective
from genesis.train.optimizer import optimizer_counts
from genesis.train.ranks import ALONE, Ranks
from genesis.train.snapshot import Snapshot


@dataclass
class Interval:
    """Sums since the last row of metrics; saved with a checkpoint, so that a resumed run writes the same rows."""

    loss_sum: float = 0.0
    targets: int = 0
    figures: tuple[float, ...] = ()  # sums of the objective's; empty before the first step

    def add(self, loss_sum: float, targets: int, figures: Sequence[float]) -> None:
        """Add those of a step."""
        before = self.figures or (0.0,) * len(figures)
        self.figures = tuple(old + new for old, new in zip(before, figures, strict=True))
        self.loss_sum += loss_sum
        self.targets += targets

    @property
    def loss(self) -> float:
        """Mean loss of a target token."""
        return self.loss_sum / max(self.targets, 1)


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far, the first of several that are equal.

    Attributes:
        step: -1 before there is one.
        targets: target tokens that were measured.
        since: evaluations after it.
    """

    step: int = -1
    loss: float = math.inf
    targets: int = 0
    since: int = 0

    def after(self, step: int, loss: float, targets: int) -> Best:
        """The best evaluation once `step` has this loss. A loss that is not finite is never the best, and one over
        other targets, as a resumed run may measure, is not compared with those before.
        """
        is_lower = math.isfinite(loss) and (loss < self.loss or targets != self.targets)
        return Best(step, loss, targets) if is_lower else replace(self, since=self.since + 1)

    def to_json(self) -> dict[str, Any]:
        """Its values; JSON has no infinity for the loss before there is one."""
        return {**asdict(self), "loss": self.loss if self.step >= 0 else None}


@dataclass(frozen=True)
class FrozenBase:
    """A model that a run reads and never changes: the sha256 of its files, and the names of its parameters."""

    sha256: str
    parameters: frozenset[str]


@dataclass
class TrainState:
    """A run between two steps.

    Attributes:
        step: optimizer steps done.
        num_tokens: tokens trained on so far.
        evaluated_at: the step of the last complete evaluation; no part of H.
        best: the best evaluation after a step; no part of H.
        ranks: who trains it together; each has the whole model, and a part of the optimizer's states.
        objective: what the model learns.
        draws: counters of random draws that a batch takes, once it is known; for ranks.
        base: the frozen model that adapters are trained beside, None where the model itself is trained.
    """

    model: LanguageModel
    optimizer: Optimizer
    loader: PackedLoader
    step: int = 0
    num_tokens: int = 0
    interval: Interval = field(default_factory=Interval)
    evaluated_at: int = -1
    best: Best = field(default_factory=Best)
    base: FrozenBase | None = None
    ranks: Ranks = ALONE
    objective: Objective = field(default_factory=NextTokens)
    draws: int | None = None

    def own_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that are the run's: all but those of the base."""
        of_base = frozenset() if self.base is None else self.base.parameters
        return ((name, p) for name, p in self.model.named_parameters() if name not in of_base)

    def counters(self) -> dict[str, Any]:
        """Step, tokens, running sums, how often each parameter was updated, as JSON values; "data" is its size."""
        interval: dict[str, Any] = {"loss_sum": self.interval.loss_sum, "targets": self.interval.targets}
        if self.interval.figures:
            interval["figures"] = list(self.interval.figures)
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "interval": interval,
            "optimizer": optimizer_counts(self.optimizer),
            "data": self._data,
            "best": self.best.to_json(),
        }

    @cached_property
    def _data(self) -> dict[str, int]:
        """Documents, tokens and targets of an epoch."""
        tokens = self.loader.tokens
        return {"documents": tokens.num_documents, "tokens": tokens.num_tokens, "targets": tokens.num_targets}

    def persistent(self) -> dict[str, list[Array]]:
        """The arrays that stay from step to step: "weights", "gradients", and "optimizer" with masters and averages."""
        parameters = [p for _, p in self.model.named_parameters()]
        kept = (x for values in self.optimizer.state.values() for x in values.values() if isinstance(x, Tensor))
        shared = self.optimizer.shared_memory()
        return {
            "weights": [p.array for p in parameters],
            "gradients": [p.grad.array for p in parameters if p.grad is not None] + shared["gradients"],
            "optimizer": [x.array for x in kept] + shared["optimizer"],
        }

    def hash(self) -> str:
        """The state hash, see `Snapshot.digest`: a call of all ranks."""
        ranks, hashed = self.ranks, StateHash()
        with self.optimizer.whole_states():
            snapshot = Snapshot.of(self)
            snapshot.hash_arrays(snapshot.share(ranks.rank, ranks.size), hashed)
        for digests in ranks.to_main("hashed", hashed.array_digests())[1:]:
            hashed.add_digests(digests)
        return str(ranks.from_main("hash", snapshot.digest(hashed) if ranks.is_main else ""))
