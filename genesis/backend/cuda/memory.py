"""The caching pool of device memory: blocks split from large segments, reused in stream order, merged when necessary.

A block returns to its arena (one per stream, and one for all graphs) when its last user on the host is gone. Work that
was launched before still runs before whatever reuses the memory, because both are in the same stream. A block of the
same size as one just returned is reused without a search. Blocks are merged with their neighbours only when no free
block is large enough. A block that another stream also used is not reused until that stream has passed its use.

Finalizers return blocks, and they run in any thread at any moment, for example in a thread that compiles a kernel that
another thread waits for. So returning a block only queues it, and never waits for a lock or for the driver. The next
call that allocates, or that reads how much is in use, processes the queue.
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
SMALL = 1 << 20  # bytes; blocks up to this size share small segments
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
HOLDERS = 5  # listed in an out-of-memory error
KEEP_WHOLE = 1 << 20  # bytes; the smallest remainder that is split off a large block
ENDLESS = 1 << 60  # bytes
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Block:
    """A range of device memory inside a segment, linked to its neighbours."""

    arena: Arena
    pointer: int
    size: int  # bytes
    small: bool  # whether its segment is for small blocks
    before: Block | None = None
    after: Block | None = None
    free: bool = False  # whether it is in its arena's sorted list
    owner: str = ""  # the op that allocated it, while it is in use
    streams: set[int] | None = None  # other streams that used it since it was taken


class Arena:
    """Segments whose blocks are reused in the order of one stream.

    A `compact` arena allocates exactly the requested sizes and merges free blocks before each allocation. That reserves
    less memory but costs host time. Its first segment for large blocks has at least `room` bytes, and they are taken
    from the lowest free address, as `room_for` assumes.
    """

    def __init__(self, pool: Pool, compact: bool = False) -> None:
        self.pool, self.compact, self.room = pool, compact, 0
        self.graph_count = 0  # open graphs whose memory is in this arena
        self.quick: dict[int, list[Block]] = {}  # by size, returned and not merged
        self.sorted: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # small and large (size, pointer)
        self.blocks: dict[int, Block] = {}  # by pointer

    def take(self, size: int) -> Block:
        """Return a block of `size` bytes: one just returned, the best fit, or one from a new segment."""
        if self.compact:
            self.merge()
        block = self._fit(size)
        if block is None and self.merge():
            block = self._fit(size)
        if block is None:
            block = self._segment(size)
        return self._split(block, size)

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
        remainder = block.size - size
        if remainder >= (ALIGNMENT if block.small or self.compact else KEEP_WHOLE):
            tail = Block(self, block.pointer + size, remainder, block.small)
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
        """Merge returned blocks with their free neighbours; return whether there were any."""
        # Swapped first, because finalizers may return further blocks meanwhile if memory is watched.
        quick, self.quick = self.quick, {}
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
        """Return segments without a block in use to the driver."""
        self.merge()
        for block in list(self.blocks.values()):
            if block.free and block.before is None and block.after is None:
                self._unlist(block)
                del self.blocks[block.pointer]
                self.pool.unreserve(block.pointer, block.size)


class ForeignArena(Arena):
    """Blocks that another library allocates, which other processes may map. They are never returned to the driver."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        pool.foreign.append(self)

    def make(self, nbytes: int, owner: str, allocate: Callable[[int], int]) -> Block:
        """Return a new block at the address from `allocate`. Raises OutOfMemoryError like `Pool.take`."""
        pool = self.pool
        pointer = pool.with_room(f"{_format(nbytes)} for {owner}", lambda: allocate(nbytes))
        with pool._lock:
            pool._reserved(pointer, nbytes)
            block = self.blocks[pointer] = Block(self, pointer, nbytes, small=False)
            pool._used(block, owner)
            return block

    def reuse(self, nbytes: int, owner: str) -> Block:
        """Return a block of exactly this size that was returned before; `has` must be true."""
        with self.pool._lock:
            block = self.quick[nbytes].pop()
            self.pool._used(block, owner)
            return block

    def has(self, nbytes: int) -> bool:
        """Whether a returned block of exactly this size is available."""
        self.pool.take_back()
        return bool(self.quick.get(nbytes))

    def holds(self, pointer: int, nbytes: int) -> bool:
        """Whether a memory range is inside one block."""
        return any(start <= pointer and pointer + nbytes <= start + b.size for start, b in self.blocks.items())


class Arenas(defaultdict[int, Arena]):
    """The arenas of a pool by stream; `is_open` until the program drops the pool."""

    is_open = True


class Pool:
    """All arenas of a device, with counters in bytes. `reserved` counts everything allocated from the driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.backend: Any = None  # the backend that runs ops on this memory
        self.arenas = self._main = self.new_arenas()
        self.others: list[Arenas] = []  # arenas of pools with memory of their own; see `taking_from`
        self.limit = ENDLESS  # bytes that may be reserved
        self.private: Arena | None = None  # the arena that a capture and its warm-up allocate from, while they run
        self.graph_arenas: dict[int, Arena] = {}  # memory of graphs by handle; graphs of functions share SHARED
        self.before_replay: list[Callable[[], None]] | None = None  # host work of a captured block; see `CUDAGraph`
        self.capturing = False  # whether returned blocks are held until `end_capture`
        self.held: list[Block] = []  # returned during a capture, which may have recorded work on them
        self.kept: deque[list[Block]] = deque()  # returned since the start of each piece of side-stream work
        self.returned: deque[Block] = deque()  # not processed yet
        self.give: Callable[[Block], None] = self.returned.append  # returns a block to its stream; never waits
        self.waiting: list[tuple[Block, list[int]]] = []  # returned, with events of their use in other streams
        # Destructors of graphs without an owner; they wait for the device, so they run where waiting is allowed.
        self.retired: deque[Callable[[], None]] = deque()
        self.segments: dict[int, int] = {}
        self.foreign: list[ForeignArena] = []  # arenas of blocks that other libraries allocated
        self._allocated = self.max_allocated = self.reserved = self.max_reserved = 0
        self.allocations = self.driver_allocations = 0
        self.poison = False  # fill new memory with NaN patterns, so that reads of uninitialized memory are visible
        self.owner = "empty"  # the owner of new blocks: the running op, or the name set by `owned_by`
        self.describe: Callable[[], dict[int, str]] = dict  # dtype and shape of the tensor in each block, by address
        self._watch: Callable[[int, int], None] | None = None
        self._lock = threading.RLock()  # reentrant: errors read the snapshot, and finalizers interrupt

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        self.take_back()
        return self._allocated

    @property
    def watch(self) -> Callable[[int, int], None] | None:
        """A function that gets the address and size of every block taken, and a negative size when one is returned.

        It is called at once unless another thread is using the pool. None if nothing watches.
        """
        return self._watch

    @watch.setter
    def watch(self, watch: Callable[[int, int], None] | None) -> None:
        self.take_back()
        self._watch = watch
        self.give = self.returned.append if watch is None else self._give_at_once

    def new_arenas(self) -> Arenas:
        """Return arenas whose memory is separate."""
        return Arenas(lambda: Arena(self))

    @contextmanager
    def taking_from(self, arenas: Arenas) -> Iterator[None]:
        """Take blocks from other arenas inside the block."""
        with self._lock:
            if not any(arenas is each for each in self.others):
                self.others.append(arenas)
            before, self.arenas = self.arenas, arenas
        try:
            yield
        finally:
            self.arenas = before

    def _give_at_once(self, block: Block) -> None:
        self.returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._process_returned()
            finally:
                self._lock.release()

    def take(self, nbytes: int, stream: int, owner: str | None = None) -> Block:
        """Return a block of at least `nbytes`, rounded up to a positive multiple of 512 bytes, contents undefined.

        Args:
            owner: the owner of the memory; None for `Pool.owner`.

        Raises:
            OutOfMemoryError: the message has the request, the free memory and the largest owners.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        owner = owner or self.owner
        self._lock.acquire()  # `with` takes twice as long, and every op runs this
        try:
            if self.returned:
                self._process_returned()
            if self.waiting and not self.capturing:
                self._collect_waiting()
            arena = self.private or self.arenas[stream]
            # A block of the same size needs no search.
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
        """Run a call that allocates driver memory, and retry after `empty_cache`. Raises OutOfMemoryError."""
        try:
            return call()
        except OutOfDeviceMemory:
            if not self.capturing:  # waiting would invalidate the capture
                self.empty_cache()
        try:
            return call()
        except OutOfDeviceMemory:
            raise OutOfMemoryError(self._explain(what), next=OutOfMemoryError.ADVICE) from None

    @contextmanager
    def traced(self, stream: int) -> Iterator[list[tuple[int, int]]]:
        """Make the stream's arena compact inside the block, and collect the events that `watch` gets.

        An existing watch continues. Finalizers still only queue blocks, and the next allocation processes them.
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
        """Process the blocks that were returned so far."""
        with self._lock:
            self._process_returned()

    def _process_returned(self) -> None:
        while self.returned:
            try:
                block = self.returned.popleft()
            except IndexError:  # a finalizer has processed it, while memory is watched
                return
            if self.capturing and (block.streams is not None or block.arena is not self.private):
                self.held.append(block)
            elif self.kept:
                self.kept[-1].append(block)
            elif block.streams is not None:
                # Reusable once these streams have passed their present work.
                events = [self.driver.mark(stream) for stream in block.streams]
                block.streams = None
                self.waiting.append((block, events))
            else:
                self._make_reusable(block)

    def _make_reusable(self, block: Block) -> None:
        self._allocated -= block.size
        if self._watch is not None:
            self._watch(block.pointer, -block.size)
        block.arena.quick.setdefault(block.size, []).append(block)

    def keep(self) -> None:
        """Keep blocks that are returned from now on until `give_kept`, because two streams may use them."""
        with self._lock:
            self._process_returned()
            self.kept.append([])

    def give_kept(self, count: int) -> None:
        """Make the blocks reusable that were kept since the first `count` calls of `keep`."""
        with self._lock:
            self._process_returned()
            passed = [block for _ in range(count) for block in self.kept.popleft()]
            for block in passed:
                self._make_reusable(block)

    def end_capture(self) -> list[Block]:
        """End the capture and return the blocks that were held during it."""
        with self._lock:
            self.give_kept(len(self.kept))
            self.capturing = False
            held, self.held = self.held, []
            return held

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block, so that it is not reused before that work is done."""
        with self._lock:
            block.streams = {stream, *(block.streams or ())}

    def _collect_waiting(self, wait: bool = False) -> None:
        """Make waiting blocks reusable whose events have happened, or all of them with `wait`."""
        self._process_returned()
        waiting, self.waiting = self.waiting, []
        for block, events in waiting:
            if wait or all(self.driver.is_event_done(event) for event in events):
                for event in events:
                    if wait:
                        self.driver.synchronize_event(event)
                    self.driver.destroy_event(event)
                self._make_reusable(block)
            else:
                self.waiting.append((block, events))

    def end_retired(self) -> None:
        """Destroy the graphs without an owner; waits for the device."""
        while self.retired:
            self.retired.popleft()()

    def settle(self) -> None:
        """Make all waiting blocks reusable. The device must be idle."""
        with self._lock:
            self._collect_waiting(wait=True)

    def graph_arena(self, handle: int) -> Arena:
        """Return the arena of the graphs with this pool handle."""
        if handle not in self.graph_arenas:
            self.graph_arenas[handle] = Arena(self, compact=True)
        return self.graph_arenas[handle]

    @property
    def graph_count(self) -> int:
        """The number of open graphs."""
        return sum(arena.graph_count for arena in self.graph_arenas.values())

    def _all(self) -> list[Arena]:
        kept = [self._main, *self.others]
        return [arena for arenas in kept for arena in arenas.values()] + list(self.graph_arenas.values())

    def _release(self) -> None:
        """Wait for the device and release every segment that no tensor and no graph uses."""
        self.end_retired()
        self.driver.synchronize()
        self._collect_waiting(wait=True)
        for arena in self._all():
            if arena.graph_count == 0 and arena is not self.private:
                arena.release()
        self.others = [a for a in self.others if a.is_open or any(arena.blocks for arena in a.values())]

    def reserve(self, nbytes: int) -> int:
        """Allocate a segment from the driver. Raises OutOfDeviceMemory."""
        if self.reserved + nbytes > self.limit:
            raise OutOfDeviceMemory
        pointer = self.driver.allocate(nbytes)
        self.driver_allocations += 1
        self._reserved(pointer, nbytes)
        return pointer

    def _reserved(self, pointer: int, nbytes: int) -> None:
        self.segments[pointer] = nbytes
        self.reserved += nbytes
        self.max_reserved = max(self.max_reserved, self.reserved)

    def unreserve(self, pointer: int, nbytes: int) -> None:
        """Return a segment to the driver."""
        del self.segments[pointer]
        self.reserved -= nbytes
        self.driver.free(pointer)

    def empty_cache(self) -> None:
        """Return every segment without a block in use to the driver."""
        with self._lock:
            self._release()

    def drop_unused_arenas(self) -> None:
        """Forget the arenas of graphs without an open graph or a segment. The device must be idle."""
        with self._lock:
            self._process_returned()
            for handle, arena in list(self.graph_arenas.items()):
                if handle and arena.graph_count == 0 and arena is not self.private:
                    arena.release()
                    if not arena.blocks:
                        del self.graph_arenas[handle]

    def release_arena(self, arena: Arena) -> None:
        """Return the segments of graphs without a block in use to the driver. The device must be idle."""
        with self._lock:
            self._process_returned()
            arena.release()

    def reset_peak(self) -> None:
        """Reset the peaks to the present use."""
        self.max_allocated, self.max_reserved = self.allocated, self.reserved

    def snapshot(self, arenas: list[Arena] | None = None) -> list[dict[str, Any]]:
        """A row for every block, by address: segment, size, whether it is in use, and the op that allocated it.

        Args:
            arenas: only the blocks of these.
        """
        with self._lock:
            rows = []
            self._process_returned()
            late = {b.pointer for b, _ in self.waiting}
            for arena in [*self._all(), *self.foreign] if arenas is None else arenas:
                idle = late.union(*([b.pointer for b in blocks] for blocks in list(arena.quick.values())))
                for block in list(arena.blocks.values()):
                    used = not block.free and block.pointer not in idle
                    rows.append(
                        {
                            "address": block.pointer,
                            "size": block.size,
                            "state": "allocated" if used else "free",
                            "op": block.owner if used else "",
                        }
                    )
            return sorted(rows, key=lambda row: row["address"])

    def _explain(self, request: str) -> str:
        free, total = self.driver.memory_info()
        # Group the blocks in use by owner, and list the largest owners.
        holders: dict[str, list[dict[str, Any]]] = {}
        for row in self.snapshot():
            if row["state"] == "allocated":
                holders.setdefault(row["op"], []).append(row)
        shapes, sums = self.describe(), {name: sum(row["size"] for row in rows) for name, rows in holders.items()}
        lines = []
        for name in sorted(sums, key=lambda name: -sums[name])[:HOLDERS]:
            count, largest = len(holders[name]), max(holders[name], key=lambda row: int(row["size"]))
            shape = shapes.get(largest["address"])
            lines.append(
                f"{name} {_format(sums[name])} in {count} block{'s' * (count > 1)}"
                + (f", the largest {shape}" if shape else "")
            )
        owners = "; ".join(lines)
        return (
            f"cuda:{self.driver.index} has no memory for {request}: {_format(free)} of {_format(total)}"
            f" are free, Genesis holds {_format(self.allocated)} in tensors and {_format(self.reserved)} in all"
            + (f"; largest owners: {owners}" if owners else "")
        )


def room_for(events: Sequence[tuple[int, int]]) -> int:
    """Bytes that a segment needs so that the large blocks of `events` (from `Pool.traced`) fit when they are replayed.

    Blocks still in use at the end of `events` are excluded, because they outlive the segment.
    """
    # Find the large blocks that are returned within the events.
    ended: set[int] = set()
    passing = [False] * len(events)
    for i, (address, nbytes) in reversed([*enumerate(events)]):
        if nbytes < 0:
            ended.add(address)
        elif address in ended:
            ended.remove(address)
            passing[i] = nbytes > SMALL
    # Replay the events in one endless segment, and measure how far it is filled.
    driver: Any = SimpleNamespace(allocate=lambda nbytes: 0)  # one segment of any size at address 0
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
    """Device memory: a block of the pool, or memory that belongs to `owner` (another library's tensor)."""

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
