"""Where templates are read from, and what arguments make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genesis.data.chat import ChatEncoder, ChatTemplate
from genesis.data.chat.child import Child
from genesis.data.tokenizer import Tokenizer, train_bpe
from genesis.errors import ConfigError, ModelError
from genesis_models.chat_files import chat_files
from tests.data.chat.golden import document, pairs, template

TEXT = "a'b\"c\\n%}{{ x }}\n{# é \U0001f388\x00"


def render(text: str, **variables: Any) -> str:
    child = Child({"templates": {"default": text}, "variables": variables, "cpu_s": 0.0, "output_chars": 1 << 20})
    found = child.answer({"messages": [{"role": "user", "content": "Hi"}], "tools": None, "turns": []})
    return str(found.get("whole", found.get("error")))


class TestReading:
    def test_a_file_and_each_home_in_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
        assert ChatTemplate.read(tmp_path).texts == {"default": "config"}
        named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert ChatTemplate.read(tmp_path).texts == {"default": "d", "tool_use": "t"}
        (tmp_path / "chat_template.jinja").write_text("file")
        assert ChatTemplate.read(tmp_path).texts == {"default": "file"}
        assert ChatTemplate.read(tmp_path / "chat_template.jinja").texts == {"default": "file"}

    def test_no_template_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="has no chat template") as caught:
            ChatTemplate.read(tmp_path)
        assert "data.template=chatml" in caught.value.next and caught.value.where == str(tmp_path)

    def test_what_is_saved_is_read_again(self, tmp_path: Path) -> None:
        first = ChatTemplate({"default": "d", "tool_use": "t"}, {"x": 1}, where="here")
        for name, data in chat_files(first.texts_with_defaults, {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
        again = ChatTemplate.read(tmp_path)
        assert again.texts == first.texts_with_defaults and again.fingerprint == first.fingerprint

    @pytest.mark.parametrize("name", ["missing.jinja", "bytes.jinja"])
    def test_files_that_cannot_be_read(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "bytes.jinja").write_bytes(b"a\xff")
        with pytest.raises(ModelError):
            ChatTemplate.read(tmp_path / name)


class TestDefaults:
    @pytest.mark.parametrize(
        "value",
        [
            True,
            False,
            None,
            3,
            -4,
            2.5,
            1e-7,
            "",
            "a'b\"c\\n%}{{ x }}\n{# é \U0001f388\x00",
            [1, ["x"]],
            {"a": {"b": None}},
        ],
    )
    def test_values_reach_the_template(self, value: object) -> None:
        text = ChatTemplate.from_text("{{ [x] | tojson }}", {"x": value}).texts_with_defaults["default"]
        assert json.loads(render(text)) == [value]
        assert json.loads(render(text, x="told otherwise")) == ["told otherwise"]

    @pytest.mark.parametrize("start", ["", "\n", "\n\n", "  {% if 1 %}\n", "  {%- if 1 %}\n", " x", "{#- c -#}\n y"])
    def test_the_text_renders_as_before(self, start: str) -> None:
        text = start + "{{ messages[0].content }}" + "{% endif %}" * ("if" in start)
        assert render(ChatTemplate.from_text(text, {"x": 1, "y": "z"}).texts_with_defaults["default"]) == render(text)

    def test_loops_and_macros_see_them(self) -> None:
        text = "{% macro m() %}{{ x }}{% endmacro %}{% for i in [1, 2] %}{{ x }}{{ m() }}{% endfor %}"
        assert render(ChatTemplate.from_text(text, {"x": 7}).texts_with_defaults["default"]) == "7777"

    @pytest.mark.parametrize("name", ["", "a b", "1x", "_x", "messages", "True", "x %}{% y", "é", "x" * 65])
    def test_names_that_are_none(self, name: str) -> None:
        with pytest.raises(ConfigError, match="cannot name a template's argument"):
            ChatTemplate.from_text("", {name: 1})

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1: 2}, {"x": [set()]}])
    def test_values_that_are_none(self, value: object) -> None:
        with pytest.raises(ConfigError, match="cannot be written into a template"):
            ChatTemplate.from_text("", {"x": value})

    def test_one_that_the_template_does_not_read_is_refused(self) -> None:
        template("qwen3", {"enable_thinking": False}).check_args()
        with pytest.raises(ConfigError, match=r"no variable enable_thinkng.*did you mean enable_thinking"):
            template("qwen3", {"enable_thinkng": False}).check_args()

    def test_none_leave_the_text_alone(self) -> None:
        assert ChatTemplate.from_text("a").texts_with_defaults["default"] == "a"

    def test_fingerprints_tell_them_apart(self) -> None:
        texts = [("a", {}), ("b", {}), ("a", {"x": 1}), ("a", {"x": True}), ("a", {"x": "1"}), ("a", {"y": 1})]
        assert len({ChatTemplate.from_text(text, args).fingerprint for text, args in texts}) == len(texts)
        assert ChatTemplate.from_text("a", where="here").fingerprint == ChatTemplate.from_text("a").fingerprint


class TestChatML:
    def test_is_that_of_a_base_model(self, qwen: Tokenizer) -> None:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "reasoning": "Well"}]
        with ChatEncoder(qwen, ChatTemplate.chatml(qwen), loss="all_assistant") as encoder:
            [samples] = encoder.encode([document(messages)])
            [[tools]] = [encoder.encode([document(messages, [{"x": 1}])])]
        assert isinstance(samples, list)
        [(prompt, target)] = pairs(samples)
        assert qwen.decode(prompt, skip_special=False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert qwen.decode(target, skip_special=False) == "<think>\nWell\n</think>\n\nYes<|im_end|>"
        assert encoder.end_of_turn_ids == (qwen.token_id("<|im_end|>"),)
        assert "the built-in ChatML knows no tools" in str(tools)

    def test_turns_end_with_a_token_that_the_tokenizer_has(self) -> None:
        tokenizer = train_bpe(["user assistant hello"] * 3, vocab_size=270)
        with ChatEncoder(tokenizer, ChatTemplate.chatml(tokenizer), loss="last") as encoder:
            assert encoder.end_of_turn_ids == (tokenizer.eos_id,)

    def test_a_template_for_another_tokenizer_is_refused(self) -> None:
        with pytest.raises(ModelError, match="would never stop"):
            ChatEncoder(train_bpe(["a b"] * 3, vocab_size=260), template("qwen2_5"), loss="last")


def test_a_template_with_an_error_names_it(qwen: Tokenizer) -> None:
    with pytest.raises(ModelError, match="cannot be used: line 2: Encountered unknown tag 'fro'") as caught:
        ChatEncoder(qwen, ChatTemplate.from_text("\n{% fro x in y %}", where="t.jinja"), loss="all")
    assert caught.value.where == "t.jinja" and caught.value.exit_code == 5
