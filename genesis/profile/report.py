"""The text of a profile: a table for several cases, a block of details for one. `schema.py` has the same as data."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from genesis.errors import escape
from genesis.profile.format import aligned, format_bytes, format_rate, format_ratio, format_seconds, format_share
from genesis.profile.schema import (
    Backward,
    Dispatch,
    Launch,
    LimitsRow,
    OpReport,
    OpRow,
    Peer,
    Ratio,
    Resources,
    Time,
)

WIDTH = 100
INDENT = 16  # of the text after a title in the details


def render_lines(report: OpReport) -> Iterator[str]:
    """The whole report."""
    yield from _head(report)
    yield ""
    if len(report.rows) == 1:
        yield from _details(report.rows[0])
    elif report.rows:
        yield from _table(report.rows)
        yield ""
        yield from _notes(report.rows)
    for failure in report.failures:
        yield from _titled("failed", f"{failure.name} {failure.label}: {escape(failure.error)}")


# --- Head -------------------------------------------------------------------------------------------------------------


def _head(report: OpReport) -> Iterator[str]:
    yield f"device  {escape(report.device_name)} ({report.device})"
    for limits in report.limits:
        yield from textwrap.wrap(_limits(limits), WIDTH, initial_indent="limits  ", subsequent_indent=" " * 8)


def _limits(limits: LimitsRow) -> str:
    parts = [f"measured now: copy {format_rate(limits.bytes_per_second, 'B/s')}"]
    if limits.flops_per_second is not None:
        parts.append(f"matmul {limits.dtype} {format_rate(limits.flops_per_second, 'FLOP/s')}")
    smallest = format_seconds(limits.call_seconds)
    if limits.kernel_seconds is not None:
        smallest += f" ({format_seconds(limits.kernel_seconds)} on the GPU)"
    return ", ".join([*parts, f"smallest call {smallest}"])


# --- Table ------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[OpRow]) -> Iterator[str]:
    """One line a case; a column that no row fills is left out, and the rate where there is no room for it."""
    cells = [_cells(row) for row in rows]
    lines = list(aligned(cells, LEFT))
    if max(map(len, lines)) > WIDTH:
        lines = list(aligned([{**each, "rate": ""} for each in cells], LEFT))
    yield f"{rows[0].name}, {rows[0].dtype}"
    yield from lines


LEFT = ("case", "share", "cause", "note")  # columns of text; numbers are aligned right


def _cells(row: OpRow) -> dict[str, str]:
    work = (row.flops_per_second, "FLOP/s") if row.limit == "compute" else (row.bytes_per_second, "B/s")
    return {
        "case": row.label,
        "wall ±": f"{format_seconds(row.wall.seconds)} {_percent(row.wall.half_width):>5}",
        "GPU": format_seconds(row.gpu.seconds) if row.gpu else "",
        "backward": _backward_seconds(row.backward),
        "rate": format_rate(*work),
        "share": "" if row.share is None else f"{format_share(row.share):>4} {row.band}",
        "torch": "" if row.peer is None else f"{format_ratio(row.peer.forward.ratio)}x",
        "cause": row.cause,
        "note": "noisy" if row.is_noisy else "",
    }


def _backward_seconds(backward: Backward | None) -> str:
    return "" if backward is None else format_seconds((backward.gpu or backward.wall).seconds)


def _notes(rows: Sequence[OpRow]) -> Iterator[str]:
    """How to read the table, and what would help the slowest of it."""
    device = "GPU" if rows[0].gpu else "wall"
    legend = f"±: half of the 95 % confidence interval of the median; share: of the limit that binds, by {device} time"
    yield from textwrap.wrap(legend, WIDTH)
    if any(row.is_noisy for row in rows):
        yield "noisy: the machine was not quiet; measure again"
    judged = [row for row in rows if row.share is not None]
    if judged:
        worst = min(judged, key=lambda row: row.share or 0.0)
        yield from textwrap.wrap(f"next: {worst.label}: {worst.advice}", WIDTH, subsequent_indent=" " * 6)
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        yield from textwrap.wrap(f"note: {escape(note)}", WIDTH, subsequent_indent=" " * 6)


# --- Details ----------------------------------------------------------------------------------------------------------


def _details(row: OpRow) -> Iterator[str]:
    yield f"{row.name} {row.label}, {row.dtype}: {', '.join(row.inputs) or 'no inputs'}"
    yield from _titled("wall", _time(row.wall))
    if row.gpu is not None:
        yield from _titled("GPU", _time(row.gpu) + (", cold cache" if row.is_cold else ""))
    if row.backward is not None:
        yield from _titled("recording", _recording(row.wall, row.backward))
        yield from _titled("backward", _time(row.backward.wall))
        if row.backward.gpu is not None:
            yield from _titled("backward GPU", _time(row.backward.gpu))
    share = f", {format_share(row.bandwidth_share)} of a copy"
    yield from _titled("moves", f"{format_bytes(row.bytes)}: {format_rate(row.bytes_per_second, 'B/s')}{share}")
    share = "" if row.compute_share is None else f", {format_share(row.compute_share)} of a large matmul"
    yield from _titled(
        "computes", f"{format_rate(row.flops, 'FLOP')}: {format_rate(row.flops_per_second, 'FLOP/s')}{share}"
    )
    if row.intensity is not None and row.ridge is not None:
        side = "compute" if row.intensity > row.ridge else "bandwidth"
        where = f"{row.intensity:.3g} FLOP a byte, the ridge is at {row.ridge:.3g}: {side} is the limit"
        yield from _titled("roofline", where)
    yield from _titled("memory", f"{format_bytes(row.peak_bytes)} beyond the inputs")
    if row.launches is not None:
        yield from _titled("launches", ", ".join(_launch(each) for each in row.launches) or "none")
        yield from _kernels(row.launches)
    if row.backward is not None and row.backward.launches is not None:
        yield from _titled("backward's", ", ".join(_launch(each) for each in row.backward.launches) or "none")
        yield from _kernels(row.backward.launches)
    if row.peer is not None:
        yield from _titled(row.peer.name, _peer(row.peer))
    if row.dispatch is not None:
        yield from _titled("dispatch", _stages(row.dispatch))
    if row.share is not None:
        yield from _titled("band", f"{row.band}: {format_share(row.share)} of the limit that binds")
    yield from _titled("cause", row.cause + (" bound" if row.cause != "autograd" else " cost"))
    yield from _titled("next", row.advice)
    for note in row.notes:
        yield from _titled("note", escape(note))


def _titled(title: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {title:<{INDENT - 2}}", subsequent_indent=" " * INDENT)


def _time(time: Time) -> str:
    """A time with how sure it is."""
    text = f"{format_seconds(time.seconds)} ±{_percent(time.half_width) or '?'}"
    text += f", quartiles {_percent(time.spread)} apart, {time.samples} samples of {time.calls}"
    if time.outliers:
        text += f", {time.outliers} outliers left out"
    return text + (", noisy" if time.is_noisy else "")


def _recording(plain: Time, backward: Backward) -> str:
    """What recording adds, where that is more than the two times are sure of."""
    recorded = backward.recorded
    unsure = math.hypot(*(t.seconds * (t.half_width or 0.0) for t in (plain, recorded)))
    if backward.recording <= unsure:
        return f"adds less to a call of {format_seconds(plain.seconds)} than times are sure of"
    return f"adds {format_seconds(backward.recording)} to a call of {format_seconds(plain.seconds)}"


def _launch(launch: Launch) -> str:
    """The kernel with its grid, without trailing ones."""
    grid = list(launch.grid)
    while len(grid) > 1 and grid[-1] == 1:
        grid.pop()
    return f"{launch.kernel} {'x'.join(map(str, grid))}".strip()


def _kernels(launches: Sequence[Launch]) -> Iterator[str]:
    """What each kernel takes of the GPU, once where several launches take the same."""
    for name, taken in dict.fromkeys((each.kernel, each.resources) for each in launches):
        if taken is not None:
            yield from _titled("", f"{name}: {_taken(taken)}")


def _taken(taken: Resources) -> str:
    """Registers, memory, how full an SM is, and how often they all are filled."""
    shared = taken.shared_static + taken.shared_dynamic
    local = f"{taken.local} bytes of local memory a thread (spills)" if taken.local else "no spills"
    parts = [
        f"{taken.threads} threads, {taken.registers} registers, {format_bytes(shared)} shared, {local}",
        f"{taken.resident} program{'s' * (taken.resident != 1)} an SM, {taken.occupancy:.0%} of its warps"
        f" ({taken.bound_by} bind{'s' * (not taken.bound_by.endswith('s'))})",
        _waves(taken),
    ]
    return "; ".join(parts)


def _waves(taken: Resources) -> str:
    """How the grid fills the SMs: "3.3 waves, the last fills 25%: 19% of the slots stay empty"."""
    if taken.waves <= 1:
        return "one full wave" if taken.waves == 1 else f"one wave, {taken.waves:.0%} full"
    last = taken.waves % 1 or 1.0
    text = f"{taken.waves:.{1 if taken.waves < 100 else 0}f} waves"
    return text if last == 1 else f"{text}, the last {last:.0%} full: {taken.idle:.0%} of all slots stay empty"


def _peer(peer: Peer) -> str:
    """Both times and their ratio, forward and backward."""

    def phrase(ratio: Ratio) -> str:
        ours, theirs = format_seconds(ratio.seconds), format_seconds(ratio.peer_seconds)
        spread = _percent(ratio.spread) if ratio.spread < 1 else f"a factor of {1 + ratio.spread:.1f}"
        noisy = ", noisy" if ratio.is_noisy else ""
        return f"{format_ratio(ratio.ratio)}x (Genesis {ours}, {peer.name} {theirs}, spread {spread}{noisy})"

    threads = "" if peer.threads is None else f", {peer.threads} thread{'s' * (peer.threads != 1)}"
    backward = "" if peer.backward is None else f"; backward {phrase(peer.backward)}"
    return f"{phrase(peer.forward)}{backward}; {peer.name} {peer.version}, {peer.clock} time{threads}"


def _stages(dispatch: Dispatch) -> str:
    stages = {name: seconds for name, seconds in dispatch.model_dump().items() if seconds is not None}
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in stages.items())


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.{0 if share >= 0.1 else 1}%}"
