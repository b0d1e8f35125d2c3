"""Fake CUDA devices, on which nothing runs: kernels are collected with their signatures, and memory leads nowhere.

It is how the code of a kernel is looked at, for any architecture, on a machine without a GPU; and how the memory of
steps of models that no machine at hand could hold is counted.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from genesis.backend import Device
from genesis.backend.cuda.compile import Signature, is_array
from genesis.backend.cuda.driver import Grid, Properties
from genesis.backend.cuda.launch import KernelLaunch, signature_of
from genesis.backend.cuda.simulated import drivers
from genesis.backend.cuda.simulated.host import HostDriver
from genesis.backend.cuda.tma import is_descriptor

Tell = Callable[[Any, Signature], object]

NOWHERE = 1 << 50  # addresses from here on are no process's
FIRST = 1 << 16  # the index of the first device of this kind; there are never so many others

# Bytes of shared memory that a block may take, by architecture: CUDA's programming guide, "Technical specifications".
SHARED = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

# A GPU of each architecture: name, GiB of memory, SMs, MiB of L2, as their vendors state them.
_GPUS = {
    80: ("A100", 80, 108, 40),
    86: ("A40", 48, 84, 6),
    87: ("Orin", 32, 16, 4),
    89: ("L40S", 48, 142, 96),
    90: ("H200", 141, 132, 50),
    100: ("B200", 180, 148, 126),
    120: ("RTX 5090", 32, 170, 96),
}
ARCHITECTURES = {
    arch: Properties(name, divmod(arch, 10), memory << 30, sm_count, SHARED[arch], l2 << 20)
    for arch, (name, memory, sm_count, l2) in _GPUS.items()
}


class EmptyDriver(HostDriver):
    """Addresses in order with nothing behind them; what is read from there is 0."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.memory = 1 << 40
        self._sizes: dict[int, int] = {}
        self._end = NOWHERE

    def allocate(self, nbytes: int) -> int:
        """The next addresses."""
        pointer = self._end
        self._end += -(-nbytes // 512) * 512
        self._sizes[pointer] = nbytes
        self._used += nbytes
        return pointer

    def free(self, pointer: int) -> None:
        self._used -= self._sizes.pop(pointer)

    def allocate_pinned(self, nbytes: int) -> int:
        return super().allocate(nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Zeros to the host, nothing to the device."""
        if target < NOWHERE:
            self.do(stream, lambda: ctypes.memset(target, 0, nbytes))

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Nothing."""


class Launched(NamedTuple):
    """A launch that did not take place.

    Attributes:
        kernel: Triton's function, or a `genesis.custom.cuda_source.SourceKernel`.
        signature: what it would have been compiled for.
        grid: programs in three dimensions.
    """

    kernel: Any
    signature: Signature
    grid: Grid


class FakeDriver(EmptyDriver):
    """A device of given properties that collects what is launched on it."""

    def __init__(self, index: int, properties: Properties) -> None:
        super().__init__(0)
        self.index, self.properties = index, properties
        self.launched: list[Launched] = []

    def prepare(
        self, backend: Any, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        """A launch that is noted, each time it is repeated, and does nothing."""
        return self.noted(kernel, signature_of(kernel, args, keywords), grid, args)

    def noted(self, kernel: Any, signature: Signature, grid: Grid, args: tuple[Any, ...]) -> KernelLaunch:
        """The same of any kernel, Triton's or one in CUDA C++."""
        launched = Launched(kernel, signature, grid)
        return noted_launch(kernel.__name__, grid, args, lambda: self.launched.append(launched))


def noted_launch(name: str, grid: tuple[int, ...], args: tuple[Any, ...], note: Callable[[], None]) -> KernelLaunch:
    """A launch that takes the addresses of its arrays, and does nothing but `note`."""
    count = sum(is_array(a) or is_descriptor(a) for a in args)

    def prepare(made: KernelLaunch) -> None:
        made.words, made.slots, made.run = [0] * count, tuple(range(count)), lambda stream: note()

    return KernelLaunch(prepare, lambda: True, name, grid)


_indices = itertools.count(FIRST)


@functools.cache
def fake_device(properties: Properties) -> tuple[Device, FakeDriver]:
    """A device with these properties on which nothing runs, and its driver."""
    driver = FakeDriver(next(_indices), properties)
    drivers[driver.index] = driver
    return Device("cuda", driver.index), driver


class _CountingDriver(FakeDriver):
    """A fake GPU with as much memory as is asked for, which notes no launches.

    Attributes:
        tell: is told each of Triton's kernels that is launched for the first time, and for what it would be compiled.
    """

    def __init__(self, index: int, properties: Properties) -> None:
        super().__init__(index, properties)
        self.memory = 1 << 60
        self.tell: Tell | None = None

    def prepare(
        self, backend: Any, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        """A launch that does nothing."""
        if self.tell is not None:
            self.tell(kernel, signature_of(kernel, args, keywords))
        return noted_launch(kernel.__name__, grid, args, lambda: None)

    def noted(self, kernel: Any, signature: Any, grid: Grid, args: tuple[Any, ...]) -> KernelLaunch:
        """The same of a kernel in CUDA C++."""
        return noted_launch(kernel.__name__, grid, args, lambda: None)


@functools.cache
def _counting_driver(properties: Properties) -> _CountingDriver:
    driver = _CountingDriver(next(_indices), properties)
    drivers[driver.index] = driver
    return driver


def counting_device(properties: Properties) -> Device:
    """A device with these properties on which only memory is counted, and there is enough of it."""
    return Device("cuda", _counting_driver(properties).index)


@contextmanager
def told(properties: Properties, tell: Tell) -> Iterator[None]:
    """Inside the block `tell(kernel, signature)` is called for what is launched on the counting device.

    Launches that are remembered are told when they are first made.
    """
    driver = _counting_driver(properties)
    before, driver.tell = driver.tell, tell
    try:
        yield
    finally:
        driver.tell = before
