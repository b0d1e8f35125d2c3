"""`genesis train`: runs a training configuration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from genesis.errors import ModelError, UsageError
from genesis.files.boundary import fitting
from genesis_cli.nproc import launched, ranks_of_run
from genesis_cli.options import ConfigName, Overrides

if TYPE_CHECKING:
    from genesis_cli.session.run_folder import Resume

RESUME, MUST, ALLOW = "--resume", "must", "allow"


class TrainCommand(TyperCommand):
    """Lets --resume have an optional value after `=`; it never takes the next word as its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare --resume its value."""
        end = args.index("--") if "--" in args else len(args)
        words = [f"{RESUME}={MUST}" if word == RESUME else word for word in args[:end]]
        return super().parse_args(ctx, words + args[end:])


def train(
    config: ConfigName,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar=f"[={ALLOW}]",
            help="Continue from the last checkpoint in train.output_dir, which must have a run; "
            f"{RESUME}={ALLOW} starts one otherwise.",
        ),
    ] = None,
    resume_from: Annotated[
        str | None,
        typer.Option("--resume-from", metavar="NAME", help="Continue from this checkpoint: checkpoint-100, or best."),
    ] = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            "--nproc",
            metavar="N|all",
            help="Train in N processes (ranks) on this host, which share the batches of a step; all: one for each GPU "
            "or CPU core. With train.threads=1 the result has the same bits as in one process.",
        ),
    ] = None,
) -> None:
    """Train the model that CONFIG describes.

    Example: genesis train quickstart train.steps=1000 optim.lr=1e-3
    """
    if resume not in (None, MUST, ALLOW):
        raise UsageError(
            f"{RESUME}={resume} is unknown", where="command line", next=f"write {RESUME} or {RESUME}={ALLOW}"
        )
    from genesis.train.output import Output
    from genesis_cli import recipes

    resumes = resume is not None or resume_from is not None
    loaded, kept = recipes.load_run(config, overrides or [], resumes=resumes)
    if nproc is not None and (count := ranks_of_run(nproc, loaded)) > 1:
        words = [] if resume is None else [f"{RESUME}={resume}"]
        words += [] if resume_from is None else [f"--resume-from={resume_from}"]
        raise typer.Exit(launched("train", [*words, "--", config, *(overrides or [])], count))
    from genesis_cli import session

    mode: Resume = "allow" if resume == ALLOW else resume is not None
    with fitting(ModelError, "running the model"):
        session.train(loaded, resume=mode, resume_from=resume_from, console=Output(sys.stdout), overrides=kept)
