"""A task for every golden model and adapter; `tests.peers.eval_tasks` stored what transformers answers to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from genesis.data.tokenizer import train_bpe
from tests.adapters.golden import FIXTURES as ADAPTERS
from tests.adapters.golden import NAMES as ADAPTED
from tests.cli.chat_model import ASKED, TURN
from tests.models.golden import EXTRA, FIXTURES, NAMES

__all__ = [
    "ADAPTED",
    "FIXTURE",
    "ITEMS",
    "LARGEST",
    "MODELS",
    "NEW",
    "write_adapter",
    "write_model",
    "write_task",
]

FIXTURE = Path(__file__).parent / "eval_tasks.json"
MODELS = (*NAMES, *EXTRA)
LARGEST = 1e-5  # the largest difference of a sum of log-probabilities, in float32
NEW = 16
SENTENCES = "the quick brown fox jumps over the lazy dog and then some more words to learn by the dog and the fox. " * 2
ITEMS: list[dict[str, Any]] = [
    {"prompt": "the quick brown", "choices": [" fox", " dog", " words"], "answer": 0},
    {"prompt": "over the ", "choices": ["lazy dog", "fox"], "answer": 1},
    {"prompt": "2+2=", "choices": ["4", "5", "22", "four"], "answer": "4"},
    {"messages": [{"role": "user", "content": "who?"}], "choices": ["the dog", "the lazy fox"], "answer": 1},
    {"prompt": "the", "answer": "never"},
    {"prompt": "some more", "answer": "never"},
    {"messages": [{"role": "user", "content": "who jumps?"}], "answer": "never"},
]


def write_task(path: Path) -> Path:
    """The items as JSONL."""
    path.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    return path


def write_model(name: str, folder: Path) -> Path:
    """A golden model with a tokenizer of as many tokens as it has, and a chat template."""
    found = FIXTURES / "extra" / name if name in EXTRA else FIXTURES / name
    shutil.copytree(found, folder, ignore=shutil.ignore_patterns("reference.safetensors", "trainer.json"))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = train_bpe([SENTENCES], vocab_size=max(size, 260))
    files = tokenizer.files()
    if size < 260:  # no room for all bytes: characters alone
        content = json.loads(files["tokenizer.json"])
        shown = [chr(code) for code in range(ord("!"), ord("~") + 1)]
        tokens = [content["added_tokens"][0]["content"], "Ġ", *shown]
        content["model"] |= {"vocab": {token: id for id, token in enumerate(tokens[:size])}, "merges": []}
        files["tokenizer.json"] = json.dumps(content).encode()
    for each, data in files.items():
        (folder / each).write_bytes(data)
    (folder / "chat_template.jinja").write_text(TURN + ASKED)
    return folder


def write_adapter(name: str, base: Path, folder: Path) -> Path:
    """A golden adapter that names the folder of its base."""
    shutil.copytree(ADAPTERS / name, folder, ignore=shutil.ignore_patterns("reference.safetensors"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder
