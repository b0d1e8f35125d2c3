"""Time divided among what happened in it: frames that nest on threads become shares that add up to the whole.

At a moment in which several threads work, each of them has an equal part of it. Ops go before the Python around them:
what is no op counts only while no thread is in one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

OUTSIDE = "(outside ops)"
IDLE = "(idle)"
COLLECTIVE = "(collective)"  # the op of what ranks send each other
Level = Literal["phase", "module", "op"]


class Frame(NamedTuple):
    """A stretch of one thread's time; those of a thread nest.

    Attributes:
        phase, module: that contain it, or that it is.
        start, end: seconds of `time.perf_counter`.
    """

    level: Level
    name: str
    phase: str
    module: str
    start: float
    end: float
    thread: int

    @property
    def key(self) -> Key:
        """What its own time counts for."""
        return Key(self.phase, self.module, self.name if self.level == "op" else OUTSIDE)


class Key(NamedTuple):
    """What time counts for."""

    phase: str
    module: str
    op: str


class Piece(NamedTuple):
    """A part of a thread's time with the innermost frame in it."""

    start: float
    end: float
    frame: Frame


def leaves(frames: Iterable[Frame]) -> Iterator[Piece]:
    """The innermost frame at each moment of one thread, in order."""
    open_: list[Frame] = []
    at = 0.0
    for frame in sorted(frames, key=lambda f: (f.start, -f.end)):
        while open_ and open_[-1].end <= frame.start:
            inner = open_.pop()
            if inner.end > at:
                yield Piece(at, inner.end, inner)
                at = inner.end
        if open_ and frame.start > at:
            yield Piece(at, frame.start, open_[-1])
        open_.append(frame)
        at = max(at, frame.start)
    while open_:
        inner = open_.pop()
        if inner.end > at:
            yield Piece(at, inner.end, inner)
            at = inner.end


def divided(frames: Sequence[Frame], start: float, end: float) -> dict[Key, float]:
    """Seconds between `start` and `end` by what they count for; they add up to `end - start`."""
    threads: dict[int, list[Frame]] = defaultdict(list)
    for frame in frames:
        threads[frame.thread].append(frame)
    pieces = heapq.merge(*(leaves(own) for own in threads.values()))
    shares: dict[Key, float] = defaultdict(float)
    active: list[Piece] = []
    at = start
    for piece in itertools.chain(pieces, [None]):
        until = end if piece is None else min(max(piece.start, start), end)
        at = _share(shares, active, at, until)
        if piece is not None and piece.end > at:
            active.append(piece)
    return dict(shares)


def _share(shares: dict[Key, float], active: list[Piece], at: float, until: float) -> float:
    """Give the time from `at` to `until` to the active pieces, which are taken out where they end."""
    while at < until:
        active[:] = [piece for piece in active if piece.end > at]
        next_ = min([until, *(piece.end for piece in active)])
        ops = [piece for piece in active if piece.frame.level == "op"]
        chosen = [piece.frame.key for piece in ops or active] or [Key("idle", IDLE, IDLE)]
        for key in chosen:
            shares[key] += (next_ - at) / len(chosen)
        at = next_
    return max(at, until)
