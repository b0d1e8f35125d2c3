"""Observers of a `FileSystem` that record its calls, or make one of them fail, fall short or be the process's last."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from genesis.files.filesystem import Call, Observer

MARKER = ".genesis-temporary"
MANIFEST = "manifest.json"


class Recorder:
    """Keeps every call in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> int | None:
        self.calls.append(call)
        return None


class OfThread:
    """Shows an observer the calls of threads of one name alone, which come in the same order in every run."""

    def __init__(self, name: str, observer: Observer) -> None:
        self._name, self._observer = name, observer

    def __call__(self, call: Call) -> int | None:
        return self._observer(call) if threading.current_thread().name == self._name else None


class FailAt(Recorder):
    """Makes the `n`-th call (from 1) raise the error `code` in its place; later calls work again unless `forever`."""

    def __init__(self, n: int, code: int = errno.ENOSPC, *, forever: bool = False) -> None:
        super().__init__()
        self._n, self._code, self._forever = n, code, forever

    @property
    def failed(self) -> Call | None:
        """The call that failed, once it has."""
        return self.calls[self._n - 1] if len(self.calls) >= self._n else None

    def __call__(self, call: Call) -> int | None:
        super().__call__(call)
        if len(self.calls) == self._n or (self._forever and len(self.calls) > self._n):
            raise OSError(self._code, os.strerror(self._code))
        return None


class KillAt(Recorder):
    """Kills this process just before its `n`-th call (from 1); a write at `n` places half of its bytes first."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n

    def __call__(self, call: Call) -> int | None:
        super().__call__(call)
        if len(self.calls) > self._n or (len(self.calls) == self._n and call.size < 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return call.size // 2 if len(self.calls) == self._n else None


class ShortWrites:
    """Lets each write place at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, call: Call) -> int | None:
        return self._limit if call.op == "write" else None


def check_power_loss_order(calls: Sequence[Call], target: Path) -> None:
    """Assert that the folder `target` reached the medium in the order that survives a power loss at any instant.

    Each file: written, then flushed. The manifest: opened when all of that is done, written, flushed. Then the
    temporary folder flushed, renamed to `target`, and the parent flushed; nothing is written in between or after.
    """
    renames = [i for i, call in enumerate(calls) if call.op == "rename" and call.target == target]
    assert len(renames) == 1, f"{target.name} was renamed to {len(renames)} times"
    commit, folder = renames[0], calls[renames[0]].path
    inside = [(i, call) for i, call in enumerate(calls) if call.path.parent == folder and call.path.name != MARKER]
    files = {call.path.name for _, call in inside}
    opened = {call.path.name: i for i, call in inside if call.op == "open"}
    written = {call.path.name: i for i, call in inside if call.op in ("open", "write")}
    flushed = {call.path.name: i for i, call in inside if call.op == "fsync"}
    assert MANIFEST in files, "no manifest was written"
    for name in files:
        assert name in flushed, f"{name} was never flushed"
        assert written[name] < flushed[name], f"{name} was written after its flush"
        assert name == MANIFEST or flushed[name] < opened[MANIFEST], f"{name} was flushed after the manifest was begun"
    folder_flush = [i for i, call in enumerate(calls) if call.op == "fsync_dir" and call.path == folder]
    parent_flush = [i for i, call in enumerate(calls) if call.op == "fsync_dir" and call.path == target.parent]
    assert any(flushed[MANIFEST] < i < commit for i in folder_flush), "the folder was not flushed before the rename"
    assert any(commit < i for i in parent_flush), "the parent was not flushed after the rename"
    changes = [
        i for i, call in enumerate(calls) if call.path.parent == folder and call.op in ("open", "write", "unlink")
    ]
    last_flush = max(i for i in folder_flush if i < commit)
    assert max(changes) < last_flush, "the folder was changed after its flush"


def check_folders_are_flushed(calls: Sequence[Call]) -> set[Path]:
    """Assert that the name of every folder that was made, but for temporary ones, reached the medium at once.

    Returns:
        the folders that were made.
    """
    made = {call.path: i for i, call in enumerate(calls) if call.op == "mkdir" and not call.path.name.startswith(".")}
    for path, number in made.items():
        following = calls[number + 1]
        assert (following.op, following.path) == ("fsync_dir", path.parent), f"{path} was not flushed to its parent"
    return set(made)
