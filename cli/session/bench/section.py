"""A model's training steps as a section of a report about a whole machine."""

from __future__ import annotations

from collections.abc import Sequence

from genesis.profile.format import format_bytes, format_rate, format_seconds, format_share
from genesis.report.schema import Bar, Section
from genesis_cli.session.bench.cases import FORMULA
from genesis_cli.session.bench.measuring import Settings, scaling_of
from genesis_cli.session.bench.schema import Row
from genesis_cli.session.bench.steps import OPTIMIZER
from genesis_models.config import ModelConfig
from genesis_models.registry import parameter_count

COLUMNS = ["batch × length", "step", "±", "forward", "backward", "optimizer", "tokens/s", "FLOP/s", "MFU", "memory"]


def section_of(name: str, config: ModelConfig, settings: Settings, rows: Sequence[Row]) -> Section:
    """The section.

    Args:
        name: of the model, for people.
        config, settings: with which the rows were measured.
    """
    about = (
        f"{name}: {config.model_type}, {parameter_count(config):,} parameters, {settings.dtype}, {OPTIMIZER},"
        f" random weights, activation checkpointing {settings.checkpointing}. FLOPs are {FORMULA}; MFU is their rate"
        " as a share of the measured matmul's."
    )
    return Section(
        title="Training steps of a model",
        text=[about, *([_largest(rows)] if rows else [])],
        columns=COLUMNS,
        cells=[_cells(row) for row in rows],
        bars=_phases(rows),
        data={
            "model": name,
            "config": dict(config.raw),
            "dtype": settings.dtype,
            "rows": [row.model_dump(mode="json") for row in rows],
            "scaling": [each.model_dump(mode="json") for each in scaling_of(rows)],
        },
    )


def _cells(row: Row) -> list[str]:
    phases, half_width = row.phases, row.step.half_width
    return [
        f"{row.batch} × {row.length}",
        format_seconds(row.step.seconds),
        "?" if half_width is None else f"{half_width:.1%}",
        *(format_seconds(time.seconds) for time in (phases.forward, phases.backward, phases.optimizer)),
        f"{row.tokens_per_second:,.0f}",
        format_rate(row.flops_per_second, "").strip(),
        "–" if row.mfu is None else format_share(row.mfu),
        format_bytes(row.memory.peak),
    ]


def _most(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: (row.batch * row.length, row.length))


def _largest(rows: Sequence[Row]) -> str:
    """The largest case in a sentence."""
    row = _most(rows)
    parts = {"weights": row.memory.weights, "gradients": row.memory.gradients, "optimizer": row.memory.optimizer}
    memory = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return (
        f"A step on {row.batch} × {row.length} tokens takes {format_seconds(row.step.seconds)}"
        f" ({row.tokens_per_second:,.0f} tokens a second) and {format_bytes(row.memory.peak)} of memory: {memory},"
        f" activations and workspace {format_bytes(row.memory.rest)}."
    )


def _phases(rows: Sequence[Row]) -> list[Bar]:
    """The phases of the largest case."""
    if not rows:
        return []
    phases = _most(rows).phases
    return [
        Bar(label=name, share=share, text=f"{format_seconds(getattr(phases, name).seconds)}, {format_share(share)}")
        for name, share in phases.shares.items()
    ]
