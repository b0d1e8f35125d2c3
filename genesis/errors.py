"""Every error that Genesis raises on purpose, with the exit code of its class.

An error has three parts: *what* happened, *where* (file:line, step, op), and what to do *next*. The command line prints
them as one block on stderr. Library users catch `GenesisError`, or a built-in class: each subclass derives from all the
built-in classes that torch raises in its place, which differ from function to function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType

__all__ = [
    "BusyError",
    "ConfigError",
    "DTypeError",
    "DataError",
    "DeviceError",
    "DimensionError",
    "DiskError",
    "DistributedError",
    "GenesisError",
    "GradientError",
    "IndexRangeError",
    "InterruptedRun",
    "KeywordError",
    "LinAlgError",
    "MissingFileError",
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
    """Return `text` with control characters escaped, so that names from files cannot control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that `name` most likely means, by spelling or by its letters; None if nothing matches.

    Case is ignored, and `-` equals `_`. `cutoff` is the required similarity, from 0 to 1 (identical).
    """
    import difflib

    known = {each.lower().replace("-", "_"): each for each in names}
    meant = name.lower().replace("-", "_")
    matches = difflib.get_close_matches(meant, known, n=1, cutoff=cutoff)
    matches += [each for each in known if sorted(each) == sorted(meant)]
    return known[matches[0]] if matches else None


def _as_tuple(size: re.Match[str]) -> str:
    return f"({size[1]}{size[2] or (size[1] and ',')})"


class GenesisError(Exception):
    """Base class of all errors that Genesis raises on purpose.

    Args:
        what: one sentence with the value found and the value expected.
        where: file:line, step, op or tensor name; empty if the caller's own line is enough.
        next: what the user can do now.

    Attributes:
        is_echo: True if another process of the job reports the cause, and this one has nothing to add.
    """

    exit_code = 70
    is_echo = False

    def __init__(self, what: str, *, where: str = "", next: str = "") -> None:
        if "Size([" in what:  # shapes of tensors read (2, 3), as those of arrays
            what = re.sub(r"genesis\.Size\(\[(\d*)((?:, \d+)*)\]\)", _as_tuple, what)
        self.what, self.where, self.next = what, where, next
        super().__init__(str(self))

    def __str__(self) -> str:
        """Join the parts at the time of the call: a handler may have replaced `next` by better advice."""
        return " | ".join(part for part in (self.what, self.where, self.next) if part)


class UsageError(GenesisError, ValueError, TypeError, RuntimeError):
    """The command line or the arguments of a call are wrong."""

    exit_code = 2


class ConfigError(GenesisError, ValueError):
    """A configuration file or override is invalid, or differs from the run being resumed."""

    exit_code = 3


class DataError(GenesisError, ValueError):
    """Training or evaluation data cannot be used."""

    exit_code = 4


class ModelError(GenesisError, ValueError, RuntimeError):
    """A model folder, a tokenizer or a checkpoint cannot be used."""

    exit_code = 5


class MissingFileError(ModelError, FileNotFoundError):
    """A file to load does not exist."""


class DeviceError(GenesisError, RuntimeError):
    """The machine lacks something that was requested: GPU, driver, architecture, package, network."""

    exit_code = 6


class OutOfMemoryError(GenesisError, MemoryError, RuntimeError):
    """A device or the host is out of memory. `ADVICE` is the next step when the caller's settings are not known."""

    exit_code = 7
    ADVICE = "lower the batch size or the length of sequences, or in training use activation checkpointing"


class DiskError(GenesisError, OSError):
    """Writing failed: disk full, I/O error, no permission."""

    exit_code = 8


class NumericError(GenesisError, ArithmeticError, RuntimeError):
    """A NaN or an infinity where none is allowed."""

    exit_code = 9


class LinAlgError(NumericError):
    """A matrix that a factorization cannot handle: singular, not positive-definite, or not finite."""


class DistributedError(GenesisError, RuntimeError):
    """A rank failed or did not answer in time."""

    exit_code = 10


class PeerGoneError(DistributedError):
    """Another rank, `rank`, failed or left during `phase`; its own output gives the reason."""

    def __init__(self, what: str, *, rank: int, phase: str, where: str = "", next: str = "") -> None:
        super().__init__(what, where=where, next=next)
        self.rank, self.phase = rank, phase


class BusyError(GenesisError, RuntimeError):
    """Another run holds the output folder."""

    exit_code = 11


class ShapeError(GenesisError, ValueError, RuntimeError):
    """Shapes that an op cannot combine."""


class DTypeError(GenesisError, TypeError, NotImplementedError):
    """A dtype that an op does not take."""


class KeywordError(GenesisError, TypeError):
    """A keyword that a function does not take.

    It ends a command only if a user's op makes the call (see `of_user`); mypy checks the calls inside Genesis.
    """

    exit_code = 2


class IndexRangeError(GenesisError, IndexError, RuntimeError):
    """An index outside its dimension."""


class DimensionError(ShapeError, IndexRangeError):
    """A dimension that a tensor lacks, or over which it has no elements."""


class GradientError(GenesisError, RuntimeError):
    """backward() was asked for a gradient that the recorded graph does not have."""


class InterruptedRun(GenesisError):
    """A signal stopped the run after its state was saved; the exit code is 128 + signal number."""

    def __init__(self, what: str, *, signal: int, where: str = "", next: str = "") -> None:
        super().__init__(what, where=where, next=next)
        self.exit_code = 128 + signal


class UserCode:
    """A context that runs a user's function, such as "the reference of square".

    It does not change errors that leave it. It records the function in them, for `of_user`.
    """

    def __init__(self, function: str) -> None:
        self.function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and trace is not None and not hasattr(error, "user_code"):
            here, called = trace.tb_frame.f_code.co_filename, trace.tb_next
            # If Genesis refuses the function's result, the error comes from the file of the `with` itself.
            is_theirs = called is not None and called.tb_frame.f_code.co_filename != here
            line = f", {called.tb_frame.f_code.co_filename}:{called.tb_lineno}" if called and is_theirs else ""
            error.user_code = f"{self.function}{line}"  # type: ignore[attr-defined]


def of_user(error: BaseException) -> GenesisError | None:
    """Return the error that ends a command after a user's function failed inside `UserCode`.

    It is a UsageError unless the original error has an exit code other than the default. None if the error did not
    come from a user's function, or if the host ran out of memory in one.
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
    """Return the error for `function(keyword=…)`; it suggests the nearest of `names`, the keywords that exist."""
    known = list(names)
    meant = nearest(keyword, known)
    next = f"did you mean {meant}?" if meant is not None else f"it takes {', '.join(known) or 'no keywords'}"
    return KeywordError(f"{function} takes no keyword {keyword!r}", next=next)
