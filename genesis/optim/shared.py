"""Flat buffers that several ranks train: whose part is what, and how gradients, weights and states travel.

Every buffer is cut into buckets, and every bucket into one part for each rank, its owner. After each micro-batch all
ranks exchange its gradients, and the owners add them in the order of the micro-batches: so no sum depends on the number
of ranks. Owners of a part also have its optimizer states (ZeRO-1), in buffers of what they own alone, and send the
weights that they updated. Without that (`is_sharded` False) every rank gets all sums, has all states, and updates all.

On a GPU whose group is in stream order (`is_overlapped`), collectives run on the comm stream and overlap with the step.
docs/decisions/0010-ranks.md lists which stream waits for which. Where the group is not in stream order, every rank
of a GPU gets all sums, too, as the norm and the update are one graph there.
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

# Elements of a bucket at least, of which a collective takes one at a time: 48 MiB of bfloat16.
BUCKET = 24 << 20
SENT = ("parameters", "gradients")  # buffers that collectives read and write


class _Bucket(NamedTuple):
    """Elements [start, start + sum(parts)) of every buffer: one part for each rank."""

    start: int
    parts: list[int]


class SharedBuffers(FlatBuffers):
    """Flat buffers of which this rank is one of several that hold them.

    Args:
        params, grad_dtype: as of `FlatBuffers`. Gradients of one micro-batch have the parameters' type, and their sums
            that of `grad_dtype`.
        group: the ranks.
        is_sharded: whether states exist on the owner of a part alone.

    Attributes:
        has_all_sums: whether every rank has the sums of all gradients at the end of a step, and not of its parts alone.
        squares: where collectives are beside the step, the partial sums that one process makes of the squares of all
            gradients, one of each `NORM_SPAN` elements; 0 where they are another rank's.
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
        self._next_gathered = 0  # the bucket whose values are sent next, while an update goes on
        total_dtype = self.dtype if grad_dtype is None else promote_types(self.dtype, grad_dtype)
        self.summed = self.buffer(total_dtype, "sums of gradients", self.size if self.has_all_sums else end)
        if self.is_overlapped:
            self.squares = self.buffer(float64, "squares of gradients", -(-self.size // NORM_SPAN))
            self.find_squares()  # of zeros: a kernel is best loaded while no rank waits for another

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What of the elements [start, stop) this rank updates."""
        for own in self._own if self.is_sharded else [Piece(0, self.size, 0)]:
            first, last = max(start, own.start), min(stop, own.stop)
            if first < last:
                yield Piece(first, last, own.at + first - own.start)

    def own_spans(self, index: int, most: int) -> Iterator[tuple[int, int]]:
        """Elements [first, last) of parameter `index` that this rank updates, at most `most` at a time."""
        start = self.starts[index]
        for piece in self.pieces(start, start + self.params[index].array.size):
            for first in range(piece.start, piece.stop, most):
                yield first - start, min(first + most, piece.stop) - start

    def put(self, name: str, index: int, values: Array | None, behind: int = 0) -> None:
        """Set what is kept here of the state `name` of parameter `index` to contiguous values, of the elements from
        number `behind` on; None sets all of it to 0.
        """
        start = self.starts[index] + behind
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
        """Whether what ranks send each other is launched on the comm stream."""
        return self.group.is_in_stream_order and self.device != CPU

    @functools.cached_property
    def _row(self) -> int:
        """Elements of which what a rank owns of a bucket is a multiple, but at the end."""
        return NORM_ROW if self.device == CPU else NORM_SPAN

    @functools.cached_property
    def buckets(self) -> list[_Bucket]:
        ranks, row = self.group.size, self._row
        borders = _borders(self.starts, self.size, row * ranks)
        return [_Bucket(start, _cut(stop - start, ranks, row)) for start, stop in itertools.pairwise(borders)]

    def buffer(self, dtype: DType, owner: str, size: int | None = None) -> Array:
        """See `FlatBuffers`. What ranks send lies where the group reaches it best, with room for full parts."""
        if self.is_overlapped and owner in SENT:
            room = self.size + self._row * self.group.size
            made = self.group.buffer(room, dtype, owner, [bucket.parts for bucket in self.buckets])
            if made is not None:
                registry["fill"](out=made, value=0, shape=made.shape, dtype=dtype)
                return made.view((self.size,), (1,), made.offset)
        return super().buffer(dtype, owner, size)

    @property
    def largest_exchange(self) -> int:
        """Bytes of the gradients that ranks send at a time, at most."""
        return max((bucket.parts[0] for bucket in self.buckets), default=0) * self.group.size * self.dtype.itemsize

    # --- What ranks send each other -----------------------------------------------------------------------------------

    def exchange(self, adds: bool) -> None:
        """Give the gradients of a micro-batch to their owners, who add them to those before, if `adds`."""
        self.check_gradients()
        for number in reversed(range(len(self.buckets))):  # about the order in which gradients are done
            self.exchange_bucket(number, adds)
        self.join()

    def check_gradients(self) -> None:
        """All parameters must have gradients; those that were assigned from outside are copied into their slots."""
        self.collect_gradients()
        if any(p.grad is None for p in self.params):
            shape = next(p.shape for p in self.params if p.grad is None)
            next_step = "freeze it, or train in one process"
            raise GradientError(f"a parameter of shape {shape} got no gradient, which ranks exchange", next=next_step)

    def exchange_bucket(self, number: int, adds: bool) -> None:
        """`exchange` of one bucket; before `join` nobody reads its sums or changes its gradients."""
        bucket = self.buckets[number]
        with self.sending():
            self.group.reduce_scatter(self._of(self.gradients, bucket), self._sums(number), bucket.parts, adds=adds)
            if self.is_overlapped:
                self._square(number)

    def complete(self) -> None:
        """All micro-batches are exchanged: give every rank all sums, where it needs them."""
        if self.has_all_sums:
            for number, bucket in enumerate(self.buckets):
                with self.sending():
                    self.group.all_gather(self._sums(number), self._of(self.summed, bucket), bucket.parts)
            self.join()

    def updated_to(self, stop: int) -> None:
        """This rank has updated its parts of the values up to `stop`: send the buckets that are done."""
        while self.is_overlapped and self.is_sharded and self._next_gathered < len(self.buckets):
            if self._own[self._next_gathered].stop > stop:
                return
            self._gather(self._next_gathered)
            self._next_gathered += 1

    def gather_values(self) -> None:
        """Send the weights that were updated here, and take those of the other owners."""
        for number in range(self._next_gathered, len(self.buckets)):
            self._gather(number)
        self._next_gathered = 0
        self.join()

    def _gather(self, number: int) -> None:
        own, bucket = self._own[number], self.buckets[number]
        part = self.values.view((own.stop - own.start,), (1,), self.values.offset + own.start)
        with self.sending():
            self.group.all_gather(part, self._of(self.values, bucket), bucket.parts)

    def sending(self) -> AbstractContextManager[None]:
        """Inside the block, launch what ranks send each other."""
        return self.values.storage.backend.on_comm_stream() if self.is_overlapped else nullcontext()

    def join(self) -> None:
        """Let later work follow what ranks have sent each other."""
        if self.is_overlapped:
            self.values.storage.backend.join_comm_stream()

    def buckets_of(self, index: int) -> range:
        """The buckets in which parameter `index` has elements."""
        start, stop = self.starts[index], self.starts[index] + self.params[index].array.size
        found = [i for i, b in enumerate(self.buckets) if b.start < stop and start < b.start + sum(b.parts)]
        return range(found[0], found[-1] + 1) if found else range(0)

    def gather_state(self, name: str, index: int, root: int = 0) -> Array | None:
        """On rank `root` the whole state `name` of parameter `index`, in its shape: a call of all ranks."""
        kept, array = self.states[name], self.params[index].array
        start, stop = self.starts[index], self.starts[index] + array.size
        whole = label(empty(array.shape, kept.dtype, self.device), f"all {name}") if self.group.rank == root else None
        for number in self.buckets_of(index):
            bucket, own = self.buckets[number], self._own[number]
            ends = list(itertools.accumulate(bucket.parts, initial=bucket.start))
            spans = [(max(start, a), max(start, min(stop, b))) for a, b in itertools.pairwise(ends)]
            lengths = [max(0, b - a) for a, b in spans]
            length, first = lengths[self.group.rank], spans[self.group.rank][0]
            part = kept.view((length,), (1,), kept.offset + (own.at + first - own.start if length else 0))
            place = None
            if whole is not None:
                place = whole.view((sum(lengths),), (1,), whole.offset + max(start, bucket.start) - start)
            self.group.gather(part, place, lengths, root)
        return whole

    def square_sum(self) -> float:
        """Σ of the squares of all gradients, with the bits that one rank finds: a row is one owner's."""
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

    def find_squares(self) -> None:
        """Set `squares` anew, as an exchange does bucket by bucket."""
        for number in range(len(self.buckets)):
            self._square(number)

    def _square(self, number: int) -> None:
        sums = self._sums(number)
        if sums.size:
            first, count = self._own[number].start // NORM_SPAN, -(-sums.size // NORM_SPAN)
            place = self.squares.view((count,), (1,), self.squares.offset + first)
            registry["square_spans"](sums, of=self.size, out=place)

    def first_not_finite(self) -> int | None:
        """The first parameter with a gradient here that is not finite."""
        for i, param in enumerate(self.params):
            for piece in self.pieces(self.starts[i], self.starts[i] + param.array.size):
                length = piece.stop - piece.start
                sums = self.summed.view((length,), (1,), self.summed.offset + self.sums_at(piece)).numpy()
                if not np.isfinite(sums.astype(np.float64)).all():
                    return i
        return None

    # --- Instead of one process's -------------------------------------------------------------------------------------

    def gradient_spans(self) -> list[Array]:
        """The sums, where every rank has all of them."""
        assert self.has_all_sums, "a rank has its parts alone"
        return [self.summed] if any(p.grad is not None for p in self.params) else []

    def _of(self, buffer: Array, bucket: _Bucket) -> Array:
        return buffer.view((sum(bucket.parts),), (1,), buffer.offset + bucket.start)

    def _sums(self, number: int) -> Array:
        """This rank's sums of a bucket."""
        own = self._own[number]
        return self.summed.view((own.stop - own.start,), (1,), self.summed.offset + self.sums_at(own))

    def sums_at(self, piece: Piece) -> int:
        """Where the sums of a piece begin."""
        return piece.start if self.has_all_sums else piece.at


def _borders(starts: Sequence[int], size: int, row: int) -> list[int]:
    """Where buckets begin and the last one ends: counted from the end, at the first multiple of `row` behind the start
    of a parameter from which there are at least `BUCKET` elements. A parameter larger than that is cut.
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
    """Parts of a bucket, in whole rows of the norm but for its end: of one size, which the last ones may not reach."""
    part = -(-size // (row * ranks)) * row
    return [min(size, part * (rank + 1)) - min(size, part * rank) for rank in range(ranks)]


# --- Buckets whose gradients go as soon as backward has made them -----------------------------------------------------


class BucketExchange:
    """The buckets of several flat buffers, from the last parameters to the first, as backward makes their gradients.

    A bucket is launched when its gradients are there and those before it in the order are launched: so the order is the
    same on all ranks, in whichever order a rank makes its gradients. What holds the first parameters comes last: their
    gradients are done when backward is, and those of tied embeddings still later.
    """

    def __init__(self, flats: Sequence[SharedBuffers]) -> None:
        self._flats = flats
        found = [(flat, number) for flat in flats for number in range(len(flat.buckets))]
        self._order = sorted(found, key=lambda bucket: _turn(*bucket))
        self._missing: dict[tuple[SharedBuffers, int], int] = {}  # gradients of each bucket that are not there
        self._seen: set[tuple[SharedBuffers, int]] = set()
        self._next, self._adds = 0, False

    @contextmanager
    def exchanged(self, adds: bool) -> Iterator[None]:
        """Exchange the gradients of the one backward pass in the block; later work follows. See `Optimizer.exchange`.

        Raises:
            GradientError: a parameter got no gradient, or two passes ran.
        """
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
        for flat in self._flats:
            flat.check_gradients()
        while self._next < len(self._order):
            self._launch()
        for flat in self._flats[:1]:  # the lane is one
            flat.join()

    def _arrived(self, flat: SharedBuffers, index: int) -> None:
        param = flat.params[index]
        if (flat, index) in self._seen:
            raise GradientError("two backward passes in one exchange of gradients", next="exchange after each of them")
        self._seen.add((flat, index))
        grad, slot = param.grad, param._gradient_buffer
        if grad is None or slot is None or not is_same_window(grad.array, slot):
            return  # it is copied there when the pass is over
        for number in flat.buckets_of(index):
            self._missing[flat, number] -= 1
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self._launch()

    def _launch(self) -> None:
        flat, number = self._order[self._next]
        flat.exchange_bucket(number, self._adds)
        self._next += 1


def _turn(flat: SharedBuffers, number: int) -> tuple[bool, float]:
    """What buckets are sorted by: how far from the end they begin. First ones come last, small buffers first."""
    start = flat.buckets[number].start
    return start == 0, -start / flat.size if start else flat.size


# --- States that ranks have parts of, read in full --------------------------------------------------------------------


NO_MORE = (-1, -1, -1)  # what a rank asks for that has left its block


class StateGather:
    """The states in buffers of which every rank has its parts: all take turns, in which each gets one state of one
    parameter. So a rank needs room for one whole state at a time, whichever it asks for, and ranks may ask for
    different ones at once: each writes and hashes some of a checkpoint. `sharded` has one order on all ranks.
    """

    def __init__(self, sharded: Sequence[SharedBuffers]) -> None:
        self._sharded = sharded

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block `read` may be called: a call of all ranks, which end it together.

        An error leaves it at once: the others learn of it as of any rank that goes.
        """
        yield
        while self._turn(NO_MORE)[1]:
            pass

    def read(self, flat: SharedBuffers, name: str, index: int) -> Array:
        """The state `name` of parameter `index`, once all other ranks read, too, or have left their blocks."""
        state, _ = self._turn((self._sharded.index(flat), list(flat.states).index(name), index))
        assert state is not None, "it was asked for"
        return state

    def _turn(self, own: tuple[int, int, int]) -> tuple[Array | None, bool]:
        """Say what this rank asks for (buffer, state, parameter), and gather what all ranks ask for.

        Returns:
            The state that this rank asked for, and whether any rank asked for one.
        """
        first = self._sharded[0]
        group, length = first.group, len(own)
        words = from_numpy(np.array(own * group.size, np.int64))
        words = words if first.device == CPU else moved(words, first.device)
        group.all_gather(words.view((length,), (1,), length * group.rank), words, [length] * group.size)
        asked = [tuple(each) for each in words.numpy().reshape(group.size, length).tolist()]
        own_state = None
        for rank, each in enumerate(asked):
            if each != NO_MORE:
                flat = self._sharded[each[0]]
                found = flat.gather_state(list(flat.states)[each[1]], each[2], rank)
                own_state = found if rank == group.rank else own_state
        return own_state, any(each != NO_MORE for each in asked)
