"""A text file: one document, kept as it is but for a byte order mark at its start."""

from __future__ import annotations

from genesis.data.readers.stream import BOM, PIECE, Stream, decoded
from genesis.data.records import Defect, Document
from genesis.data.sources import SourceFile

EMPTY = ("empty file", "empty document")  # kinds of defects

MAX_DOCUMENT_BYTES = 1 << 30


def text_document(file: SourceFile, stream: Stream) -> Document:
    """The whole file as one document. Raises: Defect."""
    if not file.gzip and stream.size > MAX_DOCUMENT_BYTES:
        raise _too_large(file)
    pieces, total = [], 0
    while piece := stream.read(PIECE):
        pieces.append(piece)
        total += len(piece)
        if total > MAX_DOCUMENT_BYTES:
            raise _too_large(file)
        stream.line += piece.count(b"\n")
    if not total:
        raise Defect(EMPTY[0], "the file is empty", file.name, 1, "remove it")
    data = b"".join(pieces).removeprefix(BOM)
    text = decoded(file, data, first_line=1)
    if (nul := data.find(b"\0")) >= 0:
        what = "the text holds a NUL character: it is binary data or UTF-16"
        raise Defect("NUL byte", what, file.name, 1 + data.count(b"\n", 0, nul))
    if text.isspace() or not text:
        raise Defect(EMPTY[1], "the file holds only white space", file.name, 1, "remove it")
    return Document(text, file.name)


def _too_large(file: SourceFile) -> Defect:
    what = f"the text file has more than {MAX_DOCUMENT_BYTES:,} bytes, the most for one document"
    return Defect("huge document", what, file.name, 1, "split it into several files or JSONL records")
