"""Reports: one declaration of a column serves JSON, the terminal and Markdown."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from genesis.errors import DeviceError
from genesis.measure.record import Column, Failure, Report, Table, listed, to_markdown, to_text

COLUMNS = [
    Column("name", "op", "text", "Name of the op."),
    Column("wall", "wall time", "s", "Median of a call.", "times.0.wall"),
    Column("bytes", "moves", "bytes", "Bytes that a call moves.", "moved.bytes"),
    Column("kernels", "kernels", "count", "Kernels of a call.", lambda m: None),
    Column("samples", "samples", "count", "Samples kept.", lambda m: 51, hidden=True),
]
MEASURED = [
    SimpleNamespace(name="add", times=[SimpleNamespace(wall=12.34e-6)], moved={"bytes": 7 << 20}),
    {"name": "a|b", "times": [{"wall": float("nan")}], "moved": None},
]


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (DeviceError("a kernel failed"), "a kernel failed", 6),
        (MemoryError("4 TiB"), "MemoryError: 4 TiB", 7),
        (KeyError("x"), "KeyError: 'x'", 70),
    ],
)
def test_a_failure_has_the_message_and_exit_code_of_its_error(error: Exception, text: str, code: int) -> None:
    assert Failure.of("sort", "3x3", error) == Failure("sort", "3x3", text, code)


def report(tables: list[Table]) -> Report:
    failures = [Failure("sort", "3x3", "no\x1b[2Jroom", 7)]
    return Report("bench-ops", "genesis bench ops", "cpu", "EPYC", {}, {"dtype": "float32"}, tables, failures)


def test_a_table_for_the_terminal_shows_what_some_row_fills() -> None:
    lines = list(to_text(report([Table("ops", "Ops", COLUMNS, MEASURED)])))
    at = lines.index("Ops")
    assert lines[at + 1 : at + 4] == ["op   wall time    moves", "add    12.3 µs  7.0 MiB", "a|b"]
    assert lines[-1] == "failed  sort 3x3: no\\x1b[2Jroom"


def test_markdown_escapes_what_would_break_a_cell() -> None:
    lines = list(to_markdown(report([Table("ops", "Ops", COLUMNS, MEASURED)])))
    at = lines.index("## Ops")
    assert lines[at + 2 : at + 6] == [
        "| op | wall time | moves |",
        "|---|---:|---:|",
        "| add | 12.3 µs | 7.0 MiB |",
        "| a\\|b |  |  |",
    ]


def test_json_has_every_cell_and_the_meaning_of_each_column() -> None:
    data = json.loads(report([Table("ops", "Ops", COLUMNS, MEASURED)]).to_json())
    (ops,) = data["tables"]
    assert [c["key"] for c in ops["columns"]] == ["name", "wall", "bytes", "kernels", "samples"]
    assert all(c["about"].endswith(".") for c in ops["columns"])
    assert ops["rows"][0] == {"name": "add", "wall": 12.34e-6, "bytes": 7 << 20, "kernels": None, "samples": 51}
    assert ops["rows"][1]["wall"] is None  # JSON has no NaN
    assert data["failures"] == [{"name": "sort", "label": "3x3", "error": "no\x1b[2Jroom", "exit_code": 7}]


def test_a_listed_table_is_a_block_of_lines_for_each_row() -> None:
    found = Table("ops", "", COLUMNS, MEASURED[:1], listed=True)
    assert list(listed(found)) == ["add", "  wall time  12.3 µs", "  moves      7.0 MiB"]
