"""Documents to tokens, once: a corpus becomes a `TokenSet` over files of the cache, in memory for a batch of text.

The part `tokens.bin` of an entry holds the ids of all documents (uint16, or uint32 for vocabularies above 65,536), each
with the special tokens that the tokenizer puts before a text, and its end; `offsets.bin` holds D + 1 uint64: where each
document begins, and the end of the last; `unpredicted.bin` holds D uint64: the bytes of text in each document's first
token, which no token comes before. `special.json` counts documents in which special tokens are written out. All are
little-endian.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.cache import Cache, Entry, EntryWriter, State
from genesis.data.corpus import Corpus
from genesis.data.documents import DocumentIndex, Progress, TokenSet, digest
from genesis.data.records import Document
from genesis.data.tokenizer import Tokenizer, library_version
from genesis.errors import DataError, escape
from genesis.io.strict_json import parse_object

__all__ = ["SpecialText", "Tokenized", "reread", "tokenize"]

FORMAT = 2  # of the files, and of the rules by which a document becomes ids
TOKENS_NAME = "tokens.bin"
OFFSETS_NAME = "offsets.bin"
UNPREDICTED_NAME = "unpredicted.bin"
SPECIAL_NAME = "special.json"

# Encodings take some 300 bytes a token while a batch is worked on; pieces let one long document use all threads.
BATCH_CHARS = 1 << 20
PIECE_CHARS = 1 << 18
_CUT_WINDOW = 1 << 14
# What is encoded at once where nothing proves that a cut changes no id: some gigabytes of memory.
MAX_PIECE_CHARS = 1 << 23


@dataclass(frozen=True, slots=True)
class SpecialText:
    """How many documents have special tokens written out that were read as plain text, and the first such token."""

    documents: int = 0
    example: str = ""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The documents as tokens, whether they came from the cache, and what special tokens their texts hold."""

    tokens: TokenSet
    state: State
    special: SpecialText


def tokenize(
    corpus: Corpus,
    index: DocumentIndex,
    tokenizer: Tokenizer,
    cache: Cache,
    progress: Progress,
    *,
    parse_special: bool = False,
) -> Tokenized:
    """The documents of `corpus`, of which `index` was made, as tokens.

    Args:
        parse_special: special tokens written out in a text become their ids.
        progress: called with the bytes of text done and their total, if anything is to do.

    Raises:
        DataError: a document changed since it was indexed. DiskError: the cache cannot be written.
    """
    documents = index.fingerprint()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    key = {
        "format": FORMAT,
        "documents": documents,
        "tokenizer": tokenizer.fingerprint,
        "library": library_version(),
        "parse_special": parse_special,
    }

    def make(folder: EntryWriter) -> None:
        writer = _Writer(tokenizer, dtype, parse_special)
        writer.write(folder, reread(corpus, index), lambda done: progress(done, index.total_bytes))

    cached = cache.get("tokens", key, make)
    stream, offsets = _read(cached.entry, dtype)
    assert len(offsets) == len(index) + 1 and offsets[-1] == len(stream)
    unpredicted = np.frombuffer(cached.entry.part(UNPREDICTED_NAME), "<u8").astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    tokens = TokenSet(stream, starts, lengths, index, tokenizer.pad_id, documents, tokenizer.fingerprint, unpredicted)
    special = parse_object(bytes(cached.entry.part(SPECIAL_NAME)), where=SPECIAL_NAME)
    return Tokenized(tokens, cached.state, SpecialText(special["documents"], special["example"]))


def reread(corpus: Corpus, index: DocumentIndex) -> Iterator[Document]:
    """The documents of `corpus` once more, each compared with what `index` says it was.

    Raises:
        DataError: a document was changed, added or removed meanwhile.
    """
    number = 0
    for number, document in enumerate(corpus.documents(), start=1):
        same = number <= len(index) and index.digests[number - 1].tobytes() == digest(document.text)
        if not same:
            raise _changed(document.name)
        yield document
    if number < len(index):
        raise _changed(index.name(number))


def _changed(name: str) -> DataError:
    return DataError(
        "the data changed while they were read", where=escape(name), next="start again when they are still"
    )


def _read(entry: Entry, dtype: np.dtype[np.unsignedinteger]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    # A large entry is mapped: from the file that was checked, which is never written to, only replaced as a whole.
    stream = np.frombuffer(entry.part(TOKENS_NAME), dtype)
    return stream, np.frombuffer(entry.part(OFFSETS_NAME), "<u8").astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a document that is encoded at once."""

    text: str
    is_first: bool
    is_last: bool


class _Writer:
    """Encodes documents in bounded batches and writes the files of a cache entry."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger], parse_special: bool) -> None:
        self._tokenizer, self._dtype, self._parse_special = tokenizer, dtype, parse_special
        self._special = SpecialText()

    def write(self, folder: EntryWriter, documents: Iterable[Document], progress: Callable[[int], None]) -> None:
        """Write all files; `progress` is called with the bytes of text done."""
        start, end = np.array(self._tokenizer.start_ids, np.int64), np.array(self._tokenizer.document_end_ids)
        ends, unpredicted, size, done = [0], [], 0, 0
        with folder.create(TOKENS_NAME) as tokens:
            for batch in self._batches(documents):
                texts = [piece.text for piece in batch]
                follows = [not piece.is_first for piece in batch]
                encoded = self._tokenizer.encode_batch(texts, parse_special=self._parse_special, follows=follows)
                parts: list[npt.NDArray[np.int64]] = []
                for piece, ids in zip(batch, encoded, strict=True):
                    parts += [start] * piece.is_first + [ids] + [end] * piece.is_last
                    size += len(start) * piece.is_first + len(ids) + len(end) * piece.is_last
                    if piece.is_first:
                        unpredicted.append(0 if len(start) or not len(ids) else self._tokenizer.text_bytes(int(ids[0])))
                    if piece.is_last:
                        ends.append(size)
                tokens.write(np.concatenate(parts).astype(self._dtype).tobytes())
                done += sum(len(text.encode("utf-8")) for text in texts)
                progress(done)
        folder.write(OFFSETS_NAME, np.array(ends, "<u8").tobytes())
        folder.write(UNPREDICTED_NAME, np.array(unpredicted, "<u8").tobytes())
        found = {"documents": self._special.documents, "example": self._special.example}
        folder.write(SPECIAL_NAME, json.dumps(found).encode("utf-8"))

    def _batches(self, documents: Iterable[Document]) -> Iterator[list[_Piece]]:
        batch: list[_Piece] = []
        chars = 0
        for document in documents:
            for piece in self._pieces(document):
                batch.append(piece)
                chars += len(piece.text)
                if chars >= BATCH_CHARS:
                    yield batch
                    batch, chars = [], 0
        if batch:
            yield batch

    def _pieces(self, document: Document) -> Iterator[_Piece]:
        if not self._parse_special and (token := self._tokenizer.special_text(document.text)) is not None:
            self._special = SpecialText(self._special.documents + 1, self._special.example or token)
        texts = self._tokenizer.pieces(document.text, PIECE_CHARS, _CUT_WINDOW, parse_special=self._parse_special)
        for number, text in enumerate(texts):
            if len(text) > MAX_PIECE_CHARS:
                what = f"the document has {len(text):,} characters without a point at which this tokenizer's ids can be"
                what += f" cut, more than the {MAX_PIECE_CHARS:,} that are encoded at once"
                next = "split it into several files or JSONL records, or break its lines"
                raise DataError(what, where=escape(document.name), next=next)
            yield _Piece(text, number == 0, number == len(texts) - 1)
