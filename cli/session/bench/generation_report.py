"""The report about generation: as data, what `genesis bench-model --generate --json` writes, and as text."""

from __future__ import annotations

from collections.abc import Iterator

from genesis.errors import escape
from genesis.profile.format import format_rate
from genesis.profile.generation import GenerationRow, render_generation
from genesis.profile.schema import Failure, LimitsRow, Measured, StrictModel
from genesis_cli.session.bench.report import render_breakdown, titled
from genesis_cli.session.bench.schema import Breakdown, ModelFacts


class GenerationSettings(StrictModel):
    """How tokens were drawn."""

    dtype: str
    """Of weights."""
    temperature: float
    """0: the likeliest token was taken."""
    threads: int | None
    """Null on a GPU."""
    is_fast: bool
    """Little time was taken for each case."""


class GenerationReport(Measured):
    """The report."""

    limits: LimitsRow
    model: ModelFacts
    settings: GenerationSettings
    rows: list[GenerationRow]
    breakdown: Breakdown | None
    """A step of the last case by op."""
    notes: list[str]
    failures: list[Failure]


def render_lines(report: GenerationReport) -> Iterator[str]:
    """The whole report."""
    settings, model = report.settings, report.model
    threads = "" if settings.threads is None else f", {settings.threads} thread{'s' * (settings.threads != 1)}"
    yield from titled("device", f"{escape(report.device_name)} ({report.device}{threads})")
    yield from titled("limit", f"copy {format_rate(report.limits.bytes_per_second, 'B/s')}, measured now")
    drawn = f"drawn at temperature {settings.temperature:g}" if settings.temperature else "greedy"
    about = f"{model.model_type}, {model.parameters:,} parameters, {settings.dtype}, random weights, {drawn}"
    yield from titled("model", f"{escape(model.size)}: {about}")
    if report.rows:
        yield ""
        yield from render_generation(report.rows)
        if report.breakdown is not None:
            yield from render_breakdown(report.rows[-1].label, report.breakdown)
    for note in report.notes:
        yield from titled("note", escape(note))
    for failure in report.failures:
        yield from titled("failed", f"{failure.label}: {escape(failure.error)}")
