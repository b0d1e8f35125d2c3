"""What is no text: by its name, by its first bytes, and what text must never be taken for something else."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sqlite3
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from genesis.data.corpus import Corpus
from genesis.data.readers import SUPPORTED, kind_by_content, kind_by_name, looks_like_records
from genesis.data.readers.stream import HEAD_BYTES
from genesis.data.record_formats import FieldNames, RecordFormat
from genesis.data.records import Defects
from genesis.errors import DataError


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.txt", "text")
    return stream.getvalue()


def tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return stream.getvalue()


def saved_array() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(4))
    return stream.getvalue()


def database() -> bytes:
    with sqlite3.connect(":memory:") as connection:
        connection.execute("create table t (a)")
        data: bytes = connection.serialize()
    connection.close()
    return data


HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
# As real writers make them, where Python has one.
BINARY = {
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF\0",
    "gif": b"GIF89a\x01\0\x01\0",
    "picture": b"RIFF\x24\x10\0\0WEBPVP8 ",
    "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "sound": b"ID3\x04\0\0\0\0\0\0",
    "video": b"\0\0\0\x20ftypisom",
    "parquet": b"PAR1\x15\x04\x15\x10",
    "arrow": b"ARROW1\0\0",
    "gguf": b"GGUF\x03\0\0\0" + bytes(16),
    "safetensors": struct.pack("<Q", len(HEADER)) + HEADER + bytes(4),
    "pickle": b"\x80\x04\x95\x1a\0\0\0\0\0\0\0}",
    "numpy": saved_array(),
    "weights": b"\x89HDF\r\n\x1a\n\0",
    "database": database(),
    "archive": zipped(),
    "program": Path(sys.executable).read_bytes()[:100],
    "font": b"wOF2\0\x01\0\0",
    "binary": bytes(range(256)),
}
ARCHIVES = {
    "tar": tarred(),
    "bz2": bz2.compress(b"text"),
    "xz": lzma.compress(b"text"),
    "gz": gzip.compress(b"text"),
    "zst": b"\x28\xb5\x2f\xfd\x24\x04\x21\0\0text",
}


@pytest.mark.parametrize("kind", BINARY)
def test_content_that_is_no_text_is_refused_under_any_name_and_the_kind_is_said(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(BINARY[kind])
    assert kind_by_content(BINARY[kind]) == kind
    for on_error in ("fail", "skip"):
        corpus = Corpus([str(path)], on_error=on_error, max_line_bytes=1024)
        with pytest.raises(DataError, match=f"the file is not text: {kind}") as caught:
            list(corpus.documents(Defects()))
        assert caught.value.exit_code == 4
        assert SUPPORTED in caught.value.next and str(path) == caught.value.where


def test_empty_texts_of_a_folder_are_not_read(tmp_path: Path) -> None:
    """Every Python package has an empty file; one that is named is an error."""
    (tmp_path / "__init__.py").write_bytes(b"")
    (tmp_path / "b.md").write_text("\n\n")
    (tmp_path / "c.py").write_text("pass")
    corpus = Corpus([str(tmp_path)], on_error="fail", max_line_bytes=1024)
    assert [document.text for document in corpus.documents()] == ["pass"]
    assert str(corpus.counts()) == "files read: 1 text; not read: 1 empty document, 1 empty file"
    with pytest.raises(DataError, match="the file is empty"):
        list(Corpus([str(tmp_path / "__init__.py")], on_error="fail", max_line_bytes=1024).documents())


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_are_told_by_their_content(name: str) -> None:
    assert kind_by_content(ARCHIVES[name]) == "archive"


def test_a_packed_or_mislabelled_jsonl_file_is_judged_by_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BINARY["parquet"])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(BINARY["png"]))
    (tmp_path / "c.gz").write_bytes(gzip.compress(ARCHIVES["tar"]))
    (tmp_path / "d.txt").write_text("text")
    corpus = Corpus([str(tmp_path)], on_error="fail", max_line_bytes=1024)
    assert [document.text for document in corpus.documents()] == ["text"]
    assert str(corpus.counts()) == "files read: 1 text; not read: 1 archive, 1 parquet, 1 png"


@pytest.mark.parametrize(
    "name,kind",
    [
        ("a.psv", "table"),
        ("A.PSV", "table"),
        ("a.psv.gz", "table"),
        ("a.geojson", "json"),
        ("a.json5.gz", "json"),
        ("x/a.parquet.gz", "parquet"),
        ("model.safetensors", "safetensors"),
        ("m.Q4.gguf", "gguf"),
        ("pytorch_model.bin", "weights"),
        ("a.jpg", "jpeg"),
        ("a.tar.gz", "archive"),
        ("a.pkl", "pickle"),
        ("a.exe", "program"),
        *[
            (name, None)
            for name in (
                "a",
                "csv",
                "a.csv.gz",
                "A.CSV",
                "a.json",
                "a.json.gz",
                "a.parquet",
                ".json",
                "a.txt",
                "a.md",
                "a.jsonl",
                "a.gz",
                "a.ts",
                "png/a",
                "a.xml",
            )
        ],
    ],
)
def test_names_that_promise_something_else_than_text(name: str, kind: str | None) -> None:
    if name == ".json":
        name = "json"
    assert kind_by_name(name) == kind


@pytest.mark.parametrize("name", ["a.psv", "a.json5", "a.parquet.gz", "a.png"])
def test_a_named_file_is_an_error_before_it_is_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)  # reading it would wait for ever
    with pytest.raises(DataError, match=r"the file is not text.*by its name"):
        Corpus([f"{tmp_path}/*", str(tmp_path / name)], on_error="skip", max_line_bytes=1024)


@pytest.mark.parametrize(
    "text",
    [
        "MZ is short for Mark Zbikowski",
        "PAR1 of the course",
        "GGUF is a format",
        "ID3 tags",
        "BM25 ranks",
        "OTTO was here",
        "PK is a city code",
        "\x1b[31mred\x1b[0m\f\v\r\n" * 9,
        "\x7f in a text of some length, which one such sign does not spoil",
        "Rar! says the lion",
        '{"w": 1}',
        "[1, 2]",
        "a,b\n1,2\n",
        "\ufeffwith a mark",
        "ümläut 漢字 🎈",
        "",
        "II* and MM*",
        "ARROW1 points",
        "RIFF abcdWAVY",
    ],
)
def test_text_is_never_taken_for_something_else(text: str) -> None:
    for encoding in ("utf-8", "latin-1", "utf-16"):
        assert kind_by_content(text.encode(encoding, "replace")[:HEAD_BYTES]) is None


def test_bytes_without_a_known_beginning_are_binary_by_their_control_characters() -> None:
    random = np.random.default_rng(5)
    data = random.integers(1, 256, 4096).astype("u1").tobytes()
    assert kind_by_content(b"x" + data) == "binary"
    assert kind_by_content(b"text with one NUL\0") == "binary"


def test_a_defect_in_a_text_of_a_folder_is_still_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("UTF-16 text".encode("utf-16"))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match="save it as UTF-8"):
        list(Corpus([str(tmp_path)], on_error="fail", max_line_bytes=1024).documents())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"messages": [{"role": "user"', True),
        ('\ufeff\n{\n  "id" : 3, "text": "a"}', True),
        ('[ {"prompt": "a"', True),
        ("prompt,completion\na,b\n", True),
        ('"instruction","input","output"\r\n', True),
        ("[1, 2] are numbers", False),
        ("{x: 1} is a set", False),
        ("text\nand more", False),
        ("Apples,pears\nare fruit", False),
        ("prompt, completion\n", False),
        ("prompt,completion", False),  # no line yet
        ("", False),
    ],
)
def test_records_that_are_named_as_text_are_told(text: str, found: bool) -> None:
    names = RecordFormat().names
    for name in ("data/chats.txt", "chats", "chats.TXT.gz"):
        assert looks_like_records(name, text.encode(), names) == found
    for name in ("a.ipynb", "a.py", "a.jsonl"):
        assert not looks_like_records(name, text.encode(), names)


def test_files_that_look_like_records_are_counted_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.txt").write_text('{"body": "one"}\n')
    with gzip.open(tmp_path / "c.txt.gz", "wb") as file:
        file.write(b"question,answer\n1,2\n")
    fields: FieldNames = {"prompt": "question", "completion": "answer"}
    corpus = Corpus([str(tmp_path)], on_error="fail", max_line_bytes=1024, fields=fields)
    for _ in range(2):
        assert len(list(corpus.documents())) == 3
    assert [Path(name).name for name in corpus.counts().like_records] == ["b.txt", "c.txt.gz"]
