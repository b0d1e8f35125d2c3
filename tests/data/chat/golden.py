"""The golden samples and the tokenizers they were made with."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from genesis.data.chat import ChatTemplate, Sample
from genesis.data.records import Conversation, Document, record_text
from tests.data.chat.conversations import with_objects

HERE = Path(__file__).parent

Pair = tuple[list[int], list[int]]


@cache
def golden() -> dict[str, Any]:
    """`tokenizers` by kind, and `turns` by case and conversation."""
    return dict(json.loads(gzip.decompress((HERE / "golden.json.gz").read_bytes())))


def write_tokenizer(kind: str, folder: Path) -> Path:
    """`folder` with the tokenizer `qwen` or `llama`."""
    found = golden()["tokenizers"][kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(found["content"]), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(found["config"]), "utf-8")
    return folder


def template(name: str, args: dict[str, Any] | None = None) -> ChatTemplate:
    """One of the templates beside this file."""
    return ChatTemplate.read(HERE / "templates" / f"{name}.jinja", args)


def document(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, prompt: int = 0) -> Document:
    """A conversation as the readers give it."""
    messages = with_objects(messages)
    record = Conversation(tuple(messages), None if tools is None else tuple(tools), prompt)
    return Document(record_text(record), "chats.jsonl", 7, record)


def pairs(samples: list[Sample]) -> list[Pair]:
    """For each run of targets the ids before it and its own."""
    found = []
    for sample in samples:
        edges = [i for i in range(1, len(sample.ids)) if sample.is_target[i] != sample.is_target[i - 1]]
        edges += [len(sample.ids)] * (len(edges) % 2)
        ids = sample.ids.tolist()
        found += [(ids[:start], ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return found
