"""Batches on their way to a GPU: written into pinned memory, copied on a stream of their own, two in turn.

While one batch is computed on, the next one travels. Nothing waits but the host, and only when it is two batches ahead.
Each batch ends up at the same address, where the step reads it: a step that is a CUDA graph reads fixed addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from genesis import cuda
from genesis.array import Array
from genesis.backend import Device
from genesis.dtypes import DType, as_dtype, float64, int64
from genesis.functions.create import empty
from genesis.shapes import Shape, contiguous_strides
from genesis.tensor import Tensor


class _Slot:
    def __init__(self, device: Device, size: int) -> None:
        self.host = empty(size, dtype=int64).pin_memory(device)
        self.there = empty(size, dtype=int64, device=device)
        self.copied, self.read = cuda.Event(), cuda.Event()


class Feed:
    """Brings batches to `device`, and with each the device scalars of its step.

    Args:
        fields: those of a batch, whose shapes and types all batches have: int64 or float64.
        scalars: how many.

    Attributes:
        fields: where those of the batch that was put last are, in the order of the stream it was put on.
        num_targets: what its summed loss is divided by, 0-d int64.
        scalars: where they are, float64.
        position: where random draws on the batch start, 0-d int64: see `Generator.positioned_by`.
    """

    def __init__(self, device: Device, fields: Sequence[np.ndarray], scalars: int) -> None:
        assert all(values.dtype.itemsize == 8 for values in fields), "fields are int64 or float64"
        self.device = device
        self._copies = cuda.Stream(device)
        size = sum(values.size for values in fields)
        total = size + 2 + scalars
        self._slots = [_Slot(device, total) for _ in range(2)]
        self._there = empty(total, dtype=int64, device=device)
        begins = itertools.accumulate((values.size for values in fields), initial=0)
        self.fields = tuple(
            Tensor(self._part(at, values.shape, as_dtype(values.dtype)))
            for at, values in zip(begins, fields, strict=False)
        )
        self.num_targets = self._there[size]
        self.scalars = self._part(size + 1, (scalars,), float64)
        self.position = self._there[total - 1]

    def _part(self, at: int, shape: Shape, dtype: DType) -> Array:
        """The words from `at` on as an array of this type, which takes 8 bytes an element."""
        there = self._there.array
        return Array(there.storage, shape, contiguous_strides(shape), dtype, self.device, there.offset + at)

    def put(
        self, fields: Sequence[np.ndarray], num_targets: int, scalars: Sequence[float], position: int = 0
    ) -> tuple[Tensor, ...]:
        """Bring a batch, its scalars and its position: work that is launched from now on finds it in `fields`, which
        are returned.
        """
        compute, slot = cuda.current_stream(self.device), self._slots[0]
        self._slots.reverse()
        slot.copied.synchronize()
        words, at = slot.host.numpy(), 0
        for values in fields:
            np.copyto(words[at : at + values.size].view(values.dtype).reshape(values.shape), values)
            at += values.size
        words[at] = num_targets
        words[at + 1 : -1].view(np.float64)[:] = scalars
        words[-1] = position
        self._copies.wait_event(slot.read)
        with cuda.stream(self._copies):
            slot.there.copy_(slot.host, non_blocking=True)
            slot.copied.record(self._copies)
        compute.wait_event(slot.copied)
        self._there.copy_(slot.there)
        slot.read.record(compute)
        return self.fields
