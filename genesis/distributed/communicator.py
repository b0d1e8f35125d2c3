"""NCCL's communicator of one rank, through the raw bindings of nccl4py: addresses and bytes, in the order of a stream.

Nothing here waits for the device, but for the start and the end. Those, and `abort`, run in a thread of their own with
a limit: each of them waits for ever where a rank does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from genesis.backend.cuda.driver import Driver, OutOfDeviceMemory
from genesis.errors import DistributedError

ZERO_CTAS = 2  # NCCL_CTA_POLICY_ZERO

_BYTE = 1  # ncclUint8: what travels is never computed with
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: all ranks name the same places of it
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t


class Memory(NamedTuple):
    """Bytes on the device."""

    pointer: int
    nbytes: int


class Tuning(NamedTuple):
    """How NCCL shares the GPU with other kernels; None leaves it to NCCL."""

    min_ctas: int | None = None  # the fewest thread blocks of a collective, each of which takes an SM
    max_ctas: int | None = None  # and the most
    # 1 prefers few of them, 2 none (`ZERO_CTAS`), by DMA engines, where all ranks have mapped the memory
    cta_policy: int | None = None


def bindings() -> Any:
    """nccl4py's module. Raises ImportError without it, RuntimeError or OSError without NCCL's library."""
    from nccl.bindings import nccl

    nccl.get_version()  # loads the library
    return nccl


def identity_of(nccl: Any) -> bytes:
    """The name of a new communicator, which rank 0 tells the others; it listens for them from now on."""
    return bytes(nccl.get_unique_id())


class Communicator:
    """One rank's end of it, `is_open` until it is closed or aborted.

    `identity` is what `identity_of` gave on rank 0. The other ranks may take `limit_s` to come.
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
        made: list[Any] = []

        def start() -> None:
            driver.enter()
            made.append(nccl.comm_init_rank_config(size, nccl.UniqueId.from_buffer(identity), rank, config))

        self._bounded("the start of NCCL", start, limit_s, "NCCL did not start")
        self._handle, self.is_open = made[0], True

    # --- Collectives --------------------------------------------------------------------------------------------------

    def exchange(
        self, sends: Sequence[tuple[int, Memory]], receives: Sequence[tuple[int, Memory]], stream: int
    ) -> None:
        """Send memory to ranks and take theirs, all at once."""
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
        """Put the parts of all ranks, of one size, one after the other at `out`; `part` may be there already."""
        if part.nbytes:
            gather = self._nccl.all_gather
            self._launch("a gather", lambda: gather(part.pointer, out, part.nbytes, _BYTE, self._handle, stream))

    def gather_in_place(self, out: int, nbytes: int, stream: int) -> None:
        """The parts of all ranks, of `nbytes`, one after the other at `out`, where this rank's is."""
        self.all_gather(Memory(out + self.rank * nbytes, nbytes), out, stream)

    def all_to_all(self, source: int, out: int, nbytes: int, stream: int) -> None:
        """Send each rank its `nbytes` of those at `source`, and put what each rank sends at `out`, in their order."""
        if nbytes:
            call = self._nccl.allto_all
            self._launch("an all-to-all", lambda: call(source, out, nbytes, _BYTE, self._handle, stream))

    def allocate(self, nbytes: int) -> int:
        """Memory that other ranks can map. It stays until the process ends. Raises: OutOfDeviceMemory."""
        self._driver.enter()
        try:
            return int(self._nccl.mem_alloc(nbytes))
        except self._nccl.NCCLError as error:
            if self._driver.memory_info()[0] < nbytes:
                raise OutOfDeviceMemory from error
            raise DistributedError(f"memory for other ranks failed: {error}", next=_LOOK) from error

    def map(self, pointer: int, nbytes: int, limit_s: float) -> None:
        """Map such memory on all ranks, as many bytes of each: a call of all ranks."""

        def work() -> None:
            self._driver.enter()
            self._nccl.comm_window_register(self._handle, pointer, nbytes, _SYMMETRIC)

        self._bounded("memory of all ranks", work, limit_s, "memory of all ranks was not mapped")

    def broadcast(self, memory: Memory, root: int, stream: int) -> None:
        """Overwrite the memory with that of rank `root`."""
        if memory.nbytes:
            call, at, nbytes = self._nccl.broadcast, memory.pointer, memory.nbytes
            self._launch("a broadcast", lambda: call(at, at, nbytes, _BYTE, root, self._handle, stream))

    def _launch(self, what: str, work: Callable[[], None]) -> None:
        if not self.is_open:
            raise DistributedError(f"{what} after the end of NCCL", next="start the job again, with --resume")
        driver = self._driver
        driver.enter()
        if driver.pending:
            driver.flush()
        self._called(what, work)
        if driver.dependent:
            driver.serialize_next_launch()  # a kernel of ours does not start early behind one of NCCL's

    def _called(self, what: str, work: Callable[[], None]) -> None:
        """Raises DistributedError where NCCL says no."""
        try:
            work()
        except self._nccl.NCCLError as error:
            raise DistributedError(f"{what} failed: {error}", next=_LOOK) from error

    def _bounded(self, what: str, work: Callable[[], None], limit_s: float, late: str) -> None:
        if not _within(limit_s, lambda: self._called(what, work)):
            raise DistributedError(f"{late} within {limit_s:.3g} s", next=_LOOK)

    # --- Faults and the end -------------------------------------------------------------------------------------------

    def fault(self) -> str:
        """What has gone wrong since, if anything: in any thread, at any time."""
        if not self.is_open:
            return ""
        code = self._nccl.comm_get_async_error(self._handle)
        if code in (_SUCCESS, _IN_PROGRESS):
            return ""
        return f"{self._nccl.get_error_string(code)}: {self._nccl.get_last_error(self._handle)}".rstrip(": ")

    def abort(self, limit_s: float) -> bool:
        """Give up what is under way, on this rank alone, whoever else waits for it; whether that was done in time."""
        if not self.is_open:
            return True
        self.is_open = False
        return _within(limit_s, self._ended(self._nccl.comm_abort))

    def close(self, limit_s: float) -> None:
        """Leave with all ranks; no graph may hold a collective. Raises DistributedError where one does not come."""
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


_LOOK = "NCCL_DEBUG=INFO shows what NCCL does"


def _within(limit_s: float, work: Callable[[], None]) -> bool:
    """Run `work` in another thread; whether it ended in time. Raises what it raised."""
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
