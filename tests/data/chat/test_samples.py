"""Samples: which tokens of a document are targets, under each loss, and which documents have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from genesis.data.chat import ChatEncoder, ChatTemplate, Loss, Sample
from genesis.data.chat.marks import Marked, TextParts, text_ids
from genesis.data.chat.renderer import Limits
from genesis.data.chat.samples import ChatPrompts
from genesis.data.records import Completion, Conversation, Defect, Document, record_text
from genesis.data.tokenizer import Tokenizer
from genesis.errors import ModelError
from genesis_models.chat_files import chat_files
from tests.data.chat.conftest import Encoders
from tests.data.chat.conversations import CONVERSATIONS, SYSTEM, WEATHER, assistant, call, tool, user
from tests.data.chat.golden import document, golden, pairs, template
from tests.data.make_fixtures import FIXTURE, folder_of

TURNS = [SYSTEM, user("a"), assistant("A"), user("b"), assistant("B", tool_calls=[call({})]), tool("t"), assistant("C")]


def samples_of(encoder: ChatEncoder, *documents: Document) -> list[Sample]:
    """The samples of documents that have some."""
    found = encoder.encode(documents)
    assert all(isinstance(samples, list) for samples in found), found
    return [sample for samples in found if isinstance(samples, list) for sample in samples]


def targets(tokenizer: Tokenizer, samples: list[Sample]) -> list[str]:
    return [tokenizer.decode(target, skip_special=False) for _, target in pairs(samples)]


def defect_of(encoder: ChatEncoder, messages: list[dict[str, Any]], tools: Any = None) -> Defect:
    [found] = encoder.encode([document(messages, tools)])
    assert isinstance(found, Defect)
    return found


class TestLoss:
    @pytest.mark.parametrize("loss, expected", [("all_assistant", "A B C"), ("last", "C"), ("completion", "B C")])
    def test_of_a_conversation(self, loss: Loss, expected: str, qwen: Tokenizer, encoders: Encoders) -> None:
        encoder = encoders("qwen2_5", loss)
        [sample] = samples_of(encoder, document(TURNS, [WEATHER]))
        said = targets(qwen, [sample])
        assert [text[0] for text in said] == expected.split() and all(text.endswith("<|im_end|>") for text in said)
        assert sample.target_bytes == sum(len(text.removesuffix("<|im_end|>")) for text in said)
        assert qwen.decode(sample.ids, skip_special=False).endswith("<|im_start|>assistant\nC<|im_end|>")

    @pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
    def test_a_turn_that_says_so_is_read_and_not_learned(
        self, mark: dict[str, Any], qwen: Tokenizer, encoders: Encoders
    ) -> None:
        chat = [user("a"), {**assistant("A"), **mark}, {**user("b"), "weight": 0}, {**assistant("B"), "weight": 1}]
        [sample] = samples_of(encoders("qwen2_5"), document(chat))
        assert targets(qwen, [sample]) == ["B<|im_end|>"] and "A<|im_end|>" in qwen.decode(
            sample.ids, skip_special=False
        )
        assert defect_of(encoders("qwen2_5", "last"), chat[:2]).kind == "no target"

    def test_completion_of_a_record_with_a_prompt(self, qwen: Tokenizer, encoders: Encoders) -> None:
        encoder = encoders("qwen2_5", "completion")
        [sample] = samples_of(encoder, document(TURNS, [WEATHER], prompt=2))
        assert [text[0] for text in targets(qwen, [sample])] == ["A", "B", "C"]
        assert defect_of(encoder, [*TURNS, user("d")]).kind == "no target"

    def test_all_is_every_token_but_the_first(self, qwen: Tokenizer, encoders: Encoders) -> None:
        messages = [*TURNS, user("bye")]
        [sample] = samples_of(encoders("qwen2_5", "all"), document(messages, [WEATHER]))
        assert not sample.is_target[0] and sample.is_target[1:].all()
        text = qwen.decode(sample.ids, skip_special=False)
        assert text.endswith("C<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n")
        assert sample.target_bytes == len(text.replace("<|im_end|>", "").replace("<|im_start|>", "").encode())
        [other] = samples_of(encoders("qwen3", "all"), document([user("a"), assistant("A"), user("b"), assistant("B")]))
        assert other.is_target[1:].all() and "user\na<|im_end|>" in qwen.decode(other.ids, skip_special=False)

    def test_what_follows_the_last_target_is_left_out(self, encoders: Encoders) -> None:
        encoder = encoders("qwen3")
        [one] = samples_of(encoder, document([user("a"), assistant("A")]))
        [other] = samples_of(encoder, document([user("a"), assistant("A"), user("b")]))
        assert one.ids.tolist() == other.ids.tolist()

    def test_a_first_turn_that_nobody_asked_for_is_context(self, qwen: Tokenizer, encoders: Encoders) -> None:
        messages = [assistant("Welcome!"), user("a"), assistant("A")]
        [sample] = samples_of(encoders("qwen2_5"), document(messages))
        assert targets(qwen, [sample]) == ["A<|im_end|>"] and "Welcome!" in qwen.decode(sample.ids)
        assert "no prompt" in defect_of(encoders("qwen2_5"), messages[:1]).what


class TestOtherDocuments:
    def test_a_completion(self, qwen: Tokenizer, llama: Tokenizer) -> None:
        record = Completion("2 + 2 = <|im_end|>", "4<|eot_id|>")
        for tokenizer in (qwen, llama):
            with ChatEncoder(tokenizer, None, loss="all_assistant") as encoder:
                [sample] = samples_of(encoder, Document(record_text(record), "f", 1, record))
            before = [*tokenizer.start_ids, *tokenizer.encode(record.prompt)]
            after = [*tokenizer.encode(record.completion), *tokenizer.document_end_ids]
            assert pairs([sample]) == [(before, after)] and sample.target_bytes == len(record.completion)
            assert encoder.end_of_turn_ids == ()

    @pytest.mark.parametrize("record", [Completion("", "4"), Completion("a", ""), Completion("", "")])
    def test_empty_sides(self, record: Completion, qwen: Tokenizer) -> None:
        with ChatEncoder(qwen, None, loss="last") as encoder:
            [found] = encoder.encode([Document(record_text(record), "f", 1, record)])
        if record == Completion("", ""):
            assert isinstance(found, Defect) and found.kind == "no target"
        else:
            assert isinstance(found, list)
            [sample] = found
            assert sample.is_target.tolist() == [False, True] and sample.target_bytes == 0

    @pytest.mark.parametrize("loss", ["all", "last"])
    def test_a_text_is_target_but_for_its_first_token(self, loss: Loss, qwen: Tokenizer, llama: Tokenizer) -> None:
        for tokenizer, first in ((qwen, len("H")), (llama, 0)):
            with ChatEncoder(tokenizer, None, loss=loss) as encoder:
                [sample] = samples_of(encoder, Document("H\u00e9 <|eot_id|>", "f"))
            ids = [*tokenizer.start_ids, *tokenizer.encode("H\u00e9 <|eot_id|>"), *tokenizer.document_end_ids]
            assert sample.ids.tolist() == ids and sample.is_target.tolist() == [False] + [True] * (len(ids) - 1)
            assert sample.target_bytes == len("H\u00e9 <|eot_id|>".encode()) - first
            assert sample.ids.dtype == np.int64 and sample.is_target.dtype == np.bool_

    def test_all_of_a_completion(self, qwen: Tokenizer) -> None:
        record = Completion("ab", "cd")
        with ChatEncoder(qwen, None, loss="all") as encoder:
            [sample] = samples_of(encoder, Document(record_text(record), "f", 1, record))
        assert sample.is_target[1:].all() and not sample.is_target[0]
        assert sample.target_bytes == 4 - qwen.text_bytes(int(sample.ids[0]))

    def test_conversations_need_a_template(self, qwen: Tokenizer) -> None:
        with ChatEncoder(qwen, None, loss="last") as encoder, pytest.raises(ModelError, match="no chat template"):
            encoder.encode([document([user("a"), assistant("b")])])


class TestDefects:
    def test_name_the_document(self, encoders: Encoders) -> None:
        found = defect_of(encoders("qwen2_5"), [user("a")])
        assert (found.kind, found.where) == ("no target", "chats.jsonl:7") and "data.on_error=skip" in found.next

    def test_a_template_that_raises(self, encoders: Encoders) -> None:
        found = defect_of(encoders("qwen3_5_think"), [user("a"), SYSTEM, assistant("b")])
        assert found.kind == "template" and "System message must be at the beginning." in found.what
        assert found.exit_code == 4 and found.where == "chats.jsonl:7"

    def test_a_template_that_loops(self, qwen: Tokenizer) -> None:
        text = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
        text += "{% endfor %}{% endfor %}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
        text += "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
        template = ChatTemplate.from_text(text)
        with ChatEncoder(qwen, template, loss="last", limits=Limits(cpu_s=0.1)) as encoder:
            found = encoder.encode([document([user(word), assistant("x")]) for word in ("a", "loop", "b")])
        assert [type(each) for each in found] == [list, Defect, list]
        assert "more than 0.1 s of CPU time" in str(found[1])

    def test_reasoning_that_the_prompt_rules_out(self, encoders: Encoders) -> None:
        messages = [user("a"), assistant("b", reasoning_content="r")]
        found = defect_of(encoders("qwen3", enable_thinking=False), messages)
        assert "does not begin with its prompt" in found.what and "template_args" in found.next
        assert len(samples_of(encoders("qwen3"), document(messages))) == 1

    @pytest.mark.parametrize(
        "name, message, what",
        [
            ("llama3_2", assistant("x", tool_calls=[call({})]), ""),
            ("no calls", assistant("", tool_calls=[call({})]), "leaves out the call of 'get_weather' in messages[1]"),
            ("no calls", assistant("said"), ""),
            ("no text", assistant("said"), "leaves out or changes the content of messages[1]"),
            ("qwen3", assistant("<think>why</think> because \n"), ""),
        ],
    )
    def test_what_a_template_leaves_out(
        self, name: str, message: dict[str, Any], what: str, encoders: Encoders, llama: Tokenizer
    ) -> None:
        encoder = encoders(name) if not name.startswith("no ") else None
        if encoder is None:
            text = (
                "{% for m in messages %}{{ m.role }}{{ m.content if KEEP or m.role == 'user' }}<|eot_id|>{% endfor %}"
            )
            text = text.replace("KEEP", "true" if name == "no calls" else "messages[0].content != 'q'")
            text += "{% if add_generation_prompt %}assistant{% endif %}"
            encoder = ChatEncoder(llama, ChatTemplate.from_text(text), loss="last")
        [found] = encoder.encode([document([user("q"), message])])
        assert what in (found.what if isinstance(found, Defect) else "") and isinstance(found, Defect) == bool(what)

    def test_all_of_a_render_needs_no_prompts(self, encoders: Encoders) -> None:
        messages = [user("a"), assistant("b", reasoning_content="r")]
        [sample] = samples_of(encoders("qwen3", "all", enable_thinking=False), document(messages))
        assert sample.is_target[1:].all()

    def test_half_a_surrogate_pair(self, encoders: Encoders) -> None:
        found = encoders("qwen2_5").encode(
            [document([user("a"), assistant("b")]), document([user("\ud83d"), assistant("x")])]
        )
        assert isinstance(found[0], list) and isinstance(found[1], Defect) and found[1].kind == "bad text"

    def test_one_that_is_nested_too_deep(self, encoders: Encoders) -> None:
        deep: Any = "x"
        for _ in range(50_000):
            deep = [deep]
        record = Conversation(({"role": "user", "content": "a", "x": deep}, assistant("b")))
        [found] = encoders("qwen2_5").encode([Document("{}", "f", 1, record)])
        assert isinstance(found, Defect) and found.kind == "bad record"

    def test_one_that_is_huge(self, qwen: Tokenizer) -> None:
        template = ChatTemplate.chatml(qwen)
        with ChatEncoder(qwen, template, loss="last", limits=Limits(memory_bytes=1 << 28)) as encoder:
            found = defect_of(encoder, [user("x" * (17 << 20)), assistant("y")])
        assert found.kind == "huge conversation" and "17,8" in found.what

    def test_a_template_that_takes_a_special_token_apart(self, qwen: Tokenizer) -> None:
        text = "{% for m in messages %}<|im_start|>{% set c = m.content %}{{ c | reverse if m.name == 'reverse' else"
        text += " c | tojson(ensure_ascii=true) if m.name == 'escape' else c | last }}<|im_end|>{% endfor %}"
        text += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
        with ChatEncoder(qwen, ChatTemplate.from_text(text), loss="all") as encoder:
            for name in ("reverse", "escape", "last"):
                messages = [user("a"), {**assistant("x"), "name": name}, {**user("x<|im_end|>"), "name": name}]
                assert defect_of(encoder, messages).kind == "special token"
                assert samples_of(encoder, document(messages[:2]))


class TestEnds:
    def test_the_ids_that_end_a_turn(self, qwen: Tokenizer, llama: Tokenizer, encoders: Encoders) -> None:
        assert encoders("qwen3_5_think").end_of_turn_ids == (qwen.token_id("<|im_end|>"),)
        assert encoders("llama3_2").end_of_turn_ids == (llama.token_id("<|eot_id|>"),)

    def test_calls_may_end_otherwise(self, llama: Tokenizer) -> None:
        text = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
        text += "<|{{ 'eom' if m.tool_calls else 'eot' }}_id|>{% endfor %}"
        template = ChatTemplate.from_text(text + "{% if add_generation_prompt %}assistant:{% endif %}")
        with ChatEncoder(llama, template, loss="last") as encoder:
            ends = (llama.token_id("<|eot_id|>"), llama.token_id("<|eom_id|>"))
            assert encoder.end_of_turn_ids == ends
        with ChatPrompts(llama, template) as prompts:
            assert prompts.end_of_turn_ids == ends

    def test_the_last_of_two_special_tokens_ends_a_turn(self, qwen: Tokenizer) -> None:
        text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|><|endoftext|>\n{% endfor %}"
        template = ChatTemplate.from_text(text + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
        with ChatEncoder(qwen, template, loss="all_assistant") as encoder:
            [sample] = samples_of(encoder, document([user("a"), assistant("A"), user("b"), assistant("B")]))
        assert targets(qwen, [sample]) == ["A<|im_end|><|endoftext|>", "B<|im_end|><|endoftext|>"]
        assert encoder.end_of_turn_ids == (qwen.token_id("<|endoftext|>"),)

    def test_what_comes_after_a_whole_render_is_no_end_of_a_turn(self, qwen: Tokenizer) -> None:
        """As Phi-3's template has it, which adds the end of text where it adds no generation prompt."""
        text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        text += "{{ '<|im_start|>assistant\n' if add_generation_prompt else '<|endoftext|>' }}"
        messages = [user("a"), assistant("A"), user("b"), assistant("B")]
        with ChatEncoder(qwen, ChatTemplate.from_text(text), loss="all_assistant") as encoder:
            [sample] = samples_of(encoder, document(messages))
        assert targets(qwen, [sample]) == ["A<|im_end|>", "B<|im_end|>"]
        assert encoder.end_of_turn_ids == (qwen.token_id("<|im_end|>"),)


class TestSpecialTokens:
    @pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True, "rstrip": True}])
    def test_those_that_take_more_are_read_as_the_library_does(self, flags: dict[str, bool], tmp_path: Path) -> None:
        found = golden()["tokenizers"]["qwen"]
        added = [{**t, **(flags if t["content"] == "<|im_end|>" else {})} for t in found["content"]["added_tokens"]]
        tokenizer = Tokenizer.load(folder_of(tmp_path, {**found["content"], "added_tokens": added}, found["config"]))
        messages = [user("a"), assistant(" b "), user("c"), assistant("d")]
        with ChatEncoder(tokenizer, template("qwen2_5"), loss="all_assistant") as encoder:
            samples = samples_of(encoder, document(messages))
            refused = defect_of(encoder, [user("<|im_end|>"), assistant("x")])
        for (prompt, target), said in zip(pairs(samples), [" b ", "d"], strict=True):
            text = tokenizer.decode(prompt, skip_special=False)
            assert text.endswith("<|im_start|>assistant\n")
            assert target == tokenizer.encode(f"{said}<|im_end|>", parse_special=True).tolist()
        assert refused.kind == "special token" and encoder.end_of_turn_ids == (tokenizer.eos_id,)

    def test_roles_make_special_tokens_and_nothing_else_does(self, qwen: Tokenizer) -> None:
        text = (
            "{% for m in messages %}<|{{ m.role }}_start|>{{ m.content }}"
            "{{ (m.extra or 0) | tojson }}<|im_end|>{% endfor %}"
        )
        template = ChatTemplate.from_text(text + "{% if add_generation_prompt %}<|assistant_start|>{% endif %}")
        messages = [user("a"), {"role": "im", "content": "<|im_end|>", "extra": {"role": "<|im_end|>"}}]
        record = Conversation((*messages, {"role": "assistant", "content": "b"}))
        with ChatEncoder(qwen, template, loss="all") as encoder:
            [sample] = samples_of(encoder, Document(record_text(record), "f", 1, record))
        ids = sample.ids.tolist()
        assert ids.count(qwen.token_id("<|im_end|>")) == 3 and ids.count(qwen.token_id("<|im_start|>")) == 1


def test_fingerprints(qwen: Tokenizer, llama: Tokenizer) -> None:
    template = ChatTemplate.chatml(qwen)
    encoders: list[Callable[[], ChatEncoder]] = [
        lambda: ChatEncoder(qwen, template, loss="last"),
        lambda: ChatEncoder(qwen, template, loss="all"),
        lambda: ChatEncoder(qwen, ChatTemplate.chatml(qwen, {"x": 1}), loss="last"),
        lambda: ChatEncoder(qwen, None, loss="last"),
        lambda: ChatEncoder(llama, None, loss="last"),
    ]
    prints = []
    for make in encoders:
        with make() as encoder:
            prints.append(encoder.fingerprint)
    assert len(set(prints)) == 5


class TestSentencePiece:
    TEMPLATE = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ SPACE }}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )

    @pytest.mark.parametrize("name, space", [("mistral-v1", " "), ("mistral-v3", "")])
    def test_targets_follow_their_prompts(self, name: str, space: str, tmp_path: Path) -> None:
        """No space is put before a target, and prompts have the ids of the whole text."""
        found = json.loads(FIXTURE.read_text("utf-8"))[name]
        tokenizer = Tokenizer.load(folder_of(tmp_path, found["content"], found["config"]))
        template = ChatTemplate.from_text(self.TEMPLATE.replace("SPACE", f"'{space}'"))
        messages = [user("test"), assistant("Hello"), user("x y"), assistant("world")]
        with ChatEncoder(tokenizer, template, loss="all_assistant") as encoder:
            samples = samples_of(encoder, document(messages))
            refused = defect_of(encoder, [user("</s>"), assistant("x")])
        asked = [f"<s>[INST] test [/INST]{space}", f"<s>[INST] test [/INST]{space}Hello</s>[INST] x y [/INST]"]
        assert [prompt for prompt, _ in pairs(samples)] == [
            tokenizer.encode(text.removesuffix(" "), parse_special=True).tolist() for text in asked
        ]
        texts = [tokenizer.token(target[0]) for _, target in pairs(samples)]
        assert [(text or "").startswith("\u2581") for text in texts] == [bool(space)] * 2
        assert refused.kind == "special token" and "cannot encode the special tokens" in refused.what


SPECIAL = ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "|>", "<", "<|endoftext|>", "<|eot_id|>", "\ue000"]
OTHERS = [
    "\n",
    " ",
    "a",
    "1",
    "<think>",
    "</think>",
    "\u00e9",
    "e\u0301",
    "\u6f22",
    "\U0001f388",
    "<tool_call>",
    "\\",
    '"',
]
CONTENTS = st.lists(st.sampled_from([*SPECIAL, *OTHERS, "{{ x }}", "\r\n"]), max_size=6).map("".join)


@given(text=CONTENTS)
@settings(max_examples=60, deadline=None)
def test_parts_have_the_ids_of_the_whole(text: str, qwen: Tokenizer, llama: Tokenizer) -> None:
    for tokenizer in (qwen, llama):
        parts = TextParts(tokenizer).parts(Marked(text), follows=False)
        assert text_ids(tokenizer, parts)(parts).tolist() == tokenizer.encode(text, parse_special=True).tolist()


@given(
    turns=st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3), name=st.sampled_from(["qwen2_5", "chatml"])
)
@settings(max_examples=40, deadline=None)
def test_what_is_said_is_what_is_learned(
    turns: list[tuple[str, str]], name: str, qwen: Tokenizer, encoders: Encoders
) -> None:
    """Whatever messages hold: targets are the assistant's texts and their ends, prompts what a server would encode."""
    encoder = encoders(name)
    messages = [message for asked, said in turns for message in (user(asked), assistant(said))]
    samples = samples_of(encoder, document(messages))
    found = sorted(pairs(samples), key=lambda pair: len(pair[0]))
    im_start, im_end = qwen.token_id("<|im_start|>"), qwen.token_id("<|im_end|>")
    assert im_start is not None and im_end is not None
    line = qwen.encode("\n").tolist()
    before = [] if name == "chatml" else [im_start, *qwen.encode(
        "system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."), im_end, *line]  # fmt: skip
    for (asked, said), (prompt, target) in zip(turns, found, strict=True):
        before += [im_start, *qwen.encode(f"user\n{asked}"), im_end, *line]
        assert prompt == [*before, im_start, *qwen.encode("assistant\n")]
        assert target == [*qwen.encode(said), im_end]
        before += [im_start, *qwen.encode(f"assistant\n{said}"), im_end, *line]
    assert sum(sample.target_bytes for sample in samples) == sum(len(said.encode()) for _, said in turns)
    assert not any(sample.is_target[0] for sample in samples)


def test_right_from_day_one_5_training_and_serving_share_one_template(qwen: Tokenizer) -> None:
    """A server that renders the saved template, and knows no arguments, sends what was trained on."""
    trained = template("qwen3", {"enable_thinking": False})
    messages = [SYSTEM, user("a"), assistant("A"), user("b"), assistant("B")]
    with ChatEncoder(qwen, trained, loss="all_assistant") as encoder:
        found = pairs(samples_of(encoder, document(messages)))
    server = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    saved = server.from_string(chat_files(trained.texts_with_defaults, {})["chat_template.jinja"].decode())
    for turn, (prompt, _) in zip((2, 4), found, strict=True):
        text = saved.render(messages=messages[:turn], add_generation_prompt=True)
        assert text.endswith("<think>\n\n</think>\n\n") and prompt == qwen.encode(text, parse_special=True).tolist()
    assert "<think>\n\n" not in saved.render(messages=messages[:2], add_generation_prompt=True, enable_thinking=True)


def test_every_turn_is_a_target_once(encoders: Encoders) -> None:
    for name in ("qwen2_5", "qwen3", "qwen3_5_think", "llama3_2"):
        encoder = encoders(name)
        for conversation in CONVERSATIONS.values():
            [found] = encoder.encode([document(*conversation)])
            if isinstance(found, list):
                turns = [message for message in conversation[0] if message["role"] == "assistant"]
                assert len(pairs(found)) == len(turns)


def test_order_and_batches_do_not_matter(encoders: Encoders) -> None:
    encoder = encoders("qwen3")
    documents = [document(*conversation) for conversation in CONVERSATIONS.values()] * 10
    together = encoder.encode(documents)
    alone = [found for each in documents[:15] for found in encoder.encode([each])] * 10
    for one, other in zip(together, alone, strict=True):
        if isinstance(one, Defect):
            assert str(one) == str(other)
        else:
            assert isinstance(other, list)
            assert [sample.ids.tolist() for sample in one] == [sample.ids.tolist() for sample in other]
            assert [sample.is_target.tolist() for sample in one] == [sample.is_target.tolist() for sample in other]
    assert encoder.encode([]) == []


@pytest.mark.parametrize("lengths", [[1] * 7, [5, 5, 1, 30, 1, 2], [40], []])
def test_documents_are_encoded_in_batches_of_bounded_size(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from genesis.data.chat import samples

    monkeypatch.setattr(samples, "_BATCH_CHARS", 10)
    monkeypatch.setattr(samples, "_BATCH_DOCUMENTS", 3)
    documents = [Document("x" * length, "a", i) for i, length in enumerate(lengths)]
    batches = list(samples._batched(documents))
    assert [each for batch in batches for each in batch] == documents
    assert all(len(batch) <= 3 and sum(len(d.text) for d in batch[:-1]) < 10 for batch in batches)
    # A batch ends only where it is full, or where the documents do.
    assert all(len(batch) == 3 or sum(len(d.text) for d in batch) >= 10 for batch in batches[:-1])
