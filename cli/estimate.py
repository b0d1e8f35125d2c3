"""`genesis estimate`: what a run will take of memory and time, without a GPU and without training."""

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
        help="Memory of the GPU that it is for, which need not be here.  [default: that of the GPU here]",
    ),
]


def estimate(
    config: ConfigName,
    overrides: Overrides = None,
    gpu_memory: GpuMemory = None,
    nproc: Annotated[
        int,
        typer.Option("--nproc", metavar="N", min=1, max=1 << 16, help="Ranks that share the run, each with a GPU."),
    ] = 1,
    json: JsonFile = None,
) -> None:
    """Estimate what a run of CONFIG takes.

    Memory by what it is for, the largest batch that fits, time a step. Steps of the whole model are counted on a
    simulated GPU; nothing is trained, and no GPU is needed. A time is given where one was measured: by an earlier run
    of CONFIG, or in the reports of benchmarks.
    For instance: genesis estimate chats.yaml --gpu-memory 24
    """
    from genesis_cli import recipes
    from genesis_cli.session.estimate import estimate as found_for
    from genesis_cli.session.estimate import estimate_lines, place_of

    loaded = recipes.load(config, overrides or [])
    with fitting(ModelError, "estimating the model"):
        found = found_for(loaded, config, place_of(loaded.train.device, gpu_memory), nproc)
    show(found, estimate_lines(found), json)
