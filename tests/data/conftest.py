"""Fixtures for the data tests: a small trained tokenizer and a small corpus on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from genesis.data.tokenizer import Tokenizer, train_bpe
from tests.data.helpers import TEXTS, write_corpus


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 320 tokens."""
    return train_bpe(TEXTS, vocab_size=320)


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    """A folder with `TEXTS`, one file each."""
    return write_corpus(tmp_path / "corpus")
