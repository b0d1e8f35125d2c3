"""The frame around every command: an exception becomes one block on stderr and an exit code. Commands only raise."""

from __future__ import annotations

import contextlib
import os
import re
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
OPEN_FILES = 32  # files that a command may need at once, with two ranks or a few clients


def exit_code(error: BaseException, *, debug: bool) -> int:
    """Print what ended a command to stderr, and return the exit code.

    Args:
        debug: print the traceback too.
    """
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
        # The reader (`| head`) has read what it needs.
        return 0
    if debug:
        _print_error("".join(traceback.format_exception(error)))
    known = _as_genesis_error(error)
    if known is None or isinstance(error, ImportError) or isinstance(error.__cause__, ImportError):
        error = just_raised() or error
        known = _as_genesis_error(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _print_error("interrupted\n")
        return EXIT_INTERRUPTED
    if known is not None:
        if known.is_echo and not debug:
            return known.exit_code
        label = "stopped" if isinstance(known, InterruptedRun) else "error"
        _print_error(block(known.what, known.where, known.next, label))
        return known.exit_code
    what = f"this is a bug in Genesis: {type(error).__name__}: {error}"
    rerun = "" if debug else "run the command again with --debug, and "
    _print_error(block(what, "", rerun + "report it with the traceback"))
    return EXIT_BUG


def _as_genesis_error(error: BaseException) -> GenesisError | None:
    """Return the error itself, or its meaning when a library or a user's op raised it; None for a bug."""
    if (theirs := of_user(error)) is not None:
        return theirs
    if isinstance(error, GenesisError):
        return error
    if isinstance(error, MemoryError):
        next = "lower train.batch_size or data.seq_len, or set train.activation_checkpointing=full"
        return GenesisOutOfMemoryError(f"the host has too little memory for a request: {error}", next=next)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("genesis"):
        package = escape(error.name.partition(".")[0])
        next = f"install it: pip install {package}; `genesis env` lists what is missing"
        if package in sys.stdlib_module_names:
            next = "it is a part of Python: reinstall Python, or check the permissions of its folder"
        return DeviceError(f"the package {package} is not installed", next=next)
    if isinstance(error, UnicodeEncodeError):
        what = f"the name {escape(error.object)} cannot be written in this system's encoding, {error.encoding}"
        return UsageError(what, where="command line", next="set a locale in UTF-8: LC_ALL=C.UTF-8")
    if isinstance(error, OSError):
        # Readers report their own errors (`genesis.files.boundary`); errors that arrive here come from an output.
        if error.filename is None:
            next = "free space, or check where stdout and stderr are redirected"
            return DiskError(f"writing failed: {error.strerror or error}", next=next)
        return system_error(error, DiskError, "a system call")
    # Typer's own errors have no public class, but all of them have this method.
    message = getattr(error, "format_message", None)
    if callable(message):
        context: Any = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "genesis"
        next = _as_settings(error) or f"run `{command} --help`"
        return UsageError(str(message()), where="command line", next=next)
    return None


def _as_settings(error: Any) -> str:
    """Return advice for an unknown option that is the name of a setting, such as `--lr`; otherwise an empty text."""
    context = getattr(error, "ctx", None)
    takes_settings = context is not None and any(each.name == "overrides" for each in context.command.params)
    if not takes_settings or not hasattr(error, "possibilities"):  # only an unknown option has them
        return ""
    from genesis.train.config import setting_names

    key = error.option_name.lstrip("-").replace("-", "_").rpartition(".")[2]
    found = [name for name in setting_names() if name.partition(".")[2] == key]
    return f"settings have no dashes: write {' or '.join(f'{name}=VALUE' for name in found)}" if found else ""


def block(what: str, where: str, next: str, label: str = "error") -> str:
    """Return the text of an error; continuation lines of a part are indented, control characters escaped."""
    text = ""
    for title, part in ((f"{label}: ", what), ("  where: ", where), ("  next: ", next)):
        if part:
            text += title + ("\n" + " " * len("  next: ")).join(escape(line) for line in part.split("\n")) + "\n"
    return text


def _print_error(text: str) -> None:
    """Write to stderr, with colour on a terminal. A failure is ignored: it could not be reported anywhere."""
    if sys.stderr is not None:
        safe = "\n".join(escape(line) for line in text.split("\n"))
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(_coloured(safe) if _shows_colour() else safe)
            sys.stderr.flush()


def _shows_colour() -> bool:
    has_colours = os.environ.get("TERM", "") not in ("", "dumb", "unknown") and not os.environ.get("NO_COLOR")
    return has_colours and sys.stderr.isatty()


def _coloured(text: str) -> str:
    """Make the label `error:` bold red, and `where:` and `next:` dim."""
    text = re.sub(r"^(error|stopped):", "\x1b[1;31m\\1:\x1b[0m", text)
    return re.sub(r"^  (where|next):", "  \x1b[2m\\1:\x1b[0m", text, flags=re.MULTILINE)


def _stdout_has_no_reader() -> bool:
    try:
        poll = select.poll()
        poll.register(1, 0)
        return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))
    except (OSError, AttributeError):
        # Without poll, assume that the broken pipe is stdout's.
        return True


def make_printable() -> None:
    """Let stdout escape the characters that its encoding lacks, so that an ASCII terminal is not an error."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        with contextlib.suppress(OSError, ValueError):
            reconfigure(errors="backslashreplace")


def flush_stdout() -> None:
    """Flush stdout.

    Raises:
        DiskError: writing failed. BrokenPipeError: stdout has no reader.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise output_error(error) from error


def settle_stdout() -> None:
    """Empty stdout's buffer, into /dev/null if necessary: the last flush must not change the exit code."""
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
    """Open closed descriptors 0 to 2 on /dev/null; otherwise the next opened file (a checkpoint, say) becomes stdout.

    Raise a low limit on open files, because libraries report its effect as damaged files.

    Raises:
        DeviceError: the system refuses.
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
            what = f"this process may open {soft} files, but a command needs up to {OPEN_FILES}"
            raise DeviceError(what, where="ulimit -n", next="raise the limit: ulimit -n 1024") from None
