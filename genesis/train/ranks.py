"""The ranks of a run as training sees them: who decides, what they agree on, and how long they wait for each other.

Rank 0 holds the output folder, writes and prints; what it decides it tells the others. Alone, every call returns at
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

# How long a rank may be late, in seconds: in a step at least, in the first steps, which compile, and in what rank 0
# does while the others wait.
STEP_S, FIRST_STEPS_S = 60.0, 600.0
PREPARING_S, SAMPLING_S, SAVING_S = 3600.0, 600.0, 1800.0
FIRST_STEPS = 3
SLOWEST_OF, MARGIN = 10, 10.0


class Ranks:
    """This rank and the others.

    Attributes:
        group: their collectives.
        rank, size: which of how many.
        local_rank, local_size: which of how many on this host; `local_size` is None where nobody knows.
        launched: called when a step is on its way on the device, for who watches that it gets on.
        compare, barrier, during: as of `Peers`: refuse different facts, wait for all, name a phase and limit its waits.
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
        """The signal that any rank has received, or None. All must be at the same step."""
        if self.size == 1:
            return received
        return self._peers.agree(received or 0, step) or None

    def from_main(self, name: str, value: Any) -> Any:
        """Rank 0's value, of JSON's kinds, on every rank."""
        return value if self.size == 1 else self._peers.broadcast_json(name, value if self.is_main else None)

    def to_main(self, name: str, value: Any) -> list[Any]:
        """On rank 0 the values of all ranks, of JSON's kinds, in their order; empty elsewhere."""
        return [value] if self.size == 1 else self._peers.gather_json(name, value) or []

    def in_turn(self, own: Sequence[float]) -> list[float]:
        """The numbers of all ranks: the first of each rank, in their order, then the second of each, …"""
        if self.size == 1:
            return list(own)
        layout = struct.Struct(f"<{len(own)}d")
        said = self._peers.gather("numbers", layout.pack(*own))
        every = self._peers.broadcast("numbers", b"".join(said) if said is not None else b"")
        by_rank = list(layout.iter_unpack(every))
        return [number for turn in zip(*by_rank, strict=True) for number in turn]

    def least(self, number: float) -> float:
        """The smallest of all ranks' numbers."""
        return min(self.in_turn([number]))

    def all(self, own: bool) -> bool:
        """Whether it is true of all ranks."""
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

    def took(self, seconds: float) -> None:
        """A step took so long: from now on a rank is late after ten of the slowest of the last ones."""
        if self.size == 1:
            return
        self.launched()
        self._seconds.append(seconds)
        self._steps += 1
        least = FIRST_STEPS_S if self._steps < FIRST_STEPS else STEP_S
        self._peers.limit_s = max(least, MARGIN * max(self._seconds))

    def leave(self) -> None:
        """All ranks end here, by the same error: wait for all, and say no more."""
        if self.size > 1:
            self.group.close()


ALONE = Ranks(Peers(0, 1), Alone())


def check_divides(ranks: int, accumulation_steps: int) -> None:
    """Refuse a number of ranks that does not divide a step's micro-batches.

    Raises:
        ConfigError: with what to set.
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
