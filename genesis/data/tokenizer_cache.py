"""What the checks of a large tokenizer made of its files, kept for the next process: it is checked once, not read once.

The files are read and hashed at each start, so that a changed one is checked again. What may be read back is the rule
of `genesis.files.cache`; an entry that breaks it, or that other code has written, is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from genesis.files.cache import USER, Cache, user_folder

MIN_BYTES = 1 << 20  # of files that are worth an entry; checking 1 MiB takes 0.1 s
MAX_BYTES = 128 << 20  # of an entry


@dataclass(frozen=True)
class CheckedTokenizer:
    """What of a tokenizer's files is needed to run it.

    Attributes:
        runnable: the tokenizer.json for the library: what encodes and decodes plain text, and nothing that changes it.
        parts: tokenizer.json, parsed, without the vocabulary and the merges.
        specials: bos, eos and pad -> the token's text; None where the tokenizer has none.
        vocab_size: the largest id + 1: the rows that an embedding needs.
    """

    runnable: str
    parts: Mapping[str, Any]
    specials: Mapping[str, str | None]
    vocab_size: int


@cache
def user_cache() -> Cache:
    """Where the user's processes keep what they found out about tokenizers."""
    return Cache(user_folder("tokenizers"), **USER)


def cached_tokenizer(
    files: Mapping[str, bytes], code: Collection[Path], check: Callable[[], CheckedTokenizer]
) -> CheckedTokenizer:
    """What `check()` makes of `files`, or has made of the same bytes in an earlier process.

    Args:
        code: the source files that decide what `check` makes.
    """
    if sum(map(len, files.values())) < MIN_BYTES:
        return check()
    contents = {**files, **{f"code {os.fspath(path)}": path.read_bytes() for path in (Path(__file__), *code)}}
    hashes = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in contents.items())
    name = f"{hashlib.sha256(json.dumps(hashes).encode()).hexdigest()}.checked"
    if (entry := user_cache().find(name, limit=MAX_BYTES)) is not None:
        return CheckedTokenizer(str(entry.part("runnable"), "utf-8"), **json.loads(bytes(entry.part("rest"))))
    found = check()
    rest = {"parts": found.parts, "specials": found.specials, "vocab_size": found.vocab_size}
    user_cache().put(name, {"runnable": found.runnable.encode(), "rest": json.dumps(rest).encode()})
    return found
