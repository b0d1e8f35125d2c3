"""`genesis export`: writes a trained model or adapter for other programs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from genesis.errors import ModelError
from genesis.files.boundary import fitting
from genesis_cli.options import Base, Folder, weight_dtype


def export(
    folder: Folder,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base model.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="fp32, bf16 or fp16, for whole models.  [default: each weight's own]"
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FOLDER", help="New or empty folder, or an earlier export.  [default: next to FOLDER]"
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load the export, and compare it with the trained model.")
    ] = False,
    base: Base = None,
) -> None:
    """Write a model or adapter for transformers, PEFT or vLLM.

    If FOLDER is a run without a final model, its newest checkpoint is exported.
    """
    kind = None if dtype is None else weight_dtype(dtype)
    from genesis.train.output import Output
    from genesis_cli import session

    output = Output(sys.stdout)
    with fitting(ModelError, "exporting the model", folder):
        session.export(
            folder, merge=merge, dtype=None if kind == "auto" else kind, out=out, check=check, base=base, console=output
        )
    output.check()
