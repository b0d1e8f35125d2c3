"""`genesis estimate`: the memory and time that a run will take, without a GPU and without training."""

from __future__ import annotations

from typing import Annotated

import typer

from genesis.errors import ModelError
from genesis.files.boundary import fitting
from genesis_cli.measured import show
from genesis_cli.options import ConfigName, JsonFile, Overrides

GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory",
        metavar="GIB",
        min=0.5,
        max=4096,
        help="Memory of the target GPU, which need not be in this machine.  [default: this machine's GPU]",
    ),
]


def estimate(
    config: ConfigName,
    overrides: Overrides = None,
    gpu_memory: GpuMemory = None,
    nproc: Annotated[
        int,
        typer.Option("--nproc", metavar="N", min=1, max=1 << 16, help="Ranks of the run, each with its own GPU."),
    ] = 1,
    json: JsonFile = None,
) -> None:
    """Estimate the memory and time of a run of CONFIG.

    Prints memory by purpose, the largest batch that fits, and the time of a step. Steps of the whole model are counted
    on a simulated GPU; nothing is trained, and no GPU is needed. A time is given only if it was measured, by an earlier
    run of CONFIG or in a benchmark report.

    Example: genesis estimate chats.yaml --gpu-memory 24
    """
    from genesis_cli import recipes
    from genesis_cli.session.estimate import estimate as estimate_run
    from genesis_cli.session.estimate import estimate_lines, place_of

    loaded = recipes.load(config, overrides or [])
    with fitting(ModelError, "estimating the model"):
        found = estimate_run(loaded, config, place_of(loaded.train.device, gpu_memory), nproc)
    show(found, estimate_lines(found), json)
