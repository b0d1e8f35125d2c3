"""Strict JSON: everything that JSON leaves open is refused with its place, and limits stand before memory."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import ModelError
from genesis.files.hf import read_json
from genesis.files.strict_json import (
    MAX_DEPTH,
    canonical_bytes,
    check_structure,
    parse_object,
    read_limited,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"a": 1}{"b": 2}', "not JSON"),
        (b'{"a": 1,}', "not JSON"),
        (b'{"a": 01}', "not JSON"),
        (b'{"a": "\x01"}', "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "too large"),
        (b"[1]", "not a JSON object"),
        (b'"a"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "a": 1}', "the key 'a' appears twice"),
        (b'{"x": [{"a\\u001b": 1, "a\\u001b": 2}]}', r"the key 'a\\x1b' appears twice"),
        (b'{"a": NaN}', "'NaN' is not finite"),
        (b'{"a": -Infinity}', "'-Infinity' is not finite"),
        (b'{"a": 1e999}', "'1e999' is not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested deeper than 64"),
        (b'{"a": ' + b'{"a": ' * 64 + b"1" + b"}" * 65, "nested deeper than 64"),
        (b'{"a": [' + b"[]," * 1_000_001 + b"[]]}", "more than 1,000,000"),
    ],
    ids=range(24),
)
def test_bad_text_is_refused_with_its_place(text: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse_object(text, where="dir/config.json")
    assert caught.value.exit_code == 5
    assert caught.value.where.startswith("dir/config.json")
    assert str(caught.value).isprintable()


def test_a_syntax_error_has_line_and_column() -> None:
    with pytest.raises(ModelError) as caught:
        parse_object(b'{\n  "a": 1\n  "b": 2\n}', where="config.json")
    assert caught.value.where == "config.json:3:3"


def test_good_text_is_read() -> None:
    text = '{"a": [1, -2.5e3, true, null, "\\ud83d\\ude00 é \\" [[{{"], "b": {"c": {}}, "rope_theta": 1000000.0}'
    assert parse_object(text.encode(), where="x") == json.loads(text)
    deep = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert parse_object(deep, where="x")


def test_depth_is_counted_outside_strings_only() -> None:
    check_structure(b'{"[[[[[[[[": ["\\"[[[[[[", "\\\\"]}', where="x", max_depth=2)
    with pytest.raises(ModelError, match="deeper than 2"):
        check_structure(b'{"\\\\": [[1]]}', where="x", max_depth=2)
    with pytest.raises(ModelError, match="more than 3"):
        check_structure(b"[[],[],[]]", where="x", max_containers=3)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), json_values, max_size=4), st.booleans())
def test_what_json_writes_is_read_back(value: dict[str, object], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_object(text.encode(), where="x") == value
    assert parse_object(canonical_bytes(value), where="x") == value


@settings(max_examples=100)
@given(st.binary(max_size=40) | st.text('{}[]":,\\u0d8 1.-eNatrue', max_size=40).map(str.encode))
def test_anything_else_is_a_model_error(data: bytes) -> None:
    try:
        value = parse_object(data, where="x")
    except ModelError:
        return
    assert value == json.loads(data)


@pytest.mark.parametrize("text", [b'"' * MIB, b'\\"' * MIB, b"\\" * MIB, b'{"' + b'\\"' * MIB, b"[" * MIB, b'""' * MIB])
def test_hostile_text_takes_linear_time(text: bytes) -> None:
    started = time.process_time()
    with pytest.raises(ModelError):
        parse_object(b'{"a": ' + text, where="x")
    assert time.process_time() - started < 2


def test_the_size_is_checked_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": 1}')
    assert read_json(path, limit=8) == {"a": 1}
    with pytest.raises(ModelError, match="has 8 bytes, more than the 7 allowed"):
        read_json(path, limit=7)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="more than the 1,048,576 allowed"):
            read_limited(path, MIB)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    read = os.read

    def growing(descriptor: int, count: int) -> bytes:
        with open(path, "ab") as file:
            file.write(b" " * 10)
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", growing)
    with pytest.raises(ModelError, match="more than the 8 allowed"):
        read_limited(path, 8)


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "nothing"):
        with pytest.raises(ModelError):
            read_json(path, limit=100)


def test_canonical_bytes_are_one_text_for_equal_values() -> None:
    assert canonical_bytes({"b": [1, 2.0], "a": "é"}) == canonical_bytes({"a": "é", "b": (1, 2.0)})
    assert canonical_bytes({"b": [1, 2.0], "a": "é"}) == b'{"a":"\\u00e9","b":[1,2.0]}'
    for value, error in (
        ({1: 2}, TypeError),
        ([{("a",): 1}], TypeError),
        ({"a": {1, 2}}, TypeError),
        (b"x", TypeError),
        (float("nan"), ValueError),
        ([float("inf")], ValueError),
    ):
        with pytest.raises(error):
            canonical_bytes(value)
