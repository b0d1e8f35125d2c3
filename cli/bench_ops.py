"""`genesis bench-ops`: what many ops cost here, as a page, Markdown and JSON, with what changed since the last run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from genesis.errors import UsageError
from genesis_cli.measured import device_name, dtype_of, limits_row, peer_of, raise_first, show, show_progress
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Reports, TorchPython, VsTorch

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.dtypes import DType
    from genesis.report.build import Measured, Setup
    from genesis.report.schema import Section
    from genesis.report.suite import Job

Given = list[tuple[str, str | bool | None]]  # options with their values


def bench_ops(
    op: Annotated[
        list[str] | None, typer.Option("--op", metavar="NAME", help="This op alone; may be given several times.")
    ] = None,
    category: Annotated[
        str | None, typer.Option("--category", metavar="NAME", help="element, activation, reduction, matmul or memory.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="small, medium, batch, large or xlarge; may be given several times.  [default: by device]",
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="One size, little time for each case: seconds.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")] = False,
    dtype: OpDtype = None,
    device: MeasuredDevice = "auto",
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    out: Reports = None,
    json: JsonFile = None,
) -> None:
    """Measure many ops, and report how near each comes to the limits of this machine.

    Writes one HTML page, Markdown and JSON, named by date, and compares with earlier runs of the same machine there.
    A case that fails does not end the run; the exit code is that of the first one. Ctrl-C ends it with a report of
    what was measured.
    """
    from genesis.measure.cases import default_sizes
    from genesis.report import suite
    from genesis_cli.session.preparation import resolve_device

    names = suite.names_of(op or (), category)
    where, kind = resolve_device(device), dtype_of(dtype)
    sizes = tuple(dict.fromkeys(size or default_sizes(where, is_fast=fast)))
    planned = suite.jobs(names, sizes, every_axis=not fast)
    given: Given = [*(("--op", name) for name in op or ()), *(("--size", name) for name in size or ())]
    given += [("--category", category), ("--dtype", dtype), ("--device", device), ("--vs", vs)]
    given += [("--fast", fast), ("--backward", backward)]
    setup = setup_of(where, kind, sizes, backward, fast, out)
    measured = measured_ops(planned, setup, vs, torch_python)
    finish("bench-ops", given, setup, measured, json)
    raise_first(measured.failures, len(measured.entries))
    if not measured.entries:
        raise UsageError(measured.skipped[0].reason, where="--dtype", next="leave --dtype out, or choose another")


def setup_of(
    device: Device, dtype: DType | None, sizes: Sequence[str], backward: bool, fast: bool, out: Path | None
) -> Setup:
    """The machine and the way of measuring; the folder of reports is created, so that it fails before and not after."""
    from genesis.profile.op import Settings
    from genesis.report import suite
    from genesis.report.build import Setup
    from genesis.report.files import default_folder, made_folder
    from genesis_cli.environment import facts

    machine = facts()
    return Setup(
        device=device,
        dtype=dtype,
        settings=Settings(backward=backward, stages=False, plan=suite.FAST if fast else suite.THOROUGH),
        sizes=tuple(sizes),
        folder=made_folder(out or default_folder()),
        device_name=device_name(device, machine),
        machine=machine,
    )


def measured_ops(planned: Sequence[Job], setup: Setup, vs: str | None, torch_python: str | None) -> Measured:
    """Every case measured; on a terminal stderr shows how far it is."""
    from genesis.report.build import measure_all

    try:
        with peer_of(setup.device, vs, torch_python) as peer:
            settings = dataclasses.replace(setup.settings, peer=peer)
            return measure_all(planned, dataclasses.replace(setup, settings=settings), show_progress)
    finally:
        show_progress("")


def finish(
    kind: Literal["bench-ops", "bench-all"],
    given: Given,
    setup: Setup,
    measured: Measured,
    json: str | None,
    sections: Sequence[Section] = (),
) -> None:
    """Write and print the report; of a run that was interrupted, of what was measured, and then it ends."""
    from genesis.dtypes import as_dtype
    from genesis.measure.limits import limits_of
    from genesis.report.build import build, dtypes_of
    from genesis.report.files import save
    from genesis.report.text import render_lines

    if measured.interrupted and not measured.entries:
        raise KeyboardInterrupt
    limits = [limits_row(limits_of(setup.device, as_dtype(name))) for name in dtypes_of(measured, setup)]
    words = [name if value is True else f"{name} {value}" for name, value in given if value]
    command = " ".join(["genesis", "bench-ops" if kind == "bench-ops" else "bench all", *words])
    report = build(kind, command, setup, measured, limits, sections)
    show(report, render_lines(report, save(report, setup.folder)), json)
    if measured.interrupted:
        raise KeyboardInterrupt
