"""What commands that measure share: the machine's names and limits, where a report goes, and how failures end them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genesis.errors import DiskError, DTypeError, GenesisError, UsageError, escape

if TYPE_CHECKING:
    from pydantic import BaseModel

    from genesis.backend import Device
    from genesis.dtypes import DType
    from genesis.measure.peer import Child
    from genesis.measure.record import Failure, Report

STDOUT = "-"


def device_name(device: Device, machine: dict[str, Any]) -> str:
    """What the processor or GPU is called; `machine` is from `environment.facts`."""
    from genesis import cuda
    from genesis.backend import CPU

    return (machine["cpu"]["name"] if device == CPU else cuda.get_device_name(device)) or "unknown"


def show(report: Report | BaseModel, lines: Iterable[str], json: str | None) -> None:
    """Print the lines, and write the report into the file `json`; "-" prints it as JSON instead."""
    from genesis.files.atomic import write_file
    from genesis.files.boundary import boundary
    from genesis.files.paths import exists, is_folder

    if json != STDOUT and (text := "\n".join(lines)):
        print(text)
    if json is not None:
        from genesis.measure.record import Report

        if isinstance(report, Report):
            data = report.to_json()
        else:
            data = (report.model_dump_json(indent=2) + "\n").encode()
        if json == STDOUT:
            print(data.decode(), end="")
        else:
            with boundary(DiskError, "writing", json):
                is_there, is_directory = exists(json), is_folder(json)
                is_file = not is_there or os.path.isfile(json)
            if is_directory:
                raise UsageError(f"{escape(json)} is a folder", where="--json", next="name a file in it")
            if is_file:
                write_file(json, data)
            else:
                write_into(json, data)


def write_into(path: str, data: bytes) -> None:
    """Write into a device or a pipe, such as /dev/stdout, which a file renamed to it would replace.

    Raises:
        DiskError: writing failed.
    """
    from genesis.files.filesystem import DEFAULT

    with DEFAULT.errors("write", Path(path)), open(path, "wb", buffering=0) as stream:
        rest = memoryview(data)
        while rest:
            rest = rest[stream.write(rest) :]


def show_progress(text: str) -> None:
    """On a terminal, what is being measured, instead of what was shown; "" clears it."""
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
    """Integers between commas; empty where it is something else."""
    try:
        return tuple(int(part) for part in text.strip("()").split(","))
    except ValueError:
        return ()


def sizes(text: str, option: str) -> tuple[int, ...]:
    """`1,2,4`, without duplicates. Raises: UsageError."""
    found = tuple(dict.fromkeys(integers(text)))
    if not found or min(found) < 1:
        raise UsageError(f"{text!r} are no sizes", where=option, next="write numbers of 1 and more: 1,2,4")
    return found


def dtype_of(name: str | None) -> DType | None:
    """The dtype that `--dtype` names, in full or as `bf16`; None where it was not given."""
    from genesis.dtypes import as_dtype

    try:
        return None if name is None else as_dtype(name)
    except DTypeError as error:
        raise UsageError(error.what, where="--dtype", next=error.next) from None


@contextmanager
def peer_of(device: Device, name: str | None, python: str | None) -> Iterator[Child | None]:
    """What `--vs` asks to compare ops with, inside the block; None where it was not given."""
    from genesis.measure.peer import started

    if name is not None:
        with started("ops", device, name, python) as child:
            yield child
    elif python is not None:
        raise UsageError("there is nothing to compare with", where="--torch-python", next="add --vs torch")
    else:
        yield None
