"""Prompts that are typed or in a JSONL file, and their continuations as lines of JSON in the file's order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from genesis.data.readers.stream import BOM
from genesis.data.record_formats import read_messages, read_tools
from genesis.data.records import Conversation, Position
from genesis.errors import DataError, ModelError, UsageError, escape
from genesis.files.strict_json import parse_object, read_limited
from genesis_models.engine import Piece

LARGEST = 64 << 20  # bytes of a file of prompts
EXAMPLES = 'write a line as {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued.

    Attributes:
        record: a text, or a conversation that is to be answered.
        where: its file and line.
        given: what the line of its continuation repeats of it.
    """

    record: str | Conversation
    where: str
    given: Mapping[str, Any]

    def as_chat(self) -> Prompt:
        """A text as a user's message."""
        if isinstance(self.record, Conversation):
            return self
        return replace(self, record=Conversation(({"role": "user", "content": self.record},)))

    def with_system(self, text: str) -> Prompt:
        """A conversation with this system message, unless it has its own.

        Raises:
            UsageError: it is a text.
        """
        if isinstance(self.record, str):
            what = "--system is a message of a chat, and the prompt is a text"
            raise UsageError(what, where=self.where or "command line", next="add --chat")
        messages = self.record.messages
        if messages[0]["role"] in ("system", "developer"):
            return self
        return replace(self, record=replace(self.record, messages=({"role": "system", "content": text}, *messages)))


def read_prompts(path: str) -> list[Prompt]:
    """The "prompt" or the "messages" of each line of a JSONL file; other keys are left alone, and so are empty lines.

    Raises:
        DataError: no such file, no line, or one that is no JSON object with either; it names line and field.
    """
    return [_prompt(*line) for line in read_lines(path, "prompts", EXAMPLES)]


def read_lines(path: str, what: str, examples: str) -> list[tuple[Mapping[str, Any], Position, str]]:
    """The JSON object of each line that is not empty, with its position and how an error names it.

    Args:
        what: the lines hold, for the error where there is none.
        examples: what an error says to do next.

    Raises:
        DataError: no such file, no line, or one that is no JSON object.
    """
    found: list[tuple[Mapping[str, Any], Position, str]] = []
    for number, line in enumerate(read_limited(path, LARGEST, DataError).removeprefix(BOM).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{escape(path)}:{number}"
        try:
            found.append((parse_object(line, where=where), Position(path, number), where))
        except ModelError as error:
            raise DataError(f"the line is no JSON object: {error.what}", where=where, next=examples) from error
    if not found:
        raise DataError(f"the file has no {what}", where=escape(path), next=examples)
    return found


def _prompt(value: Mapping[str, Any], position: Position, where: str) -> Prompt:
    """The prompt of one line. Raises: DataError."""
    if ("prompt" in value) == ("messages" in value):
        what = "the line has both a prompt and messages" if "prompt" in value else 'the line has no "prompt"'
        raise DataError(what, where=where, next=EXAMPLES)
    if "messages" in value:
        return Prompt(_conversation(value, position), where, {"messages": value["messages"]})
    if not isinstance(value["prompt"], str):
        raise DataError("the prompt is no text", where=f"{where}: prompt", next=EXAMPLES)
    if not value["prompt"]:
        raise DataError("the prompt is empty", where=f"{where}: prompt", next="give at least one character")
    return Prompt(value["prompt"], where, {"prompt": value["prompt"]})


def _conversation(value: Mapping[str, Any], position: Position) -> Conversation:
    """Raises: Defect."""
    messages, tools = read_messages(value["messages"], position), read_tools(value.get("tools"), position)
    if messages[-1]["role"] == "assistant":
        field = f"messages[{len(messages) - 1}].role"
        what = "the last message is the assistant's, and there is nothing to answer"
        raise position.defect("answered", what, "take it out, or add the user's next message", field=field)
    return Conversation(messages, tools)


def as_lines(pieces: Iterable[Piece], prompts: Sequence[Prompt]) -> Iterator[str]:
    """A line of JSON for each prompt, in their order: what was given, completion, tokens and why it ends."""
    texts, ready, next_ = [""] * len(prompts), dict[int, str](), 0
    for piece in pieces:
        texts[piece.request] += piece.text
        if piece.finish is None:
            continue
        line = {**prompts[piece.request].given, "completion": texts[piece.request], "tokens": piece.tokens}
        ready[piece.request] = json.dumps({**line, "finish": piece.finish}) + "\n"
        while next_ in ready:
            yield ready.pop(next_)
            next_ += 1
