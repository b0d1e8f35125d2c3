"""`genesis pull`: fetches a model of the Hugging Face hub, the one command that uses the network."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

__all__ = ["pull"]


def pull(
    model: Annotated[
        str, typer.Argument(metavar="ORG/NAME[@REV]", help="Name on the hub, with a branch, tag or commit.")
    ],
) -> None:
    """Fetch a model of the Hugging Face hub.

    It goes into this machine's cache: safetensors weights, config, tokenizer and chat template, never pickles. Sizes
    and hashes are compared with the hub's, and what was cut off goes on. Every command then takes the name for a
    folder, and asks no network. For models that need a token: `hf auth login`, or HF_TOKEN.
    For instance: genesis pull Qwen/Qwen3-0.6B
    """
    from genesis.train.output import Output
    from genesis_cli.session.pull import pull as run

    run(model, Output(sys.stdout))
