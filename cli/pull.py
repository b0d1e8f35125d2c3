"""`genesis pull`: downloads a model or data set from the Hugging Face hub; only this command uses the network."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from genesis.errors import UsageError, escape


def pull(
    name: Annotated[
        str, typer.Argument(metavar="ORG/NAME[@REV]", help="Name on the hub, with a branch, tag or commit.")
    ],
    data: Annotated[
        bool, typer.Option("--data", help="NAME is a data set; data.train: hf:ORG/NAME then reads it.")
    ] = False,
) -> None:
    """Download a model or a data set from the Hugging Face hub.

    The files are stored in this machine's cache: safetensors weights, config, tokenizer and chat template, never
    pickles; for a data set Parquet, JSONL, JSON, CSV and text. Sizes and hashes are compared with the hub's, and an
    interrupted download continues. All commands then accept the name instead of a folder and use no network. If a
    repository needs a token, run `hf auth login` or set HF_TOKEN.

    Example: genesis pull Qwen/Qwen3-0.6B
    """
    from genesis.data.sources import is_data_file
    from genesis.files.hub import hub_name
    from genesis.files.hub import pull as fetch
    from genesis.measure.record import format_bytes
    from genesis.train.output import Output
    from genesis.train.progress import draws, tokenizing
    from genesis_models.config import ModelConfig

    console = Output(sys.stdout)
    repo = hub_name(name, is_data=data)
    if repo is None:
        next = "write ORG/NAME or ORG/NAME@REVISION, such as Qwen/Qwen3-0.6B; a path is not accepted"
        noun = "data set" if data else "model"
        raise UsageError(f"{escape(name)} is not the name of a {noun} on the hub", where="command line", next=next)

    def note(line: str) -> None:
        if draws(console):
            console.write("\n")  # keeps the progress bar on the line above
        console.line(line)

    # Download, with a progress bar.
    with tokenizing(str(repo), console) as progress:
        found = fetch(
            repo,
            check=lambda config: ModelConfig.from_dict(config, where=f"{repo}/config.json"),
            is_data=is_data_file,
            progress=progress,
            note=note,
        )
    # Report what was downloaded, and how to use it.
    size = sum(file.size for file in found.files)
    came = "all files were present" if not found.fetched else f"{format_bytes(found.fetched)} downloaded"
    console.line(f"{repo}: {len(found.files)} files, {format_bytes(size)}, hashes compared; {came}")
    pickles = [each for each in found.left_out if each.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        console.line(f"skipped: {len(pickles)} of pickled weights, such as {escape(pickles[0])}")
    console.line(f"commit: {found.commit}")
    console.line(f"folder: {found.folder}")
    if data:
        console.line(f"use it by its name: genesis init --data hf:{repo}, or data.train: hf:{repo}")
    else:
        console.line(f"use it by its name: genesis init --model {repo}, or model.path: {repo}")
