"""docs/performance.md, made from the newest reports in benchmarks/results: `make performance`."""

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

How fast Genesis was when it was last measured, beside its peers in the same run. `make performance` writes this page
from the newest reports in [benchmarks/results](../benchmarks/results): change those, not the page.

A **ratio** is the peer's time over that of Genesis: above 1 Genesis is faster. Absolute times drift with clocks and
machines; ratios come from one run. What was tried and did not help is in [the log](log.md).
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: the rows of one report's table, under some of its columns.

    Attributes:
        kind, table: which report and which of its tables.
        columns: keys of the columns to show.
        of: which rows to show.
        slower: the reason given below the table if a ratio is below 0.995; its title names the rows.
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
        "Forward, backward, clipping and AdamW on random tokens, bf16 weights with float32 masters. Genesis takes\n"
        "each step as one CUDA graph. The peer is a minimal model written for torch.compile. What\n"
        "torch's CUDA graphs hold is in no count of allocations, so beside them memory is what was reserved from the\n"
        "driver, on both sides. The report has Hugging Face's models, too.",
        "training-step",
        "steps",
        ("size", "shape", "step", "tokens_per_second", "memory", "recipe", "peer_step", "peer_memory", "ratio"),
        lambda row: row["recipe"].startswith("torch.compile"),
    ),
    Section(
        "Training adapters on a GPU",
        "LoRA and DoRA on all linears, base and adapters in bf16, from the same files and tokens on all sides.",
        "lora-step",
        "steps",
        ("size", "kind", "r", "shape", "checkpointing", "side", "step", "tokens_per_second", "reserved", "ratio"),
    ),
    Section(
        "Ranks",
        "Data parallel with ZeRO-1, beside torch's DDP and FSDP2 around the same lean model. `genesis bench-model\n"
        "--nproc 2 --vs torch` measures it; [ranks](ranks.md#what-it-costs) explains the columns.",
        "ranks",
        "steps",
        ("size", "shape", "ranks", "gpu", "step", "tokens_per_second", "scaling", "peer", "peer_step", "ratio"),
        lambda row: row["peer"] is not None,
    ),
    Section(
        "Generation on a GPU",
        "Prompts of random tokens, bf16, each decoding step one CUDA graph. `of a copy` is the rate at which a step\n"
        "reads its weights and cache, as a share of a copy's bandwidth.",
        "generation",
        "cases",
        ("size", "side", "batch", "prompt", "token", "tokens_per_second", "share", "first"),
        lambda row: row["draw"] == "greedy" and row["prompt"] == 128 and row["batch"] in (1, 32),
    ),
    Section(
        "Generation beside torch",
        "The peer is a lean decoder with packed weights whose step is one CUDA graph.",
        "generation-torch",
        "cases",
        ("size", "side", "batch", "prompt", "token", "tokens_per_second", "share", "first", "ratio"),
        lambda row: row["draw"] == "greedy" and row["prompt"] == 128 and row["side"] in ("genesis", "lean-graph"),
    ),
    Section(
        "Serving",
        "`genesis serve` under load, beside the engine alone with as many rows; [serving](serving.md) describes it.",
        "serving",
        "load",
        ("asked", "requests", "tokens_per_second", "share", "first", "first_95", "first_99", "http_share"),
    ),
    Section(
        "Ops on a GPU",
        "Every op of the registry by size class; a share is of the limit that binds, measured in the same run.\n"
        "`genesis bench-ops --vs torch` makes it, with a row for each case.",
        "bench-ops",
        "sizes",
        ("size", "category", "cases", "average", "best", "worst", "target", "ratio"),
    ),
    Section(
        "Training on a CPU",
        "The model of the quickstart (4,000,512 parameters), 8 x 256 tokens a step, float32, two threads.",
        "cpu-training",
        "sides",
        ("side", "step", "fastest", "tokens_per_second", "peak", "ratio", "memory_ratio", "version"),
    ),
    Section(
        "Generation on a CPU",
        "One sequence, greedy, 32 tokens of prompt and 32 new ones, float32, two threads; both sides give the same\n"
        "tokens.",
        "cpu-generation",
        "sides",
        ("side", "token", "first", "tokens_per_second", "peak", "ratio", "first_ratio", "memory_ratio", "version"),
        slower="the first token costs a pass over the prompt whose matmuls are numpy's.",
    ),
)


def page_of(files: list[Path]) -> str:
    """The page made from these files; a section without a report is left out."""
    return "\n".join([HEAD, *(line for section in SECTIONS for line in _section(section, files))])


def _section(section: Section, files: list[Path]) -> Iterator[str]:
    found = newest(section.kind, files)
    if found is None:
        return
    path, report = found
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
    said = " ".join(
        [f"Measured {report['date'][:10]} on {where} by `{report['command']}`; {link}.", *report.get("notes", ())]
    )
    yield from ("", said, "")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page_of(result_files()))


if __name__ == "__main__":
    main()
