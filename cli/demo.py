"""`genesis demo`: measures what an idea about speed or memory gains on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from genesis.errors import UsageError, nearest
from genesis_cli.measured import command_of, new_report, show
from genesis_cli.options import JsonFile, MeasuredDevice


def demo(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="fusion, batched, memory or access; without it they are listed."),
    ] = None,
    device: MeasuredDevice = "auto",
    fast: Annotated[bool, typer.Option("--fast", help="On little data, in about two seconds.")] = False,
    json: JsonFile = None,
) -> None:
    """Measure what an idea about speed or memory gains here.

    Runs the same work in several ways, and prints the bytes that each reads and writes, its time, and how they compare.
    The code of all demos is short: genesis/measure/demos.py.
    """
    from genesis.measure.demos import DEMOS, Setting
    from genesis.measure.limits import copy_rate
    from genesis.measure.record import format_rate, to_text
    from genesis_cli.session.preparation import resolve_device

    if name is None:
        width = max(map(len, DEMOS))
        print("\n".join(f"{each.ljust(width)}  {run.__doc__}" for each, run in DEMOS.items()))
        return
    if name not in DEMOS:
        near = nearest(name, DEMOS)
        next = f"did you mean {near}?" if near else f"demos: {', '.join(DEMOS)}"
        raise UsageError(f"unknown demo {name}", where="NAME", next=next)
    where = resolve_device(device)
    report = new_report("demo", command_of(context, "demo"), where)
    report.tables = list(DEMOS[name](Setting(where, fast)))
    report.settings = {"copy": format_rate(copy_rate(where), "B/s")}
    show(report, to_text(report), json)
