"""`genesis bench ops | model | all`: what ops and a model's steps cost here, and what changed since."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis.errors import UsageError, escape
from genesis_cli.bench_model import bench_model
from genesis_cli.measured import device_name, dtype_of, peer_of, raise_first, show, show_progress
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Reports, TorchPython, VsTorch
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.dtypes import DType
    from genesis.measure.history import Past
    from genesis.measure.op import Settings
    from genesis.measure.record import Failure, Table
    from genesis.measure.suite import Job, Results
    from genesis_models.config import ModelConfig

QUICKSTART = "quickstart"  # the model of the recipe, for the CPU
CPU_CASES = ((1, 4, 8), (256,))
GPU_CASES = ((1, 4, 8), (512, 1024))
FAST_CASES = ((4,), (128,))
Fast = Annotated[bool, typer.Option("--fast", help="One size, little time for each case.")]
WithBackward = Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")]
Given = list[tuple[str, str | bool | None]]  # options with their values


def bench_ops(
    op: Annotated[
        list[str] | None, typer.Option("--op", metavar="NAME", help="This op alone; may be given several times.")
    ] = None,
    category: Annotated[
        str | None,
        typer.Option(
            "--category",
            metavar="NAME",
            help="element, activation, reduction, matmul, memory or optimizer.",
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="small, medium, batch, large or xlarge; may be given several times.  [default: by device]",
        ),
    ] = None,
    fast: Fast = False,
    backward: WithBackward = False,
    dtype: OpDtype = None,
    device: MeasuredDevice = "auto",
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    out: Reports = None,
    json: JsonFile = None,
) -> None:
    """Measure many ops, and report how near each comes to the limits of this machine.

    Writes Markdown and JSON, named by date, and compares with earlier runs of the same machine there.
    A case that fails does not end the run; the exit code is that of the first one. Ctrl-C ends it with a report of
    what was measured.
    """
    from genesis.measure import suite
    from genesis.measure.cases import default_sizes
    from genesis_cli.session.preparation import resolve_device

    names = suite.names_of(op or (), category)
    where, kind = resolve_device(device), dtype_of(dtype)
    sizes = tuple(dict.fromkeys(size or default_sizes(where, is_fast=fast)))
    planned = suite.jobs(names, sizes, every_axis=not fast)
    given: Given = [*(("--op", name) for name in op or ()), *(("--size", name) for name in size or ())]
    given += [("--category", category), ("--dtype", dtype), ("--device", device), ("--vs", vs)]
    given += [("--fast", fast), ("--backward", backward)]
    setup = setup_of(where, kind, sizes, backward, fast, out)
    results = measured_ops(planned, setup, vs, torch_python)
    finish("bench-ops", given, setup, results, json)
    raise_first(results.failures, len(results.measured))
    if not results.measured:
        raise UsageError(results.skipped[0].reason, where="--dtype", next="leave --dtype out, or choose another")


@dataclass(frozen=True)
class Setup:
    """The machine, the way of measuring, and the folder of reports with what lies there."""

    device: Device
    dtype: DType | None
    settings: Settings
    facts: dict[str, Any]
    folder: Path
    device_name: str
    machine: dict[str, Any]
    earlier: list[Past]


def setup_of(
    device: Device, dtype: DType | None, sizes: Sequence[str], backward: bool, fast: bool, out: Path | None
) -> Setup:
    """The folder of reports is created, so that it fails before anything is measured and not after."""
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure import suite
    from genesis.measure.history import default_folder, earlier_runs, made_folder
    from genesis.measure.op import Settings
    from genesis_cli.environment import facts

    machine = facts()
    name, folder = device_name(device, machine), made_folder(out or default_folder())
    settings = {
        "dtype": "float32" if dtype is None else dtype.name,
        "sizes": ",".join(sizes),
        "backward": backward,
        "fast": fast,
        "threads": threads() if device == CPU else None,
    }
    how = Settings(backward=backward, stages=False, causes=not fast, plan=suite.FAST if fast else suite.THOROUGH)
    return Setup(device, dtype, how, settings, folder, name, machine, earlier_runs(folder, name, settings))


def measured_ops(planned: Sequence[Job], setup: Setup, vs: str | None, torch_python: str | None) -> Results:
    """Every case measured; on a terminal stderr shows how far it is."""
    from genesis.measure.history import changes_since
    from genesis.measure.suite import measure_all

    try:
        with peer_of(setup.device, vs, torch_python) as peer:
            settings = dataclasses.replace(setup.settings, peer=peer)
            return measure_all(
                planned,
                setup.device,
                setup.dtype,
                settings,
                show_progress,
                lambda measured: any(c.verdict == "slower" for c in changes_since(setup.earlier, [measured])),
            )
    finally:
        show_progress("")


def finish(
    kind: str,
    given: Given,
    setup: Setup,
    results: Results,
    json: str | None,
    tables: Sequence[Table] = (),
    failures: Sequence[Failure] = (),
) -> None:
    """Write and print the report; of a run that was interrupted, of what was measured, and then it ends.

    Args:
        tables, failures: about something else than ops.
    """
    from genesis.measure import history, suite
    from genesis.measure.record import Report, to_text

    if results.interrupted and not results.measured:
        raise KeyboardInterrupt
    words = [name if value is True else f"{name} {value}" for name, value in given if value]
    all_tables = suite.tables_of(results)
    sums, cases = ([t for t in all_tables if (t.name == "ops") == is_ops] for is_ops in (False, True))
    report = Report(
        kind=kind,
        command=escape(" ".join(["genesis", kind.replace("-", " "), *words])),
        device=str(setup.device),
        device_name=setup.device_name,
        machine=setup.machine,
        settings=setup.facts,
        tables=[*sums, *history.tables_of(setup.earlier, results.measured), *cases, *tables],
        failures=[*results.failures, *failures],
        notes=list(suite.notes_of(results)),
    )
    written = [f"written  {escape(_near(path))}" for path in history.save(report, setup.folder)]
    # All cases are in the files; a terminal shows what follows from them.
    short = dataclasses.replace(report, tables=[each for each in report.tables if each not in cases])
    show(report, [*to_text(short), "", *written], json)
    if results.interrupted:
        raise KeyboardInterrupt


def _near(file: Path) -> Path:
    """The path as seen from the current folder, where it is below that."""
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


# --- Everything -------------------------------------------------------------------------------------------------------


bench = typer.Typer(help="Reports about everything.", add_completion=False, rich_markup_mode=None)


@bench.callback()
def _about() -> None:
    """Measure everything that this machine can run, and report it."""


bench.command("ops")(bench_ops)
bench.command("model")(bench_model)


@bench.command("all")
def bench_all(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="SIZE",
            help="A preset, a config.json, a model folder, or quickstart.  [default: 0.5B on a GPU, else quickstart]",
        ),
    ] = None,
    fast: Fast = False,
    backward: WithBackward = False,
    dtype: OpDtype = None,
    device: MeasuredDevice = "auto",
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    out: Reports = None,
    json: JsonFile = None,
) -> None:
    """Measure every op and the training steps of a model, and write one report.

    Writes Markdown and JSON, named by date, and compares with earlier runs of the same machine there.
    A case that fails does not end the run; the exit code is that of the first one. Ctrl-C ends it with a report of
    what was measured.
    """
    from genesis.backend import CPU
    from genesis.measure import suite
    from genesis.measure.cases import default_sizes
    from genesis_cli.session.preparation import resolve_device

    where, kind = resolve_device(device), dtype_of(dtype)
    size = model or (QUICKSTART if where == CPU else "0.5B")
    config = shape_named(size, "--model")
    sizes = default_sizes(where, is_fast=fast)
    planned = suite.jobs(suite.names_of(), sizes, every_axis=not fast)
    given: Given = [("--model", model), ("--dtype", dtype), ("--device", device), ("--vs", vs)]
    given += [("--fast", fast), ("--backward", backward)]
    setup = setup_of(where, kind, sizes, backward, fast, out)
    results, steps = measured_ops(planned, setup, vs, torch_python), 0
    tables: list[Table] = []
    failures: list[Failure] = []
    if not results.interrupted:
        try:
            tables, measured = _model_tables(size, config, where, fast)
            failures, steps, results.interrupted = measured.failures, len(measured.cases), measured.interrupted
        except KeyboardInterrupt:
            results.interrupted = True
    finish("bench-all", given, setup, results, json, tables, failures)
    raise_first([*results.failures, *failures], len(results.measured) + steps)


def _model_tables(name: str, config: ModelConfig, device: Device, is_fast: bool) -> tuple[list[Table], Any]:
    """The tables of training steps, and what was measured for them."""
    from genesis.backend import CPU
    from genesis_cli.session.bench.model import Request, measure_alone
    from genesis_cli.session.bench.steps import FAST, THOROUGH, Settings
    from genesis_models.weights import weight_type

    dtype = weight_type(None, device, config.stored_dtype, trains=True).name
    batches, lengths = FAST_CASES if is_fast else CPU_CASES if device == CPU else GPU_CASES
    cases = [(b, min(t, config.packed_length)) for b, t in itertools.product(batches, lengths)]
    request = Request(config, cases, device, Settings(dtype, plan=FAST if is_fast else THOROUGH))
    measured = measure_alone(request)
    tables = list(measured.tables(request)) if measured.cases else []
    if tables:
        tables[0].title = "Training steps of a model"
        tables[0].notes.append(f"{name}: {config.model_type}, {dtype}, random weights")
    return tables, measured
