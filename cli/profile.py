"""`genesis profile`: what an op costs here, and what its time is spent on."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import DTypeError, UsageError, escape
from genesis_cli.measured import device_name, integers, limits_row, raise_first, show

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.dtypes import DType
    from genesis.profile.makers import Axes
    from genesis.profile.schema import Failure, Report, Row
    from genesis.shapes import Shape

__all__ = ["profile"]

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def profile(
    op: Annotated[str, typer.Option(metavar="NAME", help="Op of the registry, such as add, reduce_sum, matmul.")],
    shape: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="What the inputs are made from.  [default: the op's typical ones]"),
    ] = None,
    axis: Annotated[
        str | None, typer.Option(metavar="AXIS", help="-1, or several as in 0,1, or all.  [default: typical ones]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="bf16, fp16, fp32, fp64 or an integer type.  [default: fp32]")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    backward: Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the GPU's cache before each call.")] = False,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the report as JSON, too; - prints nothing but that.")
    ] = None,
) -> None:
    """Measure one op, and say what its time is spent on.

    Prints times with their confidence, the share of this machine's measured limits, memory, and what would help.
    A case that fails does not end the run; the exit code is that of the first one.
    """
    from genesis.profile.op import Settings, profile_op
    from genesis.profile.report import lines_of
    from genesis.profile.schema import Failure
    from genesis_models.session.preparation import resolve_device

    where, kind = resolve_device(device), None if dtype is None else _dtype(dtype)
    shapes = [] if shape is None else [_shape(shape)]
    settings = Settings(backward=backward, cold=cold)
    rows, failures = [], []
    for found in profile_op(op, where, kind, shapes, [] if axis is None else [_axes(axis)], settings):
        if isinstance(found, Failure):
            failures.append(found)
        else:
            rows.append(found)
    given = {"--op": op, "--shape": shape, "--axis": axis, "--dtype": dtype, "--device": device}
    words = [f"{name} {value}" for name, value in given.items() if value is not None]
    words += [name for name, is_set in (("--backward", backward), ("--cold", cold)) if is_set]
    report = _report(" ".join(["genesis profile", *words]), where, rows, failures)
    show(report, lines_of(report) if rows else (), json)
    raise_first(failures, len(rows))


def _report(command: str, device: Device, rows: list[Row], failures: list[Failure]) -> Report:
    from genesis.bench.limits import limits_of
    from genesis.dtypes import as_dtype
    from genesis.profile.schema import Report
    from genesis_cli.environment import facts

    names = dict.fromkeys(row.dtype for row in rows)
    machine = facts()
    return Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=escape(command),
        device=str(device),
        device_name=device_name(device, machine),
        machine=machine,
        limits=[limits_row(limits_of(device, as_dtype(name))) for name in names],
        rows=rows,
        failures=failures,
    )


def _shape(text: str) -> Shape:
    """`4,512,896` as sizes."""
    sizes = integers(text)
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{text!r} is not a shape", where="--shape", next="write sizes of 1 and more: 4,512,896")
    return sizes


def _axes(text: str) -> Axes:
    """One dimension, several, or None for all."""
    if text == "all":
        return None
    axes = integers(text)
    if not axes:
        raise UsageError(f"{text!r} is not an axis", where="--axis", next="write -1, or several as in 0,1, or all")
    return axes if len(axes) > 1 else axes[0]


def _dtype(name: str) -> DType:
    from genesis.dtypes import as_dtype

    try:
        return as_dtype(SHORT_DTYPES.get(name, name))
    except DTypeError as error:
        raise UsageError(error.what, where="--dtype", next=error.next) from None
