"""The objective of a run: the fields of a batch that its loss reads, the loss, and the figures that it reports.

The step, the ranks, the evaluation, the memory plan and the metrics depend on a loss only through its `Objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy.typing as npt

import genesis
from genesis.array import Array
from genesis.autograd import no_grad
from genesis.backend import Device
from genesis.data.loader import Batch, PackedLoader
from genesis.files.cache import Cache
from genesis.nn import Module
from genesis.nn import functional as F
from genesis.tensor import Tensor


class LanguageModel(Protocol):
    """The interface of a model in training."""

    training: bool

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        num_targets: int | Tensor | None = None,
    ) -> Tensor: ...

    def loss_and_hits(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor: ...

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...

    def train(self, mode: bool = True) -> Module: ...

    def eval(self) -> Module: ...


@dataclass(frozen=True)
class Preparation:
    """What an objective may use before the first step.

    Attributes:
        loader: batches of the training samples.
        held_out: batches of each set of held-out samples; evaluations use the first `max_batches`.
        cache: the cache in `data.cache_dir`.
        progress: called with the number of finished batches and their total.
    """

    loader: PackedLoader
    held_out: Sequence[PackedLoader]
    max_batches: int | None
    device: Device
    cache: Cache
    progress: Callable[[int, int], None] = lambda done, total: None


class Objective:
    """Base class of objectives; a subclass implements `loss` and `measure`, and `fields` if it reads others.

    The loss of a step is the sum over its targets, divided by their number in all micro-batches of all ranks. The
    subclass defines what a target is: a token, a pair of answers.

    Attributes:
        figures: names of the figures that `loss` returns, with their units. They are means over targets, like the loss,
            and rows of metrics contain them under these names.
        held_out_figures: the same for `measure`; rows of metrics prefix these names with `eval/`.
        is_cross_entropy: whether the loss is a token cross entropy in nats, which has a perplexity and bits per byte.
        identity: digests of what the loss depends on besides the run's data and weights. They are part of the state
            hash, and a run resumes only if they are the same.
        divides_rows: whether CPU threads may each compute the loss of some of a batch's rows.
    """

    figures: ClassVar[Mapping[str, str]] = {}
    held_out_figures: ClassVar[Mapping[str, str]] = {}
    is_cross_entropy: ClassVar[bool] = False
    divides_rows: ClassVar[bool] = True
    identity: Mapping[str, str] = {}

    @property
    def frozen(self) -> Sequence[Array]:
        """Frozen weights that the objective keeps on the device, such as a teacher's."""
        return ()

    def prepare(self, model: LanguageModel, run: Preparation) -> Iterable[str]:
        """Compute what depends on the initial weights of the run, such as log-probabilities of a reference.

        Each rank calls it once, before a checkpoint is restored; rank 0 first, so that the others can use the cache.
        The memory plan does not call it.

        Returns:
            Lines to print.
        """
        return ()

    def num_targets(self, batch: Batch) -> int:
        """Return the number of targets of a batch, at least 1."""
        return batch.num_targets

    def fields(self, batch: Batch) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays that the loss reads: int64 or float64, rows first, with the same shapes for every batch.

        They are ids, labels and positions `[B, T]`, unless a subclass needs others. CPU threads split the rows. The
        memory plan requests the fields of a batch without samples.
        """
        return batch.input_ids, batch.labels, batch.position_ids

    def loss(
        self, model: LanguageModel, fields: Sequence[Tensor], num_targets: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the summed loss of some rows / `num_targets`, 0-d, and the sum of each of `figures`, float32 `[k]`.

        The second value is None without figures. CUDA graphs capture it, so it must not read values on the host.
        """
        raise NotImplementedError

    def means(self, sums: Mapping[str, float], targets: int) -> dict[str, float]:
        """Return the figures from their sums over `targets` targets. Figures without a value are left out."""
        return {name: value / targets for name, value in sums.items()}

    def measure(self, model: LanguageModel, fields: Sequence[Tensor]) -> Tensor:
        """Return the summed loss of some held-out rows, then the sum of each of `held_out_figures`, `[1 + k]`."""
        raise NotImplementedError


class NextTokens(Objective):
    """The cross entropy of each target token, given the tokens before it."""

    held_out_figures: ClassVar[Mapping[str, str]] = {"token_accuracy": "share of targets that are the likeliest token"}
    is_cross_entropy: ClassVar[bool] = True

    def loss(
        self, model: LanguageModel, fields: Sequence[Tensor], num_targets: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        input_ids, labels, position_ids = fields
        return model.loss(input_ids, labels, position_ids=position_ids, num_targets=num_targets), None

    def measure(self, model: LanguageModel, fields: Sequence[Tensor]) -> Tensor:
        """Return `[2]`: the summed loss, and how many targets are the likeliest token."""
        return model.loss_and_hits(*fields)


class Distillation(Objective):
    """The divergence of the student's distribution from a frozen teacher's at each target token, over the vocabulary.

    Knowledge distillation on given texts (Hinton et al., 2015) with the generalized Jensen-Shannon divergence of GKD
    (Agarwal et al., 2024). No logits are kept; see `genesis.nn.functional.linear_distillation`.

    Args:
        beta: weight of the teacher in the mixture: 0 forward KL, 1 reverse KL.
        temperature: divides the logits of student and teacher.

    Attributes:
        teacher: a frozen model in eval mode, which the caller sets.
    """

    held_out_figures: ClassVar[Mapping[str, str]] = {
        "cross_entropy": "the student's cross entropy of the targets, in nats",
        "teacher_cross_entropy": "the teacher's cross entropy of the targets, in nats",
        "teacher_agreement": "share of targets at which student and teacher find the same token likeliest",
    }
    figures: ClassVar[Mapping[str, str]] = {f"train/{name}": text for name, text in held_out_figures.items()}
    teacher: Any

    def __init__(self, beta: float, temperature: float) -> None:
        self.beta, self.temperature = beta, temperature

    @property
    def frozen(self) -> Sequence[Array]:
        return [p.array for _, p in self.teacher.named_parameters()]

    def loss(
        self, model: LanguageModel, fields: Sequence[Tensor], num_targets: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        input_ids, labels, position_ids = fields
        teacher, student = self.teacher, cast("Any", model)
        with no_grad():  # before the student's activations take memory
            taught = teacher.hidden_states(input_ids, position_ids)
        hidden = student.hidden_states(input_ids, position_ids)
        heads = hidden, student.head_weight, taught, teacher.head_weight
        how: dict[str, Any] = {"beta": self.beta, "temperature": self.temperature}
        return F.linear_distillation(*heads, labels, **how, shift=1, num_targets=num_targets)

    def measure(self, model: LanguageModel, fields: Sequence[Tensor]) -> Tensor:
        """Return `[4]`: the summed divergence and the sums of the figures."""
        loss, figures = self.loss(model, fields, 1)
        assert figures is not None
        return genesis.cat([loss.reshape(1), figures])
