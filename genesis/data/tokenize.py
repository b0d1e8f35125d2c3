"""Converts documents to tokens once: a corpus becomes a `TokenSet` over cached files, in memory for one batch of text.

All parts of a cache entry are little-endian. `tokens.bin` holds the ids of all documents (uint16, or uint32 for
vocabularies above 65,536), each between the special tokens that the tokenizer puts before a text and its end.
`offsets.bin` holds D + 1 uint64: the start of each document, then the end of the last. `unpredicted.bin` holds D
uint64: the bytes of text in each document's first token, which has no predecessor. `special.json` counts documents that
spell out special tokens.

With records, `offsets.bin` is per sample, and other parts replace `unpredicted.bin`: `documents.bin` (S uint64: the
document of each sample), `mask.bin` (one byte per token, 1 for a target), `target_bytes.bin` (S uint64: the bytes of
text that the targets encode), `sides.bin` (S uint64: of a preference, `splits` or `is_good` of `TokenSet`),
`margins.bin` (S float64: margins of pairs), `left_out.json` (records without a sample), `notes.json` (remarks about
turns and messages).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from genesis.data.chat.samples import ChatEncoder
from genesis.data.corpus import Corpus
from genesis.data.documents import DocumentIndex, Progress, TokenSet, digest
from genesis.data.records import DROPPED, NO_TARGET, Defect, Defects, Document, Learns
from genesis.data.tokenizer import Tokenizer, library_version
from genesis.errors import DataError, escape
from genesis.files.cache import Cache, Entry, EntryWriter, State
from genesis.files.strict_json import parse_object

FORMAT = 3  # of the files, and of the rules that convert a document to ids
TOKENS_NAME = "tokens.bin"
OFFSETS_NAME = "offsets.bin"
UNPREDICTED_NAME = "unpredicted.bin"
SPECIAL_NAME = "special.json"
DOCUMENTS_NAME = "documents.bin"
MASK_NAME = "mask.bin"
TARGET_BYTES_NAME = "target_bytes.bin"
SIDES_NAME = "sides.bin"
MARGINS_NAME = "margins.bin"
LEFT_OUT_NAME = "left_out.json"
NOTES_NAME = "notes.json"

# Encodings take about 300 bytes per token while a batch is processed. Pieces let a long document use all threads. They
# are short compared with a thread's share of a batch, because the last one delays the batch.
BATCH_CHARS = 1 << 20
PIECE_CHARS = 1 << 15
_CUT_WINDOW = 1 << 14
# Limit of a text that is encoded at once because no cut is proven to preserve its ids; this takes some gigabytes.
MAX_PIECE_CHARS = 1 << 23


@dataclass(frozen=True, slots=True)
class SpecialText:
    """Number of documents that spell out special tokens, which were read as plain text, and the first such token."""

    documents: int = 0
    example: str = ""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The documents as tokens, and whether they came from the cache. `left_out` counts records without a sample,
    `notes` remarks about turns and messages.
    """

    tokens: TokenSet
    state: State
    special: SpecialText
    left_out: Defects
    notes: Defects


def tokenize(
    corpus: Corpus,
    index: DocumentIndex,
    tokenizer: Tokenizer,
    cache: Cache,
    progress: Progress,
    parse_special: bool = False,
    encoder: ChatEncoder | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    learns: Learns = "tokens",
) -> Tokenized:
    """Return the documents of `corpus`, described by `index`, as tokens.

    Args:
        parse_special: whether special tokens spelled out in a text become their ids.
        encoder: makes samples of the records; required with records.
        on_error: `fail` raises at the first record or turn that cannot be encoded; `skip` counts it. A record that only
            lacks a target, or whose two answers are equal, is always counted.
        learns: what the records hold.
        progress: called with the bytes of text done and their total, unless the cache has the result.

    Raises:
        DataError: a document has changed since it was indexed, or cannot be encoded.
        DiskError: the cache cannot be written.
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
    has_records = bool(index.is_record.any())
    if has_records:
        assert encoder is not None, "records need an encoder"
        key |= {"encoder": encoder.fingerprint, "on_error": on_error}
        key |= {"learns": learns} if learns != "tokens" else {}

    # Encode the documents, or find them in the cache.
    def make(folder: EntryWriter) -> None:
        writer = _Writer(tokenizer, dtype, parse_special)
        records = _Records(encoder, index, on_error) if has_records and encoder is not None else None
        writer.write(folder, reread(corpus, index), lambda done: progress(done, index.total_bytes), records)

    cached = cache.get("tokens", key, make)
    # A large entry is memory-mapped. Its verified file is never written to, only replaced as a whole.
    stream, offsets = np.frombuffer(cached.entry.part(TOKENS_NAME), dtype), _integers(cached.entry, OFFSETS_NAME)
    assert offsets[-1] == len(stream)
    left_out, notes, mask = Defects(), Defects(), None
    if has_records:
        number, target_bytes = _integers(cached.entry, DOCUMENTS_NAME), _integers(cached.entry, TARGET_BYTES_NAME)
        mask = np.frombuffer(cached.entry.part(MASK_NAME), np.uint8)
        left_out, notes = (_read_counts(cached.entry, name, index) for name in (LEFT_OUT_NAME, NOTES_NAME))
    else:
        number, target_bytes = np.arange(len(index)), index.text_bytes - _integers(cached.entry, UNPREDICTED_NAME)
    assert len(offsets) == len(number) + 1
    tokens = TokenSet(
        stream,
        offsets[:-1],
        np.diff(offsets),
        number,
        index,
        tokenizer.pad_id,
        documents,
        tokenizer.fingerprint,
        mask,
        target_bytes,
    )
    if learns != "tokens":
        sides = _integers(cached.entry, SIDES_NAME)
        tokens = replace(tokens, splits=sides) if learns == "pairs" else replace(tokens, is_good=sides > 0)
        tokens = replace(tokens, margins=np.frombuffer(cached.entry.part(MARGINS_NAME), "<f8"))
    special = parse_object(bytes(cached.entry.part(SPECIAL_NAME)), where=SPECIAL_NAME)
    return Tokenized(tokens, cached.state, SpecialText(special["documents"], special["example"]), left_out, notes)


def reread(corpus: Corpus, index: DocumentIndex) -> Iterator[Document]:
    """Read the documents of `corpus` again and compare each with `index`.
    Raises: DataError: a document was changed, added or removed meanwhile.
    """
    number = 0
    for number, document in enumerate(corpus.documents(), start=1):
        data = document.text.encode("utf-8")
        if number > len(index) or index.digests[number - 1].tobytes() != digest(data):
            raise _changed_error(document.name)
        yield document
    if number < len(index):
        raise _changed_error(index.name(number))


def _changed_error(name: str) -> DataError:
    next = "start again when the files no longer change"
    return DataError("the data changed while it was read", where=escape(name), next=next)


def _integers(entry: Entry, name: str) -> npt.NDArray[np.int64]:
    return np.frombuffer(entry.part(name), "<u8").astype(np.int64)


def _read_counts(entry: Entry, name: str, index: DocumentIndex) -> Defects:
    # An entry stores numbers of documents, because files of other names may hold the same texts.
    found = parse_object(bytes(entry.part(name)), where=name)
    examples = {kind: f"{escape(index.name(number))}: {what}" for kind, (_, number, what) in found.items()}
    return Defects({kind: count for kind, (count, _, _) in found.items()}, examples)


class _Piece(NamedTuple):
    """A part of a text that is encoded at once."""

    text: str
    is_first: bool
    is_last: bool
    document: int


class _Record(NamedTuple):
    text: str
    document: int
    record: Document


class _Writer:
    """Encodes documents in bounded batches and writes the files of a cache entry."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger], parse_special: bool) -> None:
        self._tokenizer, self._dtype, self._parse_special = tokenizer, dtype, parse_special
        self._special = SpecialText()
        self._start = np.array(tokenizer.start_ids, np.int64)
        self._end = np.array(tokenizer.document_end_ids)
        self._ends, self._unpredicted, self._size = [0], list[int](), 0

    def write(
        self,
        folder: EntryWriter,
        documents: Iterable[Document],
        progress: Callable[[int], None],
        records: _Records | None,
    ) -> None:
        """Write all files, with `records` also the samples' files; `progress` gets the bytes of text done."""
        done = 0
        with folder.part(TOKENS_NAME) as append:
            for batch in self._batches(documents):
                pieces = [item for item in batch if isinstance(item, _Piece)]
                parts = self._encoded(pieces, records)
                if records is not None:
                    for ids in records.encoded([item for item in batch if isinstance(item, _Record)]):
                        self._size += len(ids)
                        self._ends.append(self._size)
                        parts.append(ids)
                if parts:
                    append(np.concatenate(parts).astype(self._dtype).tobytes())
                done += sum(len(item.text.encode("utf-8")) for item in batch)
                progress(done)
        folder.write(OFFSETS_NAME, np.array(self._ends, "<u8").tobytes())
        if records is None:
            folder.write(UNPREDICTED_NAME, np.array(self._unpredicted, "<u8").tobytes())
        else:
            records.write(folder)
        found = {"documents": self._special.documents, "example": self._special.example}
        folder.write(SPECIAL_NAME, json.dumps(found).encode("utf-8"))

    def _encoded(self, batch: Sequence[_Piece], records: _Records | None) -> list[npt.NDArray[np.int64]]:
        texts = [piece.text for piece in batch]
        follows = [not piece.is_first for piece in batch]
        encoded = self._tokenizer.encode_batch(texts, parse_special=self._parse_special, follows=follows)
        parts: list[npt.NDArray[np.int64]] = []
        start, end = self._start, self._end
        for piece, ids in zip(batch, encoded, strict=True):
            parts += [start] * piece.is_first + [ids] + [end] * piece.is_last
            self._size += len(start) * piece.is_first + len(ids) + len(end) * piece.is_last
            if piece.is_first:
                first = 0 if len(start) or not len(ids) else self._tokenizer.text_bytes(int(ids[0]))
                self._unpredicted.append(first)
            if piece.is_last:
                if records is not None:
                    records.add_text(piece.document, self._size - self._ends[-1], self._unpredicted[-1])
                self._ends.append(self._size)
        return parts

    def _batches(self, documents: Iterable[Document]) -> Iterator[list[_Piece | _Record]]:
        """Yield batches of either text pieces or records, because the pieces of one text must remain together."""
        batch: list[_Piece | _Record] = []
        chars = 0
        for number, document in enumerate(documents):
            if batch and isinstance(batch[0], _Record) is (document.record is None):
                yield batch
                batch, chars = [], 0
            for item in self._items(number, document):
                batch.append(item)
                chars += len(item.text)
                if chars >= BATCH_CHARS:
                    yield batch
                    batch, chars = [], 0
        if batch:
            yield batch

    def _items(self, number: int, document: Document) -> Iterator[_Piece | _Record]:
        is_plain = document.record is not None or not self._parse_special
        if is_plain and (token := self._tokenizer.special_text(document.text)) is not None:
            self._special = SpecialText(self._special.documents + 1, self._special.example or token)
        if document.record is not None:
            yield _Record(document.text, number, document)
            return
        texts = self._tokenizer.pieces(document.text, PIECE_CHARS, _CUT_WINDOW, parse_special=self._parse_special)
        for place, text in enumerate(texts):
            if len(text) > MAX_PIECE_CHARS:
                what = f"the document has {len(text):,} characters without a point at which this tokenizer's ids can be"
                what += f" cut, more than the {MAX_PIECE_CHARS:,} that are encoded at once"
                next = "split it into several files or JSONL records, or break its lines"
                raise DataError(what, where=escape(document.name), next=next)
            yield _Piece(text, place == 0, place == len(texts) - 1, number)


class _Records:
    """Collects the facts about samples in an entry with records: document, target mask and bytes, skipped records."""

    def __init__(self, encoder: ChatEncoder, index: DocumentIndex, on_error: Literal["fail", "skip"]) -> None:
        self._encoder, self._index, self._fails = encoder, index, on_error == "fail"
        self._documents, self._target_bytes, self._mask = list[int](), list[int](), bytearray()
        self._sides, self._margins = list[int](), list[float]()
        self._left_out: dict[str, list[Any]] = {}  # kind -> count, and number and defect of the first
        self._notes: dict[str, list[Any]] = {}

    def add_text(self, document: int, length: int, unpredicted: int) -> None:
        """Add a text of `length` tokens as a sample."""
        self._add(document, int(self._index.text_bytes[document]) - unpredicted, np.arange(length) > 0)

    def encoded(self, batch: Sequence[_Record]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the ids of each sample of the records. Raises: Defect: a record cannot be encoded."""
        found = self._encoder.encode([item.record for item in batch]) if batch else ()
        for item, samples in zip(batch, found, strict=True):
            if isinstance(samples, Defect):
                if self._fails and samples.kind not in DROPPED:
                    raise samples
                self._count(self._left_out, samples.kind, item.document, samples.what)
                continue
            for note in (note for sample in samples for note in sample.notes):
                if self._fails and isinstance(note, Defect):
                    raise note
                self._count(self._notes, note.kind, item.document, note.what)
            kept = [sample for sample in samples if sample.is_target[1:].any()]
            if not samples or len(kept) < len(samples):
                count = max(len(samples) - len(kept), 1)
                self._count(self._left_out, NO_TARGET, item.document, "nothing in it is a target", count)
            for sample in kept:
                self._add(item.document, sample.target_bytes, sample.is_target)
                self._sides.append(sample.split or int(sample.is_good))
                self._margins.append(sample.margin)
                yield sample.ids

    def _add(self, document: int, target_bytes: int, is_target: npt.NDArray[np.bool_]) -> None:
        self._documents.append(document)
        self._target_bytes.append(target_bytes)
        self._mask += is_target.astype(np.uint8).tobytes()

    def _count(self, counts: dict[str, list[Any]], kind: str, document: int, what: str, count: int = 1) -> None:
        counts.setdefault(kind, [0, document, what])[0] += count

    def write(self, folder: EntryWriter) -> None:
        """Write the parts of the entry."""
        folder.write(DOCUMENTS_NAME, np.array(self._documents, "<u8").tobytes())
        folder.write(MASK_NAME, bytes(self._mask))
        folder.write(TARGET_BYTES_NAME, np.array(self._target_bytes, "<u8").tobytes())
        folder.write(SIDES_NAME, np.array(self._sides, "<u8").tobytes())
        folder.write(MARGINS_NAME, np.array(self._margins, "<f8").tobytes())
        folder.write(LEFT_OUT_NAME, json.dumps(self._left_out).encode("utf-8"))
        folder.write(NOTES_NAME, json.dumps(self._notes).encode("utf-8"))
