"""One JSON value of a data file: strict where JSON is open, with the line of what is wrong."""

from __future__ import annotations

import json
from typing import Any

from genesis.data.records import Defect, Position
from genesis.errors import ModelError, escape
from genesis.files.paths import quote
from genesis.files.strict_json import check_structure

# An empty object takes 64 bytes of memory for 3 of the file.
MAX_CONTAINERS = 100_000


def parse(text: str, position: Position, what: str = "line", field: str = "") -> Any:
    """The JSON value of `text`, which begins at `position`.

    NaN and infinities pass, as Python writes them: only values that are used are looked at, later.

    Args:
        what: how errors call the text. field: the field that holds it, if it is the string of one.

    Raises:
        Defect: no JSON, a field twice in an object, an escape of half a character, a nesting or number beyond use,
            more than `MAX_CONTAINERS` lists and objects.
    """
    if text.count("[") + text.count("{") > MAX_CONTAINERS:  # some may stand in strings
        try:
            check_structure(text.encode("utf-8"), where="", max_depth=len(text), max_containers=MAX_CONTAINERS)
        except ModelError as error:
            raise position.defect("bad JSON", error.what, field=field) from error

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise position.defect("bad JSON", f"the field {quote(twice)} appears twice in one object", field=field)
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:
            # An escape can encode half a character, which no UTF-8 text holds.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except Defect:
        raise
    except UnicodeEncodeError as error:
        raise position.defect("bad JSON", "an escape encodes half a surrogate pair", field=field) from error
    except json.JSONDecodeError as error:
        inside = position if field else position._replace(line=position.line + error.lineno - 1)
        message = f"the {what} is not JSON: {escape(error.msg)} (column {error.colno:,})"
        raise inside.defect("bad JSON", message, field=field) from error
    except (ValueError, RecursionError) as error:
        message = "the JSON holds a number or a nesting beyond every use"
        raise position.defect("bad JSON", message, field=field) from error
