"""The model that tests of chat, generate, eval and serve share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.chat_model import write_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, which is not to be changed."""
    return write_chat_model(tmp_path_factory.mktemp("models") / "model")
