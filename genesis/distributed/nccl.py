"""A group over NCCL for ranks with GPUs. If NCCL is not usable, a group falls back to copies through host memory.

Calls are launched on the current stream and return at once, so a CUDA graph can capture them. NCCL only moves bytes,
because its sums depend on algorithm and protocol. For a reduction, ranks send each other their parts, and the op
`rank_sum` adds them in the order that `Group` defines. So results are bit-identical to `PeersGroup`.
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

STAGING = 48 << 20  # bytes that are received at a time for a reduction: the size of a bucket
MAPPED_STAGING = 1 << 20  # the same if gradients and weights use mapped memory instead
ABORT_S = 2.0  # time limit of an abort in seconds: kernels end at once, but NCCL waits for the end of graphs
_ROW = 512  # alignment in bytes of a row of the staging memory
_POLL_S = 0.001
_TRIAL = 64  # bytes per rank in the first exchange
INSTALL = 'pip install "nccl4py>=0.6,<0.7" nvidia-nccl-cu13'  # the extra `distributed`
_RELEASE = "0.6."
_HAS_COPIES = 22800  # NCCL 2.28, the first version whose all-to-all and all-gather can use DMA engines
_CUDA_12 = "nvidia-nccl-cu12"


class NcclGroup(Group):
    """The ranks of `peers`, each with its own GPU.

    Unlike `PeersGroup`, it does not compare the calls of ranks, which would block the host. After different calls the
    device hangs, and `fault` reports it.

    Received data are stored in `staging` bytes. If `is_mapped`, DMA engines move the contents of arrays from `buffer`,
    and the communicator must be configured for that.
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
        _ = self._backend.comm_stream  # create it now, outside captures
        self._deadline = Deadline(self._backend.driver)
        wait = functools.partial(self._wait, peers.limit_s)
        self._mapped = MappedMemory(peers, nccl, self._backend, wait) if is_mapped else None
        # Load the `rank_sum` kernels before any rank waits for another. While the driver loads a kernel, it waits for
        # the device and answers no other thread.
        for dtype in (bfloat16, float32):
            own = Array(self._staging.storage, (32,), (1,), dtype, self.device, 0)
            others = own.view((self.size - 1, 32), (0, 1), 0)
            total = Array(self._staging.storage, (32,), (1,), float32, self.device, 0)
            for rank, adds in itertools.product({self.rank, 0 if self._mapped else self.rank}, (False, True)):
                rank_sum(total, own, others, rank=rank, adds=adds, out=())
        # Run each kind of collective once. NCCL connects at the first use, which allocates memory and blocks.
        rows = [_cut(self._staging, at, 32) for at in range(0, self._staging.size, self._row)]
        receives = [None if rank == self.rank else rows.pop() for rank in range(self.size)]
        self._exchange([_cut(self._staging, 64, 32)] * self.size, receives)
        trial = _cut(self._staging, 0, 4 * self.size)  # values do not matter
        self.all_gather(_cut(trial, 4 * self.rank, 4), trial, [4] * self.size)
        self.broadcast(trial)
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
        # Send and add the parts piece by piece, as the staging memory allows.
        starts = [sum(cut[:rank]) for rank in range(self.size)]
        for first, last in self._pieces(max(cut), source.dtype):
            spans = [(min(first, each), min(last, each)) for each in cut]
            sends = [_cut(source, start + a, b - a) for start, (a, b) in zip(starts, spans, strict=True)]
            a, b = spans[self.rank]
            self._add(_cut(out, a, b - a), sends, sends[self.rank], adds)

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
            assert out is not None, "the root has an output"
            places = self._places(out, parts_of(self, out, part, parts))
            check_gather(part, out)
            _copy(part, places[root])
            self._exchange(nothing, places)
        else:
            self._exchange([part if rank == root else None for rank in range(self.size)], nothing)
        self._launched()

    def all_reduce(self, x: Array) -> None:
        """See `Group`. Every rank receives the values of all ranks, so use it for few values only."""
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
        """Send each rank its values, and set `out` to the sum of the received values and `own`."""
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
        """Exchange arrays with the other ranks; None or an empty array means no message."""
        sent, received = (
            [(rank, self._memory(x)) for rank, x in enumerate(arrays) if rank != self.rank and x is not None and x.size]
            for arrays in (sends, receives)
        )
        self._nccl.exchange(sent, received, self._stream)

    def _memory(self, x: Array) -> Memory:
        """The memory of an array from the pool. Mapped memory must not be used here, see `MappedMemory`."""
        assert self._mapped is None or not self._mapped.arena.holds(x.data_ptr(), x.nbytes), "mapped memory"
        return Memory(x.data_ptr(), x.nbytes)

    def _places(self, out: Array, cut: Sequence[int]) -> list[Array]:
        """The parts of all ranks in `out`."""
        return [_cut(out, sum(cut[:rank]), length) for rank, length in enumerate(cut)]

    def _pieces(self, length: int, dtype: DType) -> Iterator[tuple[int, int]]:
        """Spans of a part that fit into the staging memory."""
        limit = self._row // dtype.itemsize
        for first in range(0, length, limit):
            yield first, min(first + limit, length)

    @property
    def _stream(self) -> int:
        return self._backend.stream

    # --- Deadlines, faults and the end --------------------------------------------------------------------------------

    def mark(self) -> None:
        """Watch the work launched so far, such as the replay of a graph; see `fault`."""
        if not (self._backend.pool.capturing or self._backend.driver.capturing):
            self._deadline.mark(self._stream)

    _launched = mark

    def fault(self) -> DistributedError | None:
        """Return the error that ends this rank: one of NCCL, or a device without progress for longer than the limit.

        A watching thread calls it. It queries the device without waiting for it.
        """
        peers = self._peers
        if not self._nccl.is_open:
            return None
        where = peers.where()
        if what := self._nccl.fault():
            next = "run again with NCCL_DEBUG=INFO"
            return DistributedError(f"NCCL on rank {self.rank} failed: {what}", where=where, next=next)
        try:
            seconds = self._deadline.overdue()
        except DeviceError:  # the main thread gets this error, too
            return None
        if seconds <= peers.limit_s:
            return None
        what = f"{self.device} of rank {self.rank} has made no progress for {seconds:.3g} s"
        return DistributedError(what, where=where, next="inspect all ranks with py-spy dump --pid and nvidia-smi")

    def abort(self) -> None:
        """Abort all collectives after a fault, instead of `close`, in any thread. All later calls raise."""
        self._nccl.abort(ABORT_S)

    def close(self) -> None:
        """Wait for all ranks and close the group. Raises DistributedError if a rank does not call it in time."""
        if self._nccl.is_open:
            limit_s = self._peers.limit_s
            self._wait(limit_s)
            close_graphs(self._backend)  # NCCL would wait for them forever
            self._nccl.close(limit_s)
        self._peers.close()

    def _wait(self, limit_s: float) -> None:
        """Wait for the device for at most `limit_s`."""
        driver = self._backend.driver
        event, until = driver.mark(self._stream), time.monotonic() + limit_s
        while not driver.is_event_done(event):
            if time.monotonic() > until:
                what = f"{self.device} of rank {self.rank} did not finish within {limit_s:.3g} s"
                raise DistributedError(what, where=self._peers.phase, next="run again with NCCL_DEBUG=INFO")
            time.sleep(_POLL_S)
        driver.destroy_event(event)


def _cut(x: Array, start: int, length: int) -> Array:
    return x.view((length,), (1,), x.offset + start)


def _copy(source: Array, out: Array) -> None:
    if source.data_ptr() != out.data_ptr() and source.size:
        copy(source, out=out)


# --- Memory that the GPUs of all ranks map ----------------------------------------------------------------------------


class MappedMemory:
    """Memory between which DMA engines copy. The copies occupy no SM, so they never wait for one that runs a GEMM. They
    need ranks of one host connected by NVLink. NCCL's terms are "window" for the memory and "zero-CTA" for the copies.

    NCCL 2.28 hangs if only one side of a send is mapped. So gradients and weights are sent between mapped memory only,
    and everything else between memory of the pool. Parts have equal sizes, and the memory must have room for all of
    them, including padding. `wait` waits for the device, within the limit of the ranks.
    """

    def __init__(self, peers: Peers, nccl: Communicator, backend: CudaBackend, wait: Callable[[], None]) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._peers, self._nccl, self._backend, self._wait = peers, nccl, backend, wait
        self.arena = ForeignArena(backend.pool)
        self._received: Array | None = None  # the parts of a bucket from all ranks
        self._own_stream: int | None = None  # replaces the default stream

    def array(self, size: int, dtype: DType, owner: str) -> Array:
        """Allocate an uninitialized array. A collective call with one size on all ranks.

        Memory that no rank uses is reused, and never returned to the driver.
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
        """Allocate memory for exchanges of up to `nbytes`. A collective call. The first one also makes NCCL set up its
        copies. It does so now because this blocks all ranks, and none of them loads a kernel at this point.
        """
        if self._received is not None and self._received.nbytes >= nbytes:
            return
        is_first = self._received is None
        trial = _TRIAL * self.size
        self._received = self.array(max(nbytes, 2 * trial), uint8, "staging of collectives")
        if not is_first:
            return
        source = self._received.data_ptr()
        try:
            with self._stream() as stream:
                self._nccl.all_to_all(source, source + trial, _TRIAL, stream)
                self._nccl.gather_in_place(source, _TRIAL, stream)
            self._wait()
        except PeerGoneError:
            raise
        except DistributedError as error:
            what = f"DMA engines cannot copy between the GPUs: {error.what}"
            next_step = "set NCCL_CTA_POLICY=0 to copy by kernels"
            raise DistributedError(what, where=error.where, next=next_step) from error

    def holds(self, x: Array, parts: Sequence[int]) -> bool:
        """Whether `x` is in mapped memory, with room for equal parts. Only the last parts may be smaller."""
        part = parts[0]
        starts = [min(x.size, part * rank) for rank in range(self.size + 1)]
        is_even = list(parts) == [b - a for a, b in itertools.pairwise(starts)]
        is_held = self.arena.holds(x.data_ptr(), part * self.size * x.dtype.itemsize)
        assert is_even or not is_held, "parts of mapped memory have one size"
        return is_held

    def reduce_scatter(self, source: Array, out: Array, parts: Sequence[int], *, adds: bool) -> None:
        """See `Group`. All parts are sent, including this rank's own, and added in rank order."""
        part, itemsize = parts[0], source.dtype.itemsize
        assert self._received is not None and part * self.size * itemsize <= self._received.nbytes, "call expect()"
        with self._stream() as stream:
            self._nccl.all_to_all(source.data_ptr(), self._received.data_ptr(), part * itemsize, stream)
        if length := out.size:
            rows = Array(self._received.storage, (self.size, length), (part, 1), source.dtype, source.device)
            first, others = rows.view((length,), (1,), 0), rows.view((self.size - 1, length), (part, 1), part)
            rank_sum(out, first, others, rank=0, adds=adds, out=())

    def all_gather(self, out: Array, parts: Sequence[int]) -> None:
        """See `Group`. This rank's part must already be in its place."""
        with self._stream() as stream:
            self._nccl.gather_in_place(out.data_ptr(), parts[0] * out.dtype.itemsize, stream)

    @contextmanager
    def _stream(self) -> Iterator[int]:
        """Yield the current stream, or one ordered with the default stream, on which NCCL cannot use DMA engines."""
        current, driver = self._backend.stream, self._backend.driver
        if current != 0:
            yield current
            return
        if self._own_stream is None:
            self._own_stream = take_stream(self._backend)
        driver.follow(self._own_stream, current)
        yield self._own_stream
        driver.follow(current, self._own_stream)


# --- The choice of a group --------------------------------------------------------------------------------------------


def group_for(peers: Peers, device: Device, *, one_host: bool) -> tuple[NcclGroup | StagedGroup, str]:
    """Return the group of all ranks and a line that describes it, or "" on the CPU. A collective call.

    Args:
        one_host: whether all ranks are on one host.

    Raises:
        DistributedError: if NCCL is installed but does not start.
    """
    if device.type != "cuda" or is_interpreted():
        return StagedGroup(PeersGroup(peers)), ""
    nccl, problem = _loaded(device)
    version = 0 if nccl is None else int(nccl.get_version())
    if problem := _agree(peers, version, problem):
        return StagedGroup(PeersGroup(peers)), f"warning: {problem}: ranks send gradients through host memory, slowly"
    # Set NCCL's variables unless the user did. NVLink multicast serves NCCL's own sums, which are not used here, and
    # its set-up fails on some systems.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    driver = driver_for(device.index)
    before, _ = driver.memory_info()
    identity = bytes.fromhex(peers.broadcast_json("nccl", identity_of(nccl).hex() if peers.rank == 0 else None))
    # DMA engines can copy between GPUs of one host that NVLink connects. They are not used if the user sets a CTA
    # policy, or NVLink multicast, with which two ranks may deadlock (NCCL issue #2290).
    is_ours = "NCCL_CTA_POLICY" not in os.environ and os.environ.get("NCCL_NVLS_ENABLE") == "0"
    has_copies = version >= _HAS_COPIES and is_ours and driver.is_linked(range(peers.size))
    is_mapped = one_host and peers.all("copies", has_copies)
    tuning = Tuning(cta_policy=ZERO_CTAS) if is_mapped else Tuning()
    communicator = Communicator(nccl, driver, peers.rank, peers.size, identity, peers.limit_s, tuning)
    group = NcclGroup(peers, device, communicator, MAPPED_STAGING if is_mapped else STAGING, is_mapped=is_mapped)
    taken = max(0, before - driver.memory_info()[0]) / 2**20
    how = " by DMA engines" if is_mapped else ""
    return group, f"collectives: NCCL {_readable(version)}{how}, {taken:,.0f} MiB of each GPU"


def _loaded(device: Device) -> tuple[Any, str]:
    """Return NCCL's bindings, or None and the problem with its solution."""
    try:
        nccl = bindings()
    except ImportError as error:
        return None, f"NCCL is not installed ({error}; {INSTALL})"
    except (RuntimeError, OSError) as error:  # no library, or one for another system
        return None, f"NCCL does not load ({str(error).strip().splitlines()[0]}; {INSTALL})"
    if (installed := _version("nccl4py")) and not installed.startswith(_RELEASE):
        return None, f"nccl4py {installed} is installed, and {_RELEASE}x is needed ({INSTALL})"
    driver = driver_for(device.index).cuda_version()
    if driver < 13000 and _version("nvidia-nccl-cu13") and not _version(_CUDA_12):
        what = f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, nvidia-nccl-cu13 needs 13.0"
        return None, f"{what} (pip uninstall nvidia-nccl-cu13; pip install {_CUDA_12})"
    return nccl, ""


def _version(distribution: str) -> str:
    """The version of an installed package, or ""."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _agree(peers: Peers, version: int, problem: str) -> str:
    """Agree on the reason, if any, why ranks cannot use NCCL, so that all make the same choice."""
    results = peers.gather_json("collectives", [version, problem])
    reason = ""
    if results is not None:
        problems = [f"rank {rank}: {each[1]}" for rank, each in enumerate(results) if each[1]]
        versions = sorted({each[0] for each in results})
        if problems:
            reason = problem or problems[0]
        elif len(versions) > 1:
            reason = f"the ranks have NCCL {' and '.join(map(_readable, versions))}, and need one version"
    return str(peers.broadcast_json("collectives", reason))


def _readable(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
