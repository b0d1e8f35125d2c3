"""The text of a report about training steps: a table, and what it says. `schema.py` has the same as data."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence

from genesis.errors import escape
from genesis.profile.collective_table import render_collectives
from genesis.profile.format import aligned, format_bytes, format_rate, format_seconds, format_share
from genesis_cli.session.bench.schema import (
    Breakdown,
    Doubling,
    Memory,
    OpShare,
    PeerStep,
    Report,
    Row,
    Scaling,
    SharedStep,
)

WIDTH = 100
INDENT = 10  # of what follows a title
OPS = 12  # of a step are listed; the others are added up
PRIORITIES = 3


def render_lines(report: Report) -> Iterator[str]:
    """The whole report."""
    yield from _head(report)
    if report.rows:
        yield ""
        yield from _table(report.rows)
        yield ""
        yield from _legend(report)
        yield from _findings(report)
        for row in report.rows:
            if row.breakdown is not None:
                yield from render_breakdown(row.label, row.breakdown)
    if report.shared:
        yield from _shared(report)
    if report.peers:
        yield from _against(report.peers, "interleaved" if report.ranks == 1 else f"{report.ranks} ranks each")
    for failure in report.failures:
        yield from titled("failed", f"{failure.label}: {escape(failure.error)}")


def titled(title: str, text: str) -> list[str]:
    """A paragraph beside its title."""
    return textwrap.wrap(text, WIDTH, initial_indent=title.ljust(INDENT), subsequent_indent=" " * INDENT)


# --- Head -------------------------------------------------------------------------------------------------------------


def _head(report: Report) -> Iterator[str]:
    settings, model, limits = report.settings, report.model, report.limits
    threads = "" if settings.threads is None else f", {settings.threads} thread{'s' * (settings.threads != 1)}"
    yield from titled("device", f"{escape(report.device_name)} ({report.device}{threads})")
    if limits.flops_per_second is not None:
        matmul = format_rate(limits.flops_per_second, "FLOP/s")
        yield from titled("limit", f"matmul {limits.dtype} {matmul}, measured now")
    yield from titled(
        "model",
        f"{escape(model.size)}: {model.model_type}, {model.parameters:,} parameters, {settings.dtype},"
        f" {settings.optimizer}, checkpointing {settings.checkpointing}",
    )


# --- Table ------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each batch and length."""
    yield from aligned([_cells(row) for row in rows], LEFT)


LEFT = ("case", "note")  # columns of text; figures are aligned to the right


def _cells(row: Row) -> dict[str, str]:
    phases, half_width = row.phases, row.step.half_width
    sure = "?" if half_width is None else _percent(half_width)
    return {
        "case": row.label,
        "step ±": f"{format_seconds(row.step.seconds)} {sure:>5}",
        "forward": format_seconds(phases.forward.seconds),
        "backward": format_seconds(phases.backward.seconds),
        "optimizer": format_seconds(phases.optimizer.seconds),
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "FLOP/s": format_rate(row.flops_per_second, "").strip(),
        "MFU": "" if row.mfu is None else _percent(row.mfu),
        "memory": format_bytes(row.memory.peak),
        "note": "noisy" if row.step.is_noisy else "",
    }


def _percent(share: float) -> str:
    return f"{share:.{0 if share >= 0.1 else 1}%}"


def _legend(report: Report) -> Iterator[str]:
    """How to read the table."""
    how = "case: rows x tokens of a batch; ±: half of the 95 % confidence interval of the median"
    if report.settings.threads is None:
        how += "; step: a CUDA graph, as in `genesis train`; phases: its time on the GPU, by events inside"
    else:
        how += "; step: as in `genesis train`, on all threads"
    yield from textwrap.wrap(how + "; forward: with the head's gradients, which the loss makes", WIDTH)
    formula = f"FLOP/s: {report.formula}, N parameters, L layers, h the width of all heads, S the length;"
    yield from textwrap.wrap(f"{formula} MFU: the share of the matmul's", WIDTH)
    if any(row.step.is_noisy for row in report.rows):
        again = "measure again" + (", without --fast" if report.settings.is_fast else "")
        yield f"noisy: the machine was not quiet, or the time was too short; {again}"


# --- What it says -----------------------------------------------------------------------------------------------------


def _findings(report: Report) -> Iterator[str]:
    """Memory and phases of the largest case, and what growing costs."""
    largest = max(report.rows, key=lambda row: (row.batch * row.length, row.length))
    yield from titled("memory", f"{largest.label}: {_memory(largest.memory)}")
    for _, group in itertools.groupby(report.scaling, key=lambda s: (s.axis, s.fixed)):
        yield from titled("scaling", _scaling(list(group)))
    (first, share), *others = sorted(largest.phases.shares.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{name} {format_share(part)}" for name, part in others)
    yield from titled("priority", f"{largest.label}: {first} takes most, {format_share(share)} of the phases; {rest}")
    for doubling in report.doublings:
        yield from titled("doubling", _doubling(doubling))
    for note in dict.fromkeys(note for row in report.rows for note in row.notes):
        yield from titled("note", escape(note))


def _memory(memory: Memory) -> str:
    parts = {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer")}
    parts["activations and workspace"] = memory.rest
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    if memory.planned is not None:
        planned = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.planned.items())
        text += f"; planned {format_bytes(sum(memory.planned.values()))}: {planned}"
    return text


def _scaling(steps: Sequence[Scaling]) -> str:
    """The ratios along one axis: "length 128: time of a token ×0.71 from batch 1 to 2"."""
    axis, fixed = steps[0].axis, steps[0].fixed
    other = "length" if axis == "batch" else "batch"
    ratios = ", ".join(f"×{s.ratio:.2f} from {axis} {s.start} to {s.end}" for s in steps)
    return f"{other} {fixed}: time of a token {ratios}"


def _doubling(found: Doubling) -> str:
    """What twice as much would take: "batch 8: 43.1 ms a step, 38,000 tokens/s; 31.2 GiB of 139.0 GiB: it fits"."""
    verdict = "it fits" if found.fits else "it does not fit"
    return (
        f"{found.batch}x{found.length}, twice the {found.axis}: about {format_seconds(found.seconds)} a step,"
        f" {found.tokens_per_second:,.0f} tokens/s; {format_bytes(found.memory)} of {format_bytes(found.room)}:"
        f" {verdict}"
    )


# --- Ops --------------------------------------------------------------------------------------------------------------


def render_breakdown(label: str, found: Breakdown) -> Iterator[str]:
    """A step by op: the longest ops, what the others take, and which to improve first."""
    yield ""
    shown, others = found.ops[:OPS], found.ops[OPS:]
    cells = [_op_cells(each, found) for each in shown]
    for name, seconds, calls in (
        (f"other ops ({len(others)})", sum(each.seconds for each in others), sum(each.calls for each in others)),
        ("between ops", found.rest, 0),
    ):
        if seconds:
            cells.append(_cells_of(name, str(calls or ""), seconds, found))
    cells.append(_cells_of(f"step {label}", "", found.seconds, found))
    yield from aligned(cells, ("op", "limit"))
    legend = (
        "op: of one step, measured by itself; above: the time beyond what the op's bytes or FLOPs take at the measured"
        " limits"
    )
    yield from textwrap.wrap(legend, WIDTH)
    for each in found.priorities[:PRIORITIES]:
        yield from titled("improve", _priority(each, found))


def _cells_of(
    name: str, calls: str, seconds: float, found: Breakdown, limit: str = "", above: str = ""
) -> dict[str, str]:
    time = format_seconds(seconds)
    return {
        "op": name,
        "calls": calls,
        "time": time,
        "share": _percent(seconds / found.seconds),
        "limit": limit,
        "above": above,
    }


def _op_cells(each: OpShare, found: Breakdown) -> dict[str, str]:
    limit = "" if each.limit is None else f"{_percent(each.least / each.seconds)} {each.limit}"
    return _cells_of(each.op, str(each.calls), each.seconds, found, limit, format_seconds(each.above))


def _priority(each: OpShare, found: Breakdown) -> str:
    reached = "" if each.limit is None else f" ({_percent(each.least / each.seconds)} of its {each.limit} limit)"
    return (
        f"{each.op}: {format_seconds(each.above)} above its limit{reached},"
        f" {_percent(each.above / found.seconds)} of the step"
    )


# --- Ranks ------------------------------------------------------------------------------------------------------------


def _shared(report: Report) -> Iterator[str]:
    """One line for each batch and length, and the largest case's memory."""
    yield ""
    above = "; the table above is of one rank alone" if report.rows else ""
    yield f"{report.ranks} ranks, each with a batch of its own{above}"
    yield from aligned([_shared_cells(row, report.ranks) for row in report.shared], LEFT)
    how = (
        "step: of the slowest rank; scaling: tokens/s of a rank, as a share of one rank's alone; exposed: in which a"
        " step waits for collectives; MFU, memory: of a rank"
    )
    yield from textwrap.wrap(how, WIDTH)
    largest = max(report.shared, key=lambda row: (row.batch * row.length, row.length))
    for rank, (memory, seconds) in enumerate(zip(largest.memory, largest.rank_seconds, strict=True)):
        text = f"{largest.label}: {format_seconds(seconds)} a step; {_memory(memory)}"
        yield from titled(f"rank {rank}", text)
    for note in dict.fromkeys(note for row in report.shared for note in row.notes):
        yield from titled("note", escape(note))
    if largest.collectives:
        yield from _collectives(largest, report.rows)


def _shared_cells(row: SharedStep, ranks: int) -> dict[str, str]:
    half_width = row.step.half_width
    sure = "?" if half_width is None else _percent(half_width)
    return {
        "case": row.label,
        "step ±": f"{format_seconds(row.step.seconds)} {sure:>5}",
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "a rank": f"{row.tokens_per_second / ranks:,.0f}",
        "scaling": "" if row.scaling is None else f"{row.scaling:.1%}",
        "FLOP/s": format_rate(row.flops_per_second, "").strip(),
        "MFU": "" if row.mfu is None else _percent(row.mfu),
        "exposed": format_seconds(row.exposed) if row.collectives else "",
        "memory": format_bytes(max(each.peak for each in row.memory)),
        "note": "noisy" if row.step.is_noisy else "",
    }


def _collectives(row: SharedStep, alone: Sequence[Row]) -> Iterator[str]:
    """What ranks send each other in a step, and what the step's own work takes meanwhile."""
    yield ""
    yield from render_collectives(row.collectives, f"a step, {row.label}")
    before = [one.phases.forward.seconds + one.phases.backward.seconds for one in alone if one.label == row.label]
    if row.computing is not None and before:
        share = f"{row.computing / before[0] - 1:+.1%}"
        times = f"{format_seconds(row.computing)} in ranks, {format_seconds(before[0])} alone ({share})"
        yield from titled("compute", f"forward and backward: {times}")


# --- Peers ------------------------------------------------------------------------------------------------------------


def _against(peers: Sequence[PeerStep], how: str) -> Iterator[str]:
    """One line for each recipe, batch and length."""
    yield ""
    yield f"against torch {peers[0].version}, {how}; ratio above 1: Genesis is faster"
    done = [each for each in peers if each.ratio is not None]
    if done:
        yield from aligned([_peer_cells(each) for each in done], ("recipe", "case", "note"))
    for each in peers:
        if each.note:
            yield from titled("note", f"{each.recipe} {each.label}: {escape(each.note)}")


def _peer_cells(each: PeerStep) -> dict[str, str]:
    ratio = each.ratio
    assert ratio is not None
    return {
        "recipe": each.recipe,
        "case": each.label,
        "Genesis": format_seconds(ratio.seconds),
        "torch": format_seconds(ratio.peer_seconds),
        "ratio": f"{ratio.ratio:.2f}",
        "spread": _percent(ratio.spread),
        "memory": "" if each.peak is None else format_bytes(each.peak),
        "torch's memory": "" if each.peer_peak is None else format_bytes(each.peer_peak),
        "warm-up": "" if each.warm_up is None else format_seconds(each.warm_up),
        "note": "noisy" if ratio.is_noisy else "",
    }
