"""`genesis demo`: every demo on little data, and what its tables count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import genesis
from genesis.backend import CPU
from genesis.errors import NumericError
from genesis.measure import demos
from genesis.measure.demos import DEMOS, Setting, compare, ways_table
from genesis_cli import environment
from tests.cli.command import printed
from tests.measure.quick import PLAN, small_limits


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    with (
        small_limits(),
        mock.patch.object(demos, "FAST", PLAN),
        mock.patch.object(environment, "facts", return_value=facts),
    ):
        yield


def tables(*words: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table of `genesis demo words…`."""
    code, text, told = printed("demo", *words, "--fast", "--json", "-")
    assert (code, told) == (0, "")
    return {table["name"]: table["rows"] for table in json.loads(text)["tables"]}


@pytest.mark.sample
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # Triton's interpreter
@pytest.mark.parametrize("name", DEMOS)
def test_each_runs(name: str, device: str) -> None:
    for table, rows in tables(name, "--device", device).items():
        assert len(rows) >= 2
        for row in rows if table != "passes" else ():
            assert row["ops"] >= 1 and row["wall"] > 0
            assert row["rate"] == pytest.approx((row["read"] + row["written"]) / (row["gpu"] or row["wall"]))


def test_fusion_counts_passes_and_bytes() -> None:
    found = tables("fusion", "--device", "cuda")
    size = 4 * 32 * 32
    assert [(row["name"], row["ops"]) for row in found["gelu"]] == [("by hand", 9), ("fused", 1)]
    # Nine ops write a tensor; five read one, four read two.
    assert [row["read"] + row["written"] for row in found["gelu"]] == [22 * size, 2 * size]
    assert [row["op"] for row in found["passes"]] == ["amax", "sub", "exp", "sum", "div"]
    assert [row["written"] for row in found["passes"]] == [4 * 32, size, size, 4 * 32, size]
    assert sum(row["read"] for row in found["passes"]) == found["softmax"][0]["read"]


def test_names() -> None:
    code, text, _ = printed("demo")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == list(DEMOS)
    code, _, told = printed("demo", "fusoin")
    assert code == 2 and "unknown demo fusoin" in told and "did you mean fusion?" in told


def test_ways_must_agree() -> None:
    x = genesis.ones(3)
    with pytest.raises(NumericError, match="twice differs from once by 1, "):
        compare({"once": lambda: x, "twice": lambda: x * 2}, Setting(CPU, True))
    with pytest.raises(NumericError, match="by nan"):
        compare({"once": lambda: x, "none": lambda: x * float("nan")}, Setting(CPU, True))


def test_a_noisy_ratio_says_so() -> None:
    x = genesis.ones(3)
    quick, other = compare({"once": lambda: x + 1, "again": lambda: x + 1}, Setting(CPU, True))
    for is_noisy in (False, True):
        ways = [{**way, "time": way["time"]._replace(is_noisy=is_noisy)} for way in (quick, other)]
        (note,) = ways_table("t", "", ways).notes
        assert note.endswith("(noisy)") == is_noisy
