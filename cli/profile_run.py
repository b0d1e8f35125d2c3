"""`genesis profile CONFIG`: the steps of a training run, and where their time and memory go."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from genesis.errors import ModelError, UsageError, escape
from genesis.files.boundary import fitting
from genesis_cli.measured import device_name, show
from genesis_cli.nproc import is_main, launched, ranks_of_run

if TYPE_CHECKING:
    from genesis.measure.record import Cell, Report
    from genesis.train.config import Config
    from genesis_cli.session.profiling import Profile

STEPS = 5  # profiled unless said otherwise
MOST_STEPS = 1000
OF_RUNS = ("config", "overrides", "steps", "out", "nvtx", "generate", "nproc")


def is_run(context: typer.Context) -> bool:
    """Whether the command line profiles a training run, not an op.

    Raises:
        UsageError: it names neither or both, or has an option of the other one.
    """
    given = [
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    run, op = "config" in given, "op" in given
    if run == op:
        what = "a training run and --op exclude each other" if run else "Missing option '--op', or a CONFIG"
        advice = "name one of them: genesis profile CONFIG, or genesis profile --op NAME; see genesis profile --help"
        raise UsageError(what, where="command line", next=advice)
    for name in given:
        if name != "json" and (name in OF_RUNS) != run:
            option = {"stage": "--show"}.get(name, f"--{name.replace('_', '-')}")
            kind, other = ("ops", "a run") if run else ("runs", "an op")
            hint = "; set train.device=cpu or train.device=cuda" if name == "device" else ""
            advice = f"leave it out of the profile of {other}{hint}"
            raise UsageError(f"{option} is for {kind}", where=option, next=advice)
    return run


def profile_run(
    config: str,
    overrides: Sequence[str],
    steps: int | None,
    out: str | None,
    nvtx: bool,
    generate: bool,
    nproc: str | None,
    json: str | None,
) -> None:
    """Profile the first steps of a run, print the report, and write the files into the folder `out`.

    Raises:
        GenesisError: as `genesis train` does.
    """
    from genesis.measure.record import to_text
    from genesis.measure.recorder import Nvtx
    from genesis.train.output import Output
    from genesis_cli import recipes

    count = STEPS if steps is None else steps
    if not 1 <= count <= MOST_STEPS:
        raise UsageError(f"{count} steps cannot be profiled", where="--steps", next=f"take 1 to {MOST_STEPS}")
    loaded = recipes.load(config, overrides)
    ranks = 1 if nproc is None else ranks_of_run(nproc, loaded)
    ranges = Nvtx() if nvtx else None
    folder = _folder(out) if out is not None and is_main() else None
    options = ["--steps", str(count), *(["--nvtx"] if nvtx else []), *(["--generate"] if generate else [])]
    if ranks > 1:
        files = [f"{option}={file}" for option, file in (("--out", out), ("--json", json)) if file is not None]
        raise typer.Exit(launched("profile", [*options, *files, "--", config, *overrides], ranks))
    from genesis_cli.session.profiling import profile

    with fitting(ModelError, "running the model"):
        found = profile(loaded, steps=count, console=Output(sys.stderr), ranges=ranges, generates=generate)
    if found is not None:  # rank 0
        options += ["--nproc", str(found.ranks)] if found.ranks > 1 else []
        report = _report(" ".join(["genesis profile", config, *overrides, *options]), loaded, found)
        written = [] if folder is None else list(_write(folder, report, found))
        show(report, [*to_text(report), *written], json)


def _folder(out: str) -> Path:
    """The folder for the files, created before anything is measured."""
    from genesis.files.filesystem import disk_error

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{escape(out)} is not a folder", where="--out", next="name another folder") from None
    except OSError as error:
        raise disk_error(error, "make", folder) from error
    return folder


def _report(command: str, config: Config, found: Profile) -> Report:
    from genesis.backend import CPU
    from genesis.measure.collectives import collective_table
    from genesis.measure.record import Report
    from genesis.measure.run import memory_tables, step_tables
    from genesis_cli.environment import facts
    from genesis_cli.session.bench.steps import generation_table

    machine = facts()
    tables = list(step_tables(found.recorded, found.device != CPU))
    if found.collectives is not None:
        tables.append(collective_table(found.collectives, found.ranks, median(found.recorded[0].plain)))
    tables += memory_tables(found.memory)
    if found.generation is not None:
        tables.append(generation_table([found.generation], "generation"))
    settings: dict[str, Cell] = {
        "model": found.model.config.model_type,
        "parameters": sum(p.numel() for p in found.model.parameters()),
        "dtype": found.model.head_weight.dtype.name,
        "rows": config.train.batch_size,
        "tokens": config.data.seq_len,
        "micro-batches": config.train.accumulation_steps,
        "ranks": found.ranks if found.ranks > 1 else None,
        "threads": found.threads,
    }
    notes = ["The tables of steps and memory are rank 0's."] if found.ranks > 1 else []
    name = device_name(found.device, machine)
    return Report("profile-run", command, str(found.device), name, machine, settings, tables, notes=notes)


def _write(folder: Path, report: Report, found: Profile) -> Iterator[str]:
    """Write all files, and return a line for each."""
    from genesis.backend import CPU
    from genesis.files.atomic import write_file
    from genesis.measure.svg import flame_graph
    from genesis.measure.trace import chrome_trace, collapsed, stacks

    main = found.recorded[0]
    parts = stacks(main.steps, found.device != CPU)
    steps = {f"{r.mode} step {i}": step for r in found.recorded for i, step in enumerate(r.steps, 1)}
    steps["step with its memory"] = found.memory_step
    trace = chrome_trace([*steps.values()], [(name, step.start, step.end) for name, step in steps.items()])
    title = f"Time of one {main.mode} step of {found.model.config.model_type} on {report.device_name}"
    yield ""
    for name, content, meaning in (
        ("trace.json", trace, "every op and kernel, and memory, for ui.perfetto.dev"),
        ("stacks.txt", collapsed(parts), f"collapsed stacks of the {main.mode} step, in microseconds"),
        ("flamegraph.svg", flame_graph(parts, title), "the same, drawn"),
        ("report.json", report.to_json(), "all figures"),
    ):
        write_file(folder / name, content)
        yield f"wrote   {escape(folder / name)}: {meaning}"
