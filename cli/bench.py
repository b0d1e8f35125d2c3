"""`genesis bench ops | model | all`: the cost of ops and of a model's steps here, and what changed since."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis.errors import UsageError, escape
from genesis_cli.bench_model import bench_model
from genesis_cli.measured import command_of, device_name, dtype_of, peer_of, raise_first, show, show_progress
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Reports, TorchPython, VsTorch
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.measure.record import Failure, Table
    from genesis_models.config import ModelConfig

QUICKSTART = "quickstart"  # the model of the recipe, for the CPU
CPU_CASES = ((1, 4, 8), (256,))
GPU_CASES = ((1, 4, 8), (512, 1024))
FAST_CASES = ((4,), (128,))
SIZES_HELP = "small, medium, batch, large or xlarge; may be given several times.  [default: by device]"
MODELS = "A preset, a config.json, a model folder, or quickstart.  [default: 0.5B on a GPU, else quickstart]"
CATEGORIES_HELP = "element, activation, reduction, matmul, memory or optimizer."
Ops = Annotated[
    list[str] | None, typer.Option("--op", metavar="NAME", help="This op alone; may be given several times.")
]
Category = Annotated[str | None, typer.Option("--category", metavar="NAME", help=CATEGORIES_HELP)]
Sizes = Annotated[list[str] | None, typer.Option("--size", metavar="SIZE", help=SIZES_HELP)]
Model = Annotated[str | None, typer.Option("--model", metavar="SIZE", help=MODELS)]
Fast = Annotated[bool, typer.Option("--fast", help="One size, little time for each case.")]
WithBackward = Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")]

bench = typer.Typer(help="Reports about everything.", add_completion=False, rich_markup_mode=None)


@bench.callback()
def _about() -> None:
    """Measure everything that this machine can run, and report it."""


@dataclass
class Steps:
    """The training steps of a model, for the report."""

    tables: list[Table] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    count: int = 0
    interrupted: bool = False


@bench.command("ops")
def bench_ops(
    context: typer.Context,
    op: Ops = None,
    category: Category = None,
    size: Sizes = None,
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

    measure_ops(context, "bench-ops", suite.names_of(op or (), category), size or ())


bench.command("model")(bench_model)


@bench.command("all")
def bench_all(
    context: typer.Context,
    model: Model = None,
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
    from genesis_cli.session.preparation import resolve_device

    size = model or (QUICKSTART if resolve_device(device) == CPU else "0.5B")
    measure_ops(context, "bench-all", suite.names_of(), (), (size, shape_named(size, "--model")))


def measure_ops(
    context: typer.Context,
    kind: str,
    names: Sequence[str],
    wanted: Sequence[str],
    model: tuple[str, ModelConfig] | None = None,
) -> None:
    """Measure ops, and then the model's steps, with the options of the command line; write and print the report.

    An interrupted run reports what was measured, and then ends as interrupted. The folder of reports is created first,
    so that a failure there costs no measurements.

    Args:
        names: ops.
        wanted: size classes; empty for those of the device.
        model: its name and configuration.
    """
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure import history, suite
    from genesis.measure.cases import default_sizes
    from genesis.measure.op import Measured, Settings
    from genesis.measure.record import Report, to_text
    from genesis_cli.environment import facts
    from genesis_cli.session.preparation import resolve_device

    asked: Any = type("Asked", (), context.params)
    where, dtype = resolve_device(asked.device), dtype_of(asked.dtype)
    sizes = tuple(dict.fromkeys(wanted or default_sizes(where, is_fast=asked.fast)))
    planned = suite.jobs(names, sizes, every_axis=not asked.fast)
    settings = {
        "dtype": "float32" if dtype is None else dtype.name,
        "sizes": ",".join(sizes),
        "backward": asked.backward,
        "fast": asked.fast,
        "threads": threads() if where == CPU else None,
    }
    machine = facts()
    name, folder = device_name(where, machine), history.made_folder(Path(asked.out or history.default_folder()))
    earlier = history.earlier_runs(folder, name, settings)

    def is_slower(measured: Measured) -> bool:
        return any(c.verdict == "slower" for c in history.changes_since(earlier, suite.rows_of([measured])))

    try:
        with peer_of(where, asked.vs, asked.torch_python) as peer:
            plan = suite.FAST if asked.fast else suite.THOROUGH
            how = Settings(backward=asked.backward, stages=False, causes=not asked.fast, plan=plan, peer=peer)
            results = suite.measure_all(planned, where, dtype, how, show_progress, is_slower)
    finally:
        show_progress("")
    steps = Steps(interrupted=results.interrupted)
    if model is not None and not results.interrupted:
        steps = measure_steps(*model, where, asked.fast)
    if results.interrupted and not results.measured:
        raise KeyboardInterrupt
    tables = suite.tables_of(results)
    changes = history.changes_table(earlier, suite.rows_of(results.measured))
    report = Report(
        kind=kind,
        command=command_of(context, kind.replace("-", " ")),
        device=str(where),
        device_name=name,
        machine=machine,
        settings=settings,
        tables=[*tables[:-1], *([changes] if changes.rows else []), *tables[-1:], *steps.tables],
        failures=[*results.failures, *steps.failures],
        notes=list(suite.notes_of(results)),
    )
    here = Path.cwd()
    paths = (p.relative_to(here) if p.is_relative_to(here) else p for p in history.save(report, folder))
    written = [f"written  {escape(path)}" for path in paths]
    # The files hold all cases; a terminal shows the sums.
    short = dataclasses.replace(report, tables=[each for each in report.tables if each.name != "ops"])
    show(report, [*to_text(short), "", *written], asked.json)
    if steps.interrupted:
        raise KeyboardInterrupt
    raise_first(report.failures, len(results.measured) + steps.count)
    if not results.measured:
        raise UsageError(results.skipped[0]["reason"], where="--dtype", next="leave --dtype out, or choose another")


def measure_steps(name: str, config: ModelConfig, device: Device, is_fast: bool) -> Steps:
    """Measure training steps of the model."""
    from genesis.backend import CPU
    from genesis_cli.session.bench.model import measure_model
    from genesis_cli.session.bench.steps import FAST, THOROUGH, Request, Settings
    from genesis_models.weights import weight_type

    dtype = weight_type(None, device, config.stored_dtype, trains=True).name
    batches, lengths = FAST_CASES if is_fast else CPU_CASES if device == CPU else GPU_CASES
    cases = [(b, min(t, config.packed_length)) for b, t in itertools.product(batches, lengths)]
    request = Request(config, cases, device, Settings(dtype, plan=FAST if is_fast else THOROUGH))
    try:
        measured = measure_model(request)
    except KeyboardInterrupt:
        return Steps(interrupted=True)
    tables = measured.tables()
    if tables:
        tables[0].title = "Training steps of a model"
        tables[0].notes.append(f"{name}: {config.model_type}, {dtype}, random weights")
    return Steps(tables, measured.failures, len(measured.cases), measured.interrupted)
