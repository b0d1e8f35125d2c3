"""Sampling: the settings of a sequence, the arrays of a batch, and a single draw."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

import genesis
from genesis import Tensor
from genesis.errors import NumericError
from genesis.ops.sample import sample
from genesis.train.bounds import BOUNDS


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling settings of a sequence.

    Attributes:
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: keep only this many of the likeliest tokens; None keeps all.
        top_p: keep only the likeliest tokens that together reach this probability; None keeps all.
        seed: the same seed gives the same text.
        min_p: keep only tokens that are at least this many times as likely as the likeliest.
        repetition_penalty: divisor of the positive logits, and factor of the negative ones, of tokens that the sequence
            already contains.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def check(self, where: str = "sampling") -> Sampling:
        """Return the settings as Python numbers.

        Args:
            where: the place that errors name.

        Raises:
            UsageError: a setting is not within `BOUNDS`.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return Sampling(**{name: BOUNDS[name].checked(value, name, where=where) for name, value in values.items()})

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """A row of the op `sample`'s `settings`."""
        return self.temperature, 1.0 if self.top_p is None else self.top_p, self.min_p, self.repetition_penalty


class SamplingRows:
    """The sampling state of a batch, with a row for each sequence.

    Args:
        rows: sequences in the batch.
        vocabulary: size of the logits.
    """

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.keys = np.zeros((rows, 3), np.int64)  # seed, sequence, position
        self.settings = np.zeros((rows, 4))
        self.top_k = np.zeros(rows, np.int64)
        self._seen: np.ndarray | None = None  # [rows, vocabulary], allocated for the first sequence with a penalty
        self._shape = (rows, vocabulary)

    def start(self, row: int, sampling: Sampling, sequence: int, prompt: np.ndarray) -> None:
        """Start a new sequence in `row`."""
        seed = np.array([sampling.seed], np.uint64).view(np.int64)[0]
        self.keys[row] = seed, sequence, len(prompt)
        self.settings[row] = sampling.numbers
        self.top_k[row] = sampling.top_k or 0
        if sampling.repetition_penalty != 1 and self._seen is None:
            self._seen = np.zeros(self._shape, bool)
        if self._seen is not None:
            self._seen[row] = False
            self._seen[row, prompt] = True

    def draw(self, logits: Tensor, rows: np.ndarray, log_probs: bool) -> tuple[np.ndarray, np.ndarray]:
        """Draw the next token of each of `rows`, -1 if its logits are not finite, and its log-probability on request.

        Args:
            logits: `[len(rows), V]`.
        """
        arrays = (self.keys[rows], self.settings[rows], self.top_k[rows])
        penalized = self._seen is not None and bool((self.settings[rows, 3] != 1).any())
        inputs = [*arrays, self._seen[rows]] if penalized and self._seen is not None else [*arrays]
        on_device = [genesis.tensor(each, device=logits.device).array for each in inputs]
        tokens, chances = (each.numpy() for each in sample(logits.array, *on_device, log_probs=log_probs))
        self.keys[rows, 2] += 1
        if self._seen is not None:
            self._seen[rows, tokens] = True
        return tokens, chances


def not_finite(logits: np.ndarray, position: int) -> NumericError:
    """Return the error for logits `[V]` that hold a NaN or an infinity."""
    kind = "NaN" if np.isnan(logits).any() else "infinite" if np.isinf(logits).any() else "not finite"
    what, where = f"the model's logits are {kind}", f"position {position}"
    return NumericError(what, where=where, next="check the weights; try float32")


def choose(logits: np.ndarray, sampling: Sampling, position: int, sequence: int = 0) -> int:
    """Draw the next token from logits `[V]`; the random number depends only on seed, sequence and position.

    Raises:
        NumericError: the logits hold a NaN or an infinity.
    """
    token = np.empty(1, np.int64)
    seed = np.array([[sampling.seed, sequence, position]], np.uint64).view(np.int64)
    settings, top_k = np.array([sampling.numbers]), np.array([sampling.top_k or 0])
    sample.reference((token, np.empty(0)), logits[None], seed, settings, top_k)
    if token[0] < 0:
        raise not_finite(logits, position)
    return int(token[0])
