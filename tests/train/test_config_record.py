"""The record of a run, config.resolved.yaml: what a run starts with comes back from it, or the run is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from genesis.errors import ConfigError
from genesis.train.config import Config
from genesis.train.config_file import RESOLVED, check_reads_back, check_resume, parse_config

# What YAML reads as something else than a string, or not at all; parted by bars.
PARTED = (
    "|null|~|true|on|y|0x1F|0o17|1e5|1_000|012|-|- a|a: b|#c|a #b|@x|!x|&x|*x|<<|=|12:30|2020-01-01|.5|+1|.inf|.nan"
    "|\x1b|\x85|\u2028|\ufeff|\x7f|\x00|é|漢字|😀|\ud800|\u202e|a\nb| a|a |\t|'|\"|\\|\r\n|{|}|[|,|?|? a|:|---|..."
)
TEXTS = [*PARTED.split("|"), "|", "k" * 990, "k" * 1023, "k" * 1100]
NUMBERS = [0, -1, 0xFFF << 140, 10**39, -(10**39), 10**40, 1e22, 5e-324, -0.0, 1.7976931348623157e308, 0.1, 1e-5]


def config(**keys: Any) -> Config:
    model = {"config": {"model_type": "qwen3", **keys}}
    return Config.model_validate({"model": model, "data": {"train": ["x"]}, "train": {"output_dir": "run", "steps": 1}})


def value(chance: random.Random, depth: int) -> Any:
    kind = chance.random()
    if depth and kind < 0.2:
        return {chance.choice(TEXTS): value(chance, depth - 1) for _ in range(chance.randrange(4))}
    if depth and kind < 0.4:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return chance.choice([chance.choice(TEXTS), chance.choice(NUMBERS), None, True, False])


def test_what_starts_is_read_back_to_the_last_bit() -> None:
    chance, taken, refused = random.Random(18), 0, 0
    for _ in range(60):
        given = config(extra=value(chance, 3), **{chance.choice(TEXTS): value(chance, 2)})
        try:
            check_reads_back(given)
        except ConfigError as error:
            refused += error.where.startswith("model.config.")
            continue
        read = parse_config(given.resolved_yaml().encode(), RESOLVED)
        assert repr(read) == repr(given)
        taken += 1
    assert taken + refused == 60 and min(taken, refused) > 10, (taken, refused)


def nested(levels: int) -> Any:
    return {"k": nested(levels - 1)} if levels else 1


@pytest.mark.parametrize(
    ("keys", "where", "why"),
    [
        ({"n": 0xFFFF << 140}, "model.config.n", "has 47 characters"),
        ({"a": {"b": [1, {"c": -(10**45)}]}}, "model.config.a.b[1].c", "has 47 characters"),
        ({"a": nested(14)}, "model.config.a.k.k.k", "nested deeper than 16"),
        ({"k" * 1100: 1}, f"model.config.{'k' * 57}...", "a key has 1,100 characters"),
        ({"a": "x", "b": ["x" * 300_000]}, "model.config.b[0]", "more than 262144 bytes"),
        ({f"k{i}": "x" * 30_000 for i in range(10)}, "model.config", "more than 262144 bytes"),
        ({"a": {"b": "\0"}}, "model.config.a.b", "U+0000"),
        ({"a": {1: 2}}, "model.config.a", "expected string"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_error_names_the_key(keys: dict[str, Any], where: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_reads_back(config(**keys))
    assert caught.value.where == where
    assert why in caught.value.what and RESOLVED in caught.value.what and caught.value.next


def test_a_tuple_is_read_back_as_a_list_and_is_no_change() -> None:
    given = config(sizes=(1, 2))
    check_reads_back(given)
    check_resume(parse_config(given.resolved_yaml(), RESOLVED), given)
