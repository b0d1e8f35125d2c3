"""The ranks of a run as training sees them: decisions of rank 0, agreement of all, and time limits of waits.

Rank 0 holds the output folder, writes and prints, and broadcasts its decisions. With one rank every call returns at
once.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from genesis.distributed.group import Alone, Group
from genesis.distributed.peers import Peers
from genesis.errors import ConfigError

# Seconds that a rank may be late: the minimum in a step, in the first steps (which compile), and while rank 0 prepares,
# samples or saves.
STEP_S, FIRST_STEPS_S = 60.0, 600.0
PREPARING_S, SAMPLING_S, SAVING_S = 3600.0, 600.0, 1800.0
FIRST_STEPS = 3
SLOWEST_OF, MARGIN = 10, 10.0


class Ranks:
    """This rank and the others.

    Attributes:
        group: their collectives.
        rank: this rank; `size` is the number of ranks.
        local_rank: this rank among the `local_size` ranks of its host; the size is None if unknown.
        launched: called after each step's launch; a watchdog checks that the steps progress.
        compare, barrier, during: the methods of `Peers`.
    """

    def __init__(self, peers: Peers, group: Group, local_rank: int = 0, local_size: int | None = 1) -> None:
        self._peers, self.group = peers, group
        self.launched: Callable[[], None] = lambda: None
        self.compare, self.barrier, self.during = peers.compare, peers.barrier, peers.during
        self.rank, self.size = peers.rank, peers.size
        self.local_rank, self.local_size = local_rank, local_size
        self._seconds: deque[float] = deque(maxlen=SLOWEST_OF)
        self._steps = 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    # --- What they agree on -------------------------------------------------------------------------------------------

    def agree(self, received: int | None, step: int) -> int | None:
        """Return the signal that any rank has received, or None. All ranks must be at the same step."""
        if self.size == 1:
            return received
        return self._peers.agree(received or 0, step) or None

    def from_main(self, name: str, value: Any) -> Any:
        """Return rank 0's JSON value on every rank."""
        return value if self.size == 1 else self._peers.broadcast_json(name, value if self.is_main else None)

    def to_main(self, name: str, value: Any) -> list[Any]:
        """Return the JSON values of all ranks in order on rank 0, and an empty list elsewhere."""
        return [value] if self.size == 1 else self._peers.gather_json(name, value) or []

    def in_turn(self, own: Sequence[float]) -> list[float]:
        """Return the numbers of all ranks: the first of each rank in order, then the second of each, …"""
        if self.size == 1:
            return list(own)
        layout = struct.Struct(f"<{len(own)}d")
        gathered = self._peers.gather("numbers", layout.pack(*own))
        every = self._peers.broadcast("numbers", b"".join(gathered) if gathered is not None else b"")
        by_rank = list(layout.iter_unpack(every))
        return [number for turn in zip(*by_rank, strict=True) for number in turn]

    def least(self, number: float) -> float:
        """Return the smallest number of all ranks."""
        return min(self.in_turn([number]))

    def all(self, own: bool) -> bool:
        """Whether `own` is true on all ranks."""
        return bool(self.least(float(own)))

    # --- Waiting ------------------------------------------------------------------------------------------------------

    @contextmanager
    def main_first(self, name: str) -> Iterator[None]:
        """Run the block on rank 0, then on the others."""
        if not self.is_main:
            self._peers.barrier(name)
        yield
        if self.is_main:
            self._peers.barrier(name)

    def record_seconds(self, seconds: float) -> None:
        """Record the seconds of a step. A rank is late after ten times the slowest of the last ten steps."""
        if self.size == 1:
            return
        self.launched()
        self._seconds.append(seconds)
        self._steps += 1
        least = FIRST_STEPS_S if self._steps < FIRST_STEPS else STEP_S
        self._peers.limit_s = max(least, MARGIN * max(self._seconds))

    def leave(self) -> None:
        """Close the group once all ranks end with the same error. Nothing more is exchanged."""
        if self.size > 1:
            self.group.close()


ALONE = Ranks(Peers(0, 1), Alone())


def check_divides(ranks: int, accumulation_steps: int) -> None:
    """Refuse a number of ranks that does not divide a step's micro-batches.

    Raises:
        ConfigError: with the setting to change.
    """
    if accumulation_steps % ranks:
        more = -(-accumulation_steps // ranks) * ranks
        fewer = max(n for n in range(1, ranks + 1) if accumulation_steps % n == 0)
        batches = f"{accumulation_steps} batch{'es' if accumulation_steps > 1 else ''}"
        raise ConfigError(
            f"a step has {batches}, which {ranks} ranks cannot share evenly",
            where="train.accumulation_steps",
            next=f"set train.accumulation_steps={more}, or start {fewer} rank{'s' if fewer > 1 else ''}",
        )
