"""What clients may ask: which field an error names, in which words, and what is refused, ignored and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genesis.data.tokenizer import Tokenizer
from genesis_cli.session.serving.protocol import (
    BadRequest,
    Body,
    ChatBody,
    Choice,
    CompletionBody,
    logprobs,
    parsed,
    parsed_json,
)
from tests.data.test_tokenizer_files import sentence_piece, write

TEXT: dict[str, Any] = {"model": "m", "prompt": "words"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "words"}]}
PROMPT = "prompt: expected a text, a list of token ids, or a list of either, but prompt {} is "


def text(**more: Any) -> CompletionBody:
    return parsed(CompletionBody, {**TEXT, **more})


def chat(**more: Any) -> ChatBody:
    return parsed(ChatBody, {**CHAT, **more})


@pytest.mark.parametrize(
    "field, value, what",
    [
        ("stop", ["a"] * 17, "stop: at most 16 items, found 17"),
        ("stop", ["a", "b" * 1001], "stop.1: at most 1000 characters"),
        ("stop", 5, "stop.0: expected a string, found a number"),
        ("stop", ["a", None], "stop.1: expected a string, found null"),
        ("temperature", "1", "temperature: expected a finite number, found a string"),
        ("temperature", -0.5, "temperature: at least 0"),
        ("temperature", 101, "temperature: at most 100"),
        ("top_p", 0, "top_p: above 0"),
        ("n", 0, "n: at least 1"),
        ("n", 1.5, "n: expected a whole number, found a number"),
        ("n", True, "n: expected a whole number, found a boolean"),
        ("top_k", 1_000_001, "top_k: at most 1000000"),
        ("repetition_penalty", 1e9, "repetition_penalty: at most 1000000"),
        ("seed", 1 << 70, "seed: below 9223372036854775808"),
        ("stream", "yes", "stream: expected true or false, found a string"),
        ("stream_options", [], "stream_options: expected an object, found a list"),
        (
            "stream_options",
            {"include_usage": 1},
            "stream_options.include_usage: expected true or false, found a number",
        ),
        ("model", None, "model: expected a string, found null"),
        ("prompt", 5, PROMPT.format(0) + "a number"),
        ("prompt", [], PROMPT.format(0) + "an empty list"),
        ("prompt", [1, "a"], PROMPT.format(0) + "a list with a string at position 1"),
        ("prompt", [1, True], PROMPT.format(0) + "a list with a boolean at position 1"),
        ("prompt", [[1], []], PROMPT.format(1) + "an empty list"),
        ("prompt", ["a", "b", None], PROMPT.format(2) + "null"),
    ],
)
def test_an_error_says_the_field_and_what_it_takes(field: str, value: Any, what: str) -> None:
    with pytest.raises(BadRequest) as found:
        text(**{field: value})
    assert (str(found.value), found.value.param, found.value.status) == (what, field, 400)


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b",".join([b"[1]"] * 50_000) + b"]",
        b"[" + b",".join([b"{}"] * 50_000) + b"]",
        b"{" + b",".join(b'"%d":0' % i for i in range(50_001)) + b"}",
        b"[" + b",".join([rb'"\\"'] * 50_001) + b"]",
        b"[" + b",".join([rb'"\\\""'] * 50_001) + b"]",
        b"[" + b",".join([b"1"] * 500_001) + b"]",
        b"[" * 60_000,
    ],
)
def test_a_body_of_too_many_values_is_not_built(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it is built"))
    with pytest.raises(BadRequest) as found:
        parsed_json(data)
    assert found.value.status == 413


def test_numbers_of_many_digits_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """900 of 4,000 digits in a body of 3.6 MB took 0.12 s, in which nobody else was served."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("they are built"))
    with pytest.raises(BadRequest, match="digits") as found:
        parsed_json(b"[" + b",".join([b"1" * 4000] * 900) + b"]")
    assert found.value.status == 400


def test_what_a_body_may_hold() -> None:
    quoted = {"digits": "1" * 4000, "prompt": '[{,"\\' * 60_000, "\\": ["\\", '"', '\\"[', "ä\u2028"]}
    for value in (
        quoted,
        [[1]] * 49_000,
        [0] * 499_999,
        [{"a": ["b"]}] * 9_000,
        5,
        "",
        [],
        json.loads("[" * 64 + "]" * 64),
    ):
        assert parsed_json(json.dumps(value).encode()) == parsed_json(json.dumps(value, ensure_ascii=False).encode())
        assert parsed_json(json.dumps(value).encode()) == value
    for data in (
        b"[" * 20_000 + b"]" * 20_000,
        b"{",
        b"\xff",
        b"NaN",
        b'"\\"',
        b'"',
        b"[1] 2",
        b'["a]',
        b"9" * 5000,
        b"",
    ):
        with pytest.raises(BadRequest) as found:
            parsed_json(data)
        assert found.value.status == 400


def test_what_is_missing_is_said() -> None:
    for kind, value, what in (
        (CompletionBody, {"model": "m"}, "prompt: the field is missing"),
        (ChatBody, {"messages": CHAT["messages"]}, "model: the field is missing"),
        (ChatBody, {**CHAT, "messages": []}, "messages: at least 1 item, found 0"),
        (ChatBody, {**CHAT, "messages": ["a"]}, "messages.0: expected an object, found a string"),
        (ChatBody, [], "body: expected an object, found a list"),
    ):
        kinds: type[Body] = kind
        with pytest.raises(BadRequest) as found:
            parsed(kinds, value)
        assert str(found.value) == what


def test_what_a_prompt_and_stops_may_be() -> None:
    for prompt, prompts in (("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])):
        assert text(prompt=prompt).prompts == prompts
    for stop, stops in ((None, []), ("a", ["a"]), (["a", "", "b"], ["a", "b"]), ([], [])):
        assert text(stop=stop).stops == stops
    assert text(temperature=1, top_p=1).sampling().temperature == 1.0


@pytest.mark.parametrize(
    "field, value",
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", True),
        # Of other servers, of the other path, and misspelt.
        ("stop_token_ids", [5]),
        ("ignore_eos", True),
        ("prompt", "words"),
        ("echo", True),
    ],
)
def test_what_would_change_the_answer_is_refused(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"^{field}: not supported; remove it") as found:
        chat(**{field: value})
    assert (found.value.param, found.value.status) == (field, 400)


def test_fields_of_the_other_path_and_misspelt_ones_are_refused() -> None:
    for field, value, meant in (
        ("max_completion_tokens", 5, "max_tokens"),
        ("suffix", "and so on", None),
        ("max_token", 5, "max_tokens"),
        ("temprature", 0, "temperature"),
    ):
        with pytest.raises(BadRequest) as found:
            text(**{field: value})
        hint = f", or write {meant}" if meant else ""
        assert str(found.value) == f"{field}: not supported; remove it{hint}"
    with pytest.raises(BadRequest, match="top_logprobs needs logprobs") as found:
        chat(top_logprobs=2)
    assert found.value.param == "top_logprobs" and chat(top_logprobs=0, logprobs=False).top_logprobs == 0
    for count, limit in ((-1, "at least 0"), (21, "at most 20")):
        with pytest.raises(BadRequest, match=f"^top_logprobs: {limit}$"):
            chat(top_logprobs=count, logprobs=True)


def test_offsets_count_the_space_before_a_word_that_goes_on(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, sentence_piece()))
    choice = Choice(tokenizer.prompt("ab"), "ab", ids=tokenizer.encode("ab a").tolist())
    rows = [(-1.0, [])] * (len(choice.prompt) + len(choice.ids) - 1)
    for echo, first in ((False, 0), (True, 2)):
        told = json.loads(logprobs(tokenizer, choice, rows, is_chat=False, echo=echo))
        assert told["text_offset"][-3:] == [first, first + 2, first + 3], "' ab a' continues 'ab'"


def test_what_asks_for_nothing_or_changes_no_answer_is_read_over() -> None:
    nothing = {
        "tools": [], "functions": [], "tool_choice": "auto", "function_call": "none", "logit_bias": {},
        "response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium",
        "presence_penalty": 0.0, "frequency_penalty": 0, "audio": None, "stop_token_ids": None,
    }  # fmt: skip
    ignored = {
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "store": True, "service_tier": "flex",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "a"},
        "parallel_tool_calls": False,
    }  # fmt: skip
    assert chat(**nothing, **ignored) == chat()
    assert text(suffix="", user="u", best_of=1) == text(best_of=1)
