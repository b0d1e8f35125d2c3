"""Text from a model, one token at a time with a KV cache: temperature, top-k, top-p, a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import genesis
from genesis.errors import ModelError, NumericError, UsageError
from genesis.random import philox
from genesis_models.blocks import CausalLM, KeyValueCache

__all__ = ["Sampling", "choose", "generate"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only this many of the likeliest tokens; None for all.
        top_p: only the likeliest tokens that together reach this probability; None for all.
        seed: the same seed gives the same text.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def choose(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """The next token from logits `[V]`; the random number depends on seed and position only.

    Raises:
        NumericError: if the logits hold a NaN or an infinity.
    """
    scores = logits.astype(np.float64)
    if not np.isfinite(scores).all():
        kind = "NaN" if np.isnan(scores).any() else "infinite"
        raise NumericError(
            f"the model's logits are {kind}", where=f"position {position}", next="check the weights; try float32"
        )
    if sampling.temperature == 0:
        return int(scores.argmax())
    order = np.argsort(-scores, kind="stable")[: sampling.top_k]
    kept = (scores[order] - scores[order[0]]) / sampling.temperature
    weights = np.exp(kept)
    weights /= weights.sum()
    if sampling.top_p is not None:
        count = int(np.searchsorted(np.cumsum(weights), sampling.top_p)) + 1
        order, weights = order[:count], weights[:count] / weights[:count].sum()
    high, low = (int(w) for w in philox(sampling.seed, position, 1)[0, :2])
    uniform = ((high << 21) | (low >> 11)) * 2.0**-53
    return int(order[min(int(np.searchsorted(np.cumsum(weights), uniform, side="right")), len(order) - 1)])


def generate(
    model: CausalLM, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Token ids that continue `prompt`, as they are drawn; ends after a token of `stop` (not yielded) or `max_tokens`.

    Beyond the model's context length nothing is generated: it has not learned such positions.

    Raises:
        UsageError: for an empty prompt, or one that fills the context already. ModelError: an id beyond the vocabulary.
    """
    longest = model.config.context_length
    if not prompt:
        raise UsageError("the prompt has no tokens", next="give at least one")
    if len(prompt) >= longest:
        raise UsageError(f"the prompt has {len(prompt)} tokens, the model's context holds {longest}", next="shorten it")
    if not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
        wrong = max(prompt) if min(prompt) >= 0 else min(prompt)
        what = f"the prompt has the token id {wrong:,}, and the model's vocabulary {model.config.vocab_size:,}"
        raise ModelError(what, next="use the model's own tokenizer")
    training = model.training
    model.eval()
    try:
        yield from _continue(model, list(prompt), sampling, min(max_tokens, longest - len(prompt)), stop)
    finally:
        model.train(training)


def _continue(
    model: CausalLM, prompt: list[int], sampling: Sampling, count: int, stop: frozenset[int]
) -> Iterator[int]:
    weight = model.head_weight
    cache = KeyValueCache(model.config, 1, len(prompt) + count, weight.dtype, str(weight.device))
    tokens = prompt
    for position in range(len(prompt), len(prompt) + count):
        with genesis.no_grad():
            ids = genesis.tensor([tokens], dtype="int64", device=weight.device)
            hidden = model.hidden_states(ids, cache=cache)[:, -1]  # [1, H]
            logits = genesis.nn.functional.linear(hidden, weight)[0]
        token = choose(logits.float().cpu().numpy(), sampling, position)
        if token in stop:
            return
        yield token
        tokens = [token]
