"""Ids and targets of conversations against those of transformers; `make_fixtures.py` made them."""

from __future__ import annotations

import pytest

from genesis.data.records import Defect
from tests.data.chat.conftest import Encoders
from tests.data.chat.conversations import CONVERSATIONS
from tests.data.chat.golden import document, golden, pairs
from tests.data.chat.make_fixtures import CASES


@pytest.mark.parametrize("case", CASES)
def test_ids_and_targets_are_those_of_transformers(case: str, encoders: Encoders) -> None:
    name, args, _, _ = CASES[case]
    expected = golden()["turns"][case]
    found = encoders(name, **args).encode([document(*conversation) for conversation in CONVERSATIONS.values()])
    compared = 0
    for (conversation, turns), samples in zip(expected.items(), found, strict=True):
        if turns is None:
            assert isinstance(samples, Defect) and samples.kind == "template", conversation
            continue
        assert isinstance(samples, list), conversation
        assert sorted(pairs(samples)) == sorted((prompt, target) for prompt, target in turns), conversation
        compared += 1
    assert compared >= 10


def test_the_cases_cover_what_templates_do() -> None:
    turns = golden()["turns"]
    assert set(turns) == set(CASES) and all(set(found) == set(CONVERSATIONS) for found in turns.values())
    assert [name for name, found in turns["llama3_2"].items() if found is None] == ["two calls"]
    reasoning = ["reasoning", "reasoning in the text", "steps"]
    assert [name for name, found in turns["qwen3_5_nothink"].items() if found is None] == reasoning
    assert all(turns[case]["steps"] for case in ("qwen2_5", "qwen3", "qwen3_5_think"))


@pytest.mark.parametrize(
    "case, counts",
    [
        ("qwen2_5", {"turns": 1, "two calls": 1, "steps": 1, "line ends": 2}),
        ("qwen3", {"turns": 3, "two calls": 3, "steps": 2, "plain": 1}),
        ("qwen3_5_think", {"turns": 3, "two calls": 3, "steps": 2}),
        ("llama3_2", {"turns": 1, "steps": 1, "line ends": 1}),
    ],
)
def test_turns_share_a_sample_where_the_later_prompt_begins_with_them(
    case: str, counts: dict[str, int], encoders: Encoders
) -> None:
    name, args, _, _ = CASES[case]
    encoder = encoders(name, **args)
    before = encoder.split
    found = encoder.encode([document(*CONVERSATIONS[conversation]) for conversation in counts])
    assert [len(samples) for samples in found if isinstance(samples, list)] == list(counts.values())
    assert encoder.split - before == sum(count > 1 for count in counts.values())
