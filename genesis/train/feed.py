"""Batches on their way to a GPU: written into pinned memory, copied on a stream of their own, two in turn.

While one batch is computed on, the next one travels. Nothing waits but the host, and only when it is two batches ahead.
Each batch ends up at the same address, where the step reads it: a step that is a CUDA graph reads fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from genesis import cuda
from genesis.array import Array
from genesis.backend import Device
from genesis.data.loader import Batch
from genesis.dtypes import float64, int64
from genesis.functions.create import empty
from genesis.tensor import Tensor


class DeviceBatch(NamedTuple):
    """Ids, labels and positions `[B, T]`, and what the summed loss is divided by, 0-d; all int64."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    num_targets: Tensor


class _Slot:
    def __init__(self, device: Device, size: int) -> None:
        self.host = empty(size, dtype=int64).pin_memory(device)
        self.there = empty(size, dtype=int64, device=device)
        self.copied, self.read = cuda.Event(), cuda.Event()


class Feed:
    """Brings batches of one shape to `device`, and with each the device scalars of its step.

    Args:
        rows, length: of the batches.
        scalars: how many.

    Attributes:
        batch: where the batch that was put last is, in the order of the stream it was put on.
        scalars: where they are, float64.
        position: where random draws on the batch start, 0-d int64: see `Generator.positioned_by`.
    """

    def __init__(self, device: Device, rows: int, length: int, scalars: int) -> None:
        self.device, self.shape = device, (rows, length)
        self._copies = cuda.Stream(device)
        size, total = rows * length, 3 * rows * length + 2 + scalars
        self._slots = [_Slot(device, total) for _ in range(2)]
        self._there = empty(total, dtype=int64, device=device)
        ids, labels, positions = (self._there[i * size : (i + 1) * size].view(rows, length) for i in range(3))
        self.batch = DeviceBatch(ids, labels, positions, self._there[3 * size])
        there = self._there.array
        self.scalars = Array(there.storage, (scalars,), (1,), float64, device, there.offset + 3 * size + 1)
        self.position = self._there[total - 1]

    def put(self, batch: Batch, num_targets: int, scalars: Sequence[float], position: int = 0) -> DeviceBatch:
        """Bring a batch, its scalars and its position: work that is launched from now on finds it in `batch`, which is
        returned.
        """
        compute, slot = cuda.current_stream(self.device), self._slots[0]
        self._slots.reverse()
        slot.copied.synchronize()
        size = batch.input_ids.size
        values = slot.host.numpy()
        for i, part in enumerate((batch.input_ids, batch.labels, batch.position_ids)):
            np.copyto(values[i * size : (i + 1) * size].reshape(part.shape), part)
        values[3 * size] = num_targets
        values[3 * size + 1 : -1].view(np.float64)[:] = scalars
        values[-1] = position
        self._copies.wait_event(slot.read)
        with cuda.stream(self._copies):
            slot.there.copy_(slot.host, non_blocking=True)
            slot.copied.record(self._copies)
        compute.wait_event(slot.copied)
        self._there.copy_(slot.there)
        slot.read.record(compute)
        return self.batch
