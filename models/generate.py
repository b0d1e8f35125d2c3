"""Ids that continue a prompt: by the engine on the CPU, by a cache of its own for one sequence on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from genesis.backend import CPU
from genesis_models.blocks import CausalLM
from genesis_models.engine import EagerEngine, Engine, Request, Sampling, choose, length_of

__all__ = ["ROWS", "Sampling", "choose", "engine_for", "generate"]

ROWS = 16  # sequences at a time: a CPU's matmuls gain little from more


def generate(
    model: CausalLM, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Token ids that continue `prompt`, as they are drawn; ends after a token of `stop` (not yielded) or `max_tokens`.

    Beyond the model's context length nothing is generated: it has not learned such positions.

    Raises:
        UsageError: for an empty prompt, or one that fills the context already. ModelError: an id beyond the vocabulary.
    """
    request = Request(prompt, sampling, max_tokens, stop)
    for token in engine_for(model, [request]).run([request]):
        if token.id is not None:
            yield token.id


def engine_for(
    model: CausalLM, requests: Sequence[Request], *, rows: int = ROWS, log_probs: bool = False
) -> Engine | EagerEngine:
    """An engine for these requests where the model is: on a GPU they run one after the other.

    Args:
        rows: the most sequences at a time.
        log_probs: whether tokens have their log-probability.
    """
    if model.head_weight.device != CPU:
        return EagerEngine(model, log_probs=log_probs)
    capacity = max([length_of(model, request) for request in requests], default=1)
    return Engine(model, rows=max(1, min(rows, len(requests))), capacity=capacity, log_probs=log_probs)
