"""Shared by the commands that measure: their words, names of devices, the report's way out, failures, the peer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genesis.errors import DiskError, DTypeError, GenesisError, UsageError, escape

if TYPE_CHECKING:
    import typer

    from genesis.backend import Device
    from genesis.dtypes import DType
    from genesis.measure.peer import Child
    from genesis.measure.record import Failure, Report

STDOUT = "-"


def given_in(context: typer.Context) -> list[str]:
    """Names of the parameters that the command line gives."""
    return [n for n in context.params if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE"]


def words_of(context: typer.Context, *omitted: str, between: str = " ") -> list[str]:
    """The given arguments, and options with their values, without the parameters that are omitted."""
    given, words = given_in(context), []
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.name in given and parameter.name not in omitted:
            prefix = "" if parameter.param_type_name == "argument" else f"{parameter.opts[0]}{between}"
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [parameter.opts[0]] if value is True else [f"{prefix}{each}" for each in values]
    return words


def command_of(context: typer.Context, command: str) -> str:
    """The command with the given options, without places of files and interpreters."""
    return escape(" ".join(["genesis", command, *words_of(context, "json", "out", "torch_python")]))


def new_report(kind: str, command: str, device: Device) -> Report:
    """A report of measurements on a device, without tables."""
    from genesis import cuda
    from genesis.backend import CPU
    from genesis.measure.record import Report
    from genesis_cli.environment import facts

    machine = facts()
    name = machine["cpu"]["name"] if device == CPU else cuda.get_device_name(device)
    return Report(kind, command, str(device), name or "unknown", machine)


def made_folder(out: str | Path) -> Path:
    """The folder that `--out` names, created before anything is measured. Raises: UsageError or DiskError."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{escape(folder)} is not a folder", where="--out", next="name another folder") from None
    except OSError as error:
        what = f"the folder {escape(folder)} cannot be made: {error.strerror}"
        raise DiskError(what, where="--out", next="choose another folder") from error
    return folder


def show(report: Any, lines: Iterable[str], json: str | None) -> None:
    """Print the lines, and write the report into the file `json`; "-" prints it as JSON instead. Raises: DiskError."""
    from genesis.files.atomic import write_file
    from genesis.files.boundary import boundary
    from genesis.files.filesystem import DEFAULT
    from genesis.files.paths import exists, is_folder

    if json == STDOUT:
        print(report.to_json().decode(), end="")
        return
    if text := "\n".join(lines):
        print(text)
    if json is None:
        return
    with boundary(DiskError, "writing", json):
        is_there, is_directory = exists(json), is_folder(json)
        is_file = not is_there or os.path.isfile(json)
    if is_directory:
        raise UsageError(f"{escape(json)} is a folder", where="--json", next="name a file in it")
    if is_file:
        write_file(json, report.to_json())
        return
    # A file renamed to a device or pipe, such as /dev/stdout, would replace it.
    with DEFAULT.errors("write", Path(json)), open(json, "wb", buffering=0) as stream:
        rest = memoryview(report.to_json())
        while rest:
            rest = rest[stream.write(rest) :]


def show_progress(text: str) -> None:
    """Replace the line that shows on a terminal what is being measured; "" clears it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def raise_first(failures: Sequence[Failure], measured: int) -> None:
    """End with the first failure's message and exit code, if there is one; `measured` cases succeeded."""
    if failures:
        first, count = failures[0], len(failures)
        where = f"{first.name} {first.label}, {count} of {measured + count} cases failed"
        error = GenesisError(first.error, where=where)
        error.exit_code = first.exit_code
        raise error


def integers(text: str) -> tuple[int, ...]:
    """Integers between commas; empty for other text."""
    try:
        return tuple(int(part) for part in text.strip("()").split(","))
    except ValueError:
        return ()


def sizes(text: str, option: str) -> tuple[int, ...]:
    """`1,2,4`, without duplicates. Raises: UsageError."""
    found = tuple(dict.fromkeys(integers(text)))
    if not found or min(found) < 1:
        raise UsageError(f"{text!r} is not a list of sizes", where=option, next="write numbers of 1 and more: 1,2,4")
    return found


def dtype_of(name: str | None) -> DType | None:
    """The dtype that `--dtype` names, in full or as `bf16`; None where it was not given. Raises: UsageError."""
    from genesis.dtypes import as_dtype

    try:
        return None if name is None else as_dtype(name)
    except DTypeError as error:
        raise UsageError(error.what, where="--dtype", next=error.next) from None


def check_peer(name: str | None, python: str | None) -> None:
    """Check `--vs` and `--torch-python`. Raises: UsageError."""
    if name not in (None, "torch"):
        raise UsageError(f"{name!r} is not a peer", where="--vs", next="use torch")
    if name is None and python is not None:
        raise UsageError("there is nothing to compare with", where="--torch-python", next="add --vs torch")


@contextmanager
def peer_of(device: Device, name: str | None, python: str | None) -> Iterator[Child | None]:
    """The process that `--vs` asks to compare ops with, inside the block; None where it was not given."""
    from genesis.measure.peer import started

    check_peer(name, python)
    with nullcontext() if name is None else started("ops", device, python) as child:
        yield child
