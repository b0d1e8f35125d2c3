"""What docs/performance.md says of the fused ops of a language model, measured by `benchmarks.gpu.fused`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.reasons import known_reason
from benchmarks.result_files import Result
from genesis.profile.format import format_rate, format_seconds
from genesis.report.markdown import markdown_table

__all__ = ["FUSED_KEY", "fused_ops"]

FUSED_KEY = "fused"
NEAR = 0.85  # of a copy's bytes a second: what moves fewer is named
Row = dict[str, Any]


def fused_ops(result: Result, copy: float | None) -> Iterator[str]:
    """The rows of a result, and why its slower ones are; `copy` is that of the GPU, in TB/s."""
    yield from ("## Fused ops of a language model", "")
    yield from (
        "In bfloat16, mostly at the sizes of Qwen2.5-0.5B. Attention is causal; its sizes are batch, tokens, heads of",
        "queries and of keys, and head size; its peer is cuDNN's, torch's faster kind, which gets the key heads",
        'repeated, and with "starts" it knows where documents begin, as in training. The others are compared with what',
        "torch makes of the same composition, uncompiled.",
    )
    rows: list[Row] = [row for row in result.data[FUSED_KEY] if " flash" not in row["op"]]
    attention = [row for row in rows if row["op"].startswith("attention")]
    columns = ("op", "Genesis", "torch", "ratio", "reached")
    for title, part in (("Attention", attention), ("Others", [row for row in rows if row not in attention])):
        yield from ("", f"### {title}", "")
        yield from markdown_table(columns, [_cells(row) for row in part], columns[:1])
    yield from ("", "### Slower than torch, or far from memory's speed", "")
    cells = [[row["op"], what, _reason(row)] for row, what in _slow(rows, copy)]
    yield from markdown_table(("op", "what", "reason"), cells, ("op", "what", "reason"))


def _cells(row: Row) -> list[str]:
    work = format_rate(row["TFLOP/s"] * 1e12, "FLOP/s") if "TFLOP/s" in row else format_rate(row["TB/s"] * 1e12, "B/s")
    times = [format_seconds(row[side] * 1e-6) for side in ("genesis_us", "torch_us")]
    return [row["op"], *times, f"{row['ratio']:.2f}", work]


def _slow(rows: Sequence[Row], copy: float | None) -> Iterator[tuple[Row, str]]:
    for row in rows:
        if row["ratio"] < 1:
            yield row, f"ratio {row['ratio']:.2f}"
        elif copy and row.get("TB/s", copy) < NEAR * copy:
            yield row, f"{row['TB/s'] / copy:.0%} of a copy"


def _reason(row: Row) -> str:
    if row["ratio"] < 1 and 1 - row["ratio"] <= row["spread"]:
        return f"within the spread of the two measurements, {row['spread']:.1%}"
    return known_reason(f"fused {row['op']}") or "not known"
