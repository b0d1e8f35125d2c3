"""Lines on a terminal are broken at words; elsewhere they stay as they are."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import numpy as np
import pytest

from genesis.train.output import Output, WordWrap, wrapped
from genesis.train.progress import Progress


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, list[str]]]:
    """A terminal of this width, and the lines that were written when it is closed."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    lines: list[str] = []
    with open(theirs, "w", encoding="utf-8") as stream:
        yield stream, lines
    data = b""
    with suppress(OSError):  # that nobody writes any more
        while part := os.read(ours, 1 << 16):
            data += part
    os.close(ours)
    lines += data.decode().replace("\r\n", "\n").split("\n")


@pytest.mark.parametrize(
    "text, columns, lines",
    [
        ("a line of some words", 10, ["a line of", "some words"]),
        ("exactly te", 10, ["exactly te"]),
        ("  indented words here", 12, ["  indented", "words here"]),
        ("one\n\ntwo words", 7, ["one", "", "two", "words"]),
        ("a averylongwordindeed b", 8, ["a", "averylongwordindeed b"]),
        ("日本語の文章です", 6, ["日本語", "の文章", "です"]),
        ("ab 日本 cd", 6, ["ab 日", "本 cd"]),
        ("e\u0301e\u0301e\u0301 e\u0301e\u0301", 6, ["e\u0301e\u0301e\u0301 e\u0301e\u0301"]),
        ("a\tb c", 9, ["a\tb", "c"]),
        ("no width is known", None, ["no width is known"]),
    ],
)
def test_where_lines_are_broken(text: str, columns: int | None, lines: list[str]) -> None:
    assert wrapped(text, columns).split("\n") == lines


def test_a_text_in_pieces_is_broken_alike() -> None:
    draw, alphabet = np.random.default_rng(0), list("abc  \n日é,")
    for _ in range(50):
        text = "".join(draw.choice(alphabet, 80))
        wrap, pieces = WordWrap(9), np.array_split(list(text), 23)
        done = "".join(wrap.push("".join(piece)) for piece in pieces) + wrap.finish()
        assert done == wrapped(text, 9)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_whole_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = " ".join(["start-up lines and 日本語 answers"] * 9)
    with terminal(columns) as (stream, lines):
        output = Output(stream)
        output.line(text)
        output.flow(iter([text[:13], text[13:14], text[14:]]))
        output.line()
        with Progress(4, stream=output) as progress:
            progress.note(text)
    whole = wrapped(text, columns).split("\n")
    assert lines[: 2 * len(whole)] == whole * 2
    noted = [line.split("\x1b[2K")[-1] for line in lines[2 * len(whole) :]]  # behind what the bar drew there
    assert all(line in noted for line in whole)


def test_elsewhere_a_line_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    told = io.StringIO()
    Output(told).line("words " * 40)
    Output(told).flow(["words " * 40, "and\n"])
    assert told.getvalue().count("\n") == 2
