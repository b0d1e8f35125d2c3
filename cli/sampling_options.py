"""Options of the commands that generate: how tokens are drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from genesis.errors import UsageError, escape
from genesis_cli.options import settings

System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message before the chat's.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Sample among the K likeliest tokens.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="Sample among the likeliest tokens of probability P.")
]
MinP = Annotated[float | None, typer.Option("--min-p", metavar="P", help="Only tokens P times as likely as the first.")]
Penalty = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="R", help="Makes tokens that were there less likely.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same text.")]
KvCache = Annotated[
    str, typer.Option("--kv-cache", metavar="TYPE", help="Of keys and values: auto, that of the weights; fp8 on a GPU.")
]


def given_drawing(**options: float | None) -> dict[str, Any]:
    """The settings of how tokens are drawn that were given, by their names, checked. Raises: UsageError."""
    from genesis.train.bounds import BOUNDS
    from genesis.train.config import EvalConfig

    words = {name: (f"--{name.replace('_', '-')}", value) for name, value in options.items() if value is not None}
    found = settings(EvalConfig, **{name: each for name, each in words.items() if name in EvalConfig.model_fields})
    for name in words.keys() - found.keys():  # the schema has no such setting
        word, value = words[name]
        found[name] = BOUNDS[name].checked(value, word, where="command line")
    return found


def kv_cache_type(name: str) -> Literal["auto", "fp8"]:
    """The type that `--kv-cache` names. Raises: UsageError."""
    if name == "auto":
        return "auto"
    if name != "fp8":
        raise UsageError(f"--kv-cache is {escape(name)!r}", where="command line", next="use auto or fp8")
    return "fp8"
