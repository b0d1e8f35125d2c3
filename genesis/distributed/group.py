"""Collectives on flat slices of arrays, among the ranks of a group.

A reduction adds in float32 in rank order and rounds once to the type of the result; integers and float64 are added in
their own type. So the bits depend neither on the implementation nor on the parts. Without `parts`, an array of n
elements has W parts of n / W elements, a multiple of 32 as in flat buffers.
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

WORLD = None  # torch's name, `group.WORLD`, for the group of all ranks
_BLOCK = 1 << 18  # elements per message


class Group(Protocol):
    """A group of ranks. Every call is collective and takes contiguous arrays of one dimension.

    Attributes:
        rank, size: this rank, and the number of ranks.
        is_in_stream_order: whether calls return at once and run in the order of the current stream, so that a CUDA
            graph can capture them. Otherwise they wait for the device.

    Raises (all calls):
        ShapeError, DTypeError: if arrays do not fit; nothing has been sent then.
        DistributedError: if another rank makes a different call, is late or has gone.
    """

    rank: int
    size: int
    is_in_stream_order: bool

    def buffer(self, size: int, dtype: DType, owner: str, parts: Sequence[Sequence[int]]) -> Array | None:
        """Allocate uninitialized memory in which collectives are fastest. None if all memory is equally fast.

        Args:
            size: number of elements, after each call's parts are padded to the size of its first part.
            parts: parts of each `reduce_scatter` and `all_gather` in the buffer. Only the last ones may be smaller.
        """
        return None

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        """Set `out` to the sum over ranks of this rank's part of `source` [n]. `out` may be a slice of `source`.

        Args:
            out: array with the dtype of `source`, or float32 if that is a narrower float.
            parts: elements of each rank, which add up to n.
            adds: add to `out`, in the order ((out + rank 0's) + rank 1's) + ... `out` must not be a slice of `source`.
        """

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        """Set `out` [n] to the parts of all ranks. `part` may be this rank's slice of it."""

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        """Set `out` [n] on rank `root` to the parts of all ranks. `out` is None on other ranks."""

    def all_reduce(self, x: Array) -> None:
        """Set `x` to the sum of `x` over ranks."""

    def broadcast(self, x: Array, root: int = 0) -> None:
        """Set `x` to its values on rank `root`."""

    def close(self) -> None:
        """Wait for all ranks and close the connections."""


class Alone(Group):
    """A group of one rank. Its calls only copy, if the two arrays are not the same memory."""

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
        assert out is not None, "the root has an output"
        self.all_gather(part, out, parts)

    def all_reduce(self, x: Array) -> None:
        check_reduction(self, x, x)

    def broadcast(self, x: Array, root: int = 0) -> None:
        check_root(self, root)
        check_array(self, x)

    def close(self) -> None:
        pass


class PeersGroup(Group):
    """A group over the connections of the control plane, in numpy. It is the oracle and trains on the CPU.

    All data pass through rank 0, block by block. Each send has a matching receive at that moment.
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
        self._peers.check_call(f"reduce_scatter {source.dtype.name} {how} {out.dtype.name}, parts {_summary(cut)}")
        values, result, start = source.view_np(), out.view_np(), 0
        for owner, length in enumerate(cut):
            for first, last in _blocks(length):
                block = values[start + first : start + last]
                if self.rank == owner:
                    self._add_up(result[first:last], block, out.dtype, adds)
                elif self.rank:
                    self._peers.send_block(0, block.view(np.uint8))
                else:
                    self._forward_values(block, owner)
            start += length

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        cut = parts_of(self, out, part, parts)
        check_gather(part, out)
        self._peers.check_call(f"all_gather {out.dtype.name}, parts {_summary(cut)}")
        start = sum(cut[: self.rank])
        _copy(part, out.view((cut[self.rank],), (1,), out.offset + start))
        values, start = out.view_np(), 0
        for owner, length in enumerate(cut):
            self._broadcast_blocks(values[start : start + length], owner)
            start += length

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        check_root(self, root)
        check_array(self, part)
        if out is not None:
            parts_of(self, out, part, parts)
            check_gather(part, out)
        self._peers.check_call(f"gather {part.dtype.name} on {root}, parts {_summary(parts)}")
        assert (out is not None) == (self.rank == root), "only the root has an output"
        start = 0
        for owner, length in enumerate(parts):
            place = None if out is None else out.view((length,), (1,), out.offset + start)
            if owner == self.rank == root:
                assert place is not None
                _copy(part, place)
            elif owner != root:
                own = part.view_np() if owner == self.rank else None
                self._send_to_root(own, None if place is None else place.view_np(), length, part.dtype, owner, root)
            start += length

    def _send_to_root(
        self, own: np.ndarray | None, place: np.ndarray | None, length: int, dtype: DType, owner: int, root: int
    ) -> None:
        """Send the values of `owner` to `root` through rank 0. `own` is the source on `owner`, `place` the target."""
        if self.rank not in (owner, root, 0):
            return
        values = own if own is not None else place
        buffer = np.empty(min(length, _BLOCK), dtype.numpy)
        for first, last in _blocks(length):
            block = (buffer[: last - first] if values is None else values[first:last]).view(np.uint8)
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
            self._broadcast_blocks(block, 0)

    def broadcast(self, x: Array, root: int = 0) -> None:
        check_root(self, root)
        check_array(self, x)
        self._peers.check_call(f"broadcast {x.dtype.name} {x.size} from {root}")
        self._broadcast_blocks(x.view_np(), root)

    def close(self) -> None:
        self._peers.close()

    def _add_up(self, out: np.ndarray, values: np.ndarray, dtype: DType, adds: bool) -> None:
        """Set `out` to the sum of `values` over ranks. Other ranks' values arrive through rank 0."""
        total, theirs = _Total(out, dtype, adds), np.empty_like(values)
        for rank in range(self.size):
            if rank != self.rank:
                self._peers.receive_block(0 if self.rank else rank, theirs.view(np.uint8))
            total.add(values if rank == self.rank else theirs)
        total.store()

    def _forward_values(self, values: np.ndarray, owner: int) -> None:
        """On rank 0, forward the values of all ranks to `owner`, in rank order."""
        theirs = np.empty_like(values)
        for rank in range(self.size):
            if rank == owner:
                continue
            if rank:
                self._peers.receive_block(rank, theirs.view(np.uint8))
            self._peers.send_block(owner, (theirs if rank else values).view(np.uint8))

    def _broadcast_blocks(self, values: np.ndarray, root: int) -> None:
        """Broadcast `values` from `root` to every rank, through rank 0."""
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
    """A sum in the accumulation type, rounded once to the type of `out`. With `adds` it starts from `out`."""

    def __init__(self, out: np.ndarray, dtype: DType, adds: bool) -> None:
        self._out = out
        is_narrow = dtype.category == FLOAT and dtype.itemsize < float32.itemsize
        self._type = np.dtype(np.float32) if is_narrow else dtype.numpy
        self._sum: np.ndarray | None = out.astype(self._type) if adds else None

    def add(self, values: np.ndarray) -> None:
        """Add the values of the next rank."""
        if self._sum is None:
            self._sum = values.astype(self._type)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            self._sum += values.astype(self._type, copy=False)

    def store(self) -> None:
        """Store the sum in `out`."""
        assert self._sum is not None, "a sum of nothing"
        with np.errstate(over="ignore", invalid="ignore"):
            self._out[...] = self._sum.astype(self._out.dtype, copy=False)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    for first in range(0, length, _BLOCK):
        yield first, min(first + _BLOCK, length)


def _summary(parts: Sequence[int]) -> str:
    return str(parts) if len(parts) <= 64 else f"{len(parts)} with checksum {zlib.crc32(str(parts).encode())}"


def _copy(source: Array, out: Array) -> None:
    if source.data_ptr() != out.data_ptr() or source.dtype is not out.dtype:
        out.view_np()[...] = source.view_np()


class StagedGroup(Group):
    """A group for arrays on any device, over a group for the CPU. Each call copies to host memory and back.

    It waits for the device, cannot be captured in a CUDA graph, and is as slow as the connections of `peers`. Arrays on
    the CPU are passed on without a copy.
    """

    is_in_stream_order = False

    def __init__(self, host_group: Group) -> None:
        self.rank, self.size, self._host_group = host_group.rank, host_group.size, host_group

    def reduce_scatter(
        self, source: Array, out: Array, parts: Sequence[int] | None = None, *, adds: bool = False
    ) -> None:
        if source.device.type == "cpu":
            self._host_group.reduce_scatter(source, out, parts, adds=adds)
            return
        host_out = _to_host(out) if adds else from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._host_group.reduce_scatter(_to_host(source), host_out, parts, adds=adds)
        _write_back(host_out, out)

    def all_gather(self, part: Array, out: Array, parts: Sequence[int] | None = None) -> None:
        if out.device.type == "cpu":
            self._host_group.all_gather(part, out, parts)
            return
        host_out = from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._host_group.all_gather(_to_host(part), host_out, parts)
        _write_back(host_out, out)

    def gather(self, part: Array, out: Array | None, parts: Sequence[int], root: int = 0) -> None:
        if part.device.type == "cpu" or out is None:
            self._host_group.gather(_to_host(part), out, parts, root)
            return
        host_out = from_numpy(np.empty(out.shape, out.dtype.numpy))
        self._host_group.gather(_to_host(part), host_out, parts, root)
        _write_back(host_out, out)

    def all_reduce(self, x: Array) -> None:
        host_x = _to_host(x)
        self._host_group.all_reduce(host_x)
        _write_back(host_x, x)

    def broadcast(self, x: Array, root: int = 0) -> None:
        host_x = _to_host(x)
        self._host_group.broadcast(host_x, root)
        _write_back(host_x, x)

    def close(self) -> None:
        self._host_group.close()


def _to_host(x: Array) -> Array:
    """Return the array in host memory, as a copy unless it is already there."""
    return x if x.device.type == "cpu" else from_numpy(np.array(x.numpy()))


def _write_back(values: Array, out: Array) -> None:
    if values is not out:
        backend_for(out.device).from_numpy(values.view_np(), out)


# --- Checks before anything is sent -----------------------------------------------------------------------------------


ALIGNMENT = 32  # elements


class Member(Protocol):
    """A rank of a group for arrays on `device`."""

    rank: int
    size: int
    device: Device


def parts_of(group: Member, whole: Array, part: Array, parts: Sequence[int] | None) -> list[int]:
    """Return the number of elements of each rank in `whole`, after checking this rank's `part`."""
    check_array(group, whole)
    check_array(group, part)
    if parts is None:
        each, remainder = divmod(whole.size, group.size)
        if remainder or each % ALIGNMENT:
            what = f"{whole.size} elements cannot be split into {group.size} parts of a multiple of {ALIGNMENT}"
            raise ShapeError(what, next="pad the array, or pass the parts")
        cut = [each] * group.size
    else:
        cut = [int(each) for each in parts]
    if len(cut) != group.size or min(cut) < 0 or sum(cut) != whole.size:
        what = f"the parts {cut} do not fit {whole.size} elements and {group.size} ranks"
        raise ShapeError(what, next=f"pass {group.size} sizes with the sum {whole.size}")
    if part.size != cut[group.rank]:
        what = f"rank {group.rank} has an array of {part.size} elements for its part of {cut[group.rank]}"
        raise ShapeError(what, next="pass an array of the size of the part")
    return cut


def check_array(group: Member, x: Array) -> None:
    """Raise unless `x` is on the group's device, contiguous and one-dimensional."""
    if x.device != group.device:
        raise DeviceError(f"this group takes arrays on {group.device}, and one is on {x.device}", next="move it there")
    if x.ndim != 1 or not x.is_contiguous:
        what = f"a collective takes contiguous arrays of one dimension, not shape {x.shape}, strides {x.strides}"
        raise ShapeError(what, next="pass a slice of a flat buffer")


def check_reduction(group: Member, source: Array, out: Array) -> None:
    """Raise unless the dtype of `source` can be added and `out` can hold the sum."""
    check_array(group, source)
    if source.dtype.category == BOOL or source.dtype is float8_e4m3fn:
        raise DTypeError(f"{source.dtype} cannot be added over ranks", next="convert it to int64 or float32")
    is_wider = out.dtype is float32 and source.dtype.category == FLOAT and source.dtype.itemsize < float32.itemsize
    if out.dtype is not source.dtype and not is_wider:
        what = f"a sum of {source.dtype} needs an output of {source.dtype} (or float32 for floats), not {out.dtype}"
        raise DTypeError(what, next="pass an array of that dtype")


def check_gather(part: Array, out: Array) -> None:
    """Raise unless both arrays have one dtype."""
    if part.dtype is not out.dtype:
        raise DTypeError(f"parts of {part.dtype} do not fit an array of {out.dtype}", next="use one dtype")


def check_root(group: Member, root: int) -> None:
    """Raise unless the group has a rank `root`."""
    if not 0 <= root < group.size:
        raise ShapeError(f"the root {root} is not one of {group.size} ranks", next=f"pass 0 to {group.size - 1}")
