"""Whatever stands in a file or an override, loading ends within 2 s and 256 MiB: a configuration or exit 3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.train.strict_yaml import MAX_BYTES, emit
from tests.train.config_child import well_formed
from tests.train.schema_mutations import BASE, base_config

CHILD = Path(__file__).with_name("config_child.py")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of processes are Linux's")


class Child:
    """A running `config_child.py`."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, str(CHILD), *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, source: bytes) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(len(source).to_bytes(4, "big") + source)
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        self.process.communicate(timeout=20)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(("act", "answer"), [("spin", "time"), ("hog", "memory"), ("raise", "exception"), ("x", "ok")])
def test_the_guard_sees_what_goes_wrong(act: str, answer: str) -> None:
    child = Child("misbehave")
    try:
        assert child.ask(act.encode()) == answer
    finally:
        child.close()


def bombs() -> dict[str, bytes]:
    size = MAX_BYTES
    return {
        "lists": b"[" * size,
        "maps": b"{a: " * (size // 4),
        "dashes": b"- " * (size // 2),
        "questions": b"? " * (size // 2),
        "one long list": b"a: [" + b"1," * (size // 2 - 4) + b"]",
        "comments": b"#\n" * (size // 2),
        "directives": b"%A\n" * (size // 3),
        "documents": b"---\n" * (size // 4),
        "lines of one string": b"a\n" * (size // 2),
        "lines of one quoted string": b'"' + b"a\n" * (size // 2 - 2) + b'"',
        "escapes": b'a: "' + b"\\x41" * (size // 4 - 2) + b'"',
        "block scalar": b"a: |\n" + b"  x\n" * (size // 4 - 3),
        "digits": b"train: {steps: " + b"9" * (size - 20) + b"}",
        "many keys": b"".join(b"k%d: 1\n" % i for i in range(4900)),
        "many unknown keys": b"train:\n" + b"".join(b"  steps%d: 1\n" % i for i in range(4900)),
        "many wrong items": b"eval:\n  prompts: [" + b"{}," * 4900 + b"]\n",
        "long key": b"train:\n  " + b"steps" * 200 + b": 1\n",
        "laughs": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        "version": b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1",
        "far escape": b'a: "\\UFFFFFFFF"',
        "blank": b"\n" * size,
        "carriage returns": b"\r" * size,
        "deep model": b"model: {config: {model_type: x, a: " + b"[" * 12 + b"]" * 12 + b"}}",
        "too big": b"#" * (size + 1),
        "long override": b"\xfe\xfe" + b"a" * 100_000 + b"=1",
        "deep override": b"\xfe\xfe" + b"a." * 50_000 + b"a=1",
        "list override": b"\xfe\xfetrain.steps=" + b"[" * 100_000,
    }


@pytest.mark.sample(cases=7)
@pytest.mark.parametrize("name", list(bombs()))
def test_bombs_are_refused_in_time(child: Child, name: str) -> None:
    assert child.ask(bombs()[name]) == "refused"


def test_an_error_with_an_escape_or_a_gap_is_not_well_formed() -> None:
    assert well_formed("what", "here\nand there", "do")
    assert not well_formed("what\x1b[31m", "here", "do")
    assert not well_formed("what", "", "do")


def test_what_is_right_is_accepted(child: Child) -> None:
    assert child.ask(emit(BASE).encode()) == "ok"
    assert child.ask(emit(BASE).encode() + b"\xfe\xfetrain.steps=7\xfeoptim.lr=1e-5") == "ok"


SIGNS = st.sampled_from(
    [b"\n", b"  ", b": ", b"- ", b"[", b"]", b"{", b"}", b"&a ", b"*a", b"!t ", b"<<: ", b"'", b'"', b"#"]
)
TOKENS = st.sampled_from(
    [b"on", b"12:30", b"1e-5", b"1e999", b".inf", b"-1", b"null", b"\\", b"\t", b"\x00", b"\xff", b"%"]
)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 8), SIGNS | TOKENS | st.binary(max_size=6)), max_size=4))
def test_a_damaged_configuration(child: Child, edits: list[tuple[int, int, bytes]]) -> None:
    text = base_config().resolved_yaml().encode()
    for place, removed, added in edits:
        at = place % len(text)
        text = text[:at] + added + text[at + removed :]
    assert child.ask(text) in ("ok", "refused")


@given(st.lists(SIGNS | TOKENS | st.sampled_from([b"model", b"train", b"steps", b"config"]), max_size=40))
def test_a_heap_of_signs(child: Child, tokens: list[bytes]) -> None:
    assert child.ask(b"".join(tokens)) in ("ok", "refused")


KEYS = [name for name, _ in base_config().settings()]


@given(
    st.sampled_from(KEYS) | st.text(max_size=12),
    st.text(max_size=12) | st.sampled_from(["[", "{a: 1}", "-1", "x:", "&a", "1e5"]),
)
def test_any_override(child: Child, key: str, value: str) -> None:
    override = f"{key}={value}".encode("utf-8", "replace").replace(b"\xfe", b"")
    assert child.ask(emit(BASE).encode() + b"\xfe\xfe" + override) in ("ok", "refused")
