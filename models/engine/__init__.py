"""Generates sequences of unequal length in the rows of one KV cache; see docs/decisions/0011-generation.md."""

from genesis_models.engine.engine import EagerEngine, Engine, Finish, Request, Token, length_of
from genesis_models.engine.sampling import Sampling, choose
from genesis_models.engine.text import Piece, Runner, continue_texts

__all__ = [
    "EagerEngine",
    "Engine",
    "Finish",
    "Piece",
    "Request",
    "Runner",
    "Sampling",
    "Token",
    "choose",
    "continue_texts",
    "length_of",
]
