"""`genesis profile`: the cost of an op or of a training run on this machine and its causes, or the code of an op."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import DeviceError, ModelError, UsageError, escape
from genesis.files.paths import quote
from genesis_cli import measured
from genesis_cli.nproc import is_rank
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Overrides, TorchPython, VsTorch

if TYPE_CHECKING:
    from genesis.measure.cases import Axes
    from genesis.shapes import Shape

STEPS, MOST_STEPS = 5, 1000  # default and maximum
OF_RUNS = ("config", "overrides", "steps", "out", "nvtx")
STAGES = "Print the kernels' code and measure nothing: ttir, ttgir, llir, ptx, sass, or choice (of tiles)."
ARCH = "The GPU to show code for.  [default: this GPU; otherwise sm_90]"
RUN = "A training run: a YAML file, or a recipe's name."
SHAPE = "What the inputs are made from.  [default: the op's typical ones]"
AXIS = "-1, or several as in 0,1, or all.  [default: typical ones]"
OUT = "Write the run's trace, flame graph and memory into it."
OP = "Op of the registry, such as add, reduce_sum, matmul."


def profile(
    context: typer.Context,
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help=RUN)] = None,
    overrides: Overrides = None,
    op: Annotated[str | None, typer.Option(metavar="NAME", help=OP)] = None,
    shape: Annotated[str | None, typer.Option(metavar="N,N,…", help=SHAPE)] = None,
    axis: Annotated[str | None, typer.Option(metavar="AXIS", help=AXIS)] = None,
    dtype: OpDtype = None,
    device: MeasuredDevice = "auto",
    backward: Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")] = False,
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    stage: Annotated[str | None, typer.Option("--show", metavar="STAGE", help=STAGES)] = None,
    arch: Annotated[str | None, typer.Option(metavar="sm_N", help=ARCH)] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of the run to profile.")] = STEPS,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help=OUT)] = None,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Show the run's parts to Nsight as NVTX ranges.")] = False,
    json: JsonFile = None,
) -> None:
    """Explain the time of an op or of a training run.

    Prints times with their confidence, the share of this machine's measured limits, memory, and what would help.
    A case that fails does not end the run; the exit code is that of the first one.
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
    given = measured.given_in(context)
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
    from genesis.measure.record import Failure, to_text
    from genesis_cli.session.preparation import resolve_device

    if asked.arch is not None:
        raise UsageError("--arch selects the GPU for --show", where="--arch", next="add --show ptx, or leave it out")
    where, kind = resolve_device(asked.device), measured.dtype_of(asked.dtype)
    with measured.peer_of(where, asked.vs, asked.torch_python) as peer:
        settings = Settings(backward=asked.backward, peer=peer)
        found = list(profile_op(asked.op, where, kind, *_shapes_and_axes(asked), settings))
    rows = [each for each in found if not isinstance(each, Failure)]
    report = measured.new_report("profile-op", measured.command_of(context, "profile"), where)
    report.settings = {"torch": peer.version if peer else None}
    report.tables, report.failures = tables_of(rows), [each for each in found if isinstance(each, Failure)]
    measured.show(report, to_text(report) if rows else (), json=asked.json)
    measured.raise_first(report.failures, len(rows))


def show_code(asked: SimpleNamespace) -> None:
    """Print the code of the op's kernels, and measure nothing."""
    from genesis.measure.kernels import code_of, target_named
    from genesis_cli.session.preparation import resolve_device

    for option, value in (("--json", asked.json), ("--vs", asked.vs)):
        if value is not None:
            what = f"{option} is for measuring, and --show prints code alone"
            raise UsageError(what, where=option, next=f"leave {option} or --show out")
    target = target_named(asked.arch, resolve_device(asked.device))
    case = measured.dtype_of(asked.dtype), *_shapes_and_axes(asked)
    found = list(code_of(asked.op, asked.stage, target, *case, asked.backward))
    nothing = "launches no kernel: it sets or copies memory, or only describes it anew"
    if asked.stage == "choice":
        nothing = "chooses no tile of a matmul"
    print("\n".join(found or [f"{asked.op} {nothing}"]))


def _shapes_and_axes(asked: SimpleNamespace) -> tuple[list[Shape], list[Axes]]:
    """The one shape and the one choice of axes to measure; empty for the typical ones."""
    sizes, axes = (measured.integers(text or "") for text in (asked.shape, asked.axis))
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
    from genesis_cli import recipes

    if not 1 <= asked.steps <= MOST_STEPS:
        raise UsageError(f"{asked.steps} steps cannot be profiled", where="--steps", next=f"take 1 to {MOST_STEPS}")
    if is_rank():
        next = "start it without a launcher; genesis bench-model --nproc measures ranks"
        raise UsageError("a run is profiled in one process", where="command line", next=next)
    loaded = recipes.load(asked.config, asked.overrides or [])
    if asked.nvtx and not nvtx.is_available():
        what = "NVTX ranges need libnvToolsExt or libnvtx3interop, and neither was found"
        advice = "pip install nvidia-nvtx-cu12, or add the folder of CUDA's libraries to LD_LIBRARY_PATH"
        raise DeviceError(what, where="--nvtx", next=advice)
    folder = None if asked.out is None else measured.made_folder(asked.out)
    from genesis_cli.session.profiling import profile

    with fitting(ModelError, "running the model"):
        found = profile(loaded, steps=asked.steps, console=Output(sys.stderr), has_ranges=asked.nvtx)
    on_gpu, main, changes = found.device != CPU, found.recorded[0], found.memory_step.tracks[0].changes
    report = measured.new_report("profile-run", measured.command_of(context, "profile"), found.device)
    report.tables = list(step_tables(found.recorded, on_gpu))
    first, peak = changes[0], max(changes, key=lambda change: change.allocated)
    when = f"{format_seconds(peak.at - first.at)} into an eager step; {format_bytes(first.allocated)} exist before it"
    report.notes.append(f"Memory peaks at {format_bytes(peak.allocated)}, {when}.")
    report.settings = {
        "model": found.model.config.model_type,
        "parameters": sum(p.numel() for p in found.model.parameters()),
        "dtype": found.model.head_weight.dtype.name,
        "rows": loaded.train.batch_size,
        "tokens": loaded.data.seq_len,
        "micro-batches": loaded.train.accumulation_steps,
        "threads": found.threads,
    }
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
    measured.show(report, [*to_text(report), *([""] if written else []), *written], asked.json)
