"""Encoders that the tests of this folder share: each keeps a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from genesis.data.chat import ChatEncoder, ChatTemplate, Loss
from genesis.data.tokenizer import Tokenizer
from tests.data.chat.golden import template, write_tokenizer


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with Qwen's ranks and Qwen3's added tokens."""
    return Tokenizer.load(write_tokenizer("qwen", tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with Llama 3's added tokens, and its start before each text."""
    return Tokenizer.load(write_tokenizer("llama", tmp_path_factory.mktemp("llama")))


Encoders = Callable[..., ChatEncoder]


@pytest.fixture(scope="session")
def encoders(qwen: Tokenizer, llama: Tokenizer) -> Iterator[Encoders]:
    """`encoders(name, loss, **args)`: the encoder of one of the templates or of `chatml`, made once."""
    made: dict[tuple[str, str, str], ChatEncoder] = {}

    def encoder(name: str, loss: Loss = "all_assistant", **args: object) -> ChatEncoder:
        key = (name, loss, repr(args))
        if key not in made:
            tokenizer = llama if name == "llama3_2" else qwen
            text = ChatTemplate.chatml(tokenizer, args) if name == "chatml" else template(name, args)
            made[key] = ChatEncoder(tokenizer, text, loss=loss)
        return made[key]

    yield encoder
    for each in made.values():
        each.close()
