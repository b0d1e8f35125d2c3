"""The commands that measure: `genesis profile`, `genesis bench ops | model | all` and `genesis demo`.

They show the cost of an op, a run, all ops, steps of a model, and ideas about speed on this machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis.errors import DeviceError, DiskError, DTypeError, GenesisError, ModelError, UsageError, escape, nearest
from genesis.files.paths import quote
from genesis_cli.nproc import asked_ranks, is_rank, launched
from genesis_cli.options import (
    JsonFile,
    MeasuredDevice,
    OpDtype,
    Overrides,
    Reports,
    TorchPython,
    VsTorch,
    weight_dtype,
)
from genesis_cli.recipes import load, shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.dtypes import DType
    from genesis.measure.cases import Axes
    from genesis.measure.peer import Child
    from genesis.measure.record import Report
    from genesis.shapes import Shape
    from genesis_cli.session.bench_model import Request

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
    with DEFAULT.errors("write", Path(json)), open(json, "wb") as stream:
        stream.write(report.to_json())


def show_progress(text: str) -> None:
    """Replace the line that shows on a terminal what is being measured; "" clears it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def finish(report: Report, json: str | None, measured: int, lines: Iterable[str] | None = None) -> None:
    """Show a report, by default as text, and raise its first failure, if there is one; `measured` cases succeeded."""
    from genesis.measure.record import to_text

    show(report, to_text(report) if lines is None else lines, json)
    if report.failures:
        first, count = report.failures[0], len(report.failures)
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
    """Yield the process of the library that `--vs` names, which ops are compared with; None without `--vs`."""
    from genesis.measure.peer import started

    check_peer(name, python)
    with nullcontext() if name is None else started("ops", device, python) as child:
        yield child


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
RANKS = "Measure N ranks (processes of this host), each with its own batch, and one alone; all: one per GPU, or"
SIZE = "A preset such as 0.5B, a config.json, a model folder, or quickstart."
DEMOS = "fusion, batched, memory, access or linears; without it they are listed."
OP = "This op alone; may be given several times."
Fast = Annotated[bool, typer.Option("--fast", help="One size, little time for each case.")]
WithBackward = Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")]

bench = typer.Typer(help="Measure ops, a model, or all, for a report.", add_completion=False, rich_markup_mode=None)


@bench.command("ops")
def bench_ops(
    context: typer.Context,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="NAME", help=OP)] = None,
    category: Annotated[str | None, typer.Option("--category", metavar="NAME", help=CATEGORIES)] = None,
    size: Annotated[list[str] | None, typer.Option("--size", metavar="SIZE", help=SIZES)] = None,
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
    A case that fails does not end the run; the first one sets the exit code.
    """
    from genesis.measure import suite

    measure(context, "bench-ops", suite.names_of(op or (), category), size or ())


@bench.command("all")
def bench_all(
    context: typer.Context,
    model: Annotated[str | None, typer.Option("--model", metavar="SIZE", help=MODELS)] = None,
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
    where, dtype = resolve_device(asked.device), dtype_of(asked.dtype)
    sizes = tuple(dict.fromkeys(wanted or default_sizes(where, is_fast=asked.fast)))
    planned = suite.jobs(names, sizes, every_axis=not asked.fast)
    folder = made_folder(asked.out or suite.default_folder())
    report = new_report(kind, command_of(context, kind.replace("-", " ")), where)
    try:
        with peer_of(where, asked.vs, asked.torch_python) as peer:
            report.settings = {
                "dtype": "float32" if dtype is None else dtype.name, "sizes": ",".join(sizes),
                "backward": asked.backward, "fast": asked.fast,
                "threads": threads() if where == CPU else None, "torch": peer.version if peer else None,
            }  # fmt: skip
            plan = suite.FAST if asked.fast else suite.THOROUGH
            how = Settings(backward=asked.backward, stages=False, causes=not asked.fast, plan=plan, peer=peer)
            results = suite.measure_all(planned, where, dtype, how, show_progress)
    finally:
        show_progress("")
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
    finish(report, asked.json, count, [*to_text(short), "", *written])
    if not results.measured:
        raise UsageError(results.skipped[0]["reason"], where="--dtype", next="leave --dtype out, or choose another")


@bench.command("model")
def bench_model(
    context: typer.Context,
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help=SIZE)],
    batch_size: Annotated[str, typer.Option("--batch-size", metavar="N,N,…", help="Rows of a batch.")] = BATCHES,
    seq_len: Annotated[str | None, typer.Option("--seq-len", metavar="N,N,…", help=TOKENS)] = None,
    device: MeasuredDevice = "auto",
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help=TYPES)] = None,
    checkpointing: Annotated[str, typer.Option("--checkpointing", metavar="HOW", help=REPEATED)] = "none",
    fast: Annotated[bool, typer.Option("--fast", help="Take little time for each case.")] = False,
    nproc: Annotated[str | None, typer.Option("--nproc", metavar="N|all", help=f"{RANKS} CPU core.")] = None,
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
    batches = sizes(batch_size, "--batch-size")
    lengths = sizes(usual if seq_len is None else seq_len, "--seq-len")
    if checkpointing not in CHECKPOINTING:
        next = f"use one of {', '.join(CHECKPOINTING)}"
        raise UsageError(f"{checkpointing!r} is not known", where="--checkpointing", next=next)
    if wrong := [length for length in lengths if not 2 <= length <= config.packed_length]:
        what = f"a length of {wrong[0]} is not between 2 and the model's {config.packed_length} positions"
        raise UsageError(what, where="--seq-len", next="take lengths in that range")
    count = 1 if nproc is None else asked_ranks(nproc, device)
    check_peer(vs, torch_python)
    if count > 1:
        raise typer.Exit(launched("bench-model", words_of(context, "nproc", between="="), count))

    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure.limits import COLUMNS
    from genesis.measure.record import Table
    from genesis_cli.session import bench_model as model
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.registry import fuses, parameter_count
    from genesis_models.weights import weight_type

    if checkpointing == "selective" and not fuses(config):
        what = f"selective is for fused layers, and {config.model_type} has plain ones"
        raise UsageError(what, where="--checkpointing", next="use none or full")
    command = command_of(context, "bench-model")
    with model.together(device, command, is_quiet=json == STDOUT) as ranks:
        where = resolve_device(device, ranks)
        kind = weight_type(asked, where, config.stored_dtype, trains=True).name
        plan, cases = model.FAST if fast else model.THOROUGH, list(itertools.product(batches, lengths))
        request = model.Request(config, cases, where, kind, checkpointing, plan, vs is not None, torch_python)
        found = model.measure_model(request, ranks)
    if not ranks.is_main:
        return
    report = new_report("bench-model", command + (f" --nproc {ranks.size}" if ranks.size > 1 else ""), where)
    report.settings = {
        "model": escape(size), "type": config.model_type, "parameters": parameter_count(config), "dtype": kind,
        "optimizer": model.OPTIMIZER, "checkpointing": checkpointing, "ranks": ranks.size if ranks.size > 1 else None,
        "threads": threads() if where == CPU else None, "torch": found.torch,
    }  # fmt: skip
    report.tables = [Table("limits", "measured now", COLUMNS, [found.limits]), *model.step_tables(found.cases)]
    report.failures = found.failures
    finish(report, json, len(found.cases))


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
    from genesis.measure.record import format_rate
    from genesis_cli.session.preparation import resolve_device

    if name is None:
        print("\n".join(f"{each:8} {run.__doc__}" for each, run in demos.DEMOS.items()))
        return
    if name not in demos.DEMOS:
        near = nearest(name, demos.DEMOS)
        next = f"did you mean {near}?" if near else f"demos: {', '.join(demos.DEMOS)}"
        raise UsageError(f"unknown demo {name}", where="NAME", next=next)
    where = resolve_device(device)
    report = new_report("demo", command_of(context, "demo"), where)
    report.tables = list(demos.DEMOS[name](demos.Setting(where, fast)))
    report.settings = {"copy": format_rate(copy_rate(where), "B/s")}
    finish(report, json, 1)


STEPS, MOST_STEPS = 5, 1000  # default and maximum
OF_RUNS = ("config", "overrides", "steps", "out", "nvtx")
STAGES = "Print the kernels' code and measure nothing: ttir, ttgir, llir, ptx, sass, or choice (of tiles)."
ARCH = "The GPU to show code for.  [default: this GPU; otherwise sm_90]"
RUN = "A training run: a YAML file, or a recipe's name."
SHAPE = "The shape that the inputs are built from.  [default: the op's typical ones]"
AXIS = "-1, or several as in 0,1, or all.  [default: typical ones]"
OUT = "Write the run's trace, flame graph and memory into it."
OPS = "Op of the registry, such as add, reduce_sum, matmul."


def profile(
    context: typer.Context,
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help=RUN)] = None,
    overrides: Overrides = None,
    op: Annotated[str | None, typer.Option("--op", metavar="NAME", help=OPS)] = None,
    shape: Annotated[str | None, typer.Option("--shape", metavar="N,N,…", help=SHAPE)] = None,
    axis: Annotated[str | None, typer.Option("--axis", metavar="AXIS", help=AXIS)] = None,
    dtype: OpDtype = None,
    device: MeasuredDevice = "auto",
    backward: Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")] = False,
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    stage: Annotated[str | None, typer.Option("--show", metavar="STAGE", help=STAGES)] = None,
    arch: Annotated[str | None, typer.Option("--arch", metavar="sm_N", help=ARCH)] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of the run to profile.")] = STEPS,
    out: Annotated[str | None, typer.Option("--out", metavar="FOLDER", help=OUT)] = None,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Show the run's parts to Nsight as NVTX ranges.")] = False,
    json: JsonFile = None,
) -> None:
    """Explain the time of an op or of a training run.

    Prints times with their confidence, the share of this machine's measured limits, memory, and what would help.
    A case that fails does not end the run; the first one sets the exit code.
    """
    asked = SimpleNamespace(**context.params)
    if is_run(context):
        profile_run(context, asked)
    elif stage is None:
        measure_op(context, asked)
    else:
        show_code(asked)


def is_run(context: typer.Context) -> bool:
    """Whether the command line profiles a training run, not an op. Raises UsageError: it mixes them."""
    given = given_in(context)
    run, op = "config" in given, "op" in given
    if run == op:
        what = "a training run and --op exclude each other" if run else "Missing option '--op', or a CONFIG"
        advice = "name one of them: genesis profile CONFIG, or genesis profile --op NAME; see genesis profile --help"
        raise UsageError(what, where="command line", next=advice)
    for name in given:
        if name != "json" and (name in OF_RUNS) != run:
            option = {"stage": "--show"}.get(name, f"--{name.replace('_', '-')}")
            kind, other = ("ops", "a run") if run else ("runs", "an op")
            hint = "; set train.device=cpu or train.device=cuda" if name == "device" else ""
            advice = f"leave it out of the profile of {other}{hint}"
            raise UsageError(f"{option} is for {kind}", where=option, next=advice)
    return run


def measure_op(context: typer.Context, asked: SimpleNamespace) -> None:
    """Measure, print the report, and end with the first failure's exit code, if there is one."""
    from genesis.measure.op import Settings, profile_op, tables_of
    from genesis.measure.record import Failure
    from genesis_cli.session.preparation import resolve_device

    if asked.arch is not None:
        raise UsageError("--arch selects the GPU for --show", where="--arch", next="add --show ptx, or leave it out")
    where, kind = resolve_device(asked.device), dtype_of(asked.dtype)
    with peer_of(where, asked.vs, asked.torch_python) as peer:
        settings = Settings(backward=asked.backward, peer=peer)
        found = list(profile_op(asked.op, where, kind, *_shapes_and_axes(asked), settings))
    rows = [each for each in found if not isinstance(each, Failure)]
    report = new_report("profile-op", command_of(context, "profile"), where)
    report.settings = {"torch": peer.version if peer else None}
    report.tables, report.failures = tables_of(rows), [each for each in found if isinstance(each, Failure)]
    finish(report, asked.json, len(rows), None if rows else ())


def show_code(asked: SimpleNamespace) -> None:
    """Print the code of the op's kernels, and measure nothing."""
    from genesis.measure.kernels import code_of, target_named
    from genesis_cli.session.preparation import resolve_device

    for option, value in (("--json", asked.json), ("--vs", asked.vs)):
        if value is not None:
            what = f"{option} is for measuring, and --show prints code alone"
            raise UsageError(what, where=option, next=f"leave {option} or --show out")
    target = target_named(asked.arch, resolve_device(asked.device))
    case = dtype_of(asked.dtype), *_shapes_and_axes(asked)
    found = list(code_of(asked.op, asked.stage, target, *case, asked.backward))
    nothing = "launches no kernel: it sets or copies memory, or only returns a view"
    if asked.stage == "choice":
        nothing = "chooses no tile of a matmul"
    print("\n".join(found or [f"{asked.op} {nothing}"]))


def _shapes_and_axes(asked: SimpleNamespace) -> tuple[list[Shape], list[Axes]]:
    """The one shape and the one choice of axes to measure; empty for the typical ones."""
    sizes, axes = (integers(text or "") for text in (asked.shape, asked.axis))
    if asked.shape is not None and (not sizes or min(sizes) < 1):
        next = "write sizes of 1 and more: 4,512,896"
        raise UsageError(f"{quote(asked.shape)} is not a shape", where="--shape", next=next)
    if asked.axis not in (None, "all") and not axes:
        next = "write -1, or several as in 0,1, or all"
        raise UsageError(f"{quote(asked.axis)} is not an axis", where="--axis", next=next)
    over = axes if len(axes) > 1 else axes[0] if axes else None
    return [sizes] if sizes else [], [] if asked.axis is None else [over]


def profile_run(context: typer.Context, asked: SimpleNamespace) -> None:
    """Profile the first steps of a run, print the report, and write the files into the folder `--out`."""
    from genesis.backend import CPU
    from genesis.cuda import nvtx
    from genesis.files.atomic import write_file
    from genesis.files.boundary import fitting
    from genesis.measure.record import format_bytes, format_seconds, to_text
    from genesis.measure.run import step_tables
    from genesis.measure.svg import flame_graph
    from genesis.measure.trace import chrome_trace, collapsed, stacks
    from genesis.train.output import Output

    if not 1 <= asked.steps <= MOST_STEPS:
        raise UsageError(f"{asked.steps} steps cannot be profiled", where="--steps", next=f"take 1 to {MOST_STEPS}")
    if is_rank():
        next = "start it without a launcher; genesis bench-model --nproc measures ranks"
        raise UsageError("a run is profiled in one process", where="command line", next=next)
    loaded = load(asked.config, asked.overrides or [])
    if asked.nvtx and not nvtx.is_available():
        what = "NVTX ranges need libnvToolsExt or libnvtx3interop, and neither was found"
        advice = "pip install nvidia-nvtx-cu12, or add the folder of CUDA's libraries to LD_LIBRARY_PATH"
        raise DeviceError(what, where="--nvtx", next=advice)
    folder = None if asked.out is None else made_folder(asked.out)
    from genesis_cli.session.profiling import profile

    with fitting(ModelError, "running the model"):
        found = profile(loaded, steps=asked.steps, console=Output(sys.stderr), has_ranges=asked.nvtx)
    on_gpu, main, changes = found.device != CPU, found.recorded[0], found.memory_step.tracks[0].changes
    report = new_report("profile-run", command_of(context, "profile"), found.device)
    report.tables = list(step_tables(found.recorded, on_gpu))
    first, peak = changes[0], max(changes, key=lambda change: change.allocated)
    when = f"{format_seconds(peak.at - first.at)} into an eager step; {format_bytes(first.allocated)} exist before it"
    report.notes.append(f"Memory peaks at {format_bytes(peak.allocated)}, {when}.")
    train, model = loaded.train, found.model
    report.settings = {
        "model": model.config.model_type, "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": model.head_weight.dtype.name, "rows": train.batch_size, "tokens": loaded.data.seq_len,
        "micro-batches": train.accumulation_steps, "threads": found.threads,
    }  # fmt: skip
    written = []
    if folder is not None:
        parts = stacks(main.steps, on_gpu)
        steps = {f"{r.mode} step {i}": step for r in found.recorded for i, step in enumerate(r.steps, 1)}
        steps["step with its memory"] = found.memory_step
        trace = chrome_trace([*steps.values()], [(name, step.start, step.end) for name, step in steps.items()])
        title = f"Time of one {main.mode} step of {found.model.config.model_type} on {report.device_name}"
        for name, content, meaning in (
            ("trace.json", trace, "every op and kernel, and memory, for ui.perfetto.dev"),
            ("stacks.txt", collapsed(parts), f"collapsed stacks of the {main.mode} step, in microseconds"),
            ("flamegraph.svg", flame_graph(parts, title), "the same, drawn"),
            ("report.json", report.to_json(), "all figures"),
        ):
            write_file(folder / name, content)
            written.append(f"wrote   {escape(folder / name)}: {meaning}")
    show(report, [*to_text(report), *([""] if written else []), *written], asked.json)
