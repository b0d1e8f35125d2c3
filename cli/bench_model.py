"""`genesis bench-model`: the time and memory of a model's training steps on this machine, or of its generation."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import UsageError, escape
from genesis_cli.measured import STDOUT, command_of, given_in, new_report, raise_first, show, sizes, words_of
from genesis_cli.nproc import asked_ranks, is_rank, launched
from genesis_cli.options import JsonFile, MeasuredDevice, TorchPython, weight_dtype
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.measure.record import Report
    from genesis.train.ranks import Ranks
    from genesis_cli.session.bench_model import Measured
    from genesis_models.config import ModelConfig

PROMPTS, GENERATED = "128", "1,8,32"
LENGTHS, BATCHES = (128, 256, 512), "1,2,4"
NEW_TOKENS = 64
OF_STEPS, OF_GENERATION = ("checkpointing", "vs", "nproc"), ("new_tokens",)
CHECKPOINTING = ("none", "selective", "full")

Size = Annotated[
    str,
    typer.Option("--size", metavar="SIZE", help="A preset such as 0.5B, a config.json, a model folder, or quickstart."),
]
ROWS = f"Rows of a batch.  [default: {BATCHES}; {GENERATED} generated]"
BatchSize = Annotated[str | None, typer.Option("--batch-size", metavar="N,N,…", help=ROWS)]
USUAL = f"{','.join(map(str, LENGTHS))}, as far as positions go; {PROMPTS} with --generate"
SeqLen = Annotated[str | None, typer.Option("--seq-len", metavar="N,N,…", help=f"Tokens of a row.  [default: {USUAL}]")]
TYPES = "bf16 or fp32.  [default: the config's; CPU: fp32]"
WeightType = Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help=TYPES)]
REPEATED = "What backward computes again: none, selective or full."
Checkpointing = Annotated[str, typer.Option("--checkpointing", metavar="HOW", help=REPEATED)]
PROMPTED = "Measure generation instead; --seq-len is the length of the prompts."
Generate = Annotated[bool, typer.Option("--generate", help=PROMPTED)]
NewTokens = Annotated[int, typer.Option("--new-tokens", metavar="N", help="Tokens to generate for each prompt.")]
Fast = Annotated[bool, typer.Option("--fast", help="Take little time for each case.")]
RANKS = (
    "Take steps in N processes of this host, ranks, each with a batch of its own, and in one alone; all: one for each"
)
NProc = Annotated[str | None, typer.Option("--nproc", metavar="N|all", help=f"{RANKS} GPU, or CPU core.")]
PEER = "Compare with torch, each recipe in a fresh process."
Vs = Annotated[str | None, typer.Option("--vs", metavar="torch", help=PEER)]
ABOUT = "eager: Hugging Face's model; compile: compiled; lean: made for speed. Of ranks ddp and fsdp2, around lean's."
Recipes = Annotated[str | None, typer.Option("--recipes", metavar="NAME,…", help=f"{ABOUT}  [default: all of them]")]


def bench_model(
    context: typer.Context,
    size: Size,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    device: MeasuredDevice = "auto",
    dtype: WeightType = None,
    checkpointing: Checkpointing = "none",
    generate: Generate = False,
    new_tokens: NewTokens = NEW_TOKENS,
    fast: Fast = False,
    nproc: NProc = None,
    vs: Vs = None,
    recipes: Recipes = None,
    torch_python: TorchPython = None,
    json: JsonFile = None,
) -> None:
    """Measure training steps or generation of a model.

    The weights are random. Prints the times of forward, backward and optimizer for each batch size and length, tokens
    and FLOPs a second, the share of this machine's measured matmul, memory by what it is for, and what larger batches
    and lengths cost.
    A case that fails does not end the run; the first one sets the exit code. Ctrl-C ends the run with a report of the
    cases so far. With --nproc a rank that fails, or a signal, ends all of them, without a report.
    """
    for name in given_in(context):
        if name in (OF_STEPS if generate else OF_GENERATION):
            option, kind = f"--{name.replace('_', '-')}", "training steps" if generate else "generation"
            advice = "omit --generate, or this" if generate else "add --generate"
            raise UsageError(f"{option} is for {kind}", where=option, next=advice)
    config, asked = shape_named(size, "--size"), weight_dtype(dtype, trains=not generate, quantized=generate)
    batches = sizes(batch_size or (GENERATED if generate else BATCHES), "--batch-size")
    usual = PROMPTS if generate else _usual_lengths(config)
    lengths = sizes(usual if seq_len is None else seq_len, "--seq-len")
    count, chosen = 1, tuple[str, ...]()
    if generate:
        _check_generation(config, max(lengths), new_tokens)
    else:
        _check_steps(config, lengths, checkpointing)
        count = 1 if nproc is None else asked_ranks(nproc, device)
        chosen = _recipes(vs, recipes, torch_python, in_ranks=count > 1 or is_rank())
    if count > 1:
        raise typer.Exit(launched("bench-model", words_of(context, "nproc", between="="), count))

    from genesis.measure.peer import started
    from genesis.measure.record import to_text
    from genesis.train.ranks import ALONE
    from genesis_cli.session import bench_model as model
    from genesis_cli.session import bench_steps as steps
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.weights import AUTO, QUANTIZED, weight_type

    command = command_of(context, "bench-model")
    with nullcontext(ALONE) if generate else together(device, command, is_quiet=json == STDOUT) as ranks:
        where, quantized = resolve_device(device, ranks), next((kind for kind in QUANTIZED if kind == asked), None)
        kind = weight_type(AUTO if quantized else asked, where, config.stored_dtype, trains=not generate).name
        plan = steps.FAST if fast else steps.THOROUGH
        settings = steps.Settings(kind, checkpointing, plan, new_tokens * generate, quantized)
        if vs is not None and ranks.is_main:
            with started("steps", where, vs, torch_python):
                pass  # raises before anything is measured where the peer is missing
        cases = list(itertools.product(batches, lengths))
        request = steps.Request(config, cases, where, settings, chosen, torch_python)
        measured = model.measure_model(request, ranks)
    if not ranks.is_main:
        return
    if measured.interrupted and not measured.cases:
        raise KeyboardInterrupt
    report = _report(size, command + (f" --nproc {ranks.size}" if ranks.size > 1 else ""), measured)
    show(report, to_text(report), json)
    if measured.interrupted:
        raise KeyboardInterrupt
    raise_first(report.failures, len(measured.cases))


def _usual_lengths(config: ModelConfig) -> str:
    """The usual lengths for which the model has positions, else all of its positions."""
    return ",".join(str(n) for n in LENGTHS if n <= config.packed_length) or str(config.packed_length)


def _check_steps(config: ModelConfig, lengths: Sequence[int], checkpointing: str) -> None:
    """Raises: UsageError, for steps that the model cannot take or that predict nothing."""
    from genesis_models.registry import fuses

    if checkpointing not in CHECKPOINTING:
        next = f"use one of {', '.join(CHECKPOINTING)}"
        raise UsageError(f"{checkpointing!r} is not known", where="--checkpointing", next=next)
    if checkpointing == "selective" and not fuses(config):
        what = f"selective is for fused layers, and {config.model_type} has plain ones"
        raise UsageError(what, where="--checkpointing", next="use none or full")
    for length in lengths:
        if not 2 <= length <= config.packed_length:
            what = f"a length of {length} is not between 2 and the model's {config.packed_length} positions"
            raise UsageError(what, where="--seq-len", next="take lengths in that range")


def _check_generation(config: ModelConfig, longest: int, new: int) -> None:
    """Raises: UsageError, for a number of new tokens that cannot be timed or is beyond the model's positions."""
    if new < 2:
        raise UsageError(f"{new} new tokens have no time between them", where="--new-tokens", next="take 2 or more")
    if longest + new > config.context_length:
        what = f"{longest} tokens and {new} new ones are beyond the model's {config.context_length:,} positions"
        raise UsageError(what, where="--seq-len", next="lower --seq-len or --new-tokens")


def _recipes(vs: str | None, asked: str | None, python: str | None, *, in_ranks: bool) -> tuple[str, ...]:
    """The recipes to compare with; none without --vs. Raises: UsageError, for an unknown recipe."""
    from genesis.measure.torch_steps import RANK_RECIPES, RECIPES

    if vs is None:
        if python is not None:
            raise UsageError("there is nothing to compare with", where="--torch-python", next="add --vs torch")
        return ()
    known = RANK_RECIPES if in_ranks else RECIPES
    chosen = known if asked is None else tuple(dict.fromkeys(asked.split(",")))
    if unknown := [name for name in chosen if name not in known]:
        raise UsageError(f"{unknown[0]!r} is not a recipe", where="--recipes", next=f"use some of {', '.join(known)}")
    return chosen


@contextmanager
def together(device: str, command: str, *, is_quiet: bool) -> Iterator[Ranks]:
    """The ranks that measure, which end together; this process alone where nothing started others.

    Args:
        command: must be the same on all ranks.
        is_quiet: print nothing about ranks.
    """
    from genesis.backend.cpu import threads
    from genesis.train.output import Output
    from genesis.train.ranks import ALONE, PREPARING_S
    from genesis.train.signals import Interrupts
    from genesis_cli.session.ranks import joined_ranks
    from genesis_cli.session.training import cpu_threads

    if not is_rank():
        yield ALONE
        return
    console = Output(None if is_quiet else sys.stdout)
    with (
        Interrupts(saves=False) as interrupts,
        joined_ranks({"the command": command}, device, console, interrupts) as ranks,
        cpu_threads(max(1, threads() // (ranks.local_size or 1))),
        ranks.during("measuring", PREPARING_S),
    ):
        yield ranks


def _report(size: str, command: str, measured: Measured) -> Report:
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure.record import Cell, format_rate
    from genesis_cli.session.bench_steps import OPTIMIZER
    from genesis_models.registry import parameter_count

    request, limits = measured.request, measured.limits
    settings, generates = request.settings, request.settings.new > 0
    shown: dict[str, Cell] = {
        "model": escape(size),
        "type": request.config.model_type,
        "parameters": parameter_count(request.config),
        "dtype": settings.quantized or settings.dtype,
        "optimizer": None if generates else OPTIMIZER,
        "checkpointing": None if generates else settings.checkpointing,
        "threads": threads() if request.device == CPU else None,
    }
    rates = [f"copy {format_rate(limits.bytes_per_second, 'B/s')}"]
    if limits.flops_per_second is not None:
        rates.append(f"matmul {limits.dtype.name} {format_rate(limits.flops_per_second, 'FLOP/s')}")
    report = new_report("bench-generation" if generates else "bench-model", command, request.device)
    report.settings, report.notes = shown, [f"Limits, measured now: {', '.join(rates)}."]
    report.tables, report.failures = measured.tables(), measured.failures
    return report
