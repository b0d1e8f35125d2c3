"""Tiny models with a chat template that shows roles and ends of turns."""

from __future__ import annotations

from pathlib import Path

import genesis
import genesis_models
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis_models.blocks import CausalLM
from tests.models.golden import golden

__all__ = ["ASKED", "TURN", "write_chat_model", "write_legible_model"]

TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
ASKED = "{{ 'assistant: ' * add_generation_prompt }}"
LOUDER = 3.0


def write_chat_model(folder: Path) -> Path:
    """Its folder: a golden model of 128 positions, with a tokenizer of 262 tokens."""
    return _saved(genesis_models.load(golden("qwen3-tied").folder), folder)


def write_legible_model(folder: Path) -> Path:
    """The same of another golden model, whose texts are letters and differ: small random weights repeat one token."""
    model, tokenizer = genesis_models.load(golden("qwen2-untied-sharded").folder), _tokenizer()
    texts = [tokenizer.decode([id]) for id in range(tokenizer.vocab_size)]
    letters = [id for id, text in enumerate(texts) if text.isascii() and text.isalpha()]
    with genesis.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(LOUDER)
        model.lm_head.weight[letters] *= LOUDER
    return _saved(model, folder)


def _saved(model: CausalLM, folder: Path) -> Path:
    genesis_models.save(model, folder, tokenizer=_tokenizer())
    (folder / "chat_template.jinja").write_text(TURN + ASKED)
    return folder


def _tokenizer() -> Tokenizer:
    return train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
