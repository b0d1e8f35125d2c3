"""`genesis bench ops | model | all`: the cost of ops and of a model's steps here, and what changed since."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import UsageError, escape
from genesis_cli import measured
from genesis_cli.bench_model import bench_model
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Reports, TorchPython, VsTorch
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis_cli.session.bench_model import Request

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

bench = typer.Typer(help="Measure ops, a model, or all, for a report.", add_completion=False, rich_markup_mode=None)
bench.command("model")(bench_model)


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
    """Compare many ops with the limits of this machine.

    Writes Markdown and JSON, named by date, and compares with earlier runs of the same machine there.
    A case that fails does not end the run; the exit code is that of the first one.
    """
    from genesis.measure import suite

    measure(context, "bench-ops", suite.names_of(op or (), category), size or ())


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
    """Measure ops and a model, and write one report, as `bench ops` does."""
    from genesis.backend import CPU
    from genesis.measure import suite
    from genesis_cli.session.preparation import resolve_device

    where = resolve_device(device)
    size = model or (QUICKSTART if where == CPU else "0.5B")
    measure(context, "bench-all", suite.names_of(), (), steps_of(size, where, is_fast=fast))


def steps_of(size: str, device: Device, *, is_fast: bool) -> Request:
    """The training steps to measure of the model that `--model` names."""
    from genesis.backend import CPU
    from genesis_cli.session.bench_model import FAST, THOROUGH, Request
    from genesis_models.weights import weight_type

    config = shape_named(size, "--model")
    dtype = weight_type(None, device, config.stored_dtype, trains=True).name
    batches, lengths = FAST_CASES if is_fast else CPU_CASES if device == CPU else GPU_CASES
    cases = [(b, min(t, config.packed_length)) for b, t in itertools.product(batches, lengths)]
    plan, title = FAST if is_fast else THOROUGH, f"Training steps of {size}, {dtype}"
    return Request(config, cases, device, dtype, plan=plan, title=title)


def measure(
    context: typer.Context, kind: str, names: Sequence[str], wanted: Sequence[str], steps: Request | None = None
) -> None:
    """Measure ops, and then a model's steps, with the options of the command line; write and print the report.

    Args:
        names: ops.
        wanted: size classes; empty for those of the device.
    """
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure import suite
    from genesis.measure.cases import default_sizes
    from genesis.measure.op import Settings
    from genesis.measure.record import to_text
    from genesis_cli.session.bench_model import measure_model
    from genesis_cli.session.preparation import resolve_device

    asked = SimpleNamespace(**context.params)
    where, dtype = resolve_device(asked.device), measured.dtype_of(asked.dtype)
    sizes = tuple(dict.fromkeys(wanted or default_sizes(where, is_fast=asked.fast)))
    planned = suite.jobs(names, sizes, every_axis=not asked.fast)
    folder = measured.made_folder(asked.out or suite.default_folder())
    report = measured.new_report(kind, measured.command_of(context, kind.replace("-", " ")), where)
    try:
        with measured.peer_of(where, asked.vs, asked.torch_python) as peer:
            report.settings = {
                "dtype": "float32" if dtype is None else dtype.name,
                "sizes": ",".join(sizes),
                "backward": asked.backward,
                "fast": asked.fast,
                "threads": threads() if where == CPU else None,
                "torch": peer.version if peer else None,
            }
            plan = suite.FAST if asked.fast else suite.THOROUGH
            how = Settings(backward=asked.backward, stages=False, causes=not asked.fast, plan=plan, peer=peer)
            results = suite.measure_all(planned, where, dtype, how, measured.show_progress)
    finally:
        measured.show_progress("")
    report.tables, report.failures, report.notes = suite.tables_of(results), results.failures, suite.notes_of(results)
    changes = suite.changes_table(suite.earlier_runs(folder, report), results.measured)
    report.tables[-1:-1] = [changes] if changes.rows else []
    count = len(results.measured)
    if steps is not None:
        found = measure_model(steps)
        report.tables += found.tables()
        report.failures += found.failures
        count += len(found.cases)
    here = Path.cwd()
    paths = (p.relative_to(here) if p.is_relative_to(here) else p for p in suite.save(report, folder))
    written = [f"written  {escape(path)}" for path in paths]
    # The files hold all cases; a terminal shows the sums.
    short = dataclasses.replace(report, tables=[each for each in report.tables if each.name != "ops"])
    measured.show(report, [*to_text(short), "", *written], asked.json)
    measured.raise_first(report.failures, count)
    if not results.measured:
        raise UsageError(results.skipped[0]["reason"], where="--dtype", next="leave --dtype out, or choose another")
