"""The state of the sequences in an engine's rows, on the device: what a step reads and the next one goes on from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import genesis
from genesis import Tensor, cuda
from genesis.array import Array
from genesis.functions.transfer import overwrite, pinned_empty
from genesis.ops.next_tokens import next_tokens
from genesis.ops.sample import sample
from genesis_models.engine.engine import Request

STOPS = 16  # ids that end a row on the device; the host looks for further ones
RING = 32  # steps whose tokens the device keeps


class DeviceState:
    """Arrays with a row for each sequence, as the ops `sample` and `next_tokens` take them.

    Args:
        lengths, left: of the rows of the cache: tokens that are there, and how many each may still draw.
        vocabulary: of the logits.
        log_probs: whether tokens have their log-probability.

    Attributes:
        tokens: the last of each row, which is not in the cache.
        is_penalized: whether steps look at the tokens that sequences have.
    """

    def __init__(self, lengths: Tensor, left: Tensor, vocabulary: int, log_probs: bool, logits: genesis.DType) -> None:
        rows, device = lengths.shape[0], lengths.device

        def zeros(*shape: int, dtype: Any = "int64") -> Tensor:
            return genesis.zeros(*shape, dtype=dtype, device=device)

        self.tokens, self._lengths, self._left = zeros(rows), lengths, left
        self._stops, self._keys, self._top_k = zeros(rows, STOPS), zeros(rows, 3), zeros(rows)
        self._settings = zeros(rows, 4, dtype="float64")
        self._seen: Tensor | None = None  # [rows, vocabulary], taken when a sequence has a penalty, and kept
        self.is_penalized = False
        self._ring, self._step = zeros(RING * rows), zeros(1)
        self._ring_log_probs = zeros(RING * rows * log_probs, dtype="float64" if logits is genesis.float64 else None)
        self._steps, self._vocabulary, self._log_probs = 0, vocabulary, log_probs

    def clear(self) -> None:
        """No row has a sequence."""
        self._left.fill_(0)
        self._step.fill_(0)
        self._steps, self.is_penalized = 0, False

    def start(self, sequences: Sequence[tuple[int, Request, int]]) -> None:
        """New sequences: row, request, and the most tokens to draw. All of a prompt but its last token is cached."""
        if any(request.sampling.repetition_penalty != 1 for _, request, _ in sequences):
            self.is_penalized = True
            if self._seen is None:
                self._seen = genesis.zeros(len(self.tokens), self._vocabulary, dtype="bool", device=self.tokens.device)
        for first, found in _runs(sequences):
            for target, values in zip(self._targets(), zip(*map(_values, found), strict=True), strict=True):
                _write(target, first, np.array(values))
            if self.is_penalized and self._seen is not None:
                seen = np.zeros((len(found), self._vocabulary), bool)
                for row, (_, request, _) in zip(seen, found, strict=True):
                    row[np.asarray(request.ids)] = True
                _write(self._seen, first, seen)

    def _targets(self) -> tuple[Tensor, ...]:
        """In the order of `_values`."""
        return self._lengths, self.tokens, self._stops, self._keys, self._settings, self._top_k, self._left

    def end(self, row: int) -> None:
        """The sequence in `row` draws no more."""
        _write(self._left, row, np.zeros(1, np.int64))

    def draw(self, logits: Tensor) -> None:
        """The next token of each of the first rows, from their logits `[B, V]`; it goes into the ring."""
        rows = logits.shape[0]
        keys, settings, top_k, left = (
            each.narrow(0, 0, rows).array for each in (self._keys, self._settings, self._top_k, self._left)
        )
        seen = [self._seen.narrow(0, 0, rows).array] if self.is_penalized and self._seen is not None else []
        drawn, chances = sample(logits.array, keys, settings, top_k, *seen, log_probs=self._log_probs)
        nobody = genesis.empty(rows, 0, dtype="bool", device=logits.device).array
        tokens, lengths, stops = (each.narrow(0, 0, rows).array for each in (self.tokens, self._lengths, self._stops))
        rings = (each.array for each in self._rings(rows))
        next_tokens(drawn, chances, stops, tokens, lengths, left, keys, *(seen or [nobody]), *rings, self._step.array)

    def made(self, steps: int, rows: int) -> Reading:
        """Note that steps of the first `rows` rows were launched, whose tokens are on their way to the host."""
        first, self._steps = self._steps, self._steps + steps
        places = np.arange(first, self._steps) % RING
        return Reading(places, *self._rings(rows))

    def _rings(self, rows: int) -> tuple[Tensor, Tensor]:
        """The last steps' tokens `[R, B]` and their log-probabilities, `[R, 0]` where there are none."""
        wide = rows * self._log_probs
        return (
            self._ring.narrow(0, 0, RING * rows).view(RING, rows),
            self._ring_log_probs.narrow(0, 0, RING * wide).view(RING, wide),
        )


def _values(sequence: tuple[int, Request, int]) -> tuple[object, ...]:
    """What a sequence begins with: a value of each array."""
    _, request, left = sequence
    sampling, count = request.sampling, len(request.ids)
    seed = np.array([sampling.seed], np.uint64).view(np.int64)[0]
    stops = [*sorted(request.stop)[:STOPS], *[-1] * STOPS][:STOPS]
    keys = (seed, request.sequence, count)
    return count - 1, request.ids[-1], stops, keys, sampling.numbers, sampling.top_k or 0, left


def _runs(
    sequences: Sequence[tuple[int, Request, int]],
) -> Iterator[tuple[int, list[tuple[int, Request, int]]]]:
    """Those in neighbouring rows, which are written together, with the first row."""
    for _, run in itertools.groupby(enumerate(sequences), lambda at: at[1][0] - at[0]):
        found = [each for _, each in run]
        yield found[0][0], found


def _write(target: Tensor, first: int, values: np.ndarray) -> None:
    """Overwrite the rows from `first` on; the host does not wait."""
    target.narrow(0, first, len(values)).copy_(genesis.from_numpy(values))


class Reading:
    """Tokens of some steps, on their way to the host.

    Args:
        places: of the steps in the ring.
        rings: tokens and log-probabilities `[R, B]`.
    """

    def __init__(self, places: np.ndarray, *rings: Tensor) -> None:
        self._places, self._event = places, cuda.Event()
        self._host = [_host_copy(each) for each in rings]
        if rings[0].is_cuda:
            self._event.record(cuda.current_stream(rings[0].device))

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities `[steps, B]`; waits for them."""
        self._event.synchronize()
        tokens, chances = (each.view_np()[self._places] for each in self._host)
        return tokens, chances


def _host_copy(ring: Tensor) -> Array:
    """The ring on the host, when its device comes to it."""
    if not ring.is_cuda:
        return ring.clone().array
    host = pinned_empty(ring.shape, ring.dtype, ring.device)
    overwrite(host, ring.array, non_blocking=True)
    return host
