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

from genesis.array import Array, from_numpy
from genesis.backend import CPU, Device, backend_for
from genesis.distributed.peers import Peers
from genesis.dtypes import BOOL, FLOAT, DType, float8_e4m3fn, float32
from genesis.errors import DeviceError, DTypeError, ShapeError

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

    def buffer(self, size: int, dtype: DType, owner: str, parts: Sequence[Sequence[int]]) -> Array | None:
        """Memory that collectives reach best, contents undefined: a call of all ranks. None: all memory is alike.

        Args:
            parts: of each `reduce_scatter` and `all_gather` in it. What they send is parts of the first one's size, of
                which the last ones may lack some: there must be room.
        """
        return None

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

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        """On rank `root` set `out` [n] to the parts of all ranks; it is None elsewhere."""

    def all_reduce(self, x: Array) -> None:
        """Set `x` to the sum of all ranks' `x`."""

    def broadcast(self, x: Array, root: int = 0) -> None:
        """Set `x` to that of rank `root`."""

    def close(self) -> None:
        """Wait for all ranks and leave."""


class Alone(Group):
    """A group of one rank: nothing is to do, but to copy where the two arrays are not the same memory."""

    rank, size, device = 0, 1, CPU
    is_in_stream_order = True

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        parts_of(self, source, out, parts)
        check_reduction(self, source, out)
        if adds:
            total = _Total(out.view_np(), out.dtype, adds)
            total.add(source.view_np())
            total.store()
        else:
            _copy(source, out)

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        parts_of(self, out, part, parts)
        check_gather(part, out)
        _copy(part, out)

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        check_root(self, root)
        assert out is not None, "it gathers"
        self.all_gather(part, out, parts)

    def all_reduce(self, x: Array) -> None:
        check_reduction(self, x, x)

    def broadcast(self, x: Array, root: int = 0) -> None:
        check_root(self, root)
        check_array(self, x)

    def close(self) -> None:
        pass


class PeersGroup(Group):
    """A group over the control plane's connections, in numpy: the oracle, and what trains on the CPU.

    All goes through rank 0, block by block, in an order in which a rank that sends has a rank that takes.
    """

    is_in_stream_order = False
    device = CPU

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size, self._peers = peers.rank, peers.size, peers

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        cut = parts_of(self, source, out, parts)
        check_reduction(self, source, out)
        how = "added to" if adds else "to"
        self._peers.check_call(f"reduce_scatter {source.dtype.name} {how} {out.dtype.name}, parts {_said(cut)}")
        values, result, start = source.view_np(), out.view_np(), 0
        for owner, length in enumerate(cut):
            for first, last in _blocks(length):
                block = values[start + first : start + last]
                if self.rank == owner:
                    self._add_up(result[first:last], block, out.dtype, adds)
                elif self.rank:
                    self._peers.send_block(0, block.view(np.uint8))
                else:
                    self._hand_on(block, owner)
            start += length

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        cut = parts_of(self, out, part, parts)
        check_gather(part, out)
        self._peers.check_call(f"all_gather {out.dtype.name}, parts {_said(cut)}")
        start = sum(cut[: self.rank])
        _copy(part, out.view((cut[self.rank],), (1,), out.offset + start))
        values, start = out.view_np(), 0
        for owner, length in enumerate(cut):
            self._spread(values[start : start + length], owner)
            start += length

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        check_root(self, root)
        check_array(self, part)
        if out is not None:
            parts_of(self, out, part, parts)
            check_gather(part, out)
        self._peers.check_call(f"gather {part.dtype.name} on {root}, parts {_said(parts)}")
        assert (out is not None) == (self.rank == root), "the root has room for all"
        start = 0
        for owner, length in enumerate(parts):
            place = None if out is None else out.view((length,), (1,), out.offset + start)
            if owner == self.rank == root:
                assert place is not None
                _copy(part, place)
            elif owner != root:
                own = part.view_np() if owner == self.rank else None
                self._send_on(own, None if place is None else place.view_np(), length, part.dtype, owner, root)
            start += length

    def _send_on(
        self, own: np.ndarray | None, place: np.ndarray | None, length: int, dtype: DType, owner: int, root: int
    ) -> None:
        """Give `root` the values of `owner`, by way of rank 0; `own` and `place` are theirs."""
        if self.rank not in (owner, root, 0):
            return
        values = own if own is not None else place
        passed = np.empty(min(length, _BLOCK), dtype.numpy)
        for first, last in _blocks(length):
            block = (passed[: last - first] if values is None else values[first:last]).view(np.uint8)
            if self.rank != owner:
                self._peers.receive_block(0 if self.rank else owner, block)
            if self.rank != root:
                self._peers.send_block(0 if self.rank else root, block)

    def all_reduce(self, x: Array) -> None:
        check_reduction(self, x, x)
        self._peers.check_call(f"all_reduce {x.dtype.name} {x.size}")
        values = x.view_np()
        for first, last in _blocks(x.size):
            block = values[first:last]
            if self.rank:
                self._peers.send_block(0, block.view(np.uint8))
            else:
                self._add_up(block, block, x.dtype, False)
            self._spread(block, 0)

    def broadcast(self, x: Array, root: int = 0) -> None:
        check_root(self, root)
        check_array(self, x)
        self._peers.check_call(f"broadcast {x.dtype.name} {x.size} from {root}")
        self._spread(x.view_np(), root)

    def close(self) -> None:
        self._peers.close()

    def _add_up(self, out: np.ndarray, values: np.ndarray, dtype: DType, adds: bool) -> None:
        """Set `out` to the sum of all ranks' `values`, of which this rank has its own; the others' come by rank 0."""
        total, theirs = _Total(out, dtype, adds), np.empty_like(values)
        for rank in range(self.size):
            if rank != self.rank:
                self._peers.receive_block(0 if self.rank else rank, theirs.view(np.uint8))
            total.add(values if rank == self.rank else theirs)
        total.store()

    def _hand_on(self, values: np.ndarray, owner: int) -> None:
        """Rank 0's part of a sum that `owner` makes: give it every rank's values, in their order."""
        theirs = np.empty_like(values)
        for rank in range(self.size):
            if rank == owner:
                continue
            if rank:
                self._peers.receive_block(rank, theirs.view(np.uint8))
            self._peers.send_block(owner, (theirs if rank else values).view(np.uint8))

    def _spread(self, values: np.ndarray, root: int) -> None:
        """Give every rank those of `root`, by way of rank 0."""
        for first, last in _blocks(values.size):
            block = values[first:last].view(np.uint8)
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


def _copy(source: Array, out: Array) -> None:
    if source.data_ptr() != out.data_ptr() or source.dtype is not out.dtype:
        out.view_np()[...] = source.view_np()


class StagedGroup(Group):
    """A group for arrays on any device, over one for arrays on the CPU: each call copies to host memory and back.

    It waits for the device, and cannot be captured in a CUDA graph: correct, and as slow as the connections of `peers`.
    Arrays on the CPU go to the group that does the work as they are.
    """

    is_in_stream_order = False

    def __init__(self, of: Group) -> None:
        self.rank, self.size, self._of = of.rank, of.size, of

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        if source.device.type == "cpu":
            self._of.reduce_scatter(source, out, parts, adds=adds)
            return
        there = _host(out) if adds else from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._of.reduce_scatter(_host(source), there, parts, adds=adds)
        _put(there, out)

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        if out.device.type == "cpu":
            self._of.all_gather(part, out, parts)
            return
        whole = from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._of.all_gather(_host(part), whole, parts)
        _put(whole, out)

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        if part.device.type == "cpu" or out is None:
            self._of.gather(_host(part), out, parts, root)
            return
        whole = from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._of.gather(_host(part), whole, parts, root)
        _put(whole, out)

    def all_reduce(self, x: Array) -> None:
        there = _host(x)
        self._of.all_reduce(there)
        _put(there, x)

    def broadcast(self, x: Array, root: int = 0) -> None:
        there = _host(x)
        self._of.broadcast(there, root)
        _put(there, x)

    def close(self) -> None:
        self._of.close()


def _host(x: Array) -> Array:
    """The array's values in host memory: a copy, but of one that is there."""
    return x if x.device.type == "cpu" else from_numpy(np.array(x.numpy()))


def _put(values: Array, out: Array) -> None:
    if values is not out:
        backend_for(out.device).from_numpy(values.view_np(), out)


# --- What every group checks before anything is sent ------------------------------------------------------------------


ALIGNMENT = 32  # elements


class Member(Protocol):
    """A rank of a group, whose arrays are on `device`."""

    rank: int
    size: int
    device: Device


def parts_of(group: Member, whole: Array, part: Array, parts: Sequence[int] | None) -> list[int]:
    """The elements of each rank of `whole`, checked against this rank's `part`."""
    check_array(group, whole)
    check_array(group, part)
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


def check_array(group: Member, x: Array) -> None:
    """Refuse what no collective takes."""
    if x.device != group.device:
        raise DeviceError(f"this group is for arrays on {group.device}, and one is on {x.device}", next="move it there")
    if x.ndim != 1 or not x.is_contiguous:
        what = f"a collective takes contiguous arrays of one dimension, not shape {x.shape}, strides {x.strides}"
        raise ShapeError(what, next="give a slice of a flat buffer")


def check_reduction(group: Member, source: Array, out: Array) -> None:
    """Refuse what cannot be added, and dtypes to which a sum does not go."""
    check_array(group, source)
    if source.dtype.category == BOOL or source.dtype is float8_e4m3fn:
        raise DTypeError(f"{source.dtype} cannot be added over ranks", next="convert it to int64 or float32")
    is_wider = out.dtype is float32 and source.dtype.category == FLOAT and source.dtype.itemsize < float32.itemsize
    if out.dtype is not source.dtype and not is_wider:
        what = f"a sum of {source.dtype} goes to {source.dtype}, or from a narrower float to float32, not {out.dtype}"
        raise DTypeError(what, next="give an array of that dtype")


def check_gather(part: Array, out: Array) -> None:
    """Refuse parts of another dtype."""
    if part.dtype is not out.dtype:
        raise DTypeError(f"parts of {part.dtype} do not make an array of {out.dtype}", next="give them one dtype")


def check_root(group: Member, root: int) -> None:
    """Refuse a rank that the group does not have."""
    if not 0 <= root < group.size:
        raise ShapeError(f"there is no rank {root} among {group.size}", next=f"give 0 to {group.size - 1}")
