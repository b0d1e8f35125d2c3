"""The NCCL communicator of one rank, through the raw bindings of nccl4py. It moves bytes in stream order.

Only the start and the end wait for the device. They and `abort` run in their own thread with a time limit, because NCCL
waits forever for a rank that does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from genesis.backend.cuda.driver import Driver, OutOfDeviceMemory
from genesis.errors import DistributedError

ZERO_CTAS = 2  # NCCL_CTA_POLICY_ZERO

_BYTE = 1  # ncclUint8: NCCL only moves data and never computes with it
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: all ranks use the same offsets in it
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t


class Memory(NamedTuple):
    """A range of device memory."""

    pointer: int
    nbytes: int


class Tuning(NamedTuple):
    """How NCCL shares the GPU with other kernels. None means NCCL's default."""

    min_ctas: int | None = None  # minimum number of thread blocks of a collective; each occupies an SM
    max_ctas: int | None = None  # maximum number
    # 1 prefers few blocks. 2 (`ZERO_CTAS`) uses none: DMA engines copy between memory that all ranks have mapped.
    cta_policy: int | None = None


def bindings() -> Any:
    """Return nccl4py's module. Raises ImportError without it, RuntimeError or OSError without NCCL's library."""
    from nccl.bindings import nccl

    nccl.get_version()  # loads the library
    return nccl


def identity_of(nccl: Any) -> bytes:
    """Return the id of a new communicator, for which rank 0 starts to listen. All ranks need this id."""
    return bytes(nccl.get_unique_id())


class Communicator:
    """One rank's end of a communicator, `is_open` until it is closed or aborted.

    `identity` is the result of `identity_of` on rank 0. All ranks must join within `limit_s` seconds.
    """

    def __init__(
        self, nccl: Any, driver: Driver, rank: int, size: int, identity: bytes, limit_s: float, tuning: Tuning
    ) -> None:
        self.rank, self.size, self.is_open = rank, size, False
        self._nccl, self._driver = nccl, driver
        config = nccl.Config()
        for name, value in tuning._asdict().items():
            if value is not None:
                setattr(config, name, value)
        handles: list[Any] = []

        def start() -> None:
            driver.enter()
            handles.append(nccl.comm_init_rank_config(size, nccl.UniqueId.from_buffer(identity), rank, config))

        self._bounded("the start of NCCL", start, limit_s, "NCCL did not start")
        self._handle, self.is_open = handles[0], True

    # --- Collectives --------------------------------------------------------------------------------------------------

    def exchange(
        self, sends: Sequence[tuple[int, Memory]], receives: Sequence[tuple[int, Memory]], stream: int
    ) -> None:
        """Send memory to ranks and receive theirs, in one NCCL group."""
        nccl = self._nccl

        def work() -> None:
            nccl.group_start()
            try:
                for rank, memory in sends:
                    nccl.send(memory.pointer, memory.nbytes, _BYTE, rank, self._handle, stream)
                for rank, memory in receives:
                    nccl.recv(memory.pointer, memory.nbytes, _BYTE, rank, self._handle, stream)
            finally:
                nccl.group_end()

        if sends or receives:
            self._launch("an exchange", work)

    def all_gather(self, part: Memory, out: int, stream: int) -> None:
        """Gather the equal parts of all ranks at `out`, in rank order. `part` may already be in its place there."""
        if part.nbytes:
            gather = self._nccl.all_gather
            self._launch("a gather", lambda: gather(part.pointer, out, part.nbytes, _BYTE, self._handle, stream))

    def gather_in_place(self, out: int, nbytes: int, stream: int) -> None:
        """Gather parts of `nbytes` of all ranks at `out`, where this rank's part already is."""
        self.all_gather(Memory(out + self.rank * nbytes, nbytes), out, stream)

    def all_to_all(self, source: int, out: int, nbytes: int, stream: int) -> None:
        """Send each rank its `nbytes` from `source`, and store what each rank sends at `out`, in rank order."""
        if nbytes:
            call = self._nccl.allto_all
            self._launch("an all-to-all", lambda: call(source, out, nbytes, _BYTE, self._handle, stream))

    def allocate(self, nbytes: int) -> int:
        """Allocate memory that other ranks can map. It is never freed. Raises OutOfDeviceMemory, DistributedError."""
        self._driver.enter()
        try:
            return int(self._nccl.mem_alloc(nbytes))
        except self._nccl.NCCLError as error:
            if self._driver.memory_info()[0] < nbytes:
                raise OutOfDeviceMemory from error
            raise DistributedError(f"NCCL cannot allocate {nbytes} bytes: {error}", next=_LOOK) from error

    def map(self, pointer: int, nbytes: int, limit_s: float) -> None:
        """Map memory from `allocate` on all ranks, with equal sizes. A collective call."""

        def work() -> None:
            self._driver.enter()
            self._nccl.comm_window_register(self._handle, pointer, nbytes, _SYMMETRIC)

        self._bounded("mapping memory on all ranks", work, limit_s, "NCCL did not map memory on all ranks")

    def broadcast(self, memory: Memory, root: int, stream: int) -> None:
        """Overwrite the memory with the contents on rank `root`."""
        if memory.nbytes:
            call, at, nbytes = self._nccl.broadcast, memory.pointer, memory.nbytes
            self._launch("a broadcast", lambda: call(at, at, nbytes, _BYTE, root, self._handle, stream))

    def _launch(self, what: str, work: Callable[[], None]) -> None:
        if not self.is_open:
            raise DistributedError(f"{what} was called after the end of NCCL", next="restart the job with --resume")
        driver = self._driver
        driver.enter()
        if driver.pending:
            driver.flush()
        self._called(what, work)
        if driver.dependent:
            driver.serialize_next_launch()  # our next kernel must not start before NCCL has finished

    def _called(self, what: str, work: Callable[[], None]) -> None:
        """Call `work`. Raises DistributedError for an error of NCCL."""
        try:
            work()
        except self._nccl.NCCLError as error:
            raise DistributedError(f"{what} failed: {error}", next=_LOOK) from error

    def _bounded(self, what: str, work: Callable[[], None], limit_s: float, late: str) -> None:
        if not _within(limit_s, lambda: self._called(what, work)):
            raise DistributedError(f"{late} within {limit_s:.3g} s", next=_LOOK)

    # --- Faults and the end -------------------------------------------------------------------------------------------

    def fault(self) -> str:
        """Return NCCL's asynchronous error, or "". May be called in any thread."""
        if not self.is_open:
            return ""
        code = self._nccl.comm_get_async_error(self._handle)
        if code in (_SUCCESS, _IN_PROGRESS):
            return ""
        return f"{self._nccl.get_error_string(code)}: {self._nccl.get_last_error(self._handle)}".rstrip(": ")

    def abort(self, limit_s: float) -> bool:
        """Abort all running collectives on this rank, and return whether this finished within the limit."""
        if not self.is_open:
            return True
        self.is_open = False
        return _within(limit_s, self._ended(self._nccl.comm_abort))

    def close(self, limit_s: float) -> None:
        """Close the communicator with all ranks. No graph may still contain a collective. Raises DistributedError."""
        if not self.is_open:
            return
        self.is_open = False

        def work(handle: Any) -> None:
            self._nccl.comm_finalize(handle)
            self._nccl.comm_destroy(handle)

        self._bounded("the end of NCCL", self._ended(work), limit_s, "NCCL did not end")

    def _ended(self, how: Callable[[Any], None]) -> Callable[[], None]:
        def work() -> None:
            self._driver.enter()
            how(self._handle)

        return work


_LOOK = "run again with NCCL_DEBUG=INFO"


def _within(limit_s: float, work: Callable[[], None]) -> bool:
    """Run `work` in another thread, and return whether it finished in time. Raises the error that it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="genesis-nccl", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    return not thread.is_alive()
