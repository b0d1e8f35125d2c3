"""Generation: sequences of unequal length in the rows of one KV cache; see docs/decisions/0011-generation.md."""

from genesis_models.engine.eager import EagerEngine
from genesis_models.engine.engine import Engine, Finish, Request, Token, length_of
from genesis_models.engine.sampling import Sampling, choose

__all__ = ["EagerEngine", "Engine", "Finish", "Request", "Sampling", "Token", "choose", "length_of"]
