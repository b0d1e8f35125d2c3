"""Records and documents: what the readers give and the encoders take, and what is wrong with one. It reads nothing.

A `Document` is a text or a record: a `Completion` or a `Conversation`. What hashes, splits, counts or names documents
sees `Document.text` alone, so that it works for both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from genesis.errors import DataError, escape

Message = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")  # its names in a message; the first one is read


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what is to come after it; they are encoded apart, without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a chat template takes them.

    Attributes:
        messages: each with `role`, `content`, and whatever else the template may look at.
        tools: JSON schemas of the functions that may be called; None: there are none.
        prompt_messages: of a prompt/completion record, how many of the messages are its prompt; 0: it is no such one.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_messages: int = 0


def is_learned(message: Message) -> bool:
    """Whether a record says that a turn is to be learned: its `weight` is not 0, nor its `train` false."""
    return all(message.get(key, True) for key in ("weight", "train"))


def content_text(message: Message) -> str:
    """The text of a message, its parts joined; "" where it has none."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def record_text(record: Completion | Conversation) -> str:
    """The one JSON text of a record: compact, its own fields in a fixed order.

    Keys inside messages and tools stay in the order in which they were found, because templates write them out in that
    order (`tool | tojson`): two records have the same text only if every template makes the same of them.
    """
    if isinstance(record, Completion):
        value: dict[str, Any] = {"prompt": record.prompt, "completion": record.completion}
    else:
        value = {"messages": record.messages}
        if record.tools is not None:
            value["tools"] = record.tools
        if record.prompt_messages:
            value["prompt_messages"] = record.prompt_messages
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a record, and where it is from: the file, and the line or row in it (0: it is the whole file).

    Attributes:
        text: of a record, its `record_text`.
    """

    text: str
    file: str
    line: int = 0
    record: Completion | Conversation | None = None

    @property
    def name(self) -> str:
        """`file` or `file:line`, as found: escape it before it is shown."""
        return f"{self.file}:{self.line}" if self.line else self.file


class Defect(DataError):
    """A document that cannot be used.

    Args:
        kind: the name under which such defects are counted.
        file, line: where it is; line 0: the document is the whole file.
        field: the field that is wrong, as `messages[2].role`; empty if it is the record as a whole.
    """

    def __init__(self, kind: str, what: str, file: str, line: int, next: str = "", field: str = "") -> None:
        self.kind, self.field = kind, field
        skip = "or leave such documents out with data.on_error=skip"
        where = escape(file) + f":{line}" * bool(line) + f": {escape(field)}" * bool(field)
        super().__init__(what, where=where, next=f"{next or 'repair the file'}, {skip}")


class Remark(NamedTuple):
    """What the user should know of a turn or a message that is used: words that follow a count, and an example."""

    kind: str
    what: str


class Position(NamedTuple):
    """Where a record is: its file, its line or row there, and its path in an array that may be all on one line."""

    file: str
    line: int
    path: str = ""

    def defect(self, kind: str, what: str, next: str = "", field: str = "") -> Defect:
        """The defect of the record here."""
        return Defect(kind, what, self.file, self.line, next, ".".join(filter(None, (self.path, field))))


class Row(NamedTuple):
    """What a reader found: a value, its line (of a Parquet file its row), and its path as in `Position`."""

    line: int
    value: object
    path: str = ""


@dataclass
class Defects:
    """The defects left out in one pass: how many of each kind, and the first of each with its file and line."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, defect: Defect) -> None:
        """Count `defect`."""
        self.counts[defect.kind] = self.counts.get(defect.kind, 0) + 1
        self.examples.setdefault(defect.kind, f"{defect.where}: {defect.what}")

    @property
    def total(self) -> int:
        """The number of documents left out."""
        return sum(self.counts.values())
