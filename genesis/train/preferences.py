"""Objectives of preferences: the losses of `preference_losses` on packed batches of pairs and judged answers.

A row of a batch holds whole samples of two sequences each (`genesis.data.pairs`), whose prompt it holds once. The
log-probability of an answer is the float32 sum over its tokens in the order of their positions. Losses and figures are
means over the samples of a step.

The reference is the model before training. With adapters it is the base: each step computes it with the adapters off.
Otherwise its log-probabilities are computed once, in the batches of the first epoch, and cached. Both use the policy's
ops on the policy's rows, so that before the first step the policy and its reference agree in every bit.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

import genesis
from genesis import cuda, no_grad
from genesis.backend import mode
from genesis.data.documents import TokenSet
from genesis.data.loader import Batch, PackedLoader, with_bounds
from genesis.data.pairs import ranges
from genesis.errors import NumericError, escape
from genesis.files.cache import EntryWriter
from genesis.files.hashing import StateHash
from genesis.nn.lora import adapters_off
from genesis.tensor import Tensor
from genesis.train.objective import LanguageModel, Objective, Preparation
from genesis.train.preference_losses import JUDGED, PAIRED, Answers, Settings, kto_kl, reward
from genesis.train.step import row_values

# How the reference is computed: in each step with the adapters off, or once; None without a reference.
Reference = Literal["adapter", "cached"] | None
Values = npt.NDArray[np.float64]
_FORMAT, _VALUES = 1, "values.bin"
_LEAST = 4  # fewest tokens of a sample: a prompt token and an answer token in each of two sequences
_NO_ANSWER = -1.0  # log-probability of an unused slot; every loss is finite for it

_REWARDS = {
    "rewards/chosen": "mean reward of the chosen or good answers",
    "rewards/rejected": "mean reward of the rejected or bad answers",
    "rewards/margins": "rewards/chosen minus rewards/rejected",
}
_LOGPS = {
    "logps/chosen": "mean log-probability of the chosen or good answers, nats",
    "logps/rejected": "mean log-probability of the rejected or bad answers, nats",
}


class Preferences(Objective):
    """Base class of the objectives that learn from pairs or judged answers.

    Args:
        settings: the loss's settings.
        reference: how the reference is computed; None without one.
    """

    def __init__(self, settings: Settings, reference: Reference) -> None:
        self.settings, self.reference = dict(settings), reference
        self._cached: list[tuple[TokenSet, Values]] = []

    def num_targets(self, batch: Batch) -> int:
        """Return the number of pairs or judged answers."""
        return max(1, len(batch.samples))

    def fields(self, batch: Batch) -> tuple[npt.NDArray[Any], ...]:
        """Return ids and labels `[B, T]`; positions; the index of each token's sequence in its row `[B, T]`; the number
        of tokens of each answer `[B, 2P]`; and with a cached reference, its log-probability of each answer `[B, 2P]`.

        Sequences 2p and 2p + 1 belong to sample p of the row. P, the largest possible number of samples in a row,
        depends only on T.
        """
        rows, length = batch.input_ids.shape
        sequences, lengths = (
            np.zeros((rows, length), np.int64),
            np.zeros((rows, 2 * max(1, length // _LEAST)), np.int64),
        )
        reference = np.zeros(lengths.shape)
        row, place = _places(batch)
        if batch.tokens is not None and batch.tokens.splits is not None:
            # Number the tokens of each sequence.
            samples, counts, begins = batch.samples[:, 1], batch.samples[:, 3], batch.columns
            splits = batch.tokens.splits[samples]
            for side, (first, count) in enumerate(((begins, splits), (begins + splits, counts - splits))):
                sequences.reshape(-1)[ranges(row * length + first, count)] = np.repeat(2 * place + side, count)
            np.add.at(lengths, (np.nonzero(batch.labels >= 0)[0], sequences[batch.labels >= 0]), 1)
            if self.reference == "cached":
                found = next((values for tokens, values in self._cached if tokens is batch.tokens), None)
                if found is not None:
                    reference.reshape(rows, -1, 2)[row, place] = found[samples]
        more = (reference,) if self.reference == "cached" else ()
        return batch.input_ids, batch.labels, positions_of(batch), sequences, lengths, *more

    def loss(
        self, model: LanguageModel, fields: Sequence[Tensor], num_targets: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        losses, figures = self.judge(*self.answers(model, fields), *self._own_fields(fields))
        return losses / num_targets, figures.detach()

    def measure(self, model: LanguageModel, fields: Sequence[Tensor]) -> Tensor:
        losses, figures = self.judge(*self.answers(model, fields), *self._own_fields(fields))
        return genesis.cat([losses.reshape(1), figures])

    def judge(self, first: Answers, second: Answers, is_there: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss, 0-d, and the sums of `figures`.

        Args:
            first, second: the two answers of each sample slot `[B, P]`.
            is_there: `[B, P]`, 1 for a sample, 0 for an unused slot.
            rest: the subclass's own fields.
        """
        raise NotImplementedError

    def _own_fields(self, fields: Sequence[Tensor]) -> Sequence[Tensor]:
        return fields[6 if self.reference == "cached" else 5 :]

    def answers(self, model: LanguageModel, fields: Sequence[Tensor]) -> tuple[Answers, Answers, Tensor]:
        """Return both answers of each sample slot `[B, P]`, and a mask `[B, P]`, 0 for an unused slot."""
        lengths = fields[4]
        reference: Tensor | None = fields[5].to(dtype="float32") if self.reference == "cached" else None
        if self.reference == "adapter":
            with no_grad(), adapters_off():
                reference = answer_log_probs(model, fields)
        own = answer_log_probs(model, fields)
        is_there = lengths > 0
        own = genesis.where(is_there, own, _NO_ANSWER)
        reference = genesis.zeros_like(own) if reference is None else genesis.where(is_there, reference, _NO_ANSWER)
        parts = (own, reference.detach(), lengths.maximum(1).to(dtype="float32"), is_there.to(dtype="float32"))
        shape = (lengths.shape[0], lengths.shape[1] // 2, 2)
        own, reference, counts, there = (each.reshape(*shape) for each in parts)
        first, second = (Answers(own[..., i], reference[..., i], counts[..., i]) for i in (0, 1))
        return first, second, there[..., 0]

    # --- The reference ------------------------------------------------------------------------------------------------

    def prepare(self, model: LanguageModel, run: Preparation) -> Iterator[str]:
        """Compute or find the reference, and compare the policy with it on the first batch.

        Raises:
            NumericError: a log-probability is not finite. DiskError: the cache cannot be written.
        """
        if self.reference is None:
            return
        if self.reference == "adapter":
            yield "reference: the base, computed in each step with the adapters off; it needs no memory of its own"
        else:
            states, weights = list[str](), _hash_of_weights(model)
            for loader in (run.loader, *run.held_out):
                most = None if loader is run.loader else run.max_batches
                key = {
                    "format": _FORMAT,
                    "weights": weights,
                    "samples": _hash_of_samples(loader.tokens),
                    "batches": [loader.batch_size, loader.seq_len, loader.seed, loader.shuffle, most],
                    "device": [run.device.type, getattr(model, "precision", None), cuda.allow_tf32.get(), mode.exact],
                }
                found = run.cache.get("reference", key, partial(self._write, model, loader, run, most))
                values = np.frombuffer(found.entry.part(_VALUES), "<f8").reshape(-1, 2)
                self._cached.append((loader.tokens, values))
                states.append(found.state)
            # Held-out values are left out, because a resumed run may evaluate in other batches.
            self.identity = {"reference": hashlib.sha256(self._cached[0][1].tobytes()).hexdigest()}
            count, size = (sum(part(values) for _, values in self._cached) for part in (len, lambda v: v.nbytes))
            how = "found in the cache" if set(states) == {"found"} else "computed once"
            yield f"reference: log-probabilities of {count:,} samples under the initial weights, {size:,} bytes, {how}"
        yield self._agreement(model, run)

    def _write(self, model: Any, loader: PackedLoader, run: Preparation, most: int | None, folder: EntryWriter) -> None:
        """Write the log-probabilities of a loader's samples: of the `most` first batches, or of all samples."""
        folder.write(_VALUES, self._log_probs(model, loader, run, most).astype("<f8").tobytes())

    def _log_probs(self, model: Any, loader: PackedLoader, run: Preparation, most: int | None) -> Values:
        """Return the log-probabilities of the answers of all samples `[S, 2]`, in the batches of the first epoch."""
        is_held_out = loader is not run.loader
        values = np.full((len(loader.tokens), 2), np.nan)
        was_training = model.training
        # Modes may compute differently: in training mode, matmuls may use fp8 and adapters drop inputs.
        model.train(not is_held_out and self._has_no_dropout(model))
        count = min(loader.num_batches(0), most or sys.maxsize)
        try:
            for index in range(count):
                self._fill(values, model, loader.batch(0, index), run, np.arange(len(values)))
                run.progress(index + 1, count)
            missing = np.isnan(values[:, 0])
            if missing.any() and not is_held_out:  # sources with weights below 1 leave samples out of the first epoch
                rest = loader.tokens.select_samples(missing)
                more = PackedLoader(rest, batch_size=loader.batch_size, seq_len=loader.seq_len, seed=0, shuffle=False)
                for index in range(more.num_batches(0)):
                    self._fill(values, model, more.batch(0, index), run, np.flatnonzero(missing))
        finally:
            model.train(was_training)
        found: Values = np.nan_to_num(values)
        return found

    def _has_no_dropout(self, model: Any) -> bool:
        return not any(getattr(layer, "dropout", 0) for layer in model.modules())

    def _fill(
        self, values: Values, model: LanguageModel, batch: Batch, run: Preparation, numbers: npt.NDArray[np.int64]
    ) -> None:
        """Write the log-probabilities of a batch's answers into `values`; sample n goes to row `numbers[n]`."""
        found = row_values(self, batch, run.device, lambda fields: answer_log_probs(model, fields))
        row, place = _places(batch)
        own = found.reshape(len(found), -1, 2)[row, place]
        if not np.isfinite(own).all():
            bad = int(np.argmin(np.isfinite(own).all(1)))
            name = run.loader.describe(batch)[bad] if batch.tokens is run.loader.tokens else "a held-out sample"
            what = f"the reference gives a log-probability of {own[bad].min()}"
            raise NumericError(what, where=escape(name), next="check the model in model.path: genesis eval")
        values[numbers[batch.samples[:, 1]]] = own

    def _agreement(self, model: LanguageModel, run: Preparation) -> str:
        """Return a line with the largest log-ratio of policy to reference in the first batch; it should be 0."""
        batch = run.loader.batch(0, 0)

        def ratios(fields: Sequence[Tensor]) -> Tensor:
            first, second, _ = self.answers(model, fields)
            return genesis.stack([first.ratio, second.ratio], -1).detach()

        found = np.abs(row_values(self, batch, run.device, ratios, with_grad=True))
        row, place = _places(batch)
        own = found[row, place]
        if not np.isfinite(own).all():
            what = f"the log-ratio between policy and reference is {own.max()} before the first step"
            raise NumericError(what, next="check the model in model.path: genesis eval")
        if not own.any():
            return f"reference: at step 0 the margins of all {len(own):,} samples of the first batch are exactly 0"
        return f"warning: at step 0 policy and reference differ by up to {own.max():.3g} nats in the first batch"


class PairObjective(Preferences):
    """A loss of pairs (`PAIRED`).

    Args:
        name: the loss's name in the table.
    """

    figures: ClassVar[Mapping[str, str]] = {
        **_REWARDS,
        "rewards/accuracies": "share of the pairs whose chosen answer has the higher reward",
        **_LOGPS,
    }
    held_out_figures: ClassVar[Mapping[str, str]] = figures

    def __init__(self, name: str, settings: Settings, reference: Reference) -> None:
        super().__init__(settings, reference)
        self.paired = PAIRED[name]

    def judge(self, first: Answers, second: Answers, is_there: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        losses = self.paired.loss(first, second, **self.settings)
        chosen, rejected = (
            self.settings["beta"] * getattr(each, self.paired.score).detach() for each in (first, second)
        )
        sums = (
            chosen,
            rejected,
            chosen - rejected,
            (chosen > rejected).to(dtype="float32"),
            first.log_probs.detach(),
            second.log_probs.detach(),
        )
        return (losses * is_there).sum(), genesis.stack([(each * is_there).sum() for each in sums])


class RewardObjective(Preferences):
    """The Bradley-Terry loss of a reward model (`preference_losses.reward`).

    The reward of a sequence, prompt and answer, is a linear function of the final hidden state of its last token.
    """

    figures: ClassVar[Mapping[str, str]] = {
        "mean_reward": "mean reward of all answers",
        "margin": "mean reward of the chosen answers minus that of the rejected ones",
        "accuracy": "share of the pairs whose chosen answer has the higher reward",
    }
    held_out_figures: ClassVar[Mapping[str, str]] = figures

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, None)

    def fields(self, batch: Batch) -> tuple[npt.NDArray[Any], ...]:
        """Return ids `[B, T]`, positions, the column of each sequence's last token `[B, 2P]`, -1 for none, and the
        margin of each pair `[B, P]`.
        """
        rows, length = batch.input_ids.shape
        last = np.full((rows, max(1, length // _LEAST), 2), -1, np.int64)
        margins = np.zeros(last.shape[:2])
        if batch.tokens is not None and batch.tokens.splits is not None:
            ends = np.stack([batch.tokens.splits[batch.samples[:, 1]], batch.samples[:, 3]], -1)
            last[_places(batch)] = batch.columns[:, None] + ends - 1
            if batch.tokens.margins is not None:
                margins[_places(batch)] = batch.tokens.margins[batch.samples[:, 1]]
        return batch.input_ids, positions_of(batch), last.reshape(rows, -1), margins

    def loss(
        self, model: LanguageModel, fields: Sequence[Tensor], num_targets: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        loss, *figures = self._sums(model, fields)
        return loss / num_targets, genesis.stack(figures).detach()

    def measure(self, model: LanguageModel, fields: Sequence[Tensor]) -> Tensor:
        return genesis.stack(self._sums(model, fields))

    def _sums(self, model: Any, fields: Sequence[Tensor]) -> list[Tensor]:
        """Return the summed loss, 0-d, and the sums of `figures`."""
        input_ids, position_ids, last, margin = fields
        is_there = (last.reshape(len(last), -1, 2)[..., 0] >= 0).to(dtype="float32")  # [B, P]
        rewards = model.rewards(input_ids, last.maximum(0), position_ids).reshape(len(last), -1, 2)
        chosen, rejected = rewards[..., 0] * is_there, rewards[..., 1] * is_there
        losses = reward(chosen, rejected, margin.to(dtype="float32"), **self.settings)
        margins = (chosen - rejected).detach()
        means, is_right = (chosen + rejected).detach() / 2, (margins > 0).to(dtype="float32")
        return [(each * is_there).sum() for each in (losses, means, margins, is_right)]


class JudgedObjective(Preferences):
    """A loss of judged answers (`JUDGED`). The KL estimate is a mean over one micro-batch.

    Args:
        name: its name in the table.
    """

    figures: ClassVar[Mapping[str, str]] = {
        **_REWARDS,
        **_LOGPS,
        "kl": "estimate of KL(policy ‖ reference) from mismatched answers, nats",
        "desirable": "share of good answers",
    }
    held_out_figures: ClassVar[Mapping[str, str]] = figures
    divides_rows: ClassVar[bool] = False

    def __init__(self, name: str, settings: Settings, reference: Reference) -> None:
        super().__init__(settings, reference)
        self._loss = JUDGED[name][0]

    def fields(self, batch: Batch) -> tuple[npt.NDArray[Any], ...]:
        """Return the fields of `Preferences`, and 1 for a good answer `[B, P]`."""
        shared = super().fields(batch)
        is_good = np.zeros((len(shared[4]), shared[4].shape[1] // 2), np.int64)
        if batch.tokens is not None and batch.tokens.is_good is not None:
            is_good[_places(batch)] = batch.tokens.is_good[batch.samples[:, 1]]
        return *shared, is_good

    def judge(self, first: Answers, second: Answers, is_there: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        is_good = rest[0].to(dtype="float32")
        kl = kto_kl(second, is_there)
        losses = self._loss(first, is_good, kl, **self.settings)
        good, bad = is_good * is_there, (1 - is_good) * is_there
        rewards, log_probs = self.settings["beta"] * first.ratio.detach(), first.log_probs.detach()
        sums = rewards * good, rewards * bad, 0 * good, log_probs * good, log_probs * bad, kl * is_there, good
        return (losses * is_there).sum(), genesis.stack([each.sum() for each in sums])

    def means(self, sums: Mapping[str, float], targets: int) -> dict[str, float]:
        """Return the means over good, bad or all answers. Figures of a kind that has no answers are left out."""
        counts = {"chosen": sums["desirable"], "rejected": targets - sums["desirable"]}
        found = {
            name: value / counts.get(name.partition("/")[2], targets)
            for name, value in sums.items()
            if counts.get(name.partition("/")[2], targets)
        }
        if "rewards/chosen" in found and "rewards/rejected" in found:
            return found | {"rewards/margins": found["rewards/chosen"] - found["rewards/rejected"]}
        return {name: value for name, value in found.items() if name != "rewards/margins"}


# --- Places in a batch ------------------------------------------------------------------------------------------------


def _places(batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the row of each sample of a batch, and its number in the row."""
    row = batch.samples[:, 0]
    return row, np.arange(len(row)) - np.searchsorted(row, row)


def positions_of(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the positions `[B, T, 4]` of a batch, whether or not its samples share prompts."""
    return batch.position_ids if batch.position_ids.ndim == 3 else with_bounds(batch.position_ids)


def answer_log_probs(model: Any, fields: Sequence[Tensor]) -> Tensor:
    """Return the log-probability of each sequence's answer, float32 `[B, 2P]`: sums in the order of positions."""
    input_ids, labels, position_ids, sequences, lengths = fields[:5]
    log_probs = model.log_probs(input_ids, labels, position_ids)  # [B, T]
    empty = genesis.zeros(*lengths.shape, dtype=log_probs.dtype, device=log_probs.device)
    return empty.scatter_add(1, sequences, log_probs)


def _hash_of_samples(tokens: TokenSet) -> str:
    """Return a hash of all samples in order: ids, targets, splits, and the weights that choose those of an epoch."""
    places, hashed = ranges(tokens.starts, tokens.lengths), StateHash()
    assert tokens.mask is not None and tokens.splits is not None
    parts = {"ids": tokens.stream[places], "mask": tokens.mask[places], "lengths": tokens.lengths}
    more = {"splits": tokens.splits, "shared": tokens.shared, "weights": tokens.weights}
    for name, values in {**parts, **more}.items():
        if values is not None:
            hashed.add_array(name, values)
    return hashed.hexdigest()


def _hash_of_weights(model: LanguageModel) -> str:
    """Return a hash of all parameters of a model."""
    hashed = StateHash()
    for name, parameter in model.named_parameters():
        hashed.add_array(name, parameter.array.numpy())
    return hashed.hexdigest()
