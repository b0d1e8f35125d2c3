"""Options of the commands that generate: how tokens are drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from genesis.errors import UsageError, escape

__all__ = [
    "KvCache",
    "MinP",
    "Penalty",
    "Seed",
    "System",
    "Temperature",
    "TopK",
    "TopP",
    "kv_cache_type",
    "within_bounds",
]

System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message before the chat's.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Sample among the K likeliest tokens.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="Sample among the likeliest tokens of probability P.")
]
MinP = Annotated[float, typer.Option("--min-p", metavar="P", help="Only tokens P times as likely as the likeliest.")]
Penalty = Annotated[
    float, typer.Option("--repetition-penalty", metavar="R", help="Makes tokens that were there less likely.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same text.")]
KvCache = Annotated[
    str, typer.Option("--kv-cache", metavar="TYPE", help="Of keys and values: auto, that of the weights; fp8 on a GPU.")
]


def within_bounds(**options: float) -> dict[str, Any]:
    """Settings whose defaults the schema does not have, by their names, checked. Raises: UsageError."""
    from genesis.train.bounds import BOUNDS

    return {
        name: BOUNDS[name].checked(value, f"--{name.replace('_', '-')}", where="command line")
        for name, value in options.items()
    }


def kv_cache_type(name: str) -> Literal["auto", "fp8"]:
    """The type that `--kv-cache` names. Raises: UsageError."""
    if name == "auto":
        return "auto"
    if name != "fp8":
        raise UsageError(f"--kv-cache is {escape(name)!r}", where="command line", next="use auto or fp8")
    return "fp8"
