"""`genesis report` and `genesis watch`: a page about runs, as a file or served while a run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from genesis.errors import UsageError, escape

NAME = "report.html"


def report(
    folders: Annotated[list[str], typer.Argument(metavar="RUN…", help="output_dir of a run; several are overlaid.")],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="Page.  [default: report.html in the first run]"),
    ] = None,
) -> None:
    """Write an HTML page about one or several runs.

    It shows curves, evaluations, samples, speed, memory and settings in one file without scripts.
    """
    from genesis.files.atomic import write_file
    from genesis.train.report.page import MOST_RUNS, page_of
    from genesis.train.report.runs import read_run

    if len(folders) > MOST_RUNS:
        what = f"{len(folders)} runs do not fit on one page"
        raise UsageError(what, where="command line", next=f"name at most {MOST_RUNS}")
    page = page_of([read_run(folder) for folder in folders])
    path = Path(folders[0], NAME) if out is None else Path(out)
    write_file(path, page.encode())
    print(escape(path))


def watch(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="output_dir of a run.")],
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0 picks a free one.  [default: 8377]"),
    ] = None,
) -> None:
    """Serve the live page of a run on this machine.

    It listens on loopback only. Ctrl-C and SIGTERM end it; pending answers have 2 s to finish.
    """
    from genesis.train.signals import Interrupts

    with Interrupts(saves=False):
        from genesis.train.report.watch import PORT, Watcher

        with Watcher(Path(folder), PORT if port is None else port) as watcher:
            print(watcher.url, flush=True)
            watcher.serve_forever()
