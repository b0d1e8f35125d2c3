"""Atomic commits of files and folders: a crash at any instant leaves the last committed version complete.

The protocol of a folder (`AtomicFolder`), in the order in which it reaches the disk:

1. `.tmp-<name>-<random>` is created next to the target, with the marker `.genesis-temporary` in it.
2. Each file is written and flushed, and its sha256 is computed while it is written.
3. `manifest.json` is written last and flushed. Then the marker is removed and the temporary folder is flushed.
4. The temporary folder is renamed to the target, which commits it. The parent folder is flushed.

Replacing an existing target needs two renames around step 4. The old version becomes `.old-<name>-<random>` first, and
`.del-<name>-<random>` once the new one is in place, before it is removed. After a kill between the renames the target
does not exist, but an `.old-` folder does, and `sweep` renames it back. Removing a committed folder also starts with a
rename to `.del-`.

If a folder cannot be removed, it keeps its name: visible obstacles are checked before the first rename, and a folder
whose first file cannot be removed is renamed back.

`sweep` changes a folder only if its name has one of these three patterns, and it contains our marker, our manifest or
nothing. Call it before you look for committed versions, and hold the folder's lock: it cannot distinguish a dead
writer's leftovers from the work of a living one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from genesis.errors import DiskError, ModelError, escape
from genesis.files.boundary import boundary, closed_after
from genesis.files.filesystem import DEFAULT, Buffer, FileSystem, Writer, disk_error
from genesis.files.hashing import sha256_file
from genesis.files.paths import check_name, list_folder, quote, safe_join
from genesis.files.strict_json import canonical_bytes, parse_object, read_limited

MANIFEST_NAME = "manifest.json"
_VERSION = 1
_MAX_MANIFEST = 16 << 20
_NEXT = "use another checkpoint, or restore this folder from its source"
_MARKER = ".genesis-temporary"
_MARKER_TEXT = b"Genesis makes this folder while it writes, and removes it.\n"
_LEFTOVER = re.compile(r"\.(tmp|old|del)-(.+)-[0-9a-f]{16}", re.DOTALL)
_GET_FLAGS, _FIXED = 0x80086601, 0x10 | 0x20  # FS_IOC_GETFLAGS of Linux; immutable, append only


class _StagedFile(Writer):
    """A file in a temporary folder that is hashed while it is written."""

    def __init__(self, fs: FileSystem, path: Path) -> None:
        super().__init__(fs, path, os.O_CREAT | os.O_EXCL)
        self._digest = hashlib.sha256()
        self.finished = False

    def write(self, data: Buffer) -> None:
        super().write(data)
        self._digest.update(data)

    def finish(self) -> None:
        super().finish()
        self.finished = True

    def record(self) -> FileRecord:
        return FileRecord(self.size, self._digest.hexdigest())


class FolderShare:
    """Writes files into the temporary folder of an `AtomicFolder` in another process, which commits them.

    It is a context manager that closes unfinished files at its end.

    Args:
        folder: the value of `AtomicFolder.staged`.
        fs: the file system to write through.
    """

    def __init__(self, folder: Path, fs: FileSystem = DEFAULT) -> None:
        self._folder, self._fs = folder, fs
        self._files: dict[str, _StagedFile] = {}

    def create(self, name: str) -> Writer:
        """Return a writer of the new file `name`, outside subfolders. Raises the errors of `AtomicFolder.create`."""
        self._files[name] = _StagedFile(self._fs, self._folder / name)
        return self._files[name]

    @property
    def records(self) -> Mapping[str, FileRecord]:
        """Size and sha256 of the finished files, by name, for `AtomicFolder.take_in`."""
        return {name: file.record() for name, file in self._files.items() if file.finished}

    def __enter__(self) -> FolderShare:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.abandon()


class FolderWriter:
    """A marked temporary folder. Its files are moved to their final places if the block succeeds.

    Attributes:
        target: absolute path of the final folder.
    """

    def __init__(self, target: str | os.PathLike[str], fs: FileSystem) -> None:
        self.target = self._folder = Path(os.path.abspath(target))
        self._fs = fs
        self._files: dict[str, _StagedFile] = {}
        self._folders: list[str] = []

    def __enter__(self) -> Self:
        self._fs.makedirs(self._folder.parent)
        self._fs.mkdir(self._folder)
        try:
            with self._fs.create(self._folder / _MARKER) as marker:
                marker.write(_MARKER_TEXT)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                unfinished = [name for name, file in self._files.items() if not file.finished]
                if unfinished:
                    raise ValueError(f"the file {unfinished[0]!r} is not finished before the commit")
                self._commit()
        finally:
            self._discard()

    def _commit(self) -> None:
        raise NotImplementedError

    def existing(self) -> list[str]:
        """The names that the folder contained before, sorted."""
        return []

    def remove(self, name: str) -> None:
        """Remove the older file `name` once the new files are in place."""
        raise ValueError(f"{name!r} is not in the new folder {self.target}")

    def create(self, name: str) -> Writer:
        """Return a writer of the new file `name`. Finish it, or use it as a context manager, before the commit.

        A name may contain one folder (`additional_chat_templates/tool_use.jinja`).

        Raises:
            DiskError: the file cannot be created. ValueError: the name has more folders, or is taken.
        """
        folder, _, last = check_name(name).rpartition("/")
        if "/" in folder or last in (MANIFEST_NAME, _MARKER) or folder in self._files or name in self._folders:
            raise ValueError(f"the file name {name!r} is taken, or has too many folders")
        if folder and folder not in self._folders:
            self._fs.mkdir(self._folder / folder)
            self._folders.append(folder)
        return self._stage(name)

    def _stage(self, name: str) -> Writer:
        if name in (MANIFEST_NAME, _MARKER) or name in self._files:
            raise ValueError(f"the file name {name!r} is taken")
        self._files[name] = _StagedFile(self._fs, self._folder / name)
        return self._files[name]

    def write(self, name: str, data: Buffer) -> None:
        """Write the complete file `name` and flush it. Raises the errors of `create`."""
        with self.create(name) as file:
            file.write(data)

    def _discard(self) -> None:
        """Remove the temporary folder as far as the disk allows; `sweep` removes the remainder."""
        for file in self._files.values():
            file.abandon()
        with contextlib.suppress(OSError):
            if self._folder.exists():
                self._fs.rmtree(self._folder, last=(MANIFEST_NAME, _MARKER))


class AtomicFolder(FolderWriter):
    """Writes a folder with a manifest that appears at `target` complete, if the block succeeds.

    Args:
        target: the folder to write; a missing parent is created.
        fs: the file system to write through.
        replace: whether `target` may already be a committed folder of ours, which remains until the new one is
            complete.
        metadata: plain JSON values for the manifest. The attribute `metadata` can be extended before the block ends.

    Raises:
        DiskError: writing failed, or `target` exists and `replace` is false.
        ModelError: the existing folder is not ours.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        fs: FileSystem = DEFAULT,
        replace: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(target, fs)
        self._folder = self.target.parent / _leftover_name("tmp", self.target.name)
        self.metadata: dict[str, Any] = dict(metadata or {})
        self._replace = replace
        self._of_others: dict[str, FileRecord] = {}

    @property
    def staged(self) -> Path:
        """The temporary folder, into which other processes write files with `FolderShare`."""
        return self._folder

    def take_in(self, records: Mapping[str, tuple[int, str]]) -> None:
        """Also commit files that another process has finished; `records` is its `FolderShare.records`."""
        if taken := records.keys() & (self._files.keys() | self._of_others.keys() | {MANIFEST_NAME, _MARKER}):
            raise ValueError(f"the file name {min(taken)!r} is taken")
        self._of_others |= {name: FileRecord(*record) for name, record in records.items()}

    def __enter__(self) -> Self:
        self._check_target()
        return super().__enter__()

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if not self._replace:
            raise DiskError(f"{escape(self.target)} already exists", next="remove it, or choose another folder")
        if self.target.is_symlink():
            raise ModelError(
                f"{escape(self.target)} is a symbolic link, which is not replaced", next="choose another folder"
            )
        read_manifest(self.target)

    def _commit(self) -> None:
        # Step 3 of the protocol: the manifest makes the folder a version.
        own = {name: file.record() for name, file in self._files.items()}
        manifest = Manifest({**own, **self._of_others}, self.metadata)
        with self._fs.create(self._folder / MANIFEST_NAME) as file:
            file.write(manifest.to_bytes())
        self._fs.unlink(self._folder / _MARKER)
        for folder in self._folders:
            self._fs.fsync_dir(self._folder / folder)
        self._fs.fsync_dir(self._folder)
        # Step 4: rename the folder to the target.
        self._check_target()
        if os.path.lexists(self.target):
            self._exchange()
        else:
            self._fs.rename(self._folder, self.target)
            self._fs.fsync_dir(self.target.parent)

    def _exchange(self) -> None:
        """Replace the old folder with the new one. One of them is always complete, as the target or as `.old-`."""
        parent = self.target.parent
        old = parent / _leftover_name("old", self.target.name)
        self._fs.rename(self.target, old)
        try:
            self._fs.fsync_dir(parent)
            self._fs.rename(self._folder, self.target)
        except BaseException:
            # If the disk also refuses to rename back, `sweep` does so at the next start. The first error is reported.
            with contextlib.suppress(DiskError):
                self._fs.rename(old, self.target)
            raise
        self._fs.fsync_dir(parent)
        _remove(old, self.target.name, self._fs)


class FolderUpdate(FolderWriter):
    """Adds or replaces files in a folder that also contains other things, such as the root of a run's output.

    The files are written under temporary names and flushed. If the block succeeds, they are renamed in the order of
    creation, then the files given to `remove` are removed, and the folder is flushed. Each file is old or new, never
    partial; a crash between the renames can leave some files old and others new. No manifest is written.
    """

    def __init__(self, target: str | os.PathLike[str], *, fs: FileSystem = DEFAULT) -> None:
        super().__init__(target, fs)
        self._folder = self.target / _leftover_name("tmp", "update")
        self._removals: list[str] = []

    def existing(self) -> list[str]:
        with self._fs.errors("list", self.target):
            return sorted(name for name in os.listdir(self.target) if name != self._folder.name)

    def remove(self, name: str) -> None:
        if "/" in check_name(name):
            raise ValueError(f"the file name {name!r} contains a folder")
        self._removals.append(name)

    def _commit(self) -> None:
        for folder in self._folders:
            path = self.target / folder
            if not os.path.lexists(path):
                self._fs.mkdir(path)
            elif not stat.S_ISDIR(os.lstat(path).st_mode):
                raise ModelError(f"{escape(path)} is not a plain folder", next="move it elsewhere")
        for name in self._files:
            self._fs.rename(self._folder / name, self.target / name)
        for name in self._removals:
            if name not in self._files and name in self.existing():
                self._fs.unlink(self.target / name)
        for folder in self._folders:
            self._fs.fsync_dir(self.target / folder)
        self._fs.fsync_dir(self.target)


def write_file(path: str | os.PathLike[str], data: Buffer, *, fs: FileSystem = DEFAULT) -> None:
    """Write the file `path` durably and atomically: after a crash it has the old or the new content.
    Raises DiskError if writing fails; an older file at `path` is then intact.
    """
    with atomic_file(path, fs=fs) as file:
        file.write(data)


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, fs: FileSystem = DEFAULT) -> Iterator[Writer]:
    """Yield a writer whose file appears at `path` if the block succeeds. Raises the errors of `write_file`."""
    path = Path(os.path.abspath(path))
    # The user chose the path, so the rules for names that come from files do not apply.
    with FolderUpdate(path.parent, fs=fs) as update, update._stage(path.name) as file:
        yield file


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Yield a private folder among the system's temporary files, which is removed after the block if possible.
    Raises DiskError if it cannot be created.
    """
    try:
        folder = tempfile.mkdtemp(prefix="genesis-")
    except OSError as error:
        raise disk_error(error, "mkdir", Path(error.filename or tempfile.gettempdir())) from error
    try:
        yield folder
    finally:
        # An error here must not change the result of the command; the system cleans up what remains.
        with contextlib.suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True)


def remove_folder(path: str | os.PathLike[str], *, fs: FileSystem = DEFAULT) -> None:
    """Remove the committed folder `path`. Readers see all of it or nothing, also after a crash.
    Raises ModelError if the folder has no manifest of ours or contains other files too, and DiskError if removing
    fails; the folder is then unchanged or, if files are already missing, has a name that `sweep` recognizes.
    """
    path = Path(os.path.abspath(path))
    if path.is_symlink():
        raise ModelError(f"{escape(path)} is a symbolic link, which is not removed", next="remove it yourself")
    obstacle = _obstacle(path, {*read_manifest(path).files, MANIFEST_NAME})
    if obstacle:
        raise ModelError(f"{escape(path)} is not removed: {obstacle}", where=escape(path), next="remove it yourself")
    _remove(path, path.name, fs)


def sweep(
    parent: str | os.PathLike[str], *, fs: FileSystem = DEFAULT, warn: Callable[[str], None] | None = None
) -> list[str]:
    """Finish what a dead writer left in `parent`: restore old versions, remove temporary folders. Hold the lock.

    Args:
        warn: called for each leftover that cannot be removed; it remains, which does no harm.

    Returns:
        The names of the leftovers that were handled, sorted.
    Raises:
        DiskError: an old version could not be restored.
    """
    parent = Path(os.path.abspath(parent))
    done = []
    with fs.errors("list", parent):
        names = list_folder(parent)
    for name in names:
        match = _LEFTOVER.fullmatch(name)
        if not match or not _is_ours(parent / name, match[1]):
            continue
        kind, target = match[1], parent / match[2]
        if kind == "old" and not os.path.lexists(target):
            fs.rename(parent / name, target)
            fs.fsync_dir(parent)
        else:
            try:
                _remove(parent / name, match[2], fs)
            except DiskError as error:
                if warn is not None:
                    warn(f"{escape(parent / name)} was left by a dead run and is not removed: {error.what}")
                continue
        done.append(name)
    return done


def _leftover_name(kind: str, name: str) -> str:
    return f".{kind}-{name}-{secrets.token_hex(8)}"


def _remove(folder: Path, name: str, fs: FileSystem) -> None:
    """Remove our folder. A crash meanwhile leaves a folder that `sweep` recognizes."""
    match = _LEFTOVER.fullmatch(folder.name)
    if match and match[1] != "old":
        fs.rmtree(folder, last=(MANIFEST_NAME, _MARKER))
        return
    # A temporary folder is not a version. Any other folder must not look like one after losing a file.
    doomed = folder.parent / _leftover_name("del", name)
    names = set(os.listdir(folder))
    fs.rename(folder, doomed)
    try:
        fs.fsync_dir(folder.parent)
        fs.rmtree(doomed, last=(MANIFEST_NAME, _MARKER))
    except DiskError:
        # If no file was removed, restore the name: nobody looks for a version under `.del-`.
        with contextlib.suppress(OSError):
            if set(os.listdir(doomed)) == names and not os.path.lexists(folder):
                fs.rename(doomed, folder)
        raise


def _obstacle(folder: Path, names: Collection[str]) -> str:
    """Why `folder` with its files `names` cannot be removed, as far as visible; empty if nothing prevents it."""
    try:
        status, inside = os.stat(folder), {name: os.lstat(folder / name) for name in os.listdir(folder)}
    except OSError as error:
        return f"it cannot be listed: {error.strerror}"
    others = sorted(inside.keys() - set(names))
    if others:
        return f"it contains {quote(others[0])}, which was not saved with it"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return "it is not writable"
    for name, entry in inside.items():
        if status.st_mode & stat.S_ISVTX and os.geteuid() not in (0, status.st_uid, entry.st_uid):
            return f"{quote(name)} belongs to another user"
        if not stat.S_ISREG(entry.st_mode):
            return f"{quote(name)} is not a regular file"
        if _is_fixed(folder / name, entry):
            return f"{quote(name)} is immutable"
    return ""


def _is_fixed(path: Path, status: os.stat_result) -> bool:
    """Whether a regular file cannot be removed although its folder is writable."""
    flags: int | None = getattr(status, "st_flags", None)  # macOS
    if flags is not None:
        return bool(flags & (stat.UF_IMMUTABLE | stat.UF_APPEND | stat.SF_IMMUTABLE | stat.SF_APPEND))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with closed_after(descriptor):
        try:
            return bool(int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8)), sys.byteorder) & _FIXED)
        except OSError:  # a file system without such flags
            return False


def _is_ours(folder: Path, kind: str) -> bool:
    """Whether `folder` is a real folder with our manifest or, unless it is an old version, our marker or nothing."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return False
        names = os.listdir(folder)
        marker = folder / _MARKER
        if kind != "old" and _MARKER in names and stat.S_ISREG(os.lstat(marker).st_mode):
            # A kill may have truncated the marker.
            return _MARKER_TEXT.startswith(read_limited(marker, len(_MARKER_TEXT)))
        if MANIFEST_NAME in names:
            read_manifest(folder)
            return True
        return kind != "old" and not names
    except (OSError, ModelError):
        return False


# --- The manifest -----------------------------------------------------------------------------------------------------
# sha256 and size of each file of a committed folder, and the caller's metadata.


class FileRecord(NamedTuple):
    """The expected size of a file in bytes and its sha256 as 64 hex digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a committed folder, and its metadata (plain JSON values)."""

    files: Mapping[str, FileRecord]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The text of this manifest. It contains a hash of its own content, which reveals bit rot."""
        content: dict[str, Any] = {
            "files": {name: {"bytes": r.size, "sha256": r.sha256} for name, r in self.files.items()},
            "genesis_manifest": _VERSION,
            "metadata": dict(self.metadata),
        }
        content["manifest_sha256"] = hashlib.sha256(canonical_bytes(content)).hexdigest()
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of `folder` and check its own hash, without looking at the files.
    Raises ModelError if the manifest is damaged or missing; a folder without one was never committed.
    """
    where = escape(Path(folder) / MANIFEST_NAME)
    data = read_limited(safe_join(folder, MANIFEST_NAME, where=where), _MAX_MANIFEST)
    content = parse_object(data, where=where)
    if content.get("genesis_manifest") != _VERSION:
        what = f"{MANIFEST_NAME} does not have format version {_VERSION}"
        raise ModelError(what, where=where, next="use the version of Genesis that wrote it")
    manifest = None
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # parts are missing or have another type
        files = {check_name(n): FileRecord(int(r["bytes"]), str(r["sha256"])) for n, r in content["files"].items()}
        manifest = Manifest(files, dict(content["metadata"]))
    # The writer produces exactly one text for this content, so any difference was made later.
    if manifest is None or manifest.to_bytes() != data:
        raise ModelError(f"{MANIFEST_NAME} is damaged: its content and its own hash disagree", where=where, next=_NEXT)
    return manifest


@boundary(ModelError, "checking the files of a folder")
def verify_manifest(folder: str | os.PathLike[str], without: Collection[str] = ()) -> Manifest:
    """Read the manifest of `folder` and compare every file with its size and sha256.

    Args:
        without: files to compare by size only.

    Raises:
        ModelError: a file is missing, unknown, or has another size or content; the message names the first one.
    """
    manifest = read_manifest(folder)
    paths = {name: safe_join(folder, name, where=escape(folder)) for name in manifest.files}
    inside = {name.rpartition("/")[0] for name in manifest.files} - {""}
    present = set(os.listdir(folder)) - inside
    present |= {f"{name}/{entry}" for name in inside for entry in os.listdir(Path(folder) / name)}
    # Names and sizes first, because hashing takes long.
    extra = sorted(present - set(manifest.files) - {MANIFEST_NAME})
    if extra:
        what = f"the file {quote(extra[0])} is not in {MANIFEST_NAME}"
        raise ModelError(what, where=escape(folder), next="move it elsewhere")
    for name, record in manifest.files.items():
        size = os.stat(paths[name]).st_size
        if size != record.size:
            what = f"the file {quote(name)} has {size:,} bytes; {MANIFEST_NAME} says {record.size:,}"
            raise ModelError(what, where=escape(folder), next=_NEXT)
    for name, record in manifest.files.items():
        if name not in without and sha256_file(paths[name]) != record.sha256:
            what = f"the file {quote(name)} is damaged: its sha256 is not the one in {MANIFEST_NAME}"
            raise ModelError(what, where=escape(folder), next=_NEXT)
    return manifest
