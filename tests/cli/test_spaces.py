"""The space between a prompt and its continuation, with tokenizers that keep spaces in tokens: in all commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

import genesis
import genesis_models
from genesis.data.tokenizer import Tokenizer
from genesis_cli.session.inference import Speaker
from genesis_cli.session.talk import Talk
from genesis_cli.session.training import sample_texts
from genesis_models import CausalLM, Sampling
from genesis_models.source import find_source
from tests.cli.command import printed
from tests.data.test_tokenizer_files import metaspace, sentence_piece, write
from tests.models.golden import golden
from tests.serving.server import serving

TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"  # an answer comes behind a special token
PROMPT, TEXT = "hello", " a a a"


@pytest.fixture(scope="module", params=[sentence_piece, metaspace])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that continues everything with the token `▁a`."""
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = Tokenizer.load(write(tmp_path_factory.mktemp("tokenizer"), request.param()))
    model, word = genesis_models.load(golden("qwen2-untied-sharded").folder), tokenizer.token_id("▁a")
    with genesis.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1000.0  # which all layers leave above 0
        model.lm_head.weight.zero_()
        model.lm_head.weight[word, 0] = 1.0
    genesis_models.save(model, folder, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return genesis_models.load(folder)


def test_in_python(model: CausalLM) -> None:
    found = model.generate(PROMPT, max_tokens=3)
    tokenizer = model.tokenizer
    assert tokenizer is not None and found.text == TEXT
    assert tokenizer.decode([*tokenizer.prompt(PROMPT), *found.ids]) == PROMPT + TEXT
    assert model.generate(PROMPT, max_tokens=3, special=True).text == TEXT
    assert model.generate([*tokenizer.prompt(PROMPT), tokenizer.eos_id], max_tokens=3).text == TEXT.lstrip()


def test_stop_strings_that_begin_with_a_space(model: CausalLM) -> None:
    found = model.generate(PROMPT, max_tokens=3, stop=" a")
    assert (found.text, found.finish, len(found.ids)) == ("", "stop", 1)


def test_samples_of_a_run(model: CausalLM, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    how: Any = {"stop": frozenset(), "goes_on": lambda: True}
    assert sample_texts(model, tokenizer, [tokenizer.prompt(PROMPT)], Sampling(0.0), 3, **how) == [TEXT]


def test_generate(folder: Path, tmp_path: Path) -> None:
    how = ("--max-tokens", "3", "--temperature", "0", "--device", "cpu")
    for more in ((), ("--no-stream",)):
        code, text, _ = printed("generate", folder, "--prompt", PROMPT, *how, *more)
        assert (code, text) == (0, TEXT + "\n")
    (tmp_path / "p").write_text(json.dumps({"prompt": PROMPT}))
    code, text, _ = printed("generate", folder, "--prompts", tmp_path / "p", *how)
    assert (code, json.loads(text)["completion"]) == (0, TEXT)


def test_chat_without_a_template(folder: Path) -> None:
    with Speaker(find_source(folder), device="cpu", dtype="auto") as speaker:
        talk = Talk(speaker, Sampling(0.0), 3)
        assert "".join(talk.say(PROMPT)) == "".join(talk.say("b")) == TEXT
        assert talk.messages[1]["content"] == TEXT


@pytest.mark.full
def test_serve(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(folder)
    ids, asked = tokenizer.prompt(PROMPT), {"model": "model", "temperature": 0, "max_tokens": 3}
    with serving(folder, "--device", "cpu") as server, httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:

        def choice(path: str = "completions", **more: Any) -> Any:
            return client.post(path, json=asked | more).json()["choices"][0]

        assert choice(prompt=PROMPT)["text"] == choice(prompt=ids)["text"] == TEXT
        told = choice(prompt=PROMPT, echo=True, logprobs=2)
        assert told["text"] == PROMPT + TEXT and told["logprobs"]["tokens"][-3:] == [" a"] * 3
        assert told["logprobs"]["text_offset"][-3:] == [5, 7, 9]
        assert all(" a" in each for each in told["logprobs"]["top_logprobs"][-3:])
        # Clients such as lm-eval send what a tokenizer decodes, with the first token and the space behind it.
        decoded = {"prompt": tokenizer.decode(ids, skip_special=False), "echo": True, "logprobs": 0}
        assert choice(**decoded) == choice(**{**decoded, "prompt": ids})
        chat = choice("chat/completions", messages=[{"role": "user", "content": "a"}], logprobs=True)
        assert chat["message"]["content"] == TEXT.lstrip()
        assert [each["token"] for each in chat["logprobs"]["content"]] == ["a", " a", " a"]
