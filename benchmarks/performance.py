"""Writes docs/performance.md from the newest reports in benchmarks/results: `make performance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, newest, result_files
from genesis.measure.record import Column, Table, markdown_table

PAGE = RESULTS.parents[1] / "docs" / "performance.md"
Row = Mapping[str, Any]

HEAD = """\
# Performance

The latest measurements of Genesis and its peers. `make performance` writes this page from the newest reports in
[benchmarks/results](../benchmarks/results): change those, not the page.

A **ratio** is the peer's time divided by Genesis' time: above 1 Genesis is faster. Both times come from one run,
because absolute times drift with clocks and machines. [The log](log.md) lists what was tried and did not help.
"""


@dataclass(frozen=True)
class Section:
    """A section of the page: selected rows and columns of one report's table.

    Attributes:
        title: heading of the section.
        text: explanation above the table.
        kind: kind of the report.
        table: name of the table in the report.
        columns: keys of the columns to show.
        of: selects the rows to show.
        slower: reason printed below the table, with the rows' names, if a ratio is below 0.995.
    """

    title: str
    text: str
    kind: str
    table: str
    columns: tuple[str, ...]
    of: Callable[[Row], bool] = lambda row: True
    slower: str = "the cause is not known."


SECTIONS = (
    Section(
        "Training steps on a GPU",
        "Forward, backward, clipping and AdamW on random tokens, bf16 weights with float32 masters. Genesis runs\n"
        "each step as one CUDA graph. The peer is a minimal model written for torch.compile. Allocation counters miss\n"
        "the memory of torch's CUDA graphs, so memory is what each side reserved from the driver. The report also\n"
        "has Hugging Face's models.",
        "training-step",
        "steps",
        ("size", "shape", "step", "tokens_per_second", "memory", "recipe", "peer_step", "peer_memory", "ratio"),
        lambda row: row["recipe"].startswith("torch.compile"),
    ),
    Section(
        "Training adapters on a GPU",
        "LoRA and DoRA on all linear layers, base and adapters in bf16. All sides use the same files and tokens.",
        "lora-step",
        "steps",
        ("size", "kind", "r", "shape", "checkpointing", "side", "step", "tokens_per_second", "reserved", "ratio"),
    ),
    Section(
        "Ranks",
        "Data parallel with ZeRO-1, compared with torch's DDP on a minimal model. `genesis bench-model\n"
        "--nproc 2 --vs torch` measures it; [ranks](ranks.md#what-it-costs) explains the columns.",
        "ranks",
        "steps",
        ("size", "shape", "ranks", "gpu", "step", "tokens_per_second", "scaling", "peer", "peer_step", "ratio"),
        lambda row: row["peer"] == "torch DDP",
    ),
    Section(
        "Generation on a GPU",
        "Random prompts, bf16; each decoding step is one CUDA graph. `of a copy` is the rate at which a step reads\n"
        "its weights and cache, as a share of a copy's bandwidth.",
        "generation",
        "cases",
        ("size", "side", "batch", "prompt", "token", "tokens_per_second", "share", "first"),
        lambda row: row["draw"] == "greedy" and row["prompt"] == 128 and row["batch"] in (1, 32),
    ),
    Section(
        "Generation compared with torch",
        "The peer is a lean decoder with packed weights. Its step is one CUDA graph.",
        "generation-torch",
        "cases",
        ("size", "side", "batch", "prompt", "token", "tokens_per_second", "share", "first", "ratio"),
        lambda row: row["draw"] == "greedy" and row["prompt"] == 128 and row["side"] in ("genesis", "lean-graph"),
    ),
    Section(
        "Serving",
        "`genesis serve` under load, compared with the engine alone with as many rows; see [serving](serving.md).",
        "serving",
        "load",
        ("asked", "requests", "tokens_per_second", "share", "first", "first_95", "first_99", "http_share"),
    ),
    Section(
        "Ops on a GPU",
        "Every op of the registry by size class. A share is relative to the binding limit, measured in the same run.\n"
        "`genesis bench-ops --vs torch` writes the report, with a row for each case.",
        "bench-ops",
        "sizes",
        ("size", "category", "cases", "average", "best", "worst", "target", "ratio"),
    ),
    Section(
        "Training on a CPU",
        "The quickstart model (4,000,512 parameters), 8 x 256 tokens per step, float32, two threads.",
        "cpu-training",
        "sides",
        ("side", "step", "fastest", "tokens_per_second", "peak", "ratio", "memory_ratio", "version"),
    ),
    Section(
        "Generation on a CPU",
        "One sequence, greedy, 32 prompt tokens and 32 new ones, float32, two threads. Both sides generate the same\n"
        "tokens.",
        "cpu-generation",
        "sides",
        ("side", "token", "first", "tokens_per_second", "peak", "ratio", "first_ratio", "memory_ratio", "version"),
        slower="the first token needs a pass over the prompt with numpy's matmuls.",
    ),
)


def page_of(files: list[Path]) -> str:
    """The page made from these files; sections without a report are omitted."""
    return "\n".join([HEAD, *(line for section in SECTIONS for line in _section(section, files))])


def _section(section: Section, files: list[Path]) -> Iterator[str]:
    newest_report = newest(section.kind, files)
    if newest_report is None:
        return
    path, report = newest_report
    data = next(each for each in report["tables"] if each["name"] == section.table)
    columns = {each["key"]: Column(**each) for each in data["columns"]}
    rows = [row for row in data["rows"] if section.of(row) and row.get("error") is None]
    yield from (f"## {section.title}", "", section.text, "")
    shown = [columns[key] for key in section.columns if key in columns]
    yield from markdown_table(Table(data["name"], "", shown, rows))
    below = [row for row in rows if any((row.get(key) or 1) < 0.995 for key in columns if key.endswith("ratio"))]
    if below:
        words = [c.key for c in shown if c.unit in ("text", "count") and c.key != "version"]
        named = ", ".join(" ".join(str(row[key]) for key in words if row.get(key) is not None) for row in below)
        yield from ("", f"Below 1 ({named}): {section.slower}")
    versions = ", ".join(f"{name} {version}" for name, version in report["machine"].get("versions", {}).items())
    where = report["device_name"] + (f" ({versions})" if versions else "")
    link = f"[all figures](../benchmarks/results/{path.name})"
    provenance = " ".join(
        [f"Measured {report['date'][:10]} on {where} by `{report['command']}`; {link}.", *report.get("notes", ())]
    )
    yield from ("", provenance, "")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page_of(result_files()))


if __name__ == "__main__":
    main()
