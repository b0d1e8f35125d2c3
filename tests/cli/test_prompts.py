"""From a prompt to text: which ids a model continues, and which end the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import genesis_models
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import ModelError
from genesis_cli.session import generation
from genesis_models.chat_files import stop_ids
from genesis_models.engine import Request
from tests.models.golden import golden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that adds nothing around a text, and names a start all the same."""
    folder = tmp_path_factory.mktemp("model")
    genesis_models.save(genesis_models.load(golden("qwen3-tied").folder), folder)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = train_bpe(["a few words, a few words"], vocab_size=max(257, min(vocab, 260)))
    tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))
    return folder


def seen(folder: Path, prompt: str, **settings: Any) -> tuple[list[int], set[int]]:
    """The ids that `genesis generate` gives to the model, and those that end the text."""
    found: list[tuple[list[int], set[int]]] = []

    def record(engine: object, requests: list[Request], *rest: object, **settings: object) -> list[int]:
        found.extend((list(each.ids), set(each.stop)) for each in requests)
        return []

    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
    with mock.patch.object(generation, "continue_texts", record):
        list(generation.generate(str(folder), prompt, **options, device="cpu", dtype="float32", **settings))
    return found[0]


def test_no_start_is_put_before_a_prompt_where_the_tokenizer_adds_none(folder: Path) -> None:
    ids, _ = seen(folder, "few")
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.decode(ids, skip_special=False)) == (0, "few")


def test_special_tokens_in_a_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = seen(folder, "a<|endoftext|>")
    assert 0 not in plain
    assert "<|endoftext|>, which is treated as plain text; --special parses it" in capsys.readouterr().err
    parsed, _ = seen(folder, "a<|endoftext|>", special=True)
    assert parsed[-1] == 0 and len(parsed) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "generation,config,expected",
    [
        ({"eos_token_id": 5}, {}, {5}),
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, {5, 7, 9}),
        ({}, {"eos_token_id": [3]}, {3}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {0}),
        ({"eos_token_id": []}, {}, {0}),
        (None, {}, {0}),
    ],
)
def test_text_ends_at_every_id_that_the_model_names_else_at_the_tokenizers(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    tokenizer = train_bpe(["a few words"], vocab_size=257)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_ids(tmp_path, tokenizer) == expected
    assert stop_ids(None, tokenizer) == {0}


@pytest.mark.parametrize("value", ["5", [1, "2"], True, -1, {"a": 1}, 1.5])
def test_an_end_that_is_no_id_is_an_error_that_names_the_file(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match="neither an id nor a list of ids") as caught:
        stop_ids(tmp_path, train_bpe(["a few words"], vocab_size=257))
    assert caught.value.where == str(tmp_path / "generation_config.json")


def test_the_stop_ids_of_the_folder_reach_the_model(folder: Path) -> None:
    path = folder / "generation_config.json"
    before = path.read_bytes()
    path.write_text(json.dumps({"eos_token_id": [5, 11]}))
    try:
        config = json.loads((folder / "config.json").read_text()).get("eos_token_id")
        assert seen(folder, "few")[1] == {5, 11} | ({config} if config is not None else set())
    finally:
        path.write_bytes(before)
