"""`genesis bench-model`: the time and memory of a model's training steps on this machine."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.errors import UsageError, escape
from genesis_cli.measured import STDOUT, command_of, new_report, raise_first, show, sizes, words_of
from genesis_cli.nproc import asked_ranks, is_rank, launched
from genesis_cli.options import JsonFile, MeasuredDevice, TorchPython, VsTorch, weight_dtype
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genesis.train.ranks import Ranks
    from genesis_models.config import ModelConfig

LENGTHS, BATCHES = (128, 256, 512), "1,2,4"
CHECKPOINTING = ("none", "selective", "full")

Size = Annotated[
    str,
    typer.Option("--size", metavar="SIZE", help="A preset such as 0.5B, a config.json, a model folder, or quickstart."),
]
BatchSize = Annotated[str, typer.Option("--batch-size", metavar="N,N,…", help="Rows of a batch.")]
USUAL = f"Tokens of a row.  [default: {','.join(map(str, LENGTHS))}, up to the model's positions]"
SeqLen = Annotated[str | None, typer.Option("--seq-len", metavar="N,N,…", help=USUAL)]
TYPES = "bf16 or fp32.  [default: the config's; CPU: fp32]"
WeightType = Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help=TYPES)]
REPEATED = "What backward computes again: none, selective or full."
Checkpointing = Annotated[str, typer.Option("--checkpointing", metavar="HOW", help=REPEATED)]
Fast = Annotated[bool, typer.Option("--fast", help="Take little time for each case.")]
RANKS = "Take steps in N processes of this host, ranks, each with its own batch, and in one alone; all: one per"
NProc = Annotated[str | None, typer.Option("--nproc", metavar="N|all", help=f"{RANKS} GPU, or CPU core.")]


def bench_model(
    context: typer.Context,
    size: Size,
    batch_size: BatchSize = BATCHES,
    seq_len: SeqLen = None,
    device: MeasuredDevice = "auto",
    dtype: WeightType = None,
    checkpointing: Checkpointing = "none",
    fast: Fast = False,
    nproc: NProc = None,
    vs: VsTorch = None,
    torch_python: TorchPython = None,
    json: JsonFile = None,
) -> None:
    """Measure training steps of a model.

    The weights are random. Prints the times of forward, backward and optimizer for each batch size and length, tokens
    and FLOPs a second, the share of this machine's measured matmul, memory by its purpose, and the cost of larger
    batches and lengths.
    A case that fails does not end the run; the first one sets the exit code. With --nproc a rank that fails ends all of
    them, without a report.
    """
    config, asked = shape_named(size, "--size"), weight_dtype(dtype, trains=True, quantized=False)
    usual = ",".join(str(n) for n in LENGTHS if n <= config.packed_length) or str(config.packed_length)
    batches, lengths = sizes(batch_size, "--batch-size"), sizes(usual if seq_len is None else seq_len, "--seq-len")
    _check_steps(config, lengths, checkpointing)
    count = 1 if nproc is None else asked_ranks(nproc, device)
    if vs not in (None, "torch"):
        raise UsageError(f"{vs!r} is not a peer", where="--vs", next="use torch")
    if vs is None and torch_python is not None:
        raise UsageError("there is nothing to compare with", where="--torch-python", next="add --vs torch")
    if count > 1:
        raise typer.Exit(launched("bench-model", words_of(context, "nproc", between="="), count))

    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis.measure.record import format_rate, to_text
    from genesis_cli.session import bench_model as model
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.registry import parameter_count
    from genesis_models.weights import weight_type

    command = command_of(context, "bench-model")
    with together(device, command, is_quiet=json == STDOUT) as ranks:
        where = resolve_device(device, ranks)
        kind = weight_type(asked, where, config.stored_dtype, trains=True).name
        plan, cases = model.FAST if fast else model.THOROUGH, list(itertools.product(batches, lengths))
        request = model.Request(config, cases, where, kind, checkpointing, plan, vs is not None, torch_python)
        found = model.measure_model(request, ranks)
    if not ranks.is_main:
        return
    report = new_report("bench-model", command + (f" --nproc {ranks.size}" if ranks.size > 1 else ""), where)
    report.settings = {
        "model": escape(size),
        "type": config.model_type,
        "parameters": parameter_count(config),
        "dtype": kind,
        "optimizer": model.OPTIMIZER,
        "checkpointing": checkpointing,
        "ranks": ranks.size if ranks.size > 1 else None,
        "threads": threads() if where == CPU else None,
        "torch": found.torch,
    }
    rates = [f"copy {format_rate(found.limits.bytes_per_second, 'B/s')}"]
    if found.limits.flops_per_second is not None:
        rates.append(f"matmul {kind} {format_rate(found.limits.flops_per_second, 'FLOP/s')}")
    report.notes = [f"Limits, measured now: {', '.join(rates)}."]
    report.tables, report.failures = found.tables(), found.failures
    show(report, to_text(report), json)
    raise_first(report.failures, len(found.cases))


def _check_steps(config: ModelConfig, lengths: Sequence[int], checkpointing: str) -> None:
    """Raises UsageError for steps that the model cannot take or that predict nothing."""
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


@contextmanager
def together(device: str, command: str, *, is_quiet: bool) -> Iterator[Ranks]:
    """The ranks that measure and end together; this process alone if no launcher started others.

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
