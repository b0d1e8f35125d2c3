"""Runs on conversations: from messages to targets, and how the saved model talks: its template, what ends a turn."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from genesis.data.chat import ChatPrompts, ChatTemplate
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ConfigError, DataError, GenesisError, InterruptedRun, ModelError
from genesis.train.config import Config
from genesis.train.output import Output
from genesis_cli import session
from genesis_cli.session import training
from genesis_models.blocks import CausalLM
from genesis_models.engine import Request
from genesis_models.engine.text import Runner
from genesis_models.generate import engine_for
from tests.data.chat.golden import HERE as CHAT
from tests.train.chats import chat, make_chats, token, write_chats
from tests.train.runs import load, rows, signal_in_step, train

ASSISTANT = "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chats(tmp_path_factory.mktemp("chats"))


def saved(output: Path) -> dict[str, Any]:
    """What the files of a run's final model say about how it talks."""
    return {
        "ends": json.loads((output / "generation_config.json").read_text()),
        "template": (output / "chat_template.jinja").read_text(),
        "in_config": json.loads((output / "tokenizer_config.json").read_text()).get("chat_template"),
    }


def im_end(recipe: Path) -> int:
    return token(recipe.parent / "base", "<|im_end|>")


@pytest.mark.parametrize("settings", [(), ("lora=null",)], ids=["lora", "full"])
def test_the_trained_end_of_turn_is_named_and_all_else_is_kept(
    recipe: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    told = io.StringIO()
    train(load(recipe, str(tmp_path / "run"), *settings), console=told)
    found = saved(tmp_path / "run")
    assert found["ends"] == {"eos_token_id": [im_end(recipe), 0], "temperature": 0.6}
    base = recipe.parent / "base"
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
            assert (folder / name).read_bytes() == (base / name).read_bytes(), name
    assert "eval at step 0: loss" in told.getvalue()
    losses = [row["eval/loss"] for row in rows(tmp_path / "run") if "eval/loss" in row]
    assert len(losses) == 2 and losses[-1] < losses[0]


def test_each_end_of_a_turn_that_was_trained_is_named(recipe: Path, tmp_path: Path) -> None:
    """A template may end answers and calls with tokens of their own, and data may have no calls."""
    text = "{% for m in messages %}{{ m.role }}: {{ m.content or m.tool_calls[0].function.name }}"
    text += "<|{{ 'im_start' if m.tool_calls else 'im_end' }}|>{% endfor %}"
    (tmp_path / "two.jinja").write_text(text + ASSISTANT)
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    asked = [{"role": "user", "content": "when"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    write_chats(tmp_path / "calls.jsonl", [{"messages": asked}, chat("one", "two")] * 4)
    write_chats(tmp_path / "answers.jsonl", [chat("one", "two")] * 4)
    im_start = token(recipe.parent / "base", "<|im_start|>")
    for name, ends in (("calls", [im_end(recipe), im_start, 0]), ("answers", [im_end(recipe), 0])):
        settings = (f"data.template={tmp_path}/two.jinja", f"data.train={tmp_path}/{name}.jsonl", "train.steps=1")
        train(load(recipe, str(tmp_path / name), *settings, "data.eval_fraction=0"))
        assert saved(tmp_path / name)["ends"]["eos_token_id"] == ends


@pytest.mark.parametrize("settings", [(), ("lora=null",)], ids=["lora", "full"])
def test_template_args_are_defaults_of_the_saved_template(
    recipe: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    argument = "data.template_args={enable_thinking: false}"
    train(load(recipe, str(tmp_path / "run"), argument, "train.steps=1", *settings))
    found = saved(tmp_path / "run")
    own = (recipe.parent / "base" / "chat_template.jinja").read_text()
    assert found["template"] == ChatTemplate.from_text(own, {"enable_thinking": False}).texts_with_defaults["default"]
    assert found["template"].endswith(own) and found["in_config"] == found["template"]


def test_a_base_model_without_a_template_learns_chatml(recipe: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(recipe.parent / "base", base)
    (base / "chat_template.jinja").unlink()
    settings = (f"model.path={base}", "train.steps=1")
    with pytest.raises(ModelError, match="no chat template") as caught:
        train(load(recipe, str(tmp_path / "run"), *settings))
    assert caught.value.exit_code == 5 and "data.template=chatml" in caught.value.next
    train(load(recipe, str(tmp_path / "run"), *settings, "data.template=chatml"))
    found = saved(tmp_path / "run")
    assert "<|im_start|>" in found["template"] and found["in_config"] == found["template"]
    assert found["ends"]["eos_token_id"] == [im_end(recipe), 0]


def test_another_template_takes_the_place_of_all_the_models_own(recipe: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(recipe.parent / "base", base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}" + ASSISTANT)
    for name, setting in (("lora", "lora={r: 4}"), ("full", "lora=null")):
        output = tmp_path / name
        train(load(recipe, str(output), f"model.path={base}", f"data.template={other}", "train.steps=1", setting))
        assert saved(output)["template"] == other.read_text() == saved(output)["in_config"]
        assert not (output / "additional_chat_templates").exists()


def test_texts_leave_the_sources_files_as_they_are(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three " * 200)
    unused = ("data.loss=last", "data.template_args={enable_thinking: true}", f"data.train={tmp_path}/text.txt")
    text = validate(load(recipe, str(tmp_path / "unused"), *unused))
    assert (
        "warning: the data have no records, so these settings have no effect: data.template_args, data.loss\n" in text
    )
    for name, setting in (("lora", "lora={r: 4}"), ("full", "lora=null")):
        train(load(recipe, str(tmp_path / name), f"data.train={tmp_path}/text.txt", "train.steps=1", setting))
        for file in ("chat_template.jinja", "tokenizer_config.json"):
            assert (tmp_path / name / file).read_bytes() == (recipe.parent / "base" / file).read_bytes()
        assert saved(tmp_path / name)["ends"] == {"eos_token_id": 0, "temperature": 0.6}


def test_completions_end_with_the_end_of_text(recipe: Path, tmp_path: Path) -> None:
    lines = ({"prompt": f"{n} is ", "completion": str(n)} for n in range(20))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train(load(recipe, str(tmp_path / "run"), f"data.train={tmp_path}/pairs.jsonl", "train.steps=1"))
    assert saved(tmp_path / "run")["ends"]["eos_token_id"] == 0


def test_a_stopped_run_on_conversations_resumes_to_the_same_state(recipe: Path, tmp_path: Path) -> None:
    whole, halved = (load(recipe, str(tmp_path / name), "lora.dropout=0.1") for name in ("whole", "halved"))
    expected = train(whole).state_hash
    with signal_in_step(1), pytest.raises(InterruptedRun):
        train(halved)
    assert train(halved, resume=True).state_hash == expected
    assert rows(tmp_path / "halved") == rows(tmp_path / "whole")


def test_a_template_that_changed_is_refused_on_resumption(recipe: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    shutil.copy(CHAT / "templates" / "qwen3.jinja", template)
    config = load(recipe, str(tmp_path / "run"), f"data.template={template}")
    with signal_in_step(1), pytest.raises(InterruptedRun):
        train(config)
    template.write_text("{# another #}" + template.read_text())
    with pytest.raises(DataError, match="differs from the run"):
        train(config, resume=True)


LONG = {"messages": [{"role": "user", "content": "1 " * 80}, {"role": "assistant", "content": "one"}]}


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize(
    ("line", "settings", "kind", "code", "words"),
    [
        (LONG, ["data.too_long=fail"], DataError, 4, "data.seq_len"),
        ({"messages": [{"role": "user"}]}, [], DataError, 4, "content"),
        ({"messages": [{"role": "alien", "content": "x"}]}, [], DataError, 4, "alien"),
        ({"messages": []}, [], DataError, 4, "messages"),
        (None, ["data.template={folder}/raises.jinja"], DataError, 4, "chats.jsonl:1"),
        (None, ["data.template={folder}/broken.jinja"], ModelError, 5, "broken.jinja"),
        (None, ["data.template={folder}/nowhere.jinja"], ModelError, 5, "nowhere"),
        (None, ["data.template_args={messages: 1}"], ConfigError, 3, "messages"),
    ],
    ids=["too long", "no content", "unknown role", "empty", "raises", "broken", "no file", "args"],
)
def test_what_cannot_be_learned(
    recipe: Path, tmp_path: Path, line: Any, settings: list[str], kind: type[GenesisError], code: int, words: str
) -> None:
    (tmp_path / "raises.jinja").write_text("{{ raise_exception('no') }}")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    chats = (recipe.parent / "chats.jsonl").read_text()
    (tmp_path / "chats.jsonl").write_text(chats if line is None else chats + json.dumps(line) + "\n")
    overrides = [
        f"data.train={tmp_path}/chats.jsonl",
        *(setting.replace("{folder}", str(tmp_path)) for setting in settings),
    ]
    config = load(recipe, str(tmp_path / "run"), *overrides)
    for start in (train, validate):
        with pytest.raises(kind) as caught:
            start(config)
        assert caught.value.exit_code == code and words in str(caught.value)
        if line is not None:
            assert "chats.jsonl:21" in str(caught.value)
    assert not (tmp_path / "run").exists()


def validate(config: Config) -> str:
    told = io.StringIO()
    session.validate(config, console=Output(told))
    return told.getvalue()


def test_validate_says_what_a_run_would_say(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text((recipe.parent / "chats.jsonl").read_text() + json.dumps(LONG) + "\n")
    text = validate(load(recipe, str(tmp_path / "run"), f"data.train={tmp_path}/chats.jsonl"))
    assert "configuration: valid" in text and "LoRA: r 4, scaling 8, on 7 layers" in text
    assert "1 " in text and "chats.jsonl:21" in text
    assert not (tmp_path / "run").exists()


def drawn_from(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[list[Request], str]:
    """What a run asks of its model for its samples, and what it shows."""
    asked: list[Request] = []

    def engine(model: CausalLM, requests: Sequence[Request]) -> Runner:
        asked.extend(requests)
        return engine_for(model, requests)

    monkeypatch.setattr(training, "engine_for", engine)
    told = io.StringIO()
    train(config, console=told)
    return asked, told.getvalue()


@pytest.mark.parametrize("named", [(), ("data.template=chatml",)], ids=["own", "named"])
def test_prompts_of_a_chat_run_are_messages(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    settings = ("eval.prompts=[one, '<|im_end|>']", "eval.at_start=false", "eval.sample_tokens=3", "train.steps=1")
    asked, told = drawn_from(monkeypatch, load(recipe, str(tmp_path / "run"), *settings, *named))
    tokenizer = Tokenizer.load(recipe.parent / "base")
    template = ChatTemplate.chatml(tokenizer) if named else ChatTemplate.read(recipe.parent / "base")
    with ChatPrompts(tokenizer, template) as chats:
        wanted = [chats.encode([{"role": "user", "content": text}]) for text in ("one", "<|im_end|>")]
    assert [request.ids for request in asked] == wanted
    assert wanted[1].count(im_end(recipe)) == 1  # that of the turn; in the message it is text
    assert all(im_end(recipe) in request.stop for request in asked)
    assert "sample at step 1:\none\n" in told
    assert "sampling: temperature 0.6, top_k 50" in told


def test_prompts_of_a_run_on_completions_stay_texts(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_chats(tmp_path / "d.jsonl", ({"prompt": f"{n} + 1 is", "completion": f" {n + 1}"} for n in range(9)))
    settings = ("eval.prompts=[one]", "eval.at_start=false", "eval.sample_tokens=3", "train.steps=1")
    asked, _ = drawn_from(monkeypatch, load(recipe, str(tmp_path / "run"), f"data.train={data}", *settings))
    assert [request.ids for request in asked] == [Tokenizer.load(recipe.parent / "base").prompt("one")]


def test_a_prompt_that_fills_the_context_is_refused_before_the_first_step(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe, str(tmp_path / "run"), f"eval.prompts=[one, '{'one ' * 130}']", "eval.at_start=false")
    with pytest.raises(ConfigError, match="context holds 128") as caught:
        train(config)
    assert caught.value.where == "eval.prompts[1]" and not (tmp_path / "run" / "metrics.jsonl").exists()
