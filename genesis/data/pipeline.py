"""From source strings to training and held-out data: index, split, tokenizer, samples. `loader` makes batches of them.

Each step is cached by content, so a second start reads the texts once and computes nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from genesis.data.chat.samples import ChatEncoder
from genesis.data.corpus import Corpus, FileCounts
from genesis.data.documents import DocumentIndex, Ints, Progress, TokenSet, holdout_points, index_documents, split
from genesis.data.packing import Note, TooLong, fit
from genesis.data.pairs import mismatched, share_prompts
from genesis.data.pieces import PATTERN
from genesis.data.readers import SUPPORTED
from genesis.data.record_formats import FieldNames, Format
from genesis.data.records import NO_TARGET, Defects, Document, Learns
from genesis.data.sources import WeightedSource, expand
from genesis.data.tokenize import SpecialText, reread, tokenize
from genesis.data.tokenizer import Tokenizer, library_version, train_bpe, trained_files
from genesis.data.tokenizer_files import TOKENIZER_NAME
from genesis.errors import DataError, escape
from genesis.files.boundary import boundary
from genesis.files.cache import Cache, EntryWriter, State
from genesis.files.strict_json import canonical_bytes

# Called with the stage ("train a tokenizer", "tokenize"), the bytes of text done, and their total.
StageProgress = Callable[[str, int, int], None]
# Called if there are records. This module closes the encoder.
MakeEncoder = Callable[[Tokenizer], ChatEncoder]

TOKENIZER_FORMAT = 1
# More text hardly changes a vocabulary, so a larger corpus is sampled.
MAX_BPE_BYTES = 256 << 20
_SAMPLE_SEED = -1


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents.

    Attributes:
        tokens: the samples; `tokens.total_bytes` is the exact number of bytes of their documents.
        gzip_bits_per_byte: the result of `gzip -9` per file. None with records, because gzip ignores targets.
        defects: skipped documents of held-out sources.
        files: files of held-out sources; empty if the documents come from the training sources.
        special: documents of held-out sources that contain text of special tokens.
        notes: notes about samples of held-out sources that are too long or have no target.
        sets: samples of each named set of sources; empty without names.
    """

    tokens: TokenSet
    gzip_bits_per_byte: float | None
    defects: Defects
    files: FileCounts = field(default_factory=FileCounts)
    special: SpecialText = field(default_factory=SpecialText)
    notes: tuple[Note, ...] = ()
    sets: Mapping[str, TokenSet] = field(default_factory=dict)


@dataclass(frozen=True)
class DataReport:
    """Facts about the preparation for the user.

    Attributes:
        defects: skipped training documents.
        tokenizer: "given", or the cache state of a tokenizer trained on the data ("made", "found", "rebuilt" after
            damage).
        tokens: the same for the tokenized training documents.
        shared_documents: number of training documents whose text is also in the named held-out sources.
        files: files of the training sources, read and not read.
        special: documents that contain text of special tokens, which is read as plain text.
        tail: start of the held-out end of a single text file, as `file:line`; empty if documents are held out.
        notes: notes about samples that are too long or have no target, including held-out ones of the same sources.
        lengths: int64, tokens of each sample before long ones are handled.
        formats: number of records of the training sources per format.
    """

    defects: Defects
    tokenizer: Literal["given"] | State
    tokens: State
    shared_documents: int
    files: FileCounts
    tail: str
    special: SpecialText
    notes: tuple[Note, ...]
    lengths: Ints
    formats: dict[str, int]


@dataclass(frozen=True)
class Prepared:
    """A tokenizer, the training data, the held-out data (None without any), and the report."""

    tokenizer: Tokenizer
    train: TokenSet
    held_out: HeldOut | None
    report: DataReport


@boundary(DataError, "reading the data")
def prepare(
    *,
    train_sources: Sequence[str | WeightedSource],
    eval_sources: Sequence[str] | Mapping[str, Sequence[str]] | None,
    eval_fraction: float | None,
    tokenizer_path: str | os.PathLike[str] | None,
    vocab_size: int,
    cache_dir: str | os.PathLike[str],
    seed: int,
    on_error: Literal["fail", "skip"],
    max_line_bytes: int,
    seq_len: int,
    progress: StageProgress,
    format: Format = "auto",
    fields: FieldNames | None = None,
    parse_special: bool = False,
    too_long: TooLong | None = None,
    make_encoder: MakeEncoder | None = None,
    learns: Learns = "tokens",
) -> Prepared:
    """Read, split and tokenize the data of a run.

    Args:
        train_sources, eval_sources: see `genesis.data.sources`. None holds out `eval_fraction` of the documents.
        tokenizer_path: folder or tokenizer.json; None trains one of `vocab_size` tokens on the training documents.
        cache_dir: folder of cached tokens and trained tokenizers.
        seed: seed of the split.
        seq_len, too_long: see `genesis.data.packing.fit`.
        on_error, max_line_bytes, format, fields: see `genesis.data.corpus.Corpus`.
        progress: called with the stage, the bytes done and their total.
        parse_special: whether special tokens spelled out in a text become their ids.
        make_encoder: creates the encoder of records for a tokenizer.
        learns: what the objective learns from. Preferences with the same prompt are held out together.

    Raises:
        DataError: the data cannot be used. ModelError: the tokenizer cannot be used.
        ConfigError: `vocab_size` is too small. DiskError: the cache cannot be written.
    """
    own = partial(Corpus, format=format, fields=fields, learns=learns)
    read = partial(own, on_error=on_error, max_line_bytes=max_line_bytes)
    setup = _Setup(Cache(cache_dir), read, on_error, parse_special, too_long, make_encoder, seq_len, learns)
    # Index the documents, choose the held-out ones, and tokenize all of them.
    corpus = read(train_sources)
    index, defects = _indexed(corpus, "data.train")
    fraction = 0.0 if eval_sources is not None or eval_fraction is None else eval_fraction
    index, is_held_out = _split(corpus, index, seed, fraction)
    chosen = _tokenizer(tokenizer_path, vocab_size, corpus, index, ~is_held_out, setup.cache, progress)
    tokenizer, tokenizer_state = chosen
    done = _samples(corpus, index, tokenizer, setup, partial(progress, "tokenize"))
    _check_any(done.tokens, "of data.train", done.notes)
    if not corpus.is_divided:
        is_held_out = _usable(is_held_out, done.tokens, seed, fraction)

    # The held-out samples come from their own sources or from the training sources.
    held_out = None
    if eval_sources is not None:
        held_out = _held_out(eval_sources, tokenizer, setup, progress, "data.eval")
    elif is_held_out.any():
        tokens = done.tokens.select(is_held_out)
        _check_any(tokens, "held out of data.train", done.notes)
        baseline = _baseline(_chosen(corpus, index, is_held_out), tokens.index, setup.cache)
        held_out = HeldOut(setup.complete(tokens), baseline, Defects())
    train = done.tokens.select(~is_held_out)
    # Give training samples the weights of their files.
    if any(weight != 1 for weight in corpus.weights.values()):
        of_files = np.array([corpus.weights[name] for name in train.index.files], np.float64)
        train = replace(train, weights=of_files[train.index.file_numbers][train.documents])
    _check_any(train, "of data.train", done.notes)
    train = setup.complete(train)
    # Fingerprint both sets for a resume, and report what was done.
    train, held_out = _with_fingerprint(train, held_out, done.choices)
    known = {row.tobytes() for row in held_out.tokens.index.digests} if held_out else set()
    shared = sum(row.tobytes() in known for row in train.index.digests)
    tail = index.name(1) if corpus.is_divided else ""
    found = (done.special, done.notes, done.lengths, corpus.formats)
    report = DataReport(defects, tokenizer_state, done.state, shared, corpus.counts(), tail, *found)
    return Prepared(tokenizer, train, held_out, report)


@boundary(DataError, "reading the data")
def prepare_held_out(
    *,
    sources: Sequence[str] | Mapping[str, Sequence[str]],
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike[str],
    on_error: Literal["fail", "skip"],
    max_line_bytes: int,
    seq_len: int,
    progress: StageProgress,
    format: Format = "auto",
    fields: FieldNames | None = None,
    parse_special: bool = False,
    too_long: TooLong | None = None,
    make_encoder: MakeEncoder | None = None,
    learns: Learns = "tokens",
    key: str = "data.eval",
) -> HeldOut:
    """Read and tokenize held-out documents; arguments and errors as in `prepare`.

    Args:
        key: name of the sources in errors.
    """
    own = partial(Corpus, format=format, fields=fields, learns=learns)
    read = partial(own, on_error=on_error, max_line_bytes=max_line_bytes)
    setup = _Setup(Cache(cache_dir), read, on_error, parse_special, too_long, make_encoder, seq_len, learns)
    return _held_out(sources, tokenizer, setup, progress, key)


def _held_out(
    sources: Sequence[str] | Mapping[str, Sequence[str]],
    tokenizer: Tokenizer,
    setup: _Setup,
    progress: StageProgress,
    key: str,
) -> HeldOut:
    sets = sources if isinstance(sources, Mapping) else {}
    set_of_file = _sets_of_files(sets, key)
    sources = [source for each in sets.values() for source in each] if sets else [*sources]
    corpus = setup.read(sources)
    index, defects = _indexed(corpus, key)
    done = _samples(corpus, index, tokenizer, setup, partial(progress, "tokenize held-out data"))
    _check_any(done.tokens, f"of {key}", done.notes)
    baseline = _baseline(reread(corpus, index), index, setup.cache)
    found = {}
    for name in sets:
        chosen = np.array([set_of_file[file] == name for file in index.files])
        found[name] = done.tokens.select(chosen[index.file_numbers])
        _check_any(found[name], f"of {key}.{name}", done.notes)
        found[name] = setup.complete(found[name])
    return HeldOut(setup.complete(done.tokens), baseline, defects, corpus.counts(), done.special, done.notes, found)


def _sets_of_files(sets: Mapping[str, Sequence[str]], key: str) -> dict[str, str]:
    sets_of_paths, found = dict[str, str](), dict[str, str]()
    for name, sources in sets.items():
        try:
            files = expand(sources)
        except DataError as error:
            error.where = error.where or f"{key}.{name}"
            raise
        for file in files:
            other = sets_of_paths.setdefault(os.path.realpath(file.path), name)
            if other != name:
                what = f"{escape(file.name)} is also in {key}.{other}"
                raise DataError(what, where=f"{key}.{name}", next="name it in one set; eval/loss is over all sets")
            found[file.name] = name
    return found


@dataclass(frozen=True)
class _Setup:
    """Settings for reading sources and encoding their documents; see `prepare`."""

    cache: Cache
    read: Callable[[Sequence[str | WeightedSource]], Corpus]
    on_error: Literal["fail", "skip"]
    parse_special: bool
    too_long: TooLong | None
    make_encoder: MakeEncoder | None
    seq_len: int
    learns: Learns

    def complete(self, tokens: TokenSet) -> TokenSet:
        """Return a set whose judged answers, if any, have the second sequence that KTO reads."""
        return mismatched(tokens, self.seq_len) if self.learns == "judged" else tokens


@dataclass(frozen=True)
class _Samples:
    """Samples for rows of one length; `choices` names what determines them besides documents and tokenizer."""

    tokens: TokenSet
    state: State
    special: SpecialText
    notes: tuple[Note, ...]
    lengths: Ints
    choices: dict[str, str]


def _samples(corpus: Corpus, index: DocumentIndex, tokenizer: Tokenizer, setup: _Setup, progress: Progress) -> _Samples:
    """Encode the documents as samples that fit into rows. Raises: DataError: a record cannot be encoded."""
    encoder, choices = None, {}
    if index.is_record.any():
        if setup.make_encoder is None:
            name = escape(index.name(int(np.argmax(index.is_record))))
            raise DataError("the data holds records, but no encoder is given", where=name, next="give make_encoder")
        encoder = setup.make_encoder(tokenizer)
        choices["encoder"] = encoder.fingerprint
    with nullcontext() if encoder is None else closing(encoder):
        how = setup.parse_special, encoder, setup.on_error, setup.learns
        done = tokenize(corpus, index, tokenizer, setup.cache, progress, *how)
    notes: list[Note] = []
    # Note what was left out, and why.
    for kind, count in done.left_out.counts.items():
        what = "samples without a target are left out" if kind == NO_TARGET else f"records are left out: {kind}"
        notes.append(Note(count, what, done.left_out.examples[kind]))
    for kind, count in done.notes.counts.items():
        notes.append(Note(count, kind, done.notes.examples[kind], "data.template"))
    samples = np.bincount(done.tokens.documents)
    if (several := samples > 1).any():
        what = "conversations became several samples: the template renders a turn differently when others follow"
        first = int(np.argmax(several))
        notes.append(Note(int(several.sum()), what, f"{escape(index.name(first))}, {samples[first]:,} samples"))
    turns, where = corpus.not_learned
    if turns and encoder is not None and not encoder.learns_all:
        notes.append(Note(turns, "turns are read but not learned (weight 0 or train false)", escape(where)))

    def text_bytes(id: int) -> int:
        return 0 if id in tokenizer.special_ids else tokenizer.text_bytes(id)

    # Fit the samples into rows.
    encoded = done.tokens if done.tokens.splits is None else share_prompts(done.tokens)
    if setup.learns != "tokens":
        choices["prompts"] = "shared"
    tokens, more = fit(encoded, setup.seq_len, setup.too_long, text_bytes)
    if tokens is not encoded:
        choices["too_long"] = setup.too_long or "drop"
    return _Samples(tokens, done.state, done.special, (*notes, *more), encoded.lengths, choices)


def _check_any(tokens: TokenSet, which: str, notes: Sequence[Note]) -> None:
    if not len(tokens):
        what = f"no sample {which} is left" + "".join(f"; {note}" for note in notes)
        next = "raise data.seq_len, set data.too_long, or inspect the data: genesis data preview"
        raise DataError(what, next=next)


def _baseline(documents: Iterator[Document], index: DocumentIndex, cache: Cache) -> float | None:
    return None if index.is_record.any() else gzip_bits_per_byte(documents, index, cache)


def _indexed(corpus: Corpus, key: str) -> tuple[DocumentIndex, Defects]:
    defects = Defects()
    index = index_documents(corpus.documents(defects))
    if not len(index) and not defects.total:
        what = f"the sources of {key} hold no text; {corpus.counts()}"
        raise DataError(what, where=escape(corpus.files[0].name), next=SUPPORTED)
    if not len(index):
        example = next(iter(defects.examples.values()), "")
        what = f"the sources of {key} hold no usable document; left out: {defects.total:,}"
        raise DataError(what, where=example, next="repair the data or name other sources")
    return index, defects


def _split(
    corpus: Corpus, index: DocumentIndex, seed: int, fraction: float
) -> tuple[DocumentIndex, npt.NDArray[np.bool_]]:
    """Return the index and which documents are held out. A single text file is split, which makes a new index."""
    if len(index) != 1 or index.lines[0] or index.is_record[0] or not fraction:
        return index, split(index.groups, index.text_bytes, seed=seed, fraction=fraction)
    corpus.hold_out_tail(fraction)
    return index_documents(corpus.documents()), np.array([False, True])


def _usable(is_held_out: npt.NDArray[np.bool_], tokens: TokenSet, seed: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Replace the held-out documents by others if none of them has a sample."""
    has_sample = np.zeros(len(is_held_out), np.bool_)
    has_sample[tokens.documents] = True
    if not is_held_out.any() or (is_held_out & has_sample).any():
        return is_held_out
    index = tokens.index.select(has_sample)
    found = np.zeros_like(is_held_out)
    found[has_sample] = split(index.groups, index.text_bytes, seed=seed, fraction=fraction)
    return found


def _tokenizer(
    path: str | os.PathLike[str] | None,
    vocab_size: int,
    corpus: Corpus,
    index: DocumentIndex,
    is_training: npt.NDArray[np.bool_],
    cache: Cache,
    progress: StageProgress,
) -> tuple[Tokenizer, Literal["given"] | State]:
    """Return the tokenizer at `path`, or one trained on the training documents, now or at an earlier start."""
    if path is not None:
        return Tokenizer.load(path), "given"
    chosen = _sample(index, is_training)
    key = {
        "format": TOKENIZER_FORMAT,
        "documents": index.select(chosen).fingerprint(),
        "vocab_size": vocab_size,
        "pattern": PATTERN,
        "library": library_version(),
    }

    def texts() -> Iterator[str]:
        done, total = 0, int(index.text_bytes[chosen].sum())
        for document in _chosen(corpus, index, chosen):
            yield document.text
            done += len(document.text.encode("utf-8"))
            progress("train a tokenizer", done, total)

    def make(folder: EntryWriter) -> None:
        folder.write(TOKENIZER_NAME, train_bpe(texts(), vocab_size=vocab_size).files()[TOKENIZER_NAME])

    cached = cache.get("tokenizer", key, make)
    return Tokenizer(trained_files(bytes(cached.entry.part(TOKENIZER_NAME)))), cached.state


def _sample(index: DocumentIndex, is_training: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the documents to train a tokenizer on: all, or about `MAX_BPE_BYTES` of them, chosen by content hash."""
    fraction = MAX_BPE_BYTES / int(index.text_bytes[is_training].sum())
    if fraction >= 1:
        return is_training
    points = np.where(is_training, holdout_points(index.digests, _SAMPLE_SEED), 1.0)
    chosen: npt.NDArray[np.bool_] = points <= max(fraction, points.min())
    return chosen


def _chosen(corpus: Corpus, index: DocumentIndex, mask: npt.NDArray[np.bool_]) -> Iterator[Document]:
    for document, is_chosen in zip(reread(corpus, index), mask.tolist(), strict=True):
        if is_chosen:
            yield document


def _with_fingerprint(
    train: TokenSet, held_out: HeldOut | None, choices: dict[str, str]
) -> tuple[TokenSet, HeldOut | None]:
    """Return both sets with a fingerprint of training and held-out data, which a resumed run must match."""
    parts: list[Any] = [train.index.fingerprint(), held_out.tokens.index.fingerprint() if held_out else None]
    if train.weights is not None:
        choices = {**choices, "weights": hashlib.sha256(train.weights.tobytes()).hexdigest()}
    if choices:
        parts.append(choices)
    fingerprint = hashlib.sha256(canonical_bytes(parts)).hexdigest()
    if held_out:
        held_out = replace(held_out, tokens=replace(held_out.tokens, data_fingerprint=fingerprint))
    return replace(train, data_fingerprint=fingerprint), held_out


# --- The baseline -----------------------------------------------------------------------------------------------------
# Bits per byte of `gzip -9` on held-out documents; documents of one file are compressed together.


GZIP_FORMAT = 2
SIZES_NAME = "sizes.bin"
_PIECE = 1 << 20


def gzip_bytes(texts: Iterable[str]) -> int:
    """Return the size of the concatenated texts' UTF-8 bytes after `gzip -9`, with gzip's header and checksum."""
    packer, packed = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS), 0
    for text in texts:
        data = memoryview(text.encode("utf-8"))
        # Compress in pieces, so that signals are handled between them; the result does not change.
        packed += sum(len(packer.compress(data[start : start + _PIECE])) for start in range(0, len(data), _PIECE))
    return packed + len(packer.flush())


def gzip_bits_per_byte(documents: Iterable[Document], index: DocumentIndex, cache: Cache) -> float:
    """Return 8 × compressed bytes / bytes of `documents`, described by `index`; the cache may avoid reading them."""
    key = {"format": GZIP_FORMAT, "documents": index.fingerprint(), "zlib": zlib.ZLIB_RUNTIME_VERSION}

    def make(folder: EntryWriter) -> None:
        files = itertools.groupby(documents, key=lambda document: document.file)
        sizes = [gzip_bytes(document.text for document in of_file) for _, of_file in files]
        folder.write(SIZES_NAME, np.array(sizes, "<u8").tobytes())

    sizes = np.frombuffer(cache.get("gzip", key, make).entry.part(SIZES_NAME), "<u8")
    return 8 * int(sizes.sum()) / index.total_bytes
