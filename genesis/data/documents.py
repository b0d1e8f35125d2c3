"""Facts about each document from one pass over a corpus (`DocumentIndex`), samples as tokens (`TokenSet`), and the
choice of held-out documents (`split`).

Both classes hold arrays, not texts: the index per document in the order of the corpus, the tokens per sample. A text is
one sample. A record is one sample or several, or none without a target.
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
    """Names, sizes and content hashes of D documents.

    Attributes:
        digests: uint8 `[D, 32]`, sha256 of each text.
        groups: uint8 `[D, 32]`, sha256 of each `Document.group`; documents of one group are held out together.
        text_bytes: int64 `[D]`, UTF-8 bytes of each text.
        files: names of the files; `file_numbers`, int64 `[D]`, holds each document's index in it.
        lines: int64 `[D]`, line of each document; 0 for a whole file.
        is_record: `[D]`, whether a document is a record instead of a text.
    """

    digests: npt.NDArray[np.uint8]
    text_bytes: npt.NDArray[np.int64]
    files: tuple[str, ...]
    file_numbers: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    is_record: npt.NDArray[np.bool_]
    groups: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.text_bytes)

    @property
    def total_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.text_bytes.sum())

    def name(self, document: int) -> str:
        """Return `file` or `file:line` of a document, not escaped."""
        return Document("", self.files[self.file_numbers[document]], int(self.lines[document])).name

    def select(self, documents: npt.NDArray[np.bool_]) -> DocumentIndex:
        """Return the documents for which the mask `[D]` is true."""
        names = ("digests", "text_bytes", "file_numbers", "lines", "is_record", "groups")
        return replace(self, **{name: getattr(self, name)[documents] for name in names})

    def fingerprint(self) -> str:
        """Return the sha256 over all contents in order, without names, as 64 hex digits."""
        # The kinds are part of it because a text may spell the JSON of a record.
        kinds = b"records\0" + self.is_record.tobytes() if self.is_record.any() else b""
        return hashlib.sha256(b"genesis documents 1\0" + self.digests.tobytes() + kinds).hexdigest()


def digest(data: bytes) -> bytes:
    """Return the sha256 of a text's UTF-8 bytes."""
    found = hashlib.sha256()
    update(found, data)
    return found.digest()


def index_documents(documents: Iterable[Document]) -> DocumentIndex:
    """Read all `documents` once and return their index."""
    digests, groups, sizes, lines, is_record = bytearray(), bytearray(), [], [], []
    files: dict[str, int] = {}
    file_indices = []
    for document in documents:
        data = document.text.encode("utf-8")
        digests += (own := digest(data))
        group = document.group
        groups += own if group is document.text else digest(group.encode("utf-8"))
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
        np.frombuffer(bytes(groups), np.uint8).reshape(-1, 32),
    )


@dataclass(frozen=True, eq=False)
class TokenSet:
    """S samples of D documents as tokens.

    The sample of a text has the tokenizer's prefix, the text's tokens, and the end-of-text token.

    Attributes:
        stream: uint16 or uint32 `[N]`, read-only; it may also hold samples of other sets.
        starts: int64 `[S]`, start of each sample in the stream, ascending.
        lengths: int64 `[S]`, tokens of each sample, at least 2.
        documents: int64 `[S]`, document of each sample.
        index: names and sizes of the documents.
        pad_id: id of slots without a token in a batch.
        data_fingerprint: fingerprint of the data, which a resume compares.
        tokenizer_fingerprint: fingerprint of the tokenizer, which a resume compares.
        mask: uint8 `[N]`, 1 for tokens that are targets. None: all are, except for the first of each sample.
        target_bytes: int64 `[S]`, UTF-8 bytes of text that the targets encode. None: all bytes of the documents.
        weights: float64 `[S]`, mean number of times that an epoch contains a sample. None: once each.
        splits: int64 `[S]`, number of tokens of the first of a sample's two sequences. Each sequence is a prompt and an
            answer: chosen and rejected, or a judged answer and another prompt's answer. None: one sequence each.
        shared: int64 `[S]`, number of tokens, from the start of the first sequence, that the second sequence continues
            and therefore leaves out. None: it leaves out none.
        is_good: `[S]`, whether a judged answer is good. None: answers are not judged.
        margins: float64 `[S]`, margins of pairs. None: the samples are not preferences.
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
    splits: Ints | None = None
    shared: Ints | None = None
    is_good: npt.NDArray[np.bool_] | None = None
    margins: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_documents(self) -> int:
        """Number of documents with a sample."""
        return len(np.unique(self.documents))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including special ones."""
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        """Number of tokens that a model must predict."""
        return int(self.target_counts.sum())

    @cached_property
    def target_counts(self) -> Ints:
        """Number of tokens that a model must predict in each sample, int64 `[S]`; never the first."""
        return self.targets_between(self.starts, self.starts + self.lengths)

    def targets_between(self, begins: Ints, ends: Ints) -> Ints:
        """Return the number of targets in each nonempty range, without its first token; ranges must ascend."""
        if self.mask is None:
            return ends - begins - 1
        bounds = np.stack([begins + 1, ends], axis=1).reshape(-1)
        # `reduceat` sums from each bound to the next but rejects the end of the stream as a bound.
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
        """UTF-8 bytes of the text that a model must predict (the denominator of bits per byte), at least 1."""
        found = self.index.total_bytes if self.target_bytes is None else int(self.target_bytes.sum())
        return max(found, 1)

    def select(self, documents: npt.NDArray[np.bool_]) -> TokenSet:
        """Return the documents for which the mask `[D]` is true; they share the tokens and keep the fingerprints."""
        number = np.cumsum(documents) - 1
        chosen = self.select_samples(documents[self.documents])
        return replace(chosen, documents=number[chosen.documents], index=self.index.select(documents))

    def select_samples(self, samples: npt.NDArray[np.bool_]) -> TokenSet:
        """Return the samples for which the mask `[S]` is true, of the same documents."""
        names = ("starts", "lengths", "documents", "target_bytes", "weights", "splits", "shared", "is_good", "margins")
        kept: dict[str, Any] = {name: a if (a := getattr(self, name)) is None else a[samples] for name in names}
        return replace(self, **kept)


# --- Which documents are held out -------------------------------------------------------------------------------------
# A document is held out if a hash of (seed, content) is below the fraction. Identical documents therefore never fall on
# both sides, and additional documents do not move others. The fraction holds on average over documents, not exactly.
#
# A very large document would dominate the held-out set. One with more than a quarter of the bytes to hold out therefore
# remains in training, unless all are that large. Only a document near that size can change sides when others are added.


LARGEST_SHARE = 0.25  # a held-out document has at most this share of the bytes to hold out


def holdout_points(digests: npt.NDArray[np.uint8], seed: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each digest `[D, 32]`, uniform and independent between seeds."""
    key = seed.to_bytes(16, "little", signed=True)
    points = [hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in digests]
    # 53 bits make the division exact, and 1.0 is never reached.
    return (np.frombuffer(b"".join(points), "<u8") >> np.uint64(11)) / float(1 << 53)


def split(
    digests: npt.NDArray[np.uint8], text_bytes: npt.NDArray[np.int64], *, seed: int, fraction: float
) -> npt.NDArray[np.bool_]:
    """Return true for the documents that are held out.

    Args:
        digests: uint8 `[D, 32]`; documents with equal digests are held out together.
        text_bytes: int64 `[D]`.

    If the hashes select none, the document with the lowest hash is held out; if they select all, the one with the
    highest is not. A fraction of 0 holds out none.

    Raises:
        DataError: the fraction is above 0, but fewer than two documents differ.
    """
    points = holdout_points(digests, seed)
    if fraction <= 0:
        return np.zeros(len(points), np.bool_)
    if len(points) == 0 or points.min() == points.max():
        found = "no document" if len(points) == 0 else "only one document, copies of one, or answers to one prompt"
        what = f"the training sources hold {found}, so nothing can be held out"
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
