"""The caching pool of device memory: blocks cut from large segments, reused in stream order, merged when it helps.

A block returns to its arena (one a stream, or one a family of graphs) when its last user is gone on the host. Work that
was already launched still runs before whatever reuses the memory, because both are in the same stream. Blocks of a
size that was just given back are handed out again without a search; they are merged with their neighbours only when no
free block is large enough. A block that another stream used as well waits until that stream is past it.

Blocks are given back by finalizers, which run in any thread at any moment: also in one that compiles a kernel for which
another thread waits. So giving back only notes the block, and never waits for a lock or for the driver; whoever next
takes memory, or asks how much is in use, deals with what was noted.
"""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from genesis.backend.cuda.driver import Driver, OutOfDeviceMemory
from genesis.errors import OutOfMemoryError

ALIGNMENT = 512  # bytes
SMALL = 1 << 20  # bytes; up to here blocks share small segments
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
HOLDERS = 5  # that an error names
KEEP_WHOLE = 1 << 20  # a remainder of a large block is split off from this size on
ENDLESS = 1 << 60  # bytes
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Block:
    """A run of device memory inside a segment, with its neighbours there."""

    arena: Arena
    pointer: int
    size: int  # bytes
    small: bool  # whether its segment is one for small blocks
    before: Block | None = None
    after: Block | None = None
    free: bool = False  # whether it is in its arena's sorted list
    owner: str = ""  # the op that asked for it, while it is in use
    streams: set[int] | None = None  # others that used it since it was taken


class Arena:
    """Segments whose blocks are reused in the order of one stream.

    Blocks of a `compact` arena are as large as what was asked for and merged before the next one is taken, which costs
    the host more time and reserves less memory. Its first segment for large blocks has `room` bytes or more; they are
    taken from its lowest free address, as `room_for` counts.
    """

    def __init__(self, pool: Pool, compact: bool = False) -> None:
        self.pool, self.compact, self.room = pool, compact, 0
        self.quick: dict[int, list[Block]] = {}  # by size, given back and not yet merged
        self.sorted: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # small and large (size, pointer)
        self.blocks: dict[int, Block] = {}  # by pointer

    def take(self, size: int) -> Block:
        """A block of `size` bytes: one just given back, the best fit, or one from a new segment."""
        if self.compact:
            self.merge()
        found = self._fit(size)
        if found is None and self.merge():
            found = self._fit(size)
        if found is None:
            found = self._segment(size)
        return self._split(found, size)

    def _fit(self, size: int) -> Block | None:
        candidates = self.sorted[size > SMALL]
        at = bisect.bisect_left(candidates, (size, 0))
        if at == len(candidates):
            return None
        lowest = self.room and size > SMALL
        return self._unlist(self.blocks[min(p for _, p in candidates[at:]) if lowest else candidates[at][1]])

    def _segment(self, size: int) -> Block:
        if size <= SMALL:
            nbytes = SMALL_SEGMENT
        else:
            is_first = all(block.small for block in self.blocks.values())
            wanted = max(size, self.room) if is_first else size
            nbytes = LARGE_SEGMENT if wanted < LARGE_SEGMENT // 2 else -(-wanted // SMALL_SEGMENT) * SMALL_SEGMENT
        try:
            pointer = self.pool.reserve(nbytes)
        except OutOfDeviceMemory:
            if nbytes == size:
                raise
            pointer, nbytes = self.pool.reserve(size), size
        block = Block(self, pointer, nbytes, size <= SMALL)
        self.blocks[pointer] = block
        return block

    def _split(self, block: Block, size: int) -> Block:
        rest = block.size - size
        if rest >= (ALIGNMENT if block.small or self.compact else KEEP_WHOLE):
            tail = Block(self, block.pointer + size, rest, block.small)
            tail.before, tail.after = block, block.after
            if block.after is not None:
                block.after.before = tail
            block.size, block.after = size, tail
            self.blocks[tail.pointer] = tail
            self._list(tail)
        return block

    def _list(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.sorted[not block.small], (block.size, block.pointer))

    def _unlist(self, block: Block) -> Block:
        candidates = self.sorted[not block.small]
        at = bisect.bisect_left(candidates, (block.size, block.pointer))
        assert candidates[at] == (block.size, block.pointer), "a free block is in no list"
        del candidates[at]
        block.free = False
        return block

    def merge(self) -> bool:
        """Join blocks that were given back with their free neighbours; whether there were any."""
        quick, self.quick = self.quick, {}  # first: while memory is watched, finalizers deal with what they give back
        waiting = [block for blocks in quick.values() for block in blocks]
        for block in waiting:
            for neighbour in (block.before, block.after):
                if neighbour is not None and neighbour.free:
                    block = self._join(block, self._unlist(neighbour))
            self._list(block)
        return bool(waiting)

    def _join(self, a: Block, b: Block) -> Block:
        first, second = (a, b) if a.pointer < b.pointer else (b, a)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self.blocks[second.pointer]
        return first

    def release(self) -> None:
        """Give segments that are wholly free back to the driver."""
        self.merge()
        for block in list(self.blocks.values()):
            if block.free and block.before is None and block.after is None:
                self._unlist(block)
                del self.blocks[block.pointer]
                self.pool.unreserve(block.pointer, block.size)


class ForeignArena(Arena):
    """Blocks that another library makes, as other processes may map them. None goes back to the driver."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        pool.foreign.append(self)

    def make(self, nbytes: int, owner: str, allocate: Callable[[int], int]) -> Block:
        """A new block, at the address that `allocate` gives. Raises OutOfMemoryError as `Pool.take` does."""
        pool = self.pool
        pointer = pool.with_room(f"{_format(nbytes)} for {owner}", lambda: allocate(nbytes))
        with pool._lock:
            pool._reserved(pointer, nbytes)
            block = self.blocks[pointer] = Block(self, pointer, nbytes, small=False)
            pool._used(block, owner)
            return block

    def again(self, nbytes: int, owner: str) -> Block:
        """A block of this size that was given back, where `has` one."""
        with self.pool._lock:
            block = self.quick[nbytes].pop()
            self.pool._used(block, owner)
            return block

    def has(self, nbytes: int) -> bool:
        """Whether a block of this size was given back."""
        self.pool.take_back()
        return bool(self.quick.get(nbytes))

    def holds(self, pointer: int, nbytes: int) -> bool:
        """Whether all of some memory lies in one block."""
        return any(start <= pointer and pointer + nbytes <= start + b.size for start, b in self.blocks.items())


class Pool:
    """All arenas of a device, with counters in bytes; what is `reserved` was taken from the driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.backend: Any = None  # what runs ops on this memory
        self.arenas: defaultdict[int, Arena] = defaultdict(lambda: Arena(self))  # by stream
        self.private: Arena | None = None  # where a capture and its warm-up take their memory, while they run
        self.graphs: Arena | None = None  # the memory of all graphs
        self.graph_count = 0
        self.capturing = False  # whether blocks that are given back are held, until `end_capture`
        self.held: list[Block] = []  # given back during a capture, which may have recorded work on them
        self.kept: deque[list[Block]] = deque()  # given back since each piece of work in a branch of a capture began
        self.given: deque[Block] = deque()  # given back, not dealt with yet
        self.give: Callable[[Block], None] = self.given.append  # for reuse in its stream's order; never waits
        self.waiting: list[tuple[Block, list[int]]] = []  # given back, and the events of other streams' use
        # Ends of graphs that nobody holds any more, which wait for the device: for one who may wait.
        self.retired: deque[Callable[[], None]] = deque()
        self.segments: dict[int, int] = {}
        self.foreign: list[ForeignArena] = []  # of blocks that other libraries made
        self._allocated = self.max_allocated = self.reserved = self.max_reserved = 0
        self.allocations = self.driver_allocations = 0
        self.poison = False  # fill fresh memory with NaN patterns, so that reading what was never written shows
        self.owner = "empty"  # whose memory is taken now: the op that runs; what knows better says so
        self.describe: Callable[[], dict[int, str]] = dict  # dtype and shape of what is in blocks, by address
        self._watch: Callable[[int, int], None] | None = None
        self._lock = threading.RLock()  # a failing `take` reads the snapshot, and watched finalizers interrupt it

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        self.take_back()
        return self._allocated

    @property
    def watch(self) -> Callable[[int, int], None] | None:
        """Told the address and the bytes of every block that is taken, and of every one that is free again the bytes
        below 0, at that moment where no other thread is at work here; None while nobody looks.
        """
        return self._watch

    @watch.setter
    def watch(self, watch: Callable[[int, int], None] | None) -> None:
        self.take_back()
        self._watch = watch
        self.give = self.given.append if watch is None else self._give_at_once

    def _give_at_once(self, block: Block) -> None:
        self.given.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._deal()
            finally:
                self._lock.release()

    def take(self, nbytes: int, stream: int, owner: str | None = None) -> Block:
        """A block of at least `nbytes`, contents undefined: a multiple of 512 bytes, at least one.

        Args:
            owner: whose memory it is; None as `Pool.owner` says.

        Raises:
            OutOfMemoryError: naming the request, what is free and the biggest holders.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        owner = owner or self.owner
        self._lock.acquire()  # `with` takes twice as long, and this runs for every op
        try:
            if self.given:
                self._deal()
            if self.waiting and not self.capturing:
                self._collect()
            arena = self.private or self.arenas[stream]
            blocks = arena.quick.get(size)
            if blocks and not arena.compact:
                block = blocks.pop()
            else:
                block = self.with_room(f"{_format(size)} for {owner}", lambda: arena.take(size))
            self._used(block, owner)
        finally:
            self._lock.release()
        if self.poison:
            self.driver.fill(block.pointer, 0xFF, block.size, stream)
        return block

    def _used(self, block: Block, owner: str) -> None:
        block.owner = owner
        self.allocations += 1
        allocated = self._allocated = self._allocated + block.size
        if allocated > self.max_allocated:
            self.max_allocated = allocated
        if self._watch is not None:
            self._watch(block.pointer, block.size)

    def with_room(self, what: str, call: Callable[[], T]) -> T:
        """The result of a call that takes the driver's memory. Raises OutOfMemoryError; `empty_cache` was tried."""
        try:
            return call()
        except OutOfDeviceMemory:
            if not self.capturing:  # or the wait would end the capture
                self.empty_cache()
        try:
            return call()
        except OutOfDeviceMemory:
            raise OutOfMemoryError(self._explain(what), next=OutOfMemoryError.ADVICE) from None

    @contextmanager
    def traced(self, stream: int) -> Iterator[list[tuple[int, int]]]:
        """Inside the block, the stream's blocks are compact, and what `watch` is told is collected; what watches
        already goes on. Blocks are still only noted when they are given back, and dealt with before the next is taken.
        """
        arena, watch = self.arenas[stream], self._watch
        events: list[tuple[int, int]] = []

        def note(address: int, nbytes: int) -> None:
            events.append((address, nbytes))
            if watch is not None:
                watch(address, nbytes)

        self.take_back()
        before, arena.compact, self._watch = arena.compact, True, note
        try:
            yield events
        finally:
            self.take_back()
            self._watch, arena.compact = watch, before

    def take_back(self) -> None:
        """Deal with the blocks that were given back so far."""
        with self._lock:
            self._deal()

    def _deal(self) -> None:
        while self.given:
            try:
                block = self.given.popleft()
            except IndexError:  # a finalizer has dealt with it, while memory is watched
                return
            if self.capturing and (block.streams is not None or block.arena is not self.private):
                self.held.append(block)
            elif self.kept:
                self.kept[-1].append(block)
            elif block.streams is not None:  # let it wait until these streams have passed where they are now
                events = [self.driver.mark(stream) for stream in block.streams]
                block.streams = None
                self.waiting.append((block, events))
            else:
                self._settle(block)

    def _settle(self, block: Block) -> None:
        self._allocated -= block.size
        if self._watch is not None:
            self._watch(block.pointer, -block.size)
        block.arena.quick.setdefault(block.size, []).append(block)

    def keep(self) -> None:
        """From here on, keep blocks that are given back: work of two streams may use them, until `give_kept`."""
        with self._lock:
            self._deal()
            self.kept.append([])

    def give_kept(self, count: int) -> None:
        """Let the blocks be used again that were kept since the first `count` of `keep`."""
        with self._lock:
            self._deal()
            passed = [block for _ in range(count) for block in self.kept.popleft()]
            for block in passed:
                self._settle(block)

    def end_capture(self) -> list[Block]:
        """Go back to normal; the blocks that were held."""
        with self._lock:
            self.give_kept(len(self.kept))
            self.capturing = False
            held, self.held = self.held, []
            return held

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that work of another stream uses a block: it is not reused before that work is done."""
        with self._lock:
            block.streams = {stream, *(block.streams or ())}

    def _collect(self, wait: bool = False) -> None:
        """Take back the waiting blocks whose events have happened; with `wait` all of them."""
        self._deal()
        waiting, self.waiting = self.waiting, []
        for block, events in waiting:
            if wait or all(self.driver.is_event_done(event) for event in events):
                for event in events:
                    if wait:
                        self.driver.synchronize_event(event)
                    self.driver.destroy_event(event)
                self._settle(block)
            else:
                self.waiting.append((block, events))

    def end_retired(self) -> None:
        """Destroy the graphs that nobody holds any more; waits for the device."""
        while self.retired:
            self.retired.popleft()()

    def settle(self) -> None:
        """Take back the blocks that waited for other streams; the device is idle."""
        with self._lock:
            self._collect(wait=True)

    def _all(self) -> list[Arena]:
        return [*self.arenas.values(), *([self.graphs] if self.graphs is not None else [])]

    def _release(self) -> None:
        """Wait for the device and give every segment back that nothing uses: no tensor, no graph."""
        self.end_retired()
        self.driver.synchronize()
        self._collect(wait=True)
        for arena in self._all():
            if arena is not self.graphs or (self.graph_count == 0 and self.private is None):
                arena.release()

    def reserve(self, nbytes: int) -> int:
        """A segment from the driver; raises OutOfDeviceMemory."""
        pointer = self.driver.allocate(nbytes)
        self.driver_allocations += 1
        self._reserved(pointer, nbytes)
        return pointer

    def _reserved(self, pointer: int, nbytes: int) -> None:
        self.segments[pointer] = nbytes
        self.reserved += nbytes
        self.max_reserved = max(self.max_reserved, self.reserved)

    def unreserve(self, pointer: int, nbytes: int) -> None:
        """Give a segment back to the driver."""
        del self.segments[pointer]
        self.reserved -= nbytes
        self.driver.free(pointer)

    def empty_cache(self) -> None:
        """Give every segment without a block in use back to the driver."""
        with self._lock:
            self._release()

    def empty_graphs(self) -> None:
        """Give the segments of graphs without a block in use back to the driver; the device is idle."""
        with self._lock:
            self._deal()
            if self.graphs is not None:
                self.graphs.release()

    def reset_peak(self) -> None:
        """Let the peaks start from what is in use now."""
        self.max_allocated, self.max_reserved = self.allocated, self.reserved

    def snapshot(self) -> list[dict[str, Any]]:
        """Every block by address: segment, size, whether it is in use, and the op that asked for it."""
        with self._lock:
            found = []
            self._deal()
            late = {b.pointer for b, _ in self.waiting}
            for arena in [*self._all(), *self.foreign]:
                idle = late.union(*([b.pointer for b in blocks] for blocks in list(arena.quick.values())))
                for block in list(arena.blocks.values()):
                    used = not block.free and block.pointer not in idle
                    found.append(
                        {
                            "address": block.pointer,
                            "size": block.size,
                            "state": "allocated" if used else "free",
                            "op": block.owner if used else "",
                        }
                    )
            return sorted(found, key=lambda row: row["address"])

    def _explain(self, request: str) -> str:
        free, total = self.driver.memory_info()
        holders: dict[str, list[dict[str, Any]]] = {}
        for row in self.snapshot():
            if row["state"] == "allocated":
                holders.setdefault(row["op"], []).append(row)
        shapes, sums = self.describe(), {name: sum(row["size"] for row in rows) for name, rows in holders.items()}
        told = []
        for name in sorted(sums, key=lambda name: -sums[name])[:HOLDERS]:
            count, largest = len(holders[name]), max(holders[name], key=lambda row: int(row["size"]))
            shape = shapes.get(largest["address"])
            told.append(
                f"{name} {_format(sums[name])} in {count} block{'s' * (count > 1)}"
                + (f", the largest {shape}" if shape else "")
            )
        made = "; ".join(told)
        return (
            f"cuda:{self.driver.index} has no room for {request}: {_format(free)} of {_format(total)}"
            f" are free, Genesis holds {_format(self.allocated)} in tensors and {_format(self.reserved)} in all"
            + (f"; made by {made}" if made else "")
        )


def room_for(events: Sequence[tuple[int, int]]) -> int:
    """Bytes of a segment in which large blocks that are taken and given back like these find room one by one. A block
    that is in use at the end of `events`, which `Pool.traced` gave, lasts, and has no part in it.
    """
    ended: set[int] = set()
    passing = [False] * len(events)
    for i, (address, nbytes) in reversed([*enumerate(events)]):
        if nbytes < 0:
            ended.add(address)
        elif address in ended:
            ended.remove(address)
            passing[i] = nbytes > SMALL
    driver: Any = SimpleNamespace(allocate=lambda nbytes: 0)  # one segment, of any size, at address 0
    pool = Pool(driver)
    pool.private = arena = Arena(pool, compact=True)
    arena.room = ENDLESS
    used: dict[int, Block] = {}
    end = 0
    for (address, nbytes), passes in zip(events, passing, strict=True):
        if passes:
            used[address] = block = pool.take(nbytes, 0)
            end = max(end, block.pointer + block.size)
        elif nbytes < 0 and address in used:
            pool.give(used.pop(address))
    return end


class CudaStorage:
    """Device bytes: a block of the pool, or memory that belongs to `owner` (another library's tensor)."""

    __slots__ = ("__weakref__", "backend", "block", "nbytes", "owner", "pointer", "pool", "version")

    def __init__(self, pool: Pool, block: Block | None, pointer: int, nbytes: int, owner: object = None) -> None:
        self.pool, self.block, self.pointer, self.nbytes, self.owner = pool, block, pointer, nbytes, owner
        self.backend, self.version = pool.backend, 0

    def __del__(self) -> None:
        if self.block is not None:
            self.pool.give(self.block)


def _format(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
