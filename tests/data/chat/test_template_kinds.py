"""What public templates do that ours do not: small templates of their structure, and what is learned from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from genesis.data.chat import ChatEncoder, ChatPrompts, ChatTemplate, Loss, Sample
from genesis.data.chat.template import template_variables
from genesis.data.chat.turns import remarks
from genesis.data.documents import index_documents
from genesis.data.record_formats import read_messages
from genesis.data.records import Conversation, Defect, Document, Position, Remark, record_text
from genesis.data.tokenize import tokenize
from genesis.data.tokenizer import Tokenizer
from genesis.errors import DataError
from genesis.files.cache import Cache
from tests.data.chat.conversations import SYSTEM, WEATHER, assistant, call, tool, user
from tests.data.chat.golden import golden, pairs
from tests.data.helpers import Documents
from tests.data.make_fixtures import folder_of

HEAD = "<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

TEMPLATES = {
    # Every message, its keys as they come; calls as JSON.
    "plain": "{% for m in messages %}" + HEAD + "{{ m.content if m.content is defined else 'absent' }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}" + END + "{% endfor %}" + ASK,
    # DeepSeek-R1: the prompt opens the reasoning, and renders leave it out.
    "opening": "{% for m in messages %}" + HEAD + "{{ m.content.split('</think>')[-1] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    # Mistral v0.3: the last message gets the system text, if it is the user's.
    "moved": "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
    "{% if m.role == 'user' %}<|im_start|>{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}"
    "{{ '\n\n' }}{% endif %}{{ m.content }}<|object_ref_start|>{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}",
    # SmolLM2: a system message of its own, where the first message is none.
    "default": "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind." + END
    + "{% endif %}" + HEAD + "{{ m.content }}" + END + "{% endfor %}" + ASK,
    # GLM-4: the next message's role ends a turn.
    "followed": "{% for m in messages %}{{ {'user': '<|box_start|>', 'tool': '<|box_end|>'}[m.role]"
    " or '<|im_start|>' }}"
    "\n{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>\n{% endif %}",
    # DeepSeek-V3: arguments of calls are joined as a string.
    "joined": "{% for m in messages %}" + HEAD + "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' "
    "+ c.function.arguments }}{% else %}{{ m.content }}{% endfor %}" + END + "{% endfor %}" + ASK,
    # GLM and Qwen3-Coder: arguments of calls are an object.
    "items": "{% for m in messages %}" + HEAD + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in "
    "c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% else %}{{ m.content }}{% endfor %}" + END
    + "{% endfor %}" + ASK,
    # Qwen3's first version: content is a text. DeepSeek-R1: it is null beside calls.
    "text": "{% for m in messages %}" + HEAD + "{{ m.content + (m.tool_calls | tojson if m.tool_calls else '') }}" + END
    + "{% endfor %}" + ASK,
    "null": "{% for m in messages %}" + HEAD + "{% if m.content is none %}{{ m.tool_calls | tojson }}{% else %}"
    "{{ '' + m.content }}{% endif %}" + END + "{% endfor %}" + ASK,
    # Llama 3.2 Vision: content is a list of parts, or a string.
    "parts": "{% for m in messages %}" + HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
    "m.content %}{{ p.text | trim }};{% endfor %}{% endif %}" + END + "{% endfor %}" + ASK,
    # Two answers in a row are one.
    "merged": "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    " {{ m.content }}{% else %}{{ '' if loop.first else '<|im_end|>\n' }}" + HEAD + "{{ m.content }}{% endif %}"
    "{% endfor %}<|im_end|>\n" + ASK,
}  # fmt: skip

Encoders = Callable[..., ChatEncoder]


@pytest.fixture(scope="module")
def encoder(qwen: Tokenizer) -> Iterator[Encoders]:
    """`encoder(name, loss)`: of one of the templates above."""
    made: dict[tuple[str, str], ChatEncoder] = {}

    def get(name: str, loss: Loss = "all_assistant") -> ChatEncoder:
        if (name, loss) not in made:
            template = ChatTemplate.from_text(TEMPLATES[name], where=f"{name}.jinja")
            made[name, loss] = ChatEncoder(qwen, template, loss=loss)
        return made[name, loss]

    yield get
    for each in made.values():
        each.close()


def document(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Document:
    """As the readers give it, which a record of the data goes through."""
    record = Conversation(read_messages(messages, Position("chats.jsonl", 7)), None if tools is None else tuple(tools))
    return Document(record_text(record), "chats.jsonl", 7, record)


def texts(tokenizer: Tokenizer, samples: list[Sample]) -> list[tuple[str, str]]:
    """Prompts and targets."""
    decoded = [[tokenizer.decode(ids, skip_special=False) for ids in pair] for pair in pairs(samples)]
    return [(prompt, target) for prompt, target in decoded]


def learned(encoder: ChatEncoder, tokenizer: Tokenizer, *given: Any) -> tuple[list[tuple[str, str]], list[Any]]:
    """Prompts and targets of a conversation, and the notes on it."""
    [found] = encoder.encode([document(*given)])
    assert isinstance(found, list), found
    return texts(tokenizer, found), [note for sample in found for note in sample.notes]


QUOTED = "calls have a string as arguments, which the template writes in quotes: make it an object"
CALLED = [user("Bern?"), assistant("", tool_calls=[call({"city": "Bern"})]), tool("warm"), assistant("Warm.")]


@pytest.mark.parametrize("content", [None, "absent"])
def test_null_content_is_absent_in_every_way_of_rendering(
    content: str | None, encoder: Encoders, qwen: Tokenizer
) -> None:
    messages = [
        user("Bern?"),
        {"role": "assistant", "content": None, "tool_calls": [call({})]},
        tool("t"),
        assistant("A"),
    ]
    if content:
        del messages[1]["content"]
    found, _ = learned(encoder("plain"), qwen, messages, [WEATHER])
    assert found[0][1].startswith("absent[{") and "None" not in found[1][0]
    with ChatPrompts(qwen, ChatTemplate.from_text(TEMPLATES["plain"])) as prompts:
        for given in (messages[:3], Conversation(read_messages(messages[:3], Position("f", 1)))):
            assert qwen.decode(prompts.encode(given), skip_special=False) == found[1][0]


def test_reasoning_may_stand_alone() -> None:
    [message] = read_messages([{"role": "assistant", "content": None, "thinking": "r"}], Position("f", 1))
    assert message["content"] is None
    for message in ({"role": "assistant", "content": None}, {"role": "user", "thinking": "r"}):
        with pytest.raises(Defect, match="content is missing or null"):
            read_messages([message], Position("f", 1))


class TestForms:
    """A template sees what transformers gives it; another form only where it cannot read that."""

    STRING = '{"city":  "Bern"}'

    @pytest.mark.parametrize(
        "name, arguments, expected",
        [
            ("plain", STRING, json.dumps(STRING)),
            ("plain", {"city": "Bern"}, '{"city": "Bern"}'),
            ("joined", STRING, STRING),
            ("joined", {"city": "Zürich"}, '{"city": "Zürich"}'),
            ("items", STRING, "get_weather city=Bern<"),
            ("items", {"city": "Bern"}, "get_weather city=Bern<"),
        ],
    )
    def test_arguments(self, name: str, arguments: Any, expected: str, encoder: Encoders, qwen: Tokenizer) -> None:
        messages = [user("q"), assistant("", tool_calls=[call(arguments)])]
        [(_, target)], notes = learned(encoder(name), qwen, messages, [WEATHER])
        assert expected in target
        is_quoted = name == "plain" and arguments == self.STRING
        assert [note.kind for note in notes if "tools are" not in note.kind] == [QUOTED] * is_quoted

    @pytest.mark.parametrize("name", ["text", "null"])
    def test_content_beside_calls(self, name: str, encoder: Encoders, qwen: Tokenizer) -> None:
        messages = [user("q"), {"role": "assistant", "tool_calls": [call({})]}]
        [(_, target)], _ = learned(encoder(name), qwen, messages)
        assert target.startswith('[{"type"') and target.endswith("]<|im_end|>")

    def test_arguments_that_are_no_json_are_refused(self) -> None:
        with pytest.raises(Defect, match="not JSON") as error:
            read_messages([assistant("", tool_calls=[call("{")])], Position("f", 1))
        assert error.value.field == "messages[0].tool_calls[0].function.arguments"

    @pytest.mark.parametrize(
        "name, expected", [("parts", "One.;Two?;"), ("plain", "One. Two?"), ("opening", "One. Two?")]
    )
    def test_lists_of_parts(self, name: str, expected: str, encoder: Encoders, qwen: Tokenizer) -> None:
        """Templates that would write them as Python does, or raise, get their texts joined."""
        parts = [{"type": "text", "text": text} for text in ("One.", " Two?")]
        [(prompt, target)], _ = learned(encoder(name), qwen, [user(parts), assistant(parts)])  # type: ignore[arg-type]
        assert f"user\n{expected}<|im_end|>" in prompt and target == f"{expected}<|im_end|>"

    def test_a_template_that_refuses_all_forms_says_why_it_refuses_the_first(self, qwen: Tokenizer) -> None:
        template = ChatTemplate.from_text(TEMPLATES["joined"].replace("c.function.name", "c.function.nome"))
        with ChatEncoder(qwen, template, loss="last") as encoder:
            [found] = encoder.encode([document(CALLED)])
        assert isinstance(found, Defect) and "nome" in found.what


class TestPrompts:
    """Prompts that renders do not begin with."""

    def test_what_the_template_adds_to_prompts_alone(self, encoder: Encoders, qwen: Tokenizer) -> None:
        messages = [user("a"), assistant("<b>A</b>"), user("b"), assistant("<think>\nHm.\n</think>B")]
        found, notes = learned(encoder("opening"), qwen, messages)
        assert [target for _, target in found] == ["<b>A</b><|im_end|>", "B<|im_end|>"]
        assert all(prompt.endswith("<|im_start|>assistant\n") for prompt, _ in found)
        kinds = [note.kind for note in notes]
        assert sum("<think>" in kind for kind in kinds) == 2 and sum("have reasoning" in kind for kind in kinds) == 1
        assert encoder("opening").end_of_turn_ids == (qwen.token_id("<|im_end|>"),)

    def test_a_system_text_that_moves(self, encoder: Encoders, qwen: Tokenizer) -> None:
        """The prompt is what a server sends; the render of the whole leaves the system message out."""
        messages = [SYSTEM, user("You a?"), assistant("A"), user("b"), assistant("B")]
        found, notes = learned(encoder("moved"), qwen, messages)
        text = SYSTEM["content"]
        assert found == [
            (f"<|im_start|>{text}\n\nYou a?<|object_ref_start|>", "A<|im_end|>"),
            (
                f"<|im_start|>You a?<|object_ref_start|>A<|im_end|><|im_start|>{text}\n\nb<|object_ref_start|>",
                "B<|im_end|>",
            ),
        ]
        assert [type(note) for note in notes] == [Remark] * 2
        _, notes = learned(encoder("moved", "all"), qwen, messages)
        assert [note.kind for note in notes] == ["system messages are left out by the template"]

    def test_an_answer_that_repeats_the_question_is_not_taken_apart(self, encoder: Encoders, qwen: Tokenizer) -> None:
        messages = [SYSTEM, user("b"), assistant("A"), user("b"), assistant("b")]
        found, _ = learned(encoder("moved"), qwen, messages)
        assert [target for _, target in found] == ["A<|im_end|>", "b<|im_end|>"]

    @pytest.mark.parametrize("name", ["default", "plain", "opening"])
    @pytest.mark.parametrize("first", [[], [SYSTEM]])
    def test_an_assistant_that_speaks_first(
        self, name: str, first: list[Any], encoder: Encoders, qwen: Tokenizer
    ) -> None:
        messages = [*first, assistant("Welcome!"), user("a"), assistant("A")]
        found, notes = learned(encoder(name), qwen, messages)
        expected = ["Welcome!<|im_end|>"] * bool(first) + ["A<|im_end|>"]
        assert [target for _, target in found] == expected and "Welcome!" in found[-1][0]
        assert sum("no prompt" in note.kind for note in notes) == (not first)

    def test_the_next_message_ends_a_turn(self, encoder: Encoders, qwen: Tokenizer) -> None:
        found, _ = learned(encoder("followed"), qwen, CALLED, [WEATHER])
        assert [target for _, target in found] == ["get_weather<|box_end|>", "Warm.<|box_start|>"]
        assert found[1][0].startswith(found[0][0] + found[0][1])
        [sample] = encoder("followed", "all").encode([document(CALLED, [WEATHER])])[0]  # type: ignore[misc]
        assert qwen.decode(sample.ids, skip_special=False) == "".join(found[1]) and sample.is_target[1:].all()
        assert set(encoder("followed").end_of_turn_ids) == {
            qwen.token_id("<|box_start|>"),
            qwen.token_id("<|box_end|>"),
        }

    def test_the_error_names_template_place_and_texts(self, encoder: Encoders) -> None:
        [found] = encoder("merged").encode([document([user("a"), assistant("One."), assistant("Two.")])])
        assert isinstance(found, list)
        [note] = [note for note in found[0].notes if isinstance(note, Defect)]
        for part in ("merged.jinja", "messages[2]", "One.", "<|im_end|>", " Two."):
            assert part in note.what
        assert "join consecutive messages" in note.next and note.where == "chats.jsonl:7"

    def test_a_prompt_that_asks_for_reasoning_names_the_switch(self, qwen: Tokenizer) -> None:
        text = (
            "{% for m in messages %}" + HEAD + "{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content }}" + END
        )
        text += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ '</think>' if enable_thinking is "
        template = ChatTemplate.from_text(text + "defined and not enable_thinking else '<think>' }}{% endif %}")
        with ChatEncoder(qwen, template, loss="last") as encoder:
            [found] = encoder.encode([document([user("a"), assistant("A")])])
        assert isinstance(found, Defect) and "data.template_args={enable_thinking: false}" in found.next


class TestNotes:
    @pytest.mark.parametrize("loss", ["all_assistant", "last", "all"])
    def test_what_a_template_drops_is_counted_whatever_is_learned(
        self, loss: Loss, encoder: Encoders, qwen: Tokenizer
    ) -> None:
        messages = [
            user("a"),
            assistant("A", reasoning_content="because"),
            user("b"),
            assistant("B", thinking="so 'it' is"),
        ]
        _, notes = learned(encoder("plain", loss), qwen, messages, [WEATHER])
        kinds = sorted(note.kind for note in notes)
        assert (
            kinds
            == ["tools are left out by the template"] + ["turns have reasoning that is left out by the template"] * 2
        )

    def test_nothing_is_said_where_all_is_there(self, qwen: Tokenizer, encoders: Encoders) -> None:
        """Also where lines are trimmed, and quotes escaped."""
        messages = [{**SYSTEM, "content": " x "}, user("a\n"), assistant("A", reasoning_content="\nwhy\n"), user("b"),
                    assistant("B", tool_calls=[call({})]), tool('{"a": "b"}'), assistant("C")]  # fmt: skip
        _, notes = learned(encoders("qwen3"), qwen, messages, [WEATHER])
        assert notes == []

    def test_a_text_that_the_template_writes_as_json_is_there(self) -> None:
        text, other = "caf\u00e9\nau lait", "th\u00e9\nvert"
        shown = ["<tool>" + json.dumps({"said": text}, ensure_ascii=False) + "</tool>"]
        assert [note.kind for note in remarks([tool(text)], None, shown)] == []
        [note] = remarks([tool(text), tool(other)], None, shown)
        assert note.kind == "tool messages are left out by the template" and note.what.startswith("messages[1]")

    def test_skip_drops_the_turn_and_not_the_conversation(
        self, encoder: Encoders, qwen: Tokenizer, tmp_path: Path
    ) -> None:
        given = document([user("a"), assistant("One."), assistant("Two."), user("b"), assistant("B")])
        for on_error in "skip", "skip", "fail":
            corpus: Any = Documents(given)
            index = index_documents(corpus.documents())
            how: dict[str, Any] = {"encoder": encoder("merged"), "on_error": on_error}
            if on_error == "fail":
                with pytest.raises(DataError, match=r"messages\[2\]"):
                    tokenize(corpus, index, qwen, Cache(tmp_path), lambda *_: None, **how)
                continue
            found = tokenize(corpus, index, qwen, Cache(tmp_path), lambda *_: None, **how)
            assert found.notes.counts == {"turns are read but not learned: template": 1} and not found.left_out.counts
            [example] = found.notes.examples.values()
            assert (
                example.startswith("chats.jsonl:7: ") and found.tokens.num_targets == len(qwen.encode("One.")) + 1 + 2
            )
            assert found.tokens.num_documents == 1

    def test_turns_before_one_that_cannot_be_rendered_are_learned(self, qwen: Tokenizer) -> None:
        text = TEMPLATES["plain"].replace(HEAD, HEAD + "{{ raise_exception('bad') if m.content == 'bad' }}")
        messages = [user("a"), assistant("A"), user("b"), assistant("B"), user("bad"), assistant("C"), assistant("D")]
        with ChatEncoder(qwen, ChatTemplate.from_text(text), loss="all_assistant") as encoder:
            found, notes = learned(encoder, qwen, messages)
            [defect] = encoder.encode([document(messages[4:])])
        assert [target for _, target in found] == ["A<|im_end|>", "B<|im_end|>"]
        assert [type(note) for note in notes] == [Defect] * 2 and all("bad" in note.what for note in notes)
        assert isinstance(defect, Defect) and defect.kind == "template" and "bad" in defect.what


class TestVariables:
    def variables(self, folder: Path, config: dict[str, Any], mapping: dict[str, Any] | None = None) -> dict[str, str]:
        found = golden()["tokenizers"]["qwen"]
        path = folder_of(folder, found["content"], config)
        if mapping is not None:
            (path / "special_tokens_map.json").write_text(json.dumps(mapping))
        return dict(template_variables(Tokenizer.load(path)))

    def test_every_token_that_the_tokenizer_names(self, tmp_path: Path) -> None:
        config = {
            "bos_token": None,
            "eos_token": {"content": "<|im_end|>", "special": True},
            "unk_token": "<|endoftext|>",
            "image_token": "<|image_pad|>",
            "add_bos_token": False,
            "extra_special_tokens": {"video_token": "<|video_pad|>", "messages": "<|vision_pad|>"},
        }
        expected = {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "image_token": "<|image_pad|>"}
        assert self.variables(tmp_path, config) == expected | {"video_token": "<|video_pad|>"}

    @pytest.mark.parametrize("decoder, unk", [({}, "<|im_start|>"), ({"added_tokens_decoder": {}}, "<|endoftext|>")])
    def test_a_map_goes_before_an_old_config(self, decoder: dict[str, Any], unk: str, tmp_path: Path) -> None:
        config = {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", **decoder}
        assert self.variables(tmp_path, config, {"unk_token": "<|im_start|>"})["unk_token"] == unk
