"""Formats of records: detects a record's format by its fields' names and converts it.

| Format | Fields | Result |
|---|---|---|
| text | text | the text |
| messages | messages, tools? | a conversation |
| prompt_completion | prompt, completion, tools? | strings: a completion; lists of messages: a conversation |
| alpaca | instruction, input?, output, system?, history? | a conversation: system, history, instruction, output |
| dolly | instruction, response, context?, system?, history? | a conversation, as for alpaca |
| question_answer | question, answer, context?, system?, history? | a conversation, as for alpaca |
| sharegpt | conversations, system?, tools? | a conversation: from and value are role and content |
| preference | prompt?, chosen, rejected, margin?, tools? | a pair of answers; only for objectives of pairs |
| unpaired | prompt, completion, label (a bool), tools? | a judged answer, only for objectives that learn from them |
| prompt | prompt, tools? | a prompt without an answer, for reinforcement learning |

If a pair has no `prompt`, the prompt is what both answers begin with: messages, or words. alpaca and ShareGPT are
converted as in LLaMA-Factory and TRL: an instruction and its input are one message, separated by a line end. A
question and its answer may have one of several names (`_QUESTION_ANSWER`).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from genesis.data.readers.json_records import parse
from genesis.data.records import (
    EMPTY,
    EQUAL,
    ONLY_PROMPT,
    REASONING,
    Completion,
    Conversation,
    Defect,
    Judged,
    Learns,
    Message,
    Pair,
    Position,
    Record,
    content_text,
)
from genesis.errors import nearest
from genesis.files.paths import quote

Format = Literal["auto", "text", "messages", "prompt_completion", "alpaca", "dolly", "question_answer", "sharegpt"]
Field = Literal[
    "text", "messages", "tools", "prompt", "completion", "instruction", "input", "output", "system", "history",
    "response", "question", "answer", "context", "conversations", "role", "content", "chosen", "rejected", "label",
    "margin",
]  # fmt: skip
FieldNames = Mapping[Field, str]
FIELDS: tuple[str, ...] = get_args(Field)

# Format -> its required fields.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "preference": ("chosen", "rejected"),
}
# What an objective learns from -> the name of the records' format, its required and its optional fields.
_PREFERENCES: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "pairs": ("preference", ("chosen", "rejected"), ("prompt", "margin", "tools")),
    "judged": ("unpaired", ("prompt", "completion", "label"), ("tools",)),
    "prompts": ("prompt", ("prompt",), ("tools",)),
}
PREFERENCES = frozenset(format for format, *_ in _PREFERENCES.values())
_LEARNED = "use texts or chats, or an objective for it (objective.name: dpo for pairs, kto for judged answers)"
# Required fields of formats that are tried after those above; they are read as alpaca.
_PAIRS: Mapping[str, tuple[str, ...]] = {
    "dolly": ("instruction", "response"),
    "question_answer": ("question", "answer"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "messages": ("tools",),
    "prompt_completion": ("tools",),
    "alpaca": ("input", "system", "history"),
    "sharegpt": ("system", "tools"),
}
_ALL = {**_NEEDED, **_PAIRS}
CHATS = frozenset(_ALL) - {"text", "prompt_completion", "preference"}  # formats whose records are conversations
# Fields of alpaca -> their names in a question and its answer.
_QUESTION_ANSWER: Mapping[str, tuple[str, ...]] = {
    "instruction": ("question", "query", "instruction", "prompt", "input"),
    "output": ("answer", "response", "output", "completion"),
    "input": ("context", "input"),
    "system": ("system", "system_prompt"),
}
# A field next to a prompt and its completion that says whether the completion is good (KTO).
_LABEL = "label"
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_FUNCTION_CALL = "function_call"
_WITH_LABEL = ("prompt_completion", *_PAIRS)


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """A reader of records of a given format, or of the one it detects (`auto`). `fields` maps a field's name in the
    table above, or `role` and `content` of messages, to its name in the data.
    """

    format: Format = "auto"
    fields: FieldNames | None = None
    learns: Learns = "tokens"

    def columns(self, keys: Sequence[str], position: Position) -> list[str]:
        """Return the `keys` that are used of a record with these fields. Raises: Defect."""
        if self.learns != "tokens":
            return [name for name in map(self._name, self._preference_fields(keys, position)) if name in keys]
        format, reader = self._format(keys, position)
        names = [reader._name(field) for field in (*_NEEDED[reader.format], *_OPTIONAL.get(reader.format, ()))]
        names += [_LABEL] if format in _WITH_LABEL and _LABEL not in names else []
        return [name for name in names if name in keys]

    def read(self, value: object, position: Position) -> tuple[str, str | Record]:
        """Return the format of the record in `value`, and the converted record. Raises: Defect."""
        if not isinstance(value, dict):
            what = f"the record is {describe(value)}, not an object with fields"
            raise position.defect("no record", what, "write one JSON object for each record")
        if self.learns != "tokens":
            found = {field: value.get(self._name(field)) for field in self._preference_fields(value.keys(), position)}
            readers: Mapping[str, Callable[..., Record]] = {
                "pairs": self._pair,
                "judged": self._judged,
                "prompts": self._prompt,
            }
            return _PREFERENCES[self.learns][0], readers[self.learns](found, position)
        name, reader = self._format(value.keys(), position)
        if self.format == "auto" and name in _WITH_LABEL and isinstance(_verdict(value.get(_LABEL)), bool):
            fields = ", ".join([*map(reader._name, _NEEDED[reader.format]), _LABEL])
            what = f"the record holds a preference ({fields}), but the objective learns from texts and chats"
            next = f"{_LEARNED}, or write a file of the good ones and set data.format={name}"
            raise position.defect("unpaired", what, next)
        return name, reader._read(value, position)

    def _read(self, value: Mapping[str, Any], position: Position) -> str | Completion | Conversation:
        format = self.format
        found = {field: value.get(self._name(field)) for field in (*_NEEDED[format], *_OPTIONAL.get(format, ()))}
        if format == "text":
            return self._text(found["text"], "text", position)
        if format == "prompt_completion":
            return self._prompt_completion(found, position)
        make = {"messages": self._messages, "alpaca": self._alpaca, "sharegpt": self._sharegpt}[format]
        return make(found, position)

    @property
    def names(self) -> frozenset[str]:
        """Names of the fields in the data."""
        return frozenset(self._name(field) for field in FIELDS)

    def _name(self, field: str) -> str:
        names: Mapping[Any, str] = self.fields or {}
        return names.get(field, field)

    def _format(self, keys: Any, position: Position) -> tuple[str, RecordFormat]:
        if self.format != "auto":
            missing = [self._name(field) for field in _ALL[self.format] if self._name(field) not in keys]
            if missing:
                what = f"the record has no field {quote(missing[0])}; its fields: {_listed(keys)}"
                next = f"name the field with data.fields, or choose another data.format than {self.format}"
                raise position.defect("missing field", what, next)
            return self.format, self._as_alpaca(keys, position) if self.format in _PAIRS else self
        found = [name for name, needed in _NEEDED.items() if all(self._name(field) in keys for field in needed)]
        if found == ["preference"]:
            what = "the record holds a preference (chosen, rejected), but the objective learns from texts and chats"
            next = f"{_LEARNED}, or train on the chosen answers: name their field with data.fields and set data.format"
            raise position.defect("preference", what, next)
        possible = [name for name in found if name != "preference"]
        if len(found) > 1:
            what = f"the record can be read in several formats: {', '.join(found)}; its fields: {_listed(keys)}"
            raise position.defect("ambiguous format", what, f"choose one: data.format={' or '.join(possible)}")
        if found:
            return found[0], replace(self, format=found[0])  # type: ignore[arg-type]
        self._check_has_answer(keys, position)
        reader = self._as_alpaca(keys, position)
        pair = tuple(map(reader._name, _NEEDED["alpaca"]))
        return "dolly" if pair == _PAIRS["dolly"] else "question_answer", reader

    def _as_alpaca(self, keys: Any, position: Position) -> RecordFormat:
        """Return a reader of a question and its answer as alpaca, under their names in `keys`. Raises: Defect."""
        given, named = self.fields or {}, dict[str, list[str]]()
        for field, names in _QUESTION_ANSWER.items():
            named[field] = [self._name(n) for n in [m for m in names if m in given] or names if self._name(n) in keys]
        if self.format != "auto":
            named |= zip(_NEEDED["alpaca"], ([self._name(field)] for field in _PAIRS[self.format]), strict=True)
        # A field `input` is the question if no other field is; otherwise it is the question's input.
        unused = named["input" if named["instruction"] == [self._name("input")] else "instruction"]
        unused[:] = [name for name in unused if name != self._name("input")]
        if not named["instruction"] or not named["output"]:
            forms = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in _ALL.items() if name in _READABLE)
            what = f"the record's fields match no format; its fields: {_listed(keys)}"
            columns = {name for field, name in given.items() if field not in ("role", "content")}
            lacks = sorted(columns - set(keys))
            what += f"; it lacks {quote(lacks[0])}, which data.fields names" if lacks else ""
            advice = f"the formats are {forms}; name other fields, such as data.fields={{text: body}}"
            raise position.defect("missing field", what, advice)
        named["system"] = named["system"][:1]
        if (several := next((names for names in named.values() if len(names) > 1), None)) is not None:
            what = f"the record can be read in several ways: {_listed(several)} have the same meaning"
            advice = "choose: data.format=question_answer and data.fields={question: NAME, answer: NAME}"
            raise position.defect("ambiguous format", what, advice)
        chosen = {field: names[0] if names else f"\0{field}" for field, names in named.items()}
        return RecordFormat("alpaca", {**given, **chosen})  # type: ignore[dict-item]

    def _text(self, value: object, field: str, position: Position) -> str:
        name = self._name(field)
        if not isinstance(value, str):
            what = f"the field holds {describe(value)}, not a string"
            raise position.defect("wrong type", what, "write the text as a string", name)
        check_plain(value, position, name)
        if value.isspace() or not value:
            raise position.defect("empty document", "the field holds no text", "remove the record", name)
        return value

    def _keys(
        self, role: str = "role", content: str = "content", roles: Mapping[str, str] | None = None
    ) -> MessageKeys:
        names = self.fields or {}
        return MessageKeys(names.get("role", role), names.get("content", content), roles)

    def _tools(self, found: Mapping[str, Any], position: Position) -> tuple[dict[str, Any], ...] | None:
        return read_tools(found.get("tools"), position, self._name("tools"))

    def _messages(self, found: Mapping[str, Any], position: Position) -> Conversation:
        name = self._name("messages")
        messages = read_messages(found["messages"], position, name, self._keys())
        _check_answered(messages, position, name)
        return Conversation(messages, self._tools(found, position))

    def _prompt_completion(self, found: Mapping[str, Any], position: Position) -> Completion | Conversation:
        prompt, completion = found["prompt"], found["completion"]
        names = self._name("prompt"), self._name("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            check_plain(prompt, position, names[0])
            return Completion(prompt, self._text(completion, "completion", position))
        if isinstance(prompt, list) and isinstance(completion, list):
            before = read_messages(prompt, position, names[0], self._keys())
            after = read_messages(completion, position, names[1], self._keys())
            _check_answered(after, position, names[1])
            return Conversation(_joined(before, after), self._tools(found, position), len(before))
        for name, value in zip(names, (prompt, completion), strict=True):
            if not isinstance(value, str | list):
                what = f"the field holds {describe(value)}, not a string or a list of messages"
                raise position.defect("wrong type", what, field=name)
        what = f"{names[0]} is {describe(prompt)} and {names[1]} {describe(completion)}"
        raise position.defect("wrong type", what, "write both as strings, or both as lists of messages", names[1])

    # --- Preferences

    def no_preference(self, what: str, position: Position, next: str = "") -> Defect:
        """Return the defect of a text or record that is not of the kind that the objective learns from."""
        _, needed, optional = _PREFERENCES[self.learns]
        fields = ", ".join([*map(self._name, needed), *(f"{self._name(field)}?" for field in optional)])
        kinds = ("dpo", "pairs of answers"), ("kto", "judged answers")
        (_, kind), (name, other) = kinds if self.learns == "pairs" else kinds[::-1]
        fit = f"name other fields, such as data.fields={{{needed[-1]}: NAME}}, or set objective.name={name} for {other}"
        return position.defect("no preference", f"{what}, but the objective learns from {kind} ({fields})", next or fit)

    def _preference_fields(self, keys: Any, position: Position) -> tuple[str, ...]:
        """Return the fields of a preference. Raises: Defect: one is missing."""
        _, needed, optional = _PREFERENCES[self.learns]
        self._check_has_answer(keys, position)
        missing = [self._name(field) for field in needed if self._name(field) not in keys]
        if missing == [self._name("prompt")]:
            what = f"the record has no prompt (no field {quote(missing[0])}); its fields: {_listed(keys)}"
            raise position.defect("no prompt", what, "name the field with data.fields.prompt")
        if missing:
            raise self.no_preference(f"the record has no field {quote(missing[0])}, only {_listed(keys)}", position)
        return *needed, *optional

    def _check_has_answer(self, keys: Any, position: Position) -> None:
        """Refuse a record that has a prompt and no other known field but tools. Raises: Defect."""
        if self.learns != "prompts" and self.names & set(keys) - {self._name("tools")} == {self._name("prompt")}:
            what = "the record holds only a prompt, but the objective learns from answers"
            next = "prompts alone are for reinforcement learning, which Genesis does not have yet; add a completion, or"
            next += " chosen and rejected (for dpo or reward), or a completion and a label (for kto)"
            raise position.defect(ONLY_PROMPT, what, next, self._name("prompt"))

    def _prompt(self, found: Mapping[str, Any], position: Position) -> Completion | Conversation:
        if isinstance(found["prompt"], str):
            return Completion(self._text(found["prompt"], "prompt", position), "")
        messages = read_messages(found["prompt"], position, self._name("prompt"), self._keys())
        return Conversation(messages, self._tools(found, position), len(messages))

    def _pair(self, found: Mapping[str, Any], position: Position) -> Pair:
        prompt, chosen, rejected = (found[field] for field in ("prompt", "chosen", "rejected"))
        names, margin = (self._name("chosen"), self._name("rejected")), self._margin(found["margin"], position)
        if chosen == rejected:
            raise position.defect(EQUAL, "the chosen and the rejected answer are equal", field=names[1])
        kinds = {type(chosen), type(rejected)}
        if kinds not in ({str}, {list}):
            what = f"{names[0]} is {describe(chosen)} and {names[1]} {describe(rejected)}"
            raise position.defect("wrong type", what, "write both as strings, or both as lists of messages", names[1])
        if kinds == {str} and prompt is None:
            prompt, chosen, rejected = _common_words(chosen, rejected)
            if not prompt.strip():
                raise self._no_prompt("the two answers do not begin with the same words", position)
        if kinds == {list} and not isinstance(prompt, list):  # a string repeats the user's message, as in UltraFeedback
            found_in = zip(names, (chosen, rejected), strict=True)
            first, second = (read_messages(each, position, name, self._keys()) for name, each in found_in)
            same = itertools.takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False))
            count = len(list(same))
            while count and first[count - 1]["role"] == "assistant" and count in (len(first), len(second)):
                count -= 1
            if not any(message["role"] != "system" for message in first[:count]):
                what = "the two conversations do not begin with the same messages"
                raise self._no_prompt(what, position, ", as a list of messages")
            prompt = chosen[:count]
        tools, both = self._tools(found, position), zip(names, (chosen, rejected), strict=True)
        answers = [self._answer(prompt, answer, tools, name, position) for name, answer in both]
        return Pair(answers[0], answers[1], margin)

    def _margin(self, value: object, position: Position) -> float:
        """Return the margin of a pair; 0 without one. Raises: Defect."""
        if value is None or value == "":
            return 0.0
        if isinstance(value, str):  # in CSV
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            found = quote(value) if isinstance(value, str | float) else describe(value)
            what = f"the margin is {found}, not a finite number"
            raise position.defect("wrong type", what, "write a number, such as 0.5", self._name("margin"))
        return float(value)

    def _judged(self, found: Mapping[str, Any], position: Position) -> Judged:
        prompt, completion, label = found["prompt"], found["completion"], _verdict(found["label"])
        if not isinstance(label, bool):
            what = f"the label is {quote(label) if isinstance(label, str) else describe(label)}, not true or false"
            raise position.defect(
                "wrong type", what, "write true for a good answer, false for a bad one", self._name("label")
            )
        tools, name = self._tools(found, position), self._name("completion")
        return Judged(self._answer(prompt, completion, tools, name, position), label)

    def _answer(
        self, prompt: object, answer: object, tools: Any, name: str, position: Position
    ) -> Completion | Conversation:
        """Return an answer to a prompt, both strings or lists of messages. Raises: Defect."""
        if isinstance(prompt, list) and isinstance(answer, list):
            before = read_messages(prompt, position, self._name("prompt"), self._keys())
            messages = _joined(before, read_messages(answer, position, name, self._keys()))
            said = [message for message in messages[len(before) :] if message["role"] == "assistant"]
            if not any(content_text(message).strip() or message.get("tool_calls") for message in said):
                raise position.defect(EMPTY, "the answer holds no text of the assistant", field=name)
            return Conversation(messages, tools, len(before))
        for field, value in ((self._name("prompt"), prompt), (name, answer)):
            if not isinstance(value, str):
                what = f"the field holds {describe(value)}, not a string like the other"
                raise position.defect("wrong type", what, "write both as strings, or both as lists of messages", field)
            check_plain(value, position, field)
        assert isinstance(prompt, str) and isinstance(answer, str)
        if not prompt:
            raise self._no_prompt("the prompt is empty", position)
        if not answer.strip():
            raise position.defect(EMPTY, "the answer holds no text", field=name)
        return Completion(prompt, answer)

    def _no_prompt(self, what: str, position: Position, form: str = "") -> Defect:
        next = f"write the prompt into a field {self._name('prompt')}{form}"
        return position.defect("no prompt", f"the record has no prompt: {what}", next)

    def _alpaca(self, found: Mapping[str, Any], position: Position) -> Conversation:
        messages: list[Message] = []
        texts = {field: self._optional(found[field], field, position) for field in ("instruction", "input", "system")}
        if texts["system"]:
            messages.append({"role": "system", "content": texts["system"]})
        if found["history"]:
            messages += self._history(found["history"], position)
        asked = [text for text in (texts["instruction"], texts["input"]) if text]
        if not asked:
            name = self._name("instruction")
            raise position.defect("empty document", "instruction and input are empty", "remove the record", name)
        messages.append({"role": "user", "content": "\n".join(asked)})
        messages.append({"role": "assistant", "content": self._text(found["output"], "output", position)})
        return Conversation(tuple(messages))

    def _optional(self, value: object, field: str, position: Position) -> str:
        if value is not None and not isinstance(value, str):
            what = f"the field holds {describe(value)}, not a string"
            raise position.defect("wrong type", what, field=self._name(field))
        check_plain(value, position, self._name(field))
        return value or ""

    def _history(self, value: object, position: Position) -> list[Message]:
        messages: list[Message] = []
        name = self._name("history")
        for number, pair in enumerate(objects(value, position, name)):
            is_pair = isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            if not is_pair:
                what = "the turn is not a pair of strings, a question and its answer"
                raise position.defect("wrong type", what, field=f"{name}[{number}]")
            check_plain(pair, position, f"{name}[{number}]")
            messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        return messages

    def _sharegpt(self, found: Mapping[str, Any], position: Position) -> Conversation:
        name = self._name("conversations")
        turns = objects(found["conversations"], position, name)
        # Some data sets use `conversations` for such a list of messages as well.
        has_roles = bool(turns) and isinstance(turns[0], dict) and "role" in turns[0] and "from" not in turns[0]
        keys = self._keys(roles=_SHAREGPT_ROLES) if has_roles else self._keys("from", "value", _SHAREGPT_ROLES)
        turns = [_as_tool_calls(turn, keys, position, f"{name}[{number}]") for number, turn in enumerate(turns)]
        messages = read_messages(turns, position, name, keys)
        system = self._optional(found["system"], "system", position)
        if system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        _check_answered(messages, position, name)
        return Conversation(messages, self._tools(found, position))


def _verdict(label: object) -> object:
    """Return a label as a bool if it is true or false, or a string that says so, as in CSV."""
    return {"true": True, "false": False}.get(label.lower(), label) if isinstance(label, str) else label


def _joined(prompt: tuple[Message, ...], answer: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages of a prompt and an answer, which may repeat the prompt."""
    return answer if answer[: len(prompt)] == prompt else (*prompt, *answer)


def _common_words(first: str, second: str) -> tuple[str, str, str]:
    """Return the words that two texts begin with, without the space after them, and the rest of each text."""
    same = os.path.commonprefix([first, second])  # noqa: RUF071 - texts, not paths
    if not (first[len(same) :][:1].isspace() and second[len(same) :][:1].isspace()):
        same = re.sub(r"\S*\Z", "", same)  # no answer begins within a word
    same = same.rstrip()
    return same, first[len(same) :], second[len(same) :]


_READABLE = [name for name in get_args(Format) if name != "auto"]


def _listed(keys: Any) -> str:
    return ", ".join(quote(key, 40) for key in list(keys)[:10]) or "none"


def _check_answered(messages: tuple[Message, ...], position: Position, field: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        what = "the conversation has no assistant turn, so there is nothing to learn"
        raise position.defect("no assistant turn", what, "remove the record", field)


def _as_tool_calls(turn: object, keys: MessageKeys, position: Position, field: str) -> object:
    """Return a ShareGPT turn; the calls in the value of a `function_call` become `tool_calls`."""
    if not isinstance(turn, dict) or turn.get(keys.role) != _FUNCTION_CALL:
        return turn
    value = turn.get(keys.content)
    calls = parse(value, position, "string", f"{field}.{keys.content}") if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        what = f"the function call is {describe(calls)}, not an object with name and arguments"
        raise position.defect("bad tool call", what, field=f"{field}.{keys.content}")
    functions = [call if isinstance(call, dict) and "function" in call else {"function": call} for call in calls]
    return {**turn, keys.content: None, "tool_calls": [{"type": "function", **call} for call in functions]}


# --- Messages and tools of a conversation -----------------------------------------------------------------------------
# These functions check messages and bring them into a form that every template accepts. They keep keys that a template
# may use (`name`, `reasoning_content`, …), the order of all keys, lists of text parts, and the arguments of a tool
# call, an object or a string of JSON. They drop keys that hold null.


ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class MessageKeys:
    """The keys of role and content in a message, and additional names of roles."""

    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] | None = None


def describe(value: object) -> str:
    """Return the kind of a record's value in words."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    known = "null" if value is None else kinds.get(type(value))
    return known or f"a value of type {type(value).__name__}"


def objects(value: object, position: Position, field: str) -> list[Any]:
    """Return the list in `field`, or the list in its string of JSON. Raises: Defect."""
    if isinstance(value, str):
        value = parse(value, position, "string", field)
    if not isinstance(value, list):
        raise position.defect("wrong type", f"the field holds {describe(value)}, not a list", field=field)
    return value


def read_messages(
    value: object, position: Position, field: str = "messages", keys: MessageKeys = MessageKeys()
) -> tuple[Message, ...]:
    """Return the messages in `value`, each with role, content and its other keys.
    Raises: Defect, with the path of the first wrong field, such as `messages[2].role`.
    """
    found = objects(value, position, field)
    if not found:
        raise position.defect("empty conversation", "the conversation has no messages", "remove the record", field)
    return tuple(_message(item, position, f"{field}[{number}]", keys) for number, item in enumerate(found))


def read_tools(value: object, position: Position, field: str = "tools") -> tuple[dict[str, Any], ...] | None:
    """Return the schemas of the tools, or None without any. Raises: Defect."""
    if value is None or value == "":
        return None
    tools = []
    for number, tool in enumerate(objects(value, position, field)):
        path = f"{field}[{number}]"
        tool = parse(tool, position, "string", path) if isinstance(tool, str) else tool
        if not isinstance(tool, dict) or not tool:
            what = f"the tool is {describe(tool)}, not an object that describes a function"
            raise position.defect("bad tools", what, field=path)
        check_plain(tool, position, path)
        tools.append(tool)
    return tuple(tools) or None


def check_plain(value: Any, position: Position, field: str, depth: int = 1) -> None:
    """Refuse values that JSON cannot hold or templates must not see. Raises: Defect, with the path of the value."""
    if isinstance(value, str):
        if "\0" in value:
            what = "the text holds a NUL character: it is binary data or UTF-16"
            raise position.defect("NUL byte", what, field=field)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise position.defect("bad number", f"the number is {value}, not a finite one", field=field)
    elif isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            what = f"the value is nested deeper than {MAX_DEPTH} levels"
            raise position.defect("nested too deep", what, "flatten it", field[:100])
        if isinstance(value, list):
            for number, item in enumerate(value):
                check_plain(item, position, f"{field}[{number}]", depth + 1)
            return
        for key, item in value.items():
            check_plain(key, position, field)
            check_plain(item, position, f"{field}.{key[:100]}", depth + 1)
    elif value is not None and not isinstance(value, bool | int):
        raise position.defect("wrong type", f"the field holds {describe(value)}, which JSON lacks", field=field)


def _message(value: object, position: Position, field: str, keys: MessageKeys) -> Message:
    if not isinstance(value, dict):
        raise position.defect("wrong type", f"the message is {describe(value)}, not an object", field=field)
    role = _role(value, position, field, keys)
    message: Message = {"role": role, "content": None}
    for key, item in value.items():
        if key not in ("role", "content", keys.role, keys.content) and item is not None:
            check_plain(item, position, f"{field}.{key}")
            message[key] = item
    for key in ("weight", "train"):
        if role == "assistant" and message.get(key, True) not in (0, 1):
            what = f"the {key} of the turn is {quote(message[key])}, but it must be 1 (learned) or 0 (not learned)"
            raise position.defect("bad weight", what, field=f"{field}.{key}")
    if "function_call" in message:
        what = "the call is a function_call, an old form that chat templates ignore"
        raise position.defect("bad tool call", what, "write it as tool_calls", f"{field}.function_call")
    if "tool_calls" in message:
        calls = _tool_calls(message.pop("tool_calls"), role, position, f"{field}.tool_calls")
        if calls:
            message["tool_calls"] = calls
    message["content"] = _content(value.get(keys.content), message, position, f"{field}.{keys.content}")
    return message


def _role(value: dict[str, Any], position: Position, field: str, keys: MessageKeys) -> str:
    if keys.role not in value:
        what = f"the message has no {quote(keys.role)}; its fields: {_listed(value)}"
        raise position.defect("no role", what, "name the field with data.fields.role", f"{field}.{keys.role}")
    role = value[keys.role]
    known = {**{name: name for name in ROLES}, **(keys.roles or {})}
    if isinstance(role, str) and role in known:
        return known[role]
    meant = nearest(role, known) if isinstance(role, str) else None
    what = f"the role is {quote(role)}; it can be {', '.join(known)}" + f", and {meant} is nearest" * bool(meant)
    raise position.defect("unknown role", what, "change the role", f"{field}.{keys.role}")


def _content(value: object, message: Message, position: Position, field: str) -> str | list[Any] | None:
    is_said = any(key in message for key in ("tool_calls", *REASONING))
    if value is None and message["role"] == "assistant" and is_said:
        return None
    if isinstance(value, list):
        for number, part in enumerate(value):
            _check_part(part, position, f"{field}[{number}]")
        return value or ""
    if not isinstance(value, str):
        found = "missing or null" if value is None else describe(value)
        what = f"the content is {found}, not a string or a list of text parts"
        raise position.defect("wrong type", what, field=field)
    check_plain(value, position, field)
    return value


def _check_part(part: object, position: Position, field: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        what = f"the part is {describe(part) if kind is None else quote(kind)}, but only text is supported"
        next = 'write {"type": "text", "text": "…"}'
        raise position.defect("no text part", what, next, field)
    text = part.get("text")
    if not isinstance(text, str):
        raise position.defect("wrong type", f"the text is {describe(text)}, not a string", field=f"{field}.text")
    check_plain(part, position, field)


def _tool_calls(value: object, role: str, position: Position, field: str) -> list[dict[str, Any]]:
    """Return the calls, `{function: {name, arguments}}` or `{name, arguments}`; arguments are an object or JSON."""
    calls = []
    for number, call in enumerate(objects(value, position, field)):
        path = f"{field}[{number}]"
        if not isinstance(call, dict):
            raise position.defect("bad tool call", f"the call is {describe(call)}, not an object", field=path)
        if "function" in call:
            call = {**call, "function": _check_function(call["function"], position, f"{path}.function")}
        else:
            call = _check_function(call, position, path)
        calls.append(call)
    if calls and role != "assistant":
        what = f"the {role} calls tools, but only the assistant can"
        raise position.defect("bad tool call", what, field=field)
    return calls


def _check_function(function: object, position: Position, field: str) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise position.defect("bad tool call", f"the function is {describe(function)}, not an object", field=field)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        what = f"the function's name is {describe(name) if name != '' else 'empty'}"
        raise position.defect("bad tool call", what, "write its name as a string", f"{field}.name")
    field += ".arguments"
    value = arguments
    if isinstance(arguments, str):
        value = parse(arguments, position, "string", field) if arguments.strip() else {}
        check_plain(value, position, field)
    if not isinstance(value, dict):
        what = f"the arguments are {describe(value)}, not an object"
        raise position.defect("bad tool call", what, "write an object, or {} without arguments", field)
    return function
