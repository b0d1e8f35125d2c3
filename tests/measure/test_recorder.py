"""Time is divided among nested and parallel frames, ops before Python, and adds up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.measure.recorder import Frame, divided


def phase(start: float, end: float, name: str = "forward", thread: int = 0) -> Frame:
    return Frame("phase", name, name, "m", start, end, thread)


def op(name: str, start: float, end: float, thread: int = 0) -> Frame:
    return Frame("op", name, "forward", "m", start, end, thread)


def named(frames: list[Frame]) -> dict[str | None, float]:
    """The division of 0 to 10 by name."""
    return {None if frame is None else frame.name: seconds for frame, seconds in divided(frames, 0, 10).items()}


def test_the_innermost_frame_has_the_time() -> None:
    frames = [phase(0, 10), op("a", 2, 6), op("b", 3, 4), op("c", 6, 7)]
    assert named(frames) == {"forward": 5, "a": 3, "b": 1, "c": 1}


def test_what_is_no_op_and_what_is_nothing() -> None:
    assert named([phase(1, 9), op("a", 2, 6)]) == {None: 2, "forward": 4, "a": 4}


def test_threads_share_a_moment_and_ops_go_first() -> None:
    frames = [phase(0, 10), op("a", 0, 4), phase(0, 10, thread=1), op("b", 2, 10, thread=1)]
    # a alone to 2, a and b to 4, b alone to 10, though the first thread is in a phase all the time
    assert named(frames) == {"a": 3, "b": 7}


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=6)), max_size=4
    )
)
def test_shares_add_up_to_the_step(threads: list[tuple[int, list[tuple[int, int]]]]) -> None:
    frames = [
        op(f"{start}", start, start + length, thread)
        for thread, spans in threads
        for start, length in _apart(sorted(spans))
    ]
    assert sum(divided(frames, 3, 33).values()) == pytest.approx(30)


def _apart(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans that do not overlap an earlier one, because frames of a thread nest or are apart."""
    found: list[tuple[int, int]] = []
    for start, length in spans:
        if not found or start >= sum(found[-1]):
            found.append((start, length))
    return found
