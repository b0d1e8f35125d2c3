"""The boundary between the operating system's errors and ours. The class says what failed, the text names the path.

`boundary` wraps code that reads one kind of file. Code that writes goes through `genesis.files.filesystem`, which has
its own boundary. Errors that pass both are caught by the command line.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from genesis.errors import DTypeError, GenesisError, IndexRangeError, ShapeError, escape

_ADVICE = {
    errno.EACCES: "check its permissions and the permissions of its folders",
    errno.EPERM: "check its permissions and the permissions of its folders",
    errno.EMFILE: "raise the limit on open files: ulimit -n",
    errno.ENFILE: "close programs: this machine has no file handles left",
    errno.ENAMETOOLONG: "shorten the name",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ELOOP: "check the symbolic links on the path",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount the file system again",
}
# Our own errors about tensors, rather than about what the user provided.
_OF_TENSORS = (ShapeError, DTypeError, IndexRangeError)


def system_error(
    error: OSError, kind: type[GenesisError], doing: str, path: str | os.PathLike[str] | None = None
) -> GenesisError:
    """The error of class `kind` for a system call that failed while Genesis was `doing` something ("reading the data").
    `path` is the file or folder, for an error that does not name it itself.
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
    """Turn failing system calls in a block, or in a decorated function, into errors of class `kind`.

    Errors about shapes, dtypes and indices, and infinite recursion, are converted too: inside the block they come from
    what is read. A broken pipe is not converted, because it belongs to an output.
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
        raise kind(f"{doing} failed: it is nested too deep", where=where, next="reduce the nesting") from error


@contextmanager
def fitting(kind: type[GenesisError], doing: str, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Turn errors about the shapes, dtypes and indices of tensors inside the block into errors of class `kind`.

    Use it for work on tensors that come from files, such as running a model with the tokenizer of another one.
    """
    try:
        yield
    except _OF_TENSORS as error:
        where = error.where or ("" if path is None else escape(os.fspath(path)))
        raise kind(f"{doing} failed: {error.what}", where=where, next=error.next) from error


def close_read(descriptor: int) -> None:
    """Close a descriptor that was not written to; an error while closing does not matter."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


@contextmanager
def closed_after(descriptor: int) -> Iterator[int]:
    """Yield a descriptor to read from, and close it after the block."""
    try:
        yield descriptor
    finally:
        close_read(descriptor)


@contextmanager
def closed_on_error(descriptor: int) -> Iterator[int]:
    """Yield a descriptor that the block passes on, and close it if the block fails."""
    try:
        yield descriptor
    except BaseException:
        close_read(descriptor)
        raise
