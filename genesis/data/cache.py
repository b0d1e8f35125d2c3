"""A cache of what is slow to make from the data, keyed by content. It knows neither documents nor tokens.

An entry is a folder `<kind>-<hash of its key>` with a manifest. It is complete and every file has the bytes that were
written, or it counts as damaged: then it is removed and made again, once. Several processes may share a cache; one of
them makes an entry while the others wait for it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from genesis.errors import BusyError, DiskError, ModelError, escape
from genesis.io.files import DEFAULT, AtomicFolder, FolderWriter, sweep, verify_manifest
from genesis.io.lock import FolderLock
from genesis.io.strict_json import canonical_bytes

__all__ = ["Cache", "Cached", "State"]

State = Literal["found", "made", "made again"]
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Cached:
    """A complete, verified entry: its folder, and whether it was found, made, or made again because it was damaged."""

    folder: Path
    state: State


class Cache:
    """The entries below `folder`, which is made when the first entry is."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(folder))

    def get(self, kind: str, key: Mapping[str, Any], make: Callable[[FolderWriter], None]) -> Cached:
        """The entry of `kind` for `key` (JSON values that name everything the content depends on).

        Args:
            make: writes the entry's files where there is none yet.

        Raises:
            DiskError: the entry cannot be written, or is not what was written when it is read back.
        """
        entry = self.folder / f"{kind}-{hashlib.sha256(canonical_bytes(dict(key))).hexdigest()[:32]}"
        if _is_whole(entry, key):
            return Cached(entry, "found")
        with self._lock():
            if _is_whole(entry, key):
                return Cached(entry, "found")
            sweep(self.folder)
            state: State = "made again" if os.path.lexists(entry) else "made"
            _discard(entry)
            with AtomicFolder(entry, metadata=key) as folder:
                make(folder)
            if not _is_whole(entry, key):
                what = "the cached data that were just written read back as other bytes"
                raise DiskError(what, where=escape(entry), next="check the disk, or choose another data.cache_dir")
        return Cached(entry, state)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the cache; waits for another process, whose death frees it."""
        DEFAULT.makedirs(self.folder)
        lock = FolderLock(self.folder)
        while not lock.held:
            try:
                lock.acquire()
            except BusyError:
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            lock.release()


def _is_whole(entry: Path, key: Mapping[str, Any]) -> bool:
    try:
        return os.path.lexists(entry) and dict(verify_manifest(entry).metadata) == dict(key)
    except (ModelError, DiskError):
        return False


def _discard(entry: Path) -> None:
    """Remove a damaged entry, which may have no manifest any more."""
    if not os.path.lexists(entry):
        return
    doomed = entry.parent / f".del-{entry.name}-{secrets.token_hex(8)}"
    DEFAULT.rename(entry, doomed)
    if doomed.is_dir() and not doomed.is_symlink():
        DEFAULT.rmtree(doomed)
    else:
        DEFAULT.unlink(doomed)
