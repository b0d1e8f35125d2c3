"""`genesis bench-model`: how long a training step of a model takes here, by phase, and its memory; or generation."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genesis.errors import UsageError, escape
from genesis_cli.measured import STDOUT, device_name, raise_first, show, sizes
from genesis_cli.nproc import asked_ranks, is_rank, launched
from genesis_cli.options import JsonFile, MeasuredDevice, TorchPython, weight_dtype
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.measure.record import Cell, Report
    from genesis.train.ranks import Ranks
    from genesis_cli.session.bench.model import Measured, Request
    from genesis_cli.session.bench.steps import Drawing, Settings
    from genesis_models.config import ModelConfig

PROMPTS, GENERATED = "128", "1,8,32"
LENGTHS, BATCHES = (128, 256, 512), "1,2,4"
CHECKPOINTING = ("none", "selective", "full")


ROWS = f"{BATCHES}; {GENERATED} with --generate"
BatchSize = Annotated[
    str | None,
    typer.Option(
        "--batch-size", metavar="N,N,…", help=f"Rows of a batch.  [default: {BATCHES}; {GENERATED} generated]"
    ),
]
USUAL = f"{','.join(map(str, LENGTHS))}, as far as positions go; {PROMPTS} with --generate"
SeqLen = Annotated[str | None, typer.Option("--seq-len", metavar="N,N,…", help=f"Tokens of a row.  [default: {USUAL}]")]
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
    typer.Option("--dtype", metavar="DTYPE", help="bf16 or fp32.  [default: the config's; CPU: fp32]"),
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
RANKS = (
    "Take steps in N processes of this host, ranks, each with a batch of its own, and in one alone; all: one for each"
)
NProc = Annotated[str | None, typer.Option("--nproc", metavar="N|all", help=f"{RANKS} GPU, or CPU core.")]
ABOUT = "eager: Hugging Face's model; compile: compiled; lean: made for speed. Of ranks ddp and fsdp2, around lean's."
Recipes = Annotated[str | None, typer.Option("--recipes", metavar="NAME,…", help=f"{ABOUT}  [default: all of them]")]


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
    steps_alone = {"--checkpointing": checkpointing != "none", "--vs": vs is not None, "--nproc": nproc is not None}
    of_generation = {"--new-tokens": new_tokens is not None, "--temperature": temperature is not None}
    _refuse(steps_alone if generate else of_generation, "training steps" if generate else "generation")
    from genesis.measure.peer import started
    from genesis.measure.record import to_text
    from genesis.train.ranks import ALONE
    from genesis_cli.session.bench import model
    from genesis_cli.session.preparation import resolve_device

    batch_size = batch_size or (GENERATED if generate else BATCHES)
    batches, asked = sizes(batch_size, "--batch-size"), weight_dtype(dtype, trains=not generate, quantized=generate)
    config = shape_named(size, "--size")
    # The usual ones that the model has positions for, where none are asked for.
    usual = [n for n in LENGTHS if n <= config.packed_length] or [config.packed_length]
    default = PROMPTS if generate else ",".join(map(str, usual))
    lengths = sizes(default if seq_len is None else seq_len, "--seq-len")
    chosen, count = tuple[str, ...](), 1
    if not generate:
        _check_steps(config, lengths, checkpointing)
        count = 1 if nproc is None else asked_ranks(nproc, device)
        chosen = _recipes(vs, recipes, torch_python, is_shared=count > 1 or is_rank())
    given = _given({
        "--size": size, "--batch-size": batch_size, "--seq-len": ",".join(map(str, lengths)), "--device": device,
        "--checkpointing": None if generate else checkpointing, "--dtype": dtype, "--new-tokens": new_tokens,
        "--temperature": temperature, "--vs": vs, "--recipes": ",".join(chosen) or None,
    })  # fmt: skip
    if count > 1:
        passed_on = {**given, **_given({"--torch-python": torch_python, "--json": json})}
        options = [f"{name}={value}" for name, value in passed_on.items()]
        raise typer.Exit(launched("bench-model", [*options, *(["--fast"] if fast else [])], count))
    with nullcontext(ALONE) if generate else together(device, given, is_quiet=json == STDOUT) as ranks:
        where = resolve_device(device, ranks)
        settings: Drawing | Settings = (
            _drawing(config, where, asked, max(lengths), new_tokens, temperature or 0.0, fast)
            if generate
            else _steps(config, where, asked, checkpointing, fast)
        )
        if vs is not None and ranks.is_main:
            with started("steps", where, vs, torch_python):
                pass  # a missing peer ends it before anything is measured
        request = model.Request(
            config, list(itertools.product(batches, lengths)), where, settings, chosen, torch_python
        )
        measured = model.measure_alone(request) if ranks.size == 1 else model.measured_by(request, ranks)
        if measured is None:  # rank 0 has it
            return
    given |= {} if ranks.size == 1 else {"--nproc": str(ranks.size)}
    report = _report(given, request, measured, generate, fast)
    show(report, to_text(report), json)
    if measured.interrupted:
        raise KeyboardInterrupt
    raise_first(report.failures, len(measured.cases))


def _given(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items() if value is not None}


def _refuse(options: Mapping[str, bool], kind: str) -> None:
    """Raises: UsageError, for an option that is for the other kind of measurement."""
    for option, is_given in options.items():
        if is_given:
            next = "add --generate" if kind == "generation" else "leave out --generate, or this"
            raise UsageError(f"{option} is for {kind}", where=option, next=next)


def _steps(config: ModelConfig, device: Device, asked: str, checkpointing: str, fast: bool) -> Settings:
    from genesis_cli.session.bench.steps import FAST, THOROUGH, Settings
    from genesis_models.weights import weight_type

    dtype = weight_type(asked, device, config.stored_dtype, trains=True).name
    return Settings(dtype, checkpointing, FAST if fast else THOROUGH)


def _check_steps(config: ModelConfig, lengths: Sequence[int], checkpointing: str) -> None:
    from genesis_cli.session.bench.steps import check_lengths
    from genesis_models.registry import fuses

    if checkpointing not in CHECKPOINTING:
        next = f"use one of {', '.join(CHECKPOINTING)}"
        raise UsageError(f"{checkpointing!r} is not known", where="--checkpointing", next=next)
    if checkpointing == "selective" and not fuses(config):
        what = f"selective is for fused layers, and those of {config.model_type} are plain"
        raise UsageError(what, where="--checkpointing", next="use none or full")
    check_lengths(config, lengths)


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


def _drawing(
    config: ModelConfig, device: Device, asked: str, longest: int, new: int | None, temperature: float, fast: bool
) -> Drawing:
    """How tokens are drawn. Raises: UsageError, for an option out of its range."""
    from genesis_cli.session.bench.steps import FAST, NEW, THOROUGH, Drawing
    from genesis_models.weights import AUTO, QUANTIZED, weight_type

    count = NEW if new is None else new
    if count < 2:
        raise UsageError(f"{count} new tokens have no time between them", where="--new-tokens", next="take 2 or more")
    if longest + count > config.context_length:
        what = f"{longest} tokens and {count} new ones are beyond the model's {config.context_length:,} positions"
        raise UsageError(what, where="--seq-len", next="lower --seq-len or --new-tokens")
    built = weight_type(AUTO if asked in QUANTIZED else asked, device, config.stored_dtype).name
    settings = Drawing(asked if asked in QUANTIZED else built, built, count, temperature, FAST if fast else THOROUGH)
    settings.sampling.check()
    return settings


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


def _report(given: Mapping[str, str], request: Request, measured: Measured, generates: bool, fast: bool) -> Report:
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure.record import Report, format_rate
    from genesis_cli.environment import facts
    from genesis_cli.session.bench.steps import OPTIMIZER
    from genesis_models.registry import parameter_count

    machine, limits, chosen = facts(), measured.limits, request.settings
    words = ["genesis bench-model", *(["--generate"] if generates else [])]
    words += [f"{name} {value}" for name, value in given.items()] + (["--fast"] if fast else [])
    settings: dict[str, Cell] = {
        "model": escape(given["--size"]),
        "type": request.config.model_type,
        "parameters": parameter_count(request.config),
        "dtype": chosen.dtype,
        "optimizer": None if generates else OPTIMIZER,
        "checkpointing": getattr(chosen, "checkpointing", None),
        "temperature": getattr(chosen, "temperature", None),
        "threads": threads() if request.device == CPU else None,
    }
    rate = limits.flops_per_second
    limit = f"copy {format_rate(limits.bytes_per_second, 'B/s')}"
    limit += "" if rate is None else f", matmul {limits.dtype.name} {format_rate(rate, 'FLOP/s')}"
    notes = [f"Limits, measured now: {limit}."]
    notes += [note for each in measured.cases for note in each.notes] if generates else []
    kind, name = "bench-generation" if generates else "bench-model", device_name(request.device, machine)
    tables = measured.tables(request)
    command, place = escape(" ".join(words)), str(request.device)
    return Report(kind, command, place, name, machine, settings, tables, measured.failures, notes)
