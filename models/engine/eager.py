"""The plain engine: one request after the other, each with a cache of its own, on any device.

It is what tests hold `Engine` and `DeviceEngine` against.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

import genesis
from genesis_models.blocks import CausalLM, KeyValueCache
from genesis_models.engine.engine import Request, Token, check_prompt, finish_of, length_of, rest_of, room_for
from genesis_models.engine.sampling import SamplingRows, not_finite


class EagerEngine:
    """As `Engine`, for one sequence at a time."""

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
                check_prompt(self.model, request.ids)
                request.sampling.check()
                yield from self._continue(number, request)
        finally:
            self.model.train(was_training)

    def cancel(self, request: int) -> None:
        """See `Engine.cancel`."""
        self._cancelled = request

    def _continue(self, number: int, request: Request) -> Iterator[Token]:
        length, weight = length_of(self.model, request), self.model.model.embed_tokens.weight
        most, tokens, row = room_for(self.model, request), list(request.ids), np.zeros(1, np.int64)
        continuation: list[int] = []
        if most <= 0:
            yield Token(number, None, finish="length")
            return
        cache = KeyValueCache(self.model.config, 1, length, weight.dtype, str(weight.device))
        self._sampling.start(0, request.sampling, request.sequence, np.asarray(tokens))
        for count in range(1, most + 1):
            with genesis.no_grad():
                ids = genesis.tensor([tokens], dtype="int64", device=weight.device)
                hidden = self.model.hidden_states(ids, cache=cache)[:, -1]  # [1, H]
                logits = self.model.logits(hidden)  # [1, V]
            drawn, chances = self._sampling.draw(logits, row, self._log_probs)
            token = int(drawn[0])
            if token < 0:
                raise not_finite(logits[0].float().cpu().numpy(), cache.length)
            finish = finish_of(request, token, count, most)
            continuation.append(token)
            rest = rest_of(self.model, request, continuation, finish)
            if finish == "stop":
                yield Token(number, None, finish=finish)
                return
            yield Token(number, token, float(chances[0]) if self._log_probs else None, finish if rest is None else None)
            if self._cancelled == number:
                return
            tokens = [token]
            if rest is not None:
                yield from self._continue(number, rest)
