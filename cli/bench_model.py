"""`genesis bench-model`: how long a training step of a model takes here, by phase, and its memory; or generation."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis.errors import UsageError, escape
from genesis_cli.measured import STDOUT, device_name, raise_first, show, show_progress, sizes
from genesis_cli.nproc import asked_ranks, is_rank, launched
from genesis_cli.options import JsonFile, MeasuredDevice, TorchPython, weight_dtype
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.measure.limits import Limits
    from genesis.measure.record import Cell, Failure, Report, Table
    from genesis.train.ranks import Ranks
    from genesis_cli.session.bench.model import Case
    from genesis_cli.session.bench.ranks import SharedCase
    from genesis_cli.session.bench.steps import Settings
    from genesis_cli.session.bench.versus import PeerStep
    from genesis_models.config import ModelConfig

PROMPTS, GENERATED = "128", "1,8,32"
LENGTHS, BATCHES = (128, 256, 512), "1,2,4"
CHECKPOINTING = ("none", "selective", "full")


BatchSize = Annotated[
    str | None,
    typer.Option(
        "--batch-size", metavar="N,N,…", help=f"Rows of a batch.  [default: {BATCHES}; 1,8,32 with --generate]"
    ),
]
SeqLen = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        metavar="N,N,…",
        help=f"Tokens of a row.  [default: {','.join(map(str, LENGTHS))}, as far as the model's positions go;"
        " 128 with --generate]",
    ),
]
Checkpointing = Annotated[
    str,
    typer.Option("--checkpointing", metavar="HOW", help="What is computed again in backward: none, selective or full."),
]


Size = Annotated[
    str,
    typer.Option("--size", metavar="SIZE", help="A preset such as 0.5B, a config.json, a model folder, or quickstart."),
]
WeightType = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="bf16 or fp32.  [default: on a GPU the config's or bf16, on the CPU fp32]"
    ),
]
Generate = Annotated[
    bool, typer.Option("--generate", help="Measure generation instead; --seq-len are tokens of the prompts.")
]
NewTokens = Annotated[
    int | None, typer.Option("--new-tokens", metavar="N", help="Tokens to generate for each.  [default: 64]")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", metavar="T", help="Of generation.  [default: 0, greedy]")
]
Fast = Annotated[bool, typer.Option("--fast", help="Take little time for each case.")]
Vs = Annotated[
    str | None, typer.Option("--vs", metavar="torch", help="Compare with torch, each recipe in a fresh process.")
]
NProc = Annotated[
    str | None,
    typer.Option(
        "--nproc",
        metavar="N|all",
        help="Take steps in N processes of this host, ranks, each with a batch of its own, and in one alone; all: one"
        " for each GPU, or for each CPU core.",
    ),
]
Recipes = Annotated[
    str | None,
    typer.Option(
        "--recipes",
        metavar="NAME,…",
        help="eager: Hugging Face's model; compile: compiled; lean: one made for speed. Of ranks ddp and fsdp2, around"
        " lean's.  [default: all of them]",
    ),
]


def bench_model(
    size: Size,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    device: MeasuredDevice = "auto",
    dtype: WeightType = None,
    checkpointing: Checkpointing = "none",
    generate: Generate = False,
    new_tokens: NewTokens = None,
    temperature: Temperature = None,
    fast: Fast = False,
    nproc: NProc = None,
    vs: Vs = None,
    recipes: Recipes = None,
    torch_python: TorchPython = None,
    json: JsonFile = None,
) -> None:
    """Measure training steps, or generation, of a model with random weights.

    Prints the times of forward, backward and optimizer for each batch size and length, tokens and FLOPs a second, the
    share of this machine's measured matmul, memory by what it is for, and what larger batches and lengths cost.
    A case that fails does not end the run; the exit code is that of the first one. Ctrl-C ends it with a report of
    what was measured. With --nproc a rank that fails, or a signal, ends all of them, without a report.
    """
    if generate:
        others = {"--checkpointing": checkpointing != "none", "--vs": vs is not None, "--nproc": nproc is not None}
        for option, is_given in others.items():
            if is_given:
                what = f"{option} is for training steps"
                raise UsageError(what, where=option, next="leave out --generate, or this")
        given = {"--size": size, "--batch-size": batch_size or GENERATED, "--seq-len": seq_len or PROMPTS}
        given |= _given(
            {"--device": device, "--dtype": dtype, "--new-tokens": new_tokens, "--temperature": temperature}
        )
        show_generation(given, new_tokens, temperature or 0.0, fast, json)
        return
    if (new_tokens, temperature) != (None, None):
        option = "--new-tokens" if new_tokens is not None else "--temperature"
        raise UsageError(f"{option} is for generation", where=option, next="add --generate")
    from genesis_cli.session.bench.steps import FAST, Settings, check_lengths
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.registry import fuses
    from genesis_models.weights import weight_type

    batches = sizes(batch_size or BATCHES, "--batch-size")
    asked = weight_dtype(dtype, trains=True)
    if checkpointing not in CHECKPOINTING:
        next = f"use one of {', '.join(CHECKPOINTING)}"
        raise UsageError(f"{checkpointing!r} is not known", where="--checkpointing", next=next)
    config = shape_named(size, "--size")
    if checkpointing == "selective" and not fuses(config):
        what = f"selective is for fused layers, and those of {config.model_type} are plain"
        raise UsageError(what, where="--checkpointing", next="use none or full")
    lengths = _lengths(seq_len, config.packed_length)
    check_lengths(config, lengths)
    given = {"--size": size, "--batch-size": batch_size or BATCHES, "--seq-len": ",".join(map(str, lengths))}
    given |= _given({"--device": device, "--checkpointing": checkpointing, "--dtype": dtype})
    count = 1 if nproc is None else asked_ranks(nproc, device)
    chosen = _recipes(vs, recipes, torch_python, is_shared=count > 1 or is_rank())
    given |= {} if vs is None else {"--vs": vs, "--recipes": ",".join(chosen)}
    if count > 1:
        passed_on = {**given, **_given({"--torch-python": torch_python, "--json": json})}
        options = [f"{name}={value}" for name, value in passed_on.items()]
        raise typer.Exit(launched("bench-model", [*options, *(["--fast"] if fast else [])], count))
    with together(device, given, is_quiet=json == STDOUT) as ranks:
        where = resolve_device(device, ranks)
        kind = weight_type(asked, where, config.stored_dtype, trains=True).name
        settings = Settings(kind, checkpointing, **({"plan": FAST} if fast else {}))
        if vs is not None and ranks.is_main:
            _check_peer(vs, torch_python, where)
        request = Request(config, list(itertools.product(batches, lengths)), where, settings, chosen, torch_python)
        measured = measure_alone(request) if ranks.size == 1 else measured_by(request, ranks)
        if measured is None:  # rank 0 has it
            return
        given |= {} if ranks.size == 1 else {"--nproc": str(ranks.size)}
    report = _report("bench-model", given, fast, size, request, measured.limits, measured.tables(request))
    report.failures = measured.failures
    finish(report, json, len(measured.cases), measured.interrupted)


def _given(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items() if value is not None}


def finish(report: Report, json: str | None, cases: int, interrupted: bool) -> None:
    """Print the report and end as its failures say."""
    from genesis.measure.record import to_text

    show(report, to_text(report), json)
    if interrupted:
        raise KeyboardInterrupt
    raise_first(report.failures, cases)


def _lengths(asked: str | None, most: int) -> tuple[int, ...]:
    """Those asked for, else the usual ones that a model of `most` positions has room for."""
    if asked is not None:
        return sizes(asked, "--seq-len")
    return tuple(n for n in LENGTHS if n <= most) or (most,)


def _recipes(vs: str | None, asked: str | None, python: str | None, *, is_shared: bool) -> tuple[str, ...]:
    """The recipes to compare with; none without --vs."""
    from genesis.measure.peers.torch_steps import RANK_RECIPES, RECIPES
    from genesis_cli.session.bench.versus import check_recipes

    if vs is None:
        if python is not None:
            raise UsageError("there is nothing to compare with", where="--torch-python", next="add --vs torch")
        return ()
    known = RANK_RECIPES if is_shared else RECIPES
    return check_recipes(",".join(known) if asked is None else asked, known)


def _check_peer(vs: str, python: str | None, device: Device) -> None:
    """Start the peer once: a missing one ends it before anything is measured."""
    from genesis.measure.peer import started

    with started("steps", device, vs, python):
        pass


# --- Training steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        cases: (batch, length).
        recipes: of torch, to compare with; none without --vs.
        python: the interpreter that has torch; None means this one.
    """

    config: ModelConfig
    cases: list[tuple[int, int]]
    device: Device
    settings: Settings
    recipes: tuple[str, ...] = ()
    python: str | None = None


@dataclass
class Measured:
    """What was measured, also of a run that was interrupted."""

    limits: Limits
    cases: list[Case] = field(default_factory=list)
    shared: list[SharedCase] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    peers: list[PeerStep] = field(default_factory=list)
    interrupted: bool = False

    def tables(self, request: Request) -> list[Table]:
        """The tables of the report."""
        from genesis_cli.session.bench.model import model_tables
        from genesis_cli.session.bench.ranks import shared_tables
        from genesis_cli.session.bench.versus import peers_table

        found = model_tables(request.config, self.cases, request.settings, request.device)
        found += shared_tables(self.shared)
        if self.peers:
            found.append(peers_table(self.peers, self.shared[0].ranks if self.shared else 1))
        return found


def _measure_cases(request: Request, measured: Measured) -> None:
    from genesis.measure.record import Failure
    from genesis_cli.session.bench import model

    for found in model.bench_model(request.config, request.cases, measured.limits, request.settings, show_progress):
        if isinstance(found, Failure):
            measured.failures.append(found)
        else:
            measured.cases.append(found)


def measure_alone(request: Request) -> Measured:
    """Every case, and then each recipe of torch; on a terminal stderr shows how far it is."""
    from genesis.dtypes import as_dtype
    from genesis.measure.limits import limits_of
    from genesis_cli.session.bench import versus

    settings, recipes, python = request.settings, request.recipes, request.python
    measured = Measured(limits_of(request.device, as_dtype(settings.dtype)))
    try:
        _measure_cases(request, measured)
        if recipes:
            given = request.config, request.cases, measured.limits, settings, recipes, python
            for step in versus.versus_torch(*given, show_progress):
                measured.peers.append(step)
    except KeyboardInterrupt:
        if not measured.cases:
            raise
        measured.interrupted = True
    finally:
        show_progress("")
    return measured


def measured_by(request: Request, ranks: Ranks) -> Measured | None:
    """What all ranks do together, then (on rank 0, alone) what one does; None on the others."""
    from genesis.dtypes import as_dtype
    from genesis.measure.limits import limits_of
    from genesis_cli.session.bench.ranks import has_no_room, shared_cases, with_scaling
    from genesis_cli.session.bench.versus import versus_ranks

    config, cases, device, settings = request.config, request.cases, request.device, request.settings
    measured = Measured(limits_of(device, as_dtype(settings.dtype))) if ranks.is_main else None
    ranks.barrier("limits")
    rate = None if measured is None else measured.limits.flops_per_second
    tell = show_progress if ranks.is_main else (lambda text: None)
    try:
        shared = list(shared_cases(config, cases, device, rate, settings, ranks, tell))
        against = versus_ranks(config, cases, shared, device, settings, request.recipes, ranks, request.python, tell)
        peers = list(against)
        if measured is not None:
            _measure_cases(request, measured)
            measured.shared = with_scaling(shared, [*measured.cases, *measured.failures])
            measured.failures = [each for each in measured.failures if not has_no_room(each)]
            measured.peers = peers
    finally:
        tell("")
    ranks.barrier("one rank's steps")
    return measured


@contextmanager
def together(device: str, options: Mapping[str, str], *, is_quiet: bool) -> Iterator[Ranks]:
    """The ranks that measure, which end together; this process alone where nothing started others.

    Args:
        options: of the command, which must be the same on all ranks.
        is_quiet: print nothing about ranks.
    """
    from genesis.backend.cpu import threads
    from genesis.train.output import Output
    from genesis.train.ranks import ALONE, PREPARING_S
    from genesis.train.signals import Interrupts
    from genesis_cli.session.ranks import met
    from genesis_cli.session.training import cpu_threads

    if not is_rank():
        yield ALONE
        return
    facts = {"the options of bench-model": " ".join(f"{name}={value}" for name, value in options.items())}
    console = Output(None if is_quiet else sys.stdout)
    with (
        Interrupts(saves=False) as interrupts,
        met(facts, device, console, interrupts) as ranks,
        cpu_threads(max(1, threads() // (ranks.local_size or 1))),
        ranks.during("measuring", PREPARING_S),
    ):
        yield ranks


# --- Generation -------------------------------------------------------------------------------------------------------


def show_generation(
    given: Mapping[str, str], new: int | None, temperature: float, fast: bool, json: str | None
) -> None:
    """Measure generation, print the report, and write it into the file `json`.

    Raises:
        UsageError: an option is out of its range. GenesisError: the first case that failed, at the end.
    """
    from genesis.dtypes import as_dtype
    from genesis.measure.limits import limits_of
    from genesis.measure.record import Failure
    from genesis_cli.session.bench import generation
    from genesis_cli.session.bench.model import ops_table
    from genesis_cli.session.bench.steps import FAST
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.weights import AUTO, QUANTIZED, weight_type

    count = generation.NEW if new is None else new
    if count < 2:
        raise UsageError(f"{count} new tokens have no time between them", where="--new-tokens", next="take 2 or more")
    asked, config = weight_dtype(given.get("--dtype"), quantized=True), shape_named(given["--size"], "--size")
    batches, prompts = sizes(given["--batch-size"], "--batch-size"), sizes(given["--seq-len"], "--seq-len")
    if max(prompts) + count > config.context_length:
        what = f"{max(prompts)} tokens and {count} new ones are beyond the model's {config.context_length:,} positions"
        raise UsageError(what, where="--seq-len", next="lower --seq-len or --new-tokens")
    device = resolve_device(given["--device"])
    is_quantized = asked in QUANTIZED
    kind = weight_type(AUTO if is_quantized else asked, device, config.stored_dtype).name
    plan = {"plan": FAST} if fast else {}
    settings = generation.Settings(asked if is_quantized else kind, kind, count, temperature, **plan)
    settings.sampling.check()
    limits, cases = limits_of(device, as_dtype(kind)), list(itertools.product(batches, prompts))
    rows, failures, notes, tables = list[Any](), list[Failure](), list[str](), list[Any]()
    interrupted = False
    try:
        for found in generation.bench_generation(config, cases, limits, settings, show_progress):
            if isinstance(found, Failure):
                failures.append(found)
                continue
            row, parts, more = found
            rows.append(row)
            notes += more
            tables += [] if parts is None else [ops_table(parts, f"ops of a step, {row.label}")]
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    finally:
        show_progress("")
    request = Request(config, cases, device, settings)  # type: ignore[arg-type]
    shown = [generation.generation_table(rows), *tables] if rows else []
    report = _report("bench-generation", given, fast, given["--size"], request, limits, shown)
    report.failures, report.notes = failures, [*report.notes, *notes]
    finish(report, json, len(rows), interrupted)


# --- Report -----------------------------------------------------------------------------------------------------------


def _report(
    kind: str, given: Mapping[str, str], fast: bool, size: str, request: Request, limits: Limits, tables: list[Table]
) -> Report:
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure.record import Report, format_rate
    from genesis_cli.environment import facts
    from genesis_cli.session.bench.steps import OPTIMIZER
    from genesis_models.registry import parameter_count

    machine, device, chosen = facts(), limits.device, request.settings
    generates = kind == "bench-generation"
    words = ["genesis bench-model", *(["--generate"] if generates else [])]
    words += [f"{name} {value}" for name, value in given.items()] + (["--fast"] if fast else [])
    settings: dict[str, Cell] = {
        "model": escape(size),
        "type": request.config.model_type,
        "parameters": parameter_count(request.config),
        "dtype": chosen.dtype,
        **({} if generates else {"optimizer": OPTIMIZER, "checkpointing": chosen.checkpointing}),
        "temperature": getattr(chosen, "temperature", None),
        "threads": threads() if device == CPU else None,
    }
    rate = limits.flops_per_second
    limit = f"copy {format_rate(limits.bytes_per_second, 'B/s')}"
    limit += "" if rate is None else f", matmul {limits.dtype.name} {format_rate(rate, 'FLOP/s')}"
    name = device_name(device, machine)
    notes = [f"Limits, measured now: {limit}."]
    return Report(kind, escape(" ".join(words)), str(device), name, machine, settings, tables, notes=notes)
