"""The places of leaves' gradients in flat buffers: who uses one before the gradient stands there.

A place is used while a `HomeUse` of it lives. An op's forward may hold one (`Op.borrows`): it ends with the graph, so a
forward whose backward never comes keeps nothing. A walk holds those that it gave to vjps, until it ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from genesis.array import Array
from genesis.op import registry
from genesis.shapes import contiguous_strides

__all__ = ["Home", "HomeUse", "is_same_window"]

_lock = threading.Lock()


def is_same_window(x: Array, y: Array) -> bool:
    """Whether two arrays are the same elements of the same memory."""
    return x.storage is y.storage and (x.offset, x.shape, x.strides, x.dtype) == (y.offset, y.shape, y.strides, y.dtype)


def _nothing() -> None:
    return None


class HomeUse:
    """One use of a place.

    Attributes:
        array: the place, as an array of its own.
        is_movable: whether the values may be moved elsewhere when others need the place.
    """

    __slots__ = ("__weakref__", "array", "is_movable")

    def __init__(self, array: Array, is_movable: bool) -> None:
        self.array, self.is_movable = array, is_movable

    def move_out(self) -> None:
        """Give `array` other memory with the same values; all who hold it read them there."""
        copy, array = registry["copy"](self.array), self.array
        array.storage, array.strides, array.offset = copy.storage, copy.strides, copy.offset
        array._np = array.layout = None
        self.is_movable = False


class Home:
    """The place of one leaf's gradient.

    Args:
        place: contiguous, of the leaf's shape.
        is_wider: whether its dtype is wider than the leaf's; gradients are then made elsewhere and added there.

    Attributes:
        idle_beside: gives memory around the place in which no gradient stands now, if there is some.
    """

    __slots__ = ("_use", "idle_beside", "is_wider", "place")

    def __init__(self, place: Array, is_wider: bool = False) -> None:
        self.place, self.is_wider = place, is_wider
        self.idle_beside: Callable[[], Array | None] = _nothing
        self._use: weakref.ref[HomeUse] | None = None

    def lend(self, is_movable: bool) -> HomeUse | None:
        """Use the place for a gradient of the leaf's dtype; None where it is in use or of another."""
        if self.is_wider:
            return None
        place = self.place
        with _lock:
            if self.is_in_use:
                return None
            use = HomeUse(place.view(place.shape, contiguous_strides(place.shape)), is_movable)
            self._use = weakref.ref(use)
            return use

    @property
    def is_in_use(self) -> bool:
        """Whether something but the gradient itself stands in the place, or will."""
        return self._use is not None and self._use() is not None

    def claim(self) -> Array | None:
        """The place, for the gradient itself: what an op keeps there is moved out. None while a walk uses it."""
        use = None if self._use is None else self._use()
        if use is not None:
            if not use.is_movable:
                return None if use.array.storage is self.place.storage else self.place
            use.move_out()
        self._use = None
        return self.place
