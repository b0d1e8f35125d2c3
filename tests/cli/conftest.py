"""A tiny model with a chat template that shows roles and ends of turns."""

from __future__ import annotations

from pathlib import Path

import pytest

import genesis_models
from genesis.data.tokenizer import train_bpe
from tests.models.golden import golden

__all__ = ["ASKED", "TURN"]

TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
ASKED = "{{ 'assistant: ' * add_generation_prompt }}"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, which is not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
    genesis_models.save(genesis_models.load(golden("qwen3-tied").folder), folder, tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text(TURN + ASKED)
    return folder
