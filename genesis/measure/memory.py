"""Memory through a step, by what it is for: weights, gradients, optimizer, activations, workspace.

It follows the pool of the device: each block that is taken and given back. Activations are what forward takes and is
still there when it ends; workspace is all else that a step takes and gives back, gradients between ops among it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.measure.spans import OUTSIDE, Frame
from genesis.op import Op

Category = Literal["weights", "gradients", "optimizer", "activations", "workspace", "other"]
CATEGORIES: tuple[Category, ...] = ("weights", "optimizer", "gradients", "other", "activations", "workspace")


@dataclass
class _Block:
    """Memory of a step from when it was taken until it was given back."""

    address: int
    size: int
    taken: float
    phase: str
    module: str
    op: str = OUTSIDE
    given: float | None = None
    category: Category = "workspace"


class Held(NamedTuple):
    """Who holds memory at the peak."""

    category: Category
    module: str
    op: str
    nbytes: int
    blocks: int


@dataclass(frozen=True)
class Timeline:
    """Bytes by category after each change.

    Attributes:
        seconds: since the beginning of the step, of each change; the first is the beginning itself.
        nbytes: by category, at each of these moments.
        peak: the index of the highest sum.
        held: at the peak, by who holds it, the most first.
        pool_peak: the highest sum by the pool's own count.
        persistent: bytes by category before the step.
        phases: each with its beginning and end.
    """

    seconds: list[float]
    nbytes: dict[Category, list[int]]
    peak: int
    peak_phase: str
    held: list[Held]
    pool_peak: int
    persistent: dict[Category, int]
    phases: list[tuple[str, float, float]]

    @property
    def peak_bytes(self) -> int:
        """The highest sum."""
        return sum(values[self.peak] for values in self.nbytes.values())


class MemoryWatch:
    """Follows the pool of a device through one step.

    Args:
        location: the phase and the module of what runs now.
    """

    def __init__(self, device: Device, location: Callable[[], tuple[str, str]]) -> None:
        self.location = location
        self._pool = _pool_of(device)
        self._blocks: list[_Block] = []  # taken in the step
        self._live: dict[int, _Block] = {}
        self._changes: list[tuple[float, _Block, int]] = []  # when, of what, bytes more
        self._unnamed: dict[int, list[_Block]] = defaultdict(list)  # by thread, of the op that runs
        self._began, self._allocated = 0.0, 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The block is the step."""
        pool = self._pool
        _reset_peak(pool)
        self._began, self._allocated = time.perf_counter(), pool.allocated
        pool.watch = self._changed
        try:
            yield
        finally:
            pool.watch = None
            self._pool_peak = pool.max_allocated

    def op_ended(self, op: Op, operands: Sequence[Any], start: float, end: float) -> None:
        """Name the blocks that an op has taken."""
        blocks = self._unnamed.pop(threading.get_ident(), ())
        for block in blocks:
            if block.taken >= start:
                block.op = op.name

    def _changed(self, address: int, nbytes: int) -> None:
        now = time.perf_counter()
        if nbytes > 0:
            block = self._live[address] = _Block(address, nbytes, now, *self.location())
            self._blocks.append(block)
            self._unnamed[threading.get_ident()].append(block)
        else:
            known = self._live.pop(address, None)
            block = known or _Block(address, -nbytes, self._began, "", "")  # that was there before
            block.given = now
        self._changes.append((now, block, nbytes))

    def timeline(self, persistent: Mapping[Category, Sequence[Array]], frames: Sequence[Frame]) -> Timeline:
        """What was seen; `persistent` are the arrays that stay from step to step, `frames` those of the step."""
        owned = {
            address: (size, category)
            for category, arrays in persistent.items()
            for address, size in filter(None, map(_block_of, arrays))
        }
        self._sort_out(owned, frames)
        totals: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        totals["other"] = self._allocated
        made = {block.address for block in self._live.values()}
        for address, (size, category) in owned.items():
            if address not in made:
                totals[category] += size
                totals["other"] -= size
        kept = dict(totals)
        seconds, nbytes = [0.0], {category: [totals[category]] for category in CATEGORIES}
        for at, block, change in self._changes:
            totals[block.category] += change
            seconds.append(at - self._began)
            for each in CATEGORIES:
                nbytes[each].append(totals[each])
        sums = [sum(column) for column in zip(*nbytes.values(), strict=True)]
        peak = max(range(len(sums)), key=sums.__getitem__)
        moment = self._began + seconds[peak]
        held = self._held(moment, {category: values[peak] for category, values in nbytes.items()})
        phase = next((f.phase for f in frames if f.level == "phase" and f.start <= moment <= f.end), "idle")
        return Timeline(seconds, nbytes, peak, phase, held, self._pool_peak, kept, self._phases(frames))

    def _phases(self, frames: Sequence[Frame]) -> list[tuple[str, float, float]]:
        """The phases in order, those of several threads as one."""
        found: list[tuple[str, float, float]] = []
        for frame in sorted((f for f in frames if f.level == "phase"), key=lambda f: f.start):
            start, end = frame.start - self._began, frame.end - self._began
            if found and found[-1][0] == frame.phase and start <= found[-1][2]:
                start, end = found[-1][1], max(end, found.pop()[2])
            found.append((frame.phase, start, end))
        return found

    def _sort_out(self, owned: Mapping[int, tuple[int, Category]], frames: Sequence[Frame]) -> None:
        """Give each block its category."""
        for _, block, _ in self._changes:
            if not block.phase:
                block.category = owned[block.address][1] if block.address in owned else "other"
        forwards = [f for f in frames if f.level == "phase" and f.phase == "forward"]
        for block in self._blocks:
            stays = block.given is None and block.address in owned
            if stays:
                block.category = owned[block.address][1]
            elif block.phase == "data":
                block.category = "other"
            elif block.phase == "forward":
                end = max((f.end for f in forwards if f.start <= block.taken <= f.end), default=block.taken)
                block.category = "activations" if block.given is None or block.given >= end else "workspace"

    def _held(self, moment: float, totals: Mapping[Category, int]) -> list[Held]:
        """Who holds memory at a moment: by module and op what the step took, by category what was there before."""
        live = [b for b in self._blocks if b.taken <= moment and (b.given is None or b.given > moment)]
        sizes: Counter[tuple[Category, str, str]] = Counter()
        counts: Counter[tuple[Category, str, str]] = Counter()
        rest = Counter(dict(totals))
        for block in live:
            key = (block.category, aggregated(block.module), block.op)
            sizes[key] += block.size
            counts[key] += 1
            rest[block.category] -= block.size
        held = [Held(*key, nbytes, counts[key]) for key, nbytes in sizes.items()]
        held += [Held(category, "", "", size, 0) for category, size in rest.items() if size]
        return sorted(held, key=lambda h: -h.nbytes)


def aggregated(module: str) -> str:
    """A module's name with a star for the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _pool_of(device: Device) -> Any:
    if device == CPU:
        from genesis.backend.cpu import pool

        return pool
    return cast(Any, backend_for(device)).pool


def _reset_peak(pool: Any) -> None:
    pool.max_allocated = pool.allocated


def _block_of(array: Array) -> tuple[int, int] | None:
    """Address and bytes of the pool's block that holds an array; None for memory that is not the pool's."""
    storage: Any = array.storage
    if hasattr(storage, "pool"):
        return None if storage.block is None else (storage.block.pointer, storage.block.size)
    return None if storage.owner is not None else (int(storage.block.ctypes.data), storage.block.nbytes)
