"""Sequences of several lengths, padded or packed, for recurrent layers; torch's names and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.errors import ShapeError, UsageError
from genesis.functions.create import full, tensor
from genesis.functions.shape import cat, stack
from genesis.keywords import check_calls
from genesis.tensor import Tensor


class _Packed(NamedTuple):
    data: Tensor
    batch_sizes: Tensor
    sorted_indices: Tensor | None
    unsorted_indices: Tensor | None


class PackedSequence(_Packed):
    """Sequences step by step, the longest first: `data` `[elements, …]` holds the first elements, then the second, …

    Attributes:
        batch_sizes: int64 on the CPU: how many sequences have an element at each step.
        sorted_indices: the order in which the sequences were sorted by length; None if they came sorted.
        unsorted_indices: the inverse of `sorted_indices`.
    """

    __slots__ = ()

    def __new__(
        cls, data: Tensor, batch_sizes: Tensor | None = None, sorted_indices: Tensor | None = None,
        unsorted_indices: Tensor | None = None,
    ) -> PackedSequence:  # fmt: skip
        if batch_sizes is None:
            raise UsageError("PackedSequence lacks batch_sizes", next="make one with pack_sequence()")
        if unsorted_indices is None:
            unsorted_indices = invert_permutation(sorted_indices)
        return super().__new__(cls, data, batch_sizes, sorted_indices, unsorted_indices)

    def to(self, *args: Any, **kwargs: Any) -> PackedSequence:
        """Return the sequences with `data` moved or cast as `Tensor.to` does."""
        data = self.data.to(*args, **kwargs)
        orders = [x if x is None else x.to(data.device) for x in (self.sorted_indices, self.unsorted_indices)]
        return PackedSequence(data, self.batch_sizes, *orders)

    def cpu(self) -> PackedSequence:
        """Return the sequences on the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = "cuda") -> PackedSequence:
        """Return the sequences on a GPU."""
        return self.to(device)

    @property
    def is_cuda(self) -> bool:
        return bool(self.data.is_cuda)

    def _sizes(self) -> list[int]:
        return [int(n) for n in self.batch_sizes.tolist()]


def invert_permutation(permutation: Tensor | None) -> Tensor | None:
    """Return the inverse of a permutation of 0 to n - 1, or None for None."""
    return None if permutation is None else permutation.argsort()


def _lengths(lengths: Any) -> np.ndarray:
    return np.asarray(lengths.tolist() if isinstance(lengths, Tensor) else lengths, dtype=np.int64)


def pack_padded_sequence(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """Return padded sequences `[T, B, …]` (or `[B, T, …]` with `batch_first`) packed.

    Args:
        lengths: length of each sequence, a list or a tensor.
        enforce_sorted: require that lengths do not increase; False sorts the sequences.

    Raises:
        ShapeError: lengths do not fit the input, are 0, or are not sorted.
    """
    sizes = _lengths(lengths)
    steps, batch = (input.shape[1], input.shape[0]) if batch_first else (input.shape[0], input.shape[1])
    if sizes.shape != (batch,) or sizes.min(initial=1) < 1 or sizes.max(initial=0) > steps:
        raise ShapeError(
            f"pack_padded_sequence: lengths {sizes.tolist()} do not suit {batch} sequences of up to {steps} elements",
            next="give each sequence a length of at least 1",
        )
    order: Tensor | None = None
    if not enforce_sorted:
        order = tensor(np.argsort(-sizes, kind="stable"), device=input.device)
        input = input.index_select(0 if batch_first else 1, order)
        sizes = -np.sort(-sizes)
    elif (np.diff(sizes) > 0).any():
        raise ShapeError(
            f"pack_padded_sequence: lengths {sizes.tolist()} increase", next="sort them, or pass enforce_sorted=False"
        )
    counts = (sizes[None, :] > np.arange(sizes.max(initial=0))[:, None]).sum(1)
    by_step = input.transpose(0, 1) if batch_first else input
    data = cat([by_step[t, :n] for t, n in enumerate(counts.tolist())])
    return PackedSequence(data, tensor(counts), order)


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the padded sequences and their lengths (int64, on the CPU), in the order before packing.

    Args:
        total_length: number of steps to pad to; by default the longest length.
    """
    counts = sequence._sizes()
    steps, batch = len(counts), counts[0]
    if total_length is not None and total_length < steps:
        raise ShapeError(f"pad_packed_sequence: total_length {total_length} is below the longest length {steps}")
    rest, rows, at = sequence.data.shape[1:], [], 0
    for n in (*counts, *[0] * ((total_length or steps) - steps)):
        row = sequence.data[at : at + n]
        if n < batch:
            empty = full((batch - n, *rest), padding_value, dtype=row.dtype, device=row.device)
            row = cat([row, empty]) if n else empty
        rows.append(row)
        at += n
    padded = stack(rows, 1 if batch_first else 0)
    lengths = tensor((np.asarray(counts)[:, None] > np.arange(batch)).sum(0))
    if sequence.unsorted_indices is not None:
        padded = padded.index_select(0 if batch_first else 1, sequence.unsorted_indices)
        lengths = lengths[sequence.unsorted_indices.cpu()]
    return padded, lengths


def pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """Return tensors `[L, …]` of several lengths as one `[T, B, …]`, or `[B, T, …]` with `batch_first`.

    Raises:
        UsageError: `padding_side` is neither "right" nor "left".
    """
    if padding_side not in ("right", "left"):
        raise UsageError(f"padding_side is {padding_side!r}", next='pass "right" or "left"')
    steps = max(len(s) for s in sequences)
    padded = []
    for s in sequences:
        if len(s) < steps:
            more = full((steps - len(s), *s.shape[1:]), padding_value, dtype=s.dtype, device=s.device)
            s = cat([s, more] if padding_side == "right" else [more, s])
        padded.append(s)
    stacked: Tensor = stack(padded, 0 if batch_first else 1)
    return stacked


def unpad_sequence(padded_sequences: Tensor, lengths: Tensor, batch_first: bool = False) -> list[Tensor]:
    """Return the sequences of a padded tensor, cut to their lengths."""
    rows = padded_sequences if batch_first else padded_sequences.transpose(0, 1)
    return [row[:n] for row, n in zip(rows, _lengths(lengths).tolist(), strict=True)]


def pack_sequence(sequences: Sequence[Tensor], enforce_sorted: bool = True) -> PackedSequence:
    """Return tensors `[L, …]` of several lengths packed."""
    return pack_padded_sequence(pad_sequence(sequences), [len(s) for s in sequences], enforce_sorted=enforce_sorted)


def unpack_sequence(packed_sequences: PackedSequence) -> list[Tensor]:
    """Return the sequences of a packed one."""
    padded, lengths = pad_packed_sequence(packed_sequences, batch_first=True)
    return unpad_sequence(padded, lengths, batch_first=True)


check_calls(
    globals(),
    (
        "invert_permutation", "pack_padded_sequence", "pack_sequence", "pad_packed_sequence", "pad_sequence",
        "unpack_sequence", "unpad_sequence",
    ),
)  # fmt: skip
