"""What several data tests share: texts, token sets whose ids tell their place, the rules that an epoch must keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genesis.data.documents import TokenSet, index_documents
from genesis.data.loader import IGNORE_INDEX, Batch
from genesis.data.pipeline import Prepared, prepare
from genesis.data.records import Document
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
        "text_field": "text",
        "max_line_bytes": 1 << 20,
        "progress": lambda stage, done, total: None,
    }
    return prepare(**settings | changes)


def token_set(lengths: Sequence[int], *, gap: int = 0) -> TokenSet:
    """Documents of `lengths` tokens in which each token's id is its place in the stream; `gap` ids lie between them."""
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes + gap) - sizes - gap
    size = int(sizes.sum()) + gap * len(sizes)
    index = index_documents(Document(f"text {n}", f"file{n}.txt") for n in range(len(sizes)))
    return TokenSet(np.arange(size, dtype=np.uint32), starts, sizes, index, size + 7, "data", "tokenizer")


def check_epoch(batches: Sequence[Batch], tokens: TokenSet, shape: tuple[int, int]) -> None:
    """Assert that an epoch over a `token_set` predicts each token but the separators once, never across a border."""
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
        assert (is_target == (holds_token & (positions > 0))).all(), "targets are all tokens but each chunk's first"
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
        assert batch.samples[:, 3].min() >= 2, "no chunk without a target"
    expected = [
        place
        for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
        for place in range(start + 1, start + length)
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
