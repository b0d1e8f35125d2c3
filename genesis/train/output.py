"""Text for the user: a stream that may lose its reader, and characters that cannot control a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterable
from typing import TextIO

from genesis.errors import DiskError

# Control characters except for line feed and tab, marks that change the direction of text, and surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with every character that could control a terminal escaped, except for line feeds and tabs."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def output_error(error: OSError) -> DiskError:
    """Return the error of a command that could not print its result."""
    if isinstance(error, DiskError):
        return error
    result = DiskError(f"writing failed: {error.strerror or error}", where="stdout", next="check its destination")
    result.errno = error.errno
    return result


class WordWrap:
    """Breaks text that arrives in pieces into lines of `columns` cells, between words and around wide characters.

    Args:
        columns: None leaves the text unchanged.
    """

    def __init__(self, columns: int | None) -> None:
        self._columns, self._column = columns, 0
        self._space = self._word = ""  # held back until the word is complete

    def push(self, text: str) -> str:
        """Add a piece and return the text that can be written now."""
        if self._columns is None:
            return text
        done = ""
        for char in text:
            if char in " \t\n":
                done += self._flushed()
                self._space += char
                if char == "\n":
                    done, self._space, self._column = done + self._space, "", 0
            elif _cells(char) == 2:  # a line may break before and after it
                done += self._flushed()
                self._word = char
                done += self._flushed()
            else:
                self._word += char
        return done

    def finish(self) -> str:
        """Return the text that was held back."""
        rest, self._space = self._flushed() + self._space, ""
        return rest

    def _flushed(self) -> str:
        """Return the word, after its space or on the next line."""
        if not self._word:
            return ""
        assert self._columns is not None
        word, space = self._word, self._space
        self._word = self._space = ""
        end = len((" " * self._column + space).expandtabs()) + sum(map(_cells, word))
        if self._column and end > self._columns:
            end, space = sum(map(_cells, word)), "\n"
        self._column = end if end <= self._columns else end % self._columns  # the terminal breaks a longer word
        return space + word


def wrapped(text: str, columns: int | None) -> str:
    """Return `text` broken into lines of at most `columns` cells; only single words may be longer."""
    wrap = WordWrap(columns)
    return wrap.push(text) + wrap.finish()


def _cells(char: str) -> int:
    if char.isascii():
        return 1
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(char) in "WF")


class Output:
    """A text stream that records a failure (reader gone, disk full, closed) instead of raising it; a run continues.

    Args:
        stream: destination; None (`sys.stdout` of a process started without one) drops the text.

    Attributes:
        lost: whether writing has failed; text is dropped from then on.
        error: the failure; None if nothing failed or the stream was closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = stream is None
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write `text`. Characters that the stream's encoding lacks are escaped."""
        if self._stream is not None and not self.lost:
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError) as error:
                self._give_up(self._stream, error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream's buffer to the system."""
        if self._stream is not None and not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(self._stream, error)

    def check(self) -> None:
        """Raise the failure of the stream, for commands whose result is their output. A closed reader is fine.

        Raises:
            DiskError: writing failed.
        """
        if self.error is not None and not isinstance(self.error, BrokenPipeError):
            raise output_error(self.error)

    def line(self, text: str = "") -> None:
        """Write printable `text` and a line feed, broken at words on a terminal."""
        self.write(wrapped(printable(text), self.columns) + "\n")
        self.flush()

    def flow(self, pieces: Iterable[str]) -> None:
        """Write printable pieces of a text as they arrive; on a terminal each word is written once it is complete."""
        wrap = WordWrap(self.columns)
        try:
            for piece in pieces:
                self.write(wrap.push(printable(piece)))
                self.flush()
                if self.lost:
                    return
        finally:  # also if the text is interrupted
            self.write(wrap.finish())

    @property
    def columns(self) -> int | None:
        """Width of the terminal; None without a terminal or if the width is unknown."""
        try:
            return os.get_terminal_size(self.fileno()).columns or None if self.isatty() else None
        except (OSError, ValueError):
            return None

    @property
    def encoding(self) -> str:
        """Encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        try:
            return self._stream is not None and not self.lost and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """Return the stream's descriptor. Raises: OSError, if it has none."""
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def _give_up(self, stream: TextIO, error: OSError | ValueError) -> None:
        self.lost = True
        self.error = error if isinstance(error, OSError) else None
        # The interpreter flushes the stream's buffer at exit; the descriptor then must not fail again.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, stream.fileno())
            finally:
                os.close(null)
