"""States that ranks have parts of, read in full: all ranks take turns, in which each gets one state of one parameter.

So a rank needs room for one whole state at a time, whichever it asks for, and ranks may ask for different ones at once:
each writes and hashes some of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from genesis.array import Array, from_numpy
from genesis.backend import CPU
from genesis.functions.transfer import moved
from genesis.optim.shared import SharedBuffers

NO_MORE = (-1, -1, -1)  # what a rank asks for that has left its block


class WholeStates:
    """The states in buffers of which every rank has its parts.

    Args:
        sharded: the buffers, in the same order on all ranks.
    """

    def __init__(self, sharded: Sequence[SharedBuffers]) -> None:
        self._sharded = sharded

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block `read` may be called: a call of all ranks, which end it together.

        An error leaves it at once: the others learn of it as of any rank that goes.
        """
        yield
        while self._turn(NO_MORE)[1]:
            pass

    def read(self, flat: SharedBuffers, name: str, index: int) -> Array:
        """The state `name` of parameter `index`, once all other ranks read, too, or have left their blocks."""
        state, _ = self._turn((self._sharded.index(flat), list(flat.states).index(name), index))
        assert state is not None, "it was asked for"
        return state

    def _turn(self, own: tuple[int, int, int]) -> tuple[Array | None, bool]:
        """Say what this rank asks for (buffer, state, parameter), and gather what all ranks ask for.

        Returns:
            The state that this rank asked for, and whether any rank asked for one.
        """
        first = self._sharded[0]
        group, length = first.group, len(own)
        words = from_numpy(np.array(own * group.size, np.int64))
        words = words if first.device == CPU else moved(words, first.device)
        group.all_gather(words.view((length,), (1,), length * group.rank), words, [length] * group.size)
        asked = [tuple(each) for each in words.numpy().reshape(group.size, length).tolist()]
        own_state = None
        for rank, each in enumerate(asked):
            if each != NO_MORE:
                flat = self._sharded[each[0]]
                found = flat.gather_state(list(flat.states)[each[1]], each[2], rank)
                own_state = found if rank == group.rank else own_state
        return own_state, any(each != NO_MORE for each in asked)
