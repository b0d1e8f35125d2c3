"""`genesis profile`: the cost of an op or a training run here, and what its time is spent on; or an op's code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import UsageError
from genesis.files.paths import quote
from genesis_cli.measured import command_of, device_name, dtype_of, integers, peer_of, raise_first, show
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Overrides, TorchPython, VsTorch
from genesis_cli.profile_run import STEPS, is_run, profile_run

if TYPE_CHECKING:
    from genesis.measure.cases import Axes
    from genesis.shapes import Shape

RANKS = "Take the run's steps in N processes of this host, ranks, and show what they send each other; all: one for"
Config = Annotated[
    str | None, typer.Argument(metavar="[CONFIG]", help="A training run: a YAML file, or a recipe's name.")
]
OpName = Annotated[
    str | None, typer.Option("--op", metavar="NAME", help="Op of the registry, such as add, reduce_sum, matmul.")
]
ShapeText = Annotated[
    str | None,
    typer.Option("--shape", metavar="N,N,…", help="What the inputs are made from.  [default: the op's typical ones]"),
]
AxisText = Annotated[
    str | None,
    typer.Option("--axis", metavar="AXIS", help="-1, or several as in 0,1, or all.  [default: typical ones]"),
]
Backward = Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")]
Cold = Annotated[bool, typer.Option("--cold", help="Empty the GPU's cache before each call.")]
Stage = Annotated[
    str | None,
    typer.Option(
        "--show", metavar="STAGE", help="Print the kernels' code and measure nothing: ttir, ttgir, llir, ptx, sass."
    ),
]
Kernel = Annotated[str | None, typer.Option("--kernel", metavar="NAME", help="The one kernel to show.")]
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch", metavar="sm_N", help="The GPU to show code for.  [default: this GPU; sm_90 where there is none]"
    ),
]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="N", help=f"Steps of the run to profile.  [default: {STEPS}]")
]
Out = Annotated[
    str | None, typer.Option("--out", metavar="FOLDER", help="Write the run's trace, flame graph and memory here.")
]
Nvtx = Annotated[bool, typer.Option("--nvtx", help="Show the run's parts to Nsight as NVTX ranges.")]
Generate = Annotated[
    bool, typer.Option("--generate", help="Show the cost of a token that the run's model generates, too.")
]
NProc = Annotated[str | None, typer.Option("--nproc", metavar="N|all", help=f"{RANKS} each GPU, or each CPU core.")]


def profile(
    context: typer.Context,
    config: Config = None,
    overrides: Overrides = None,
    op: OpName = None,
    shape: ShapeText = None,
    axis: AxisText = None,
    dtype: OpDtype = None,
    device: MeasuredDevice = "auto",
    backward: Backward = False,
    cold: Cold = False,
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    stage: Stage = None,
    kernel: Kernel = None,
    arch: Arch = None,
    steps: Steps = None,
    out: Out = None,
    nvtx: Nvtx = False,
    generate: Generate = False,
    nproc: NProc = None,
    json: JsonFile = None,
) -> None:
    """Measure one op, or the steps of a training run, and say what the time is spent on.

    Prints times with their confidence, the share of this machine's measured limits, memory, and what would help.
    A case that fails does not end the run; the exit code is that of the first one. With --nproc a rank that fails, or a
    signal, ends all of them, without a report.
    """
    if is_run(context):
        assert config is not None
        profile_run(config, overrides or [], steps, out, nvtx, generate, nproc, json)
    elif stage is None:
        measure_op(context, SimpleNamespace(**context.params))
    else:
        show_code(SimpleNamespace(**context.params))


def measure_op(context: typer.Context, asked: SimpleNamespace) -> None:
    """Measure, print the report, and end with the first failure's exit code, if there is one."""
    from genesis.measure.op import Settings, profile_op, tables_of
    from genesis.measure.record import Failure, Report, to_text
    from genesis_cli.environment import facts
    from genesis_cli.session.preparation import resolve_device

    for option, word in (("--kernel", asked.kernel), ("--arch", asked.arch)):
        if word is not None:
            raise UsageError(f"{option} says whose code to show", where=option, next="add --show ptx, or leave it out")
    where, kind = resolve_device(asked.device), dtype_of(asked.dtype)
    with peer_of(where, asked.vs, asked.torch_python) as peer:
        settings = Settings(backward=asked.backward, cold=asked.cold, peer=peer)
        found = list(profile_op(asked.op, where, kind, _shapes(asked.shape), _axes(asked.axis), settings))
    failures = [each for each in found if isinstance(each, Failure)]
    rows = [each for each in found if not isinstance(each, Failure)]
    machine = facts()
    report = Report(
        kind="profile-op",
        command=command_of(context, "profile"),
        device=str(where),
        device_name=device_name(where, machine),
        machine=machine,
        tables=tables_of(rows),
        failures=failures,
    )
    show(report, to_text(report) if rows else (), json=asked.json)
    raise_first(failures, len(rows))


def show_code(asked: SimpleNamespace) -> None:
    """Print the code of the op's kernels, and measure nothing."""
    from genesis.measure.kernels import code_of, render_lines, target_named
    from genesis_cli.session.preparation import resolve_device

    for option, is_set in (("--json", asked.json is not None), ("--cold", asked.cold), ("--vs", asked.vs is not None)):
        if is_set:
            what = f"{option} is for measuring, and --show prints code alone"
            raise UsageError(what, where=option, next=f"leave {option} or --show out")
    target = target_named(asked.arch, resolve_device(asked.device))
    case = dtype_of(asked.dtype), _shapes(asked.shape), _axes(asked.axis)
    found = list(code_of(asked.op, asked.stage, target, *case, asked.backward, asked.kernel))
    if not found:
        print(f"{asked.op} launches no kernel: it sets or copies memory, or only describes it anew")
    for code in found:
        print("\n".join(render_lines(code)))


def _shapes(text: str | None) -> list[Shape]:
    """`4,512,896` as the one shape to measure; empty for the typical ones."""
    if text is None:
        return []
    numbers = integers(text)
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{quote(text)} is not a shape", where="--shape", next="write sizes of 1 and more: 4,512,896")
    return [numbers]


def _axes(text: str | None) -> list[Axes]:
    """The one dimension, several, or None for all; empty for the typical ones."""
    if text is None or text == "all":
        return [] if text is None else [None]
    axes = integers(text)
    if not axes:
        raise UsageError(f"{quote(text)} is not an axis", where="--axis", next="write -1, or several as in 0,1, or all")
    return [axes if len(axes) > 1 else axes[0]]
