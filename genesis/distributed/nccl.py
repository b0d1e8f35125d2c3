"""A group over NCCL, for ranks that have GPUs and can use it; without it a group goes through host memory.

Calls are launched on the current stream and return at once, so a CUDA graph can capture them. NCCL moves bytes and adds
nothing: its sums depend on algorithm and protocol. For a sum, ranks send each other their parts, and the op `rank_sum`
adds them as the definition of a group says. So results are those of `PeersGroup`, bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import CudaBackend, backend_of, driver_for
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.graph import close_graphs
from genesis.backend.cuda.memory import CudaStorage, ForeignArena
from genesis.backend.cuda.stream import take_stream
from genesis.distributed.communicator import ZERO_CTAS, Communicator, Memory, Tuning, bindings, identity_of
from genesis.distributed.group import (
    Group,
    PeersGroup,
    StagedGroup,
    check_array,
    check_gather,
    check_reduction,
    check_root,
    parts_of,
)
from genesis.distributed.peers import Peers
from genesis.distributed.watch import Deadline
from genesis.dtypes import DType, bfloat16, float32, uint8
from genesis.errors import DeviceError, DistributedError, PeerGoneError
from genesis.ops.elementwise import copy
from genesis.ops.gradients import rank_sum

STAGING = 48 << 20  # bytes that come from other ranks at a time, on their way into a sum: a bucket's
LITTLE = 1 << 20  # the same where gradients and weights travel another way
ABORT_S = 2.0  # how long NCCL may take to give up: kernels end at once, it waits for the end of graphs
_ROW = 512  # bytes of which a row of the staging memory is a multiple
_TURN_S = 0.001
_TRIAL = 64  # bytes of each rank
INSTALL = 'pip install "nccl4py>=0.6,<0.7" nvidia-nccl-cu13'  # the extra `distributed`
_RELEASE = "0.6."
_HAS_COPIES = 22800  # NCCL 2.28, the first whose all-to-all and all-gather go by DMA engines
_CUDA_12 = "nvidia-nccl-cu12"


class NcclGroup(Group):
    """The ranks of `peers`, each with a GPU of its own.

    A rank that makes another call than the others is not found out here, as `PeersGroup` finds it: nothing would be
    launched ahead. The device then stands still, which `fault` sees.

    What other ranks send lands in `staging` bytes. Where it `is_mapped`, what `buffer` gives travels by DMA engines,
    which the communicator must have been made for.
    """

    is_in_stream_order = True

    def __init__(
        self, peers: Peers, device: Device, nccl: Communicator, staging: int = STAGING, *, is_mapped: bool = False
    ) -> None:
        self.rank, self.size, self.device = peers.rank, peers.size, device
        self._peers, self._nccl, self._backend = peers, nccl, backend_of(device)
        self._row = max(staging // max(1, self.size - 1) // _ROW, 1) * _ROW
        with self._backend.owned_by("staging of collectives"):
            self._staging = empty((self._row * max(1, self.size - 1),), uint8, device)
        _ = self._backend.comm_stream  # made outside captures
        self._deadline = Deadline(self._backend.driver)
        wait = functools.partial(self._wait, peers.limit_s)
        self._mapped = MappedMemory(peers, nccl, self._backend, wait) if is_mapped else None
        # Have the kernel that adds loaded before anything waits for another rank: to load one, the driver waits for the
        # device, and answers no other thread meanwhile.
        for dtype in (bfloat16, float32):
            own = Array(self._staging.storage, (32,), (1,), dtype, self.device, 0)
            others = own.view((self.size - 1, 32), (0, 1), 0)
            total = Array(self._staging.storage, (32,), (1,), float32, self.device, 0)
            for rank, adds in itertools.product({self.rank, 0 if self._mapped else self.rank}, (False, True)):
                rank_sum(total, own, others, rank=rank, adds=adds, out=())
        # Reach all ranks in every way once: the first time NCCL makes connections, which takes memory and waits.
        rows = [_cut(self._staging, at, 32) for at in range(0, self._staging.size, self._row)]
        receives = [None if rank == self.rank else rows.pop() for rank in range(self.size)]
        self._exchange([_cut(self._staging, 64, 32)] * self.size, receives)
        whole = _cut(self._staging, 0, 4 * self.size)  # values do not matter
        self.all_gather(_cut(whole, 4 * self.rank, 4), whole, [4] * self.size)
        self.broadcast(whole)
        self._wait(self._peers.limit_s)

    def buffer(self, size: int, dtype: DType, owner: str, parts: Sequence[Sequence[int]]) -> Array | None:
        if self._mapped is None:
            return None
        self._mapped.expect(max((each[0] for each in parts), default=0) * self.size * dtype.itemsize)
        return self._mapped.array(size, dtype, owner)

    # --- Collectives --------------------------------------------------------------------------------------------------

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        cut = parts_of(self, source, out, parts)
        check_reduction(self, source, out)
        if self._mapped is not None and self._mapped.holds(source, cut):
            self._mapped.reduce_scatter(source, out, cut, adds=adds)
            self._launched()
            return
        starts = [sum(cut[:rank]) for rank in range(self.size)]
        for first, last in self._pieces(max(cut), source.dtype):
            spans = [(min(first, each), min(last, each)) for each in cut]
            whose = [_cut(source, start + a, b - a) for start, (a, b) in zip(starts, spans, strict=True)]
            a, b = spans[self.rank]
            self._add(_cut(out, a, b - a), whose, whose[self.rank], adds)

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        cut = parts_of(self, out, part, parts)
        check_gather(part, out)
        if self._mapped is not None and self._mapped.holds(out, cut):
            _copy(part, self._places(out, cut)[self.rank])
            self._mapped.all_gather(out, cut)
        elif len(set(cut)) == 1:
            self._nccl.all_gather(self._memory(part), out.data_ptr(), self._stream)
        else:
            places = self._places(out, cut)
            _copy(part, places[self.rank])
            self._exchange([places[self.rank]] * self.size, places)
        self._launched()

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        check_root(self, root)
        check_array(self, part)
        nothing: list[Array | None] = [None] * self.size
        if self.rank == root:
            assert out is not None, "the root has room for all"
            places = self._places(out, parts_of(self, out, part, parts))
            check_gather(part, out)
            _copy(part, places[root])
            self._exchange(nothing, places)
        else:
            self._exchange([part if rank == root else None for rank in range(self.size)], nothing)
        self._launched()

    def all_reduce(self, x: Array) -> None:
        """Every rank gets all values: for a few numbers."""
        check_reduction(self, x, x)
        for first, last in self._pieces(x.size, x.dtype):
            piece = _cut(x, first, last - first)
            self._add(piece, [piece] * self.size, piece, adds=False)

    def broadcast(self, x: Array, root: int = 0) -> None:
        check_root(self, root)
        check_array(self, x)
        self._nccl.broadcast(self._memory(x), root, self._stream)
        self._launched()

    def _add(self, out: Array, sends: Sequence[Array], own: Array, adds: bool) -> None:
        """Send each rank its values, and set `out` to the sum of those that come and of this rank's own."""
        length, itemsize = out.size, own.dtype.itemsize
        stride = self._row // itemsize
        rows = Array(self._staging.storage, (self.size - 1, length), (stride, 1), own.dtype, self.device,
                     self._staging.offset // itemsize)  # fmt: skip
        others = iter(range(self.size - 1))
        receives = [
            None if rank == self.rank else rows.view((length,), (1,), rows.offset + next(others) * stride)
            for rank in range(self.size)
        ]
        self._exchange(sends, receives)
        if length:
            rank_sum(out, own, rows, rank=self.rank, adds=adds, out=())
        self._launched()

    def _exchange(self, sends: Sequence[Array | None], receives: Sequence[Array | None]) -> None:
        """Send and receive what there is for and from each of the other ranks."""
        sent, received = (
            [(rank, self._memory(x)) for rank, x in enumerate(arrays) if rank != self.rank and x is not None and x.size]
            for arrays in (sends, receives)
        )
        self._nccl.exchange(sent, received, self._stream)

    def _memory(self, x: Array) -> Memory:
        """Of the pool: what is mapped goes another way, see `MappedMemory`."""
        assert self._mapped is None or not self._mapped.arena.holds(x.data_ptr(), x.nbytes), "mapped memory"
        return Memory(x.data_ptr(), x.nbytes)

    def _places(self, out: Array, cut: Sequence[int]) -> list[Array]:
        """The part of each rank."""
        return [_cut(out, sum(cut[:rank]), length) for rank, length in enumerate(cut)]

    def _pieces(self, length: int, dtype: DType) -> Iterator[tuple[int, int]]:
        """Spans of a part whose values fit into the staging memory."""
        most = self._row // dtype.itemsize
        for first in range(0, length, most):
            yield first, min(first + most, length)

    @property
    def _stream(self) -> int:
        return self._backend.stream

    # --- Deadlines, faults and the end --------------------------------------------------------------------------------

    def mark(self) -> None:
        """Watch what was launched so far, the replay of a graph for example: see `fault`."""
        if not (self._backend.pool.capturing or self._backend.driver.capturing):
            self._deadline.mark(self._stream)

    _launched = mark

    def fault(self) -> DistributedError | None:
        """What ends this rank: NCCL's own error, or a device that stands still for longer than ranks may take.

        For a thread that watches; the device is asked and not waited for.
        """
        peers = self._peers
        if not self._nccl.is_open:
            return None
        where = peers.where()
        if what := self._nccl.fault():
            return DistributedError(f"NCCL on rank {self.rank} failed: {what}", where=where, next="NCCL_DEBUG=INFO")
        try:
            seconds = self._deadline.overdue()
        except DeviceError:  # the main thread finds it, too
            return None
        if seconds <= peers.limit_s:
            return None
        what = f"{self.device} of rank {self.rank} has not got on for {seconds:.3g} s: it may wait for another rank's"
        return DistributedError(what, where=where, next="see what the ranks do: py-spy dump --pid, nvidia-smi")

    def abort(self) -> None:
        """After a fault, in any thread, instead of `close`: end what waits for other ranks; all later calls raise."""
        self._nccl.abort(ABORT_S)

    def close(self) -> None:
        """Wait for all ranks and leave. Raises DistributedError where one does not come."""
        if self._nccl.is_open:
            limit_s = self._peers.limit_s
            self._wait(limit_s)
            close_graphs(self._backend)  # NCCL would wait for them for ever
            self._nccl.close(limit_s)
        self._peers.close()

    def _wait(self, limit_s: float) -> None:
        """Wait for the device, but not for ever."""
        driver = self._backend.driver
        event, until = driver.mark(self._stream), time.monotonic() + limit_s
        while not driver.is_event_done(event):
            if time.monotonic() > until:
                what = f"{self.device} of rank {self.rank} was not done within {limit_s:.3g} s"
                raise DistributedError(what, where=self._peers.phase, next="NCCL_DEBUG=INFO shows what NCCL does")
            time.sleep(_TURN_S)
        driver.destroy_event(event)


def _cut(x: Array, start: int, length: int) -> Array:
    return x.view((length,), (1,), x.offset + start)


def _copy(source: Array, out: Array) -> None:
    if source.data_ptr() != out.data_ptr() and source.size:
        copy(source, out=out)


# --- Memory that the GPUs of all ranks have mapped --------------------------------------------------------------------


class MappedMemory:
    """DMA engines copy there: no SM takes part, and nothing waits for one that a GEMM holds. NCCL calls it windows, and
    the copies its zero-CTA policy; ranks of one host have it over NVLink.

    Where some memory of a send is mapped and some is not, NCCL 2.28 hangs. So gradients and weights go from here to
    here alone, and everything else, in memory of the pool, the other way. What is sent goes in parts of one size, to
    the last element of memory that has room for all of them. `wait` waits for the device, with the ranks' limit.
    """

    def __init__(self, peers: Peers, nccl: Communicator, backend: CudaBackend, wait: Callable[[], None]) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._peers, self._nccl, self._backend, self._wait = peers, nccl, backend, wait
        self.arena = ForeignArena(backend.pool)
        self._arrived: Array | None = None  # a bucket: what each rank has sent
        self._instead: int | None = None  # of the default stream

    def array(self, size: int, dtype: DType, owner: str) -> Array:
        """Contents undefined: a call of all ranks, for the same size. Memory that no rank uses any more is used again;
        none goes back to the driver.
        """
        nbytes, arena = size * dtype.itemsize, self.arena
        if self._peers.all("mapped", arena.has(nbytes)):
            block = arena.reuse(nbytes, owner)
        else:
            block = arena.make(nbytes, owner, self._nccl.allocate)
            self._nccl.map(block.pointer, nbytes, self._peers.limit_s)
        storage = CudaStorage(self._backend.pool, block, block.pointer, nbytes)
        return Array(storage, (size,), (1,), dtype, self._backend.device)

    def expect(self, nbytes: int) -> None:
        """Make room for an exchange of so many bytes: a call of all ranks. The first one has NCCL set up its copies,
        for which ranks meet: here, where none loads a kernel, for which the driver waits for the device.
        """
        if self._arrived is not None and self._arrived.nbytes >= nbytes:
            return
        is_first = self._arrived is None
        trial = _TRIAL * self.size
        self._arrived = self.array(max(nbytes, 2 * trial), uint8, "staging of collectives")
        if not is_first:
            return
        source = self._arrived.data_ptr()
        try:
            with self._stream() as stream:
                self._nccl.all_to_all(source, source + trial, _TRIAL, stream)
                self._nccl.gather_in_place(source, _TRIAL, stream)
            self._wait()
        except PeerGoneError:
            raise
        except DistributedError as error:
            what = f"DMA engines do not copy between the GPUs: {error.what}"
            next_step = "set NCCL_CTA_POLICY=0: kernels copy then"
            raise DistributedError(what, where=error.where, next=next_step) from error

    def holds(self, x: Array, parts: Sequence[int]) -> bool:
        """Whether this is how `x` is sent: it lies here, with room for parts of one size, of which only the last ones
        are not full.
        """
        part = parts[0]
        starts = [min(x.size, part * rank) for rank in range(self.size + 1)]
        is_even = list(parts) == [b - a for a, b in itertools.pairwise(starts)]
        found = self.arena.holds(x.data_ptr(), part * self.size * x.dtype.itemsize)
        assert is_even or not found, "parts of mapped memory have one size"
        return found

    def reduce_scatter(self, source: Array, out: Array, parts: Sequence[int], *, adds: bool) -> None:
        """See `Group`: all ranks' values travel, this one's too, and are added in the order of the ranks."""
        part, itemsize = parts[0], source.dtype.itemsize
        assert self._arrived is not None and part * self.size * itemsize <= self._arrived.nbytes, "room is expected"
        with self._stream() as stream:
            self._nccl.all_to_all(source.data_ptr(), self._arrived.data_ptr(), part * itemsize, stream)
        if length := out.size:
            rows = Array(self._arrived.storage, (self.size, length), (part, 1), source.dtype, source.device)
            first, others = rows.view((length,), (1,), 0), rows.view((self.size - 1, length), (part, 1), part)
            rank_sum(out, first, others, rank=0, adds=adds, out=())

    def all_gather(self, out: Array, parts: Sequence[int]) -> None:
        """See `Group`; this rank's part is in its place."""
        with self._stream() as stream:
            self._nccl.gather_in_place(out.data_ptr(), parts[0] * out.dtype.itemsize, stream)

    @contextmanager
    def _stream(self) -> Iterator[int]:
        """The current stream, or one in its order where that is the default one, for which NCCL has no such copies."""
        current, driver = self._backend.stream, self._backend.driver
        if current != 0:
            yield current
            return
        if self._instead is None:
            self._instead = take_stream(self._backend)
        driver.follow(self._instead, current)
        yield self._instead
        driver.follow(current, self._instead)


# --- Which group the ranks of a run have ------------------------------------------------------------------------------


def group_for(peers: Peers, device: Device, *, one_host: bool) -> tuple[NcclGroup | StagedGroup, str]:
    """The group of all ranks, and a line that says which it is, where that is worth one: a call of all ranks.

    Args:
        one_host: whether no rank is on another host.

    Raises:
        DistributedError: NCCL is there and does not start.
    """
    if device.type != "cuda" or is_interpreted():
        return StagedGroup(PeersGroup(peers)), ""
    nccl, problem = _loaded(device)
    version = 0 if nccl is None else int(nccl.get_version())
    if problem := _agreed(peers, version, problem):
        return StagedGroup(PeersGroup(peers)), f"warning: {problem}: ranks send gradients through host memory, slowly"
    # NCCL's own variables, where the user has set none. NVLink's multicast adds on the way, which is not wanted here,
    # and its set-up fails on some systems.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    driver = driver_for(device.index)
    before, _ = driver.memory_info()
    identity = bytes.fromhex(peers.broadcast_json("nccl", identity_of(nccl).hex() if peers.rank == 0 else None))
    # DMA engines can copy between the GPUs of all ranks where those are here, and linked by NVLink. A user's own CTA
    # policy for NCCL is left, and so is NVLink's multicast, with which two ranks may wait for ever (NCCL's #2290).
    is_ours = "NCCL_CTA_POLICY" not in os.environ and os.environ.get("NCCL_NVLS_ENABLE") == "0"
    has_copies = version >= _HAS_COPIES and is_ours and driver.is_linked(range(peers.size))
    is_mapped = one_host and peers.all("copies", has_copies)
    tuning = Tuning(cta_policy=ZERO_CTAS) if is_mapped else Tuning()
    communicator = Communicator(nccl, driver, peers.rank, peers.size, identity, peers.limit_s, tuning)
    group = NcclGroup(peers, device, communicator, LITTLE if is_mapped else STAGING, is_mapped=is_mapped)
    taken = max(0, before - driver.memory_info()[0]) / 2**20
    how = " by DMA engines" if is_mapped else ""
    return group, f"collectives: NCCL {_readable(version)}{how}, {taken:,.0f} MiB of each GPU"


def _loaded(device: Device) -> tuple[Any, str]:
    """The bindings, or why there are none and what to do."""
    try:
        nccl = bindings()
    except ImportError as error:
        return None, f"NCCL is not installed ({error}; {INSTALL})"
    except (RuntimeError, OSError) as error:  # no library, or one for another system
        return None, f"NCCL does not load ({str(error).strip().splitlines()[0]}; {INSTALL})"
    if (found := _version("nccl4py")) and not found.startswith(_RELEASE):
        return None, f"nccl4py {found} is installed, and {_RELEASE}x is needed ({INSTALL})"
    driver = driver_for(device.index).cuda_version()
    if driver < 13000 and _version("nvidia-nccl-cu13") and not _version(_CUDA_12):
        what = f"the NVIDIA driver serves CUDA {driver // 1000}.{driver % 1000 // 10}, and nvidia-nccl-cu13 needs 13.0"
        return None, f"{what} (pip uninstall nvidia-nccl-cu13; pip install {_CUDA_12})"
    return nccl, ""


def _version(distribution: str) -> str:
    """That of an installed package, or nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _agreed(peers: Peers, version: int, problem: str) -> str:
    """What keeps any rank from it; all ranks go the same way."""
    said = peers.gather_json("collectives", [version, problem])
    found = ""
    if said is not None:
        problems = [f"rank {rank}: {each[1]}" for rank, each in enumerate(said) if each[1]]
        versions = sorted({each[0] for each in said})
        if problems:
            found = problem or problems[0]
        elif len(versions) > 1:
            found = f"the ranks have NCCL {' and '.join(map(_readable, versions))}, and need one version"
    return str(peers.broadcast_json("collectives", found))


def _readable(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
