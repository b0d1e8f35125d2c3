"""`genesis generate`: continues a prompt with a trained model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from genesis.errors import ModelError
from genesis.io.boundary import fitting
from genesis_cli.options import Base, Device, Dtype, Folder, settings, weight_dtype

__all__ = ["generate"]


def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Longest continuation, in tokens.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="Sample among the K likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", metavar="P", help="Sample among the likeliest tokens of probability P.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same text.")] = None,
    base: Base = None,
    device: Device = None,
    dtype: Dtype = None,
    special: Annotated[
        bool, typer.Option("--special", help="Read special tokens written out in the prompt, such as <|im_end|>.")
    ] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is complete.")] = False,
) -> None:
    """Continue a prompt with the model in FOLDER.

    What is left out has the default that `genesis schema` shows for the eval section.
    """
    from genesis.train.config import EvalConfig, TrainConfig
    from genesis.train.output import Output, printable

    sampling = settings(
        EvalConfig,
        sample_tokens=("--max-tokens", max_tokens),
        temperature=("--temperature", temperature),
        top_k=("--top-k", top_k),
        top_p=("--top-p", top_p),
    )
    run = settings(TrainConfig, seed=("--seed", seed), device=("--device", device))
    kind = weight_dtype(dtype)
    from genesis_cli import session

    output = Output(sys.stdout)
    sampling = {"max_tokens": sampling.pop("sample_tokens"), **sampling}
    with fitting(ModelError, "running the model", folder):
        pieces = session.generate(folder, prompt, **sampling, **run, dtype=kind, base=base, parse_special=special)
        for piece in ["".join(pieces)] if no_stream else pieces:
            output.write(printable(piece))
            output.flush()
            if output.lost:
                break
    output.line()
    output.check()
