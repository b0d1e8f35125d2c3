"""Records to samples: masks beside the tokens, what is left out, and texts that are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.data.documents import index_documents
from genesis.data.loader import PackedLoader
from genesis.data.records import Document
from genesis.data.tokenize import SpecialText, Tokenized, tokenize
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError
from genesis.files.cache import Cache
from tests.data.helpers import TEXTS, CompletionEncoder, Documents, completion, prepared

CHATS = [completion(f"Count to {n}.", "\n".join(f"{i} and" for i in range(n)), n) for n in range(1, 6)]


def run(cache: Path, tokenizer: Tokenizer, *documents: Document, **changes: Any) -> Tokenized:
    corpus: Any = Documents(*documents)
    settings = {"encoder": CompletionEncoder(tokenizer)} | changes
    index = index_documents(corpus.documents())
    return tokenize(corpus, index, tokenizer, Cache(cache), lambda *_: None, **settings)


def samples(found: Tokenized) -> list[tuple[int, list[int], list[int]]]:
    """Document, ids and targets of each sample."""
    tokens = found.tokens
    assert tokens.mask is not None
    slices = [slice(a, a + n) for a, n in zip(tokens.starts, tokens.lengths, strict=True)]
    stream, mask = tokens.stream, tokens.mask
    return [
        (int(document), stream[each].tolist(), stream[each][mask[each] != 0].tolist())
        for document, each in zip(tokens.documents, slices, strict=True)
    ]


def test_a_record_becomes_a_sample_or_several_with_a_mask_beside_its_tokens(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for state in "made", "found":
        found = run(tmp_path, tokenizer, *CHATS)
        assert found.state == state and not found.left_out.counts
        expected = []
        for n in range(1, 6):
            prompt = tokenizer.encode(f"Count to {n}.").tolist()
            answers = [tokenizer.encode(f"{i} and").tolist() for i in range(n)]
            expected += [(n - 1, prompt + answer, answer) for answer in answers]
        assert samples(found) == expected
        assert found.tokens.predicted_bytes == sum(len("0 and") * n for n in range(1, 6))
        assert found.tokens.num_targets == sum(len(answer) for _, _, answer in expected)
        assert (len(found.tokens), found.tokens.num_documents) == (15, 5)


def test_texts_and_records_are_mixed_in_their_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [Document(text, f"{n}.txt") for n, text in enumerate(TEXTS[:4])]
    found = run(tmp_path, tokenizer, *texts[:2], CHATS[2], *texts[2:], CHATS[0])
    assert [document for document, _, _ in samples(found)] == [0, 1, 2, 2, 2, 3, 4, 5]
    alone = run(tmp_path, tokenizer, *texts, encoder=None)
    whole = [ids for document, ids, _ in samples(found) if document in (0, 1, 3, 4)]
    assert whole == [
        alone.tokens.stream[a : a + n].tolist() for a, n in zip(alone.tokens.starts, alone.tokens.lengths, strict=True)
    ]
    assert all(targets == ids[1:] for document, ids, targets in samples(found) if document in (0, 1, 3, 4))
    records = sum(len("0 and") * n for n in (3, 1))
    assert found.tokens.predicted_bytes == alone.tokens.predicted_bytes + records
    assert alone.tokens.mask is None


def test_held_out_are_whole_conversations(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokens = run(tmp_path, tokenizer, *CHATS).tokens
    chosen = np.array([False, True, False, True, False])
    held_out, train = tokens.select(chosen), tokens.select(~chosen)
    assert held_out.documents.tolist() == [0, 0, 1, 1, 1, 1] and train.documents.tolist() == [0, 1, 1, 1] + [2] * 5
    assert [held_out.index.lines[d] for d in (0, 1)] == [2, 4]
    assert held_out.num_targets + train.num_targets == tokens.num_targets
    assert held_out.predicted_bytes + train.predicted_bytes == tokens.predicted_bytes


def test_right_from_day_one_2_what_has_no_target_is_counted_and_never_enters(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    documents = [completion("q", "", 1), CHATS[0], completion("q", "", 3), completion("bad", "a", 4)]
    with pytest.raises(DataError, match=r"the template fails.*chats\.jsonl:4"):
        run(tmp_path, tokenizer, *documents)
    for name in "chats.jsonl", "renamed.jsonl":
        named = [Document(d.text, name, d.line, d.record) for d in documents]
        found = run(tmp_path, tokenizer, *named, on_error="skip")
        assert found.left_out.counts == {"no target": 2, "template": 1}
        assert found.left_out.examples["no target"] == f"{name}:1: the record has no target"
        assert [document for document, _, _ in samples(found)] == [1]
        batch = PackedLoader(found.tokens, batch_size=4, seq_len=64, seed=0).batch(0, 0)
        assert batch.num_targets == found.tokens.num_targets > 0
    assert found.state == "found"
    assert len(run(tmp_path, tokenizer, documents[0]).tokens) == 0


def test_what_decides_samples_decides_the_cache_entry(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = CompletionEncoder(tokenizer, "other")
    assert run(tmp_path, tokenizer, *CHATS).state == "made"
    assert run(tmp_path, tokenizer, *CHATS, encoder=other).state == "made"
    texts = [Document(chat.text, "a.txt", chat.line) for chat in CHATS]
    assert run(tmp_path, tokenizer, *texts).state == "made", "texts that spell records are texts"
    assert index_documents(texts).fingerprint() != index_documents(CHATS).fingerprint()


def test_special_tokens_in_records_are_counted_as_in_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = completion("say <|endoftext|>", "no")
    for parse_special in False, True:
        found = run(tmp_path, tokenizer, chat, *CHATS, parse_special=parse_special)
        assert found.special == SpecialText(1, "<|endoftext|>")


# Of the first versions: texts must keep their cache entries and their runs.
TEXT_FINGERPRINT = "634ae5df4f3b4c65a387b8f931cc82fab49bd91621bf9cd47c76259931833d82"


def test_texts_are_as_they_were_before_there_were_records(corpus_folder: Path, tmp_path: Path) -> None:
    data = prepared(corpus_folder, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").glob("tokens-*")
    for name in b"mask.bin", b"documents.bin", b"left_out.json":
        assert name not in entry.read_bytes()
    assert data.train.mask is None and data.train.weights is None and data.report.notes == ()
    assert data.train.data_fingerprint == TEXT_FINGERPRINT
