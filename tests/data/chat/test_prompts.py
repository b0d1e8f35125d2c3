"""`ChatPrompts`: the prompt before an answer has the ids that training has there, and special tokens stay text."""

from __future__ import annotations

import numpy as np
import pytest

from genesis.data.chat import ChatEncoder, ChatPrompts, ChatTemplate
from genesis.data.chat.template import CHATML
from genesis.data.records import Conversation, Document, record_text
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError, ModelError
from tests.data.chat.golden import template

SAID = ["Hi there", "the <|im_end|> text, and <|im_start|>system", "Why?\n", "Ünïcode 漢字", "  spaces  "]
NAMES = ("chatml", "qwen2_5", "qwen3", "llama3_2")


def of(name: str, tokenizer: Tokenizer, args: dict[str, object] | None = None) -> ChatTemplate:
    return ChatTemplate.chatml(tokenizer, args) if name == CHATML else template(name, args or {})


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_training(name: str, qwen: Tokenizer, llama: Tokenizer) -> None:
    tokenizer = llama if name == "llama3_2" else qwen
    text = of(name, tokenizer)
    with ChatPrompts(tokenizer, text) as prompts, ChatEncoder(tokenizer, text, loss="last") as encoder:
        assert prompts.end_of_turn_ids == encoder.end_of_turn_ids
        for count in (1, 3, 5):
            roles = ("user", "assistant")
            messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(SAID[:count])]
            answered = Conversation((*messages, {"role": "assistant", "content": "Yes."}))
            [[sample]] = encoder.encode([Document(record_text(answered), "f", 1, answered)])  # type: ignore[misc]
            before = int(np.flatnonzero(sample.is_target)[0])
            assert prompts.encode(messages) == sample.ids[:before].tolist()


def test_arguments_are_those_of_the_template(qwen: Tokenizer) -> None:
    message = [{"role": "user", "content": "Why?"}]
    found = []
    for args in ({}, {"enable_thinking": False}):
        with ChatPrompts(qwen, of("qwen3", qwen, args)) as prompts:
            found.append(qwen.decode(prompts.encode(message), skip_special=False))
    assert found[1] == found[0] + "<think>\n\n</think>\n\n"


def test_what_cannot_be_rendered_says_where(qwen: Tokenizer) -> None:
    with ChatPrompts(qwen, ChatTemplate.from_text("{{ raise_exception('no ' + messages[0].role) }}")) as prompts:
        assert prompts.end_of_turn_ids == ()
        with pytest.raises(DataError, match="no user") as caught:
            prompts.encode([{"role": "user", "content": "a"}], where="p:3")
        assert caught.value.where == "p:3"
    with ChatPrompts(qwen, of("chatml", qwen)) as prompts:
        with pytest.raises(DataError, match="half a surrogate pair"):
            prompts.encode([{"role": "user", "content": "\ud800"}])
        assert prompts.encode([{"role": "user", "content": "a"}])
    with pytest.raises(ModelError, match="the chat template cannot be used"):
        ChatPrompts(qwen, ChatTemplate.from_text("{% for %}"))


def test_a_process_that_cannot_start_is_no_error_of_the_data(qwen: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatPrompts(qwen, of("chatml", qwen)) as prompts:
        failed = ModelError("starting Python for chat templates failed: Too many open files")

        def refuse(*given: object) -> None:
            raise failed

        monkeypatch.setattr(prompts._renderer, "render_batches", refuse)
        with pytest.raises(ModelError) as caught:
            prompts.encode([{"role": "user", "content": "Why?"}])
        assert caught.value is failed
