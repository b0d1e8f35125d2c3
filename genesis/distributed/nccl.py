"""A group over NCCL: calls are launched on the current stream and return at once, so a CUDA graph can capture them.

NCCL moves bytes and adds nothing: its sums depend on algorithm and protocol. For a sum, ranks send each other their
parts, and the op `rank_sum` adds them as the definition of a group says. So results are those of `PeersGroup`, bit for
bit.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence

from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.graph import close_graphs
from genesis.distributed.communicator import Communicator, Memory
from genesis.distributed.group import check_array, check_gather, check_reduction, check_root, parts_of
from genesis.distributed.mapped import MappedMemory
from genesis.distributed.peers import Peers
from genesis.distributed.watch import Deadline
from genesis.dtypes import DType, bfloat16, float32, uint8
from genesis.errors import DeviceError, DistributedError
from genesis.ops.elementwise import copy
from genesis.ops.rank_sum import rank_sum

STAGING = 48 << 20  # bytes that come from other ranks at a time, on their way into a sum: a bucket's
LITTLE = 1 << 20  # the same where gradients and weights travel another way
ABORT_S = 2.0  # how long NCCL may take to give up: kernels end at once, it waits for the end of graphs
_ROW = 512  # bytes of which a row of the staging memory is a multiple
_TURN_S = 0.001


class NcclGroup:
    """The ranks of `peers`, each with a GPU of its own.

    A rank that makes another call than the others is not found out here, as `PeersGroup` finds it: nothing would be
    launched ahead. The device then stands still, which `fault` sees.

    Args:
        device: this rank's GPU.
        communicator: NCCL's, of the same ranks.
        staging: bytes of memory for what other ranks send.
        reserved_sms: SMs that persistent kernels leave to the collectives that run beside them, see `Lane`.
        is_mapped: whether what `buffer` gives travels by DMA engines, which the communicator must have been made for.
    """

    is_in_stream_order = True

    def __init__(
        self, peers: Peers, device: Device, communicator: Communicator, staging: int = STAGING, reserved_sms: int = 0,
        *, is_mapped: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.device = peers.rank, peers.size, device
        self._peers, self._nccl, self._backend = peers, communicator, backend_of(device)
        self._row = max(staging // max(1, self.size - 1) // _ROW, 1) * _ROW
        with self._backend.owned_by("staging of collectives"):
            self._staging = empty((self._row * max(1, self.size - 1),), uint8, device)
        self._backend.lane.reserved_sms = reserved_sms
        self._deadline = Deadline(self._backend.driver)
        wait = functools.partial(self._wait, peers.limit_s)
        self._mapped = MappedMemory(peers, communicator, self._backend, wait) if is_mapped else None
        self._load()
        self._connect()

    def _load(self) -> None:
        """Have the kernel that adds loaded before anything waits for another rank: to load one, the driver waits for
        the device, and answers no other thread meanwhile.
        """
        for dtype in (bfloat16, float32):
            own = Array(self._staging.storage, (32,), (1,), dtype, self.device, 0)
            others = own.view((self.size - 1, 32), (0, 1), 0)
            total = Array(self._staging.storage, (32,), (1,), float32, self.device, 0)
            for rank, adds in itertools.product({self.rank, 0 if self._mapped else self.rank}, (False, True)):
                rank_sum(total, own, others, rank=rank, adds=adds, out=())

    def _connect(self) -> None:
        """Reach all ranks in every way once: the first time NCCL makes connections, which takes memory and waits."""
        rows = [_cut(self._staging, at, 32) for at in range(0, self._staging.size, self._row)]
        receives = [None if rank == self.rank else rows.pop() for rank in range(self.size)]
        self._exchange([_cut(self._staging, 64, 32)] * self.size, receives)
        whole = _cut(self._staging, 0, 4 * self.size)  # values do not matter
        self.all_gather(_cut(whole, 4 * self.rank, 4), whole, [4] * self.size)
        self.broadcast(whole)
        self._wait(self._peers.limit_s)

    def buffer(self, size: int, dtype: DType, owner: str, parts: Sequence[Sequence[int]]) -> Array | None:
        """See `Group`: where DMA engines copy."""
        if self._mapped is None:
            return None
        self._mapped.expect(max((each[0] for each in parts), default=0) * self.size * dtype.itemsize)
        return self._mapped.array(size, dtype, owner)

    # --- Collectives --------------------------------------------------------------------------------------------------

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        """See `Group`."""
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
        """See `Group`."""
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
        """See `Group`."""
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
        """See `Group`. Every rank gets all values: for a few numbers."""
        check_reduction(self, x, x)
        for first, last in self._pieces(x.size, x.dtype):
            piece = _cut(x, first, last - first)
            self._add(piece, [piece] * self.size, piece, adds=False)

    def broadcast(self, x: Array, root: int = 0) -> None:
        """See `Group`."""
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
        self._nccl.exchange(self._with_ranks(sends), self._with_ranks(receives), self._stream)

    def _with_ranks(self, arrays: Sequence[Array | None]) -> list[tuple[int, Memory]]:
        return [
            (rank, self._memory(x)) for rank, x in enumerate(arrays) if rank != self.rank and x is not None and x.size
        ]

    def _memory(self, x: Array) -> Memory:
        """Of the pool: what is mapped goes another way, see `mapped.py`."""
        assert self._mapped is None or not self._mapped.has(x.data_ptr(), x.nbytes), "mapped memory"
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
        where = ", ".join([*([peers.phase] if peers.phase else []), f"step {peers.step}"])
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
        """Wait for all ranks and leave. The graphs of the device are closed first: NCCL waits for them for ever.

        Raises:
            DistributedError: a rank does not come.
        """
        if self._nccl.is_open:
            limit_s = self._peers.limit_s
            self._wait(limit_s)
            close_graphs(self._backend)
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
