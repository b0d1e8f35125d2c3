"""Every error Genesis raises on purpose, with the exit code of its class.

An error states three things: *what* happened, *where* (file:line, step, op), and what to do *next*. The command line
prints them as one block on stderr; a library user catches `GenesisError`, or the built-in class that each subclass
also is.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

__all__ = [
    "BusyError",
    "ConfigError",
    "DTypeError",
    "DataError",
    "DeviceError",
    "DiskError",
    "DistributedError",
    "GenesisError",
    "GradientError",
    "IndexRangeError",
    "InterruptedRun",
    "KeywordError",
    "ModelError",
    "NumericError",
    "OutOfMemoryError",
    "PeerGoneError",
    "ShapeError",
    "UsageError",
    "UserCode",
    "escape",
    "nearest",
    "of_user",
    "unknown_keyword",
]


def escape(text: object) -> str:
    """`text` with control characters written as escapes, so that names from files cannot drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` that `name` most likely means: spelled alike, or with the same letters; None where none is.

    Case does not count, and `-` counts as `_`. The `cutoff` says how much must be alike, from 0 to 1 (all of it).
    """
    import difflib

    known = {each.lower().replace("-", "_"): each for each in names}
    meant = name.lower().replace("-", "_")
    found = difflib.get_close_matches(meant, known, n=1, cutoff=cutoff)
    found += [each for each in known if sorted(each) == sorted(meant)]
    return known[found[0]] if found else None


class GenesisError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence that names the value found and the value expected.
        where: file:line, step, op or tensor name; empty where the caller's own line says it.
        next: what the reader can do now.

    Attributes:
        is_echo: whether another process of the job reports what has happened, and this one has nothing to add.
    """

    exit_code = 70
    is_echo = False

    def __init__(self, what: str, *, where: str = "", next: str = "") -> None:
        self.what, self.where, self.next = what, where, next
        super().__init__(str(self))

    def __str__(self) -> str:
        """As the parts are now: who knows better what to do next says so on the way."""
        return " | ".join(part for part in (self.what, self.where, self.next) if part)


class UsageError(GenesisError):
    """The command line itself is wrong."""

    exit_code = 2


class ConfigError(GenesisError, ValueError):
    """A configuration file or override is invalid, or differs from the run being resumed."""

    exit_code = 3


class DataError(GenesisError, ValueError):
    """Training or evaluation data cannot be used."""

    exit_code = 4


class ModelError(GenesisError, ValueError):
    """A model folder, a tokenizer or a checkpoint cannot be used."""

    exit_code = 5


class DeviceError(GenesisError, RuntimeError):
    """The machine lacks what was asked for: GPU, driver, architecture, package, network."""

    exit_code = 6


class OutOfMemoryError(GenesisError, MemoryError, RuntimeError):
    """A device or the host has no room. `ADVICE`: what to do next where the caller's settings are not known."""

    exit_code = 7
    ADVICE = "lower the batch size or the length of sequences, or in training use activation checkpointing"


class DiskError(GenesisError, OSError):
    """Writing failed: disk full, I/O error, no permission."""

    exit_code = 8


class NumericError(GenesisError, ArithmeticError):
    """A NaN or an infinity where there must be none."""

    exit_code = 9


class DistributedError(GenesisError, RuntimeError):
    """A rank failed or did not answer in time."""

    exit_code = 10


class PeerGoneError(DistributedError):
    """Another rank, `rank`, failed or left during `phase`. Its own output says why; this is the echo."""

    def __init__(self, what: str, *, rank: int, phase: str, where: str = "", next: str = "") -> None:
        super().__init__(what, where=where, next=next)
        self.rank, self.phase = rank, phase


class BusyError(GenesisError, RuntimeError):
    """Another run holds the output folder."""

    exit_code = 11


class ShapeError(GenesisError, ValueError, RuntimeError):  # torch raises RuntimeError for shapes and dtypes
    """Shapes that an op cannot combine."""


class DTypeError(GenesisError, TypeError, RuntimeError):
    """A dtype that an op does not take."""


class KeywordError(GenesisError, TypeError):
    """A keyword that a function does not take.

    It ends a command only where an op of the user's makes the call (see `of_user`): mypy reads the calls of ours.
    """

    exit_code = 2


class IndexRangeError(GenesisError, IndexError):
    """An index outside its dimension."""


class GradientError(GenesisError, RuntimeError):
    """backward() was asked for something the recorded graph cannot give."""


class InterruptedRun(GenesisError):
    """A signal stopped the run after its state was saved; the exit code is 128 + signal."""

    def __init__(self, what: str, *, signal: int, where: str = "", next: str = "") -> None:
        super().__init__(what, where=where, next=next)
        self.exit_code = 128 + signal


class UserCode:
    """A context in which a function of the user's runs, such as "the reference of square".

    What it raises stays as it is; `of_user` says whose it was.
    """

    def __init__(self, function: str) -> None:
        self.function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and trace is not None and not hasattr(error, "user_code"):
            here, called = trace.tb_frame.f_code.co_filename, trace.tb_next
            # Where what the function returned is refused, the code next to the `with` raises.
            is_theirs = called is not None and called.tb_frame.f_code.co_filename != here
            line = f", {called.tb_frame.f_code.co_filename}:{called.tb_lineno}" if called and is_theirs else ""
            error.user_code = f"{self.function}{line}"  # type: ignore[attr-defined]


def of_user(error: BaseException) -> GenesisError | None:
    """How a command ends for what left a `UserCode`: as for wrong usage, where the error has no exit code of its own.

    None where no function of the user's raised it, and where the host ran out of memory in one.
    """
    where = getattr(error, "user_code", None)
    if where is None or isinstance(error, MemoryError):
        return None
    if not isinstance(error, GenesisError):
        what = f"{type(error).__name__}: {error}"
        return UsageError(what, where=where, next="correct the function; --debug shows the traceback")
    if error.exit_code != GenesisError.exit_code:
        return error
    return UsageError(error.what, where=error.where or where, next=error.next)


def unknown_keyword(function: str, keyword: str, names: Iterable[str]) -> KeywordError:
    """The error of `function(keyword=…)` for a function that takes `names`; it suggests the nearest of them."""
    known = list(names)
    meant = nearest(keyword, known)
    next = f"did you mean {meant}?" if meant is not None else f"it takes {', '.join(known) or 'no keywords'}"
    return KeywordError(f"{function} takes no keyword {keyword!r}", next=next)
