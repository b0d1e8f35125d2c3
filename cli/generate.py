"""`genesis generate`: continues a prompt with a trained model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from genesis.errors import ModelError, UsageError
from genesis.io.boundary import fitting
from genesis_cli.options import Base, Device, Dtype, Folder, settings, weight_dtype

__all__ = ["generate"]

LONGEST_PROMPT = 16 << 20  # bytes of stdin


def generate(
    folder: Folder,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help='JSONL with a "prompt" a line; prints JSONL in the same order.'),
    ] = None,
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
    min_p: Annotated[
        float, typer.Option("--min-p", metavar="P", help="Only tokens P times as likely as the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", metavar="R", help="Makes tokens that were there less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the text before TEXT; may be repeated.")
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

    if (prompt is None) == (prompts is None):
        raise UsageError("give either --prompt or --prompts", where="command line", next="--prompt - reads stdin")
    output = Output(sys.stdout)
    sampling = {"max_tokens": sampling.pop("sample_tokens"), **sampling}
    with fitting(ModelError, "running the model", folder):
        text = _from_stdin() if prompt == "-" else prompt
        more = {"prompts": prompts, "stop": stop or [], "min_p": min_p, "repetition_penalty": repetition_penalty}
        how = {**sampling, **run, "dtype": kind, "base": base, "parse_special": special, **more}
        pieces = session.generate(folder, text, **how)
        for piece in ["".join(pieces)] if no_stream else pieces:
            output.write(piece if prompts is not None else printable(piece))
            output.flush()
            if output.lost:
                break
    if prompts is None:
        output.line()
    output.check()


def _from_stdin() -> str:
    """All of stdin, without the line end behind it."""
    data = sys.stdin.buffer.read(LONGEST_PROMPT + 1)
    if len(data) > LONGEST_PROMPT:
        raise UsageError(f"stdin has more than {LONGEST_PROMPT:,} bytes", next="shorten it")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        what = f"stdin is not UTF-8: byte {error.start:,} is invalid"
        raise UsageError(what, where="--prompt -", next="give it text") from error
