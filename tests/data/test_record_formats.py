"""Records: which format is found by their fields, what each becomes, and every defect by its field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from genesis.data.record_formats import CHATS, MAX_DEPTH, RecordFormat
from genesis.data.records import Completion, Conversation, Defect, Position, content_text, record_text
from genesis.errors import DataError

HERE = Position("chats.jsonl", 7)
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "b": 1, "a": 2}}}


def read(record: object, format: Any = "auto", **fields: str) -> str | Completion | Conversation:
    names: Any = fields
    return RecordFormat(format, names).read(record, HERE)[1]


def conversation(*messages: Mapping[str, Any], **rest: Any) -> Conversation:
    return Conversation(tuple(dict(message) for message in messages), **rest)


def messages(*items: object) -> dict[str, object]:
    return {"messages": list(items)}


@pytest.mark.parametrize(
    "record,expected",
    [
        ({"text": " as it is\r\n", "id": 3}, " as it is\r\n"),
        ({"prompt": "2+2=", "completion": " 4"}, Completion("2+2=", " 4")),
        ({"prompt": "", "completion": "x"}, Completion("", "x")),
        ({"prompt": [USER], "completion": [ANSWER]}, conversation(USER, ANSWER, prompt_messages=1)),
        ({"prompt": [USER], "completion": [USER, ANSWER]}, conversation(USER, ANSWER, prompt_messages=1)),
        (messages(USER, ANSWER), conversation(USER, ANSWER)),
        ({"messages": json.dumps([USER, ANSWER])}, conversation(USER, ANSWER)),
        ({**messages(USER, ANSWER), "prompt": "2+2?", "id": "x"}, conversation(USER, ANSWER)),
        ({**messages(USER, ANSWER), "tools": [TOOL]}, conversation(USER, ANSWER, tools=(TOOL,))),
        ({**messages(USER, ANSWER), "tools": json.dumps([TOOL])}, conversation(USER, ANSWER, tools=(TOOL,))),
        ({**messages(USER, ANSWER), "tools": [json.dumps(TOOL)]}, conversation(USER, ANSWER, tools=(TOOL,))),
        *[({**messages(USER, ANSWER), "tools": none}, conversation(USER, ANSWER)) for none in (None, [], "", "[]")],
        ({"instruction": "2+2?", "output": "4"}, conversation(USER, ANSWER)),
        ({"instruction": "2+2?", "input": "", "output": "4", "system": None}, conversation(USER, ANSWER)),
        ({"instruction": None, "input": "2+2?", "output": "4"}, conversation(USER, ANSWER)),
        (
            {"instruction": "Add.", "input": "2 2", "output": "4", "system": "Be brief.", "history": [["a", "b"]]},
            conversation(
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "Add.\n2 2"},
                ANSWER,
            ),
        ),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            conversation(USER, ANSWER),
        ),
        ({"conversations": [USER, ANSWER]}, conversation(USER, ANSWER)),
        (
            {
                "conversations": [
                    {"from": "system", "value": "S"},
                    {"from": "human", "value": "2+2?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"b": 2, "a": 2}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "4"},
                ],
                "tools": json.dumps([TOOL]),
                "system": "of the record, where the turns have none",
            },
            conversation(
                {"role": "system", "content": "S"},
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 2}}}],
                },
                {"role": "tool", "content": "4"},
                ANSWER,
                tools=(TOOL,),
            ),
        ),
        (
            {"system": "S", "conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}]},
            conversation({"role": "system", "content": "S"}, USER, ANSWER),
        ),
    ],
)
def test_each_format_becomes_its_normal_form(record: object, expected: object) -> None:
    name, found = RecordFormat().read(record, HERE)
    assert found == expected
    assert name == "prompt_completion" or (name in CHATS) is isinstance(found, Conversation)


CONTEXT = {"role": "user", "content": "2+2?\nof numbers"}
SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("record", "name", "expected"),
    [
        ({"instruction": "2+2?", "context": "", "response": "4", "category": "qa"}, "dolly", [USER, ANSWER]),
        ({"instruction": "2+2?", "context": "of numbers", "response": "4"}, "dolly", [CONTEXT, ANSWER]),
        ({"instruction": "2+2?", "input": "of numbers", "response": "4"}, "dolly", [CONTEXT, ANSWER]),
        ({"question": "2+2?", "answer": "4", "id": 1}, "question_answer", [USER, ANSWER]),
        ({"question": "2+2?", "answer": "4", "context": "of numbers"}, "question_answer", [CONTEXT, ANSWER]),
        ({"query": "2+2?", "response": "4", "original_question": "?"}, "question_answer", [USER, ANSWER]),
        ({"input": "2+2?", "output": "4", "context": None}, "question_answer", [USER, ANSWER]),
        ({"prompt": "2+2?", "response": "4", "label": 1}, "question_answer", [USER, ANSWER]),
        ({"system_prompt": "S", "question": "2+2?", "response": "4"}, "question_answer", [SYSTEM, USER, ANSWER]),
        ({"system": "S", "query": "2+2?", "answer": "4", "history": []}, "question_answer", [SYSTEM, USER, ANSWER]),
        # What was read before the two formats came is read as before.
        ({"instruction": "2+2?", "output": "4", "response": "5", "question": "6"}, "alpaca", [USER, ANSWER]),
        ({**messages(USER, ANSWER), "question": "5", "answer": "6"}, "messages", [USER, ANSWER]),
    ],
)
def test_questions_and_answers_by_their_names(record: dict[str, Any], name: str, expected: list[Any]) -> None:
    assert RecordFormat().read(record, HERE) == (name, conversation(*expected)) and name in CHATS
    used = RecordFormat().columns(list(record), HERE)
    assert RecordFormat().read({key: record[key] for key in used}, HERE) == (name, conversation(*expected))


def test_a_named_format_has_its_own_fields() -> None:
    both = {"question": "2+2?", "answer": "4", "query": "?", "response": "no", "instruction": "?", "Q": "2+2?"}
    assert read(both, "question_answer") == conversation(USER, ANSWER)
    assert read(both, "dolly", instruction="question", response="answer") == conversation(USER, ANSWER)
    assert read({"Q": "2+2?", "A": "4"}, question="Q", answer="A") == conversation(USER, ANSWER)
    assert RecordFormat("question_answer").columns(list(both), HERE) == ["question", "answer"]
    with pytest.raises(Defect, match="it lacks 'Q'"):
        read({"query": "2+2?", "A": "4"}, question="Q", answer="A")
    with pytest.raises(Defect, match="no field 'response'"):
        read({"instruction": "2+2?", "output": "4"}, "dolly")


def test_what_a_template_may_look_at_is_kept_in_its_order() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"z": 1, "a": {"y": 2, "b": 3}}}}
    answer = {"reasoning_content": "r", "name": "n", "role": "assistant", "tool_calls": [call], "content": None}
    tool = {"tool_call_id": "1", "content": "4", "role": "tool", "weight": 1, "thinking": None}
    found = read(messages(USER, answer, tool, ANSWER))
    assert isinstance(found, Conversation)
    assert list(found.messages[1]) == ["role", "content", "reasoning_content", "name", "tool_calls"]
    assert found.messages[2] == {"role": "tool", "content": "4", "tool_call_id": "1", "weight": 1}
    assert list(found.messages[1]["tool_calls"][0]["function"]["arguments"]["a"]) == ["y", "b"]
    as_text = {**call, "function": {"name": "add", "arguments": json.dumps(call["function"]["arguments"])}}  # type: ignore[index]
    text = read(messages(USER, {**answer, "tool_calls": [as_text]}, tool, ANSWER))
    assert isinstance(text, Conversation) and text.messages[1]["tool_calls"] == [as_text]
    assert read(messages(USER, {**ANSWER, "tool_calls": None}, ANSWER)) == conversation(USER, ANSWER, ANSWER)
    assert read(messages(USER, {**ANSWER, "tool_calls": []}, ANSWER)) == conversation(USER, ANSWER, ANSWER)


def test_text_parts_stay_as_they_are() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    found = read(messages({"role": "user", "content": parts}, ANSWER))
    assert isinstance(found, Conversation) and found.messages[0]["content"] == parts
    assert content_text(found.messages[0]) == "2+2?"
    assert read(messages({"role": "user", "content": []}, ANSWER)) == read(messages({**USER, "content": ""}, ANSWER))


def test_the_text_of_a_record_tells_records_apart_that_a_template_tells_apart() -> None:
    turned = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "a": 2, "b": 1}}}
    records = [
        Completion("a", "b"),
        conversation(USER, ANSWER),
        conversation(USER, ANSWER, prompt_messages=1),
        conversation(USER, ANSWER, tools=(TOOL,)),
        conversation(USER, ANSWER, tools=(turned,)),
        conversation({**USER, "name": "n"}, ANSWER),
    ]
    assert len({record_text(record) for record in records}) == len(records)
    assert record_text(conversation({"role": "user", "content": "ü"}, ANSWER)) == (
        '{"messages":[{"role":"user","content":"ü"},{"role":"assistant","content":"4"}]}'
    )
    # The order of a message's own role and content is no difference.
    either = [read(messages(dict(reversed(USER.items())), ANSWER)), read(messages(USER, ANSWER))]
    assert record_text(either[0]) == record_text(either[1])  # type: ignore[arg-type]


def test_fields_have_other_names() -> None:
    turns = [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}]
    expected = conversation(USER, ANSWER)
    assert read({"conv": turns}, messages="conv", role="from", content="value") == expected
    assert read({"chat": [{"who": "human", "value": "2+2?"}, {"who": "gpt", "value": "4"}]}, role="who",
                conversations="chat") == expected  # fmt: skip
    assert read({"q": "2+2?", "a": "4"}, instruction="q", output="a") == expected
    assert read({"body": "b", "text": 1}, text="body") == "b"
    with pytest.raises(Defect, match="fields match no format"):
        read({"text": "a"}, text="body")


def test_a_given_format_decides_between_several() -> None:
    record = {"text": "t", "instruction": "2+2?", "output": "4", **messages(USER, ANSWER, ANSWER)}
    with pytest.raises(Defect, match="several formats: text, messages, alpaca") as caught:
        read(record)
    assert caught.value.kind == "ambiguous format" and "data.format=text" in caught.value.next
    assert read(record, "text") == "t"
    assert read(record, "alpaca") == conversation(USER, ANSWER)
    assert read(record, "messages") == conversation(USER, ANSWER, ANSWER)
    with pytest.raises(Defect, match="no field 'conversations'; its fields: 'text', 'instruction'"):
        read(record, "sharegpt")


def test_preferences_are_recognised_and_refused() -> None:
    record = {"prompt": "p", "chosen": "c", "rejected": "r"}
    with pytest.raises(Defect, match="learns from texts and chats") as caught:
        read(record)
    assert caught.value.kind == "preference" and caught.value.exit_code == 4
    assert read(record, "prompt_completion", completion="chosen") == Completion("p", "c")
    assert read({**record, **messages(USER, ANSWER)}, "messages") == conversation(USER, ANSWER)
    good = {"prompt": "p", "completion": "c", "label": True}
    assert read(good, "prompt_completion") == read({**good, "label": 3}) == Completion("p", "c")
    assert RecordFormat().columns(["label", "prompt", "completion"], HERE) == ["prompt", "completion", "label"]


def call(**function: object) -> dict[str, object]:
    return messages(USER, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]})


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def answered(content: object) -> dict[str, object]:
    return messages(USER, {"role": "assistant", "content": content})


# record, kind, field, a part of the message
DEFECTS: list[tuple[object, str, str, str]] = [
    (["text"], "no record", "", "is a list, not an object"),
    ({}, "missing field", "", "its fields: none"),
    ({"body": 1, "\x1b[2J": 2}, "missing field", "", r"'body', '\x1b[2J'"),
    ({"text": 3}, "wrong type", "text", "holds a number, not a string"),
    ({"text": "a\0b"}, "NUL byte", "text", "binary data"),
    ({"text": " \n"}, "empty document", "text", "holds no text"),
    (messages(), "empty conversation", "messages", "no messages"),
    (messages(USER), "no assistant turn", "messages", "nothing to learn"),
    ({"messages": None}, "wrong type", "messages", "null, not a list"),
    ({"messages": {}}, "wrong type", "messages", "an object, not a list"),
    ({"messages": "[{]"}, "bad JSON", "messages", "the string is not JSON"),
    ({"messages": "hello"}, "bad JSON", "messages", "the string is not JSON"),
    (messages(USER, "4"), "wrong type", "messages[1]", "is a string, not an object"),
    (messages(USER, {"content": "4"}), "no role", "messages[1].role", "no 'role'; its fields: 'content'"),
    (messages(USER, {"role": "asistant", "content": "4"}), "unknown role", "messages[1].role", "assistant is nearest"),
    (messages({"role": "bot", "content": "4"}), "unknown role", "messages[0].role", "system, developer, user"),
    (messages({"role": None, "content": "4"}), "unknown role", "messages[0].role", "the role is 'null'"),
    (messages({"role": ["user"], "content": "4"}), "unknown role", "messages[0].role", "the role is"),
    (messages(USER, {"role": "assistant"}), "wrong type", "messages[1].content", "null, not a string"),
    (answered(None), "wrong type", "messages[1].content", "null, not a string"),
    (answered({"a": 1}), "wrong type", "messages[1].content", "an object, not a string"),
    (answered("4\0"), "NUL byte", "messages[1].content", "NUL"),
    (answered(["4"]), "no text part", "messages[1].content[0]", "a string"),
    (answered([{"type": "image"}]), "no text part", "messages[1].content[0]", "'image'"),
    (answered([{"type": "text", "text": 3}]), "wrong type", "messages[1].content[0].text", "a number"),
    (messages(USER, {**ANSWER, "score": float("nan")}), "bad number", "messages[1].score", "nan, not a finite"),
    (messages(USER, {**ANSWER, "x": [1, {"y": "\0"}]}), "NUL byte", "messages[1].x[1].y", "NUL"),
    (messages(USER, {**ANSWER, "x": nested(MAX_DEPTH + 1)}), "nested too deep", "messages[1].x.a.a", "64 levels"),
    (messages(USER, {**ANSWER, "x": b"4"}), "wrong type", "messages[1].x", "of type bytes"),
    (messages(USER, {**ANSWER, "tool_calls": {}}), "wrong type", "messages[1].tool_calls", "an object, not a list"),
    (messages(USER, {**ANSWER, "tool_calls": [3]}), "bad tool call", "messages[1].tool_calls[0]", "is a number"),
    (messages({**USER, "tool_calls": [{"name": "f", "arguments": {}}]}), "bad tool call", "messages[0].tool_calls",
     "the user calls tools"),
    (messages(USER, {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}),
     "bad tool call", "messages[1].function_call", "old form"),
    (messages(USER, {**ANSWER, "weight": 0.5}), "bad weight", "messages[1].weight", "'0.5'"),
    (messages(USER, {**ANSWER, "train": "no"}), "bad weight", "messages[1].train", "1 (learned) or 0 (not learned)"),
    ({"prompt": "p", "completion": "c", "label": False}, "unpaired", "", "prompt, completion, label"),
    ({"question": "p", "response": "c", "label": False}, "unpaired", "", "question, response, label"),
    ({"prompt": "p", "completion": "c", "label": "True"}, "unpaired", "", "prompt, completion, label"),
    ({"question": "q", "query": "q", "answer": "a"}, "ambiguous format", "", "'question', 'query'"),
    ({"question": "q", "answer": "a", "response": "a"}, "ambiguous format", "", "'answer', 'response'"),
    ({"instruction": "i", "question": "q", "answer": "a"}, "ambiguous format", "", "'question', 'instruction'"),
    ({"question": "q", "context": "c", "input": "i", "answer": "a"}, "ambiguous format", "", "'context', 'input'"),
    ({"question": "q", "choices": ["a"]}, "missing field", "", "fields match no format"),
    ({"question": "q", "answer": 3}, "wrong type", "answer", "holds a number"),
    ({"query": "q", "response": None}, "wrong type", "response", "holds null"),
    ({"query": " ", "response": "r", "context": 3}, "wrong type", "context", "holds a number"),
    ({"query": "", "response": "r"}, "empty document", "query", "are empty"),
    (call(), "bad tool call", "messages[1].tool_calls[0].function.name", "name is null"),
    (call(name=""), "bad tool call", "messages[1].tool_calls[0].function.name", "name is empty"),
    (call(name="f"), "bad tool call", "messages[1].tool_calls[0].function.arguments", "are null"),
    (call(name="f", arguments=[1]), "bad tool call", "messages[1].tool_calls[0].function.arguments", "are a list"),
    (call(name="f", arguments="{"), "bad JSON", "messages[1].tool_calls[0].function.arguments", "not JSON"),
    (call(name="f", arguments='{"a":1,"a":2}'), "bad JSON", "messages[1].tool_calls[0].function.arguments", "twice"),
    (call(name="f", arguments='{"a":NaN}'), "bad number", "messages[1].tool_calls[0].function.arguments.a", "nan"),
    ({**messages(USER, ANSWER), "tools": 3}, "wrong type", "tools", "a number, not a list"),
    ({**messages(USER, ANSWER), "tools": "{}"}, "wrong type", "tools", "an object, not a list"),
    ({**messages(USER, ANSWER), "tools": ["f"]}, "bad JSON", "tools[0]", "not JSON"),
    ({**messages(USER, ANSWER), "tools": [{}]}, "bad tools", "tools[0]", "describes a function"),
    ({**messages(USER, ANSWER), "tools": '[{"a": "\\ud800"}]'}, "bad JSON", "tools", "half a surrogate"),
    ({**messages(USER, ANSWER), "tools": [{"a": 1e999}]}, "bad number", "tools[0].a", "inf"),
    ({"prompt": "p", "completion": ""}, "empty document", "completion", "no text"),
    ({"prompt": "p\0", "completion": "c"}, "NUL byte", "prompt", "NUL"),
    ({"prompt": None, "completion": "c"}, "wrong type", "prompt", "null, not a string or a list"),
    ({"prompt": "p", "completion": [ANSWER]}, "wrong type", "completion", "write both as strings"),
    ({"prompt": [], "completion": [ANSWER]}, "empty conversation", "prompt", "no messages"),
    ({"prompt": [USER], "completion": [USER]}, "no assistant turn", "completion", "nothing to learn"),
    ({"prompt": [USER], "completion": [3]}, "wrong type", "completion[0]", "is a number"),
    ({"instruction": "", "input": "", "output": "4"}, "empty document", "instruction", "are empty"),
    ({"instruction": "q", "output": None}, "wrong type", "output", "null, not a string"),
    ({"instruction": 3, "output": "4"}, "wrong type", "instruction", "a number, not a string"),
    ({"instruction": "q", "output": "4", "history": [["a"]]}, "wrong type", "history[0]", "a pair of strings"),
    ({"instruction": "q", "output": "4", "history": "no"}, "bad JSON", "history", "not JSON"),
    ({"conversations": []}, "empty conversation", "conversations", "no messages"),
    ({"conversations": [{"from": "humn", "value": "a"}]}, "unknown role", "conversations[0].from", "human is nearest"),
    ({"conversations": [{"from": "gpt"}]}, "wrong type", "conversations[0].value", "null"),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, "bad JSON", "conversations[0].value", "not JSON"),
    ({"conversations": [{"from": "function_call", "value": "[]"}]}, "bad tool call", "conversations[0].value", "list"),
    ({"conversations": [{"from": "gpt", "value": "a"}], "system": 3}, "wrong type", "system", "a number"),
]  # fmt: skip


def test_a_value_of_the_most_levels_is_read() -> None:
    deep = {**ANSWER, "x": nested(MAX_DEPTH)}
    assert read(messages(USER, deep)) == conversation(USER, deep)


@pytest.mark.parametrize("record,kind,field,message", DEFECTS)
def test_a_data_error_names_file_line_and_field(record: object, kind: str, field: str, message: str) -> None:
    with pytest.raises(Defect) as caught:
        read(record)
    defect = caught.value
    assert isinstance(defect, DataError) and defect.exit_code == 4
    assert (defect.kind, message in str(defect)) == (kind, True), str(defect)
    assert defect.field == field or (kind == "nested too deep" and defect.field.startswith(field))
    assert defect.where.startswith("chats.jsonl:7" + f": {field}" * bool(field))
    assert "data.on_error=skip" in defect.next and "\x1b" not in str(defect)


def test_columns_are_those_that_the_format_uses() -> None:
    names = ["id", "tools", "messages", "prompt"]
    assert RecordFormat().columns(names, HERE) == ["messages", "tools"]
    assert RecordFormat("alpaca", {"output": "answer"}).columns(["answer", "instruction", "x"], HERE) == [
        "instruction",
        "answer",
    ]
    with pytest.raises(Defect, match="fields match no format; its fields: 'a', 'b'"):
        RecordFormat().columns(["a", "b"], HERE)
