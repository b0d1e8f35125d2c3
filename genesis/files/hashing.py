"""Hashes of files and of training state. Two runs are compared by their state hash, called H."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.errors import ModelError
from genesis.files.boundary import boundary, closed_after
from genesis.files.paths import open_regular
from genesis.files.strict_json import canonical_bytes

_CHUNK = 1 << 20
_PIECE = 64 << 20


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The sha256 of the regular file at `path`, as 64 hex digits. Raises the errors of `add_file`."""
    return str(add_file(hashlib.sha256(), path).hexdigest())


def add_file(digest: Any, path: str | os.PathLike[str]) -> Any:
    """Add the bytes of the regular file at `path` to the hashlib hash `digest`, and return it.
    Raises ModelError if the path is not a regular file or reading fails.
    """
    with boundary(ModelError, "reading", path), closed_after(open_regular(path)) as descriptor:
        while piece := os.read(descriptor, _CHUNK):
            digest.update(piece)
    return digest


def update(digest: Any, data: bytes | memoryview) -> None:
    """Add `data` to a hashlib hash in pieces, so that signals are handled in between."""
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):
        digest.update(view[start : start + _PIECE])


class StateHash:
    """A sha256 over named arrays and named JSON values.

    The digest depends on names, kinds, dtypes, shapes and bytes. It does not depend on the order of additions, on
    strides or on the machine. Do not add clock times: equal runs at different times must have equal hashes.
    """

    def __init__(self) -> None:
        self._items: dict[tuple[str, str], bytes] = {}

    def add_array(self, name: str, array: npt.NDArray[Any]) -> None:
        """Add an array. -0.0 and 0.0 differ, and so do NaNs with different bits.
        Raises ValueError if the name was added before, or the array contains Python objects.
        """
        if array.dtype.hasobject:
            raise ValueError(f"the array {name!r} contains Python objects")
        digest = hashlib.sha256(canonical_bytes([array.dtype.name, list(array.shape)]))
        native = array.astype(array.dtype.newbyteorder("<"), copy=False)
        update(digest, np.ascontiguousarray(native).reshape(-1).view(np.uint8).data)
        self._add("array", name, digest.digest())

    def add_json(self, name: str, value: object) -> None:
        """Add a JSON value: dicts with string keys, lists, strings, integers, finite floats, booleans, None.
        Raises ValueError if the name was added before or a number is not finite, and TypeError for other types.
        """
        self._add("json", name, hashlib.sha256(canonical_bytes(value)).digest())

    def holds(self, name: str) -> bool:
        """Whether an array with this name was added."""
        return ("array", name) in self._items

    def array_digests(self) -> dict[str, str]:
        """The digest of each array in hex, for `add_digests` in another process."""
        return {name: digest.hex() for (kind, name), digest in self._items.items() if kind == "array"}

    def add_digests(self, digests: Mapping[str, str]) -> None:
        """Add arrays by the result of `array_digests`. Raises ValueError if a name was added before."""
        for name, digest in digests.items():
            self._add("array", name, bytes.fromhex(digest))

    def hexdigest(self) -> str:
        """The hash of everything added so far, as 64 hex digits."""
        total = hashlib.sha256(b"genesis state 1\0")
        for (kind, name), digest in sorted(self._items.items()):
            total.update(canonical_bytes([kind, name]) + b"\0" + digest)
        return total.hexdigest()

    def _add(self, kind: str, name: str, digest: bytes) -> None:
        if (kind, name) in self._items:
            raise ValueError(f"the {kind} {name!r} was added before")
        self._items[kind, name] = digest
