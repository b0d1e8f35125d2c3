"""The text of a run's profile: tables whose rows add up, host waits, the peak of memory. `schema.py` has it as data."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence

from genesis.errors import escape
from genesis.measure.cases import kind_of
from genesis.measure.spans import OUTSIDE
from genesis.profile.format import format_bytes, format_seconds, format_share
from genesis.profile.generation import render_generation
from genesis.profile.run.collective_table import render_collectives
from genesis.profile.run.schema import Memory, ModeRow, RunReport, TimeRow

WIDTH = 100
INDENT = 10
PHASES = ("forward", "backward", "optimizer", "collectives", "data", "idle")
WAITING = 0.2  # of a step: more is worth a word
MODULES, OPS, KERNELS, SYNCS = 10, 14, 8, 8  # rows that are shown


def render_lines(report: RunReport) -> Iterator[str]:
    """The lines, in plain text."""
    count = report.threads
    threads = "" if count is None else f", {count} thread{'s' if count > 1 else ''}"
    batches = f"{report.micro_batches} micro-batches of " if report.micro_batches > 1 else ""
    yield f"device    {escape(report.device_name)} ({report.device}{threads})"
    yield f"model     {report.model_type}, {report.parameters:,} parameters, {report.dtype}"
    yield f"step      {batches}{report.batch} rows of {report.length} tokens"
    if report.ranks > 1:
        own = f"{report.micro_batches // report.ranks} of the micro-batches"
        yield f"ranks     {report.ranks}, each with {own}; the tables of a step, and memory, are of rank 0"
    for mode in report.modes:
        yield ""
        yield from _mode(mode)
    yield ""
    if report.collectives:
        yield from _collectives(report)
        yield ""
    yield from _memory(report.memory)
    if report.generation is not None:
        yield ""
        yield "generation"
        yield from render_generation([report.generation])


def _mode(mode: ModeRow) -> Iterator[str]:
    where = "on the GPU, from the first kernel to the last" if mode.measure == "gpu" else "by the clock on the wall"
    yield (f"{mode.mode} step: {format_seconds(mode.seconds)} {where}, mean of {mode.steps}; {_watching(mode)}")
    order = {name: position for position, name in enumerate(PHASES)}
    yield ""
    yield from _table("phase", sorted(mode.phases, key=lambda r: order.get(r.name, len(order))), mode, len(PHASES))
    yield ""
    yield from _table("module", mode.modules, mode, MODULES)
    yield ""
    yield from _table("op", mode.ops, mode, OPS)
    if mode.kernels:
        yield ""
        yield from _kernels(mode)
    yield ""
    yield from _sums(mode)
    yield from _syncs(mode)
    yield from _titled("next", _advice(mode))
    for note in mode.notes:
        yield from _titled("note", escape(note))


def _watching(mode: ModeRow) -> str:
    """What the profile itself costs."""
    return (
        f"{format_seconds(mode.plain_seconds)} unwatched,"
        f" {format_seconds(mode.profiled_seconds)} watched ({mode.overhead:+.0%})"
    )


def _table(title: str, rows: Sequence[TimeRow], mode: ModeRow, most: int) -> Iterator[str]:
    """The first rows, the others together, and the sum."""
    on_gpu = mode.measure == "gpu"
    yield f"{title:<44}{'calls':>8}{'GPU' if on_gpu else 'wall':>11}{'share':>8}{'host':>11}"
    for row in rows[:most]:
        yield _row(row.name, row.calls, row.seconds, row.share, row.cpu_seconds)
    if rest := rows[most:]:
        sums = (sum(r.calls for r in rest), sum(r.seconds for r in rest), sum(r.share for r in rest))
        yield _row(f"{len(rest)} others", *sums, sum(r.cpu_seconds for r in rest))
    whole = sum(r.seconds for r in rows)
    yield _row("total", 0, whole, whole / mode.seconds if mode.seconds else 0.0, sum(r.cpu_seconds for r in rows))


def _row(name: str, calls: float, seconds: float, share: float, host: float) -> str:
    shown = escape(name) if len(name) <= 43 else "…" + escape(name[-42:])
    return f"{shown:<44}{_count(calls):>8}{_seconds(seconds):>11}{share:>8.1%}{_seconds(host):>11}"


def _count(calls: float) -> str:
    return "" if not calls else f"{calls:.0f}" if calls == round(calls) else f"{calls:.1f}"


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0"


def _kernels(mode: ModeRow) -> Iterator[str]:
    yield f"{'kernel':<44}{'calls':>8}{'GPU':>11}{'share':>8}"
    for row in mode.kernels[:KERNELS]:
        name = escape(f"{row.op}/{row.kernel}")
        yield f"{name[:43]:<44}{_count(row.calls):>8}{_seconds(row.seconds):>11}{row.share:>8.1%}"


def _sums(mode: ModeRow) -> Iterator[str]:
    """How much of the step the rows explain, and what the figures are."""
    share = mode.attributed / mode.seconds if mode.seconds else 0.0
    if mode.measure == "wall":
        yield from _titled("sum", f"{share:.1%} of the step has a phase, {mode.idle / mode.seconds:.1%} is idle")
        return
    text = f"{mode.launches:.0f} launches add up to {share:.1%} of the step's time on the GPU; the rest is idle."
    text += f" The host has launched everything after {format_seconds(mode.launched)}"
    if mode.mode == "captured":
        text += ". An event follows every kernel of the graph, so that kernels run one after the other"
    else:
        text += ". Events surround every launch: where the GPU waits for the host, a short kernel's time holds"
        text += " some of that wait"
    yield from _titled("sum", text)


def _syncs(mode: ModeRow) -> Iterator[str]:
    on_gpu = mode.measure == "gpu"
    if not mode.syncs:
        yield from _titled("waits", "the host waits for nothing in a step" if on_gpu else "no values are read")
        return
    count, seconds = sum(s.count for s in mode.syncs), sum(s.seconds for s in mode.syncs)
    what = "the host waits" if on_gpu else "nothing waits on the CPU; values are read"
    yield from _titled("waits", f"{what} {_count(count)} times a step, {format_seconds(seconds)}:")
    for sync in mode.syncs[:SYNCS]:
        yield f"{'':{INDENT}}{_count(sync.count):>4} × {_seconds(sync.seconds):>8}  {sync.what}, {_place(sync.line)}"


def _advice(mode: ModeRow) -> str:
    """What follows from the figures."""
    parts, idle = [], mode.idle / mode.seconds if mode.seconds else 0.0
    outside = next((row.share for row in mode.ops if row.name == OUTSIDE), 0.0)
    if mode.measure == "gpu" and idle > WAITING:
        parts.append(f"the GPU is idle for {idle:.0%} of the step: it waits for the host, as it does not when captured")
    if mode.measure == "gpu" and mode.syncs:
        parts.append("move what makes the host wait out of the step")
    if mode.measure == "wall" and outside > WAITING:
        parts.append(f"Python between ops takes {format_share(outside)}: larger batches make each op do more")
    first = next((row for row in mode.ops if not row.name.startswith("(")), None)
    if first is not None:
        text = f"the longest op is {first.name}, {format_share(first.share)}"
        known = kind_of(first.name) is not None
        parts.append(f"{text}: genesis profile --op {first.name} says what holds it back" if known else text)
    return "; ".join(parts)


def _place(line: str) -> str:
    """file:line, relative to the current folder where it is below it."""
    here = os.getcwd() + os.sep
    return escape(line.removeprefix(here))


def _collectives(report: RunReport) -> Iterator[str]:
    """What ranks send each other, and for how long a step waits for it."""
    exposed = sum(row.exposed for row in report.collectives)
    share = format_share(exposed / report.modes[0].plain_seconds)
    yield from render_collectives(report.collectives)
    yield from _titled("exposed", f"a step waits {_seconds(exposed)} for them, {share} of an unwatched one")


def _memory(memory: Memory) -> Iterator[str]:
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.categories.items() if size)
    when = f"{memory.peak_phase}, {format_seconds(memory.peak_seconds)} into an eager step"
    yield from _titled("memory", f"peak {format_bytes(memory.peak)} in {when}: {parts}")
    for held in memory.held:
        of = f"{held.op} in {held.module}" if held.module else "there before the step"
        blocks = f", {held.blocks} blocks" if held.blocks > 1 else ""
        yield escape(f"{'':{INDENT}}{format_bytes(held.bytes):>11}  {held.category}: {of}{blocks}")


def _titled(title: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{title:<{INDENT}}", subsequent_indent=" " * INDENT)
