"""`genesis pull`: fetches a model or data set of the Hugging Face hub, the one command that uses the network."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def pull(
    name: Annotated[
        str, typer.Argument(metavar="ORG/NAME[@REV]", help="Name on the hub, with a branch, tag or commit.")
    ],
    data: Annotated[
        bool, typer.Option("--data", help="It is a data set: data.train: hf:ORG/NAME then reads it.")
    ] = False,
) -> None:
    """Fetch a model or a data set of the Hugging Face hub.

    It goes into this machine's cache: safetensors weights, config, tokenizer and chat template, never pickles; of a
    data set Parquet, JSONL, JSON, CSV and text. Sizes and hashes are compared with the hub's, and what was cut off goes
    on. Every command then takes the name for a folder, and asks no network. For what needs a token: `hf auth login`, or
    HF_TOKEN. For instance: genesis pull Qwen/Qwen3-0.6B
    """
    from genesis.train.output import Output
    from genesis_cli.session.pull import pull as run

    run(name, Output(sys.stdout), is_data=data)
