"""`genesis generate`: continues prompts or answers messages with a trained model."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from genesis.errors import ModelError, UsageError, escape
from genesis.files.boundary import fitting
from genesis_cli import options

LONGEST_PROMPT = 16 << 20  # bytes of stdin


Prompt = Annotated[
    str | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue; - reads it from stdin.")
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts", metavar="FILE", help='JSONL with "prompt" or "messages" in each line; prints JSONL in that order.'
    ),
]
Out = Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the results of --prompts here.")]
Chat = Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message in the chat template.")]
Special = Annotated[
    bool,
    typer.Option(
        "--special", help="Show special tokens such as <|im_end|>, and parse those that are written in a prompt."
    ),
]
NoStream = Annotated[bool, typer.Option("--no-stream", help="Print the text only when it is complete.")]


def generate(
    folder: options.Folder,
    prompt: Prompt = None,
    prompts: Prompts = None,
    out: Out = None,
    chat: Chat = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    stop: options.Stop = None,
    seed: options.Seed = None,
    base: options.Base = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kv_cache: options.KvCache = "auto",
    exact: options.Exact = False,
    special: Special = False,
    no_stream: NoStream = False,
) -> None:
    """Continue prompts or answer messages with a trained model.

    Sampling settings come from the options, then from the model's generation_config.json, then from the defaults that
    `genesis schema` shows in the eval section.
    """
    from genesis.train.config import EvalConfig, TrainConfig
    from genesis.train.output import Output

    # Check all options before the slow imports.
    lines: list[str] = []  # about the whole command
    length = options.settings(EvalConfig, sample_tokens=("--max-tokens", max_tokens))["sample_tokens"]
    drawing = options.given_drawing(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    run = options.settings(TrainConfig, seed=("--seed", seed), device=("--device", device))
    kind, cache = options.weight_dtype(dtype, quantized=True), options.kv_cache_type(kv_cache)
    from genesis_cli import session

    if (prompt is None) == (prompts is None):
        raise UsageError("give either --prompt or --prompts", where="command line", next="use --prompt - to read stdin")
    if out is not None and prompts is None:
        raise UsageError("--out needs --prompts", where="--out", next="redirect stdout instead")
    if out is not None and os.path.exists(out) and not os.path.isfile(out):
        raise UsageError(f"{escape(out)} is not a file", where="--out", next="name a file")
    with fitting(ModelError, "running the model", folder):
        pieces = session.generate(
            folder,
            _from_stdin() if prompt == "-" else prompt,
            **run,
            max_tokens=length,
            **drawing,
            dtype=kind,
            kv_cache=cache,
            exact=exact,
            base=base,
            special=special,
            prompts=prompts,
            chat=chat,
            system=system,
            stop=stop or [],
            tell=lines.append,
        )
        if out is not None:
            _write(pieces, out)
        else:
            _print(pieces, is_text=prompts is None, streams=not no_stream)
        for line in lines:  # on a terminal, after the last line of the text
            Output(sys.stderr).line(line)


def _print(pieces: Iterator[str], *, is_text: bool, streams: bool) -> None:
    """Print text or lines of JSON to stdout. Raises: DiskError: writing failed."""
    from genesis.train.output import Output

    output = Output(sys.stdout)
    parts = pieces if streams else iter(["".join(pieces)])
    if is_text:
        output.flow(parts)
        output.line()
    else:
        for line in itertools.takewhile(lambda _: not output.lost, parts):
            output.write(line)
            output.flush()
    output.check()


def _write(lines: Iterator[str], out: str) -> None:
    """Write each line as it arrives, so that an interrupted command leaves its results. Raises: DiskError."""
    from genesis.files.filesystem import DEFAULT, Writer

    with Writer(DEFAULT, Path(out), os.O_CREAT | os.O_TRUNC) as writer:
        for line in lines:
            writer.write(line.encode())


def _from_stdin() -> str:
    data = sys.stdin.buffer.read(LONGEST_PROMPT + 1)
    if len(data) > LONGEST_PROMPT:
        raise UsageError(f"stdin has more than {LONGEST_PROMPT:,} bytes", next="shorten it")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        what = f"stdin is not UTF-8: byte {error.start:,} is invalid"
        raise UsageError(what, where="--prompt -", next="send UTF-8 text") from error
