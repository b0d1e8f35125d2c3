"""Text for the person who watches: a stream that outlives its reader, and characters that cannot drive a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterable
from typing import TextIO

from genesis.errors import DiskError

# Control characters but line feed and tab; marks that turn the direction of text; surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with every character that could drive a terminal written as an escape; line feeds and tabs stay."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def output_error(error: OSError) -> DiskError:
    """The error of a command that could not print its result."""
    if isinstance(error, DiskError):
        return error
    result = DiskError(f"writing failed: {error.strerror or error}", where="stdout", next="check what it is sent to")
    result.errno = error.errno
    return result


class WordWrap:
    """Breaks a text that comes in pieces into lines of `columns` cells, between words and around wide characters.

    Args:
        columns: None leaves the text as it is.
    """

    def __init__(self, columns: int | None) -> None:
        self._columns, self._column = columns, 0
        self._space = self._word = ""  # that are held back until the word is complete

    def push(self, text: str) -> str:
        """What is to be written now."""
        if self._columns is None:
            return text
        done = ""
        for char in text:
            if char in " \t\n":
                done += self._flushed()
                self._space += char
                if char == "\n":
                    done, self._space, self._column = done + self._space, "", 0
            elif _cells(char) == 2:  # lines break before and after it
                done += self._flushed()
                self._word = char
                done += self._flushed()
            else:
                self._word += char
        return done

    def finish(self) -> str:
        """What was held back."""
        rest, self._space = self._flushed() + self._space, ""
        return rest

    def _flushed(self) -> str:
        """The word, behind its space or on the next line."""
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
    """`text` with lines of at most `columns` cells, but for longer words."""
    wrap = WordWrap(columns)
    return wrap.push(text) + wrap.finish()


def _cells(char: str) -> int:
    """The cells that a terminal gives a character."""
    if char.isascii():
        return 1
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(char) in "WF")


class Output:
    """A text stream whose failure (reader gone, disk full, closed) is remembered, not raised: a run goes on without it.

    Args:
        stream: where text goes; None (as `sys.stdout` of a process started without one) drops it.

    Attributes:
        lost: writing failed once; text is dropped from then on.
        error: what it failed with, None where nothing failed or the stream was closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = stream is None
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Writes `text` as it is; characters that the stream's encoding lacks become escapes."""
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
        """Hands what was written to the system."""
        if self._stream is not None and not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(self._stream, error)

    def check(self) -> None:
        """Raises what the stream failed with, for commands whose result is what they print; a reader that has gone
        has what it wanted.

        Raises:
            DiskError: writing failed.
        """
        if self.error is not None and not isinstance(self.error, BrokenPipeError):
            raise output_error(self.error)

    def line(self, text: str = "") -> None:
        """Writes `text`, made printable, and a line feed; on a terminal broken at words."""
        self.write(wrapped(printable(text), self.columns) + "\n")
        self.flush()

    def flow(self, pieces: Iterable[str]) -> None:
        """Writes a text as its pieces come, made printable; on a terminal broken at words, each when it is complete."""
        wrap = WordWrap(self.columns)
        try:
            for piece in pieces:
                self.write(wrap.push(printable(piece)))
                self.flush()
                if self.lost:
                    return
        finally:  # of a text that is stopped, too
            self.write(wrap.finish())

    @property
    def columns(self) -> int | None:
        """How wide the terminal is; None where there is none, or it does not say."""
        try:
            return os.get_terminal_size(self.fileno()).columns or None if self.isatty() else None
        except (OSError, ValueError):
            return None

    @property
    def encoding(self) -> str:
        """Encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a person watches."""
        try:
            return self._stream is not None and not self.lost and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """The stream's descriptor. Raises: OSError, where it has none."""
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def _give_up(self, stream: TextIO, error: OSError | ValueError) -> None:
        self.lost = True
        self.error = error if isinstance(error, OSError) else None
        # What is left in the stream's buffer would fail again when the interpreter flushes it at exit.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, stream.fileno())
            finally:
                os.close(null)
