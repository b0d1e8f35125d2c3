"""Documents to tokens: what the stream holds, in bounded batches, and never of data that changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.data import tokenize as tokenize_module
from genesis.data.corpus import Corpus
from genesis.data.documents import DocumentIndex, TokenSet, index_documents
from genesis.data.tokenize import SpecialText, tokenize
from genesis.data.tokenizer import Ids, Tokenizer
from genesis.errors import DataError
from genesis.files.cache import Cache
from tests.data.helpers import TEXTS
from tests.data.test_tokenizer_files import byte_level, sentence_piece, write


def corpus_of(folder: Path) -> Corpus:
    return Corpus([f"{folder}/*.txt"], on_error="fail", max_line_bytes=1 << 20)


def indexed(folder: Path) -> tuple[Corpus, DocumentIndex]:
    corpus = corpus_of(folder)
    return corpus, index_documents(corpus.documents())


def run(folder: Path, tokenizer: Tokenizer, cache: Path) -> tuple[TokenSet, str, list[tuple[int, int]]]:
    steps: list[tuple[int, int]] = []
    corpus, index = indexed(folder)
    found = tokenize(corpus, index, tokenizer, Cache(cache), lambda done, total: steps.append((done, total)))
    return found.tokens, found.state, steps


def documents_of(tokens: TokenSet) -> list[list[int]]:
    return [
        tokens.stream[start : start + length].tolist()
        for start, length in zip(tokens.starts, tokens.lengths, strict=True)
    ]


def test_a_document_of_our_own_tokenizer_stands_between_ends(
    corpus_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokens, state, steps = run(corpus_folder, tokenizer, tmp_path / "cache")
    assert state == "made"
    assert documents_of(tokens) == [[0, *ids.tolist(), 0] for ids in tokenizer.encode_batch(TEXTS)]
    assert tokens.stream.dtype == np.uint16 and not tokens.stream.flags.writeable
    assert tokens.index.text_bytes.tolist() == [len(text.encode()) for text in TEXTS]
    assert tokens.index.name(3) == f"{corpus_folder}/003.txt"
    assert tokens.num_targets == sum(len(ids) + 1 for ids in tokenizer.encode_batch(TEXTS))
    total = sum(len(text.encode()) for text in TEXTS)
    assert steps[-1] == (total, total) and steps == sorted(steps)


def test_the_second_time_nothing_is_encoded(corpus_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, _, _ = run(corpus_folder, tokenizer, tmp_path / "cache")
    second, state, steps = run(corpus_folder, tokenizer, tmp_path / "cache")
    assert (state, steps) == ("found", [])
    assert documents_of(first) == documents_of(second)


def test_a_tokenizer_whose_post_processor_adds_a_start_begins_documents_with_it(
    corpus_folder: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", sentence_piece(), config={"eos_token_id": 2})
    tokenizer = Tokenizer.load(folder)
    tokens, _, _ = run(corpus_folder, tokenizer, tmp_path / "cache")
    assert documents_of(tokens)[5] == [1, *tokenizer.encode(TEXTS[5]).tolist(), 2]
    assert tokens.pad_id == 2


def test_a_tokenizer_that_adds_nothing_begins_documents_with_their_text(
    tokenizer: Tokenizer, corpus_folder: Path, tmp_path: Path
) -> None:
    loaded = Tokenizer.load(
        write(tmp_path / "model", byte_level(tokenizer), tokenizer_config={"bos_token": "<|im_end|>"})
    )
    tokens, _, _ = run(corpus_folder, loaded, tmp_path / "cache")
    assert documents_of(tokens) == [[*ids.tolist(), 0] for ids in loaded.encode_batch(TEXTS)]
    first = sum(len(loaded.decode(ids[:1]).encode()) for ids in loaded.encode_batch(TEXTS))
    assert tokens.total_bytes == sum(len(text.encode()) for text in TEXTS)
    assert tokens.predicted_bytes == tokens.total_bytes - first, (
        "no token comes before the first, so it is not predicted"
    )
    assert tokens.num_targets == sum(len(ids) for ids in loaded.encode_batch(TEXTS))


def test_a_large_vocabulary_takes_four_bytes_a_token(corpus_folder: Path, tmp_path: Path) -> None:
    content = sentence_piece()
    used = len(content["model"]["vocab"])
    content["model"]["vocab"] |= {f"unused{n}": n for n in range(used, (1 << 16) + 1)}
    tokenizer = Tokenizer.load(write(tmp_path / "model", content))
    tokens, _, _ = run(corpus_folder, tokenizer, tmp_path / "cache")
    assert tokens.stream.dtype == np.uint32
    assert documents_of(tokens)[0] == [1, *tokenizer.encode(TEXTS[0]).tolist(), 2]


@pytest.mark.parametrize("piece,window", [(64, 40), (200, 100)])
def test_long_documents_in_pieces_give_the_same_tokens_in_bounded_batches(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, window: int
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    one_line = " ".join(f"word{n}, ünï {n}." for n in range(400))
    for number, text in enumerate(["".join(TEXTS), one_line, "x = 1\r\n\r\n\ty  =   2\r\n" * 99, "short"]):
        (folder / f"{number}.txt").write_bytes(text.encode())
    whole, _, _ = run(folder, tokenizer, tmp_path / "whole")
    sizes: list[int] = []
    encode = Tokenizer.encode_batch

    def recording(self: Tokenizer, texts: list[str], **how: Any) -> list[Ids]:
        sizes.append(sum(map(len, texts)))
        return encode(self, texts, **how)

    monkeypatch.setattr(tokenize_module, "BATCH_CHARS", 300)
    monkeypatch.setattr(tokenize_module, "PIECE_CHARS", piece)
    monkeypatch.setattr(tokenize_module, "_CUT_WINDOW", window)
    monkeypatch.setattr(Tokenizer, "encode_batch", recording)
    pieces, state, steps = run(folder, tokenizer, tmp_path / "pieces")
    assert state == "made" and documents_of(pieces) == documents_of(whole)
    assert len(sizes) == len(steps) > 30 and max(sizes) < 300 + piece


def test_text_without_any_cut_point_is_encoded_whole_up_to_a_limit(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    monkeypatch.setattr(tokenize_module, "PIECE_CHARS", 64)
    tokens, _, _ = run(tmp_path, tokenizer, tmp_path / "cache")
    assert documents_of(tokens) == [[0, *tokenizer.encode("x" * 1000).tolist(), 0]]
    monkeypatch.setattr(tokenize_module, "MAX_PIECE_CHARS", 999)
    with pytest.raises(DataError, match=r"has 1,000 characters without a point.*a\.txt.*break its lines"):
        run(tmp_path, tokenizer, tmp_path / "other")


SENTENCES = "ab a bab\n  ab\n\nä ab ab\r\n漢a \tab\n" * 9 + "ab </s> <s>\n a"


@pytest.mark.parametrize("kind", ["prepend", "metaspace first", "metaspace always", "metaspace old"])
def test_a_sentence_piece_document_is_cut_at_line_ends_only_and_its_pieces_get_no_space_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    content = sentence_piece()
    if kind != "prepend":
        scheme = kind.removeprefix("metaspace ")
        old = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
        new = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        content |= {"normalizer": None, "pre_tokenizer": old if scheme == "old" else new}
    tokenizer = Tokenizer.load(write(tmp_path / "model", content))
    pieces = tokenizer.pieces(SENTENCES, 20, 10)
    assert len(pieces) > 8 and "".join(pieces) == SENTENCES
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    (tmp_path / "a.txt").write_bytes(SENTENCES.encode())
    monkeypatch.setattr(tokenize_module, "PIECE_CHARS", 20)
    monkeypatch.setattr(tokenize_module, "BATCH_CHARS", 50)
    tokens, _, _ = run(tmp_path, tokenizer, tmp_path / "cache")
    assert documents_of(tokens) == [[1, *tokenizer.encode(SENTENCES).tolist(), 2]]


@pytest.mark.parametrize("parse_special", [False, True])
def test_text_of_special_tokens_is_plain_and_counted_or_parsed(
    tokenizer: Tokenizer, tmp_path: Path, parse_special: bool
) -> None:
    for number, text in enumerate(["a<|endoftext|>b", "<|endoftext", "c <|endoftext|> <|endoftext|>"]):
        (tmp_path / f"{number}.txt").write_text(text)
    for _ in range(2):  # made, then found
        corpus, index = indexed(tmp_path)
        found = tokenize(
            corpus, index, tokenizer, Cache(tmp_path / "cache"), lambda *_: None, parse_special=parse_special
        )
        assert found.special == (SpecialText() if parse_special else SpecialText(2, "<|endoftext|>"))
        inner = [document[1:-1].count(0) for document in documents_of(found.tokens)]
        assert inner == ([1, 0, 2] if parse_special else [0, 0, 0])
    assert found.state == "found"


CHANGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda folder: (folder / "005.txt").write_text("other"),
    "one byte more": lambda folder: (folder / "005.txt").write_text(TEXTS[5] + "\n"),
    "removed": lambda folder: (folder / "005.txt").unlink(),
    "the last changed": lambda folder: (folder / f"{len(TEXTS) - 1:03}.txt").write_text("new end"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_data_that_change_after_they_were_indexed_are_an_error(
    corpus_folder: Path, tokenizer: Tokenizer, tmp_path: Path, change: str
) -> None:
    corpus, index = indexed(corpus_folder)
    CHANGES[change](corpus_folder)
    cache = tmp_path / "cache"
    with pytest.raises(DataError):
        tokenize(corpus, index, tokenizer, Cache(cache), lambda done, total: None)
    assert not list(cache.iterdir())


def test_records_that_come_or_go_after_indexing_are_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    corpus = Corpus([str(path)], on_error="fail", max_line_bytes=1024)
    index = index_documents(corpus.documents())
    for lines in (1, 3):
        path.write_text("".join(f'{{"text": "{name}"}}\n' for name in "abc"[:lines]))
        with pytest.raises(DataError, match="changed while it was read"):
            tokenize(corpus, index, tokenizer, Cache(tmp_path / "cache"), lambda done, total: None)


def test_damaged_tokens_are_made_again(corpus_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = documents_of(run(corpus_folder, tokenizer, tmp_path / "cache")[0])
    (entry,) = (tmp_path / "cache").glob("tokens-*")
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 0x10
    entry.write_bytes(data)
    tokens, state, steps = run(corpus_folder, tokenizer, tmp_path / "cache")
    assert state == "rebuilt" and steps
    assert documents_of(tokens) == first
