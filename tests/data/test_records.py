"""Documents from files: what is read, and every defect with its file, its line and its kind."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from genesis.data.corpus import Corpus
from genesis.data.readers import stream
from genesis.data.readers.stream import HEAD_BYTES
from genesis.data.records import Defects, Document
from genesis.errors import DataError

MAX_LINE = 8192
GOOD = b'{"text": "good"}\n'


def corpus(*sources: Path | str, on_error: Literal["fail", "skip"] = "fail", **settings: Any) -> Corpus:
    return Corpus([str(s) for s in sources], on_error=on_error, max_line_bytes=MAX_LINE, **settings)


def texts(*sources: Path | str, **settings: Any) -> list[str]:
    return [document.text for document in corpus(*sources, **settings).documents()]


def record(value: object) -> bytes:
    return json.dumps({"text": value}).encode() + b"\n"


# name, bytes, kind, line, a part of the message
BLANK = gzip.compress(b"\n" * (17 << 20), mtime=0)

DEFECTS: list[tuple[str, bytes, str, int, str]] = [
    ("a.txt", b"one\ntwo\nth\xffree\n", "invalid UTF-8", 3, "byte 3 of the line, 0xff"),
    ("a.txt", b"one\ntwo\xe2\x82", "invalid UTF-8", 2, "unexpected end of data"),
    ("a.txt", "utf-16 text".encode("utf-16"), "invalid UTF-8", 1, "save it as UTF-8"),
    ("a.txt", b"one\ntwo\n\n" + b"x" * HEAD_BYTES + b"bi\0nary", "NUL byte", 4, "binary data"),
    ("a.txt", b"", "empty file", 1, "the file is empty"),
    ("a.txt", b" \n\t\r\n", "empty document", 1, "only white space"),
    ("a.txt", b"\xef\xbb\xbf", "empty document", 1, "only white space"),
    ("a.txt.gz", b"not gzip at all", "bad gzip", 1, "damaged or cut short"),
    ("a.txt.gz", gzip.compress(b"text\n" * 9999, mtime=0)[:-20], "bad gzip", 1, "damaged or cut short"),
    ("a.txt.gz", BLANK, "bad gzip", (16 << 20) + 1, "grows to more than 200 times"),
    ("a.jsonl", GOOD + b'{"text": "caf\xe9"}\n', "invalid UTF-8", 2, "byte 14 of the line, 0xe9"),
    ("a.jsonl", GOOD * 2 + b'{"text": "cut', "bad JSON", 3, "Unterminated string starting at (column 10)"),
    ("a.jsonl", GOOD + b"{'text': 'quotes'}\n" + GOOD, "bad JSON", 2, "(column 2)"),
    ("a.jsonl", GOOD + b"[" * 8000 + b"\n", "bad JSON", 2, "500 levels"),
    ("a.jsonl", GOOD + b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "bad JSON", 2, "that is too large"),
    ("a.jsonl", GOOD + b'{"text": "a", "text": "b"}\n', "bad JSON", 2, "'text' appears twice"),
    ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "bad JSON", 2, "half a surrogate pair"),
    ("a.jsonl", b'[{"text": "a"},\n' + GOOD, "bad JSON", 1, "a JSON array"),
    ("a.jsonl", GOOD + b'["text"]\n', "no record", 2, "is a list"),
    ("a.jsonl", GOOD + b'"text"\n', "no record", 2, "is a string"),
    ("a.jsonl", GOOD + b'\n{"body": 1, "\\u001b[2J": 2}\n', "missing field", 3, r"its fields: 'body', '\x1b[2J'"),
    ("a.jsonl", GOOD + record(3), "wrong type", 2, "holds a number, not a string"),
    ("a.jsonl", GOOD + record(None), "wrong type", 2, "holds null, not a string"),
    ("a.jsonl", GOOD + record(["a"]), "wrong type", 2, "holds a list, not a string"),
    ("a.jsonl", GOOD + record(""), "empty document", 2, "holds no text"),
    ("a.jsonl", GOOD + record(" \n"), "empty document", 2, "holds no text"),
    ("a.jsonl", GOOD + record("a\0b"), "NUL byte", 2, "binary data"),
    ("a.jsonl", GOOD + record("x" * MAX_LINE), "huge line", 2, "data.max_line_bytes"),
    ("a.jsonl", b"", "empty file", 1, "no records"),
    ("a.jsonl", b"\n  \r\n\n", "empty file", 1, "no records"),
    ("a.jsonl.gz", gzip.compress(GOOD * 20000, mtime=0)[:-20], "bad gzip", 0, "damaged or cut short"),
]


@pytest.mark.parametrize("name,data,kind,line,message", DEFECTS)
def test_a_defect_is_an_error_with_file_and_line(
    tmp_path: Path, name: str, data: bytes, kind: str, line: int, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        texts(path)
    error = caught.value
    assert error.exit_code == 4
    assert getattr(error, "kind", None) == kind
    assert message in str(error)
    assert "data.on_error=skip" in error.next
    found_line = int(error.where.removeprefix(f"{path}:").partition(":")[0])
    # Where a decompressor stops within its last block is its own affair: any line past the first records will do.
    assert found_line == line if line else found_line > 1


@pytest.mark.parametrize("name,data,kind,line,message", DEFECTS)
def test_a_defect_is_counted_and_left_out_when_asked_for(
    tmp_path: Path, name: str, data: bytes, kind: str, line: int, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "z.txt").write_text("the next file")
    defects = Defects()
    found = list(corpus(tmp_path, on_error="skip").documents(defects))
    assert defects.counts == {kind: 1} and defects.total == 1
    assert defects.examples[kind].startswith(f"{tmp_path / name}:{line or ''}")
    assert found[-1] == Document("the next file", str(tmp_path / "z.txt"))
    good = data.count(GOOD)
    if not name.endswith(".gz"):
        assert [document.text for document in found[:-1]] == ["good"] * good


def test_the_rest_of_a_file_is_read_after_a_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(record(1) + record("first") + record("x" * 9000) + b"{\n" + record("second") + record(2))
    defects = Defects()
    found = list(corpus(path, on_error="skip").documents(defects))
    assert [(d.text, d.line) for d in found] == [("first", 2), ("second", 5)]
    assert defects.counts == {"wrong type": 2, "huge line": 1, "bad JSON": 1}
    assert defects.examples["wrong type"].startswith(f"{path}:1: ")


def make_unreadable(kind: str, path: Path) -> None:
    factories: dict[str, Callable[[], object]] = {
        "fifo": lambda: os.mkfifo(path),
        "broken link": lambda: path.symlink_to("nowhere"),
        "link to a folder's own loop": lambda: path.symlink_to(path.name),
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    factories[kind]()


@pytest.mark.parametrize("kind", ["fifo", "broken link", "link to a folder's own loop", "device"])
def test_what_is_no_readable_file_is_an_error_and_never_blocks(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.txt"
    make_unreadable(kind, path)
    with pytest.raises(DataError) as caught:
        texts(path)
    assert caught.value.where == f"{path}:1" and getattr(caught.value, "kind", "") == "unreadable"
    defects = Defects()
    assert list(corpus(path, on_error="skip").documents(defects)) == []
    assert defects.counts == {"unreadable": 1}


def test_a_read_error_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 3)

    def fail(self: object, limit: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(stream.Stream, "readline", fail)
    with pytest.raises(DataError, match="reading failed: Input/output error"):
        texts(tmp_path / "a.jsonl")


def test_a_text_file_over_the_limit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.write(b"x" * HEAD_BYTES)
        file.truncate(stream.MAX_DOCUMENT_BYTES + 1)
    tracemalloc.start()
    with pytest.raises(DataError, match="more than 1,073,741,824 bytes"):
        texts(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    packed = tmp_path / "packed.txt.gz"
    packed.write_bytes(gzip.compress(os.urandom(64).hex().encode() * 100))
    monkeypatch.setattr(stream, "MAX_DOCUMENT_BYTES", 1000)
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        texts(packed)


def test_a_huge_line_is_never_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (64 << 20) + b'"}\n' + GOOD)
    tracemalloc.start()
    assert texts(path, on_error="skip") == ["good"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_the_longest_line_allowed_is_read(tmp_path: Path, end: bytes) -> None:
    overhead = len(record("")) - 1
    path = tmp_path / "a.jsonl"
    path.write_bytes(record("x" * (MAX_LINE - overhead))[:-1] + end)
    assert texts(path) == ["x" * (MAX_LINE - overhead)]
    path.write_bytes(record("x" * (MAX_LINE - overhead + 1))[:-1] + end)
    with pytest.raises(DataError, match=r"more than 8,192 bytes"):
        texts(path)


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "first\r\nsecond\rthird\n\n  ünï — 漢字 🎈\x0b\x85end  "
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + record(text) + json.dumps({"text": text}).encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b"\n" + record(text)))
    found = list(corpus(tmp_path).documents())
    assert [document.text for document in found] == [text] * 5
    names = [document.name.removeprefix(f"{tmp_path}/") for document in found]
    assert names == ["a.txt", "b.jsonl:1", "b.jsonl:2", "c.txt.gz", "d.jsonl.gz:2"]


def test_the_text_field_can_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": 1, "body": "yes"}\n')
    assert texts(tmp_path, fields={"text": "body"}) == ["yes"]


def test_a_corpus_can_be_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 3)
    twice = corpus(tmp_path)
    assert list(twice.documents()) == list(twice.documents())


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "evil\x1b]0;title\x07\n.txt"
    path.write_bytes(b"\xff")
    with pytest.raises(DataError) as caught:
        texts(tmp_path)
    assert caught.value.where == rf"{tmp_path}/evil\x1b]0;title\x07\n.txt:1"
    defects = Defects()
    assert list(corpus(tmp_path, on_error="skip").documents(defects)) == []
    assert defects.examples["invalid UTF-8"].isprintable()


def test_files_of_the_standard_library_without_text_are_left_out() -> None:
    sources = corpus("stdlib:")
    found = list(sources.documents())
    assert len(found) > 400
    assert str(sources.counts()) == f"files read: {len(found):,} text"
    assert all(document.text.strip() for document in found)
    assert sum(len(document.text) for document in found) > 5_000_000
