"""`genesis profile`: what an op or a training run costs here, and what its time is spent on; or an op's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import UsageError, escape
from genesis.files.paths import quote
from genesis_cli.measured import device_name, dtype_of, integers, peer_of, raise_first, show
from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Overrides, TorchPython, VsTorch
from genesis_cli.profile_run import STEPS, is_run, profile_run

if TYPE_CHECKING:
    from genesis.measure.cases import Axes
    from genesis.shapes import Shape


def profile(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="A training run: a YAML file, or a recipe's name.")
    ] = None,
    overrides: Overrides = None,
    op: Annotated[
        str | None, typer.Option("--op", metavar="NAME", help="Op of the registry, such as add, reduce_sum, matmul.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="N,N,…", help="What the inputs are made from.  [default: the op's typical ones]"
        ),
    ] = None,
    axis: Annotated[
        str | None,
        typer.Option("--axis", metavar="AXIS", help="-1, or several as in 0,1, or all.  [default: typical ones]"),
    ] = None,
    dtype: OpDtype = None,
    device: MeasuredDevice = "auto",
    backward: Annotated[bool, typer.Option("--backward", help="Measure recording and the gradient, too.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the GPU's cache before each call.")] = False,
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    stage: Annotated[
        str | None,
        typer.Option(
            "--show", metavar="STAGE", help="Print the kernels' code and measure nothing: ttir, ttgir, llir, ptx, sass."
        ),
    ] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", metavar="NAME", help="The one kernel to show.")] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch", metavar="sm_N", help="What to show code for.  [default: this GPU; sm_90 where there is none]"
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help=f"Steps of the run to profile.  [default: {STEPS}]")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FOLDER", help="Write the run's trace, flame graph and memory here.")
    ] = None,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Show the run's parts to Nsight as NVTX ranges.")] = False,
    generate: Annotated[
        bool, typer.Option("--generate", help="Show what a token costs that the run's model generates, too.")
    ] = False,
    nproc: Annotated[
        str | None,
        typer.Option(
            "--nproc",
            metavar="N|all",
            help="Take the run's steps in N processes of this host, ranks, and show what they send each other; all: one"
            " for each GPU, or for each CPU core.",
        ),
    ] = None,
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
        return
    assert op is not None
    asked = Request(op, shape, axis, dtype, device, backward, cold, vs, torch_python, stage, kernel, arch)
    if stage is None:
        measure_op(asked, json)
    else:
        show_code(asked, json)


# --- An op ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The words of a command line about one op, as they were given."""

    op: str
    shape: str | None
    axis: str | None
    dtype: str | None
    device: str
    backward: bool
    cold: bool
    vs: str | None
    torch_python: str | None
    stage: str | None
    kernel: str | None
    arch: str | None

    @property
    def command(self) -> str:
        """The command without where the report went."""
        given = {"--op": self.op, "--shape": self.shape, "--axis": self.axis, "--dtype": self.dtype}
        given |= {"--device": self.device, "--vs": self.vs}
        words = [f"{name} {value}" for name, value in given.items() if value is not None]
        words += [name for name, is_set in (("--backward", self.backward), ("--cold", self.cold)) if is_set]
        return escape(" ".join(["genesis profile", *words]))

    @property
    def shapes(self) -> list[Shape]:
        """The one that was given."""
        return [] if self.shape is None else [_shape(self.shape)]

    @property
    def axes(self) -> list[Axes]:
        """Those that were given, as one choice."""
        return [] if self.axis is None else [_axes(self.axis)]


def measure_op(asked: Request, json: str | None) -> None:
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
        found = list(profile_op(asked.op, where, kind, asked.shapes, asked.axes, settings))
    failures = [each for each in found if isinstance(each, Failure)]
    rows = [each for each in found if not isinstance(each, Failure)]
    machine = facts()
    report = Report(
        kind="profile-op",
        command=asked.command,
        device=str(where),
        device_name=device_name(where, machine),
        machine=machine,
        tables=tables_of(rows),
        failures=failures,
    )
    show(report, to_text(report) if rows else (), json)
    raise_first(failures, len(rows))


def show_code(asked: Request, json: str | None) -> None:
    """Print the code of the op's kernels, and measure nothing."""
    from genesis.measure.code import code_of, render_lines, target_named
    from genesis_cli.session.preparation import resolve_device

    assert asked.stage is not None
    for option, is_set in (("--json", json is not None), ("--cold", asked.cold), ("--vs", asked.vs is not None)):
        if is_set:
            what = f"{option} is for measuring, and --show prints code alone"
            raise UsageError(what, where=option, next=f"leave {option} or --show out")
    target = target_named(asked.arch, resolve_device(asked.device))
    kind, shapes, axes = dtype_of(asked.dtype), asked.shapes, asked.axes
    found = list(code_of(asked.op, asked.stage, target, kind, shapes, axes, asked.backward, asked.kernel))
    if not found:
        print(f"{asked.op} launches no kernel: it sets or copies memory, or only describes it anew")
    for code in found:
        print("\n".join(render_lines(code)))


def _shape(text: str) -> Shape:
    """`4,512,896` as sizes."""
    sizes = integers(text)
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{quote(text)} is not a shape", where="--shape", next="write sizes of 1 and more: 4,512,896")
    return sizes


def _axes(text: str) -> Axes:
    """One dimension, several, or None for all."""
    if text == "all":
        return None
    axes = integers(text)
    if not axes:
        raise UsageError(f"{quote(text)} is not an axis", where="--axis", next="write -1, or several as in 0,1, or all")
    return axes if len(axes) > 1 else axes[0]
