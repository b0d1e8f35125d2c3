"""The accepted part of YAML: what scalars mean, what is refused and where, and the writer it reads back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import ConfigError
from genesis.train.strict_yaml import MAX_BYTES, MAX_DEPTH, MAX_NODES, emit, parse, parse_value, scalar, spell


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1e5", 1e5),
        ("1E+5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5e-3", -1.5e-3),
        ("3e-4", 3e-4),
        ("42", 42),
        ("-7", -7),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        # What YAML 1.1 or Python would convert, and YAML 1.2 leaves a string.
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("1:30:00", "1:30:00"),
        ("2024-01-31", "2024-01-31"),
        ("1_000", "1_000"),
        ("1,000", "1,000"),
        ("007", "007"),
        ("010", "010"),
        ("0b11", "0b11"),
        ("-0x1F", "-0x1F"),
        ("1e", "1e"),
        ("e5", "e5"),
        (".", "."),
        ("inf", "inf"),
        ("nan", "nan"),
        ("NaN", "NaN"),
        ("١٢", "١٢"),
        ("=", "="),
    ],
)
def test_plain_scalars(text: str, value: Any) -> None:
    for found in (scalar(text), parse(f"key: {text}", "c.yaml").data["key"], parse_value(text, "here")):
        assert found == value
        assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse("a: .nan", "c.yaml").data["a"])


@pytest.mark.parametrize("text", ['"1e-5"', "'on'", '"null"', "'12'"])
def test_quoted_scalars_are_strings(text: str) -> None:
    assert parse(f"key: {text}", "c.yaml").data == {"key": text[1:-1]}


def test_keys_are_their_text() -> None:
    assert parse("on: 1\n12: 2\nnull: 3\n1e-5: 4", "c.yaml").data == {"on": 1, "12": 2, "null": 3, "1e-5": 4}


def test_every_key_and_value_has_its_place() -> None:
    document = parse("a:\n  b: 1\n  c: [x,\n      {d: 2}]\n", "c.yaml")
    assert document.data == {"a": {"b": 1, "c": ["x", {"d": 2}]}}
    assert document.where(("a", "b")) == "c.yaml:2:6"
    assert document.where(("a", "b"), key=True) == "c.yaml:2:3"
    assert document.where(("a", "c", 1, "d")) == "c.yaml:4:11"
    assert document.where(("a", "missing")) == "c.yaml:1:1"
    assert document.where(("missing",)) == "c.yaml"


@pytest.mark.parametrize("text", ["", "# a comment\n", "---\n", "--- # x\n...\n", "\ufeff", "~"])
def test_an_empty_file_is_an_empty_mapping(text: str) -> None:
    assert parse(text, "c.yaml").data == {}
    assert parse(text.encode(), "c.yaml").data == {}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\na: 2", "2:1", "the key a appears twice; first on line 1"),
        ("s: {b: 1, b: 2}", "1:11", "the key s.b appears twice"),
        ("a: &x 1\nb: *x", "1:4", "the anchor &x"),
        ("b: *x", "1:4", "the alias *x"),
        ("a: &x [1]", "1:4", "the anchor"),
        ("a: !!python/object/apply:os.system [id]", "1:4", "the tag"),
        ("a: !!int 3", "1:4", "the tag"),
        ("a: ! x", "1:4", "the tag"),
        ("!!map\na: 1", "1:1", "the tag"),
        ("%TAG ! tag:x,2000:\n---\na: 1", "1:1", "%TAG directives"),
        ("a: 1\n<<: {b: 2}", "2:1", "merge keys"),
        ("a: 1\n---\nb: 2", "2:1", "a second document"),
        ("? [a]\n: 1", "1:3", "a key is a list"),
        ("{[a]: 1}", "1:2", "a key is a list"),
        ("{{a: 1}: 1}", "1:2", "a key is a list"),
        ('"": 1', "1:1", "a key is empty"),
        ("- a\n- b", "1:1", "the file holds a list"),
        ("just words", "1:1", "the file holds a single value"),
        ("42", "1:1", "the file holds a single value"),
        ("a: b: c", "1:5", "not valid YAML"),
        ("a:\n\tb: 1", "2:1", "not valid YAML"),
        ('a: "x', "1:4", "not valid YAML"),
        ("a: [1", "1:6", "not valid YAML"),
        ("a: 'x\n b: 1", "1:4", "not valid YAML"),
        ("train: stdlib:", "1:14", "not valid YAML"),
        ("a: @x", "1:4", "not valid YAML"),
        ("a: b\0c", "1:5", "U+0000"),
        ("a: b\n# \x1b[31m", "2:3", "U+001B"),
        ("a: \u2028b", "1:4", "U+2028"),
        ('a: "\\0"', "1:4", "U+0000"),
        ('a: "\\ud800"', "1:4", "U+D800"),
        ('a: "\\UFFFFFFFF"', "1:1", "not valid YAML"),
        ("%YAML 2.0\n---\na: 1", "1:1", "not valid YAML"),
        ("a: " + "9" * 41, "1:4", "has 41 characters"),
        ("a: 0." + "1" * 60, "1:4", "has 62 characters"),
    ],
)
def test_what_is_refused_and_where(text: str, place: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml")
    assert words in caught.value.what
    assert caught.value.where.rpartition("c.yaml:")[2] == place
    assert caught.value.next
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("source", "place"), [(b"a: 1\nb: \xff", "2:4"), ("a: 1".encode("utf-16"), "1:1")])
def test_text_is_utf8(source: bytes, place: str) -> None:
    with pytest.raises(ConfigError, match="is not UTF-8") as caught:
        parse(source, "c.yaml")
    assert caught.value.where == f"c.yaml:{place}"


def test_control_characters_never_reach_the_message() -> None:
    for text in ('"\\x1b[31m": {a: 1, a: 2}', 'a: !"\\x1b" 1', 'a: "\\x1b": 1'):
        with pytest.raises(ConfigError) as caught:
            parse(text, "evil\x1b[2J.yaml")
        shown = caught.value.what + caught.value.where + caught.value.next
        assert "\x1b" not in shown
        assert "evil\\x1b[2J.yaml" in shown


@pytest.mark.parametrize("opener", ["[", "{a: ", "- ", "a:\n"])
def test_depth_is_limited(opener: str) -> None:
    if opener == "a:\n":
        text = "".join(" " * depth + "a:\n" for depth in range(MAX_DEPTH + 2))
    else:
        text = "k:\n " + opener * (MAX_DEPTH + 2)
    with pytest.raises(ConfigError, match=f"nested deeper than {MAX_DEPTH}"):
        parse(text, "c.yaml")
    deepest = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert parse(f"k: {deepest}", "c.yaml").data["k"] is not None


def test_size_and_count_are_limited() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_BYTES} bytes"):
        parse("#" * (MAX_BYTES + 1), "c.yaml")
    assert parse("#" * MAX_BYTES, "c.yaml").data == {}
    # The mapping, its key and the list count too.
    fits = "a: [" + ",".join(["1"] * (MAX_NODES - 3)) + "]"
    assert len(parse(fits, "c.yaml").data["a"]) == MAX_NODES - 3
    with pytest.raises(ConfigError, match=f"more than {MAX_NODES} values"):
        parse(fits.replace("[", "[1,"), "c.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[a, b]", ["a", "b"]),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{model_type: qwen3, n: 1e-6}", {"model_type": "qwen3", "n": 1e-6}),
        ('"12"', "12"),
        ("'on'", "on"),
        (" 3e-4 ", 3e-4),
        # Taken as they stand: a shell user does not think of YAML's signs.
        ("stdlib:", "stdlib:"),
        ("data/*.txt", "data/*.txt"),
        ("*.txt", "*.txt"),
        ("a # b", "a # b"),
        ("key: value", "key: value"),
        ("&x", "&x"),
        ("!x", "!x"),
        ("- x", "- x"),
        ("C:\\x", "C:\\x"),
    ],
)
def test_override_values(text: str, value: Any) -> None:
    assert parse_value(text, "here") == value


@pytest.mark.parametrize(
    "text", ["[a", '"a', "'a' b", "[&x a]", "{a: 1, a: 2}", "[!!int 1]", "[" * 40, "a\0b", "9" * 99]
)
def test_malformed_override_values(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value(text, "override: train.steps=...")
    assert caught.value.where == "override: train.steps=..."


def test_paths_are_spelled_as_users_write_them() -> None:
    assert spell(("eval", "prompts", 2)) == "eval.prompts[2]"
    assert spell(("a\x1b", "b" * 200)) == "a\\x1b." + "b" * 57 + "..."


# Surrogates and NUL are no text; parse refuses them.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT.filter(bool), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXT.filter(bool), PLAIN, max_size=5))
def test_what_is_written_is_read_back_equal(data: dict[str, Any]) -> None:
    found = parse(emit(data), "c.yaml").data
    assert found == data
    assert repr(found) == repr(data)


def test_the_writer_refuses_what_is_no_plain_data() -> None:
    with pytest.raises(ValueError, match="object"):
        emit({"a": object()})
