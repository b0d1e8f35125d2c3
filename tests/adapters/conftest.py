"""A base model with a tokenizer, made once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import genesis_models
from genesis.data.tokenizer import train_bpe
from genesis.files.cache import Cache
from genesis_models.adapters import folder as base_model
from tests.models.golden import FIXTURES


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known about hashed bases stays in the test."""
    hashed = Cache(tmp_path_factory.mktemp("cache") / "bases")
    monkeypatch.setattr(base_model, "_hashed_bases", lambda: hashed)


@pytest.fixture(scope="session")
def made_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases") / "base"
    tokenizer = train_bpe(["some words to learn, and more words to learn"], vocab_size=262)
    genesis_models.save(genesis_models.load(FIXTURES / "qwen3-tied"), folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def base(made_base: Path, tmp_path: Path) -> Path:
    """The tiny Qwen3 that the committed adapters are of, with a tokenizer."""
    return Path(shutil.copytree(made_base, tmp_path / "base"))
