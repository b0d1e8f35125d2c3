"""Tiny models that chat: a tokenizer with ChatML's tokens and Qwen3's template, conversations, a base, a recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import genesis_models
from genesis.data.tokenizer import Tokenizer, train_bpe
from tests.data.chat.golden import HERE as CHAT

__all__ = ["ADDED", "chat", "make_chats", "token", "write_chat_tokenizer", "write_chats"]

ADDED = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
CONFIG = """
model: {{path: {folder}/base}}
data: {{train: "{folder}/chats.jsonl", seq_len: 64, eval_fraction: 0.2, cache_dir: "{folder}/cache"}}
train: {{output_dir: {folder}/run, steps: 2, batch_size: 2, threads: 1}}
optim: {{lr: 1e-2}}
lora: {{r: 4}}
eval: {{prompts: []}}
checkpoint: {{every: 2}}
log: {{every: 1}}
"""
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def chat(*said: str) -> dict[str, Any]:
    """The record of a conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]}


def write_chats(path: Path, chats: Iterable[Any]) -> Path:
    """The records as JSONL."""
    path.write_text("".join(json.dumps(record) + "\n" for record in chats))
    return path


def write_chat_tokenizer(folder: Path, text: str, vocab_size: int) -> int:
    """A tokenizer of `text` with the added tokens and the template of Qwen3; returns the size of its vocabulary."""
    files = train_bpe([text], vocab_size=vocab_size).files()
    content = json.loads(files["tokenizer.json"])
    first, size = content["added_tokens"][0], len(content["model"]["vocab"])
    content["added_tokens"] += [
        {**first, "id": size + n, "content": token, "special": token.startswith("<|")} for n, token in enumerate(ADDED)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_bytes(files["tokenizer_config.json"])
    shutil.copy(CHAT / "templates" / "qwen3.jinja", folder / "chat_template.jinja")
    return size + len(ADDED)


def token(folder: Path, text: str) -> int:
    """The id of a token of the tokenizer in `folder`."""
    found = Tokenizer.load(folder).token_id(text)
    assert found is not None
    return found


def make_chats(folder: Path) -> Path:
    """Conversations, a base model that knows the tokens of ChatML, and the path of a configuration of both."""
    write_chats(folder / "chats.jsonl", (chat(f"{n} + {n}", str(2 * n)) for n in range(20)))
    base = folder / "base"
    genesis_models.save(genesis_models.build({**SHAPE, "eos_token_id": 0}, 0), base)
    assert write_chat_tokenizer(base, "one two three 1 2 3 " * 9, vocab_size=266) <= SHAPE["vocab_size"]
    (base / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.6}\n')
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path
