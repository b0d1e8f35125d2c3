"""A model as the hub has them, only tiny: Qwen3's layers, tokens of ChatML and the template, room for long chats."""

from __future__ import annotations

from pathlib import Path

import genesis_models
from tests.train.chats import SHAPE, write_chat_tokenizer

__all__ = ["write_model"]


def write_model(folder: Path) -> Path:
    """The model's folder."""
    shape = {**SHAPE, "hidden_size": 16, "head_dim": 8, "vocab_size": 512, "max_position_embeddings": 2048}
    genesis_models.save(genesis_models.build({**shape, "eos_token_id": 0}, 0), folder)
    assert write_chat_tokenizer(folder, "what does the setting of Genesis do? " * 9, vocab_size=300) <= 512
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}\n')
    return folder
