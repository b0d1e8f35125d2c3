"""Files of records: arrays in JSON, CSV, Parquet; what is read, every defect with file, line and field, every limit."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from genesis.data.corpus import Corpus
from genesis.data.readers import json_records, parquet
from genesis.data.records import Completion, Conversation, Defect, Defects, Document
from genesis.errors import DataError

MAX_LINE = 8192
CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
CALL = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"a": 2}, "name": "add"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "4"},
    ]
}


def as_array(records: list[Any], indent: int | None = None) -> bytes:
    return json.dumps(records, indent=indent).encode()


def as_lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def as_csv(rows: list[list[str]]) -> bytes:
    stream = io.StringIO()
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode()


def as_parquet(records: list[Any] | pyarrow.Table, **options: Any) -> bytes:
    stream = io.BytesIO()
    table = records if isinstance(records, pyarrow.Table) else pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, stream, **options)
    return stream.getvalue()


def read(path: Path, defects: Defects | None = None, **settings: Any) -> list[Document]:
    on_error: Any = "fail" if defects is None else "skip"
    corpus = Corpus([str(path)], on_error=on_error, max_line_bytes=MAX_LINE, **settings)
    return list(corpus.documents(defects))


@pytest.mark.parametrize("records", [[CHAT], [CHAT, CALL, CHAT], [CALL] * 300])
def test_the_same_records_of_every_format_are_the_same_documents(tmp_path: Path, records: list[Any]) -> None:
    files = {
        "a.jsonl": as_lines(records),
        "a.json": as_array(records),
        "b.json": b"\xef\xbb\xbf \n" + as_array(records, indent=2) + b"\n",
        "c.json.gz": gzip.compress(as_array(records, indent=1)),
        "d.json": as_lines(records),
        "e.csv": as_csv([["id", "messages"], *(["x", json.dumps(record["messages"])] for record in records)]),
        "f.parquet": as_parquet(records),
        "g.pq": as_parquet(records, compression="zstd", row_group_size=2),
    }
    texts = {}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        texts[name] = [document.text for document in read(tmp_path / name)]
    assert len(texts["a.jsonl"]) == len(records)
    assert all(found == texts["a.jsonl"] for found in texts.values())


def test_documents_carry_their_lines_and_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"[\n" + as_array([CHAT])[1:-1] + b"\n,\n\n" + as_array([CHAT])[1:])
    rows = [["prompt", "completion"], ["two\nlines", "c"], [], ["p", 'q"uote, comma']]
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + as_csv(rows))
    (tmp_path / "c.parquet").write_bytes(as_parquet([{"text": "one", "x": 1}, {"text": "two", "x": 2}]))
    found = [*read(tmp_path / "a.json"), *read(tmp_path / "b.csv"), *read(tmp_path / "c.parquet")]
    names = [document.name.removeprefix(f"{tmp_path}/") for document in found]
    assert names == ["a.json:2", "a.json:5", "b.csv:2", "b.csv:5", "c.parquet:1", "c.parquet:2"]
    assert [document.record for document in found[2:4]] == [
        Completion("two\nlines", "c"),
        Completion("p", 'q"uote, comma'),
    ]
    assert [document.text for document in found[4:]] == ["one", "two"]


TEXT = b'{"text": "good"}'
GOOD = b"[" + TEXT + b",\n"
BIG = json.dumps({"text": "x" * MAX_LINE}).encode()


def footer(length: int, magic: bytes = b"PAR1") -> bytes:
    return b"PAR1" + bytes(40) + struct.pack("<I", length) + magic


def two_columns_of_one_name() -> bytes:
    return as_parquet(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"]))


def bad_utf8() -> bytes:
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(struct.pack("<3i", 0, 4, 8)), pyarrow.py_buffer(b"goodba\xffd")]
    )
    return as_parquet(pyarrow.Table.from_arrays([text], names=["text"]))


# name, bytes, kind, line (with what follows it), a part of the message, the good records
DEFECTS: list[tuple[str, bytes, str, str, str, int]] = [
    ("a.json", b"", "empty file", "1", "no records", 0),
    ("a.json", b" [ ] ", "empty file", "1", "no records", 0),
    ("a.json", b'"text"', "bad JSON", "1", "does not hold a JSON array", 0),
    ("a.json", GOOD + TEXT, "bad JSON", "2", "not closed", 1),
    ("a.json", GOOD + b'{"text": "cut', "bad JSON", "2", "not closed", 1),
    ("a.json", GOOD + b'{"text": "cut\\', "bad JSON", "2", "not closed", 1),
    ("a.json", GOOD, "bad JSON", "2", "not closed", 1),
    ("a.json", GOOD + b"]", "bad JSON", "2: [1]", "a record is missing", 1),
    ("a.json", GOOD + b"," + TEXT + b"]", "bad JSON", "2: [1]", "a record is missing", 2),
    ("a.json", GOOD + TEXT + b"}]", "bad JSON", "2", "a } has no opening bracket", 1),
    ("a.json", GOOD + TEXT + b"]\n x", "bad JSON", "3", "text follows", 2),
    ("a.json", GOOD + b"\n[" * 2700 + b"]" * 2700 + b"]", "bad JSON", "3: [1]", "500 levels", 1),
    ("a.json", GOOD + b'{"text":\n "a"\n "b"},' + TEXT + b"]", "bad JSON", "4: [1]", "Expecting ',' delimiter", 2),
    ("a.json", GOOD + b'{"text": ["a"}},' + TEXT + b"]", "bad JSON", "2: [1]", "Expecting", 2),
    ("a.json", GOOD + b'{"text": "a", "text": "b"},' + TEXT + b"]", "bad JSON", "2: [1]", "'text' appears twice", 2),
    ("a.json", GOOD + b'{"text": "\\ud800"},' + TEXT + b"]", "bad JSON", "2: [1]", "half a surrogate pair", 2),
    ("a.json", GOOD + b'{"text": NaN}]', "wrong type", "2: [1].text", "holds a number", 1),
    ("a.json", GOOD + b'{"text": "a\\u0000"}]', "NUL byte", "2: [1].text", "NUL", 1),
    ("a.json", GOOD + b'"text",' + TEXT + b"]", "no record", "2: [1]", "is a string", 2),
    ("a.json", GOOD + b'{"text": "caf\xe9"},' + TEXT + b"]", "invalid UTF-8", "2", "0xe9", 2),
    ("a.json", GOOD + BIG + b"," + TEXT + b"]", "huge line", "2: [1]", "data.max_line_bytes", 2),
    ("a.json", GOOD + b'{"messages": [{"role": "user"}]}]', "wrong type", "2: [1].messages[0].content", "null", 1),
    ("a.json.gz", gzip.compress(b"[" + b" " * (17 << 20), mtime=0), "bad gzip", "1", "more than 200 times", 0),
    ("a.csv", b"", "empty file", "1", "no records", 0),
    ("a.csv", b"text\n\n", "empty file", "1", "no records", 0),
    ("a.csv", b"text,text\na,b\n", "bad CSV", "1", "'text' appears twice", 0),
    ("a.csv", b"te\xff,text\na,b\n", "invalid UTF-8", "1", "the header", 0),
    ("a.csv", b"," * 20000 + b"\n1\n", "huge line", "1", "more than 8,192 bytes", 0),
    ("a.csv", b"a,b\n1,2\n", "missing field", "2", "its fields: 'a', 'b'", 0),
    ("a.csv", b"text,n\ngood,1\nbad\ngood,2\n", "bad CSV", "3", "1 columns, the header 2", 2),
    ("a.csv", b"text,n\ngood,1\na,b,c\ngood,2\n", "bad CSV", "3", "3 columns, the header 2", 2),
    ("a.csv", b'text\ngood\n"open\nand\n', "bad CSV", "3", "the rest of the file is not read", 1),
    ("a.csv", b'text\ngood\n"a"b\ngood\n', "bad CSV", "3", "the row is not CSV", 1),
    ("a.csv", b"text\ngood\nc\xe9\ngood\n", "invalid UTF-8", "3: text", "not UTF-8", 2),
    ("a.csv", b"text\n" + b"good\n" * 2000 + b"a\0b\ngood\n", "NUL byte", "2002: text", "NUL", 2001),
    ("a.csv", b"text,n\ngood,1\n ,2\n", "empty document", "3: text", "no text", 1),
    ("a.csv", b"text\ngood\n" + b"x" * 9000 + b"\n", "huge line", "3", "more than 8,192 bytes", 1),
    ("a.csv", b'text\ngood\n"' + b"x\n" * 9000, "huge line", "3", "a quote is never closed", 1),
    ("a.csv", b"messages\n[3]\n", "wrong type", "2: messages[0]", "is a number", 0),
    ("a.parquet", b"", "bad Parquet", "1", "footer", 0),
    ("a.parquet", b"PAR1", "bad Parquet", "1", "footer", 0),
    ("a.parquet", b"not Parquet at all", "bad Parquet", "1", "footer", 0),
    ("a.parquet", footer(20), "bad Parquet", "1", "damaged", 0),
    ("a.parquet", footer(41), "bad Parquet", "1", "footer", 0),
    ("a.parquet", footer(2**32 - 1), "bad Parquet", "1", "footer", 0),
    ("a.parquet", footer(20, b"PARE"), "bad Parquet", "1", "footer", 0),
    ("a.parquet", as_parquet([{"text": "a"}] * 9)[:-9], "bad Parquet", "1", "footer", 0),
    ("a.parquet", as_parquet([{"body": "a", "id": 1}]), "missing field", "1", "its fields: 'body', 'id'", 0),
    ("a.parquet", as_parquet([{"text": "good"}, {"text": None}]), "wrong type", "2: text", "holds null", 1),
    ("a.parquet", as_parquet([{"text": b"a"}]), "wrong type", "1: text", "a value of type bytes", 0),
    ("a.parquet", as_parquet([{"text": "good"}, {"text": "a\0"}]), "NUL byte", "2: text", "NUL", 1),
    ("a.parquet", as_parquet([{"text": "good"}, {"text": "x" * 8193}]), "huge line", "2", "more than 8,192 bytes", 1),
    ("a.parquet", as_parquet([CHAT, {"messages": []}]), "empty conversation", "2: messages", "no messages", 1),
    ("a.parquet", as_parquet([{"text": "x" * 8000}] * 4000), "bad Parquet", "", "more than 200 times", -1),
    ("a.parquet", as_parquet([{"text": "a", **{f"c{n}": n for n in range(2000)}}]), "bad Parquet", "1", "2,000", 0),
    ("a.parquet", two_columns_of_one_name(), "bad Parquet", "1", "'text' appears twice", 0),
    ("a.parquet", bad_utf8(), "bad Parquet", "1", "UTF8", 0),
    ("a.parquet", as_parquet(pyarrow.table({"text": pyarrow.array([], "string")})), "empty file", "1", "no records", 0),
]  # fmt: skip


@pytest.mark.parametrize("name,data,kind,line,message,good", DEFECTS)
def test_a_defect_is_an_error_or_counted(
    tmp_path: Path, name: str, data: bytes, kind: str, line: str, message: str, good: int
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.exit_code == 4
    assert (getattr(caught.value, "kind", ""), message in str(caught.value)) == (kind, True), str(caught.value)
    assert caught.value.where == f"{path}:{line}" or not line
    assert "data.on_error=skip" in caught.value.next
    defects = Defects()
    assert len(read(path, defects)) == good or good < 0
    assert defects.counts == {kind: 1}
    assert defects.examples[kind].startswith(f"{path}:{line}")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", 'question;answer;n\n"a;b, ""c""";"d\ne";1,5\n'),
        ("a.csv", '\ufeff"question";"answer";n\r\n"a;b, ""c""";"d\ne";1,5\r\n'),
        ("a.csv", 'sep=;\r\nquestion;answer;n\r\n"a;b, ""c""";"d\ne";1,5\r\n'),
        ("a.csv", '\n"a;\n,b";question;answer\n1;"a;b, ""c""";"d\ne"\n'),
        ("a.tsv", 'question\tanswer\tn\na;b, "c"\t"d\ne"\t1,5\n'),
        ("a.TAB", '"question"\tanswer\tn, o; p\n"a;b, ""c"""\t"d\ne"\t1\n'),
        ("a.tsv", 'question,answer\n"a;b, ""c""","d\ne"\n'),
        ("a.csv", 'question\tanswer\n"a;b, ""c"""\t"d\ne"\n'),
    ],
)
def test_tables_have_commas_semicolons_or_tabs(tmp_path: Path, name: str, data: str) -> None:
    for packed in (False, True):
        path = tmp_path / (name + ".gz" * packed)
        path.write_bytes(gzip.compress(data.encode()) if packed else data.encode())
        documents = list(Corpus([str(path)], on_error="fail", max_line_bytes=MAX_LINE).documents())
        record = documents[0].record
        assert isinstance(record, Conversation)
        assert [message["content"] for message in record.messages] == ['a;b, "c"', "d\ne"]


@pytest.mark.parametrize("header", ["question;answer,n", "question\tanswer;n", "a,b\tc"])
def test_a_table_that_can_be_divided_in_two_ways_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,2;3\n")
    with pytest.raises(Defect, match="either may separate") as caught:
        list(Corpus([str(tmp_path / "a.csv")], on_error="fail", max_line_bytes=MAX_LINE).documents())
    assert (caught.value.kind, caught.value.where) == ("bad CSV", f"{tmp_path / 'a.csv'}:1")


def test_what_stands_in_a_folder_is_read_or_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\na\n")
    (tmp_path / "b.json").write_bytes(as_array([{"text": "b"}]))
    (tmp_path / "c.json").write_bytes(b'{"name": "a package", "files": []}')
    (tmp_path / "d.parquet").write_bytes(as_parquet([{"text": "d"}]))
    (tmp_path / "e.txt").write_bytes(b"e")
    corpus = Corpus([str(tmp_path)], on_error="fail", max_line_bytes=MAX_LINE)
    assert [document.text for document in corpus.documents()] == ["a", "b", "d", "e"]
    assert str(corpus.counts()) == "files read: 1 csv, 1 json, 1 parquet, 1 text; not read: 1 json"
    (tmp_path / "f.csv").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(DataError, match="fields match no format"):
        list(corpus.__class__([str(tmp_path)], on_error="fail", max_line_bytes=MAX_LINE).documents())


def test_without_pyarrow_a_parquet_file_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet([{"text": "a"}]))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for defects in (None, Defects()):  # what is left out is never a whole file for want of a library
        with pytest.raises(DataError, match="pyarrow") as caught:
            read(tmp_path / "a.parquet", defects)
        assert "pyarrow>=18" in caught.value.next and caught.value.where == str(tmp_path / "a.parquet")


def test_pyarrow_is_imported_for_parquet_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\na\n")
    program = (
        "import sys\nfrom genesis.data.corpus import Corpus\n"
        "assert list(Corpus([sys.argv[1]], on_error='fail', max_line_bytes=1024).documents())\n"
        "assert not [name for name in sys.modules if name.startswith('pyarrow')]"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.csv")], check=True)


def test_of_parquet_only_what_is_used_is_read(tmp_path: Path) -> None:
    rows = [{"extra": np.random.default_rng(n).bytes(4000), "text": f"text {n}"} for n in range(300)]
    (tmp_path / "a.parquet").write_bytes(as_parquet(rows))
    assert [document.text for document in read(tmp_path / "a.parquet")] == [row["text"] for row in rows]
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    (tmp_path / "a.parquet").write_bytes(as_parquet(table))
    assert [document.text for document in read(tmp_path / "a.parquet")] == ["a", "b", "a"]


def peak_while(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_is_taken_for_records_not_for_files(tmp_path: Path) -> None:
    records = [{"text": f"{n} " + "x" * 4000} for n in range(1200)]
    (tmp_path / "a.json").write_bytes(as_array(records))
    (tmp_path / "a.csv").write_bytes(as_csv([["text"], *([record["text"]] for record in records)]))
    (tmp_path / "b.json").write_bytes(b'[{"text": "' + b"x" * (6 << 20) + b'"}]')
    (tmp_path / "b.csv").write_bytes(b'text\n"' + b"x\n" * (3 << 20))
    for path in sorted(tmp_path.iterdir()):
        corpus = Corpus([str(path)], on_error="skip", max_line_bytes=MAX_LINE)
        count = 0

        def work(corpus: Corpus = corpus) -> None:
            nonlocal count
            count = sum(1 for _ in corpus.documents())

        assert peak_while(work) < 4 << 20, path
        assert count == (1200 if path.name.startswith("a") else 0)


def test_a_record_of_too_many_parts_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "MAX_CONTAINERS", 10)
    (tmp_path / "a.jsonl").write_bytes(
        json.dumps({"text": "[{" * 20}).encode() + b'\n{"text": "a", "b": [' + b"[]," * 9
    )
    defects = Defects()
    assert [document.text for document in read(tmp_path / "a.jsonl", defects)] == ["[{" * 20]
    assert defects.examples == {"bad JSON": f"{tmp_path}/a.jsonl:2: the JSON contains more than 10 lists and objects"}


def random_record(random: np.random.Generator) -> dict[str, Any]:
    def text() -> str:
        alphabet = 'ab \n\t"\\/,{}[]:\u2028ü漢🎈'
        return "x" + "".join(alphabet[i] for i in random.integers(0, len(alphabet), random.integers(0, 30)))

    turns = [{"role": role, "content": text()} for role in ("user", "assistant") * int(random.integers(1, 3))]
    kinds = [
        {"text": text()},
        {"prompt": text(), "completion": text()},
        {"messages": turns, "tools": [{"name": text(), "parameters": {text(): text()}}]},
        {"instruction": text(), "input": text(), "output": text(), "history": [[text(), text()]]},
    ]
    return kinds[random.integers(len(kinds))]


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    found = bytearray(data)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(len(found)))
        kind = random.integers(4)
        if kind == 0:
            found[at] = int(random.integers(256))
        elif kind == 1:
            del found[max(1, at) : at + int(random.integers(1, 20))]
        elif kind == 2:
            found[at:at] = random.choice(list(b'"\\[]{},\0\n\xff'), 3).astype("u1").tobytes()
        else:
            del found[max(1, at) :]
    return bytes(found)


def problem(path: Path, defects: Defects | None) -> bool:
    """Whether reading `path` is refused, with an error of the data that names the file."""
    found = None
    try:
        read(path, defects)
    except DataError as error:
        found = error
    assert found is None or (found.where.startswith(str(path)) and str(found).isprintable()), found
    return found is not None


def test_random_records_are_read_and_damaged_files_end_in_data_errors(tmp_path: Path) -> None:
    random = np.random.default_rng(20)
    refused = 0
    for trial in range(24):
        records = [random_record(random) for _ in range(int(random.integers(1, 6)))]
        kind = records[0].keys()
        alike = [record for record in records if record.keys() == kind]
        whole = {"a.jsonl": as_lines(records), "a.json": as_array(records, indent=trial % 3 or None)}
        whole["b.parquet"] = as_parquet(alike)
        if "prompt" in kind or "text" in kind:
            whole["b.csv"] = as_csv([list(kind), *(list(record.values()) for record in alike)])
        texts: dict[str, list[str]] = {"a": [], "b": []}
        for name, data in whole.items():
            (tmp_path / name).write_bytes(data)
            found = [document.text for document in read(tmp_path / name)]
            assert texts.setdefault(name[0], found) in (found, []), name
            texts[name[0]] = found
            for _ in range(3):
                (tmp_path / name).write_bytes(damaged(data, random))
                refused += sum(problem(tmp_path / name, defects) for defects in (None, Defects()))
    assert refused > 120


def test_the_footer_of_parquet_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet([{"text": "a"}]))
    monkeypatch.setattr(parquet, "MAX_FOOTER_BYTES", 10)
    with pytest.raises(DataError, match="more than the 10 allowed"):
        read(tmp_path / "a.parquet")


def test_a_deep_record_with_many_brackets_in_a_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_records, "MAX_CONTAINERS", 300)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "[" * 400, "more": deep}) + "\n")
    defects = Defects()
    assert [document.text for document in read(tmp_path / "a.jsonl", defects)] == ["[" * 400]
