"""The part of docs/performance.md on generation, from results of `benchmarks.gpu.generation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.result_files import Result, short_name
from genesis.report.markdown import markdown_table

__all__ = ["cpu_generation", "generation"]

OURS = "genesis"  # and what it is given: genesis-fp8
CASE = ("size", "batch", "prompt", "new", "draw")
COLUMNS = ["model", "GPU", "weights", "sequences", "prompt + new", "drawn", "Genesis", "tokens/s",
           "share of the copy bandwidth", "first token", "peer's time", "ratio"]  # fmt: skip
WORDS = ("model", "GPU", "weights", "drawn")


def generation(results: Sequence[Result]) -> Iterator[str]:
    """Milliseconds a token of each case, from the newest file that has it."""
    newest: dict[tuple[Any, ...], tuple[Result, dict[str, Any], dict[str, Any]]] = {}
    for result in results:
        rows = [row for row in result.data.get("rows", ()) if "draw" in row and "side" in row]
        peers = {_case(row): row for row in rows if not row["side"].startswith(OURS)}
        for row in rows:
            if row["side"].startswith(OURS):
                key = row["side"], result.data.get("gpu"), *_case(row)
                before = newest.get(key, (result, row, {}))[2]
                newest[key] = result, row, peers.get(_case(row), before)
    if not newest:
        return
    yield from ("## Generation on a GPU", "")
    yield "A step draws a token for each sequence, as one CUDA graph. The share is of the bandwidth at which the GPU"
    yield "copies memory: bytes of the weights and of the KV cache that a step reads, over its time. The peer is a"
    yield "minimal decoder in torch with a static cache, in a CUDA graph, in the same run or the last one that had it."
    yield ""
    yield from markdown_table(
        COLUMNS, [_cells(*each) for each in newest.values()], ("model", "GPU", "weights", "drawn")
    )
    yield ""
    for result in {id(result): result for result, _, _ in newest.values()}.values():
        where = f"[all figures](../benchmarks/results/{result.name})"
        about = f"on an {result.data['gpu']} with driver {result.data['driver']}" if "gpu" in result.data else ""
        part = f" ({result.data['part']})" if "part" in result.data else ""
        yield f"Measured {result.date[:10]} {about} by `{result.data['command']}`{part}; {where}."
    yield ""


def cpu_generation(results: Sequence[Result]) -> Iterator[str]:
    """One sequence on the CPU beside transformers, from the newest file of `benchmarks.cpu_generation`."""
    found = [result for result in results if "speed_ratio" in result.data and "transformers" in result.data]
    if not found:
        return
    result = found[-1]
    data, shape = result.data, result.data["shape"]
    yield from ("## Generation on a CPU", "")
    yield f"One sequence, greedy, {shape['prompt']} tokens of prompt and {shape['new']} new ones, float32,"
    yield f"{data['machine']['threads']} threads; both sides give the same tokens."
    yield ""
    columns = ["", "a token, median", "first token", "tokens/s", "peak memory", "version"]
    cells = [
        [
            side,
            f"{row['token_ms']:.0f} ms",
            f"{row['first_ms']:.0f} ms",
            f"{row['tokens_per_second']:.2f}",
            f"{row['peak_mib']:,.0f} MiB",
            row["version"],
        ]
        for side, row in (("Genesis", data["genesis"]), ("transformers", data["transformers"]))
    ]
    yield from markdown_table(columns, cells, ("", "version"))
    yield ""
    yield f"The ratio is {data['speed_ratio']:.2f} in speed, {data['first_ratio']:.2f} at the first token and"
    yield f"{data['memory_ratio']:.2f} in memory."
    yield ""
    where = f"[all figures](../benchmarks/results/{result.name})"
    yield f"- Measured {result.date[:10]} by `{data['command']}`; {where}."


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in CASE)


def _cells(result: Result, row: dict[str, Any], peer: dict[str, Any]) -> list[str]:
    return [
        row["size"],
        short_name(result.data.get("gpu", "–")),
        row["side"].removeprefix(OURS).removeprefix("-") or "bf16",
        str(row["batch"]),
        f"{row['prompt']:,} + {row['new']}",
        row["draw"],
        f"{row['ms']:.3f} ms",
        f"{row['batch'] / row['ms'] * 1e3:,.0f}",
        f"{100 * row['share']:.0f} %" if row.get("share") else "–",
        f"{row['first_ms']:.1f} ms" if row.get("first_ms") else "–",
        f"{peer['ms']:.3f} ms" if peer else "–",
        f"{peer['ms'] / row['ms']:.2f}" if peer else "–",
    ]
