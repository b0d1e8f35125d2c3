"""Flat buffers that several ranks train: how they are sharded, and the collectives on gradients, weights and states.

Every buffer is split into buckets, and every bucket into one part per rank, its owner. After each micro-batch, a
reduce-scatter sends its gradients to the owners, which add them in the order of the micro-batches. So no sum depends on
the number of ranks. With ZeRO-1, an owner also stores the optimizer states of its parts only, and all-gathers the
weights that it updated. Without it (`is_sharded` False), every rank gets all sums, stores all states and updates all.

On a GPU whose group is in stream order (`is_overlapped`), collectives run on the comm stream and overlap with the step.
docs/decisions/0010-ranks.md lists which stream waits for which. On a GPU whose group is not in stream order, every rank
gets all sums, too, because the norm and the update are in one graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from genesis.array import Array, empty, from_numpy, label
from genesis.autograd.graph import is_same_window
from genesis.backend import CPU
from genesis.dtypes import DType, float32, float64, promote_types
from genesis.errors import GradientError
from genesis.functions.transfer import moved
from genesis.op import registry
from genesis.ops.gradients import NORM_ROW, NORM_SPAN, square_rows, sum_of_rows
from genesis.optim.flat import FlatBuffers, Piece
from genesis.tensor import Tensor

if TYPE_CHECKING:
    from genesis.distributed.group import Group

# Minimum number of elements of a bucket, which one collective exchanges: 48 MiB of bfloat16.
BUCKET = 24 << 20
SENT = ("parameters", "gradients")  # buffers that collectives read and write


class _Bucket(NamedTuple):
    """Elements [start, start + sum(parts)) of every buffer, with one part per rank."""

    start: int
    parts: list[int]


class SharedBuffers(FlatBuffers):
    """Flat buffers whose updates and, with ZeRO-1, states are shared among ranks.

    Args:
        params, grad_dtype: as for `FlatBuffers`. `grad_dtype` applies to sums only: gradients of one micro-batch have
            the dtype of the parameters.
        group: group of ranks.
        is_sharded: whether only the owner of a part stores its states.

    Attributes:
        has_all_sums: whether at the end of a step every rank has all sums of gradients, instead of those it owns.
        squares: with overlapped collectives, the sums of squares that one process would compute, one per `NORM_SPAN`
            gradients; 0 for gradients of other owners.
    """

    def __init__(self, params: Sequence[Tensor], grad_dtype: DType | None, group: Group, *, is_sharded: bool) -> None:
        self.group, self.is_sharded = group, is_sharded
        super().__init__(params)
        self._own, end = list[Piece](), 0
        for bucket in self.buckets:
            start, length = bucket.start + sum(bucket.parts[: group.rank]), bucket.parts[group.rank]
            self._own.append(Piece(start, start + length, end if is_sharded else start))
            end += length
        self.state_size = end if is_sharded else self.size
        self.has_all_sums = not is_sharded or not (self.device == CPU or self.is_overlapped)
        self._next_gathered = 0  # the next bucket to all-gather during an update
        total_dtype = self.dtype if grad_dtype is None else promote_types(self.dtype, grad_dtype)
        self.summed = self.buffer(total_dtype, "sums of gradients", self.size if self.has_all_sums else end)
        if self.is_overlapped:
            self.squares = self.buffer(float64, "squares of gradients", -(-self.size // NORM_SPAN))
            self.compute_squares()  # loads the kernel before a step in which ranks wait for each other

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of the elements [start, stop) that this rank updates."""
        for own in self._own if self.is_sharded else [Piece(0, self.size, 0)]:
            first, last = max(start, own.start), min(stop, own.stop)
            if first < last:
                yield Piece(first, last, own.at + first - own.start)

    def own_spans(self, index: int, limit: int) -> Iterator[tuple[int, int]]:
        """Yield the elements [first, last) of parameter `index` that this rank updates, at most `limit` at a time."""
        start = self.starts[index]
        for piece in self.pieces(start, start + self.params[index].array.size):
            for first in range(piece.start, piece.stop, limit):
                yield first - start, min(first + limit, piece.stop) - start

    def put(self, name: str, index: int, values: Array | None, offset: int = 0) -> None:
        """Store this rank's part of the state `name` of parameter `index`. `values` are contiguous and start at element
        `offset` of the parameter. None sets the part to 0.
        """
        start = self.starts[index] + offset
        size = self.params[index].array.size if values is None else values.size
        for piece in self.pieces(start, start + size):
            kept, length = self.states[name], piece.stop - piece.start
            target = kept.view((length,), (1,), kept.offset + piece.at)
            if values is None:
                registry["fill"](out=target, value=0, shape=target.shape, dtype=target.dtype)
            else:
                registry["copy"](values.view((length,), (1,), values.offset + piece.start - start), out=target)

    @functools.cached_property
    def is_overlapped(self) -> bool:
        """Whether collectives run on the comm stream and overlap with the step."""
        return self.group.is_in_stream_order and self.device != CPU

    @functools.cached_property
    def _row(self) -> int:
        """The granularity in elements of a rank's part of a bucket, except for the last part."""
        return NORM_ROW if self.device == CPU else NORM_SPAN

    @functools.cached_property
    def buckets(self) -> list[_Bucket]:
        ranks, row = self.group.size, self._row
        borders = _borders(self.starts, self.size, row * ranks)
        return [_Bucket(start, _cut(stop - start, ranks, row)) for start, stop in itertools.pairwise(borders)]

    def buffer(self, dtype: DType, owner: str, size: int | None = None) -> Array:
        """See `FlatBuffers`. Buffers of collectives are allocated by the group, padded to full parts."""
        if self.is_overlapped and owner in SENT:
            room = self.size + self._row * self.group.size
            memory = self.group.buffer(room, dtype, owner, [bucket.parts for bucket in self.buckets])
            if memory is not None:
                registry["fill"](out=memory, value=0, shape=memory.shape, dtype=dtype)
                return memory.view((self.size,), (1,), memory.offset)
        return super().buffer(dtype, owner, size)

    @property
    def largest_exchange(self) -> int:
        """The size in bytes of the largest collective on gradients."""
        return max((bucket.parts[0] for bucket in self.buckets), default=0) * self.group.size * self.dtype.itemsize

    # --- Collectives --------------------------------------------------------------------------------------------------

    def exchange(self, adds: bool) -> None:
        """Reduce-scatter the gradients of a micro-batch to their owners. If `adds`, they add them to earlier sums."""
        self.check_gradients()
        for number in reversed(range(len(self.buckets))):  # roughly the order in which backward finishes gradients
            self.exchange_bucket(number, adds)
        self.join()

    def check_gradients(self) -> None:
        """Copy gradients that users assigned into their slots. Raises GradientError if a parameter has no gradient."""
        self.collect_gradients()
        if any(p.grad is None for p in self.params):
            shape = next(p.shape for p in self.params if p.grad is None)
            next_step = "freeze it, or train in one process"
            raise GradientError(f"a parameter of shape {shape} has no gradient to exchange with ranks", next=next_step)

    def exchange_bucket(self, number: int, adds: bool) -> None:
        """Exchange one bucket. Its sums must not be read, nor its gradients changed, before `join`."""
        bucket = self.buckets[number]
        with self.sending():
            self.group.reduce_scatter(self._slice(self.gradients, bucket), self._sums(number), bucket.parts, adds=adds)
            if self.is_overlapped:
                self._square(number)

    def complete(self) -> None:
        """All-gather the sums after the last micro-batch, if every rank needs them."""
        if self.has_all_sums:
            for number, bucket in enumerate(self.buckets):
                with self.sending():
                    self.group.all_gather(self._sums(number), self._slice(self.summed, bucket), bucket.parts)
            self.join()

    def updated_to(self, stop: int) -> None:
        """Note that this rank has updated its values up to `stop`, and all-gather the finished buckets."""
        while self.is_overlapped and self.is_sharded and self._next_gathered < len(self.buckets):
            if self._own[self._next_gathered].stop > stop:
                return
            self._gather(self._next_gathered)
            self._next_gathered += 1

    def gather_values(self) -> None:
        """All-gather the updated weights of all owners."""
        for number in range(self._next_gathered, len(self.buckets)):
            self._gather(number)
        self._next_gathered = 0
        self.join()

    def _gather(self, number: int) -> None:
        own, bucket = self._own[number], self.buckets[number]
        part = self.values.view((own.stop - own.start,), (1,), self.values.offset + own.start)
        with self.sending():
            self.group.all_gather(part, self._slice(self.values, bucket), bucket.parts)

    def sending(self) -> AbstractContextManager[None]:
        """Inside the block, launch collectives, on the comm stream if they overlap."""
        return self.values.storage.backend.on_comm_stream() if self.is_overlapped else nullcontext()

    def join(self) -> None:
        """Make later work wait for the collectives so far."""
        if self.is_overlapped:
            self.values.storage.backend.join_comm_stream()

    def buckets_of(self, index: int) -> range:
        """The buckets in which parameter `index` has elements."""
        start, stop = self.starts[index], self.starts[index] + self.params[index].array.size
        numbers = [i for i, b in enumerate(self.buckets) if b.start < stop and start < b.start + sum(b.parts)]
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    def gather_state(self, name: str, index: int, root: int = 0) -> Array | None:
        """Gather the state `name` of parameter `index` on rank `root`, in its shape. A collective call."""
        kept, array = self.states[name], self.params[index].array
        start, stop = self.starts[index], self.starts[index] + array.size
        state = label(empty(array.shape, kept.dtype, self.device), f"all {name}") if self.group.rank == root else None
        for number in self.buckets_of(index):
            # The span of the parameter in each rank's part of the bucket.
            bucket, own = self.buckets[number], self._own[number]
            ends = list(itertools.accumulate(bucket.parts, initial=bucket.start))
            spans = [(max(start, a), max(start, min(stop, b))) for a, b in itertools.pairwise(ends)]
            lengths = [max(0, b - a) for a, b in spans]
            length, first = lengths[self.group.rank], spans[self.group.rank][0]
            part = kept.view((length,), (1,), kept.offset + (own.at + first - own.start if length else 0))
            place = None
            if state is not None:
                place = state.view((sum(lengths),), (1,), state.offset + max(start, bucket.start) - start)
            self.group.gather(part, place, lengths, root)
        return state

    def square_sum(self) -> float:
        """Return the sum of squares of all gradients, bit-identical to one rank's, as each row has one owner."""
        rows = empty((-(-self.size // NORM_ROW),), float64 if self.summed.dtype is float64 else float32, CPU)
        for number, bucket in enumerate(self.buckets):
            own = square_rows(self._sums(number).numpy())
            parts = [-(-each // NORM_ROW) for each in bucket.parts]
            place = rows.view((sum(parts),), (1,), rows.offset + bucket.start // NORM_ROW)
            first = sum(parts[: self.group.rank])
            mine = place.view((own.size,), (1,), place.offset + first)
            mine.view_np()[...] = own
            self.group.all_gather(mine, place, parts)
        return sum_of_rows(rows.view_np(), self.size)

    def compute_squares(self) -> None:
        """Recompute `squares`, which an exchange otherwise sets bucket by bucket."""
        for number in range(len(self.buckets)):
            self._square(number)

    def _square(self, number: int) -> None:
        sums = self._sums(number)
        if sums.size:
            first, count = self._own[number].start // NORM_SPAN, -(-sums.size // NORM_SPAN)
            place = self.squares.view((count,), (1,), self.squares.offset + first)
            registry["square_spans"](sums, of=self.size, out=place)

    def first_not_finite(self) -> int | None:
        """The index of the first parameter with a non-finite gradient on this rank, or None."""
        for i, param in enumerate(self.params):
            for piece in self.pieces(self.starts[i], self.starts[i] + param.array.size):
                length = piece.stop - piece.start
                sums = self.summed.view((length,), (1,), self.summed.offset + self.sums_at(piece)).numpy()
                if not np.isfinite(sums.astype(np.float64)).all():
                    return i
        return None

    # --- Overrides ----------------------------------------------------------------------------------------------------

    def gradient_spans(self) -> list[Array]:
        """The sums of all gradients. Requires `has_all_sums`."""
        assert self.has_all_sums, "a rank has only its own parts"
        return [self.summed] if any(p.grad is not None for p in self.params) else []

    def _slice(self, buffer: Array, bucket: _Bucket) -> Array:
        return buffer.view((sum(bucket.parts),), (1,), buffer.offset + bucket.start)

    def _sums(self, number: int) -> Array:
        """This rank's sums of a bucket."""
        own = self._own[number]
        return self.summed.view((own.stop - own.start,), (1,), self.summed.offset + self.sums_at(own))

    def sums_at(self, piece: Piece) -> int:
        """The first element of a piece's gradients in `summed`."""
        return piece.start if self.has_all_sums else piece.at


def _borders(starts: Sequence[int], size: int, row: int) -> list[int]:
    """Return the borders of the buckets, which are formed from the end. A bucket has at least `BUCKET` elements and
    starts at the first multiple of `row` after the start of a parameter. Larger parameters are split.
    """
    borders = [size]
    for start in reversed(starts):
        first = -(-start // row) * row
        while borders[0] - first >= 2 * BUCKET:
            borders.insert(0, (borders[0] - BUCKET) // row * row)
        if borders[0] - first >= BUCKET or (start == 0 and borders[0]):
            borders.insert(0, first)
    return borders


def _cut(size: int, ranks: int, row: int) -> list[int]:
    """Split a bucket into parts of equal size in whole rows of the norm. The last parts may be smaller or empty."""
    part = -(-size // (row * ranks)) * row
    return [min(size, part * (rank + 1)) - min(size, part * rank) for rank in range(ranks)]


# --- Exchange of buckets during backward ------------------------------------------------------------------------------


class BucketExchange:
    """Exchanges the buckets of several flat buffers while backward runs, from the last parameters to the first.

    A bucket is launched when its gradients are complete and all earlier buckets in a fixed order are launched. So all
    ranks launch the same order, even if their gradients finish in different orders. The buckets of the first parameters
    come last, because backward finishes these gradients, such as a tied embedding's, at its end.
    """

    def __init__(self, flats: Sequence[SharedBuffers]) -> None:
        self._flats = flats
        buckets = [(flat, number) for flat in flats for number in range(len(flat.buckets))]
        self._order = sorted(buckets, key=lambda bucket: _launch_order(*bucket))
        self._missing: dict[tuple[SharedBuffers, int], int] = {}  # number of missing gradients of each bucket
        self._seen: set[tuple[SharedBuffers, int]] = set()
        self._next, self._adds = 0, False

    @contextmanager
    def exchanged(self, adds: bool) -> Iterator[None]:
        """Exchange the gradients of the one backward pass in the block; see `Optimizer.exchange`.

        Raises:
            GradientError: if a parameter has no gradient, or two passes ran.
        """
        # Count the missing gradients of each bucket, and have each slot report its gradient.
        self._next, self._adds = 0, adds
        self._seen, self._missing = set(), dict.fromkeys(self._order, 0)
        for flat in self._flats:
            for index, param in enumerate(flat.params):
                assert param._gradient_slot is not None, "parameters have slots in flat buffers"
                param._gradient_slot.arrived = functools.partial(self._arrived, flat, index)
                for number in flat.buckets_of(index):
                    self._missing[flat, number] += 1
        try:
            yield
        finally:
            for flat in self._flats:
                for param in flat.params:
                    if param._gradient_slot is not None:
                        param._gradient_slot.arrived = None
        # Launch the buckets that backward left, such as those with gradients that users assigned.
        for flat in self._flats:
            flat.check_gradients()
        while self._next < len(self._order):
            self._launch()
        for flat in self._flats[:1]:  # all buffers share one comm stream
            flat.join()

    def _arrived(self, flat: SharedBuffers, index: int) -> None:
        param = flat.params[index]
        if (flat, index) in self._seen:
            raise GradientError("two backward passes ran in one exchange of gradients", next="exchange after each pass")
        self._seen.add((flat, index))
        grad, slot = param.grad, param._gradient_buffer
        if grad is None or slot is None or not is_same_window(grad.array, slot):
            return  # it is copied into its slot when the pass is over
        for number in flat.buckets_of(index):
            self._missing[flat, number] -= 1
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self._launch()

    def _launch(self) -> None:
        flat, number = self._order[self._next]
        flat.exchange_bucket(number, self._adds)
        self._next += 1


def _launch_order(flat: SharedBuffers, number: int) -> tuple[bool, float]:
    """The sort key: buckets from the end of a buffer to its start, then each buffer's first bucket, smallest first."""
    start = flat.buckets[number].start
    return start == 0, -start / flat.size if start else flat.size


# --- Gathering sharded states -----------------------------------------------------------------------------------------


NO_MORE = (-1, -1, -1)  # the request of a rank that has left its block


class StateGather:
    """Gathers sharded states in rounds. In each round, a rank gets one state of one parameter of its choice, so that
    ranks can write and hash different parts of a checkpoint. A rank allocates one full state at a time. `sharded` must
    have the same order on all ranks.
    """

    def __init__(self, sharded: Sequence[SharedBuffers]) -> None:
        self._sharded = sharded

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Allow calls of `read` inside the block. A collective call: all ranks leave the block together.

        After an error, a rank leaves at once, and the others fail as after the loss of a rank.
        """
        yield
        while self._round(NO_MORE)[1]:
            pass

    def read(self, flat: SharedBuffers, name: str, index: int) -> Array:
        """Return the state `name` of parameter `index`. Waits until all other ranks also read or left their blocks."""
        state, _ = self._round((self._sharded.index(flat), list(flat.states).index(name), index))
        assert state is not None, "a requested state is gathered"
        return state

    def _round(self, own: tuple[int, int, int]) -> tuple[Array | None, bool]:
        """All-gather the requests (buffer, state, parameter) of all ranks, and gather the requested states.

        Returns:
            The state that this rank requested, and whether any rank requested one.
        """
        first = self._sharded[0]
        group, length = first.group, len(own)
        words = from_numpy(np.array(own * group.size, np.int64))
        words = words if first.device == CPU else moved(words, first.device)
        group.all_gather(words.view((length,), (1,), length * group.rank), words, [length] * group.size)
        requests = [tuple(each) for each in words.numpy().reshape(group.size, length).tolist()]
        own_state = None
        for rank, each in enumerate(requests):
            if each != NO_MORE:
                flat = self._sharded[each[0]]
                state = flat.gather_state(list(flat.states)[each[1]], each[2], rank)
                own_state = state if rank == group.rank else own_state
        return own_state, any(each != NO_MORE for each in requests)
