"""Strict JSON: parsing that refuses ambiguous input, with limits that are checked before memory is allocated.

Duplicate keys, NaN, infinities, deep nesting, too many containers and invalid UTF-8 are refused. No schema is checked.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any

from genesis.errors import GenesisError, ModelError, escape
from genesis.files.boundary import boundary, closed_after
from genesis.files.paths import open_regular, quote

MAX_DEPTH = 64
MAX_CONTAINERS = 1_000_000

_NEXT = "restore the file, or write it again"
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def is_unicode(text: str) -> bool:
    """Whether `text` has no unpaired surrogates, which cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_structure(
    data: bytes, *, where: str, max_depth: int = MAX_DEPTH, max_containers: int = MAX_CONTAINERS
) -> None:
    """Refuse JSON text nested deeper than `max_depth` or with more than `max_containers` lists and objects.

    It takes linear time and at most as much memory as `data`, so it can run before the parser.
    """
    # Without escaped characters every quote opens or closes a string, and brackets inside strings can be dropped.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    brackets = _STRING.sub(b"", plain).translate(None, _NOT_BRACKETS)
    if brackets.count(b"[") + brackets.count(b"{") > max_containers:
        raise ModelError(f"the JSON contains more than {max_containers:,} lists and objects", where=where, next=_NEXT)
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > max_depth:
            raise ModelError(f"the JSON is nested deeper than {max_depth} levels", where=where, next=_NEXT)


def parse_object(data: bytes, *, where: str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Parse the JSON object in `data`; `where` is the place for errors. Raises ModelError if `data` is not UTF-8, not
    JSON or not an object, has duplicate keys, numbers that are not finite or unpaired surrogates, or is nested too
    deep or too large.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                raise ModelError(f"the key {quote(key)} appears twice in one JSON object", where=where, next=_NEXT)
            result[key] = value
        return result

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ModelError(f"the number {quote(text)} is not finite", where=where, next=_NEXT)
        return number

    # Limits first, because the parser allocates memory for everything it reads.
    check_structure(data, where=where, max_depth=max_depth)
    try:
        result = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_float=finite, parse_constant=finite)
        # Escapes can produce unpaired surrogates, which encoding reveals.
        if _SURROGATE.search(data):
            json.dumps(result, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"the file is not UTF-8: byte {error.start:,} is invalid", where=where, next=_NEXT) from error
    except json.JSONDecodeError as error:
        where_in_file = f"{where}:{error.lineno}:{error.colno}"
        raise ModelError(f"the file is not JSON: {escape(error.msg)}", where=where_in_file, next=_NEXT) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            "the JSON contains a number, a text or a nesting that is too large", where=where, next=_NEXT
        ) from error
    if not isinstance(result, dict):
        raise ModelError("the top level of the file is not a JSON object", where=where, next=_NEXT)
    return result


def read_limited(path: str | os.PathLike[str], limit: int, kind: type[GenesisError] = ModelError) -> bytes:
    """Read the regular file `path`, which may have at most `limit` bytes; the size is checked before reading.

    Args:
        kind: class of the error, depending on what the file is read as.

    Raises:
        GenesisError: of class `kind`: the file is not regular, too large, or cannot be read.
    """
    data, left = bytearray(), limit + 1
    with boundary(kind, "reading", path), closed_after(open_regular(path, kind)) as descriptor:
        size = os.fstat(descriptor).st_size
        while size <= limit and left and (part := os.read(descriptor, min(left, 1 << 20))):
            data += part
            left -= len(part)
    if max(size, len(data)) > limit:
        raise kind(f"{quote(os.fspath(path), 400)} has {size:,} bytes, more than the {limit:,} allowed", next=_NEXT)
    return bytes(data)


def indented_bytes(value: object) -> bytes:
    """JSON with one entry per line and sorted keys, for files that people also read."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def canonical_bytes(value: object) -> bytes:
    """The canonical JSON text of `value`: sorted keys, no spaces, ASCII, finite numbers. Equal values have equal texts.
    Raises TypeError for keys that are not strings and for other types, and ValueError for numbers that are not finite.
    """
    _check_plain(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def _check_plain(value: object) -> None:
    """Refuse values that `json.dumps` would silently convert, such as integer keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a JSON key must be a string, found {key!r}")
            _check_plain(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"JSON has no type for {type(value).__name__}")
