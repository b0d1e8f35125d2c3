"""Wrong and right values for every setting, made from the JSON schema, so that no setting can be forgotten."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from genesis.errors import ConfigError
from genesis.train.config import Config, json_schema
from genesis.train.config_file import parse_config
from genesis.train.strict_yaml import emit

BASE = {
    "model": {"preset": "0.5B"},
    "data": {"train": ["corpus.txt"]},
    "train": {"output_dir": "runs/x", "steps": 100},
}
# With adapters, which only a finished model takes.
LORA_BASE = {**BASE, "model": {"path": "models/base"}, "lora": {"r": 8}}


def base_config(section: str = "") -> Config:
    """A configuration that has `section`."""
    return Config.model_validate(LORA_BASE if section == "lora" else BASE)


def settings() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(section, key) -> the alternatives of its schema, references followed and nested alternatives flattened."""
    schema, found = json_schema(), {}
    for section, reference in schema["properties"].items():
        reference = next(one for one in (reference, *reference.get("anyOf", ())) if "$ref" in one)
        definition = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        for key, fragment in definition["properties"].items():
            found[section, key] = alternatives_of(fragment)
    return found


def alternatives_of(fragment: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a fragment, nested ones flattened."""
    if "anyOf" in fragment:
        return [one for branch in fragment["anyOf"] for one in alternatives_of(branch)]
    return [fragment | ({"enum": [fragment["const"]]} if "const" in fragment else {})]


def wrong_values(alternatives: list[dict[str, Any]]) -> Iterator[Any]:
    """Values that none of the alternatives takes: other types, just outside each bound, words not in the list."""
    kinds = {one["type"] for one in alternatives}
    samples: dict[str, list[Any]] = {
        "string": ["abc", "on", "12:30", "1_000"],
        "integer": [7],
        "number": [0.5],
        "boolean": [True],
        "array": [[[]]],
        "object": [{"a": 1}],
        "null": [None],
    }
    for kind, values in samples.items():
        takes = kind in kinds or (kind == "integer" and "number" in kinds) or (kind == "string" and "enum" in kinds)
        if not takes:
            yield from values
    for one in alternatives:
        yield from _just_outside(one)


def _just_outside(one: dict[str, Any]) -> Iterator[Any]:
    if one["type"] in ("integer", "number"):
        yield from (math.nan, math.inf, -math.inf)
        for bound, direction in (("minimum", -1), ("maximum", 1)):
            if bound in one:
                far = one[bound] + direction
                yield far if one["type"] == "integer" else math.nextafter(one[bound], far)
        yield from (one[bound] for bound in ("exclusiveMinimum", "exclusiveMaximum") if bound in one)
    if one["type"] == "string":
        yield ""
        if "maxLength" in one:
            yield "x" * (one["maxLength"] + 1)
        if "enum" in one or "pattern" in one:
            yield "nonsense"
    if one["type"] == "object" and isinstance(one.get("additionalProperties"), dict):
        yield from (
            {"x": value} for value in wrong_values(alternatives_of(one["additionalProperties"])) if value != {"a": 1}
        )
    if one["type"] == "array":
        if "minItems" in one:
            yield []
        if "maxItems" in one:
            item = one["items"] if "items" in one else one["prefixItems"][0]
            yield [right_values(item.get("anyOf", [item]))[0]] * (one["maxItems"] + 1)


def right_values(alternatives: list[dict[str, Any]]) -> list[Any]:
    """Values at the bounds of each alternative, or any of its kind."""
    values: list[Any] = []
    for one in alternatives:
        kind = one["type"]
        if "enum" in one:
            values += one["enum"]
        elif kind in ("integer", "number"):
            low = one["minimum"] if "minimum" in one else math.nextafter(one["exclusiveMinimum"], 1)
            high = one["maximum"] if "maximum" in one else math.nextafter(one["exclusiveMaximum"], 0)
            values += [low, high]
        elif kind == "string":
            values += ["cuda:1", "cpu"] if "pattern" in one else ["x", "x" * one.get("maxLength", 1)]
        elif kind == "array":
            items = one.get("prefixItems") or [one["items"]] * max(1, one.get("minItems", 0))
            values.append([right_values(item.get("anyOf", [item]))[0] for item in items])
        elif kind == "object" and isinstance(one.get("additionalProperties"), dict):
            values += [{"x": value} for value in right_values(alternatives_of(one["additionalProperties"]))]
        elif kind == "object" and "properties" in one:
            values += [{key: value} for key, each in one["properties"].items() for value in right_values([each])]
        else:
            values += {"boolean": [True, False], "null": [None], "object": [{"model_type": "qwen3"}]}[kind]
    return values


def text_with(section: str, key: str, value: Any) -> tuple[str, str]:
    """The base configuration with one setting changed, and the `line:column` at which the value stands."""
    data = base_config(section).model_dump()
    data[section][key] = value
    lines = emit(data).split("\n")
    start = next(number for number, line in enumerate(lines) if line == f"{section}:")
    number = next(n for n, line in enumerate(lines) if n > start and line.startswith(f"  {key}:"))
    column = 1 + len(f"  {key}: ")
    if isinstance(value, dict) and value:
        number, column = number + 1, 5
    return "\n".join(lines), f"{number + 1}:{column}"


def check_refused(text: str, place: str, name: str) -> None:
    """Fails unless the text is refused with an error that names the setting, the place, and something to do."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml")
    assert caught.value.exit_code == 3
    assert caught.value.where == f"c.yaml:{place}"
    assert name in caught.value.what
    assert len(caught.value.next) > 5
