"""Recorded steps added up: tables by op, module and phase whose rows add up to the step."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from genesis.measure.marks import Kernel
from genesis.measure.memory import Timeline, aggregated
from genesis.measure.run import Recorded, StepRecord
from genesis.measure.spans import IDLE, Key, divided, leaves
from genesis.profile.run.schema import Held, KernelRow, Memory, ModeRow, Sync, TimeRow

HELD = 12
Shares = Mapping[Key, float]


def shares_of(recorded: Recorded, on_gpu: bool) -> dict[Key, float]:
    """Seconds of a mean step by phase, module and op; they add up to its time on the GPU, or to its wall time."""
    total: dict[Key, float] = defaultdict(float)
    for step in recorded.steps:
        found = kernel_shares(step.kernels) if on_gpu else divided(step.frames, step.start, step.end)
        for key, seconds in found.items():
            total[key] += seconds / len(recorded.steps)
    return dict(total)


def kernel_shares(kernels: Sequence[Kernel]) -> dict[Key, float]:
    """Seconds on the GPU from the first kernel's start to the last one's end, the gaps between them as idle."""
    inline = [kernel for kernel in kernels if not kernel.is_concurrent]
    shares: dict[Key, float] = defaultdict(float)
    for kernel in inline:
        shares[Key(kernel.phase, kernel.module, kernel.op)] += kernel.end - kernel.start
    if inline:
        whole = max(k.end for k in inline) - min(k.start for k in inline)
        shares[Key("idle", IDLE, IDLE)] = whole - sum(shares.values())
    return dict(shares)


def mode_row(recorded: Recorded, on_gpu: bool) -> ModeRow:
    """The tables of steps of one kind."""
    steps, shares, host = recorded.steps, shares_of(recorded, on_gpu), _host_seconds(recorded.steps)
    whole, idle = sum(shares.values()), sum(s for key, s in shares.items() if key.phase == "idle")
    plain, profiled = statistics.median(recorded.plain), statistics.median(step.seconds for step in steps)
    calls = _calls(steps, on_gpu and recorded.mode == "captured")

    def rows(name: Callable[[Key], str], counts: Mapping[str, float]) -> list[TimeRow]:
        return _rows(_by(shares, name), _by(host, name), counts, whole, on_gpu)

    return ModeRow(
        mode=recorded.mode,
        steps=len(steps),
        plain_seconds=plain,
        profiled_seconds=profiled,
        overhead=profiled / plain - 1,
        measure="gpu" if on_gpu else "wall",
        seconds=whole,
        attributed=whole - idle,
        idle=idle,
        launched=statistics.mean(step.launched - step.start for step in steps),
        launches=sum(len(step.kernels) for step in steps) / len(steps),
        phases=rows(lambda key: key.phase, {}),
        modules=rows(lambda key: aggregated(key.module), {}),
        ops=rows(lambda key: key.op, calls),
        kernels=_kernel_rows(steps, whole),
        syncs=_syncs(steps),
        notes=recorded.notes,
    )


def _host_seconds(steps: Sequence[StepRecord]) -> dict[Key, float]:
    """Seconds of a mean step on the host, of all threads together."""
    total: dict[Key, float] = defaultdict(float)
    for step in steps:
        threads = defaultdict(list)
        for frame in step.frames:
            threads[frame.thread].append(frame)
        for frames in threads.values():
            for piece in leaves(frames):
                total[piece.frame.key] += (piece.end - piece.start) / len(steps)
    return dict(total)


def _calls(steps: Sequence[StepRecord], from_kernels: bool) -> dict[str, float]:
    """How often each op ran in a mean step; in a graph only its launches are known."""
    if from_kernels:
        counts = Counter(kernel.op for step in steps for kernel in step.kernels)
    else:
        counts = Counter(frame.name for step in steps for frame in step.frames if frame.level == "op")
    return {name: count / len(steps) for name, count in counts.items()}


def _by(shares: Shares, name: Callable[[Key], str]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for key, seconds in shares.items():
        found[name(key)] += seconds
    return found


def _rows(
    shares: Mapping[str, float], host: Mapping[str, float], calls: Mapping[str, float], whole: float, on_gpu: bool
) -> list[TimeRow]:
    """The longest first."""
    rows = [
        TimeRow(
            name=name,
            calls=calls.get(name, 0.0),
            cpu_seconds=host.get(name, 0.0),
            gpu_seconds=shares.get(name, 0.0) if on_gpu else None,
            seconds=shares.get(name, 0.0),
            share=shares.get(name, 0.0) / whole if whole else 0.0,
        )
        for name in {**shares, **host}
    ]
    return sorted(rows, key=lambda row: (-row.seconds, -row.cpu_seconds, row.name))


def _kernel_rows(steps: Sequence[StepRecord], whole: float) -> list[KernelRow]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    counts: Counter[tuple[str, str]] = Counter()
    for kernel in (kernel for step in steps for kernel in step.kernels if not kernel.is_concurrent):
        seconds[kernel.op, kernel.name] += (kernel.end - kernel.start) / len(steps)
        counts[kernel.op, kernel.name] += 1
    rows = [
        KernelRow(op=op, kernel=name, calls=counts[op, name] / len(steps), seconds=each, share=each / whole)
        for (op, name), each in seconds.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def _syncs(steps: Sequence[StepRecord]) -> list[Sync]:
    waits = [wait for step in steps for wait in step.waits]
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for wait in waits:
        seconds[wait.what, wait.line] += wait.seconds / len(steps)
    counts = Counter((wait.what, wait.line) for wait in waits)
    found = [
        Sync(what=what, line=line, count=counts[what, line] / len(steps), seconds=each)
        for (what, line), each in seconds.items()
    ]
    return sorted(found, key=lambda sync: (-sync.seconds, sync.line))


def memory_row(timeline: Timeline) -> Memory:
    """The peak, and who holds memory then."""
    return Memory(
        peak=timeline.peak_bytes,
        pool_peak=timeline.pool_peak,
        peak_phase=timeline.peak_phase,
        peak_seconds=timeline.seconds[timeline.peak],
        categories={category: values[timeline.peak] for category, values in timeline.nbytes.items()},
        lasting={str(category): size for category, size in timeline.persistent.items()},
        held=[
            Held(category=h.category, module=h.module, op=h.op, bytes=h.nbytes, blocks=h.blocks)
            for h in timeline.held[:HELD]
        ],
    )
