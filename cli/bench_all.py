"""`genesis bench all`: every op and a model's training steps, in one report."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis_cli.bench_model import bench_model
from genesis_cli.bench_ops import Given, bench_ops, finish, measured_ops, setup_of
from genesis_cli.measured import dtype_of, raise_first
from genesis_cli.options import JsonFile, MeasuredDevice, Reports, TorchPython, VsTorch
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.measure.record import Failure, Table
    from genesis_models.config import ModelConfig

QUICKSTART = "quickstart"  # the model of the recipe, for the CPU
CPU_CASES = ((1, 4, 8), (256,))
GPU_CASES = ((1, 4, 8), (512, 1024))
FAST_CASES = ((4,), (128,))

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
    from genesis_cli.bench_model import Request, measure_alone
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
