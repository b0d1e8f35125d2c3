"""`genesis bench-model --generate`: what a token costs here, and the time to the first."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genesis.errors import UsageError, escape
from genesis_cli.measured import device_name, limits_row, raise_first, show, show_progress, sizes
from genesis_cli.options import weight_dtype
from genesis_cli.recipes import shape_named

if TYPE_CHECKING:
    from genesis.measure.limits import Limits
    from genesis.profile.generation import GenerationRow
    from genesis.profile.schema import Failure
    from genesis_cli.session.bench.generation import Settings
    from genesis_cli.session.bench.generation_report import GenerationReport
    from genesis_cli.session.bench.schema import Breakdown
    from genesis_models.config import ModelConfig

BATCHES, PROMPTS = "1,8,32", "128"


@dataclass(frozen=True)
class Given:
    """The options, None where they were left out."""

    size: str
    batch_size: str | None
    seq_len: str | None
    device: str
    dtype: str | None
    new_tokens: int | None
    temperature: float | None
    fast: bool

    @property
    def command(self) -> str:
        """The command that asks for the same."""
        words = {
            "--size": self.size,
            "--batch-size": self.batch_size or BATCHES,
            "--seq-len": self.seq_len or PROMPTS,
            "--device": self.device,
            "--dtype": self.dtype,
            "--new-tokens": self.new_tokens,
            "--temperature": self.temperature,
        }
        options = [f"{name} {value}" for name, value in words.items() if value is not None]
        return " ".join(["genesis bench-model --generate", *options, *(["--fast"] if self.fast else [])])


def bench_generation(given: Given, json: str | None, *, others: Mapping[str, bool]) -> None:
    """Measure generation, print the report, and write it into the file `json`.

    Args:
        others: options that are for training steps, and whether they were given.

    Raises:
        UsageError: an option that is not for generation, or is out of its range. GenesisError: the first case that
            failed, at the end.
    """
    from genesis.dtypes import as_dtype
    from genesis.measure.limits import limits_of
    from genesis_cli.session.bench import generation, measuring
    from genesis_cli.session.bench.generation_report import render_lines
    from genesis_cli.session.preparation import resolve_device
    from genesis_models.quantize import QUANTIZED
    from genesis_models.weights import AUTO, weight_type

    for option, is_given in others.items():
        if is_given:
            raise UsageError(f"{option} is for training steps", where=option, next="leave out --generate, or this")
    new = generation.NEW if given.new_tokens is None else given.new_tokens
    if new < 2:
        raise UsageError(f"{new} new tokens have no time between them", where="--new-tokens", next="take 2 or more")
    asked, config = weight_dtype(given.dtype, quantized=True), shape_named(given.size, "--size")
    batches = sizes(given.batch_size or BATCHES, "--batch-size")
    prompts = sizes(given.seq_len or PROMPTS, "--seq-len")
    if max(prompts) + new > config.context_length:
        what = f"{max(prompts)} tokens and {new} new ones are beyond the model's {config.context_length:,} positions"
        raise UsageError(what, where="--seq-len", next="lower --seq-len or --new-tokens")
    device = resolve_device(given.device)
    is_quantized = asked in QUANTIZED
    kind = weight_type(AUTO if is_quantized else asked, device, config.stored_dtype).name
    plan = {"plan": measuring.FAST} if given.fast else {}
    settings = generation.Settings(asked if is_quantized else kind, kind, new, given.temperature or 0.0, **plan)
    settings.sampling.check()
    limits, cases = limits_of(device, as_dtype(kind)), list(itertools.product(batches, prompts))
    rows: list[tuple[GenerationRow, Breakdown | None, list[str]]] = []
    failures: list[Failure] = []
    try:
        for found in generation.bench_generation(config, cases, limits, settings, show_progress):
            if isinstance(found, tuple):
                rows.append(found)
            else:
                failures.append(found)
    finally:
        show_progress("")
    report = _report(given, config, limits, settings, rows, failures)
    show(report, render_lines(report), json)
    raise_first(failures, len(rows))


def _report(
    given: Given,
    config: ModelConfig,
    limits: Limits,
    settings: Settings,
    rows: list[tuple[GenerationRow, Breakdown | None, list[str]]],
    failures: list[Failure],
) -> GenerationReport:
    from genesis.backend import CPU
    from genesis.backend.cpu import threads
    from genesis_cli.environment import facts
    from genesis_cli.session.bench.generation_report import GenerationReport, GenerationSettings
    from genesis_cli.session.bench.measuring import FAST
    from genesis_cli.session.bench.schema import ModelFacts
    from genesis_models.registry import parameter_count

    machine, device = facts(), limits.device
    return GenerationReport(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=escape(given.command),
        device=str(device),
        device_name=device_name(device, machine),
        machine=machine,
        limits=limits_row(limits),
        model=ModelFacts(
            size=given.size, model_type=config.model_type, parameters=parameter_count(config), config=dict(config.raw)
        ),
        settings=GenerationSettings(
            dtype=settings.dtype,
            temperature=settings.temperature,
            threads=threads() if device == CPU else None,
            is_fast=settings.plan is FAST,
        ),
        rows=[row for row, _, _ in rows],
        breakdown=next((by_op for _, by_op, _ in rows if by_op is not None), None),
        notes=[note for _, _, notes in rows for note in notes],
        failures=failures,
    )
