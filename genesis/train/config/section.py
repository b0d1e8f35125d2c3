"""What every section of the schema is: strict, frozen, and with rules that name a setting and the way out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, JsonValue
from pydantic_core import PydanticCustomError

# json_schema_extra of a setting, or a whole section, that a resumed run may change; any other change is refused.
RESUME: dict[str, JsonValue] = {"x-resume": "may change"}


class Section(BaseModel):
    """A section of the file: no unknown keys, no silent conversions, no changes once it is made."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


def problem(key: str, what: str, next: str) -> PydanticCustomError:
    """A broken rule between settings: reported at `key` (relative to the section), with the way out."""
    return PydanticCustomError("genesis_rule", "{what}", {"what": what, "key": key, "next": next})


def check_json(value: Mapping[str, Any], key: str, setting: str) -> None:
    """Refuses, at `key`, a mapping that JSON cannot hold; `setting` is its full name."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise problem(key, f"{setting} holds a value that JSON cannot", "use strings, finite numbers, lists") from None


def exactly_one(*keys: str) -> dict[str, JsonValue]:
    """JSON schema of "one of these keys is given and not null"."""
    return {"oneOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys]}
