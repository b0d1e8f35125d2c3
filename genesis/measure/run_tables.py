"""Recorded steps added up: tables by phase, module, op and kernel whose rows add up to the step, waits and memory."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from genesis.measure.memory import Timeline
from genesis.measure.record import Column, Table, format_seconds, format_share, table
from genesis.measure.recorder import NOTHING, OUTSIDE, Key, aggregated, by_key
from genesis.measure.run import Recorded
from genesis.measure.session import Recording

PHASES = ("forward", "backward", "optimizer", "collectives", "data", "idle")
WAITING = 0.2  # of a step: more is worth a word
MOST = 12  # rows of a table that are shown to people


class Part(NamedTuple):
    """A phase, module, op, kernel or wait; means of the recorded steps.

    Attributes:
        name: of a wait, its line.
        seconds: what adds up to the step.
        host: seconds on the host.
        of: the op of a kernel; what waits.
    """

    name: str
    calls: float
    seconds: float
    share: float
    host: float = 0.0
    of: str = ""


class Sums:
    """Steps of one kind, added up.

    Attributes:
        shares: seconds of a mean step by (phase, module, op); they add up to `whole`, which is its wall time, or on a
            GPU the time from the first kernel's start to the last one's end.
        host: the same on the host.
        idle: seconds without a phase.
    """

    def __init__(self, recorded: Recorded, on_gpu: bool) -> None:
        self.recorded, self.on_gpu = recorded, on_gpu
        self.host, gpu, count = defaultdict[Key, float](float), defaultdict[Key, float](float), len(recorded.steps)
        for step in recorded.steps:
            for key, seconds in by_key(step.frames, step.start, step.end).items():
                self.host[key] += seconds / count
            kernels = [kernel for kernel in step.kernels if not kernel.is_concurrent]
            for kernel in kernels:
                gpu[Key(kernel.phase, kernel.module, kernel.op)] += (kernel.end - kernel.start) / count
                gpu[NOTHING] -= (kernel.end - kernel.start) / count
            if kernels:
                gpu[NOTHING] += (max(k.end for k in kernels) - min(k.start for k in kernels)) / count
        self.shares = gpu if on_gpu else self.host
        self.whole, self.idle = sum(self.shares.values()), self.shares.get(NOTHING, 0.0)
        self.plain = statistics.median(recorded.plain)
        self.watched = statistics.median(step.seconds for step in recorded.steps)

    def parts(self, name: Callable[[Key], str], calls: Mapping[str, float] | None = None) -> list[Part]:
        """The time by a name of each key, the longest first."""
        seconds, host = Counter[str](), Counter[str]()
        for into, shares in ((seconds, self.shares), (host, self.host)):
            for key, each in shares.items():
                into[name(key)] += each  # type: ignore[assignment]
        found = [
            Part(each, (calls or {}).get(each, 0.0), s := seconds.get(each, 0.0), self.share(s), host.get(each, 0.0))
            for each in {**seconds, **host}
        ]
        return sorted(found, key=lambda part: (-part.seconds, -part.host, part.name))

    def share(self, seconds: float) -> float:
        """Of the step."""
        return seconds / self.whole if self.whole else 0.0

    def mean(self, values: Callable[[Recording], float]) -> float:
        """Over steps."""
        return statistics.fmean(map(values, self.recorded.steps))

    def calls(self) -> dict[str, float]:
        """How often each op ran in a mean step; in a graph only its launches are known."""
        steps = self.recorded.steps
        if self.on_gpu and self.recorded.mode == "captured":
            counts = Counter(kernel.op for step in steps for kernel in step.kernels)
        else:
            counts = Counter(frame.name for step in steps for frame in step.frames if frame.level == "op")
        return {name: count / len(steps) for name, count in counts.items()}

    def kernels(self) -> list[Part]:
        """The longest first; those beside the step's own work are left out."""
        kernels = (kernel for step in self.recorded.steps for kernel in step.kernels if not kernel.is_concurrent)
        return self._grouped((k.op, k.name, k.end - k.start) for k in kernels)

    def waits(self) -> list[Part]:
        """The longest first."""
        return self._grouped((w.what, w.line, w.seconds) for step in self.recorded.steps for w in step.waits)

    def _grouped(self, each: Iterable[tuple[str, str, float]]) -> list[Part]:
        found, count = defaultdict[tuple[str, str], list[float]](list), len(self.recorded.steps)
        for of, name, seconds in each:
            found[of, name].append(seconds)
        parts = [
            Part(name, len(times) / count, s := sum(times) / count, self.share(s), of=of)
            for (of, name), times in found.items()
        ]
        return sorted(parts, key=lambda part: (-part.seconds, part.name))


# --- Columns ----------------------------------------------------------------------------------------------------------

STEP = (
    Column("mode", "step", "text", "Captured: as a CUDA graph; eager: op by op.", lambda s: s.recorded.mode),
    Column("measure", "measured", "text", "gpu: first kernel's start to last one's end; wall: clock.",
           lambda s: "gpu" if s.on_gpu else "wall"),
    Column("seconds", "time", "s", "What the rows of other tables add up to; a mean.", lambda s: s.whole),
    Column("steps", "recorded", "count", "Steps, and as many unwatched.", lambda s: len(s.recorded.steps)),
    Column("plain_seconds", "unwatched", "s", "Median wall time of a step that nobody watches.", lambda s: s.plain),
    Column("profiled_seconds", "watched", "s", "Median wall time of a recorded step.", lambda s: s.watched),
    Column("overhead", "overhead", "share", "Watched over unwatched, less 1.", lambda s: s.watched / s.plain - 1),
    Column("attributed", "attributed", "s", "The part that has a phase.", lambda s: s.whole - s.idle),
    Column("idle", "idle", "s", "The rest.", lambda s: s.idle),
    Column("launches", "launches", "count", "Kernels, copies and fills of a step.",
           lambda s: s.mean(lambda step: len(step.kernels)) if s.on_gpu else None),
    Column("launched", "host done", "s", "When all was launched.",
           lambda s: s.mean(lambda step: step.launched - step.start) if s.on_gpu else None),
)  # fmt: skip


def _part_columns(name: str, on_gpu: bool) -> tuple[Column, ...]:
    return (
        Column("name", name, "text", "Layers' numbers are a star; brackets: no op or module.", lambda part: part.name),
        Column("calls", "calls", "count", "Of an op in a step.", lambda part: part.calls or None),
        Column("seconds", "GPU" if on_gpu else "wall", "s", "Adds up to the step.", lambda part: part.seconds),
        Column("share", "share", "share", "Of the step.", lambda part: part.share),
        Column("cpu_seconds", "host", "s", "Time on the host.", lambda part: part.host or None, hidden=not on_gpu),
    )  # fmt: skip


KERNELS = (
    Column("op", "op", "text", "That launches the kernel.", lambda part: part.of),
    Column("kernel", "kernel", "text", "As Triton or CUDA C++ names it.", lambda part: part.name),
    Column("calls", "calls", "count", "In a step.", lambda part: part.calls),
    Column("seconds", "GPU", "s", "In a step.", lambda part: part.seconds),
    Column("share", "share", "share", "Of the step's time on the GPU.", lambda part: part.share),
)
WAITS = (
    Column("count", "times", "count", "In a step.", lambda part: part.calls),
    Column("seconds", "host", "s", "In a step.", lambda part: part.seconds),
    Column("what", "what", "text", "What the host waits for, or reads.", lambda part: part.of),
    Column("line", "line", "text", "Innermost caller outside the framework.",
           lambda part: part.name.removeprefix(os.getcwd() + os.sep)),
)  # fmt: skip
MEMORY = (
    Column("category", "memory", "text", "Activations: left by forward; workspace: comes and goes.",
           lambda row: row[0]),
    Column("peak", "at the peak", "bytes", "Bytes of the category when the sum is highest.", lambda row: row[1]),
    Column("before", "before the step", "bytes", "That lasts.", lambda row: row[2]),
)  # fmt: skip
HELD = (
    Column("bytes", "held", "bytes", "At the peak.", lambda held: held.nbytes),
    Column("category", "category", "text", "As in the table of memory.", lambda held: held.category),
    Column("module", "module", "text", "That took it; empty for what was there before.", lambda held: held.module),
    Column("op", "op", "text", "That took it.", lambda held: held.op),
    Column("blocks", "blocks", "count", "Blocks of the pool.", lambda held: held.blocks or None),
)


def step_tables(recorded: Sequence[Recorded], on_gpu: bool) -> Iterator[Table]:
    """The tables of steps of each kind: times, phases, modules, ops, kernels, waits."""
    sums = [Sums(each, on_gpu) for each in recorded]
    yield table("steps", "", STEP, sums, listed=True)
    for each in sums:
        mode = each.recorded.mode
        order = {name: position for position, name in enumerate(PHASES)}
        phases = sorted(each.parts(lambda key: key.phase), key=lambda part: order.get(part.name, len(order)))
        ops = each.parts(lambda key: key.op, each.calls())
        named = {"phases": phases, "modules": each.parts(lambda key: aggregated(key.module)), "ops": ops}
        for name, parts in named.items():
            columns = _part_columns(name.removesuffix("s"), on_gpu)
            yield table(f"{mode}-{name}", f"{name} of the {mode} step", columns, parts, most=MOST)
        if on_gpu:
            yield table(f"{mode}-kernels", f"kernels of the {mode} step", KERNELS, each.kernels(), most=MOST)
        waits = table(f"{mode}-waits", f"waits of the {mode} step", WAITS, each.waits(), most=MOST)
        waits.notes = [*_advice(each, ops, bool(waits.rows)), *each.recorded.notes]
        if not waits.rows:
            waits.title += ": the host waits for nothing" if on_gpu else ": no values are read"
        yield waits


def _advice(sums: Sums, ops: Sequence[Part], waits: bool) -> Iterator[str]:
    """What the figures say about the step as a whole."""
    idle, outside = sums.share(sums.idle), next((part.share for part in ops if part.name == OUTSIDE), 0.0)
    if sums.on_gpu and sums.recorded.mode == "captured":
        yield "An event follows every kernel of the graph, so that kernels run one after the other."
    elif sums.on_gpu:
        yield "Where the GPU waits for the host, a short kernel's time holds some of that wait."
    if sums.on_gpu and idle > WAITING:
        yield f"The GPU is idle for {idle:.0%} of the step: it waits for the host, as it does not when captured."
    if sums.on_gpu and waits:
        yield "Move what makes the host wait out of the step."
    if not sums.on_gpu and outside > WAITING:
        yield f"Python between ops takes {format_share(outside)}: larger batches make each op do more."
    first = next((part for part in ops if not part.name.startswith("(")), None)
    if first is not None:
        what = f"The longest op is {first.name}, {format_share(first.share)}"
        yield f"{what}: genesis profile --op {first.name} says what holds it back."


def memory_tables(timeline: Timeline) -> Iterator[Table]:
    """The peak of a step's memory by category, and who holds it."""
    peak, before = timeline.samples[timeline.peak][1], timeline.samples[0][1]
    rows = [(category, peak[category], before[category]) for category in peak]
    found = table("memory", "memory", MEMORY, [*rows, ("sum", sum(peak.values()), sum(before.values()))])
    when = f"The peak is in {timeline.peak_phase}, {format_seconds(timeline.samples[timeline.peak][0])} into a step."
    found.notes = [when]
    yield found
    yield table("held", "memory held at the peak", HELD, timeline.held, most=MOST)
