"""The boundary between the operating system's errors and ours: the class says what was being done, the text which path.

`boundary` encloses code that reads one kind of thing. Calls that write go through
`genesis.files.filesystem`, which has its own. What passes all of them ends in the frame of the command line.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from genesis.errors import DTypeError, GenesisError, IndexRangeError, ShapeError, escape

_ADVICE = {
    errno.EACCES: "check its permissions and those of the folders above it",
    errno.EPERM: "check its permissions and those of the folders above it",
    errno.EMFILE: "raise the limit on open files: ulimit -n",
    errno.ENFILE: "close programs: this machine has no file handles left",
    errno.ENAMETOOLONG: "shorten the name",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ELOOP: "check the symbolic links on the path",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount the file system again",
}
# Of our own errors those that speak of tensors, not of what the user gave.
_OF_TENSORS = (ShapeError, DTypeError, IndexRangeError)


def system_error(
    error: OSError, kind: type[GenesisError], doing: str, path: str | os.PathLike[str] | None = None
) -> GenesisError:
    """The error of class `kind` for a system call that failed while Genesis was `doing` ("reading the data").
    Args: path: what was worked on, where the error itself does not name it.
    """
    named = error.filename if isinstance(error.filename, str | bytes) else path
    where = "" if named is None else escape(os.fsdecode(named))
    advice = _ADVICE.get(error.errno or 0, "check the path and the disk")
    result = kind(f"{doing} failed: {escape(error.strerror or error)}", where=where[:1000], next=advice)
    if isinstance(result, OSError):
        result.errno = error.errno
    return result


@contextmanager
def boundary(kind: type[GenesisError], doing: str, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """A block, or as a decorator a function, whose failing system calls become errors of class `kind`.

    Errors about shapes, dtypes and indices, and recursion without end, become such errors as well: inside the block
    they come from what is read. A broken pipe passes: it belongs to an output.
    """
    try:
        with fitting(kind, doing, path):
            yield
    except (GenesisError, BrokenPipeError):
        raise
    except OSError as error:
        raise system_error(error, kind, doing, path) from error
    except RecursionError as error:
        where = "" if path is None else escape(os.fspath(path))
        raise kind(f"{doing} failed: it is nested too deep", where=where, next="make it flatter") from error


@contextmanager
def fitting(kind: type[GenesisError], doing: str, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """A block in which tensors that do not fit each other (shapes, dtypes, indices) are an error of class `kind`.

    Around work whose tensors come from files, such as the run of a model whose tokenizer is another one's.
    """
    try:
        yield
    except _OF_TENSORS as error:
        where = error.where or ("" if path is None else escape(os.fspath(path)))
        raise kind(f"{doing} failed: {error.what}", where=where, next=error.next) from error


def close_read(descriptor: int) -> None:
    """Close a descriptor of which no written byte depends; an error that comes with closing changes nothing."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


@contextmanager
def closed_after(descriptor: int) -> Iterator[int]:
    """A block that reads from a descriptor, which is closed at its end as `close_read` does."""
    try:
        yield descriptor
    finally:
        close_read(descriptor)


@contextmanager
def closed_on_error(descriptor: int) -> Iterator[int]:
    """A block that hands a descriptor on, which is closed where the block fails."""
    try:
        yield descriptor
    except BaseException:
        close_read(descriptor)
        raise
