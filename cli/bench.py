"""`genesis bench ops | model | all` and `genesis demo`: the cost of ops, of steps of a model, of ideas about speed."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import UsageError, escape, nearest
from genesis_cli import measured
from genesis_cli.nproc import asked_ranks, launched
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Reports, TorchPython, VsTorch, weight_dtype
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genesis_cli.session.bench_model import Request

QUICKSTART = "quickstart"  # the model of the recipe, for the CPU
CPU_CASES = ((1, 4, 8), (256,))
GPU_CASES = ((1, 4, 8), (512, 1024))
FAST_CASES = ((4,), (128,))
LENGTHS, BATCHES = (128, 256, 512), "1,2,4"
CHECKPOINTING = ("none", "selective", "full")

SIZES = "small, medium, batch, large or xlarge; may be given several times.  [default: by device]"
MODELS = "A preset, a config.json, a model folder, or quickstart.  [default: 0.5B on a GPU, else quickstart]"
CATEGORIES = "element, activation, reduction, matmul, memory or optimizer."
TOKENS = f"Tokens of a row.  [default: {','.join(map(str, LENGTHS))}, up to the model's positions]"
TYPES = "bf16 or fp32.  [default: the config's; CPU: fp32]"
REPEATED = "What backward computes again: none, selective or full."
RANKS = "Take steps in N processes of this host, ranks, each with its own batch, and in one alone; all: one per GPU, or"
SIZE = "A preset such as 0.5B, a config.json, a model folder, or quickstart."
DEMOS = "fusion, batched, memory or access; without it they are listed."
OP = "This op alone; may be given several times."
Fast = Annotated[bool, typer.Option("--fast", help="One size, little time for each case.")]
WithBackward = Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")]

bench = typer.Typer(help="Measure ops, a model, or all, for a report.", add_completion=False, rich_markup_mode=None)


@bench.command("ops")
def bench_ops(
    context: typer.Context,
    op: Annotated[list[str] | None, typer.Option(metavar="NAME", help=OP)] = None,
    category: Annotated[str | None, typer.Option(metavar="NAME", help=CATEGORIES)] = None,
    size: Annotated[list[str] | None, typer.Option(metavar="SIZE", help=SIZES)] = None,
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
    model: Annotated[str | None, typer.Option(metavar="SIZE", help=MODELS)] = None,
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
    from genesis_cli.session.bench_model import FAST, THOROUGH, Request
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.weights import weight_type

    where = resolve_device(device)
    size = model or (QUICKSTART if where == CPU else "0.5B")
    config = shape_named(size, "--model")
    kind = weight_type(None, where, config.stored_dtype, trains=True).name
    batches, lengths = FAST_CASES if fast else CPU_CASES if where == CPU else GPU_CASES
    cases = [(b, min(t, config.packed_length)) for b, t in itertools.product(batches, lengths)]
    request = Request(config, cases, where, kind, plan=FAST if fast else THOROUGH)
    measure(context, "bench-all", suite.names_of(), (), request, f"Training steps of {size}, {kind}")


def measure(
    context: typer.Context,
    kind: str,
    names: Sequence[str],
    wanted: Sequence[str],
    steps: Request | None = None,
    title: str = "",
) -> None:
    """Measure ops of these size classes, and then a model's steps; write and print the report."""
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure import suite
    from genesis.measure.cases import default_sizes
    from genesis.measure.op import Settings
    from genesis.measure.record import to_text
    from genesis_cli.session.bench_model import measure_model, step_tables
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
        report.tables += step_tables(found.cases, title)
        report.failures += found.failures
        count += len(found.cases)
    written = [f"written  {escape(path)}" for path in suite.save(report, folder)]
    # The files hold all cases; a terminal shows the sums.
    short = dataclasses.replace(report, tables=[each for each in report.tables if each.name != "ops"])
    measured.show(report, [*to_text(short), "", *written], asked.json)
    measured.raise_first(report.failures, count)
    if not results.measured:
        raise UsageError(results.skipped[0]["reason"], where="--dtype", next="leave --dtype out, or choose another")


@bench.command("model")
def bench_model(
    context: typer.Context,
    size: Annotated[str, typer.Option(metavar="SIZE", help=SIZE)],
    batch_size: Annotated[str, typer.Option(metavar="N,N,…", help="Rows of a batch.")] = BATCHES,
    seq_len: Annotated[str | None, typer.Option(metavar="N,N,…", help=TOKENS)] = None,
    device: MeasuredDevice = "auto",
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help=TYPES)] = None,
    checkpointing: Annotated[str, typer.Option(metavar="HOW", help=REPEATED)] = "none",
    fast: Annotated[bool, typer.Option("--fast", help="Take little time for each case.")] = False,
    nproc: Annotated[str | None, typer.Option(metavar="N|all", help=f"{RANKS} CPU core.")] = None,
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    json: JsonFile = None,
) -> None:
    """Measure training steps of a model.

    The weights are random. Prints the times of forward, backward and optimizer for each batch size and length, tokens
    and FLOPs a second, what a token costs in larger batches and lengths, the share of this machine's measured matmul,
    and memory by its purpose.
    A case that fails does not end the run; the first one sets the exit code. With --nproc a rank that fails ends all of
    them, without a report.
    """
    config, asked = shape_named(size, "--size"), weight_dtype(dtype, trains=True, quantized=False)
    usual = ",".join(str(n) for n in LENGTHS if n <= config.packed_length) or str(config.packed_length)
    batches = measured.sizes(batch_size, "--batch-size")
    lengths = measured.sizes(usual if seq_len is None else seq_len, "--seq-len")
    if checkpointing not in CHECKPOINTING:
        next = f"use one of {', '.join(CHECKPOINTING)}"
        raise UsageError(f"{checkpointing!r} is not known", where="--checkpointing", next=next)
    if wrong := [length for length in lengths if not 2 <= length <= config.packed_length]:
        what = f"a length of {wrong[0]} is not between 2 and the model's {config.packed_length} positions"
        raise UsageError(what, where="--seq-len", next="take lengths in that range")
    count = 1 if nproc is None else asked_ranks(nproc, device)
    measured.check_peer(vs, torch_python)
    if count > 1:
        raise typer.Exit(launched("bench-model", measured.words_of(context, "nproc", between="="), count))

    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure.limits import COLUMNS
    from genesis.measure.record import Table, to_text
    from genesis_cli.session import bench_model as model
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.registry import fuses, parameter_count
    from genesis_models.weights import weight_type

    if checkpointing == "selective" and not fuses(config):
        what = f"selective is for fused layers, and {config.model_type} has plain ones"
        raise UsageError(what, where="--checkpointing", next="use none or full")
    command = measured.command_of(context, "bench-model")
    with model.together(device, command, is_quiet=json == measured.STDOUT) as ranks:
        where = resolve_device(device, ranks)
        kind = weight_type(asked, where, config.stored_dtype, trains=True).name
        plan, cases = model.FAST if fast else model.THOROUGH, list(itertools.product(batches, lengths))
        request = model.Request(config, cases, where, kind, checkpointing, plan, vs is not None, torch_python)
        found = model.measure_model(request, ranks)
    if not ranks.is_main:
        return
    report = measured.new_report("bench-model", command + (f" --nproc {ranks.size}" if ranks.size > 1 else ""), where)
    report.settings = {
        "model": escape(size),
        "type": config.model_type,
        "parameters": parameter_count(config),
        "dtype": kind,
        "optimizer": model.OPTIMIZER,
        "checkpointing": checkpointing,
        "ranks": ranks.size if ranks.size > 1 else None,
        "threads": threads() if where == CPU else None,
        "torch": found.torch,
    }
    report.tables = [Table("limits", "measured now", COLUMNS, [found.limits]), *model.step_tables(found.cases)]
    report.failures = found.failures
    measured.show(report, to_text(report), json)
    measured.raise_first(report.failures, len(found.cases))


def demo(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=DEMOS)] = None,
    device: MeasuredDevice = "auto",
    fast: Annotated[bool, typer.Option("--fast", help="On little data, in about two seconds.")] = False,
    json: JsonFile = None,
) -> None:
    """Measure what an idea about speed or memory gains here.

    Runs the same work in several ways, and prints the bytes that each reads and writes, its time, and how they compare.
    The code of all demos is short: genesis/measure/demos.py.
    """
    from genesis.measure import demos
    from genesis.measure.limits import copy_rate
    from genesis.measure.record import format_rate, to_text
    from genesis_cli.session.preparation import resolve_device

    if name is None:
        print("\n".join(f"{each:8} {run.__doc__}" for each, run in demos.DEMOS.items()))
        return
    if name not in demos.DEMOS:
        near = nearest(name, demos.DEMOS)
        next = f"did you mean {near}?" if near else f"demos: {', '.join(demos.DEMOS)}"
        raise UsageError(f"unknown demo {name}", where="NAME", next=next)
    where = resolve_device(device)
    report = measured.new_report("demo", measured.command_of(context, "demo"), where)
    report.tables = list(demos.DEMOS[name](demos.Setting(where, fast)))
    report.settings = {"copy": format_rate(copy_rate(where), "B/s")}
    measured.show(report, to_text(report), json)
