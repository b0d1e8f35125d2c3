"""Buckets of gradients that ranks exchange as soon as backward has made them, in an order that all ranks keep."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from genesis.autograd.gradient_slot import is_same_window
from genesis.errors import GradientError
from genesis.optim.shared import SharedBuffers


class BucketExchange:
    """The buckets of several flat buffers, from the last parameters to the first, as backward makes their gradients.

    A bucket is launched when its gradients are there and those before it in the order are launched: so the order is the
    same on all ranks, in whichever order a rank makes its gradients. What holds the first parameters comes last: their
    gradients are done when backward is, and those of tied embeddings still later.
    """

    def __init__(self, flats: Sequence[SharedBuffers]) -> None:
        self._flats = flats
        found = [(flat, number) for flat in flats for number in range(len(flat.bucket_starts))]
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
    start = flat.bucket_starts[number]
    return start == 0, -start / flat.size if start else flat.size
