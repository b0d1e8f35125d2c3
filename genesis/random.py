"""Counter-based random numbers: a value depends only on seed and position, never on device, thread or order of work.

The generator is Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed
by the 64-bit seed; the counter is the position. This module provides the bits and the state; `ops/random.py` turns them
into tensors.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np

from genesis.errors import DTypeError, UsageError
from genesis.keywords import check_calls

__all__ = ["Generator", "default_generator", "get_state", "manual_seed", "philox", "philox_rounds", "set_state"]

_MUL0, _MUL1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(seed: int, offset: int, blocks: int) -> np.ndarray:
    """Return the random bits of `blocks` counters from `offset` on: uint32 `[blocks, 4]`, four words per counter.

    `seed`, `offset` and the last counter are below 2^64.
    """
    counter = np.uint64(offset) + np.arange(blocks, dtype=np.uint64)
    zero = np.zeros(blocks, np.uint64)
    return philox_rounds((counter & _LOW, counter >> _SHIFT, zero, zero), (seed & 0xFFFFFFFF, seed >> 32))


def philox_rounds(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> np.ndarray:
    """Run the ten rounds of Philox; return uint32 `[blocks, 4]`.

    Args:
        counter: four uint64 arrays `[blocks]` that hold 32-bit words, the lowest first.
        key: two 32-bit words, the lowest first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MUL0, c2 * _MUL1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL0) & 0xFFFFFFFF, (k1 + _WEYL1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


# How states become tensors, and names devices. `genesis.functions.settings` fills it, because tensors are above.
_hooks: dict[str, Callable[[Any], Any]] = {"device": str}


class Generator:
    """A seed (0 to 2^64 - 1) and a position, which each draw advances by the counters that it uses.

    Attributes:
        fixed_draws: number of draws so far that a CUDA graph of their kernels would repeat unchanged; draws by
            `reserve_relative` inside `positioned_by`, on the device of its position, do not count.
    """

    def __init__(self, device: Any = None, *, seed: int = 0) -> None:
        """Start from `seed`. Values are the same on every device, so `device` is only a label; an int is the seed."""
        if type(device) is int:
            device, seed = None, device
        self.device = _hooks["device"](device)
        self._offset = self.fixed_draws = 0
        self._base: tuple[int, int, Any] | None = None  # (seed, offset, position) of the block of `positioned_by`
        self._apart: dict[int, int] = {}  # thread id -> its position, inside `apart`
        self.manual_seed(seed)

    @property
    def offset(self) -> int:
        """The position in counters; inside `apart`, the position of the calling thread."""
        return self._apart.get(get_ident(), self._offset) if self._apart else self._offset

    @offset.setter
    def offset(self, offset: int) -> None:
        if self._apart and get_ident() in self._apart:
            self._apart[get_ident()] = offset
        else:
            self._offset = offset

    def manual_seed(self, seed: int) -> Generator:
        """Restart from `seed`. Raises DTypeError if it is not an integer, UsageError if it is out of range."""
        try:
            seed = operator.index(seed)
        except TypeError:
            raise DTypeError(f"the seed {seed!r} is not an integer") from None
        if not -(1 << 63) <= seed < 1 << 64:
            raise UsageError(f"seed {seed} is not between -2^63 and 2^64 - 1")
        self._seed, self.offset = seed % (1 << 64), 0
        return self

    def seed(self) -> int:
        """Restart from a seed of the system's entropy, and return it."""
        return self.manual_seed(secrets.randbits(63))._seed

    def initial_seed(self) -> int:
        """Return the seed."""
        return self._seed

    def reserve(self, values: int) -> tuple[int, int]:
        """Reserve the counters of `values` 32-bit words; return (seed, offset) of the first."""
        start = self.offset
        self.offset += -(-values // 4)
        self.fixed_draws += 1
        return self._seed, start

    def reserve_relative(self, values: int, device: Any) -> tuple[int, int, Any]:
        """Reserve as `reserve` does; the third value is the position whose words the kernel adds to seed and offset.

        It is None outside `positioned_by`, and for draws on another device than its position's.
        """
        seed, start = self.reserve(values)
        if self._base is None or self._base[2].device != device:
            return seed, start, None
        self.fixed_draws -= 1
        base_seed, base_start, position = self._base
        return (seed - base_seed) % (1 << 64), start - base_start, position

    @property
    def is_positioned(self) -> bool:
        """Whether a `positioned_by` block is active."""
        return self._base is not None

    def words(self) -> tuple[int, int]:
        """Return offset and seed as the signed words of a position; see `positioned_by`."""
        return self.offset, self._seed - ((self._seed >> 63) << 64)

    @contextmanager
    def positioned_by(self, position: Any) -> Iterator[None]:
        """Make `reserve_relative` count from the start of the block, where `position`, int64 `[2]`, holds `words()`.

        The kernels of such a block can be replayed as a CUDA graph: before a replay the host writes the new words
        into `position`.
        """
        outer, self._base = self._base, (self._seed, self.offset, position)
        try:
            yield
        finally:
            self._base = outer

    @contextmanager
    def apart(self, position: int) -> Iterator[None]:
        """Let this thread draw from `position` on inside the block; the draws of other threads are unaffected."""
        self._apart[get_ident()] = position
        try:
            yield
        finally:
            del self._apart[get_ident()]

    def state(self) -> dict[str, int]:
        """Return seed and position, for a checkpoint."""
        return {"seed": self._seed, "offset": self.offset}

    def restore(self, state: dict[str, int]) -> None:
        """Restore seed and position from `state`."""
        self.manual_seed(int(state["seed"]))
        self.offset = int(state["offset"])

    def get_state(self) -> Any:
        """Return the state as a uint8 tensor `[16]`: seed and position."""
        return _hooks["pack"](self.state())

    def set_state(self, new_state: Any) -> Generator:
        """Restore a state that `get_state` returned."""
        self.restore(_hooks["unpack"](new_state))
        return self

    def clone_state(self) -> Generator:
        """Return another generator in the same state."""
        copied = Generator(self.device)
        copied.restore(self.state())
        return copied


default_generator = Generator(secrets.randbits(63))  # unseeded programs differ from run to run, as in torch


def manual_seed(seed: int) -> Generator:
    """Seed the default generator, which random ops use unless the caller passes another."""
    return default_generator.manual_seed(seed)


def get_state() -> dict[str, int]:
    """Return the default generator's state."""
    return default_generator.state()


def set_state(state: dict[str, int]) -> None:
    """Restore the default generator's state."""
    default_generator.restore(state)


check_calls(globals(), __all__)
