"""The profiled steps as a Chrome trace, which Perfetto and chrome://tracing open: rows of the host and of the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from genesis.profile.run.marks import Kernel
from genesis.profile.run.measure import Recorded, StepRecord
from genesis.profile.run.spans import Frame

__all__ = ["chrome_trace"]

HOST, GPU = 1, 2  # processes
STEPS, COMPUTE, COPIES = 0, 0, 1  # rows


def chrome_trace(recorded: Sequence[Recorded]) -> bytes:
    """The trace as JSON. Times are microseconds since the first step began."""
    steps = [step for each in recorded for step in each.steps]
    begin = min(min(step.start, step.marked) for step in steps)
    threads = list(dict.fromkeys(frame.thread for step in steps for frame in step.frames))
    rows = {thread: row for row, thread in enumerate(threads, STEPS + 1)}
    has_gpu = any(step.kernels for step in steps)
    events = list(_names(rows.values(), has_gpu))
    for each in recorded:
        for number, step in enumerate(each.steps, 1):
            events.append(_event(f"{each.mode} step {number}", "step", HOST, STEPS, step.start, step.end, begin))
            events += _in_step(step, rows, begin)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")).encode()


def _names(rows: Iterable[int], has_gpu: bool) -> Iterator[dict[str, Any]]:
    yield _name("process_name", HOST, STEPS, "host")
    yield _name("thread_name", HOST, STEPS, "steps")
    for row in rows:
        yield _name("thread_name", HOST, row, f"thread {row}: phases, modules, ops")
    if has_gpu:
        yield _name("process_name", GPU, COMPUTE, "GPU")
        yield _name("thread_name", GPU, COMPUTE, "kernels")
        yield _name("thread_name", GPU, COPIES, "beside: other streams")


def _name(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def _in_step(step: StepRecord, rows: dict[int, int], begin: float) -> Iterator[dict[str, Any]]:
    for frame in sorted(step.frames, key=lambda f: (f.start, -f.end)):
        yield _event(frame.name, frame.level, HOST, rows[frame.thread], frame.start, frame.end, begin, _of(frame))
    for wait in step.waits:
        yield _event(wait.what, "wait", HOST, STEPS, wait.start, wait.start + wait.seconds, begin, {"line": wait.line})
    for kernel in step.kernels:
        row, start = COPIES if kernel.beside else COMPUTE, step.marked + kernel.start
        end = step.marked + kernel.end
        yield _event(kernel.name, "kernel", GPU, row, start, end, begin, _of(kernel))


def _of(what: Frame | Kernel) -> dict[str, Any]:
    of = {"op": what.op, "grid": list(what.grid), "shapes": what.shapes} if isinstance(what, Kernel) else {}
    return {"phase": what.phase, "module": what.module, **of}


def _event(
    name: str, kind: str, process: int, row: int, start: float, end: float, begin: float, args: Any = None
) -> dict[str, Any]:
    """A complete event. Both ends are rounded to nanoseconds, so that what nests goes on nesting."""
    first, last = round((start - begin) * 1e9), round((end - begin) * 1e9)
    event = {"name": name, "cat": kind, "ph": "X", "ts": first / 1e3, "dur": (last - first) / 1e3}
    return {**event, "pid": process, "tid": row, **({"args": args} if args else {})}
