"""The subset of YAML that Genesis reads and writes: one mapping of plain data, with the line of every key.

Scalars follow the YAML 1.2 core schema (`1e-5` is a number; `on` and `12:30` are strings). The reader refuses anything
that makes a file hard to read or costly to load: aliases, anchors, tags, merge keys, duplicate keys, several documents.
It checks limits of size, depth and count while events arrive, before it builds a tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import yaml

from genesis.errors import ConfigError, escape

KeyPath = tuple[str | int, ...]
Scalar = None | bool | int | float | str

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_NODES = 10_000
MAX_NUMBER_CHARS = 40

_WORDS: dict[str, Scalar] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True)
_WORDS |= dict.fromkeys(("false", "False", "FALSE"), False)
_WORDS |= {sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")}
_WORDS |= dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan)

# A number with a leading zero ("007") remains a string: YAML 1.1 reads it as octal, YAML 1.2 as decimal.
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_RADIX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_BOOL_IN_YAML_1_1 = frozenset(("y", "n", "yes", "no", "on", "off"))
# Text files do not need control characters (except tab and line ends), invisible line breaks and surrogates.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


class Mark(NamedTuple):
    """A position in the file, counted from one."""

    line: int
    column: int


@dataclass
class Document:
    """A parsed file: its data and the position of every key and value.

    Attributes:
        name: the file's name, as errors show it.
        data: the top mapping.
        keys: position of the key that leads to a path (of the item in a list).
        values: start of the value at a path.
        overrides: the override that set a path, as the user wrote it.
    """

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    keys: dict[KeyPath, Mark] = field(default_factory=dict)
    values: dict[KeyPath, Mark] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath, *, key: bool = False) -> str:
        """Return what set `path`: `override: key=value`, or `file:line:column` of its value (of its key with `key`).

        For a path that was never set, it returns the position of the nearest parent's key.
        """
        for length in range(len(path), 0, -1):
            part = path[:length]
            if part in self.overrides:
                return f"override: {self.overrides[part]}"
            mark = self.keys.get(part) if key or length < len(path) else self.values.get(part)
            if mark is not None:
                return f"{self.name}:{mark.line}:{mark.column}"
        return self.name


def parse(source: str | bytes, name: str) -> Document:
    """Parse `source`, at most 256 KiB of UTF-8 text. An empty text is an empty mapping.

    Raises:
        ConfigError: the text is not YAML, outside the accepted subset or over a limit; `where` is `name:line:column`.
    """
    document = Document(escape(name))
    top = _Reader(document).read(_decode(source, document.name))
    if not isinstance(top, dict | None):
        what = f"the file holds {'a list' if isinstance(top, list) else 'a single value'}, but sections are expected"
        _fail(what, document.name, Mark(1, 1), "start with `model:`")
    document.data = top or {}
    return document


def parse_value(text: str, where: str) -> Any:
    """Return the value of an override: a flow list, mapping or quoted string (`[a, b]`), or else a plain scalar.

    Raises:
        ConfigError: a list, mapping or quoted string is malformed; the error has this `where`.
    """
    text = text.strip()
    if found := _FORBIDDEN.search(text):
        what = f"the character U+{ord(found[0]):04X} is not allowed in an override"
        raise ConfigError(what, where=where, next="remove it")
    if not text.startswith(("[", "{", '"', "'")):
        try:
            return scalar(text)
        except ValueError as error:
            raise ConfigError(str(error), where=where, next="quote it if it is a string") from None
    document = Document(where)
    try:
        value = _Reader(document).read("value: " + text)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, next=error.next) from None
    assert isinstance(value, dict)
    return value["value"]


def scalar(text: str) -> Scalar:
    """Return the value of a plain (unquoted) scalar in YAML 1.2.

    Raises:
        ValueError: the number has more than 40 characters.
    """
    if text in _WORDS:
        return _WORDS[text]
    is_int, is_radix = _INT.fullmatch(text), _RADIX.fullmatch(text)
    if not (is_int or is_radix or _FLOAT.fullmatch(text)):
        return text
    if len(text) > MAX_NUMBER_CHARS:
        raise ValueError(f"the number has {len(text)} characters; the limit is {MAX_NUMBER_CHARS}")
    if is_radix:
        return int(text[2:], 8 if text[1] == "o" else 16)
    return int(text) if is_int else float(text)


def _decode(source: str | bytes, name: str) -> str:
    size = len(source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise ConfigError(
            f"the file has more than {MAX_BYTES} bytes", where=name, next="check that it is a configuration file"
        )
    if isinstance(source, bytes):
        try:
            text = source.decode("utf-8")
        except UnicodeDecodeError as error:
            before = source[: error.start].decode("utf-8")
            _fail(f"byte 0x{source[error.start]:02x} is not UTF-8", name, _mark_after(before), "save the file as UTF-8")
    else:
        text = source
    text = text.removeprefix("\ufeff")
    if found := _FORBIDDEN.search(text):
        what = f"the character U+{ord(found[0]):04X} is not allowed in a configuration"
        next = 'remove it, or write it as an escape in double quotes ("\\x1b")'
        _fail(what, name, _mark_after(text[: found.start()]), next)
    return text


def _mark_after(text: str) -> Mark:
    lines = re.split(r"\r\n|\r|\n", text)
    return Mark(len(lines), len(lines[-1]) + 1)


def _fail(what: str, name: str, mark: Mark, next: str) -> NoReturn:
    raise ConfigError(what, where=f"{name}:{mark.line}:{mark.column}", next=next)


class _Reader:
    """Builds plain data from the event stream; `MAX_DEPTH` bounds the recursion."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.mark = Mark(1, 1)  # of the latest event
        self.nodes = 0

    def read(self, text: str) -> Any:
        top, documents = None, 0
        try:
            self.events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
            while not isinstance(event := self._next(), yaml.StreamEndEvent):
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        self._fail("a second document starts here", "keep one configuration per file: remove the `---`")
                    if event.tags:
                        self._fail("%TAG directives are not supported", "remove it")
                elif isinstance(event, yaml.NodeEvent):
                    top = self._value(event, ())
        except yaml.MarkedYAMLError as error:
            # An unclosed quote is reported at its start, not at the end of the file.
            unclosed = "quoted scalar" in (error.context or "")
            place = error.context_mark if unclosed else error.problem_mark
            if place is not None:
                self.mark = Mark(place.line + 1, place.column + 1)
            what = escape(" ".join(part for part in (error.context, error.problem) if part))
            self._fail(f"this is not valid YAML: {what}", _hint(text, self.mark))
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            # PyYAML raises ValueError for some bad escapes and directives.
            self._fail(f"this is not valid YAML: {escape(error)[:200]}", "correct the line")
        return top

    def _next(self) -> Any:
        event: Any = next(self.events)
        self.mark = Mark(event.start_mark.line + 1, event.start_mark.column + 1)
        return event

    def _value(self, event: Any, path: KeyPath) -> Any:
        """Return the data that starts with the latest `event`, and consume the events of its parts."""
        self._check_node(event)
        self.document.values[path] = self.mark
        if isinstance(event, yaml.ScalarEvent):
            try:
                return scalar(event.value) if event.style is None else event.value
            except ValueError as error:
                self._fail(str(error), "quote it if it is a string")
        if len(path) >= MAX_DEPTH:
            self._fail(f"values are nested deeper than {MAX_DEPTH}", "flatten it")
        if isinstance(event, yaml.MappingStartEvent):
            mapping: dict[str, Any] = {}
            while not isinstance(event := self._next(), yaml.MappingEndEvent):
                key = self._key(event, path, mapping)
                mapping[key] = self._value(self._next(), (*path, key))
            return mapping
        items: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            part = (*path, len(items))
            self.document.keys[part] = self.mark
            items.append(self._value(event, part))
        return items

    def _key(self, event: Any, path: KeyPath, mapping: dict[str, Any]) -> str:
        """Return a key as its text. Keys are never resolved (`on:` is the key "on")."""
        self._check_node(event)
        if not isinstance(event, yaml.ScalarEvent):
            next = "keys are names; quote a string that starts with `[` or `{`"
            self._fail("a key is a list or a mapping", next)
        key: str = event.value
        if event.style is None and key == "<<":
            self._fail("merge keys (<<) are not supported", "write the keys out")
        if key == "":
            self._fail("a key is empty", "give it a name")
        part = (*path, key)
        if key in mapping:
            first = self.document.keys[part]
            self._fail(f"the key {spell(part)} appears twice; first on line {first.line}", "keep one of the two")
        self.document.keys[part] = self.mark
        return key

    def _check_node(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._fail(
                f"the alias *{_clip(event.anchor)} is not supported",
                "write the value out; quote a string that starts with `*`",
            )
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._fail(f"the file has more than {MAX_NODES} values", "check that it is a configuration file")
        if event.anchor is not None:
            self._fail(
                f"the anchor &{_clip(event.anchor)} is not supported", "remove it; quote a string that starts with `&`"
            )
        if event.tag is not None:
            self._fail(f"the tag {_clip(event.tag)} is not supported", "remove it; quote a string that starts with `!`")
        bad = re.search("[\x00\ud800-\udfff]", event.value) if isinstance(event, yaml.ScalarEvent) else None
        if bad:
            self._fail(f"a string holds the character U+{ord(bad[0]):04X}", "remove it")

    def _fail(self, what: str, next: str) -> NoReturn:
        _fail(what, self.document.name, self.mark, next)


def _hint(text: str, mark: Mark) -> str:
    lines = text.splitlines()
    line = lines[mark.line - 1] if mark.line <= len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "indent with spaces: YAML does not allow tabs"
    return "check indentation and quotes on this line and the one above; quote a value with `: ` or a final `:`"


def _clip(text: object) -> str:
    shown = escape(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def spell(path: KeyPath) -> str:
    """Return a path as the user writes it: `eval.prompts[2]`; escaped, with long names cut."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_clip(part)}"
    return text.removeprefix(".")


def emit(data: Mapping[str, Any]) -> str:
    """Return YAML text that `parse` reads back equal: block mappings, with lists and scalars in flow style.

    Raises:
        ValueError: a value is not plain data.
    """
    return "".join(line + "\n" for line in _emit_lines(data, ""))


def _emit_lines(data: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_emit_string(key)}:"
            yield from _emit_lines(value, indent + "  ")
        else:
            yield f"{indent}{_emit_string(key)}: {emit_value(value)}"


def emit_value(value: Any) -> str:
    """Return a value as `emit` writes it after its key, on one line. Raises the errors of `emit`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _emit_string(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_emit_string(k)}: {emit_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(emit_value(item) for item in value) + "]"
    raise ValueError(f"{type(value).__name__} is not plain data")


def _emit_string(text: str) -> str:
    # Other YAML readers must read the same string, so strings that they take for booleans or numbers are quoted.
    if _PLAIN.fullmatch(text) and scalar(text) == text and text.lower() not in _BOOL_IN_YAML_1_1:
        return text
    return '"' + escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
