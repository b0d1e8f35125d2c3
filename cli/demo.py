"""`genesis demo`: what an idea about speed or memory is worth on this machine."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from genesis.errors import UsageError, nearest
from genesis_cli.measured import device_name, show
from genesis_cli.options import JsonFile, MeasuredDevice


def demo(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="fusion, batched, memory or access; without it they are listed."),
    ] = None,
    device: MeasuredDevice = "auto",
    fast: Annotated[bool, typer.Option("--fast", help="On little data, in about two seconds.")] = False,
    json: JsonFile = None,
) -> None:
    """Show what an idea about speed or memory is worth here.

    Runs the same work in several ways, and prints what each launches, reads and writes, how long it takes, and what
    follows. The code of a demo is short: genesis/demos/NAME.py.
    """
    from genesis.demos import DEMOS

    if name is None:
        width = max(map(len, DEMOS))
        print("\n".join(f"{each.ljust(width)}  {shown}" for each, shown in DEMOS.items()))
        return
    if name not in DEMOS:
        near = nearest(name, DEMOS)
        next = f"did you mean {near}?" if near else f"demos: {', '.join(DEMOS)}"
        raise UsageError(f"there is no demo {name}", where="NAME", next=next)
    _show(name, device, fast, json)


def _show(name: str, device: str, fast: bool, json: str | None) -> None:
    from genesis.demos import sections_of
    from genesis.demos.comparing import FAST, Setting
    from genesis.demos.report import render_lines
    from genesis.demos.schema import DemoReport
    from genesis.measure.limits import copy_rate
    from genesis_cli.environment import facts
    from genesis_cli.session.preparation import resolve_device

    where, machine = resolve_device(device), facts()
    setting = Setting(where, True, FAST) if fast else Setting(where)
    report = DemoReport(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=" ".join(["genesis demo", name, f"--device {device}", *(["--fast"] if fast else [])]),
        demo=name,
        device=str(where),
        device_name=device_name(where, machine),
        machine=machine,
        copy_bytes_per_second=copy_rate(where),
        sections=list(sections_of(name, setting)),
    )
    show(report, render_lines(report), json)
