"""Marks around special tokens: what they enclose, and renders in which they no longer do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.data.chat.marks import Marked, Marker, MarksError, unmarked

SPECIALS = ["<|im_end|>", "<|im_start|>", "<|im|>", "<s>", "</s>", "[INST]", "<\uff5cend\u2581of\uff5c>"]
MARKER = Marker(SPECIALS)
PIECES = st.sampled_from(
    [*SPECIALS, "<|im_", "end|>", "<|", "|>", ">", "<", "s>", "a", " ", "\n", "\ue000", "\ue001", '"\\']
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def plain_parts(text: Marked) -> list[str]:
    return [text.text[start:stop] for start, stop in text.plain]


@given(TEXTS, TEXTS)
@settings(max_examples=80, deadline=None)
def test_no_message_completes_a_special_token(first: str, second: str) -> None:
    value, marks = MARKER.marked([first, second], ["template"])
    text = unmarked("<|im_start|>" + value[0] + "<|im_end|>" + value[1] + "<s>", marks)
    assert text.text == "<|im_start|>" + first + "<|im_end|>" + second + "<s>"
    found = [(0, 12), (12 + len(first), 22 + len(first)), (len(text.text) - 3, len(text.text))]
    assert MARKER.specials(text) == found


@given(st.sampled_from(SPECIALS), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_nor_does_the_template_complete_one_of_a_message(special: str, first: int, second: int) -> None:
    start, stop = sorted((first % len(special), second % len(special)))
    head, middle, tail = special[:start], special[start:stop], special[stop:]
    values, marks = MARKER.marked([head, tail, special], [])
    if head:
        assert MARKER.specials(unmarked(values[0] + middle + tail, marks)) == []
    if tail:
        assert MARKER.specials(unmarked(head + middle + values[1], marks)) == []


def test_many_special_tokens_of_a_message_are_told_apart_in_one_pass() -> None:
    passes = [0]

    class Counted(tuple[tuple[int, int], ...]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            passes[0] += 1
            return super().__iter__()

    [value], marks = MARKER.marked(["<s>" * 500], [])
    found = unmarked("<|im_start|>" + value + "</s>", marks)
    assert MARKER.specials(Marked(found.text, Counted(found.plain))) == [(0, 12), (1512, 1516)]
    assert passes[0] <= 2


@given(
    st.recursive(
        TEXTS | st.none() | st.integers(), lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXTS, x, max_size=3)
    )
)
@settings(max_examples=50, deadline=None)
def test_marks_come_and_go_in_any_value(value: Any) -> None:
    marked, marks = MARKER.marked(value, [])
    text = json.dumps(marked, ensure_ascii=False)
    assert unmarked(text, marks).text == json.dumps(value, ensure_ascii=False)
    assert MARKER.specials(unmarked(text, marks)) == []
    assert not marks or not set(marks) & set(json.dumps(value, ensure_ascii=False))


def test_parts_of_special_tokens_that_overlap_are_marked_as_one() -> None:
    marked, (start, stop) = Marker(["<a>", "b<", "<cd>"]).marked("<a> b<c", [])
    assert marked == f"{start}<a>{stop} {start}b<c{stop}"


def test_what_needs_no_mark_is_left_alone() -> None:
    value = [{"role": "user", "content": "a < b, > c, [x]"}, {"tools": [{"x": 1.5}]}]
    assert MARKER.marked(value, []) == (value, "")


def test_keys_and_values_are_marked_at_any_depth() -> None:
    marked, marks = MARKER.marked({"role": "s>", "name": "<s>", "<s>": ["</s>"]}, [])
    start, stop = marks
    assert marked == {
        "role": f"{start}s>{stop}",
        "name": f"{start}<s>{stop}",
        f"{start}<s>{stop}": [f"{start}</s>{stop}"],
    }


def test_marks_avoid_what_messages_and_templates_hold() -> None:
    _, marks = MARKER.marked("<s>\ue000\\ue001 \\uE002", ["x\ue003"])
    assert marks == "\ue004\ue005"
    with pytest.raises(MarksError, match="every character"):
        MARKER.marked("<s>" + "".join(map(chr, range(0xE000, 0xF8FF))), [])


@pytest.mark.parametrize("change", [
    lambda text: text.split("im")[0],
    lambda text: text[::-1],
    lambda text: json.dumps(text),
    lambda text: json.dumps(text).replace("\\ue", "\\uE").upper().replace("\\U", "\\u"),
    lambda text: "".join(f"&#{ord(char)};" for char in text),
    lambda text: text.encode("unicode_escape").decode(),
    lambda text: text[1:],
    lambda text: text + text[0],
    lambda text: text[0] + text,
])  # fmt: skip
def test_marks_that_are_changed_are_found(change: Any) -> None:
    marked, marks = MARKER.marked("<|im_end|>", [])
    with pytest.raises(MarksError):
        unmarked("a" + change(marked) + "b", marks)


def test_texts_that_a_template_drops_or_repeats_are_none_of_its_business() -> None:
    marked, marks = MARKER.marked("x <s> y", [])
    assert unmarked("nothing", marks) == Marked("nothing")
    assert plain_parts(unmarked(marked * 2, marks)) == ["<s>", "<s>"]
    assert plain_parts(unmarked(marked.upper().strip(), marks)) == ["<S>"]


def test_a_slice_keeps_what_is_plain_in_it() -> None:
    text = Marked("abcdefgh", ((1, 3), (5, 7)))
    assert text[2:6] == Marked("cdef", ((0, 1), (3, 4)))
    assert text[3:5] == Marked("de") and text[:1] == Marked("a") and text[7:] == Marked("h")


def test_the_longest_special_token_is_found_first() -> None:
    assert Marker(["<|a|>", "<|a|>b"]).specials(Marked("<|a|>b<|a|>")) == [(0, 6), (6, 11)]
    assert Marker([]).specials(Marked("<|a|>")) == [] and Marker([]).marked("<|a|>", []) == ("<|a|>", "")
