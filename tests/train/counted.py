"""An objective with figures whose values the data alone decide: next tokens, and the mean id of the targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

import genesis
from genesis.data.documents import TokenSet
from genesis.data.loader import Batch
from genesis.tensor import Tensor
from genesis.train.objective import LanguageModel, NextTokens
from genesis_cli.session import training


class Counted(NextTokens):
    """Also reports the mean id of the targets, and the loss once more."""

    figures: ClassVar[Mapping[str, str]] = {"counted/id": "mean id of a target", "counted/loss": "the loss again"}
    sets: Sequence[TokenSet] = ()
    held_out_figures: ClassVar[Mapping[str, str]] = {**NextTokens.held_out_figures, "counted/id": "as in training"}

    def loss(
        self, model: LanguageModel, fields: Sequence[Tensor], num_targets: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        loss, _ = super().loss(model, fields, num_targets)
        return loss, genesis.stack([id_sum(fields[1]), loss.detach() * num_targets])

    def measure(self, model: LanguageModel, fields: Sequence[Tensor]) -> Tensor:
        figures = super().measure(model, fields)
        return genesis.cat([figures, id_sum(fields[1]).reshape(1)])


def id_sum(labels: Tensor) -> Tensor:
    """The sum of the targets' ids, float32."""
    return labels[:, 1:].maximum(0).sum().to(dtype="float32")


def mean_id(batches: Iterable[Batch]) -> float:
    """What `counted/id` is of a step on these batches."""
    ids = np.concatenate([batch.labels[:, 1:][batch.labels[:, 1:] >= 0] for batch in batches])
    return float(ids.mean())


def install() -> None:
    """Runs of this process learn it."""
    training.objective_of = lambda *run: Counted()  # type: ignore[assignment]
