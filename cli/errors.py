"""The frame around every command: an exception becomes one block on stderr and an exit code. Commands only raise."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import sys
import traceback
from typing import Any

import typer

from genesis.errors import DeviceError, DiskError, GenesisError, InterruptedRun, UsageError, escape, of_user
from genesis.errors import OutOfMemoryError as GenesisOutOfMemoryError
from genesis.files.boundary import system_error
from genesis.train.output import output_error
from genesis.train.signals import just_raised

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
OPEN_FILES = 32  # that a command may need at one time, with two ranks or a few clients


def exit_code(error: BaseException, *, debug: bool) -> int:
    """The exit code of what ended a command, after stderr has said what happened.

    Args:
        debug: print the traceback too.
    """
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
        # The reader (`| head`) has what it wanted.
        return 0
    if debug:
        _tell("".join(traceback.format_exception(error)))
    known = _as_genesis_error(error)
    if known is None or isinstance(error, ImportError) or isinstance(error.__cause__, ImportError):
        error = just_raised() or error
        known = _as_genesis_error(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _tell("interrupted\n")
        return EXIT_INTERRUPTED
    if known is not None:
        if known.is_echo and not debug:
            return known.exit_code
        _tell(block(known.what, known.where, known.next, "stopped" if isinstance(known, InterruptedRun) else "error"))
        return known.exit_code
    what = f"this is a bug in Genesis: {type(error).__name__}: {error}"
    again = "" if debug else "run the command again with --debug, and "
    _tell(block(what, "", again + "report it with the traceback"))
    return EXIT_BUG


def _as_genesis_error(error: BaseException) -> GenesisError | None:
    """The error itself, or what it means when a library or a user's op raised it; None for a bug."""
    if (theirs := of_user(error)) is not None:
        return theirs
    if isinstance(error, GenesisError):
        return error
    if isinstance(error, MemoryError):
        next = "lower train.batch_size or data.seq_len, or set train.activation_checkpointing=full"
        return GenesisOutOfMemoryError(f"the host has no memory for a request: {error}", next=next)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("genesis"):
        package = escape(error.name.partition(".")[0])
        next = f"install it: pip install {package}; `genesis env` lists what is missing"
        if package in sys.stdlib_module_names:
            next = "it is a part of Python: install Python whole, or check who may read its folder"
        return DeviceError(f"the package {package} is not installed", next=next)
    if isinstance(error, UnicodeEncodeError):
        what = f"the name {escape(error.object)} cannot be written in this system's encoding, {error.encoding}"
        return UsageError(what, where="command line", next="set a locale in UTF-8: LC_ALL=C.UTF-8")
    if isinstance(error, OSError):
        # Whoever reads says so (`genesis.files.boundary`); what comes here has to do with an output.
        if error.filename is None:
            next = "free space, or check what stdout and stderr are sent to"
            return DiskError(f"writing failed: {error.strerror or error}", next=next)
        return system_error(error, DiskError, "a system call")
    # Typer's own errors have no public class; this is how all of them look.
    message = getattr(error, "format_message", None)
    if callable(message):
        context: Any = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "genesis"
        return UsageError(str(message()), where="command line", next=f"`{command} --help` shows how to call it")
    return None


def block(what: str, where: str, next: str, label: str = "error") -> str:
    """The text of an error; lines after the first of a part are indented, control characters escaped."""
    text = ""
    for title, part in ((f"{label}: ", what), ("  where: ", where), ("  next: ", next)):
        if part:
            text += title + ("\n" + " " * len("  next: ")).join(escape(line) for line in part.split("\n")) + "\n"
    return text


def _tell(text: str) -> None:
    """Writes to stderr, or gives up quietly: there is nowhere else to complain."""
    if sys.stderr is not None:
        safe = "\n".join(escape(line) for line in text.split("\n"))
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(safe)
            sys.stderr.flush()


def _stdout_has_no_reader() -> bool:
    try:
        poll = select.poll()
        poll.register(1, 0)
        return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))
    except (OSError, AttributeError):
        # Where there is no poll, a broken pipe is taken for stdout's.
        return True


def make_printable() -> None:
    """Lets stdout write characters that its encoding lacks as escapes: an ASCII terminal is no reason to fail."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        with contextlib.suppress(OSError, ValueError):
            reconfigure(errors="backslashreplace")


def flush_stdout() -> None:
    """Hands what was printed to the system.

    Raises:
        DiskError: it does not take it. BrokenPipeError: nobody reads it.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise output_error(error) from error


def settle_stdout() -> None:
    """Empties stdout's buffer, if need be into nothing: the interpreter's last flush must not change the exit code."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


def prepare_descriptors() -> None:
    """Opens closed descriptors 0 to 2 on nothing: else the next file opened, a checkpoint say, would become stdout.

    Raises a low limit on open files, which libraries take for damaged files.

    Raises:
        DeviceError: the system does not allow that.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
        except (OSError, ValueError):
            what = f"this process may open {soft} files, and a command needs up to {OPEN_FILES}"
            raise DeviceError(what, where="ulimit -n", next="raise the limit: ulimit -n 1024") from None
