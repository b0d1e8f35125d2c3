"""Collectives on flat slices of arrays: what the ranks of a group compute together.

A reduction is defined: float32, added in the order of the ranks, rounded once to the type of the result. So its bits
depend on neither the implementation nor on how arrays are cut into parts. Integers and float64 are added in their type.
Without `parts`, an array of n elements has W parts of n / W, a multiple of 32 elements, where flat buffers are cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from genesis.array import Array
from genesis.backend import CPU
from genesis.distributed.peers import Peers
from genesis.dtypes import BOOL, FLOAT, DType, float8_e4m3fn, float32
from genesis.errors import DeviceError, DTypeError, ShapeError

__all__ = ["ALIGNMENT", "Alone", "Group", "PeersGroup"]

ALIGNMENT = 32  # elements
_BLOCK = 1 << 18  # elements that travel at a time


class Group(Protocol):
    """`size` ranks, of which this is `rank`. Every rank makes the same calls, with contiguous arrays of one dimension.

    Attributes:
        rank, size: which of how many.
        is_in_stream_order: whether calls return at once and run in the order of the current stream, so that a CUDA
            graph can capture them; else they wait for the device.

    Raises (all calls):
        ShapeError, DTypeError: arrays that do not fit; nothing has been sent then.
        DistributedError: another rank makes another call, is late or gone.
    """

    rank: int
    size: int
    is_in_stream_order: bool

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        """Set `out` [this rank's part] to the sum of all ranks' `source` [n] there; `out` may be a slice of it.

        Args:
            out: of the dtype of `source`, or float32 where that is a narrower float.
            parts: elements of each rank, which add up to n.
            adds: start from what is in `out`, which is no slice of `source` then: ((out + rank 0's) + rank 1's) + ...
        """

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        """Set `out` [n] to the parts of all ranks; `part` may be this rank's slice of it."""

    def gather(self, part: Array, out: Array | None, parts: Sequence[int]) -> None:
        """On rank 0 set `out` [n] to the parts of all ranks; it is None elsewhere."""

    def all_reduce(self, x: Array) -> None:
        """Set `x` to the sum of all ranks' `x`."""

    def broadcast(self, x: Array, root: int = 0) -> None:
        """Set `x` to that of rank `root`."""

    def close(self) -> None:
        """Wait for all ranks and leave."""


class Alone:
    """A group of one rank: nothing is to do, but to copy where the two arrays are not the same memory."""

    rank, size = 0, 1
    is_in_stream_order = True

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        _check_reduction(source, out, _parts(self, source, out, parts))
        if adds:
            total = _Total(out.view_np(), out.dtype, adds)
            total.add(source.view_np())
            total.store()
        else:
            _copy(source, out)

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        _check_gather(part, out, _parts(self, out, part, parts))
        _copy(part, out)

    def gather(self, part: Array, out: Array | None, parts: Sequence[int]) -> None:
        assert out is not None, "rank 0 gathers"
        self.all_gather(part, out, parts)

    def all_reduce(self, x: Array) -> None:
        _check_reduction(x, x, [])

    def broadcast(self, x: Array, root: int = 0) -> None:
        _check_root(self, root)
        _check(x)

    def close(self) -> None:
        pass


class PeersGroup:
    """A group over the control plane's connections, in numpy: the oracle, and what trains on the CPU.

    All goes through rank 0, block by block, in an order in which a rank that sends has a rank that takes.
    """

    is_in_stream_order = False

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size, self._peers = peers.rank, peers.size, peers

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        cut = _parts(self, source, out, parts)
        _check_reduction(source, out, cut)
        how = "added to" if adds else "to"
        self._peers.check_call(f"reduce_scatter {source.dtype.name} {how} {out.dtype.name}, parts {_said(cut)}")
        values, result, start = source.view_np(), out.view_np(), 0
        for owner, length in enumerate(cut):
            for first, last in _blocks(length):
                block = values[start + first : start + last]
                if self.rank == owner:
                    self._add_up(result[first:last], block, out.dtype, adds)
                elif self.rank:
                    self._peers.send_block(0, _bytes(block))
                else:
                    self._hand_on(block, owner)
            start += length

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        cut = _parts(self, out, part, parts)
        _check_gather(part, out, cut)
        self._peers.check_call(f"all_gather {out.dtype.name}, parts {_said(cut)}")
        start = sum(cut[: self.rank])
        _copy(part, out.view((cut[self.rank],), (1,), out.offset + start))
        values, start = out.view_np(), 0
        for owner, length in enumerate(cut):
            self._spread(values[start : start + length], owner)
            start += length

    def gather(self, part: Array, out: Array | None, parts: Sequence[int]) -> None:
        _check(part)
        if out is not None:
            _check_gather(part, out, _parts(self, out, part, parts))
        self._peers.check_call(f"gather {part.dtype.name}, parts {_said(parts)}")
        if self.rank:
            for first, last in _blocks(part.size):
                self._peers.send_block(0, _bytes(part.view_np()[first:last]))
            return
        assert out is not None, "rank 0 gathers"
        _copy(part, out.view((parts[0],), (1,), out.offset))
        values, start = out.view_np(), parts[0]
        for rank, length in list(enumerate(parts))[1:]:
            for first, last in _blocks(length):
                self._peers.receive_block(rank, _bytes(values[start + first : start + last]))
            start += length

    def all_reduce(self, x: Array) -> None:
        _check_reduction(x, x, [])
        self._peers.check_call(f"all_reduce {x.dtype.name} {x.size}")
        values = x.view_np()
        for first, last in _blocks(x.size):
            values[first:last] = self._sum(values[first:last], x.dtype)
            self._spread(values[first:last], 0)

    def broadcast(self, x: Array, root: int = 0) -> None:
        _check_root(self, root)
        _check(x)
        self._peers.check_call(f"broadcast {x.dtype.name} {x.size} from {root}")
        self._spread(x.view_np(), root)

    def close(self) -> None:
        self._peers.close()

    def _sum(self, values: np.ndarray, dtype: DType) -> np.ndarray:
        """On rank 0 the sum of all ranks' `values`, as `dtype`; elsewhere room for it."""
        if self.rank:
            self._peers.send_block(0, _bytes(values))
            return np.empty(values.shape, dtype.numpy)
        total = np.empty(values.shape, dtype.numpy)
        self._add_up(total, values, dtype, False)
        return total

    def _add_up(self, out: np.ndarray, values: np.ndarray, dtype: DType, adds: bool) -> None:
        """Set `out` to the sum of all ranks' `values`, of which this rank has its own; the others' come by rank 0."""
        total, theirs = _Total(out, dtype, adds), np.empty_like(values)
        for rank in range(self.size):
            if rank != self.rank:
                self._peers.receive_block(0 if self.rank else rank, _bytes(theirs))
            total.add(values if rank == self.rank else theirs)
        total.store()

    def _hand_on(self, values: np.ndarray, owner: int) -> None:
        """Rank 0's part of a sum that `owner` makes: give it every rank's values, in their order."""
        theirs = np.empty_like(values)
        for rank in range(self.size):
            if rank == owner:
                continue
            if rank:
                self._peers.receive_block(rank, _bytes(theirs))
            self._peers.send_block(owner, _bytes(theirs if rank else values))

    def _spread(self, values: np.ndarray, root: int) -> None:
        """Give every rank those of `root`, by way of rank 0."""
        for first, last in _blocks(values.size):
            block = _bytes(values[first:last])
            if self.rank == 0:
                if root:
                    self._peers.receive_block(root, block)
                for rank in range(1, self.size):
                    if rank != root:
                        self._peers.send_block(rank, block)
            elif self.rank == root:
                self._peers.send_block(0, block)
            else:
                self._peers.receive_block(0, block)


class _Total:
    """A sum in the type of the definition, rounded once to the type of `out`, from which it may start."""

    def __init__(self, out: np.ndarray, dtype: DType, adds: bool) -> None:
        self._out = out
        is_narrow = dtype.category == FLOAT and dtype.itemsize < float32.itemsize
        self._type = np.dtype(np.float32) if is_narrow else dtype.numpy
        self._sum: np.ndarray | None = out.astype(self._type) if adds else None

    def add(self, values: np.ndarray) -> None:
        """The next of the values, in the order of the definition."""
        if self._sum is None:
            self._sum = values.astype(self._type)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            self._sum += values.astype(self._type, copy=False)

    def store(self) -> None:
        """Put the sum into `out`."""
        assert self._sum is not None, "a sum of nothing"
        with np.errstate(over="ignore", invalid="ignore"):
            self._out[...] = self._sum.astype(self._out.dtype, copy=False)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    for first in range(0, length, _BLOCK):
        yield first, min(first + _BLOCK, length)


def _said(cut: Sequence[int]) -> str:
    return str(cut) if len(cut) <= 64 else f"{len(cut)} with checksum {zlib.crc32(str(cut).encode())}"


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8)


def _copy(source: Array, out: Array) -> None:
    if source.data_ptr() != out.data_ptr() or source.dtype is not out.dtype:
        out.view_np()[...] = source.view_np()


def _parts(group: Group, whole: Array, part: Array, parts: Sequence[int] | None) -> list[int]:
    """The elements of each rank of `whole`, checked against this rank's `part`."""
    _check(whole)
    _check(part)
    if parts is None:
        each, rest = divmod(whole.size, group.size)
        if rest or each % ALIGNMENT:
            what = f"{whole.size} elements are not {group.size} parts of a multiple of {ALIGNMENT}"
            raise ShapeError(what, next="pad the array, or give the parts")
        cut = [each] * group.size
    else:
        cut = [int(each) for each in parts]
    if len(cut) != group.size or min(cut) < 0 or sum(cut) != whole.size:
        what = f"the parts {cut} are not those of {whole.size} elements for {group.size} ranks"
        raise ShapeError(what, next="give one size for each rank, which add up to the whole")
    if part.size != cut[group.rank]:
        what = f"rank {group.rank} has an array of {part.size} elements for its part of {cut[group.rank]}"
        raise ShapeError(what, next="give an array of the size of the part")
    return cut


def _check(x: Array) -> None:
    if x.device != CPU:
        raise DeviceError(f"this group is for arrays on the CPU, and one is on {x.device}", next="use NCCL's group")
    if x.ndim != 1 or not x.is_contiguous:
        what = f"a collective takes contiguous arrays of one dimension, not shape {x.shape}, strides {x.strides}"
        raise ShapeError(what, next="give a slice of a flat buffer")


def _check_reduction(source: Array, out: Array, parts: Sequence[int]) -> None:
    _check(source)
    if source.dtype.category == BOOL or source.dtype is float8_e4m3fn:
        raise DTypeError(f"{source.dtype} cannot be added over ranks", next="convert it to int64 or float32")
    is_wider = out.dtype is float32 and source.dtype.category == FLOAT and source.dtype.itemsize < float32.itemsize
    if out.dtype is not source.dtype and not is_wider:
        what = f"a sum of {source.dtype} goes to {source.dtype}, or from a narrower float to float32, not {out.dtype}"
        raise DTypeError(what, next="give an array of that dtype")


def _check_gather(part: Array, out: Array, parts: Sequence[int]) -> None:
    if part.dtype is not out.dtype:
        raise DTypeError(f"parts of {part.dtype} do not make an array of {out.dtype}", next="give them one dtype")


def _check_root(group: Group, root: int) -> None:
    if not 0 <= root < group.size:
        raise ShapeError(f"there is no rank {root} among {group.size}", next=f"give 0 to {group.size - 1}")
