"""Records and documents, which readers yield and encoders take, and their defects. It reads nothing.

A `Document` is a text or a record: a `Completion`, a `Conversation`, or a preference (`Pair`, `Judged`). Code that
hashes, splits, counts or names documents only uses `Document.text` and `Document.group`, so it works for all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from genesis.errors import DataError, escape

Message = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")  # its names in a message; the first one is read


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its continuation; they are encoded separately, without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form that chat templates take.

    Attributes:
        messages: each with `role`, `content` and any other keys that the template may use.
        tools: JSON schemas of the functions that may be called; None without any.
        prompt_messages: number of messages that are the prompt of a prompt/completion record; 0 for other records.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt; `chosen` is the preferred one.

    Attributes:
        margin: by how much the reward of `chosen` is to exceed that of `rejected`; only reward models learn it.
    """

    chosen: Completion | Conversation
    rejected: Completion | Conversation
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer to a prompt, and whether it is good."""

    answer: Completion | Conversation
    is_good: bool


Record = Completion | Conversation | Pair | Judged
# What an objective learns from: texts, completions and conversations; `Pair`s; `Judged` answers; or prompts, which are
# completions and conversations without an answer.
Learns = Literal["tokens", "pairs", "judged", "prompts"]
# Kinds of defects that never raise: the record is valid but teaches nothing, so it is left out and counted.
NO_TARGET, EQUAL, EMPTY = "no target", "equal answers", "empty answer"
DROPPED = frozenset((NO_TARGET, EQUAL, EMPTY))
ONLY_PROMPT = "only a prompt"


def is_learned(message: Message) -> bool:
    """Whether a turn is to be learned: its `weight` is not 0 and its `train` is not false."""
    return all(message.get(key, True) for key in ("weight", "train"))


def content_text(message: Message) -> str:
    """Return the text of a message, with its parts joined; empty without text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def record_text(record: Record) -> str:
    """Return the canonical JSON text of a record: compact, with its own fields in a fixed order.

    Keys inside messages and tools keep their order, because templates render them in it (`tool | tojson`). Two records
    have the same text only if every template renders them equally.
    """
    return _json(_value(record))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _value(record: Record) -> dict[str, Any]:
    if isinstance(record, Pair):
        margin = {"margin": record.margin} if record.margin else {}
        return {"chosen": _value(record.chosen), "rejected": _value(record.rejected), **margin}
    if isinstance(record, Judged):
        return {**_value(record.answer), "label": record.is_good}
    if isinstance(record, Completion):
        return {"prompt": record.prompt, "completion": record.completion}
    value: dict[str, Any] = {"messages": record.messages}
    if record.tools is not None:
        value["tools"] = record.tools
    if record.prompt_messages:
        value["prompt_messages"] = record.prompt_messages
    return value


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a record, with its file and line.

    Attributes:
        text: the text, or the `record_text` of a record.
        line: line or row in the file; 0 if the document is the whole file.
    """

    text: str
    file: str
    line: int = 0
    record: Record | None = None

    @property
    def group(self) -> str:
        """Documents with the same group are held out together: the prompt of a preference, otherwise `text`."""
        record = self.record
        if not isinstance(record, Pair | Judged):
            return self.text
        answer = record.chosen if isinstance(record, Pair) else record.answer
        if isinstance(answer, Completion):
            return _json(answer.prompt)
        return _json([answer.messages[: answer.prompt_messages], answer.tools])

    @property
    def name(self) -> str:
        """`file` or `file:line`, not escaped."""
        return f"{self.file}:{self.line}" if self.line else self.file


class Defect(DataError):
    """A document that cannot be used.

    Args:
        kind: name under which such defects are counted.
        line: line in the file; 0 if the document is the whole file.
        field: the wrong field, such as `messages[2].role`; empty for the whole record.
    """

    def __init__(self, kind: str, what: str, file: str, line: int, next: str = "", field: str = "") -> None:
        self.kind, self.field = kind, field
        skip = "or leave such documents out with data.on_error=skip"
        where = escape(file) + f":{line}" * bool(line) + f": {escape(field)}" * bool(field)
        super().__init__(what, where=where, next=f"{next or 'repair the file'}, {skip}")


class Remark(NamedTuple):
    """A remark about turns or messages that are used: words that follow a count, and an example."""

    kind: str
    what: str


class Position(NamedTuple):
    """Position of a record: its file, its line or row, and its path in an array that may be on a single line."""

    file: str
    line: int
    path: str = ""

    def defect(self, kind: str, what: str, next: str = "", field: str = "") -> Defect:
        """Return a defect of the record at this position."""
        return Defect(kind, what, self.file, self.line, next, ".".join(filter(None, (self.path, field))))


class Row(NamedTuple):
    """A value that a reader found, its line (its row in Parquet), and its path as in `Position`."""

    line: int
    value: object
    path: str = ""


@dataclass
class Defects:
    """The skipped defects of one pass: their number per kind, and the first of each with file and line."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, defect: Defect) -> None:
        """Count `defect`."""
        self.counts[defect.kind] = self.counts.get(defect.kind, 0) + 1
        self.examples.setdefault(defect.kind, f"{defect.where}: {defect.what}")

    @property
    def total(self) -> int:
        """Number of skipped documents."""
        return sum(self.counts.values())
