"""The engine on the CPU: runs requests token by token through the rows of one KV cache. It handles ids, not text.

A request waits for a row, is prefilled in chunks, and then gets a token in each step of all rows. A finished row takes
the next request. Rows are masked by length, never by an id. `EagerEngine` is the plain engine, and the tests compare
the others with it.

Shapes: L layers, B rows, S capacity, T tokens, Q query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

import genesis
from genesis import Tensor
from genesis.errors import ModelError, UsageError
from genesis.nn import functional as F
from genesis_models.blocks import CausalLM, EngineCache, KeyValueCache, Rotary, Tables
from genesis_models.config import ModelConfig
from genesis_models.engine.sampling import Sampling, SamplingRows, not_finite


class RowCache:
    """Keys and values of sequences of unequal length. Positions beyond a row's length are never read.

    Args:
        rows: the most concurrent sequences.
        capacity: the most tokens of each sequence.

    Attributes:
        data: `[L, 2, B, K, S, D]`, keys and values.
        lengths: tokens in each row.
    """

    def __init__(self, config: ModelConfig, rows: int, capacity: int, dtype: genesis.DType) -> None:
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, capacity, config.head_dim)
        self._tensor = genesis.empty(shape, dtype=dtype)
        self.data = self._tensor.numpy()
        self.lengths = np.zeros(rows, np.int64)
        self.capacity = capacity


class CacheRows(EngineCache):
    """Some rows of a `RowCache`; a forward pass appends T tokens to each.

    Args:
        totals: sequence lengths that scale the rotary angles; for a chunk, the length of the whole prompt.
    """

    def __init__(self, cache: RowCache, rows: np.ndarray, totals: Sequence[int] | None) -> None:
        self._cache, self._rows, self._totals = cache, rows, totals
        self._lengths = cache.lengths[rows]

    def tables(self, rotaries: Sequence[Rotary], t: int) -> Tables:
        """Return cos and sin `[B, T, D/2]` of the next T positions of each row."""
        positions = self._lengths[:, None] + np.arange(t)  # [B, T]
        return [rotary.rows(positions, self._totals) for rotary in rotaries]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, layer: int, window: int, scale: float
    ) -> Tensor:
        """Append k, v `[B, T, K, D]`, and return attention of q `[B, T, Q, D]` over each row's keys so far."""
        t, (keys, values) = q.shape[1], self._cache.data[layer]
        found = []
        for i, (row, begin) in enumerate(zip(self._rows.tolist(), self._lengths.tolist(), strict=True)):
            end = begin + t
            keys[row, :, begin:end] = k[i].numpy().swapaxes(0, 1)
            values[row, :, begin:end] = v[i].numpy().swapaxes(0, 1)
            low = max(0, begin + 1 - window) if window else 0
            seen = [genesis.from_numpy(x[row, :, low:end].swapaxes(0, 1)[None]) for x in (keys, values)]
            found.append(F.attention(q[i : i + 1], *seen, scale=scale, causal=True, window=window))
        return found[0] if len(found) == 1 else genesis.cat(found, 0)

    def advance(self, t: int) -> None:
        """Count T more tokens in each row."""
        self._cache.lengths[self._rows] += t


CHUNK = 512  # tokens of a prompt in one forward pass
Finish = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    Attributes:
        ids: ids of the prompt.
        sampling: sampling settings.
        max_tokens: the most tokens of its continuation.
        stop: ids that end it; they are not part of it.
        sequence: which of the seed's random numbers it draws; the text does not depend on the batch.
    """

    ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop: frozenset[int] = frozenset()
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """A new token of a request, or its end.

    Attributes:
        request: number of the request, in the order of `Engine.run`'s argument.
        id: next token of the continuation; None if the continuation ended without one.
        log_prob: log-probability of the token under the model's unmodified logits; None unless requested.
        finish: why the continuation ends here: "stop" at a stop id or by `Engine.cancel`, "length" at `max_tokens`,
            "context" at the end of the model's context; None if it continues.
    """

    request: int
    id: int | None
    log_prob: float | None = None
    finish: Finish | None = None


class Waiting:
    """Requests that wait for a row; each gets its number when it is taken.

    Args:
        requests: yields None when nothing is pending. It is read again before the next step, or at once if nothing
            runs.
    """

    def __init__(self, requests: Iterable[Request | None]) -> None:
        self._requests, self._taken, self._is_open = iter(requests), 0, True
        self._pause: Callable[[], None] | None = getattr(requests, "pause", None)
        self._again: deque[tuple[int, Request]] = deque()

    @property
    def is_more(self) -> bool:
        """Whether more requests may come."""
        return self._is_open or bool(self._again)

    def requeue(self, number: int, request: Request) -> None:
        """Let the remainder of request `number` wait for a row before all others."""
        self._again.append((number, request))

    def pause(self) -> None:
        """Call the source's `pause`, if it has one, before the engine waits for a step."""
        if self._pause is not None:
            self._pause()

    def cancel(self, number: int) -> None:
        """Drop the remainder of a request."""
        self._again = deque(each for each in self._again if each[0] != number)

    def take(self) -> tuple[int, Request] | None:
        """Return the next request and its number, or None if nothing is pending."""
        if self._again:
            return self._again.popleft()
        try:
            request = next(self._requests) if self._is_open else None
        except StopIteration:
            self._is_open, request = False, None
        if request is None:
            return None
        self._taken += 1
        return self._taken - 1, request


class FullContext(UsageError):
    """The prompt leaves no room in the context for an answer."""


def check_prompt(model: CausalLM, ids: Sequence[int], room: int = 1) -> None:
    """Raise UsageError if the prompt is empty or leaves less than `room` tokens of the context, and
    ModelError if an id exceeds the vocabulary.
    """
    longest = model.config.context_length
    if not len(ids):
        raise UsageError("the prompt has no tokens", next="give at least one")
    if len(ids) > longest - room:
        what = f"the prompt has {len(ids)} tokens, but the model's context holds {longest}"
        raise FullContext(what, next="shorten it")
    if not 0 <= min(ids) <= max(ids) < model.config.vocab_size:
        wrong = max(ids) if min(ids) >= 0 else min(ids)
        what = f"the prompt has the token id {wrong:,}, but the model's vocabulary has {model.config.vocab_size:,}"
        raise ModelError(what, next="use the model's own tokenizer; training adds rows for new tokens")


def length_of(model: CausalLM, request: Request) -> int:
    """Return the most tokens that a request can reach, including its prompt."""
    return min(len(request.ids) + max(request.max_tokens, 0), model.config.context_length)


@dataclass(eq=False, slots=True)
class Running:
    """A request that has a row.

    Attributes:
        most: tokens of its continuation until it ends or its keys must be recomputed.
        tokens: tokens of its continuation; the last one is not in the cache yet.
        is_done: it ended or was cancelled, and further tokens are ignored.
    """

    request: Request
    number: int
    most: int
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False

    def take(self, model: CausalLM, token: int, log_prob: float | None) -> tuple[Token, Request | None]:
        """Return the result of its next token, and the remainder of the request if its keys must be recomputed.

        As in transformers, all rotary angles change once a sequence reaches a certain length.
        """
        self.tokens.append(token)
        count, request, remainder = len(self.tokens), self.request, None
        finish: Finish | None = None
        if token in request.stop:
            self.is_done = True
            return Token(self.number, None, None, "stop"), None
        if count >= self.most:
            self.is_done, finish = True, "length" if count >= request.max_tokens else "context"
            ids = [*request.ids, *self.tokens]
            if finish == "context" and len(ids) < model.config.context_length:
                remainder, finish = replace(request, ids=ids, max_tokens=request.max_tokens - count), None
        return Token(self.number, token, log_prob, finish), remainder


def running(model: CausalLM, number: int, request: Request, capacity: int) -> Running | None:
    """Return a request that can run, or None if it asks for no token.

    Raises:
        UsageError, ModelError: as in `Engine.run`, or it may reach more tokens than `capacity`.
    """
    check_prompt(model, request.ids)
    request.sampling.check()
    if request.max_tokens <= 0:
        return None
    length, count, trained = length_of(model, request), len(request.ids), model.config.packed_length
    if length > capacity:
        what = f"a sequence may reach {length} tokens, but the engine's capacity is {capacity}"
        raise UsageError(what, next="create the engine with that capacity")
    is_stretched_later = count <= trained < length and model.config.regime(length) == 1
    return Running(request, number, (trained + 1 if is_stretched_later else length) - count)


class Engine:
    """Generates with a model on the CPU.

    Args:
        model: in eval mode while requests run.
        rows: the most concurrent sequences.
        capacity: the most tokens of a sequence, including its prompt.
        log_probs: whether tokens have their log-probability.
        chunk: tokens of a prompt in one forward pass.
    """

    def __init__(
        self, model: CausalLM, *, rows: int, capacity: int, log_probs: bool = False, chunk: int = CHUNK
    ) -> None:
        self.model, self._log_probs, self._chunk = model, log_probs, chunk
        self.cache = RowCache(model.config, rows, capacity, model.model.embed_tokens.weight.dtype)
        self._sampling = SamplingRows(rows, model.config.vocab_size)
        self._rows: list[Running | None] = [None] * rows
        self._waiting = Waiting(())

    def run(self, requests: Iterable[Request | None]) -> Iterator[Token]:
        """Yield the tokens of all requests as they are drawn, several requests at a time.

        Requests are taken when a row is free; `Waiting` describes None among them.

        Raises:
            UsageError: a prompt is empty or too long, or a setting is out of bounds. ModelError: an id exceeds the
                vocabulary. NumericError: logits are NaN or infinite.
        """
        self._waiting = waiting = Waiting(requests)
        was_training = self.model.training
        self.model.eval()
        try:
            while True:
                for row in range(len(self._rows)):
                    while self._rows[row] is None and (taken := waiting.take()) is not None:
                        yield from self._admit(row, *taken)
                waiting.pause()
                active = [row for row, used in enumerate(self._rows) if used is not None]
                if active:
                    last = np.array([[used.tokens[-1]] for used in self._rows if used is not None], np.int64)
                    yield from self._drawn(np.array(active), self._forward(np.array(active), last, None))
                elif not waiting.is_more:
                    return
        finally:
            self._rows = [None] * len(self._rows)
            self.model.train(was_training)

    def cancel(self, request: int) -> None:
        """End a request with the tokens that it has; `run` frees its row before its next step."""
        self._waiting.cancel(request)
        for row, used in enumerate(self._rows):
            if used is not None and used.number == request:
                used.is_done, self._rows[row] = True, None

    def _admit(self, row: int, number: int, request: Request) -> Iterator[Token]:
        """Prefill a prompt in chunks, and draw the first token."""
        self._rows[row] = running(self.model, number, request, self.cache.capacity)
        if self._rows[row] is None:
            yield Token(number, None, finish="length")
            return
        ids = np.asarray(request.ids, np.int64)
        self.cache.lengths[row] = 0
        self._sampling.start(row, request.sampling, request.sequence, ids)
        rows, cut = np.array([row]), (len(ids) - 1) // self._chunk * self._chunk
        for begin in range(0, cut, self._chunk):
            self._forward(rows, ids[None, begin : begin + self._chunk], [len(ids)])
        yield from self._drawn(rows, self._forward(rows, ids[None, cut:], [len(ids)]))

    def _forward(self, rows: np.ndarray, ids: np.ndarray, totals: Sequence[int] | None) -> genesis.Tensor:
        """Return the last hidden state `[B, H]` of each row after `ids` `[B, T]`."""
        with genesis.no_grad():
            return self.model.next_hidden_states(genesis.from_numpy(ids), CacheRows(self.cache, rows, totals))[:, -1]

    def _drawn(self, rows: np.ndarray, hidden: genesis.Tensor) -> Iterator[Token]:
        with genesis.no_grad():
            logits = self.model.logits(hidden)  # [B, V]
        tokens, chances = self._sampling.draw(logits, rows, self._log_probs)
        used = [self._rows[row] for row in rows.tolist()]
        for i, token in enumerate(tokens.tolist()):
            if token < 0:
                raise not_finite(logits[i].float().numpy(), int(self.cache.lengths[rows[i]]))
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            each = used[i]
            if each is None or each.is_done:
                continue
            result, remainder = each.take(self.model, token, float(chances[i]) if self._log_probs else None)
            if result.finish is not None or remainder is not None:
                self._rows[row] = None
            if remainder is not None:
                self._waiting.requeue(each.number, remainder)
            yield result


class EagerEngine:
    """Like `Engine`, but for one sequence at a time."""

    def __init__(self, model: CausalLM, *, log_probs: bool = False) -> None:
        self.model, self._log_probs = model, log_probs
        self._sampling = SamplingRows(1, model.config.vocab_size)
        self._cancelled: int | None = None

    def run(self, requests: Iterable[Request]) -> Iterator[Token]:
        """See `Engine.run`."""
        was_training, self._cancelled = self.model.training, None
        self.model.eval()
        try:
            for number, request in enumerate(requests):
                yield from self._continue(number, request)
        finally:
            self.model.train(was_training)

    def cancel(self, request: int) -> None:
        """See `Engine.cancel`."""
        self._cancelled = request

    def _continue(self, number: int, request: Request) -> Iterator[Token]:
        length, weight = length_of(self.model, request), self.model.model.embed_tokens.weight
        run, tokens, row = running(self.model, number, request, length), list(request.ids), np.zeros(1, np.int64)
        if run is None:
            yield Token(number, None, finish="length")
            return
        cache = KeyValueCache(self.model.config, 1, length, weight.dtype, str(weight.device))
        self._sampling.start(0, request.sampling, request.sequence, np.asarray(tokens))
        while not run.is_done:
            with genesis.no_grad():
                ids = genesis.tensor([tokens], dtype="int64", device=weight.device)
                hidden = self.model.hidden_states(ids, cache=cache)[:, -1]  # [1, H]
                logits = self.model.logits(hidden)  # [1, V]
            drawn, chances = self._sampling.draw(logits, row, self._log_probs)
            tokens = [int(drawn[0])]
            if tokens[0] < 0:
                raise not_finite(logits[0].float().cpu().numpy(), cache.length)
            result, remainder = run.take(self.model, tokens[0], float(chances[0]) if self._log_probs else None)
            yield result
            if self._cancelled == number:
                return
            if remainder is not None:
                yield from self._continue(number, remainder)
