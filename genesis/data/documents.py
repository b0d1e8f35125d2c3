"""What one pass over a corpus remembers of each document (`DocumentIndex`), their samples as tokens (`TokenSet`), and
which documents are held out (`split`).

Both hold arrays, no texts: the index over documents, in the order in which the corpus gave them, the tokens over
samples. A text is one sample. A record is one, or several, or none where it has no target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.data.records import Document
from genesis.errors import DataError
from genesis.files.hashing import update

Ints = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class DocumentIndex:
    """Names, sizes and contents' hashes of D documents.

    Attributes:
        digests: uint8 `[D, 32]`, sha256 of each text.
        text_bytes: int64 `[D]`, UTF-8 bytes of each text.
        files: the names of the files; file_numbers: int64 `[D]` says which; lines: int64 `[D]`, 0 for a whole file.
        is_record: `[D]`, whether a document is a record; else it is a text.
    """

    digests: npt.NDArray[np.uint8]
    text_bytes: npt.NDArray[np.int64]
    files: tuple[str, ...]
    file_numbers: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    is_record: npt.NDArray[np.bool_]

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
        names = ("digests", "text_bytes", "file_numbers", "lines", "is_record")
        return replace(self, **{name: getattr(self, name)[documents] for name in names})

    def fingerprint(self) -> str:
        """sha256 over all contents in their order, as 64 hex digits; names have no part in it."""
        # A text may spell what a record is hashed as.
        kinds = b"records\0" + self.is_record.tobytes() if self.is_record.any() else b""
        return hashlib.sha256(b"genesis documents 1\0" + self.digests.tobytes() + kinds).hexdigest()


def digest(data: bytes) -> bytes:
    """sha256 of a text's UTF-8 bytes."""
    found = hashlib.sha256()
    update(found, data)
    return found.digest()


def index_documents(documents: Iterable[Document]) -> DocumentIndex:
    """Read all `documents` once and remember what they are."""
    digests, sizes, lines, is_record = bytearray(), [], [], []
    files: dict[str, int] = {}
    file_indices = []
    for document in documents:
        data = document.text.encode("utf-8")
        digests += digest(data)
        sizes.append(len(data))
        file_indices.append(files.setdefault(document.file, len(files)))
        lines.append(document.line)
        is_record.append(document.record is not None)
    return DocumentIndex(
        np.frombuffer(bytes(digests), np.uint8).reshape(-1, 32),
        np.array(sizes, np.int64),
        tuple(files),
        np.array(file_indices, np.int64),
        np.array(lines, np.int64),
        np.array(is_record, np.bool_),
    )


@dataclass(frozen=True, eq=False)
class TokenSet:
    """S samples of D documents as tokens.

    A sample of a text is what the tokenizer puts before it, its tokens, and the end-of-text token.

    Attributes:
        stream: uint16 or uint32 `[N]`, read-only; it may hold samples of other sets too.
        starts: int64 `[S]`, where each sample begins in the stream, ascending. lengths: int64 `[S]`, its tokens, at
            least 2.
        documents: int64 `[S]`, the document that each sample is of.
        index: the documents' names and sizes.
        pad_id: the id for slots in a batch that hold no token.
        data_fingerprint: of the data, and `tokenizer_fingerprint`: of what cut them; resuming compares both.
        mask: uint8 `[N]`, 1 where a token of the stream is a target; None: all are but the first of each sample.
        target_bytes: int64 `[S]`, UTF-8 bytes of text that the targets stand for; None: all of the documents.
        weights: float64 `[S]`, how often a sample occurs in an epoch on average; None: once each.
    """

    stream: npt.NDArray[np.unsignedinteger]
    starts: Ints
    lengths: Ints
    documents: Ints
    index: DocumentIndex
    pad_id: int
    data_fingerprint: str
    tokenizer_fingerprint: str
    mask: npt.NDArray[np.uint8] | None = None
    target_bytes: Ints | None = None
    weights: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_documents(self) -> int:
        """Documents that have a sample."""
        return len(np.unique(self.documents))

    @property
    def num_tokens(self) -> int:
        """Tokens with special ones."""
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        """Tokens that a model is to predict."""
        return int(self.target_counts.sum())

    @cached_property
    def target_counts(self) -> Ints:
        """How many tokens of each sample a model is to predict, int64 `[S]`; never its first."""
        return self.targets_between(self.starts, self.starts + self.lengths)

    def targets_between(self, begins: Ints, ends: Ints) -> Ints:
        """How many tokens of each range of the stream are targets, its first left out; ranges ascend, none is empty."""
        if self.mask is None:
            return ends - begins - 1
        bounds = np.stack([begins + 1, ends], axis=1).reshape(-1)
        # `reduceat` sums from each bound to the next; the end of the stream is the one that it does not take.
        inside = bounds < len(self.mask)
        sums = np.zeros(len(bounds), np.int64)
        sums[inside] = np.add.reduceat(self.mask, bounds[inside], dtype=np.int64) if inside.any() else 0
        counts: Ints = np.where(ends - begins > 1, sums[::2], 0)
        return counts

    @property
    def total_bytes(self) -> int:
        """UTF-8 bytes of the texts."""
        return self.index.total_bytes

    @property
    def predicted_bytes(self) -> int:
        """UTF-8 bytes of the text that a model is to predict, the denominator of bits per byte; at least 1."""
        found = self.index.total_bytes if self.target_bytes is None else int(self.target_bytes.sum())
        return max(found, 1)

    def select(self, documents: npt.NDArray[np.bool_]) -> TokenSet:
        """The documents for which the mask `[D]` is true; tokens are shared, fingerprints stay the whole's."""
        number = np.cumsum(documents) - 1
        chosen = self.select_samples(documents[self.documents])
        return replace(chosen, documents=number[chosen.documents], index=self.index.select(documents))

    def select_samples(self, samples: npt.NDArray[np.bool_]) -> TokenSet:
        """The samples for which the mask `[S]` is true, of the same documents."""
        names = ("starts", "lengths", "documents", "target_bytes", "weights")
        kept: dict[str, Any] = {name: a if (a := getattr(self, name)) is None else a[samples] for name in names}
        return replace(self, **kept)


# --- Which documents are held out -------------------------------------------------------------------------------------
# A document is held out when a hash of (seed, content) is below the fraction. So identical documents never fall on both
# sides, and adding documents moves none of the others. The fraction is kept on average over documents, not exactly.
#
# A very large document would stand for the whole held-out set, so one with more than a quarter of the bytes that the
# fraction asks for stays in training (as long as smaller ones are there to hold out). Only a document near that size
# can change sides when others are added.


LARGEST_SHARE = 0.25  # of the bytes to hold out: the most that one document may have


def holdout_points(digests: npt.NDArray[np.uint8], seed: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each document's digest `[D, 32]`, uniform and independent between seeds."""
    key = seed.to_bytes(16, "little", signed=True)
    points = [hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in digests]
    # 53 bits, so that the division is exact and 1.0 is never reached.
    return (np.frombuffer(b"".join(points), "<u8") >> np.uint64(11)) / float(1 << 53)


def split(
    digests: npt.NDArray[np.uint8], text_bytes: npt.NDArray[np.int64], *, seed: int, fraction: float
) -> npt.NDArray[np.bool_]:
    """True for the documents that are held out.

    Args:
        digests: uint8 `[D, 32]`. text_bytes: int64 `[D]`.

    If chance holds out none, the one with the lowest hash is; if all, the one with the highest is not. A fraction of 0
    holds out none.

    Raises:
        DataError: a fraction above 0 of fewer than two different documents.
    """
    points = holdout_points(digests, seed)
    if fraction <= 0:
        return np.zeros(len(points), np.bool_)
    if len(points) == 0 or points.min() == points.max():
        found = "no document" if len(points) == 0 else "only one document, or copies of one"
        what = f"the training sources hold {found}, of which nothing can be held out"
        ways = "name held-out sources in data.eval, cut the text into files or JSONL records"
        raise DataError(what, where="data.train", next=f"{ways}, or set data.eval_fraction=0")
    small = text_bytes <= LARGEST_SHARE * fraction * int(text_bytes.sum())
    if not small.any():
        small = np.ones(len(points), np.bool_)
    held_out: npt.NDArray[np.bool_] = (points < fraction) & small
    held_out |= points == points[small].min()
    if held_out.all():
        held_out = points != points.max()
    return held_out
