"""`genesis generate --chat`: the ids that a template gives, what ends a turn, and what is wrong with either."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.data.tokenizer import Tokenizer
from genesis.files.atomic import AtomicFolder
from genesis.files.safetensors import load_file
from genesis.train.output import printable
from genesis_cli.session import generation
from genesis_models.adapters import BASE_NAME, base_of, load_adapter, write_adapter
from genesis_models.engine import Request
from tests.adapters.golden import FIXTURES as ADAPTERS
from tests.cli.chat_model import ASKED, TURN
from tests.cli.command import printed
from tests.files.st_files import save_file

QUIET = ("--device", "cpu", "--max-tokens", "3", "--temperature", "0")


@pytest.fixture
def folder(chat_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(chat_model, tmp_path / "model"))


def asked(folder: Path, *words: object) -> list[Request]:
    """What `genesis generate` asks of the engine."""
    found: list[Request] = []

    def record(engine: object, requests: list[Request], *rest: object, **settings: object) -> list[Any]:
        found.extend(requests)
        return []

    with mock.patch.object(generation, "continue_texts", record):
        assert printed("generate", folder, *words, *QUIET)[0] == 0
    return found


def expected(tokenizer: Tokenizer, *turns: str) -> list[int]:
    ids = [token for turn in turns for token in (*tokenizer.encode(turn).tolist(), 0)]
    return [*ids, *tokenizer.encode("assistant: ").tolist()]


def test_a_prompt_is_a_users_message_in_the_models_template(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    [found] = asked(folder, "--chat", "--prompt", "words?")
    assert list(found.ids) == expected(tokenizer, "user: words?")
    assert found.stop >= {0}
    [found] = asked(folder, "--chat", "--system", "Be brief.", "--prompt", "words?")
    assert list(found.ids) == expected(tokenizer, "system: Be brief.", "user: words?")


def test_special_tokens_in_a_message_stay_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for more in ((), ("--special",)):
        [found] = asked(folder, "--chat", "--prompt", "a<|endoftext|>b", *more)
        assert list(found.ids) == expected(tokenizer, "user: a<|endoftext|>b")


def test_files_of_texts_and_messages(folder: Path, tmp_path: Path) -> None:
    tokenizer, source = Tokenizer.load(folder), tmp_path / "p.jsonl"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    own = [{"role": "system", "content": "s"}, *messages]
    given = [{"messages": messages}, {"prompt": "words"}, {"messages": own}]
    source.write_text("\ufeff" + "".join(json.dumps(each) + "\r\n" for each in given), newline="")  # as on Windows
    first, text, last = asked(folder, "--prompts", source)
    assert list(first.ids) == expected(tokenizer, "user: a", "assistant: b", "user: c")
    assert list(text.ids) == tokenizer.prompt("words")
    assert list(last.ids) == expected(tokenizer, "system: s", "user: a", "assistant: b", "user: c")
    first, text, last = asked(folder, "--prompts", source, "--chat", "--system", "S")
    assert list(first.ids) == expected(tokenizer, "system: S", "user: a", "assistant: b", "user: c")
    assert list(text.ids) == expected(tokenizer, "system: S", "user: words")
    assert list(last.ids) == expected(tokenizer, "system: s", "user: a", "assistant: b", "user: c")
    code, out, _ = printed("generate", folder, "--prompts", source, *QUIET)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [{k: v for k, v in each.items() if k in ("messages", "prompt")} for each in found] == given
    assert all(each["tokens"] == 3 and each["finish"] == "length" for each in found)
    code, _, told = printed("generate", folder, "--prompts", source, "--system", "S", *QUIET)
    assert code == 2 and f"{source}:2" in told and "add --chat" in told


def test_the_templates_own_end_of_a_turn_ends_the_text(folder: Path) -> None:
    """Also where the model's files name another end alone, as base models with a template do."""
    tokenizer = Tokenizer.load(folder)
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**raw, "eos_token_id": 7}))
    [found] = asked(folder, "--chat", "--prompt", "words?")
    assert found.stop == {7, tokenizer.eos_id}
    [found] = asked(folder, "--prompt", "words?")
    assert found.stop == {7}


def test_a_template_keeps_its_arguments(folder: Path) -> None:
    """What `data.template_args` put at the head of a saved template holds when it is used."""
    head = "{% if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif %}\n"
    (folder / "chat_template.jinja").write_text(head + TURN + ASKED + "{{ '' if enable_thinking else 'no ' }}")
    [found] = asked(folder, "--chat", "--prompt", "words?")
    assert Tokenizer.load(folder).decode(found.ids).endswith("assistant: no ")


@pytest.mark.parametrize("words", [("--chat", "--prompt", "words"), ("--prompts", "chats.jsonl")])
def test_a_model_without_a_template(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (folder / "chat_template.jinja").unlink()
    code, _, told = printed("generate", folder, *words, *QUIET)
    assert code == 5
    assert "the model has no chat template" in told and "next: use a chat model" in told


def test_a_template_that_refuses_or_is_broken(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only tools here') }}")
    code, _, told = printed("generate", folder, "--chat", "--prompt", "words", *QUIET)
    assert code == 4 and "the chat template cannot render it: " in told and "only tools here" in told
    (folder / "chat_template.jinja").write_text("{% for %}")
    code, _, told = printed("generate", folder, "--chat", "--prompt", "words", *QUIET)
    assert code == 5 and "the chat template cannot be used" in told


def test_a_system_message_needs_a_chat(folder: Path) -> None:
    code, _, told = printed("generate", folder, "--system", "S", "--prompt", "words")
    assert code == 2 and "next: add --chat" in told


def test_a_chat_beyond_the_context(folder: Path) -> None:
    code, _, told = printed("generate", folder, "--chat", "--prompt", "words " * 200, *QUIET)
    assert code == 2 and "the model's context holds 128" in told


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    code, _, told = printed("generate", folder, "--prompt", "words", *QUIET)
    assert code == 5 and "tokenizer.json" in told
    model = genesis_models.load(folder)
    assert model.generate([1, 2, 3], max_tokens=4).text is None
    with pytest.raises(genesis.errors.UsageError, match="the model has no tokenizer"):
        model.generate("words")


def test_weights_whose_logits_are_no_numbers(folder: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    arrays["model.norm.weight"][:] = np.float32(3e38)  # finite, and so are no logits
    save_file(arrays, folder / "model.safetensors")
    with np.errstate(all="ignore"):
        code, _, told = printed("generate", folder, "--prompt", "words", *QUIET)
    assert code == 9 and "the model's logits are" in told and "where: position" in told


def test_an_adapters_folder(folder: Path, tmp_path: Path) -> None:
    """Its own template goes before its base's; a base that moved or changed is named."""
    adapter = tmp_path / "adapter"
    with AtomicFolder(adapter) as writer:
        write_adapter(load_adapter(genesis_models.load(folder), ADAPTERS / "qwen3-tied-dora"), writer, base=folder)
        writer.write(BASE_NAME, base_of(folder).to_json())
    plain = asked(adapter, "--chat", "--prompt", "words")[0]
    assert list(plain.ids) == expected(Tokenizer.load(folder), "user: words")
    (adapter / "chat_template.jinja").write_text("mine " + TURN + ASKED)
    assert list(asked(adapter, "--chat", "--prompt", "words")[0].ids) != list(plain.ids)
    code, text, told = printed("generate", adapter, "--prompt", "words", *QUIET)
    assert code == 0 and f"adapter {adapter} (DoRA, r 2) on {folder}" in told
    assert text != printed("generate", folder, "--prompt", "words", *QUIET)[1]
    again = genesis_models.load(adapter).generate("words", max_tokens=3).text
    assert printable(str(again)) == text.removesuffix("\n")

    arrays = load_file(folder / "model.safetensors")
    arrays["model.norm.weight"][0] += 1e-3
    save_file(arrays, folder / "model.safetensors")
    code, _, told = printed("generate", adapter, "--prompt", "words", *QUIET)
    assert code == 5 and f"the base model in {folder} has changed" in told
    shutil.move(folder, tmp_path / "elsewhere")
    code, _, told = printed("generate", adapter, "--prompt", "words", *QUIET)
    assert code == 5 and str(adapter) in told and str(folder) in told and "--base FOLDER" in told
