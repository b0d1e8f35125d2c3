"""The documents of some sources: finds, reads and parses files in one fixed order. It does not tokenize.

Every defect of the data is an error with file, line and field, or is skipped and counted on request. A named file whose
first bytes are not text is an error. In a folder or a glob such a file is skipped and counted (`FileCounts`), and so is
a `.json` file without an array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from genesis.data.readers import SUPPORTED, kind_by_content, looks_like_records
from genesis.data.readers.stream import EMPTY, TEXT, opened, text_document
from genesis.data.record_formats import FieldNames, Format, RecordFormat
from genesis.data.records import (
    DROPPED,
    Conversation,
    Defect,
    Defects,
    Document,
    Learns,
    Position,
    Row,
    is_learned,
    record_text,
)
from genesis.data.sources import SourceFile, WeightedSource, expand, not_text
from genesis.errors import DataError, escape


@dataclass(frozen=True)
class FileCounts:
    """Counts of the files that were read, by kind, and of those that are not text.

    Attributes:
        read: `text`, `jsonl.gz`, `parquet`, … -> files.
        not_read: `png`, `json`, … -> files.
        like_records: names of files that were read as text but begin like JSON or CSV, in order.
    """

    read: dict[str, int] = field(default_factory=dict)
    not_read: dict[str, int] = field(default_factory=dict)
    like_records: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a summary such as `files read: 24 text, 1 jsonl.gz; not read: 2 png, 1 archive`."""
        parts = (("files read", self.read), ("not read", self.not_read))
        found = []
        for name, counts in parts:
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            found += [f"{name}: " + ", ".join(f"{count:,} {kind}" for kind, count in ordered)] * bool(counts)
        return "; ".join(found)


class Corpus:
    """The documents of some sources, in an order that only the sources and their files determine; readable repeatedly.

    Args:
        sources: see `genesis.data.sources`.
        on_error: `fail` raises at the first defect; `skip` counts defects and skips their documents.
        format: format of the records; `auto` detects it by the names of their fields.
        fields: other names of fields, see `genesis.data.record_formats`.
        max_line_bytes: maximum size of a record: a line of JSONL without its end, an element of an array, a row.
        learns: what the objective learns from. Other records are defects, and so are texts if it learns preferences.

    Attributes:
        weights: the name of each file -> how often an epoch contains its documents.
        formats: number of records per format; complete after all documents are read.
        not_learned: number of assistant turns that their conversations exclude from learning, and the name of the first
            such document; complete after all documents are read.

    Raises:
        DataError: a source matches no file, a named file is not text, or the sources contain no text.
    """

    def __init__(
        self,
        sources: Sequence[str | WeightedSource],
        *,
        on_error: Literal["fail", "skip"],
        max_line_bytes: int,
        format: Format = "auto",
        fields: FieldNames | None = None,
        learns: Learns = "tokens",
    ) -> None:
        found = expand(sources)
        self.files = tuple(file for file in found if file.kind is None)
        self.weights = {file.name: file.weight for file in self.files}
        self._labels = {file.name: file.label for file in found if file.kind is not None}
        self._read_files: set[str] = set()
        self._like_records: dict[str, None] = {}
        self._tail: float | None = None
        if not self.files:
            what = f"the sources hold no text; {self.counts()}"
            raise DataError(what, where=escape(found[0].name), next=SUPPORTED)
        self._skip = on_error == "skip"
        self._format = RecordFormat(format, fields, learns)
        self._own_formats = {f.name: RecordFormat(format, f.fields, learns) for f in self.files if f.fields is not None}
        self._max_line_bytes = max_line_bytes
        self.formats: Counter[str] = Counter()
        self.not_learned = 0, ""

    def counts(self) -> FileCounts:
        """Return the files by kind; complete after all documents are read."""
        read = Counter(self._labels[name] for name in self._read_files)
        return FileCounts(dict(read), dict(Counter(self._labels.values()) - read), tuple(self._like_records))

    @property
    def is_divided(self) -> bool:
        """Whether the only document is split in two."""
        return self._tail is not None

    def hold_out_tail(self, fraction: float) -> None:
        """Split the only document in two from now on: the second part is its last `fraction`, from a line's start.

        Raises:
            DataError: no line and no word of the text can begin the second part.
        """
        self._tail = fraction

    def documents(self, defects: Defects | None = None) -> Iterator[Document]:
        """Yield the documents; the skipped ones are added to `defects`.

        Raises:
            DataError: the first defect, with file and line, unless defects are skipped.
        """
        self.formats, self.not_learned = Counter(), (0, "")
        for document in self._documents(defects):
            yield from (document,) if self._tail is None else _split_at_tail(document, self._tail)

    def _documents(self, defects: Defects | None) -> Iterator[Document]:
        for file in self.files:
            for item in self._read(file):
                if isinstance(item, Document):
                    yield item
                elif file.optional:  # skipped silently
                    self._labels.pop(file.name, None)
                    self._read_files.discard(file.name)
                elif self._skip or item.kind in DROPPED:
                    if defects is not None:
                        defects.add(item)
                elif file.format is TEXT and not file.named and item.kind in EMPTY:  # such as a folder's __init__.py
                    self._labels[file.name] = item.kind
                    self._read_files.discard(file.name)
                else:
                    raise item

    def _read(self, file: SourceFile) -> Iterator[Document | Defect]:
        # Check the file's first bytes against its name, then read it as text or as records.
        try:
            with opened(file) as stream:
                head = stream.head()
                kind = kind_by_content(head) if file.format.magic is None else None
                if kind is not None and file.named:
                    raise not_text(file, kind)
                if file.format.begins and not file.named and not stream.begins(file.format.begins):
                    kind = file.format.name
                self._labels[file.name] = kind or file.label
                if kind is not None:
                    return
                self._read_files.add(file.name)
                if file.format.rows is None:
                    if self._format.learns != "tokens":
                        next = "name only the files of records, such as FOLDER/*.jsonl"
                        yield self._format.no_preference("the file holds text", Position(file.name, 0), next)
                        return
                    if looks_like_records(file.name, head, self._format_of(file).names):
                        self._like_records[file.name] = None
                    yield text_document(stream)
                else:
                    columns = partial(self._format_of(file).columns, position=Position(file.name, 1))
                    yield from self._records(file, file.format.rows(stream, self._max_line_bytes, columns))
        except Defect as defect:
            yield defect

    def _records(self, file: SourceFile, rows: Iterator[Row | Defect]) -> Iterator[Document | Defect]:
        empty = True
        for row in rows:
            empty = False
            if isinstance(row, Defect):
                yield row
                continue
            try:
                yield self._document(file, row)
            except Defect as defect:
                yield defect
        if empty:
            yield Defect("empty file", "the file holds no records", file.name, 1)

    def _format_of(self, file: SourceFile) -> RecordFormat:
        return self._own_formats.get(file.name, self._format)

    def _document(self, file: SourceFile, row: Row) -> Document:
        format, found = self._format_of(file).read(row.value, Position(file.name, row.line, row.path))
        self.formats[format] += 1
        if isinstance(found, str):
            return Document(found, file.name, row.line)
        document = Document(record_text(found), file.name, row.line, found)
        if isinstance(found, Conversation):
            turns = sum(m["role"] == "assistant" and not is_learned(m) for m in found.messages)
            count, first = self.not_learned
            self.not_learned = count + turns, first or document.name * bool(turns)
        return document


def _split_at_tail(document: Document, fraction: float) -> Iterator[Document]:
    """Split a document at its last `fraction`: at the nearest start of a line, or else of a word."""
    text, aim = document.text, int(len(document.text) * (1 - fraction))
    for mark in "\n", " ":
        candidates = (text.rfind(mark, 0, aim) + 1, text.find(mark, aim) + 1)
        for cut in sorted(candidates, key=lambda cut: abs(cut - aim)):
            near = min(4 * fraction, 0.5) * len(text) >= len(text) - cut
            if near and text[:cut].strip() and text[cut:].strip():
                yield Document(text[:cut], document.file)
                yield Document(text[cut:], document.file, 1 + text.count("\n", 0, cut))
                return
    what = f"no line of the only document begins near its last {fraction:.0%}, so that part cannot be held out"
    next = "name held-out sources in data.eval, or set data.eval_fraction=0"
    raise DataError(what, where=escape(document.name), next=next)
