"""docs/performance.md, made from the newest results in benchmarks/results: `make performance`.

    python -m benchmarks.performance [--check]

In a git checkout only files that git knows are read, so that a committed page can be reproduced from what is
committed with it. Measures nothing; the same results give the same page.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu.training_step import memory_field
from benchmarks.lower_bounds import EXPLAINED, SMALLEST, LowerBound, describe, lower_bound_of
from benchmarks.performance_fused import FUSED_KEY, fused_ops
from benchmarks.performance_generation import cpu_generation, generation
from benchmarks.performance_ranks import ranks
from benchmarks.performance_reports import all_ops, model_steps
from benchmarks.reasons import known_reason
from benchmarks.result_files import RESULTS, Result, read_results, result_files
from genesis.profile.format import format_bytes, format_rate, format_seconds
from genesis.profile.roofline import band_of
from genesis.report.markdown import markdown_table

__all__ = ["PAGE", "page_of", "training_steps"]

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "performance.md"
GOOD = 0.7  # where the band "good" begins
Row = dict[str, Any]


# --- The page ---------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Performance

This page says how fast Genesis was when it was last measured, next to PyTorch where the two were measured in one run,
and next to what the machine can do. It is made by `make performance` from the newest files in
[benchmarks/results](../benchmarks/results): change those, not the page.

How to read it:

- A **ratio** is the other side's time over that of Genesis, from one run on one machine: above 1 Genesis is faster.
- A **share** is of a limit that was measured, too: the rate at which the GPU copies memory, or its best large matmul
  of the same type. 90 % and more is excellent, 70 good, 50 fair, 20 poor, less critical.
- **Time on the GPU** leaves out what the host does: the work is replayed as a CUDA graph, as in a training step.
- What is below 1, or below "good", is listed with the reason as far as it is known. "Not known" means what it says;
  what was tried in vain is in [the log](log.md).
"""


def page_of(results: Sequence[Result]) -> str:
    """The whole page."""
    parts = [
        INTRODUCTION.rstrip().split("\n"),
        *(
            part(results)
            for part in (_steps, model_steps, ranks, generation, _ops, _fused, all_ops, _launches, _cpu, cpu_generation)
        ),
    ]
    lines: list[str] = []
    for part in parts:
        lines += [*part, ""]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
    return text


def _source(result: Result, commands: Sequence[str], about: dict[str, Any]) -> str:
    """Where figures come from, in a line."""
    gpu, driver = about.get("gpu"), about.get("driver")
    versions = ", ".join(f"{name} {version}" for name, version in (about.get("versions") or {}).items())
    parts = [
        f"Measured {result.date[:10]}",
        f"on an {gpu}" if gpu else "",
        f"with driver {driver}" if driver and re.fullmatch(r"[0-9.]+", str(driver)) else "",
    ]
    about_versions = f" ({versions})" if versions else ""
    by = ", ".join(f"`{command}`" for command in commands)
    where = f"[all figures](../benchmarks/results/{result.name})"
    return f"{' '.join(part for part in parts if part)}{about_versions} by {by}; {where}."


# --- Training steps ---------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A training step, and a peer of the same run."""

    result: Result
    command: str
    row: Row
    peer: Row


def training_steps(results: Iterable[Result]) -> list[Step]:
    """Each size, shape and way from the newest file that has it: with each peer, and alone where that came last."""
    newest: dict[tuple[str, ...], dict[str, Step]] = {}
    for result in results:
        own: dict[tuple[str, ...], dict[str, Step]] = {}
        for run in result.data.get("runs") or [result.data]:
            rows = [row for row in run.get("rows", ()) if "side" in row and "shape" in row]
            for row in rows:
                if row["side"].startswith(OURS):
                    command = str(row.get("command") or run.get("command", ""))
                    steps = own.setdefault((row["size"], row["shape"], _how(row)), {})
                    for peer in [p for p in rows if _is_peer(p, row, command)] or [{}]:
                        side = peer.get("side", "")
                        steps.pop(side, None)  # the last ones are the newest
                        steps[side] = Step(result, command, row, peer)
        newest.update(own)
    kept = [step for steps in newest.values() for side, step in steps.items() if side or side == list(steps)[-1]]
    return sorted(kept, key=lambda step: (step.row["size"], _tokens(step.row), _how(step.row)))


def _is_peer(peer: Row, row: Row, command: str) -> bool:
    """Whether a row is compared with another: a peer's, or that of Genesis in the weights' type for 8-bit floats."""
    same_run = peer.get("command", command) == command
    if not same_run or any(peer.get(key) != row.get(key) for key in ("size", "shape", "kind", "r")):
        return False
    return not peer["side"].startswith(OURS) or (peer["side"] == OURS and row["side"] != OURS)


def _tokens(row: Row) -> int:
    return math.prod(int(size) for size in str(row["shape"]).split("x"))


def _how(row: Row) -> str:
    """Its checkpointing, its precision where it is not that of the weights, and its adapters."""
    precision = str(row["side"]).removeprefix(OURS).removeprefix("-")
    adapters = f"{ADAPTERS[row['kind']]} r {row['r']}" if "kind" in row else ""
    return ", ".join(filter(None, (str(row.get("checkpointing") or "none"), precision, adapters)))


OURS = "genesis"
ADAPTERS = {"lora": "LoRA", "dora": "DoRA"}
RECIPES = {
    "lean-compile": "torch.compile",
    "lean-graphs": "torch.compile with CUDA graphs",
    "hf-compile": "Hugging Face, torch.compile",
    "hf-liger": "Hugging Face with Liger",
    "peft": "PEFT, eager",
    OURS: "Genesis in bf16",
}
STEP_COLUMNS = [
    "model", "tokens a step", "checkpointing", "Genesis", "tokens/s", "model TFLOP/s", "memory", "peer", "its time",
    "its memory", "ratio",
]  # fmt: skip


def _steps(results: Sequence[Result]) -> Iterator[str]:
    steps = training_steps(results)
    if not steps:
        return
    yield from ("## Training steps on a GPU", "")
    yield from (
        "Forward, backward, clipping and AdamW on random tokens, bf16 weights with float32 masters, with LoRA and",
        "DoRA of the adapters alone. Genesis takes each",
        "step as one CUDA graph; a third number of tokens is that of micro-steps, and the time that of one. Its peer,",
        "in a process of its own in the same run, is a minimal model of the same shape, written for torch.compile, or",
        "that of Hugging Face.",
        "",
    )
    yield from markdown_table(STEP_COLUMNS, [_step_cells(step) for step in steps], (*STEP_COLUMNS[:3], "peer"))
    yield ""
    yield from _memory_notes(steps)
    compared = [step for step in steps if step.peer]
    below = [step for step in compared if step.peer["ms"] / step.row["ms"] < 1]
    if compared:
        yield f"Of {len(compared)} comparisons {len(below)} {'is' if len(below) == 1 else 'are'} below 1."
        yield ""
    for step in below:
        name = f"step {step.row['size']} {step.row['shape']}"
        yield f"- {name}: {known_reason(name) or 'the reason is not known'}."
    yield ""
    yield from _sources(steps)


def _step_cells(step: Step) -> list[str]:
    row, peer = step.row, step.peer
    field = memory_field(row, peer) if peer else "peak_gib"
    return [
        row["size"],
        str(row["shape"]).replace("x", " x "),
        _how(row),
        f"{row['ms']:.1f} ms",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['model_tflops']:.0f}" if "model_tflops" in row else "–",  # of trained weights alone nobody counts it
        _gib(row, field),
        RECIPES.get(peer.get("side", ""), peer.get("side", "–")),
        f"{peer['ms']:.1f} ms" if peer else "–",
        _gib(peer, field),
        f"{peer['ms'] / row['ms']:.2f}" if peer else "–",
    ]


def _gib(row: Row, field: str) -> str:
    reserved = " reserved" * (field == "reserved_gib")
    return f"{row[field]:.1f} GiB{reserved}" if row.get(field) else "–"


def _memory_notes(steps: Sequence[Step]) -> Iterator[str]:
    """How memory is compared with a peer under CUDA graphs, where there is one."""
    with_graphs = [(step.row, step.peer) for step in steps if "graphs" in step.peer.get("side", "")]
    fields = [memory_field(row, peer) for row, peer in with_graphs]
    if "reserved_gib" in fields:
        yield "What torch's CUDA graphs hold is in no count of its allocations: with them memory is what was reserved"
        yield "from the driver, on both sides."
        yield ""
    if "peak_gib" in fields:
        yield "torch's memory with CUDA graphs leaves out what the graphs hold."
        yield ""


def _sources(steps: Iterable[Step]) -> Iterator[str]:
    """A line for each file and machine, with all commands."""
    found: dict[tuple[str, str], tuple[Step, list[str]]] = {}
    for step in steps:
        about = {**step.result.data, **step.row}
        key = step.result.name, str([about.get(name) for name in ("gpu", "driver", "versions")])
        commands = found.setdefault(key, (step, []))[1]
        if step.command not in commands:
            commands.append(step.command)
    for step, commands in found.values():
        yield f"- {_source(step.result, commands, {**step.result.data, **step.row})}"


# --- Ops --------------------------------------------------------------------------------------------------------------


class OpRow(NamedTuple):
    """The newest figures of an op, with the limits of the run's machine."""

    result: Result
    row: Row
    share: float | None


OP_COLUMNS = ["op", "Genesis", "torch", "ratio", "rate", "share", "band"]
GROUPS = (
    ("Elementwise", r"add\b"),
    ("Reductions", r"(sum|max)\b"),
    ("Matmuls", r"matmul\b"),
    ("Matmuls of a training step of the 0.5B model", r"(forward|dgrad|wgrad)\b"),
    ("Softmax", r"softmax\b"),
    ("Moving and selecting", r""),
)


def _all_ops(results: Sequence[Result]) -> list[OpRow]:
    """The newest row of each op, in the order of the newest file."""
    files = [result for result in results if any("genesis_us" in row for row in result.data.get("rows", ()))]
    newest: dict[str, tuple[Result, Row]] = {}
    for result in files:
        for row in result.data["rows"]:
            if "genesis_us" in row:
                newest[row["op"]] = result, row
    copy = _newest_copy(files)
    products: dict[str, float] = {}
    for _, row in newest.values():
        if "TFLOP/s" in row:
            products[_dtype(row)] = max(products.get(_dtype(row), 0.0), row["TFLOP/s"])
    return [OpRow(result, row, _share(row, copy, products)) for result, row in newest.values()]


def _newest_copy(results: Sequence[Result]) -> float | None:
    """TB/s of the last copy that was measured with ops."""
    copies = [result.data["copy TB/s"] for result in results if result.data.get("copy TB/s")]
    return copies[-1] if copies else None


def _dtype(row: Row) -> str:
    return str(row["op"]).rsplit(" ", 1)[-1]


def _share(row: Row, copy: float | None, products: dict[str, float]) -> float | None:
    if "TFLOP/s" in row:
        return float(row["TFLOP/s"] / products[_dtype(row)])
    return float(row["TB/s"] / copy) if copy and "TB/s" in row else None


def _ops(results: Sequence[Result]) -> Iterator[str]:
    rows = _all_ops(results)
    if not rows:
        return
    ratios = [each.row["ratio"] for each in rows]
    yield from ("## Ops on a GPU", "")
    at_least = sum(ratio >= 1 for ratio in ratios)
    yield (
        f"{len(rows)} ops and shapes, with torch: the median ratio is {median(ratios):.2f}, {at_least} are at least 1,"
        f" the lowest is {min(ratios):.2f}. Each result was checked against torch's before it was timed."
    )
    left = rows
    for title, pattern in GROUPS:
        here = [each for each in left if re.match(pattern, each.row["op"])]
        left = [each for each in left if each not in here]
        if here:
            yield from ("", f"### {title}", "")
            yield from markdown_table(OP_COLUMNS, [_op_cells(each) for each in here], ("op", "band"))
    yield from ("", "### Below 1, and why", "")
    least = _least_kernel(results)
    yield from _slower(rows, least)
    yield from ("", '### Below "good", and why', "")
    yield from _far(rows, least)
    yield ""
    for result in {each.result.name: each.result for each in rows}.values():
        yield f"- {_source(result, [result.data['command']], result.data)}"
    notes = {str(each.result.data["note"]) for each in rows if each.result.data.get("note")}
    yield from (f"- Note: {note}." for note in sorted(notes))


def _op_cells(each: OpRow) -> list[str]:
    row = each.row
    work = (
        format_rate(row["TFLOP/s"] * 1e12, "FLOP/s")
        if "TFLOP/s" in row
        else format_rate(row.get("TB/s", 0) * 1e12, "B/s")
    )
    return [
        row["op"],
        format_seconds(row["genesis_us"] * 1e-6),
        format_seconds(row["torch_us"] * 1e-6),
        f"{row['ratio']:.2f}",
        work,
        "–" if each.share is None else f"{each.share:.0%}",
        "–" if each.share is None else band_of(each.share),
    ]


def _slower(rows: Iterable[OpRow], least: float | None) -> Iterator[str]:
    below = sorted((each for each in rows if each.row["ratio"] < 1), key=lambda each: each.row["ratio"])
    if not below:
        yield "Nothing is."
        return
    cells = [_reason_slower(each, least) for each in below]
    yield from markdown_table(("op", "ratio", "reason"), cells, ("op", "reason"))


def _reason_slower(each: OpRow, least: float | None) -> list[str]:
    row, bound = each.row, _lower_bound(each, least)
    if 1 - row["ratio"] <= row["spread"]:
        reason = f"within the spread of the two measurements, {row['spread']:.1%}"
    else:
        is_cut_so = bound is not None and bound.was_noted and bound.share >= EXPLAINED
        reason = known_reason(row["op"]) or ("how it is cut" if is_cut_so else "not known")
        if bound is not None and bound.was_noted:
            reason += f"; here {describe(bound)}"
    return [row["op"], f"{row['ratio']:.3f}", reason]


def _least_kernel(results: Sequence[Result]) -> float | None:
    """Seconds of a kernel inside a graph that does nearly nothing, by the newest measurement."""
    found = None
    for result in results:
        costs = result.data.get(LAUNCH_KEY)
        found = costs["inside a graph"] * 1e-6 if costs else found
    return found


COUNTED = """\
The lower bound of an op's time, given its kernels, is counted: its launches, each at what the kernel took on almost
no data, or at {launch} inside a graph where that was not measured; and its bytes or FLOPs at the limit, a matmul's at
the SM with most of its tiles. This explains a row where it makes {share:.0%} of the time or more: against that
bound the op is good, and short times are uncertain by the rest. Elsewhere the rest is unexplained, unless a reason
is next to it.
"""


def _far(rows: Sequence[OpRow], least: float | None) -> Iterator[str]:
    far = sorted(
        (each for each in rows if each.share is not None and each.share < GOOD), key=lambda each: each.share or 0
    )
    if not far:
        yield "Nothing is."
        return
    if least is not None:
        yield from COUNTED.format(launch=format_seconds(least), share=EXPLAINED).splitlines()
    reasons = [_reason_far(each, least) for each in far]
    explained = sum(each.is_known for each in reasons)
    yield from (f"Of {len(far)} rows {explained} {'is' if explained == 1 else 'are'} explained.", "")
    columns = ("op", "share", "band", "torch's share", "reason")
    cells = [_far_cells(each, reason.text) for each, reason in zip(far, reasons, strict=True)]
    yield from markdown_table(columns, cells, ("op", "band", "reason"))


def _far_cells(each: OpRow, reason: str) -> list[str]:
    share = each.share or 0.0
    theirs = share / each.row["ratio"]
    return [each.row["op"], f"{share:.0%}", band_of(share), f"{theirs:.0%}", reason]


class Reason(NamedTuple):
    """Why a row is far from its limit, and whether that is all there is to say."""

    text: str
    is_known: bool


def _reason_far(each: OpRow, least: float | None) -> Reason:
    reason, bound = known_reason(each.row["op"]), _lower_bound(each, least)
    if bound is None or (reason and not bound.was_noted):
        return Reason(reason or "not known", reason is not None)
    if reason or bound.share >= EXPLAINED:
        return Reason("; ".join(filter(None, (describe(bound), reason))), True)
    return Reason(f"{describe(bound)}; the other {1 - bound.share:.0%} are unexplained", False)


def _lower_bound(each: OpRow, least: float | None) -> LowerBound | None:
    """The least of a row; None where a launch was not measured, or more than the GPU's time counts."""
    if least is None or each.share is None or each.row.get("clock") == "wall":
        return None
    smallest = {name: us * 1e-6 for name, us in each.result.data.get(SMALLEST, {}).items()}
    return lower_bound_of(each.row, each.share, least, smallest)


def _fused(results: Sequence[Result]) -> Iterator[str]:
    found = [result for result in results if FUSED_KEY in result.data]
    if not found:
        return
    result = found[-1]
    yield from fused_ops(result, _newest_copy(results))
    yield ""
    yield f"- {_source(result, [result.data['command']], result.data)}"
    yield f"- Note: {result.data['note']}."


# --- Launches, the CPU ------------------------------------------------------------------------------------------------

LAUNCH_KEY = "microseconds of a 64K-element add"


def _launches(results: Sequence[Result]) -> Iterator[str]:
    found = [result for result in results if LAUNCH_KEY in result.data]
    if not found:
        return
    result = found[-1]
    costs = result.data[LAUNCH_KEY]
    yield from ("## What a call costs the host", "")
    yield from (
        "An addition of 65,536 numbers is over on the GPU before the host has asked for the next one, so its time is",
        "that of Python and the driver. A training step is a CUDA graph and pays it once for all its kernels.",
        "",
    )
    cells = [[name, format_seconds(us * 1e-6)] for name, us in costs.items()]
    yield from markdown_table(("what", "time"), cells, ("what",))
    yield ""
    for what in ("no autograd", "autograd"):
        ours, theirs = costs.get(f"wall, {what}"), costs.get(f"torch, {what}")
        if ours and theirs and theirs < ours:
            reason = known_reason(f"wall, {what}") or "the reason is not known"
            yield f"- Below 1: a call with {what} has the ratio {theirs / ours:.2f}. {reason[0].upper()}{reason[1:]}."
    yield f"- {_source(result, [result.data['command']], result.data)}"


def _cpu(results: Sequence[Result]) -> Iterator[str]:
    found = [result for result in results if "speed_ratio" in result.data and "torch" in result.data]
    if not found:
        return
    result = found[-1]
    data = result.data
    yield from ("## Training on a CPU", "")
    shape, threads = data["shape"], data["machine"]["threads"]
    yield (
        f"The model of the quickstart ({data['genesis']['parameters']:,} parameters), {shape['batch_size']} x"
        f" {shape['seq_len']} tokens a step, {threads} threads, float32."
    )
    yield ""
    columns = ("", "step, median", "shortest", "tokens/s", "peak memory", "version")
    yield from markdown_table(columns, [_cpu_cells(side, data[side]) for side in ("genesis", "torch")], ("", "version"))
    yield ""
    yield f"The ratio is {data['speed_ratio']:.2f} in speed and {data['memory_ratio']:.2f} in memory."
    if data["speed_ratio"] < 1:
        yield f"Below 1: {known_reason('cpu training') or 'the reason is not known'}."
    yield ""
    yield f"- {_source(result, [data['command']], {})}"


def _cpu_cells(side: str, row: Row) -> list[str]:
    times = row["step_ms"]
    return [
        "Genesis" if side == "genesis" else side,
        f"{times['median']:.0f} ms",
        f"{times['min']:.0f} ms",
        f"{row['tokens_per_second']:,.0f}",
        format_bytes(int(row["peak_mib"] * 2**20)),
        row["version"],
    ]


# --- The command ------------------------------------------------------------------------------------------------------


PARTS = (_steps, model_steps, ranks, generation, _ops, _fused, all_ops, _launches, _cpu, cpu_generation)


def main() -> int:
    """Write the page, or say whether it is the one that the results make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is another one")
    options = parser.parse_args()
    files = result_files()
    text = page_of(read_results(files))
    for path in sorted(set(RESULTS.glob("*.json")) - set(files)):
        print(f"left out, git does not know it: {path.name}", file=sys.stderr)
    if options.check:
        same = PAGE.is_file() and PAGE.read_text() == text
        print("up to date" if same else "docs/performance.md is not what the results make: run `make performance`")
        return not same
    PAGE.write_text(text)
    print(f"written: {PAGE.relative_to(REPOSITORY)}, from {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
