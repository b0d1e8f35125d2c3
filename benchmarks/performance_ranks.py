"""The part of docs/performance.md on several GPUs, from results of `genesis bench-model --nproc`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.result_files import Result, short_name
from genesis.report.markdown import markdown_table

__all__ = ["ranks"]

COLUMNS = [
    "model", "GPU", "tokens of a rank", "ranks", "copies", "step", "tokens/s", "scaling", "exposed", "memory of a GPU",
    "peer", "its step", "ratio",
]  # fmt: skip

INTRODUCTION = (
    "Data-parallel steps with ZeRO-1, AdamW and bf16 weights with float32 masters, as one CUDA graph a rank; each",
    "rank has a batch of its own. Scaling is the tokens/s of all ranks over as many times those of one, which were",
    "measured alone in the same run. Exposed is how long a step waits for collectives. Copies are made by the GPUs'",
    "DMA engines over NVLink, or by kernels on SMs, as without NVLink.",
    "",
)


def ranks(results: Sequence[Result]) -> Iterator[str]:
    """Steps of ranks, from the newest file that has a case."""
    newest: dict[tuple[Any, ...], tuple[Result, dict[str, Any]]] = {}
    for result in results:
        for row in result.data.get("rank_rows", ()):
            key = row["size"], row["shape"], row["ranks"], result.data["gpu"], row["copies"], row.get("peer")
            newest[key] = result, row
    if not newest:
        return
    yield from ("## Several GPUs", "")
    yield from INTRODUCTION
    order = ("size", "tokens", "ranks", "copies")
    rows = sorted(newest.values(), key=lambda each: [each[1][key] for key in order])
    yield from markdown_table(COLUMNS, [_cells(*each) for each in rows], ("model", "GPU", "copies", "peer"))
    yield ""
    for result in {id(result): result for result, _ in newest.values()}.values():
        data = result.data
        yield (
            f"Measured {result.date[:10]} on {data['gpus']} x {data['gpu']} with driver {data['driver']} and NCCL"
            f" {data['nccl']} by `{data['command']}`; [all figures](../benchmarks/results/{result.name})."
        )
    yield ""


def _cells(result: Result, row: dict[str, Any]) -> list[str]:
    return [
        row["size"],
        short_name(result.data["gpu"]),
        row["shape"].replace("x", " x "),
        str(row["ranks"]),
        row["copies"],
        f"{row['ms']:.1f} ms",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['scaling']:.1%}" if row.get("scaling") else "–",
        f"{row['exposed_ms']:.2f} ms",
        f"{row['peak_gib']:.1f} GiB" if row.get("peak_gib") else "–",
        row.get("peer") or "–",
        f"{row['peer_ms']:.1f} ms" if row.get("peer_ms") else "–",
        f"{row['peer_ms'] / row['ms']:.2f}" if row.get("peer_ms") else "–",
    ]
