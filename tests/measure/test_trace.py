"""The Chrome trace, held against its format by a reader as strict as the tools that open it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from genesis.backend import CPU, Device
from genesis.measure.recorder import Frame
from genesis.measure.run import recorded_steps
from genesis.measure.session import Kernel, Recording
from genesis.measure.trace import chrome_trace, collapsed
from tests.measure.runs import captured_subject, subject

CUDA = Device("cuda", 0)
Placed = dict[str, list[tuple[int, str, int, int]]]  # by row: depth, name, start and end in nanoseconds


def read(content: bytes) -> Placed:
    """The spans of a trace, as Perfetto 52 and the Trace Event Format have it; AssertionError where one would be lost.

    Perfetto drops a complete event that ends after the one around it, and files thread 0 under its process's number.
    """
    document = json.loads(content, parse_constant=_no_number)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "C"}, "only names, complete events and counters"
    for event in (event for event in events if event["ph"] == "C"):
        assert event["name"] and type(event["pid"]) is int and _nanoseconds(event["ts"]) >= 0
        assert event["args"] and all(isinstance(value, int) for value in event["args"].values()), "a counter is numbers"
    names = _named([event for event in events if event["ph"] == "M"])
    found: Placed = {name: [] for name in names.values()}
    open_: dict[str, list[int]] = {name: [] for name in names.values()}  # ends
    # Readers sort by the beginning alone: of two that begin together the outer one stands first in the file.
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        row = names.get((event["pid"], event["tid"]))
        assert row is not None, f"a row without a name: {event}"
        assert all(isinstance(event[key], str) and event[key] for key in ("name", "cat")), "a name and a kind"
        assert isinstance(event.get("args", {}), dict)
        start, length = _nanoseconds(event["ts"]), _nanoseconds(event["dur"])
        ends = open_[row]
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or start + length <= ends[-1], f"ends after what it lies in: {event}"
        found[row].append((len(ends), event["name"], start, start + length))
        ends.append(start + length)
    assert all(found.values()), "a row that holds nothing"
    return found


def _no_number(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not JSON")


def _named(events: Sequence[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Names of the rows; each row and each process has one."""
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    rows = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(processes) + len(rows) == len(events), "a name of something else"
    assert sorted(processes) == sorted({pid for pid, _ in rows}), "each process has one name"
    numbers = [tid for _, tid in rows]
    assert len(set(numbers)) == len(numbers), "two rows with one number"
    assert all(type(number) is int and number > 0 for number in [*processes, *numbers]), "numbers begin at 1"
    names = [event["args"]["name"] for event in events]
    assert all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}


def _nanoseconds(microseconds: object) -> int:
    """What a reader keeps; the fraction must be whole nanoseconds."""
    assert isinstance(microseconds, int | float) and not isinstance(microseconds, bool), "a time is a number"
    assert microseconds >= 0, "a time before the beginning"
    whole = round(microseconds * 1000)
    assert abs(microseconds * 1000 - whole) < 1e-2, "times are whole nanoseconds"
    return whole


# --- The reader itself ------------------------------------------------------------------------------------------------


def _document(*spans: tuple[float, float], pid: int = 1, tid: int = 2, **changes: Any) -> bytes:
    names = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": "host"}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": "row"}},
    ]
    event = {"pid": pid, "tid": tid, "name": "a", "cat": "op", "ph": "X", **changes}
    events = [*names, *({"ts": start, "dur": length, **event} for start, length in spans)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


def test_the_reader_takes_what_nests() -> None:
    assert [depth for depth, *_ in read(_document((0, 10), (0, 4), (1, 3), (4, 6), (10, 1)))["row"]] == [0, 1, 2, 1, 0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (_document((0, 10), (5, 10)), "ends after"),
        (_document((0, 4), (0, 10)), "ends after"),  # the inner one first
        (_document((0, 10), (9.999, 0.002)), "ends after"),
        (_document((0, 1), tid=0), "begin at 1"),
        (_document((0, 1), ph="B"), "complete events"),
        (_document((0, float("nan"))), "not JSON"),
        (_document((0, -1)), "a time"),
        (_document((0, 1e-4)), "whole nanoseconds"),
        (_document((0, 1), name=""), "a name and a kind"),
        (_document(), "holds nothing"),
        (_document((0, 1)).replace(b'"tid": 2, "name": "a"', b'"tid": 3, "name": "a"'), "without a name"),
        (_document((0, 1)).replace(b"process_name", b"thread_name"), "one name"),
    ],
)
def test_the_reader_refuses(content: bytes, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        read(content)


# --- What is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_trace_holds_all_that_was_recorded(device: Device) -> None:
    under = subject(device, reads=lambda x: x.sum().item())
    named = [(f"eager step {n}", step) for n, step in enumerate(recorded_steps(under, 2, 1), 1)]
    if device != CPU:
        steps = recorded_steps(captured_subject(device), 2, 3)
        named += [(f"captured step {n}", step) for n, step in enumerate(steps, 1)]
    (memory_step,) = recorded_steps(under, 1, 0, has_memory=True)
    changes = memory_step.tracks[0].changes
    content = trace_of([*named, ("memory", memory_step)])
    rows = read(content)
    named.append(("memory", memory_step))
    steps = [step for _, step in named]
    assert set(rows) == {"steps", "thread 1: phases, modules, ops"} | ({"kernels"} if device != CPU else set())
    assert [name for _, name, *_ in rows["steps"]] == [name for name, _ in named]
    assert {depth for depth, *_ in rows["steps"]} == {0}
    host = rows["thread 1: phases, modules, ops"]
    names = [frame.name for step in steps for frame in step.frames]
    assert sorted(name for _, name, *_ in host) == sorted(names)
    assert names.count("values read on the host") == (3 if device == CPU else 2)
    assert {depth for depth, name, *_ in host if name in ("data", "forward", "optimizer")} == {0}
    # A wait stands in the phase that waits.
    phases = [(start, end) for depth, name, start, end in host if depth == 0 and name == "forward"]
    waits = [(start, end) for _, name, start, end in host if name == "values read on the host"]
    assert all(any(a <= start and end <= b for a, b in phases) for start, end in waits)
    kernels = [kernel.name for step in steps for kernel in step.kernels]
    assert sorted(name for _, name, *_ in rows.get("kernels", [])) == sorted(kernels)
    for step, (_, _, start, end) in zip(steps, rows["steps"], strict=True):
        assert end - start == pytest.approx(step.seconds * 1e9, abs=1.1)
    counters = [event["args"] for event in json.loads(content)["traceEvents"] if event["ph"] == "C"]
    assert counters == [{"allocated": change.allocated} for change in changes] and len(counters) > 10


def trace_of(named: Sequence[tuple[str, Recording]]) -> bytes:
    return chrome_trace([step for _, step in named], [(name, step.start, step.end) for name, step in named])


def _step(frames: Sequence[Frame] = (), kernels: Sequence[Kernel] = ()) -> list[tuple[str, Recording]]:
    return [("step", Recording(100.0, 101.0, 101.0, [*frames], [*kernels], 100.0))]


def test_stacks_are_lines_that_flamegraph_pl_reads() -> None:
    stacks = {("forward", "a;b c", "x\ny"): 2e-3, ("idle",): 4e-7, ("backward",): 1.5e-6}
    assert collapsed(stacks) == b"backward 2\nforward;a_b_c;x\\ny 2000\n"


def test_threads_that_wait_at_the_same_time_have_rows_of_their_own() -> None:
    waits = [Frame("wait", "read", "", "", 100.1 + i / 10, 100.4, i, lines=("a.py:1",)) for i in range(2)]
    rows = read(trace_of(_step(waits)))
    assert [len(row) for row in rows.values()] == [1, 1, 1]


def test_of_equal_frames_the_outer_one_comes_first() -> None:
    inner, outer = (Frame("op", name, "forward", "m", 100.7, 100.8, 7) for name in ("inner", "outer"))
    rows = read(trace_of(_step([inner, outer])))  # recorded as they ended
    found = [(depth, name) for depth, name, *_ in rows["thread 1: phases, modules, ops"]]
    assert found == [(0, "outer"), (1, "inner")]


def test_kernels_of_other_streams_have_rows_of_their_own() -> None:
    times = [(0.0, 0.4, 0), (0.1, 0.3, 1), (0.2, 0.5, 2), (0.3, 0.4, 1), (0.4 - 1e-9, 0.6, 0)]
    frame = Frame("op", "op", "forward", "m", 0.0, 1.0, 7)
    kernels = [
        Kernel(f"k{i}", frame, (1,), stream=stream, start=start, end=end)
        for i, (start, end, stream) in enumerate(times)
    ]
    rows = read(trace_of(_step(kernels=kernels)))
    names = {row: [name for _, name, *_ in spans] for row, spans in rows.items() if row != "steps"}
    assert names == {"kernels": ["k0", "k4"], "stream 2": ["k1", "k3"], "stream 3": ["k2"]}
