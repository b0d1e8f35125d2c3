"""`genesis eval`: loss, perplexity and bits per byte of a trained model on data."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from genesis.errors import ModelError
from genesis.io.boundary import fitting
from genesis_cli.options import Base, Device, Dtype, Folder, settings, weight_dtype

__all__ = ["evaluate"]


def evaluate(
    folder: Folder,
    data: Annotated[
        list[str], typer.Option("--data", metavar="SOURCE", help='File, folder, glob or "stdlib:"; may be repeated.')
    ],
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", metavar="N", help="Tokens in a sequence.  [default: what the model takes, 1024 at most]"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Sequences in one forward pass.")
    ] = None,
    base: Base = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the model in FOLDER on data.

    Prints loss (nats per token), perplexity and bits per byte.
    """
    from genesis.train.config import DataConfig, TrainConfig

    run = settings(TrainConfig, batch_size=("--batch-size", batch_size), device=("--device", device))
    kind = weight_dtype(dtype, quantized=True)
    if seq_len is not None:
        settings(DataConfig, seq_len=("--seq-len", seq_len))
    from genesis_cli import session

    with fitting(ModelError, "running the model", folder):
        found = session.evaluate(folder, data, seq_len=seq_len, **run, dtype=kind, base=base)
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found), default=0)
    for name, value in found.items():
        print(f"{name:<{width}}  {value:.6g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
