"""Flat buffers that several ranks train: whose part is what, and how gradients, weights and states travel.

Every buffer is cut into buckets, and every bucket into one part for each rank, its owner. After each micro-batch all
ranks exchange its gradients, and the owners add them in the order of the micro-batches: so no sum depends on the number
of ranks. Owners of a part also have its optimizer states (ZeRO-1), in buffers of what they own alone, and send the
weights that they updated. Without that (`is_sharded` False) every rank gets all sums, has all states, and updates all.
On a GPU every rank gets all sums as well: the norm of the gradients and the update are one graph there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from genesis.array import Array, empty
from genesis.backend import CPU
from genesis.dtypes import DType, float32, float64, promote_types
from genesis.errors import GradientError
from genesis.op import registry
from genesis.ops.gradients import NORM_ROW, square_rows, sum_of_rows
from genesis.optim.flat import FlatBuffers, Piece
from genesis.tensor import Tensor

if TYPE_CHECKING:
    from genesis.distributed.group import Group

__all__ = ["SharedBuffers"]

# Elements of a bucket, of which a collective takes one at a time: 48 MiB of bfloat16.
BUCKET = 24 << 20


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
        whole: states in full, by name, on rank 0 after `gather_states`.
    """

    def __init__(self, params: Sequence[Tensor], grad_dtype: DType | None, group: Group, *, is_sharded: bool) -> None:
        super().__init__(params)
        self.group, self.is_sharded = group, is_sharded
        self.whole: dict[str, Array] = {}
        self._buckets = [
            _Bucket(start, _cut(min(BUCKET, self.size - start), group.size)) for start in range(0, self.size, BUCKET)
        ]
        self._own, end = list[Piece](), 0
        for bucket in self._buckets:
            start, length = bucket.start + sum(bucket.parts[: group.rank]), bucket.parts[group.rank]
            self._own.append(Piece(start, start + length, end if is_sharded else start))
            end += length
        self.state_size = end if is_sharded else self.size
        self.has_all_sums = not is_sharded or self.device != CPU
        total_dtype = self.dtype if grad_dtype is None else promote_types(self.dtype, grad_dtype)
        self.summed = self.buffer(total_dtype, "sums of gradients", self.size if self.has_all_sums else end)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What of the elements [start, stop) this rank updates."""
        for own in self._own if self.is_sharded else [Piece(0, self.size, 0)]:
            first, last = max(start, own.start), min(stop, own.stop)
            if first < last:
                yield Piece(first, last, own.at + first - own.start)

    def put(self, name: str, index: int, values: Array | None) -> None:
        """Set what is kept here of the state `name` of parameter `index` to values of its shape; None is 0."""
        start = self.starts[index]
        flat = None if values is None else registry["copy"](values)
        for piece in self.pieces(start, start + self.params[index].array.size):
            kept, length = self.states[name], piece.stop - piece.start
            target = kept.view((length,), (1,), kept.offset + piece.at)
            if flat is None:
                registry["fill"](out=target, value=0, shape=target.shape, dtype=target.dtype)
            else:
                registry["copy"](flat.view((length,), (1,), flat.offset + piece.start - start), out=target)

    # --- What ranks send each other -----------------------------------------------------------------------------------

    def exchange(self, adds: bool) -> None:
        """Give the gradients of a micro-batch to their owners, who add them to those before, if `adds`."""
        self.collect_gradients()
        if any(p.grad is None for p in self.params):
            shape = next(p.shape for p in self.params if p.grad is None)
            next_step = "freeze it, or train in one process"
            raise GradientError(f"a parameter of shape {shape} got no gradient, which ranks exchange", next=next_step)
        for number, bucket in reversed(list(enumerate(self._buckets))):  # in the order in which gradients are done
            self.group.reduce_scatter(self._of(self.gradients, bucket), self._sums(number), bucket.parts, adds=adds)

    def complete(self) -> None:
        """All micro-batches are exchanged: give every rank all sums, where it needs them."""
        if self.has_all_sums:
            for number, bucket in enumerate(self._buckets):
                self.group.all_gather(self._sums(number), self._of(self.summed, bucket), bucket.parts)

    def gather_values(self) -> None:
        """Send the weights that were updated here, and take those of the other owners."""
        for own, bucket in zip(self._own, self._buckets, strict=True):
            part = self.values.view((own.stop - own.start,), (1,), self.values.offset + own.start)
            self.group.all_gather(part, self._of(self.values, bucket), bucket.parts)

    def gather_states(self) -> None:
        """Bring all states to rank 0, into `whole`."""
        for name, kept in self.states.items():
            whole = self.buffer(kept.dtype, f"all {name}", self.size) if self.group.rank == 0 else None
            for own, bucket in zip(self._own, self._buckets, strict=True):
                part = kept.view((own.stop - own.start,), (1,), kept.offset + own.at)
                self.group.gather(part, None if whole is None else self._of(whole, bucket), bucket.parts)
            if whole is not None:
                self.whole[name] = whole

    def square_sum(self) -> float:
        """Σ of the squares of all gradients, with the bits that one rank finds: a row is one owner's."""
        rows = empty((-(-self.size // NORM_ROW),), float64 if self.summed.dtype is float64 else float32, CPU)
        for number, bucket in enumerate(self._buckets):
            own = square_rows(self._sums(number).numpy())
            parts = [-(-each // NORM_ROW) for each in bucket.parts]
            place = rows.view((sum(parts),), (1,), rows.offset + bucket.start // NORM_ROW)
            first = sum(parts[: self.group.rank])
            mine = place.view((own.size,), (1,), place.offset + first)
            mine.view_np()[...] = own
            self.group.all_gather(mine, place, parts)
        return sum_of_rows(rows.view_np(), self.size)

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


def _cut(size: int, ranks: int) -> list[int]:
    """Parts of a bucket, in whole rows of the norm but for its end."""
    rows = -(-size // NORM_ROW)
    ends = [min(size, rows * (rank + 1) // ranks * NORM_ROW) for rank in range(ranks)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
