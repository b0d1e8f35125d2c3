"""How tokens are drawn where nobody says it: as the model's generation_config.json does, for every entrance alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import genesis_models
from genesis.backend import CPU
from genesis.errors import ModelError
from genesis.train.config import Config
from genesis.train.output import Output
from genesis_cli.session.generation import chosen_sampling
from genesis_cli.session.serving.protocol import CompletionBody, parsed
from genesis_cli.session.settings import settled
from genesis_cli.session.training import sample_drawing
from genesis_models.chat_files import drawing_line, file_drawing
from genesis_models.engine import Sampling
from genesis_models.source import find_source
from tests.cli.command import printed

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": 0.0}


def with_config(source: Path, folder: Path, content: dict[str, Any]) -> Path:
    shutil.copytree(source, folder)
    path = folder / "generation_config.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **content}))
    return folder


@pytest.mark.parametrize(
    "content, wanted",
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_length": 20}, {}),
        ({"do_sample": True}, DRAWN),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {**DRAWN, "temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 64, "top_p": 0.95}, {**DRAWN, "top_k": 64, "top_p": 0.95}),
        ({"temperature": 0.5, "top_k": 0, "top_p": 1.0}, {**DRAWN, "temperature": 0.5, "top_k": None}),
        ({"do_sample": True, "temperature": None, "min_p": 0.1}, {**DRAWN, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6}, {**DRAWN, "temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        (QWEN, {**DRAWN, **{name: value for name, value in QWEN.items() if name != "do_sample"}}),
    ],
)
def test_what_a_file_says(content: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert file_drawing([tmp_path / "none", tmp_path]) == wanted
    Sampling(**{"temperature": 1.0, **wanted}).check()


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "0.9"}, {"top_k": 1.5}, {"repetition_penalty": 0}])
def test_a_value_that_cannot_be_names_the_file(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ModelError) as caught:
        file_drawing([tmp_path])
    assert caught.value.where == str(tmp_path / "generation_config.json") and next(iter(wrong)) in caught.value.what


def test_what_is_not_applied_is_said(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "stop_strings": None}))
    assert drawing_line([tmp_path]) is None
    path.write_text(json.dumps({"num_beams": 4, "no_repeat_ngram_size": 2, "bad_words_ids": [[1]]}))
    line = str(drawing_line([tmp_path]))
    assert all(name in line for name in ("num_beams", "no_repeat_ngram_size", "bad_words_ids", str(path)))


def test_every_entrance_draws_alike(chat_model: Path, tmp_path: Path) -> None:
    """Command and conversation, server, samples of a run and Python: the file goes before each one's own default."""
    folder = with_config(chat_model, tmp_path / "model", QWEN)
    wanted = Sampling(0.7, 20, 0.8, 0, 0.0, 1.05)
    assert chosen_sampling(find_source(folder), {}, 0, Output(None)) == wanted
    assert chosen_sampling(find_source(folder), {"top_k": None, "temperature": 0.1}, 0, Output(None)) == Sampling(
        0.1, None, 0.8, 0, 0.0, 1.05
    )
    assert chosen_sampling(find_source(chat_model), {}, 0, Output(None)) == Sampling(0.8, 50)
    body = {"model": "m", "prompt": "a", "seed": 0}
    assert parsed(CompletionBody, body).sampling(file_drawing([folder])) == wanted
    assert parsed(CompletionBody, {**body, "top_k": -1, "top_p": 0.5}).sampling(file_drawing([folder])) == Sampling(
        0.7, None, 0.5, 0, 0.0, 1.05
    )
    assert parsed(CompletionBody, body).sampling({}) == Sampling(1.0)
    for given, temperature in (({}, 0.7), ({"temperature": 0.8}, 0.8)):
        raw = {"model": {"path": str(folder)}, "data": {"train": "x"}, "train": {"output_dir": "r", "steps": 1}}
        config, _ = settled(Config.model_validate({**raw, "eval": given}), CPU)
        assert (config.eval.temperature, config.eval.top_k, config.eval.top_p) == (temperature, 20, 0.8)
        assert sample_drawing(config) == Sampling(temperature, 20, 0.8, 0, 0.0, 1.05)
    model = genesis_models.load(folder)
    drawn = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    text = model.generate("words", max_tokens=20).ids
    assert text == model.generate("words", max_tokens=20, **drawn).ids
    assert text != model.generate("words", max_tokens=20, temperature=0.0).ids
    assert genesis_models.load(chat_model).generate("words").ids == model.generate(
        "words", temperature=0.0, repetition_penalty=1.0
    ).ids  # fmt: skip


def test_a_line_says_it_and_an_option_wins(chat_model: Path, tmp_path: Path) -> None:
    folder = with_config(chat_model, tmp_path / "model", {"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    words = ("generate", folder, "--prompt", "some words", "--max-tokens", "9", "--device", "cpu")
    code, drawn, told = printed(*words)
    assert code == 0 and "sampling: temperature 0.6, top_k 50, top_p 0.9" in told and str(folder) in told
    explicit = ("--temperature", "0.6", "--top-p", "0.9", "--top-k", "50")
    assert printed("generate", chat_model, *words[2:], *explicit)[1] == drawn
    code, greedy, told = printed(*words, "--temperature", "0")
    assert code == 0 and "sampling" not in told  # what else the file says counts for nothing
    assert greedy == printed("generate", chat_model, *words[2:], "--temperature", "0")[1] != drawn
    code, _, told = printed("generate", chat_model, *words[2:])
    assert code == 0 and "sampling" not in told
