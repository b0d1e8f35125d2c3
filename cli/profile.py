"""`genesis profile`: what an op or a training run costs here, and what its time is spent on; or an op's code."""

from __future__ import annotations

from typing import Annotated

import typer

from genesis_cli.options import JsonFile, MeasuredDevice, OpDtype, Overrides, TorchPython, VsTorch
from genesis_cli.profile_op import Request, measure_op, show_code
from genesis_cli.profile_run import STEPS, is_run, profile_run


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
