"""The ids that continue a prompt, drawn by the engine that `generate` chooses."""

from __future__ import annotations

from collections.abc import Sequence

from genesis_models import CausalLM
from genesis_models.engine import Request, Sampling
from genesis_models.generate import engine_for


def continue_ids(
    model: CausalLM, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    request = Request(prompt, sampling, max_tokens, stop)
    return [token.id for token in engine_for(model, [request]).run([request]) if token.id is not None]
