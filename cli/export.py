"""`genesis export`: a trained model or adapter as a folder for other programs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from genesis.errors import ModelError
from genesis.files.boundary import fitting
from genesis_cli.options import Base, Folder, weight_dtype


def export(
    folder: Folder,
    merge: Annotated[bool, typer.Option("--merge", help="Write an adapter merged into its base model.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="fp32, bf16 or fp16, of whole models.  [default: that of each weight]"
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where to; new, empty, or an earlier export.  [default: beside FOLDER]"
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load what was written, and compare it with what was trained.")
    ] = False,
    base: Base = None,
) -> None:
    """Write the model or adapter in FOLDER for transformers, PEFT, vLLM and others.

    Of a run without a final model its newest checkpoint is taken.
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
