"""What a saved folder says about where turns end, and the template of its chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import genesis_models
from genesis.errors import ModelError
from genesis.files.atomic import AtomicFolder
from genesis_models.chat_files import chat_files, generation_config
from genesis_models.folder import write_model
from tests.models.golden import FIXTURES

CONFIG = genesis_models.load(FIXTURES / "qwen3-tied").config


def merged(source: dict[str, Any] | None, tmp_path: Path, *ends: int, default: int | None = None) -> dict[str, Any]:
    if source is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(source))
    found: dict[str, Any] = json.loads(generation_config(CONFIG, tmp_path, ends, default))
    return found


@pytest.mark.parametrize(
    ("source", "ends", "expected"),
    [
        ({"eos_token_id": 7, "top_p": 0.8}, (9,), {"eos_token_id": [9, 7], "top_p": 0.8}),
        ({"eos_token_id": [9, 7], "pad_token_id": 3}, (9,), {"eos_token_id": [9, 7], "pad_token_id": 3}),
        ({"eos_token_id": [5, 7]}, (9, 7), {"eos_token_id": [9, 7, 5]}),
        ({"eos_token_id": 9}, (9,), {"eos_token_id": 9}),
        ({"eos_token_id": None}, (9,), {"eos_token_id": 9}),
        ({"_from_model_config": True, "eos_token_id": 7}, (9,), {"eos_token_id": [9, 7]}),
        (None, (9,), {"eos_token_id": 9}),
        (None, (), {}),
    ],
)
def test_generation_config_names_the_trained_end_of_turn_before_the_others(
    source: dict[str, Any] | None, ends: tuple[int, ...], expected: dict[str, Any], tmp_path: Path
) -> None:
    assert merged(source, tmp_path, *ends) == expected


def test_the_default_end_counts_where_nothing_else_is_named(tmp_path: Path) -> None:
    assert merged(None, tmp_path, default=4) == {"eos_token_id": 4}
    assert merged(None, tmp_path, 9, default=4) == {"eos_token_id": 9}
    assert merged({"eos_token_id": 7}, tmp_path, default=4) == {"eos_token_id": 7}


@pytest.mark.parametrize("wrong", ["</s>", [1, "2"], -1, True, {}])
def test_a_malformed_source(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither an id nor a list of ids"):
        merged({"eos_token_id": wrong}, tmp_path, 9)


def test_a_model_is_written_with_the_trained_end_and_else_with_the_sources_bytes(tmp_path: Path) -> None:
    source, model = tmp_path / "source", genesis_models.load(FIXTURES / "qwen3-tied")
    source.mkdir()
    (source / "generation_config.json").write_text('{"eos_token_id": 7,  "odd": "spacing"}')
    for name, ends in (("kept", ()), ("trained", (9,))):
        with AtomicFolder(tmp_path / name) as writer:
            write_model(model, writer, source=source, ends=ends)
    kept, trained = (tmp_path / name / "generation_config.json" for name in ("kept", "trained"))
    assert kept.read_bytes() == (source / "generation_config.json").read_bytes()
    assert json.loads(trained.read_text()) == {"eos_token_id": [9, 7], "odd": "spacing"}


def test_both_places_of_a_chat_template_hold_the_same_text() -> None:
    old = {"tokenizer_config.json": b'{"eos_token": "x", "chat_template": "old"}', "tokenizer.json": b"{}"}
    found = chat_files({"default": "{{ new }}"}, old)
    assert found["chat_template.jinja"] == b"{{ new }}"
    assert json.loads(found["tokenizer_config.json"]) == {"eos_token": "x", "chat_template": "{{ new }}"}
    assert found["tokenizer.json"] == b"{}"


def test_further_templates_are_named_in_both_places() -> None:
    old = {"additional_chat_templates/rag.jinja": b"old"}
    found = chat_files({"tool_use": "T", "default": "D"}, old)
    assert set(found) == {"chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer_config.json"}
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert json.loads(found["tokenizer_config.json"])["chat_template"] == listed
