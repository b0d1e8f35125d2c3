"""Distillation from a file of log-probabilities that a teacher gave to its k likeliest tokens at each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

import genesis
from genesis.data.documents import Ints, TokenSet
from genesis.data.loader import Batch
from genesis.data.pairs import ranges
from genesis.errors import DataError, ModelError, escape
from genesis.files.boundary import boundary
from genesis.files.hashing import sha256_file
from genesis.files.paths import open_regular
from genesis.files.strict_json import parse_object
from genesis.nn import functional as F
from genesis.tensor import Tensor
from genesis.train.objective import LanguageModel, Objective, Preparation

_MOST = 1.01  # sum of the probabilities of a position; those of log-probabilities rounded to bfloat16 can exceed 1
_LARGEST = 1e9  # magnitude of a value
_FIELDS = ("input_ids", "target_token_ids", "target_logprobs")
_NEXT = "write the file again: docs/distillation.md describes it"


@dataclass(frozen=True, eq=False)
class TopK:
    """The records of a file, one after the other.

    Attributes:
        ids, log_probs: the teacher's k likeliest tokens at M positions `[M, k]`; NaN at positions without any.
        begins: first position of the record with these tokens, as bytes of int32.
    """

    path: str
    sha256: str
    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    begins: dict[bytes, int]

    def places(self, tokens: TokenSet) -> Ints:
        """Return the position of each sample's first token `[S]`. Raises: DataError: a sample or target is missing."""
        found, missing = np.zeros(len(tokens), np.int64), np.isnan(self.log_probs[:, 0])
        for n, (start, length) in enumerate(zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)):
            ids = tokens.stream[start : start + length]
            name = f"{escape(tokens.index.name(int(tokens.documents[n])))}, {length:,} tokens"
            begin = self.begins.get(ids.astype(np.int32).tobytes())
            if begin is None:
                what = f"no record of {escape(self.path)} has the tokens of this sample"
                next = "write the ids with this tokenizer, template and data.too_long, or remove the sample"
                raise DataError(what, where=name, next=next)
            is_bare = missing[begin : begin + length] & (np.arange(length) > 0)
            if tokens.mask is not None:
                is_bare &= tokens.mask[start : start + length] != 0
            if is_bare.any():
                what = f"{escape(self.path)} has no log-probabilities of target token {int(np.argmax(is_bare))}"
                raise DataError(what, where=name, next="write those of all targets")
            found[n] = begin
        return found


@boundary(DataError, "reading log-probabilities")
def read_top_k(path: str, vocab_size: int) -> TopK:
    """Read a file: a JSON object a line, with `input_ids` `[T]`, `target_token_ids` and `target_logprobs` `[T, k]`.

    Entry t describes the distribution of token t, given those before it; null or empty where it is not needed.
    Raises: DataError: the file cannot be opened, or a record cannot be used; the error names its line.
    """
    begins, parts, k, total = dict[bytes, int](), list[tuple[Any, Any]](), width(path), 0
    for where, (tokens, *rows) in _records(path):
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise DataError(f"`input_ids` has other values than 0 to {vocab_size - 1:,}", where=where, next=_NEXT)
        parts.append(_checked(rows, k, vocab_size, where))
        begins.setdefault(np.array(tokens, np.int32).tobytes(), total)
        total += len(tokens)
    ids, log_probs = (np.concatenate(each) for each in zip(*parts, strict=True))
    return TopK(path, sha256_file(path), ids, log_probs, begins)


def width(path: str) -> int:
    """Return k, the number of values of the first entry. Raises: DataError: the file has none."""
    for _, (_, ids, _) in _records(path):
        for row in ids:
            if isinstance(row, list) and row:
                return len(row)
    raise DataError("the file has no log-probabilities", where=escape(path), next=_NEXT)


def _records(path: str) -> Iterator[tuple[str, list[list[Any]]]]:
    """Yield the place of each record, and its three lists of one length."""
    with open(open_regular(path, DataError), "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{escape(path)}:{number}"
            try:
                record = parse_object(line, where=where)
            except ModelError as error:
                raise DataError(error.what, where=where, next=_NEXT) from error
            lists: list[Any] = [record.get(name) for name in _FIELDS]
            for name, values in zip(_FIELDS, lists, strict=True):
                if not isinstance(values, list) or not values:
                    raise DataError(f"the record has no list `{name}`", where=where, next=_NEXT)
                if len(values) != len(lists[0]):
                    what = f"the record has {len(lists[0]):,} tokens but {len(values):,} entries of `{name}`"
                    raise DataError(what, where=where, next=_NEXT)
            yield where, lists


def _checked(rows: list[list[Any]], k: int, vocab_size: int, where: str) -> tuple[Any, Any]:
    """Return ids and log-probabilities `[T, k]` of one record."""
    kept = [t for t in range(len(rows[0])) if rows[0][t] or rows[1][t]]

    def check(is_bad: Any, what: str) -> None:
        if np.any(is_bad):
            raise DataError(f"token {kept[int(np.argmax(is_bad))]} has {what}", where=where, next=_NEXT)

    ids, log_probs = np.zeros((len(rows[0]), k), np.int32), np.full((len(rows[0]), k), np.nan, np.float32)
    if kept:
        for part, kinds in zip(rows, ((int,), (int, float)), strict=True):
            is_bad = [not isinstance(part[t], list) or len(part[t]) != k for t in kept]
            check(is_bad, f"an entry that is not a list of {k} values, like the file's first")
            is_bad = [any(type(x) not in kinds or abs(x) > _LARGEST for x in part[t]) for t in kept]
            check(is_bad, "a value that is not a number, or too large")
        top, values = np.array([rows[0][t] for t in kept]), np.array([rows[1][t] for t in kept], np.float64)
        check(((top < 0) | (top >= vocab_size)).any(1), f"an id outside the vocabulary of {vocab_size:,} tokens")
        check((np.diff(np.sort(top, 1)) == 0).any(1), "an id that occurs twice")
        check(np.exp(np.minimum(values, 1)).sum(1) > _MOST, "probabilities that sum to more than 1")
        ids[kept], log_probs[kept] = top, values
    return ids, log_probs


class TopKDistillation(Objective):
    """The forward KL divergence of the student from a file's k likeliest tokens of each target.

    With the file's log-probabilities l, q = exp(l) / Σ exp(l) over the k tokens, and the student's p over the whole
    vocabulary, it is Σ q·(log q - log p) = Σ q·log q - log p(y) - h·(Σ q·W - W[y]), with the hidden state h, the head's
    rows W and the label y. A fused op gives log p(y), so no logits are kept. The caller sets `file`, except for a plan.
    """

    held_out_figures: ClassVar = {"cross_entropy": "of the targets by the student, in nats"}
    figures: ClassVar = {f"train/{name}": text for name, text in held_out_figures.items()}

    def __init__(self, k: int) -> None:
        self.k = k
        self.file: TopK | None = None
        self._places: list[tuple[TokenSet, Ints]] = []

    def prepare(self, model: LanguageModel, run: Preparation) -> Iterator[str]:
        """Find the record of each sample. Raises: DataError: the file lacks a sample."""
        assert self.file is not None
        self._places = [(each.tokens, self.file.places(each.tokens)) for each in (run.loader, *run.held_out)]
        mass = np.nanmean(np.exp(self.file.log_probs).sum(1), dtype=np.float64)
        yield f"teacher: the {self.k} log-probabilities a token hold {mass:.1%} of its probability on average"

    def fields(self, batch: Batch) -> tuple[npt.NDArray[Any], ...]:
        """Return ids, labels, positions `[B, T]`; k ids and the label of the token after each slot `[B, T, k + 1]`, and
        their weights: k probabilities and -1, or 0 if it is not a target."""
        rows, length = batch.input_ids.shape
        ids, weights = np.zeros((rows * length, self.k + 1), np.int64), np.zeros((rows * length, self.k + 1))
        if batch.tokens is not None:
            assert self.file is not None, "prepare was not called"
            found = next(places for tokens, places in self._places if tokens is batch.tokens)
            row, sample, first, count = batch.samples.T
            slots, places = ranges(row * length + batch.columns, count), ranges(found[sample] + first, count)
            labels = batch.labels.reshape(-1)[slots]
            slots, places, labels = (each[labels >= 0] for each in (slots, places, labels))
            values = self.file.log_probs[places].astype(np.float64)
            values = np.exp(values - values.max(1, keepdims=True))
            ids[slots - 1] = np.column_stack([self.file.ids[places], labels])
            weights[slots - 1] = np.column_stack([values / values.sum(1, keepdims=True), -np.ones(len(labels))])
        wide = (each.reshape(rows, length, -1) for each in (ids, weights))
        return batch.input_ids, batch.labels, batch.position_ids, *wide

    def loss(
        self, model: LanguageModel, fields: Sequence[Tensor], num_targets: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        input_ids, labels, position_ids, ids, weights = fields
        student, weights = cast("Any", model), weights.to(dtype="float32")
        hidden, head = student.hidden_states(input_ids, position_ids), student.head_weight
        cross_entropy = -F.linear_token_log_probs(hidden, head, labels, shift=1).sum()
        # Not F.embedding: its gradient can join the sum of earlier micro-batches first, in an order that ranks lack.
        rows = (head[ids].to(dtype="float32") * weights.unsqueeze(-1)).sum(dim=2)
        q = weights[..., : self.k]
        negative_entropy = (q * q.maximum(1e-30).log()).sum()
        loss = negative_entropy + cross_entropy - (hidden.to(dtype="float32") * rows).sum()
        return loss / num_targets, cross_entropy.detach().reshape(1)

    def measure(self, model: LanguageModel, fields: Sequence[Tensor]) -> Tensor:
        """Return `[2]`: the summed divergence and the student's cross entropy."""
        loss, figures = self.loss(model, fields, 1)
        return genesis.cat([loss.reshape(1), cast("Tensor", figures)])
