"""What one pass over a corpus remembers of each document (`DocumentIndex`), and the documents as tokens (`TokenSet`).

Both hold arrays over documents, no texts; order and number are those in which the corpus gave the documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genesis.data.records import Document
from genesis.io.hashing import update

__all__ = ["DocumentIndex", "Progress", "TokenSet", "digest", "index_documents"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class DocumentIndex:
    """Names, sizes and contents' hashes of D documents.

    Attributes:
        digests: uint8 `[D, 32]`, sha256 of each text.
        text_bytes: int64 `[D]`, UTF-8 bytes of each text.
        files: the names of the files; file_numbers: int64 `[D]` says which; lines: int64 `[D]`, 0 for a whole file.
    """

    digests: npt.NDArray[np.uint8]
    text_bytes: npt.NDArray[np.int64]
    files: tuple[str, ...]
    file_numbers: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.text_bytes)

    @property
    def total_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.text_bytes.sum())

    def name(self, document: int) -> str:
        """`file` or `file:line` of a document, as found: escape it before it is shown."""
        return Document("", self.files[self.file_numbers[document]], int(self.lines[document])).name

    def select(self, documents: npt.NDArray[np.bool_]) -> DocumentIndex:
        """The documents for which the mask `[D]` is true."""
        return DocumentIndex(
            self.digests[documents],
            self.text_bytes[documents],
            self.files,
            self.file_numbers[documents],
            self.lines[documents],
        )

    def fingerprint(self) -> str:
        """sha256 over all contents in their order, as 64 hex digits; names have no part in it."""
        return hashlib.sha256(b"genesis documents 1\0" + self.digests.tobytes()).hexdigest()


def digest(text: str) -> bytes:
    """sha256 of the text's UTF-8 bytes."""
    return _sha256(text.encode("utf-8"))


def _sha256(data: bytes) -> bytes:
    found = hashlib.sha256()
    update(found, data)
    return found.digest()


def index_documents(documents: Iterable[Document]) -> DocumentIndex:
    """Read all `documents` once and remember what they are."""
    digests, sizes, lines = bytearray(), [], []
    files: dict[str, int] = {}
    file_indices = []
    for document in documents:
        data = document.text.encode("utf-8")
        digests += _sha256(data)
        sizes.append(len(data))
        file_indices.append(files.setdefault(document.file, len(files)))
        lines.append(document.line)
    return DocumentIndex(
        np.frombuffer(bytes(digests), np.uint8).reshape(-1, 32),
        np.array(sizes, np.int64),
        tuple(files),
        np.array(file_indices, np.int64),
        np.array(lines, np.int64),
    )


@dataclass(frozen=True, eq=False)
class TokenSet:
    """D documents as tokens: what the tokenizer puts before a text, the tokens of the text, and the end-of-text token.

    Attributes:
        stream: uint16 or uint32 `[N]`, read-only; it may hold documents of other sets too.
        starts: int64 `[D]`, where each document begins in the stream. lengths: int64 `[D]`, its tokens, at least 2.
        index: the documents' names and sizes.
        pad_id: the id for slots in a batch that hold no token.
        data_fingerprint: of the texts, and `tokenizer_fingerprint`: of what cut them; resuming compares both.
        unpredicted_bytes: int64 `[D]`, bytes of text in the first token, which nothing comes before; None: none.
    """

    stream: npt.NDArray[np.unsignedinteger]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    index: DocumentIndex
    pad_id: int
    data_fingerprint: str
    tokenizer_fingerprint: str
    unpredicted_bytes: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        """Tokens with special ones."""
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        """Tokens that a model is to predict: all but the first of each document."""
        return self.num_tokens - len(self)

    @property
    def total_bytes(self) -> int:
        """UTF-8 bytes of the texts."""
        return self.index.total_bytes

    @property
    def predicted_bytes(self) -> int:
        """UTF-8 bytes of the text that a model is to predict, the denominator of bits per byte; at least 1."""
        missing = 0 if self.unpredicted_bytes is None else int(self.unpredicted_bytes.sum())
        return max(self.index.total_bytes - missing, 1)

    def select(self, documents: npt.NDArray[np.bool_]) -> TokenSet:
        """The documents for which the mask `[D]` is true; tokens are shared, fingerprints stay the whole's."""
        return TokenSet(
            self.stream,
            self.starts[documents],
            self.lengths[documents],
            self.index.select(documents),
            self.pad_id,
            self.data_fingerprint,
            self.tokenizer_fingerprint,
            None if self.unpredicted_bytes is None else self.unpredicted_bytes[documents],
        )
