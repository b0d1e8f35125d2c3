"""From files of records to a run's samples: what is held out, left out, cached, and what stops a changed run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.data.chat import ChatEncoder, ChatTemplate
from genesis.data.loader import IGNORE_INDEX, PackedLoader
from genesis.data.packing import Note
from genesis.data.pipeline import Prepared
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError
from genesis.train.config import WeightedSource
from tests.data.helpers import CompletionEncoder, prepared, raised

SEQ_LEN = 192


class Encoders:
    """An encoder for each loss, kept for all tests: starting the process that renders takes a third of a second."""

    def __init__(self) -> None:
        self._kept: dict[str, ChatEncoder] = {}

    def __call__(self, tokenizer: Tokenizer, loss: Any = "all_assistant") -> ChatEncoder:
        if loss not in self._kept:
            self._kept[loss] = ChatEncoder(tokenizer, ChatTemplate.chatml(tokenizer), loss=loss)
        return Open(self._kept[loss])

    def close(self) -> None:
        for kept in self._kept.values():
            kept.close()


class Open:
    """An encoder that stays open."""

    def __init__(self, kept: ChatEncoder) -> None:
        self.fingerprint, self.encode = kept.fingerprint, kept.encode

    def close(self) -> None:
        pass


encoder = Encoders()


@pytest.fixture(autouse=True, scope="module")
def closed() -> Iterator[None]:
    yield
    encoder.close()


def turns(number: int, count: int) -> list[dict[str, str]]:
    found = []
    for turn in range(count):
        found += [{"role": "user", "content": f"{number}: ask {turn}"}]
        found += [{"role": "assistant", "content": f"{number}: say {turn}"}]
    return found


@pytest.fixture
def chats(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Thirty conversations: the one in line 5 has many turns, the one in line 8 a long question."""
    tokenizer.save(tmp_path / "tokenizer")
    records = [{"messages": turns(n, 12 if n == 5 else 1 + n % 2)} for n in range(1, 31)]
    records[7]["messages"][0]["content"] = "why? " * SEQ_LEN
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(chats: Path, **changes: Any) -> Prepared:
    settings: dict[str, Any] = {
        "train_sources": [str(chats)],
        "tokenizer_path": chats.parent / "tokenizer",
        "make_encoder": encoder,
        "seq_len": SEQ_LEN,
    }
    return prepared(chats.parent, chats.parent / "cache", **settings | changes)


def lines(data: Prepared) -> tuple[set[int], set[int]]:
    """The lines of the file that are trained on, and those that are held out."""
    assert data.held_out is not None
    sides = (data.train, data.held_out.tokens)
    train, held_out = (set(tokens.index.lines[tokens.documents].tolist()) for tokens in sides)
    return train, held_out


def test_whole_conversations_are_trained_on_or_held_out_or_counted(chats: Path) -> None:
    data = prepare(chats)
    train, held_out = lines(data)
    assert not train & held_out and train | held_out == set(range(1, 31)) - {5, 8} and len(held_out) >= 2
    (note,) = data.report.notes
    assert str(note).startswith("2 of 30 samples have more than 192 tokens and are left out; the first: ")
    assert note.example.startswith(f"{chats}:5, ")
    assert data.report.formats == {"messages": 30} and len(data.report.lengths) == 30
    assert data.held_out is not None and data.held_out.gzip_bits_per_byte is None
    said = sum(len(f"{n}: say {turn}") for n in held_out for turn in range(1 + n % 2))
    assert data.held_out.tokens.predicted_bytes == said


def test_conversations_that_end_with_a_question_have_no_target_where_answers_to_it_are_learned(chats: Path) -> None:
    chats.write_text("".join(json.dumps({"messages": turns(n, 2)[: 3 + n % 2]}) + "\n" for n in range(1, 21)))
    data = prepare(chats, make_encoder=partial(encoder, loss="completion"))
    (note,) = data.report.notes
    assert (note.count, note.what) == (10, "samples without a target are left out")
    assert note.example.startswith(f"{chats}:2: ") and set.union(*lines(data)) == set(range(1, 21, 2))
    assert lines(data)[1], "a document that has a target is held out where the one chosen first has none"


def test_labels_are_what_the_assistant_says_and_the_end_of_its_turn(chats: Path) -> None:
    data = prepare(chats)
    loader = PackedLoader(data.train, batch_size=2, seq_len=SEQ_LEN, seed=0)
    texts = []
    for number in range(loader.num_batches(0)):
        batch = loader.batch(0, number)
        labels = batch.labels.reshape(-1)
        ends = np.flatnonzero(np.diff(labels != IGNORE_INDEX)) + 1
        texts += [
            data.tokenizer.decode(part, skip_special=False)
            for part in np.split(labels, ends)
            if part[0] != IGNORE_INDEX
        ]
    expected = [f"{n}: say {turn}<|endoftext|>" for n in lines(data)[0] for turn in range(1 + n % 2)]
    assert sorted(texts) == sorted(expected)


def test_another_length_or_rule_encodes_nothing_again(chats: Path) -> None:
    assert prepare(chats).report.tokens == "made"
    longer = prepare(chats, seq_len=1024)
    assert longer.report.tokens == "found" and 5 in set.union(*lines(longer))
    assert set.union(*lines(prepare(chats, too_long="split"))) == set(range(1, 31))
    short = prepare(chats, too_long="truncate")
    assert set.union(*lines(short)) == set(range(1, 31)) - {8}
    assert [note.example.partition(",")[0] for note in short.report.notes] == [f"{chats}:5", f"{chats}:8"]
    with pytest.raises(DataError, match=r"tokens, more than the 192 of data\.seq_len") as caught:
        prepare(chats, too_long="fail")
    assert caught.value.where == f"{chats}:5"
    with pytest.raises(DataError, match=r"no sample of data\.train is left.*the first: .*data\.too_long"):
        prepare(chats, seq_len=8)


def test_what_makes_the_samples_stops_a_resumed_run_when_it_changes(chats: Path) -> None:
    def state(**changes: Any) -> PackedLoader:
        return PackedLoader(prepare(chats, **changes).train, batch_size=2, seq_len=SEQ_LEN, seed=3)

    before = json.loads(json.dumps(state().state()))
    assert raised(partial(state().load_state, before)) == ""
    weighted: list[Any] = [WeightedSource(path=str(chats), weight=1.5)]
    for changes in (
        {"make_encoder": partial(encoder, loss="last")},
        {"too_long": "truncate"},
        {"train_sources": weighted},
    ):
        assert raised(partial(state(**changes).load_state, before)) == "DataError 4"


def test_sources_of_their_own_are_measured_on_whole(chats: Path) -> None:
    held_out = chats.with_name("held_out.jsonl")
    held_out.write_text(json.dumps({"prompt": "two and two?", "completion": " four"}) + "\n")
    data = prepare(chats, eval_sources=[str(held_out)], eval_fraction=None)
    assert data.held_out is not None and data.held_out.gzip_bits_per_byte is None
    assert data.held_out.tokens.predicted_bytes == len(" four") and data.held_out.notes == ()
    held_out.write_text("a text\n")
    texts = prepare(chats, eval_sources=[str(held_out.rename(chats.with_name("held_out.txt")))], eval_fraction=None)
    assert texts.held_out is not None and texts.held_out.gzip_bits_per_byte is not None


def test_the_encoder_is_closed(chats: Path, tokenizer: Tokenizer) -> None:
    chats.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}"}) + "\n" for n in range(20)))
    made: list[CompletionEncoder] = []
    for _ in range(2):  # also where the samples come from the cache
        prepare(chats, make_encoder=lambda found: made.append(CompletionEncoder(found)) or made[-1])
    assert [each.closed for each in made] == [True, True] and [each.batches for each in made] == [1, 0]


def test_records_that_became_several_samples_are_counted(chats: Path) -> None:
    records = [{"prompt": f"{n}?", "completion": "a\nb" if n in (4, 9) else "a"} for n in range(20)]
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    (note,) = prepare(chats, make_encoder=CompletionEncoder).report.notes
    assert note.count == 2 and note.what.startswith("conversations became several samples")
    assert note.example == f"{chats}:5, 2 samples"


def test_records_without_an_encoder_are_an_error(chats: Path) -> None:
    with pytest.raises(DataError, match="holds records"):
        prepare(chats, make_encoder=None)


def test_a_note_about_one_is_in_the_singular() -> None:
    for what, one in (
        ("turns are read but not learned", "turn is read but not learned"),
        ("system messages are left out by the template", "system message is left out by the template"),
        ("samples without a target are left out", "sample without a target is left out"),
        ("turns have reasoning that is left out", "turn has reasoning that is left out"),
        ("conversations became several samples", "conversation became several samples"),
        (
            "of 3 samples have more than 96 tokens and are left out",
            "of 3 samples have more than 96 tokens and are left out",
        ),
    ):
        assert [str(Note(n, what, "f:1")) for n in (1, 2)] == [f"1 {one}; the first: f:1", f"2 {what}; the first: f:1"]
