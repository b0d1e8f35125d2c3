"""Documents to tokens, once: a corpus becomes a `TokenSet` over files of the cache, in memory for a batch of text.

The part `tokens.bin` of an entry holds the ids of all documents (uint16, or uint32 for vocabularies above 65,536), each
as separator, text, end; `offsets.bin` holds D + 1 uint64: where each document begins, and the end of the last. Both are
little-endian.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.cache import Cache, Entry, EntryWriter, State
from genesis.data.documents import DocumentIndex, Progress, TokenSet, digest
from genesis.data.records import Corpus, Document
from genesis.data.tokenizer import Tokenizer, library_version
from genesis.errors import DataError, escape

__all__ = ["reread", "tokenize"]

FORMAT = 1
TOKENS_NAME = "tokens.bin"
OFFSETS_NAME = "offsets.bin"

# Encodings take some 300 bytes a token while a batch is worked on; pieces let one long document use all threads.
BATCH_CHARS = 1 << 20
PIECE_CHARS = 1 << 18
_CUT_WINDOW = 1 << 14
# Places where every common pre-tokenizer cuts anyway, the preferred first: after a line end, before a space.
_CUTS = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))


def tokenize(
    corpus: Corpus, index: DocumentIndex, tokenizer: Tokenizer, cache: Cache, progress: Progress
) -> tuple[TokenSet, State]:
    """The documents of `corpus`, of which `index` was made, as tokens; and whether they came from the cache.

    Args:
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
    }

    def make(folder: EntryWriter) -> None:
        _write(folder, reread(corpus, index), tokenizer, dtype, lambda done: progress(done, index.total_bytes))

    cached = cache.get("tokens", key, make)
    stream, offsets = _read(cached.entry, dtype)
    assert len(offsets) == len(index) + 1 and offsets[-1] == len(stream)
    tokens = TokenSet(stream, offsets[:-1], np.diff(offsets), index, tokenizer.pad_id, documents, tokenizer.fingerprint)
    return tokens, cached.state


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


def _write(
    folder: EntryWriter,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    dtype: np.dtype[np.unsignedinteger],
    progress: Callable[[int], None],
) -> None:
    separator = np.array([tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id])
    end = np.array([tokenizer.eos_id])
    ends, size, done = [0], 0, 0
    with folder.create(TOKENS_NAME) as tokens:
        for batch in _batches(documents):
            texts = [piece.text for piece in batch]
            parts: list[npt.NDArray[np.int64]] = []
            for piece, ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
                parts += [separator] * piece.is_first + [ids] + [end] * piece.is_last
                size += piece.is_first + len(ids) + piece.is_last
                if piece.is_last:
                    ends.append(size)
            tokens.write(np.concatenate(parts).astype(dtype).tobytes())
            done += sum(len(text.encode("utf-8")) for text in texts)
            progress(done)
    folder.write(OFFSETS_NAME, np.array(ends, "<u8").tobytes())


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a document that is encoded at once."""

    text: str
    is_first: bool
    is_last: bool


def _batches(documents: Iterable[Document]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    chars = 0
    for document in documents:
        for piece in _pieces(document.text):
            batch.append(piece)
            chars += len(piece.text)
            if chars >= BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[_Piece]:
    start = 0
    while len(text) - start > PIECE_CHARS:
        stop = _cut(text, start, start + PIECE_CHARS)
        yield _Piece(text[start:stop], start == 0, False)
        start = stop
    yield _Piece(text[start:], start == 0, True)


def _cut(text: str, start: int, limit: int) -> int:
    """Where to end the piece that begins at `start`: at most at `limit`, if possible where tokens end anyway."""
    # One more character is looked at, since whether a place will do depends on what follows it.
    begin = max(start + 1, limit - _CUT_WINDOW)
    for pattern in _CUTS:
        places = [match.end() for match in pattern.finditer(text, begin, limit + 1) if match.end() <= limit]
        if places:
            return places[-1]
    return limit
