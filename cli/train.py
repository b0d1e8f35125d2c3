"""`genesis train`: trains as a configuration says."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from genesis_cli.options import ConfigName, Overrides

__all__ = ["train"]


def train(
    config: ConfigName,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in train.output_dir.")
    ] = False,
    resume_from: Annotated[
        str | None,
        typer.Option("--resume-from", metavar="NAME", help="Go on from this older checkpoint, as checkpoint-100."),
    ] = None,
) -> None:
    """Train a model as CONFIG says.

    For instance: genesis train quickstart train.steps=1000 optim.lr=1e-3
    """
    from genesis.train.output import Output
    from genesis_cli import recipes

    loaded = recipes.load(config, overrides or [])
    from genesis_models import session

    session.train(loaded, resume=resume, resume_from=resume_from, console=Output(sys.stdout))
