"""Gradient slots: the memory of leaves' gradients in flat buffers, and who may write there before the gradient is done.

A slot is in use while a `Lease` of it lives. An op's forward may hold one (`Op.gradient_outputs`): it ends with the
graph, so a forward whose backward never comes keeps nothing. A backward pass holds those that it gave to vjps, until it
ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from genesis.array import Array
from genesis.op import registry
from genesis.shapes import contiguous_strides

_lock = threading.Lock()


def is_same_window(x: Array, y: Array) -> bool:
    """Whether two arrays are the same elements of the same memory."""
    return x.storage is y.storage and (x.offset, x.shape, x.strides, x.dtype) == (y.offset, y.shape, y.strides, y.dtype)


class Lease:
    """One use of a slot, an array of its own. `is_movable`: its values may be moved when others need the slot."""

    __slots__ = ("__weakref__", "array", "is_movable")

    def __init__(self, array: Array, is_movable: bool) -> None:
        self.array, self.is_movable = array, is_movable

    def move_out(self) -> None:
        """Give `array` other memory with the same values; all who hold it read them there."""
        copy, array = registry["copy"](self.array), self.array
        array.storage, array.strides, array.offset = copy.storage, copy.strides, copy.offset
        array._np = array.layout = None
        self.is_movable = False


class GradientSlot:
    """The memory of one leaf's gradient.

    Args:
        array: contiguous, of the leaf's shape.
        is_wider: whether its dtype is wider than the leaf's; gradients are then made elsewhere and added there.

    Attributes:
        idle_memory: gives memory next to the slot in which no gradient is stored now, if there is some.
        arrived: called when the leaf has the finished gradient of a backward pass, which the side stream may still be
            making: nothing has joined it. None while nobody asks.
    """

    __slots__ = ("_lease", "array", "arrived", "idle_memory", "is_wider")

    def __init__(self, array: Array, is_wider: bool = False) -> None:
        self.array, self.is_wider = array, is_wider
        self.idle_memory: Callable[[], Array | None] = lambda: None
        self.arrived: Callable[[], None] | None = None
        self._lease: weakref.ref[Lease] | None = None

    def lease(self, is_movable: bool) -> Lease | None:
        """Use the slot for a gradient of the leaf's dtype; None where it is in use or of another."""
        if self.is_wider:
            return None
        array = self.array
        with _lock:
            if self.is_leased:
                return None
            lease = Lease(array.view(array.shape, contiguous_strides(array.shape)), is_movable)
            self._lease = weakref.ref(lease)
            return lease

    @property
    def is_leased(self) -> bool:
        """Whether something but the gradient itself is stored in the slot, or will be."""
        return self._lease is not None and self._lease() is not None

    def claim(self) -> Array | None:
        """The memory, for the gradient itself: what an op keeps there moves out. None while a backward pass uses it."""
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            if not lease.is_movable:
                return None if lease.array.storage is self.array.storage else self.array
            lease.move_out()
        self._lease = None
        return self.array
