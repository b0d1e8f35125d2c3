"""The host memory that snapshots are copied to: one piece, used again by each, pinned where a GPU copies to it.

A thread touches and pins it while training goes on, so that the first snapshot costs no more than the next.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.op import registry

_ALIGNMENT = 64
# Pinned at once: a GPU's launches wait for it, some tens of milliseconds.
_PIECE = 128 << 20
_POLL_S = 0.002


def slot_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` takes of a buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostBuffer:
    """Room for one snapshot of `nbytes`, see `snapshot_bytes`.

    Args:
        device: what copies to it.

    Attributes:
        size: bytes.
        not_pinned: why copies to it make training wait longer; None where they do not.

    Raises:
        OutOfMemoryError: the host has no room.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        self.size, self.device = nbytes, device
        self.not_pinned: str | None = None
        try:
            whole = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
        except MemoryError as error:
            what = f"no memory for the {nbytes:,} bytes of a snapshot"
            raise OutOfMemoryError(what, where="checkpoint.background", next="set it to off") from error
        skip = -whole.ctypes.data % mmap.PAGESIZE
        self._memory, self._end = whole[skip : skip + nbytes], 0
        self._pinned: list[int] = []
        self._copied: int | None = None  # an event of the device
        self._is_closed = False
        self._preparing = threading.Thread(target=self._prepare, name="genesis-snapshot-memory", daemon=True)
        self._preparing.start()

    @property
    def _backend(self) -> Any:
        return backend_for(self.device)

    def _prepare(self) -> None:
        """Touch all pages and pin them."""
        for start in range(0, self.size, _PIECE):
            if self._is_closed:
                return
            piece = self._memory[start : start + _PIECE]
            piece.fill(0)
            if self.device != CPU and self.not_pinned is None:
                self._pin(piece)

    def _pin(self, piece: np.ndarray) -> None:
        from genesis.backend.cuda.driver import OutOfDeviceMemory

        try:
            self._backend.driver.register_host(piece.ctypes.data, piece.nbytes)
            self._pinned.append(piece.ctypes.data)
        except (DeviceError, OutOfDeviceMemory) as error:
            self.not_pinned = str(error) or "the driver has no room"

    def begin(self) -> None:
        """What was copied here before is no longer needed."""
        self._preparing.join()
        self._end = 0

    def take(self, array: Array) -> Callable[[], np.ndarray]:
        """Copy an array in the order of the current stream; what reads the copy, after `wait`."""
        start, nbytes = self._end, array.nbytes
        self._end += slot_bytes(nbytes)
        assert self._end <= self.size, "a snapshot has the size that was asked for"
        raw = self._memory[start : start + nbytes]
        values = raw.view(array.dtype.numpy).reshape(array.shape)
        if array.device == CPU:
            np.copyto(values, array.view_np())
        else:
            source = (array if array.is_contiguous else registry["copy"](array)).data_ptr()
            driver, stream, target = self._backend.driver, self._backend.stream, raw.ctypes.data
            for first in range(start // _PIECE * _PIECE, start + nbytes, _PIECE):  # no copy is across two pinned ones
                skip, stop = max(first - start, 0), min(first + _PIECE - start, nbytes)
                driver.copy(target + skip, source + skip, stop - skip, stream)
        return lambda: values

    def end(self) -> None:
        """All is copied, or on its way."""
        if self.device != CPU:
            self._copied = self._backend.driver.mark(self._backend.stream)

    def wait(self) -> None:
        """In another thread than the one that launches work: wait until the copies are done.

        Raises:
            GenesisError: a kernel before them met bad values.
        """
        if self._copied is not None:
            from genesis.backend.cuda.faults import check

            driver = self._backend.driver
            while not driver.has_happened(self._copied):
                time.sleep(_POLL_S)
            event, self._copied = self._copied, None
            driver.destroy_event(event)
            check(self.device)

    def close(self) -> None:
        """Give the memory back."""
        self._is_closed = True
        self._preparing.join()
        if self.device != CPU:
            with contextlib.suppress(DeviceError):  # that of a device which has failed
                self._backend.driver.synchronize_stream(self._backend.stream)
        while self._pinned:
            self._backend.driver.unregister_host(self._pinned.pop())
        self._memory = np.empty(0, np.uint8)
