"""The scalars that change from step to step, on a device: the step count and each group's learning rate.

A step reads them where they are, so that it can be captured in a CUDA graph and replayed after they were changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genesis.array import Array, empty, label
from genesis.backend import Device
from genesis.dtypes import float64
from genesis.errors import ShapeError
from genesis.functions.transfer import overwrite, pinned_empty


class DeviceScalars:
    """Float64 scalars at a fixed address of a device: the count of steps, this one included, then each group's rate.

    Attributes:
        array: `[1 + groups]`.
    """

    def __init__(self, device: Device, groups: int) -> None:
        self.array = label(empty((1 + groups,), float64, device), "optimizer scalars")
        self._is_fed = False
        self._sent: tuple[float, ...] = ()

    def read_from(self, array: Array) -> None:
        """Read the scalars from `array` from now on, which the caller fills with `Optimizer.step_scalars` before each
        step; the batch may bring them along.

        Raises:
            ShapeError: it is not contiguous float64 of the same shape.
        """
        if array.shape != self.array.shape or array.dtype is not float64 or not array.is_contiguous:
            raise ShapeError(f"the scalars of a step are float64 {self.array.shape}, not {array.dtype} {array.shape}")
        self.array, self._is_fed = array, True

    def send(self, values: Sequence[float]) -> None:
        """Copy the scalars of the next step from pinned memory, in stream order; nothing waits."""
        if self._is_fed or tuple(values) == self._sent:
            return
        overwrite(self.array, _pinned(values, self.array.device), non_blocking=True)
        self._sent = tuple(values)

    @property
    def step(self) -> Array:
        """The count, 0-d."""
        return self.array.view((), (), self.array.offset)

    def lr(self, group: int) -> Array:
        """The learning rate of a group, 0-d."""
        return self.array.view((), (), self.array.offset + 1 + group)


def sent(value: float, device: Device) -> Array:
    """A number on a device: 0-d, float64."""
    made = label(empty((1,), float64, device), "optimizer scalars")
    overwrite(made, _pinned((value,), device), non_blocking=True)
    return made.view((), ())


def _pinned(values: Sequence[float], device: Device) -> Array:
    """Values in pinned memory, which is not used again before copies from it are done."""
    host = pinned_empty((len(values),), float64, device)
    np.copyto(host.view_np(), values)
    return host
