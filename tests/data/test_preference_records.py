"""Records of preferences: pairs and judged answers, the prompts of pairs without one, and what becomes of long ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.data.corpus import Corpus
from genesis.data.documents import index_documents, split
from genesis.data.loader import PackedLoader
from genesis.data.packing import fit
from genesis.data.pairs import mismatched, share_prompts
from genesis.data.record_formats import RecordFormat
from genesis.data.records import Completion, Conversation, Defect, Defects, Judged, Pair, Position
from genesis.errors import DataError
from tests.data.helpers import token_set
from tests.train.chats import write_chats

HERE = Position("pairs.jsonl", 7)


def said(*texts: str, system: str = "") -> list[dict[str, str]]:
    """User and assistant in turn."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts))]


def answer(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text} for text in texts]


def pair(record: object, **fields: str) -> Pair:
    kind, found = RecordFormat("auto", fields, "pairs").read(record, HERE)  # type: ignore[arg-type]
    assert kind == "preference" and isinstance(found, Pair)
    return found


def judged(record: object) -> Judged:
    kind, found = RecordFormat(learns="judged").read(record, HERE)
    assert kind == "unpaired" and isinstance(found, Judged)
    return found


def conversations(found: Pair) -> list[tuple[list[str], list[str]]]:
    """The contents of the prompt and of the answer of each side."""
    sides = []
    for side in (found.chosen, found.rejected):
        assert isinstance(side, Conversation)
        contents = [message["content"] for message in side.messages]
        sides.append((contents[: side.prompt_messages], contents[side.prompt_messages :]))
    return sides


def test_texts_with_a_prompt() -> None:
    record = {"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}
    assert pair(record) == Pair(Completion("2+2=", " 4"), Completion("2+2=", " 5"))
    renamed = {"question": "2+2=", "good": " 4", "bad": " 5", "chosen": 3}
    assert pair(renamed, prompt="question", chosen="good", rejected="bad") == pair(record)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("Q: 2+2?\n\nA: 4", "Q: 2+2?\n\nA: 5", "Q: 2+2?\n\nA:", (" 4", " 5")),
        ("The sky is blue", "The sky is black", "The sky is", (" blue", " black")),  # not within a word
        ("Yes it is", "Yes it is not", "Yes it", (" is", " is not")),
        ("Say yes.", "Say yes. No", "Say", (" yes.", " yes. No")),
    ],
)
def test_texts_that_begin_with_the_same_words(
    chosen: str, rejected: str, prompt: str, answers: tuple[str, str]
) -> None:
    found = pair({"chosen": chosen, "rejected": rejected})
    assert found == Pair(Completion(prompt, answers[0]), Completion(prompt, answers[1]))


def test_conversations_with_a_prompt() -> None:
    record = {"prompt": said("hi"), "chosen": answer("hello"), "rejected": answer("go"), "tools": [{"name": "f"}]}
    found = pair(record)
    assert conversations(found) == [(["hi"], ["hello"]), (["hi"], ["go"])]
    assert isinstance(found.chosen, Conversation) and found.chosen.tools == ({"name": "f"},)
    columns = RecordFormat(learns="pairs").columns(["score", *record], HERE)
    assert sorted(columns) == ["chosen", "prompt", "rejected", "tools"]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "hi"}, {"prompt": said("hi")}], ids=["none", "text", "messages"])
def test_the_prompt_is_the_messages_with_which_both_begin(prompt: dict[str, Any]) -> None:
    """Not the characters: both answers begin with one word."""
    found = pair({"chosen": said("hi", "well, hello"), "rejected": said("hi", "well, go"), **prompt})
    assert conversations(found) == [(["hi"], ["well, hello"]), (["hi"], ["well, go"])]
    later = pair({"chosen": said("a", "b", "c", "d", system="s"), "rejected": said("a", "b", "c", "e", system="s")})
    assert conversations(later) == [(["s", "a", "b", "c"], ["d"]), (["s", "a", "b", "c"], ["e"])]
    longer = pair({"chosen": said("a", "b", "c", "d"), "rejected": said("a", "b")})
    assert conversations(longer) == [(["a"], ["b", "c", "d"]), (["a"], ["b"])]


def test_judged_answers() -> None:
    record = {"prompt": "2+2=", "completion": " 4", "label": True}
    assert judged(record) == judged({**record, "label": "True"}) == Judged(Completion("2+2=", " 4"), True)
    found = judged({"prompt": said("hi"), "completion": answer("go"), "label": False})
    assert isinstance(found.answer, Conversation) and found.answer.prompt_messages == 1
    assert judged({"prompt": said("hi"), "completion": said("hi", "go"), "label": False}) == found


TEXT = {"prompt": "p", "chosen": "c", "rejected": "r"}
CHAT = {"prompt": said("a"), "chosen": answer("b"), "rejected": answer("c")}
GOOD = {"prompt": "p", "completion": "c", "label": True}
# record, kind, field, a part of the message
DEFECTS: list[tuple[str, object, str, str, str]] = [
    ("pairs", {"messages": said("a", "b")}, "no preference", "", "learns from pairs of answers"),
    ("pairs", {"prompt": "p", "chosen": "c"}, "no preference", "", "'rejected'"),
    ("pairs", GOOD, "no preference", "", "objective.name=kto"),
    ("pairs", ["c"], "no record", "", "a list"),
    ("pairs", {**TEXT, "rejected": "c"}, "equal answers", "rejected", "equal"),
    ("pairs", {"chosen": said("a", "b"), "rejected": said("a", "b")}, "equal answers", "rejected", "equal"),
    ("pairs", {**TEXT, "chosen": " \n"}, "empty answer", "chosen", "no text"),
    ("pairs", {**CHAT, "chosen": answer("")}, "empty answer", "chosen", "no text"),
    ("pairs", {"prompt": said("a"), "chosen": said("b"), "rejected": answer("b")}, "empty answer", "chosen", "no text"),
    ("pairs", {**TEXT, "prompt": ""}, "no prompt", "", "empty"),
    ("pairs", {"chosen": "yes", "rejected": "no"}, "no prompt", "", "same words"),
    ("pairs", {"chosen": said("a", "b"), "rejected": said("c", "d")}, "no prompt", "", "same messages"),
    ("pairs", {"chosen": answer("b"), "rejected": answer("c")}, "no prompt", "", "same messages"),
    ("pairs", {**TEXT, "chosen": answer("b")}, "wrong type", "rejected", "a list and rejected a string"),
    ("pairs", {**TEXT, "prompt": 3}, "wrong type", "prompt", "a number"),
    ("pairs", {**TEXT, "chosen": "a\0"}, "NUL byte", "chosen", "NUL"),
    ("judged", TEXT, "no preference", "", "objective.name=dpo"),
    ("judged", {"completion": "c", "label": True}, "no prompt", "", "no prompt"),
    ("judged", {**GOOD, "label": 1}, "wrong type", "label", "a number, not true or false"),
    ("judged", {**GOOD, "label": "good"}, "wrong type", "label", "'good', not true or false"),
    ("judged", {**GOOD, "label": None}, "wrong type", "label", "null"),
    ("judged", {**GOOD, "completion": ""}, "empty answer", "completion", "no text"),
    ("judged", {**GOOD, "completion": answer("b")}, "wrong type", "completion", "a list"),
]


@pytest.mark.parametrize(("learns", "record", "kind", "field", "part"), DEFECTS)
def test_defects(learns: Any, record: object, kind: str, field: str, part: str) -> None:
    with pytest.raises(Defect) as caught:
        RecordFormat(learns=learns).read(record, HERE)
    error = caught.value
    assert (error.kind, error.field, error.exit_code) == (kind, field, 4) and part in f"{error.what}{error.next}"
    assert "pairs.jsonl:7" in error.where


def test_equal_and_empty_answers_are_always_left_out_and_counted(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "p.jsonl", [TEXT, {**TEXT, "rejected": "c"}, {**TEXT, "chosen": ""}, TEXT])
    corpus, defects = Corpus([str(path)], on_error="fail", max_line_bytes=1024, learns="pairs"), Defects()
    assert [document.line for document in corpus.documents(defects)] == [1, 4]
    assert (
        defects.counts == {"equal answers": 1, "empty answer": 1} and "p.jsonl:2" in defects.examples["equal answers"]
    )
    write_chats(path, [TEXT, {**TEXT, "prompt": ""}])
    with pytest.raises(DataError, match="no prompt"):
        list(corpus.documents())
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(DataError, match="holds text, but the objective learns from pairs"):
        list(Corpus([str(tmp_path / "t.txt")], on_error="fail", max_line_bytes=1024, learns="pairs").documents())


def test_all_pairs_of_a_prompt_are_on_one_side(tmp_path: Path) -> None:
    records = [{**TEXT, "prompt": f"p{n % 20}", "chosen": f"c{n}"} for n in range(200)]
    path = write_chats(tmp_path / "p.jsonl", records)
    index = index_documents(Corpus([str(path)], on_error="fail", max_line_bytes=1024, learns="pairs").documents())
    is_held_out = split(index.groups, index.text_bytes, seed=0, fraction=0.3)
    sides = {number: {bool(is_held_out[n]) for n in range(number, 200, 20)} for number in range(20)}
    assert all(len(side) == 1 for side in sides.values()) and {True, False} <= set().union(*sides.values())
    assert len({row.tobytes() for row in index.groups}) == 20 and len({row.tobytes() for row in index.digests}) == 200


# --- Pairs that are too long ------------------------------------------------------------------------------------------


def pairs_of(*sizes: tuple[int, int]) -> Any:
    """Pairs of sequences of these lengths: two tokens of a prompt, then an answer, of which token n is n or 100 + n."""
    tokens = token_set([a + b for a, b in sizes])
    stream = np.concatenate([np.concatenate([np.arange(a), np.r_[0, 1, np.arange(102, 100 + b)]]) for a, b in sizes])
    mask = np.concatenate([np.arange(n) >= 2 for size in sizes for n in size]).astype(np.uint8)
    splits = np.array([a for a, _ in sizes])
    return replace(tokens, stream=stream.astype(np.uint16), mask=mask, splits=splits)


def sides(tokens: Any) -> list[tuple[list[int], list[int]]]:
    found = []
    for begin, length, middle in zip(tokens.starts, tokens.lengths, tokens.splits, strict=True):
        ids = tokens.stream[begin : begin + length].tolist()
        found.append((ids[:middle], ids[middle:]))
    return found


def test_both_answers_are_cut_after_the_same_tokens() -> None:
    tokens = pairs_of((4, 5), (12, 4), (9, 9), (3, 30))
    short, notes = fit(tokens, 12, "truncate", lambda token: 1)
    first, second = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 102, 103, 104, 105]
    assert (
        sides(short)
        == [
            ([0, 1, 2, 3], [0, 1, 102, 103, 104]),
            (first, second[:4]),  # the shorter one keeps all
            (first[:6], second),
            ([0, 1, 2], [0, 1, *range(102, 109)]),
        ]
    )
    assert short.target_counts.tolist() == [5, 8, 8, 8]
    assert str(notes[0]).startswith("3 of 4 samples have more than 12 tokens and are truncated, both answers alike")
    dropped, notes = fit(tokens, 12, None, lambda token: 1)
    assert sides(dropped) == [sides(tokens)[0]] and "left out" in str(notes[0])
    with pytest.raises(DataError, match=r"16 tokens.*drop or truncate$"):
        fit(tokens, 12, "fail", lambda token: 1)


def test_a_second_sequence_leaves_out_the_common_prompt() -> None:
    """All but the last token of the prompt, which predicts the answer. What is left is cut after the same tokens."""
    tokens = share_prompts(pairs_of((4, 5), (12, 4), (9, 9), (3, 30)))
    assert tokens.shared is not None and tokens.shared.tolist() == [1, 1, 1, 1]
    assert [b for _, b in sides(tokens)][:2] == [[1, 102, 103, 104], [1, 102, 103]]
    short, _ = fit(tokens, 12, "truncate", lambda token: 1)
    assert [(len(a), len(b)) for a, b in sides(short)] == [(4, 4), (9, 3), (6, 5), (3, 9)]
    batch = PackedLoader(short, batch_size=4, seq_len=12, seed=0, shuffle=False).batch(0, 0)
    assert batch.position_ids[2].tolist() == [
        *[[t, 0, 0, 0] for t in range(6)], *[[t, 0, 1, 6] for t in range(1, 6)], [0, 11, 0, 0],
    ]  # fmt: skip
    assert batch.num_targets == short.num_targets == 31 and batch.num_tokens == 31 + 3 * 4


def test_prompts_of_one_token_and_prompts_that_differ_are_not_shared() -> None:
    tokens = pairs_of((5, 4), (6, 7))
    stream, mask = tokens.stream.copy(), tokens.mask.copy()
    mask[1] = 1  # the first prompt has one token, and the prompts of the second pair differ in their first one
    stream[9] = 50
    shared = share_prompts(replace(tokens, stream=stream, mask=mask))
    assert shared.shared is not None and shared.shared.tolist() == [0, 0]
    assert shared.stream.tolist() == stream.tolist()


def test_pairs_that_are_equal_or_without_an_answer_where_they_are_cut_are_left_out() -> None:
    tokens = pairs_of((9, 9), (9, 9), (4, 4))
    stream = tokens.stream.copy()
    stream[9:15] = stream[:6]  # the first pair's answers differ from token 6 on
    short, notes = fit(replace(tokens, stream=stream), 12, "truncate", lambda token: 1)
    assert len(short) == 2 and notes[1].count == 1
    short, notes = fit(tokens, 4, "truncate", lambda token: 1)  # two tokens of a prompt each
    assert not len(short) and len(notes) == 2


def test_a_mismatched_answer_fits_beside_the_judged_one() -> None:
    tokens = replace(pairs_of((3, 4), (5, 3)), splits=None)  # two samples of 7 and 8 tokens
    tokens = replace(tokens, is_good=np.array([True, False]), mask=(np.arange(15) % 7 > 1).astype(np.uint8))
    found = mismatched(tokens, 16)
    assert found.splits is not None and found.splits.tolist() == [7, 8] and (found.lengths <= 16).all()
    with pytest.raises(DataError, match="a single answer"):
        mismatched(tokens.select_samples(np.array([True, False])), 16)
    short, notes = fit(tokens, 15, None, lambda token: 1)  # half of a row is 7 tokens
    assert len(short) == 1 and "more than 7 tokens" in str(notes[0])
