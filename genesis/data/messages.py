"""Messages and tools of a conversation: what is checked, and the form that every template can take.

Kept as they are: keys that a template may look at (`name`, `reasoning_content`, …), their order and that of everything
inside them, lists of text parts, and the arguments of a tool call, an object or a string of JSON. Keys that hold null
are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from genesis.data.readers.json_records import parse
from genesis.data.records import REASONING, Message, Position
from genesis.errors import nearest
from genesis.files.paths import quote

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class MessageKeys:
    """The names that a message has for its role and its content, and which other names of roles it may use."""

    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] | None = None


def describe(value: object) -> str:
    """What a value of a record is, for a message."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    known = "null" if value is None else kinds.get(type(value))
    return known or f"a value of type {type(value).__name__}"


def objects(value: object, position: Position, field: str) -> list[Any]:
    """The list in `field`, or in the string of JSON that it holds. Raises: Defect."""
    if isinstance(value, str):
        value = parse(value, position, "string", field)
    if not isinstance(value, list):
        raise position.defect("wrong type", f"the field holds {describe(value)}, not a list", field=field)
    return value


def read_messages(
    value: object, position: Position, field: str = "messages", keys: MessageKeys = MessageKeys()
) -> tuple[Message, ...]:
    """The messages in `value`, each with its role, its content and what else it holds.

    Raises:
        Defect: the first field that is wrong, by its path: `messages[2].role`.
    """
    found = objects(value, position, field)
    if not found:
        raise position.defect("empty conversation", "the conversation has no messages", "remove the record", field)
    return tuple(_message(item, position, f"{field}[{number}]", keys) for number, item in enumerate(found))


def read_tools(value: object, position: Position, field: str = "tools") -> tuple[dict[str, Any], ...] | None:
    """The schemas of the tools; None where there are none. Raises: Defect."""
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
    """Refuse what JSON text cannot hold or no template should see. Raises: Defect, with the path of what is wrong."""
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
            raise position.defect("nested too deep", what, "make it flatter", field[:100])
        if isinstance(value, list):
            for number, item in enumerate(value):
                check_plain(item, position, f"{field}[{number}]", depth + 1)
            return
        for key, item in value.items():
            check_plain(key, position, field)
            check_plain(item, position, f"{field}.{key[:100]}", depth + 1)
    elif value is not None and not isinstance(value, bool | int):
        raise position.defect("wrong type", f"the field holds {describe(value)}, which JSON has not", field=field)


def _message(value: object, position: Position, field: str, keys: MessageKeys) -> Message:
    if not isinstance(value, dict):
        raise position.defect("wrong type", f"the message is {describe(value)}, not an object", field=field)
    role = _role(value, position, field, keys)
    message: Message = {"role": role, "content": None}
    for key, item in value.items():
        if key not in ("role", "content", keys.role, keys.content) and item is not None:
            check_plain(item, position, f"{field}.{key}")
            message[key] = item
    _check_learned(message, position, field)
    if "function_call" in message:
        what = "the call is a function_call, the old form, which chat templates leave out"
        raise position.defect("bad tool call", what, "write it as tool_calls", f"{field}.function_call")
    if "tool_calls" in message:
        calls = _tool_calls(message.pop("tool_calls"), role, position, f"{field}.tool_calls")
        if calls:
            message["tool_calls"] = calls
    message["content"] = _content(value.get(keys.content), message, position, f"{field}.{keys.content}")
    return message


def _check_learned(message: Message, position: Position, field: str) -> None:
    """Whether a turn is learned is yes or no. Raises: Defect."""
    for key in ("weight", "train"):
        if message["role"] == "assistant" and message.get(key, True) not in (0, 1):
            what = f"the {key} of the turn is {quote(message[key])}, and a turn is learned (1) or not (0)"
            raise position.defect("bad weight", what, field=f"{field}.{key}")


def _role(value: dict[str, Any], position: Position, field: str, keys: MessageKeys) -> str:
    if keys.role not in value:
        found = ", ".join(quote(key, 40) for key in list(value)[:10]) or "none"
        what = f"the message has no {quote(keys.role)}; its fields: {found}"
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
        what = f"the content is {describe(value)}, not a string or a list of text parts"
        raise position.defect("wrong type", what, field=field)
    check_plain(value, position, field)
    return value


def _check_part(part: object, position: Position, field: str) -> None:
    """Raises: Defect where it is not text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        what = f"the part is {describe(part) if kind is None else quote(kind)}, and only text is read"
        next = 'write {"type": "text", "text": "…"}'
        raise position.defect("no text part", what, next, field)
    text = part.get("text")
    if not isinstance(text, str):
        raise position.defect("wrong type", f"the text is {describe(text)}, not a string", field=f"{field}.text")
    check_plain(part, position, field)


def _tool_calls(value: object, role: str, position: Position, field: str) -> list[dict[str, Any]]:
    """The calls, each `{function: {name, arguments}}` or `{name, arguments}`, its arguments an object or JSON text."""
    calls = [_tool_call(call, position, f"{field}[{n}]") for n, call in enumerate(objects(value, position, field))]
    if calls and role != "assistant":
        what = f"tools are called by the {role}, and only the assistant can"
        raise position.defect("bad tool call", what, field=field)
    return calls


def _tool_call(call: object, position: Position, field: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise position.defect("bad tool call", f"the call is {describe(call)}, not an object", field=field)
    if "function" in call:
        return {**call, "function": _called(call["function"], position, f"{field}.function")}
    return _called(call, position, field)


def _called(function: object, position: Position, field: str) -> dict[str, Any]:
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
        raise position.defect("bad tool call", what, "write an object, {} where there are none", field)
    return function
