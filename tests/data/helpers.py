"""What several data tests share: texts, token sets whose ids tell their place, the rules that an epoch must keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from genesis.data.documents import TokenSet, index_documents
from genesis.data.loader import IGNORE_INDEX, Batch
from genesis.data.pipeline import Prepared, prepare
from genesis.data.records import NO_TARGET, Completion, Defect, Document, record_text
from genesis.data.tokenizer import Tokenizer
from genesis.errors import GenesisError

TEXTS = [
    f"def function_{n}(argument):\n    '''Return {n} times the argument.'''\n    return {n} * argument\n\n\n"
    f"class Shape{n % 7}:\n    sides = {n}\n\n    def area(self):\n        return self.width * {n}\n" * (1 + n % 3)
    for n in range(40)
]


def write_corpus(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    """One file for each text, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text.encode("utf-8"))
    return folder


def prepared(folder: Path, cache: Path, **changes: Any) -> Prepared:
    """`prepare` on the files of `folder`."""
    settings: dict[str, Any] = {
        "train_sources": [f"{folder}/*.txt"],
        "eval_sources": None,
        "eval_fraction": 0.2,
        "tokenizer_path": None,
        "vocab_size": 320,
        "cache_dir": cache,
        "seed": 7,
        "on_error": "fail",
        "max_line_bytes": 1 << 20,
        "seq_len": 64,
        "progress": lambda stage, done, total: None,
    }
    return prepare(**settings | changes)


class Documents:
    """A corpus of documents at hand."""

    def __init__(self, *documents: Document) -> None:
        self._documents = documents

    def documents(self) -> Iterator[Document]:
        return iter(self._documents)


def completion(prompt: str, text: str, line: int = 1) -> Document:
    """A record as a document."""
    record = Completion(prompt, text)
    return Document(record_text(record), "chats.jsonl", line, record)


@dataclass(frozen=True)
class Encoded:
    """A sample."""

    ids: np.ndarray
    is_target: np.ndarray
    target_bytes: int
    notes: Sequence[Defect] = ()
    split: int = 0
    is_good: bool = False
    margin: float = 0.0


class CompletionEncoder:
    """An encoder whose samples are a prompt and each line of its completion; a prompt `bad` is a defect."""

    learns_all = False

    def __init__(self, tokenizer: Tokenizer, fingerprint: str = "completions") -> None:
        self.fingerprint, self._tokenizer, self.batches, self.closed = fingerprint, tokenizer, 0, False

    def encode(self, documents: Sequence[Document]) -> list[list[Encoded] | Defect]:
        assert not self.closed
        self.batches += 1
        return [self._encoded(document) for document in documents]

    def _encoded(self, document: Document) -> list[Encoded] | Defect:
        assert isinstance(document.record, Completion)
        if document.record.prompt == "bad":
            return Defect("template", "the template fails", document.file, document.line)
        if not document.record.completion:
            return Defect(NO_TARGET, "the record has no target", document.file, document.line)
        prompt, samples = self._tokenizer.encode(document.record.prompt), []
        for line in document.record.completion.split("\n"):
            ids = [*prompt.tolist(), *self._tokenizer.encode(line).tolist()]
            samples.append(Encoded(np.array(ids), np.arange(len(ids)) >= len(prompt), len(line.encode())))
        return samples

    def close(self) -> None:
        self.closed = True


def token_set(lengths: Sequence[int], *, gap: int = 0, mask: Callable[[int], bool] | None = None) -> TokenSet:
    """Samples of `lengths` tokens in which each token's id is its place in the stream; `gap` ids lie between them.

    `mask` says which ids are targets; the last of each sample is one always.
    """
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes + gap) - sizes - gap
    size = int(sizes.sum()) + gap * len(sizes)
    index = index_documents(
        Document(f"text {n}", f"file{n}.txt", record=None if mask is None else Completion("", ""))
        for n in range(len(sizes))
    )
    stream = np.arange(size, dtype=np.uint32)
    tokens = TokenSet(stream, starts, sizes, np.arange(len(sizes)), index, size + 7, "data", "tokenizer")
    if mask is None:
        return tokens
    is_target = np.array([mask(place) for place in range(size)], np.uint8)
    is_target[starts + sizes - 1] = 1
    return replace(tokens, mask=is_target)


def check_epoch(batches: Sequence[Batch], tokens: TokenSet, shape: tuple[int, int]) -> None:
    """Assert that an epoch over a `token_set` predicts each target once, never across a border."""
    mask = np.ones(len(tokens.stream), np.bool_) if tokens.mask is None else tokens.mask != 0
    predicted: list[int] = []
    for batch in batches:
        ids, labels, positions = batch.input_ids, batch.labels, batch.position_ids
        for array in (ids, labels, positions):
            assert array.shape == shape, "the shape of every batch is fixed"
            assert array.dtype == np.int64
        holds_token = ids != tokens.pad_id
        slots = np.arange(shape[1])
        assert (holds_token == (slots < holds_token.sum(1)[:, None])).all(), "empty slots stand at a row's end"
        assert batch.num_tokens == holds_token.sum()
        begins = slots - positions
        assert (begins >= 0).all()
        assert (np.take_along_axis(positions, begins, 1) == 0).all(), "a segment begins where its positions do"
        assert (np.diff(begins, axis=1) >= 0).all()
        assert (np.take_along_axis(holds_token, begins, 1) == holds_token).all(), "text never attends to empty slots"
        is_target = labels != IGNORE_INDEX
        masked = mask[np.where(holds_token, ids, 0)]
        assert (is_target == (holds_token & (positions > 0) & masked)).all(), "a chunk's first token is no target"
        assert (labels == ids)[is_target].all()
        # What a model does: the logits of a place are compared with the label of the next.
        rows, columns = np.nonzero(is_target[:, 1:])
        assert not is_target[:, 0].any(), "a label in the first column has no logits"
        before, after = ids[rows, columns], ids[rows, columns + 1]
        assert (before == after - 1).all(), "a token is predicted from the one before it in its document"
        assert (begins[rows, columns] == begins[rows, columns + 1]).all(), "nothing is predicted across a border"
        assert batch.num_targets == len(rows) > 0, "a batch knows its targets and has some"
        predicted += after.tolist()
        rows, columns = np.nonzero(holds_token & (positions == 0))
        starts = tokens.starts[batch.samples[:, 1]] + batch.samples[:, 2]
        assert sorted(zip(rows.tolist(), ids[rows, columns].tolist(), strict=True)) == sorted(
            zip(batch.samples[:, 0].tolist(), starts.tolist(), strict=True)
        ), "the samples name the chunks"
        segments = np.cumsum(positions == 0).reshape(shape)  # a number for each chunk
        with_target = np.unique(segments[is_target])
        assert (with_target == np.unique(segments[holds_token])).all(), "no chunk without a target"
    expected = [
        place
        for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
        for place in range(start + 1, start + length)
        if mask[place]
    ]
    assert sorted(predicted) == expected, "each token is a target exactly once"


def run_python(program: str, *arguments: object, timeout: float = 60, **environment: str) -> Any:
    """Run `program` in a fresh Python; returns what it printed, parsed as JSON. Its stderr must stay empty."""
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return json.loads(result.stdout)


def raised(call: Callable[[], object]) -> str:
    """The class and exit code of the Genesis error that `call` raises, as `DataError 4`; empty if it raises none."""
    try:
        call()
    except GenesisError as error:
        return f"{type(error).__name__} {error.exit_code}"
    return ""
