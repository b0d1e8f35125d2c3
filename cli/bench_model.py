"""`genesis bench-model`: how long a training step of a model takes here, by phase, and its memory; or generation."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import UsageError, escape
from genesis_cli.bench_generation import Given, bench_generation
from genesis_cli.bench_ranks import Measured, Request, measured_by, together
from genesis_cli.measured import STDOUT, device_name, limits_row, raise_first, show, show_progress, sizes
from genesis_cli.nproc import asked_ranks, is_rank, launched
from genesis_cli.options import JsonFile, MeasuredDevice, TorchPython, weight_dtype
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.train.ranks import Ranks
    from genesis_cli.session.bench.schema import Report
    from genesis_models.config import ModelConfig

LENGTHS, BATCHES = (128, 256, 512), "1,2,4"
CHECKPOINTING = {how: how for how in ("none", "selective", "full")}


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
        asked_for = Given(size, batch_size, seq_len, device, dtype, new_tokens, temperature, fast)
        bench_generation(asked_for, json, others=others)
        return
    if (new_tokens, temperature) != (None, None):
        option = "--new-tokens" if new_tokens is not None else "--temperature"
        raise UsageError(f"{option} is for generation", where=option, next="add --generate")
    batch_size = BATCHES if batch_size is None else batch_size
    from genesis_cli.session.bench import measuring
    from genesis_cli.session.bench.cases import check_lengths
    from genesis_cli.session.bench.report import render_lines
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.weights import weight_type

    batches = sizes(batch_size, "--batch-size")
    asked, how = weight_dtype(dtype, trains=True), _choice(checkpointing, CHECKPOINTING, "--checkpointing")
    config = shape_named(size, "--size")
    _check_checkpointing(config, how)
    lengths = _lengths(seq_len, config.packed_length)
    check_lengths(config, lengths)
    given = {"--size": size, "--batch-size": batch_size, "--seq-len": ",".join(map(str, lengths)), "--device": device}
    given |= {"--checkpointing": checkpointing} | ({} if dtype is None else {"--dtype": dtype})
    count = 1 if nproc is None else asked_ranks(nproc, device)
    chosen = _recipes(vs, recipes, torch_python, is_shared=count > 1 or is_rank())
    given |= {} if vs is None else {"--vs": vs, "--recipes": ",".join(chosen)}
    if count > 1:
        passed_on = {} if torch_python is None else {"--torch-python": torch_python}
        passed_on |= {} if json is None else {"--json": json}
        options = [f"{name}={value}" for name, value in {**given, **passed_on}.items()]
        raise typer.Exit(launched("bench-model", [*options, *(["--fast"] if fast else [])], count))
    with together(device, given, is_quiet=json == STDOUT) as ranks:
        where = resolve_device(device, ranks)
        kind = weight_type(asked, where, config.stored_dtype, trains=True).name
        settings = measuring.Settings(kind, how or "none", **({"plan": measuring.FAST} if fast else {}))
        if vs is not None and ranks.is_main:
            _check_peer(vs, torch_python, where)
        request = Request(config, list(itertools.product(batches, lengths)), where, settings, chosen, torch_python)
        measured = (_measured if ranks.size == 1 else measured_by)(request, ranks)
        if measured is None:  # rank 0 has it
            return
        given |= {} if ranks.size == 1 else {"--nproc": str(ranks.size)}
        words = ["genesis bench-model", *(f"{name} {value}" for name, value in given.items())]
        report = _report(" ".join([*words, "--fast"] if fast else words), size, request, measured, ranks.size)
    show(report, render_lines(report), json)
    if measured.interrupted:
        raise KeyboardInterrupt
    raise_first(measured.failures, len(measured.rows))


def _check_checkpointing(config: ModelConfig, how: str | None) -> None:
    from genesis_models.registry import fuses

    if how == "selective" and not fuses(config):
        what = f"selective is for fused layers, and those of {config.model_type} are plain"
        raise UsageError(what, where="--checkpointing", next="use none or full")


def _lengths(asked: str | None, most: int) -> tuple[int, ...]:
    """Those asked for, else the usual ones that a model of `most` positions has room for."""
    if asked is not None:
        return sizes(asked, "--seq-len")
    return tuple(n for n in LENGTHS if n <= most) or (most,)


def _measured(request: Request, ranks: Ranks) -> Measured:
    """Every case, and then each recipe of torch; on a terminal stderr shows how far it is."""
    from genesis.dtypes import as_dtype
    from genesis.measure.limits import limits_of
    from genesis_cli.session.bench import measuring
    from genesis_cli.session.bench.versus import versus_torch

    config, cases, settings, recipes = request.config, request.cases, request.settings, request.recipes
    limits = limits_of(request.device, as_dtype(settings.dtype))
    measured = Measured(limits)
    try:
        for found in measuring.bench_model(config, cases, limits, settings, show_progress):
            measured.add(found)
        if recipes:
            for step in versus_torch(config, cases, limits, settings, recipes, request.python, show_progress):
                measured.peers.append(step)
    except KeyboardInterrupt:
        if not measured.rows:
            raise
        measured.interrupted = True
    finally:
        show_progress("")
    return measured


def _report(command: str, size: str, request: Request, measured: Measured, ranks: int) -> Report:
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis_cli.environment import facts
    from genesis_cli.session.bench import measuring
    from genesis_cli.session.bench.cases import FORMULA
    from genesis_cli.session.bench.doubling import doublings, room_of
    from genesis_cli.session.bench.schema import ModelFacts, Report, SettingsRow
    from genesis_cli.session.bench.steps import OPTIMIZER
    from genesis_models.registry import parameter_count

    config, settings, limits = request.config, request.settings, measured.limits
    machine, dtype, device = facts(), settings.dtype, limits.device
    return Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=escape(command),
        device=str(device),
        device_name=device_name(device, machine),
        machine=machine,
        limits=limits_row(limits),
        model=ModelFacts(
            size=size, model_type=config.model_type, parameters=parameter_count(config), config=dict(config.raw)
        ),
        settings=SettingsRow(
            dtype=settings.dtype,
            optimizer=OPTIMIZER,
            checkpointing=settings.checkpointing,
            threads=threads() if device == CPU else None,
            is_fast=settings.plan is measuring.FAST,
        ),
        formula=FORMULA,
        ranks=ranks,
        rows=measured.rows,
        shared=measured.shared,
        scaling=measuring.scaling_of(measured.rows),
        doublings=doublings(config, measured.rows, settings.checkpointing, dtype, device, room_of(device)),
        peers=measured.peers,
        failures=measured.failures,
    )


def _recipes(vs: str | None, asked: str | None, python: str | None, *, is_shared: bool) -> tuple[str, ...]:
    """The recipes to compare with; none without --vs."""
    from genesis.profile.peers.torch_steps import RANK_RECIPES, RECIPES
    from genesis_cli.session.bench.versus import check_recipes

    if vs is None:
        if python is not None:
            raise UsageError("there is nothing to compare with", where="--torch-python", next="add --vs torch")
        return ()
    known = RANK_RECIPES if is_shared else RECIPES
    return check_recipes(",".join(known) if asked is None else asked, known)


def _check_peer(vs: str, python: str | None, device: Device) -> None:
    """Start the peer once: a missing one ends it before anything is measured."""
    from genesis.profile.peer import started

    with started("steps", device, vs, python):
        pass


def _choice(word: str | None, known: Mapping[str, str], option: str) -> str | None:
    """What a word means; None where there is none."""
    if word is not None and word not in known:
        raise UsageError(f"{word!r} is not known", where=option, next=f"use one of {', '.join(known)}")
    return None if word is None else known[word]
