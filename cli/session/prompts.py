"""Many prompts: a JSONL file of them, and their continuations as lines of JSON in the file's order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from genesis.errors import DataError, ModelError, escape
from genesis.io.strict_json import parse_object, read_limited
from genesis_models.engine import Piece

__all__ = ["LARGEST", "as_lines", "read_prompts"]

LARGEST = 64 << 20  # bytes of a file of prompts


def read_prompts(path: str) -> list[str]:
    """The "prompt" of each line of a JSONL file; other keys are left alone, and so are empty lines.

    Raises:
        DataError: no such file, a line that is no JSON object with a text as its "prompt", or no line.
    """
    found = []
    for number, line in enumerate(read_limited(path, LARGEST, DataError).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{escape(path)}:{number}"
        try:
            value = parse_object(line, where=where)
        except ModelError as error:
            what = f"the line is no JSON object: {error.what}"
            raise DataError(what, where=where, next='write a line as {"prompt": "text"}') from error
        if not isinstance(value.get("prompt"), str):
            what = 'the line has no text as its "prompt"'
            raise DataError(what, where=where, next='write a line as {"prompt": "text"}')
        found.append(value["prompt"])
    if not found:
        raise DataError("the file has no prompts", where=escape(path), next='write lines as {"prompt": "text"}')
    return found


def as_lines(pieces: Iterable[Piece], prompts: Sequence[str]) -> Iterator[str]:
    """A line of JSON for each prompt, in their order: prompt, completion, tokens and why the completion ends."""
    texts, ready, next_ = [""] * len(prompts), dict[int, str](), 0
    for piece in pieces:
        texts[piece.request] += piece.text
        if piece.finish is None:
            continue
        line = {"prompt": prompts[piece.request], "completion": texts[piece.request], "tokens": piece.tokens}
        ready[piece.request] = json.dumps({**line, "finish": piece.finish}) + "\n"
        while next_ in ready:
            yield ready.pop(next_)
            next_ += 1
