"""Memory that the GPUs of all ranks have mapped, in which DMA engines copy: no SM takes part, and nothing waits for one
that a GEMM holds. NCCL calls it windows, and the copies its zero-CTA policy; ranks of one host have it over NVLink.

Where some memory of a send is mapped and some is not, NCCL 2.28 hangs. So gradients and weights go from here to here
alone, and everything else, in memory of the pool, the other way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from genesis.array import Array
from genesis.backend.cuda import CudaBackend
from genesis.backend.cuda.memory import CudaStorage, ForeignArena
from genesis.backend.cuda.stream import take_stream
from genesis.distributed.communicator import Communicator
from genesis.distributed.peers import Peers
from genesis.dtypes import DType, uint8
from genesis.errors import DistributedError, PeerGoneError
from genesis.ops.rank_sum import rank_sum

_TRIAL = 64  # bytes of each rank


class MappedMemory:
    """What is sent of it goes in parts of one size, to the last element of memory that has room for all of them.

    Args:
        wait: waits for the device, with the ranks' limit.
    """

    def __init__(
        self, peers: Peers, communicator: Communicator, backend: CudaBackend, wait: Callable[[], None]
    ) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._peers, self._nccl, self._backend, self._wait = peers, communicator, backend, wait
        self._arena = ForeignArena(backend.pool)
        self._arrived: Array | None = None  # a bucket: what each rank has sent
        self._instead: int | None = None  # of the default stream

    def array(self, size: int, dtype: DType, owner: str) -> Array:
        """Contents undefined: a call of all ranks, for the same size. Memory that no rank uses any more is used again;
        none goes back to the driver.
        """
        nbytes, arena = size * dtype.itemsize, self._arena
        if self._peers.all("mapped", arena.has(nbytes)):
            block = arena.again(nbytes, owner)
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
        least = 2 * _TRIAL * self.size
        self._arrived = self.array(max(nbytes, least), uint8, "staging of collectives")
        if is_first:
            self._try(self._arrived.data_ptr(), least // 2)

    def _try(self, source: int, behind: int) -> None:
        try:
            with self._stream() as stream:
                self._nccl.all_to_all(source, source + behind, _TRIAL, stream)
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
        found = self.has(x.data_ptr(), part * self.size * x.dtype.itemsize)
        assert is_even or not found, "parts of mapped memory have one size"
        return found

    def has(self, pointer: int, nbytes: int) -> bool:
        """Whether all of some memory is mapped."""
        return self._arena.holds(pointer, nbytes)

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
