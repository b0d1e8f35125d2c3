"""`genesis bench all`: every op and a model's training steps, in one report."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis_cli.bench_ops import Given, finish, measured_ops, setup_of
from genesis_cli.measured import dtype_of, raise_first
from genesis_cli.options import JsonFile, MeasuredDevice, Reports, TorchPython, VsTorch
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.report.schema import Section
    from genesis_models.config import ModelConfig

QUICKSTART = "quickstart"  # the model of the recipe, for the CPU
CPU_CASES = ((1, 4, 8), (256,))
GPU_CASES = ((1, 4, 8), (512, 1024))
FAST_CASES = ((4,), (128,))

bench = typer.Typer(help="Reports about everything.", add_completion=False, rich_markup_mode=None)


@bench.callback()
def _about() -> None:
    """Measure everything that this machine can run, and report it."""


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
    fast: Annotated[bool, typer.Option("--fast", help="One size, little time for each case: seconds.")] = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="Measure recording and the gradient of ops, too.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Of the ops' inputs: bf16, fp16, fp32 or fp64.  [default: fp32]"),
    ] = None,
    device: MeasuredDevice = "auto",
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    out: Reports = None,
    json: JsonFile = None,
) -> None:
    """Measure every op and the training steps of a model, and write one report.

    Writes one HTML page, Markdown and JSON, named by date, and compares with earlier runs of the same machine there.
    A case that fails does not end the run; the exit code is that of the first one. Ctrl-C ends it with a report of
    what was measured.
    """
    from genesis.backend import CPU
    from genesis.measure.cases import default_sizes
    from genesis.report import suite
    from genesis_cli.session.preparation import resolve_device

    where, kind = resolve_device(device), dtype_of(dtype)
    size = model or (QUICKSTART if where == CPU else "0.5B")
    config = shape_named(size, "--model")
    sizes = default_sizes(where, is_fast=fast)
    planned = suite.jobs(suite.names_of(), sizes, every_axis=not fast)
    given: Given = [("--model", model), ("--dtype", dtype), ("--device", device), ("--vs", vs)]
    given += [("--fast", fast), ("--backward", backward)]
    setup = setup_of(where, kind, sizes, backward, fast, out)
    measured, steps, sections = measured_ops(planned, setup, vs, torch_python), 0, []
    if not measured.interrupted:
        try:
            section, failures, steps = _model_section(size, config, where, fast)
            sections += [section] if steps else []
            measured.failures.extend(failures)
        except KeyboardInterrupt:
            measured = measured._replace(interrupted=True)
    finish("bench-all", given, setup, measured, json, sections)
    raise_first(measured.failures, len(measured.entries) + steps)


def _model_section(name: str, config: ModelConfig, device: Device, is_fast: bool) -> tuple[Section, list[Any], int]:
    """The section about training steps, what failed, and how many cases were measured."""
    from genesis.backend import CPU
    from genesis.measure.record import cell_text
    from genesis.profile.schema import Failure
    from genesis.report.schema import Section
    from genesis_cli.bench_model import Request, measure_alone
    from genesis_cli.session.bench.steps import FAST, THOROUGH, Settings
    from genesis_models.weights import weight_type

    dtype = weight_type(None, device, config.stored_dtype, trains=True).name
    settings = Settings(dtype, plan=FAST if is_fast else THOROUGH)
    batches, lengths = FAST_CASES if is_fast else CPU_CASES if device == CPU else GPU_CASES
    cases = [(b, min(t, config.packed_length)) for b, t in itertools.product(batches, lengths)]
    request = Request(config, cases, device, settings)
    measured = measure_alone(request)
    steps = next(iter(measured.tables(request)), None)
    columns, rows = ([], []) if steps is None else (steps.columns, steps.rows)
    section = Section(
        title="Training steps of a model",
        text=[f"{name}: {config.model_type}, {dtype}, random weights."],
        columns=[column.title for column in columns],
        cells=[[cell_text(column, row[column.key]) for column in columns] for row in rows],
        bars=[],
        data={"model": name},
    )
    failures = [Failure(name=f.name, label=f.label, error=f.error, exit_code=f.exit_code) for f in measured.failures]
    return section, failures, len(measured.cases)
