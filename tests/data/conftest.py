"""Fixtures for the data tests: a small trained tokenizer and a small corpus on disk."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests find out about tokenizers stays below their folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
