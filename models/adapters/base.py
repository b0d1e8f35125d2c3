"""The base model of an adapter: where it is and what it holds, so that nothing goes on from another one unnoticed.

`base.json` lies next to an adapter that a run saved. Its sha256 is that of the base's config and weight files. To read
gigabytes again whenever a run is resumed would be slow, so the file also records what the system says of each: device,
inode, size and both times. Where all of these are as before, the contents are, too: nobody sets a file's time of change
(ctime), which every write moves. A base that was copied or touched is read again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from genesis.errors import ModelError, escape
from genesis.io.boundary import boundary
from genesis.io.hashing import sha256_file
from genesis.io.hf import WeightFolder, read_json
from genesis.io.paths import exists, safe_join
from genesis.io.strict_json import canonical_bytes, indented_bytes

__all__ = ["BASE_NAME", "Base", "base_of", "check_same_base", "read_base"]

BASE_NAME = "base.json"


@dataclass(frozen=True)
class Base:
    """A base model as an adapter was trained on it.

    Attributes:
        path: its folder, absolute.
        sha256: of the names and contents of its config and weight files.
        files: device, inode, size, and times of change of content and of anything, in ns, of each file by name.
    """

    path: str
    sha256: str
    files: Mapping[str, tuple[int, ...]]

    def to_json(self) -> bytes:
        """What `base.json` holds."""
        return indented_bytes(asdict(self))


@boundary(ModelError, "reading the base model")
def base_of(folder: str | os.PathLike[str], known: Base | None = None) -> Base:
    """The base model in `folder`.

    Args:
        known: one whose sha256 is taken if its files are those of `folder`, unchanged.

    Raises:
        ModelError: it is no model folder, or cannot be read.
    """
    with WeightFolder(folder) as weights:
        names = sorted(["config.json", *weights.files])
    paths = {name: safe_join(folder, name, where=escape(folder)) for name in names}
    files = {name: _identity(path) for name, path in paths.items()}
    if known is not None and known.files == files:
        digest = known.sha256
    else:
        hashes = {name: sha256_file(path) for name, path in paths.items()}
        digest = hashlib.sha256(canonical_bytes(hashes)).hexdigest()
    return Base(os.path.abspath(folder), digest, files)


def _identity(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_base(folder: str | os.PathLike[str]) -> Base | None:
    """The base that the adapter in `folder` was trained on; None where it does not say.

    Raises:
        ModelError: `base.json` is malformed.
    """
    where = escape(Path(folder) / BASE_NAME)
    with boundary(ModelError, "looking for the base model", folder):
        if not exists(Path(folder) / BASE_NAME):
            return None
    raw = read_json(safe_join(folder, BASE_NAME, where=where))
    path, digest, files = raw.get("path"), raw.get("sha256"), raw.get("files")
    if isinstance(path, str) and isinstance(digest, str) and len(digest) == 64 and isinstance(files, dict):
        lists = [each for each in files.values() if isinstance(each, list) and all(type(x) is int for x in each)]
        if len(lists) == len(files):
            return Base(path, digest, {name: tuple(each) for name, each in files.items()})
    raise ModelError(f"{BASE_NAME} names no base model", where=where, next="save the adapter again")


def check_same_base(found: Base, expected: Base, where: str, *, setting: str = "--base") -> None:
    """Refuse a base that is not the one that an adapter was trained on, wherever either of them is.

    Args:
        setting: what the user names a base by, for the error.

    Raises:
        ModelError: with both folders and both fingerprints.
    """
    if found.sha256 == expected.sha256:
        return
    if found.path == expected.path:
        what = f"the base model in {escape(found.path)} has changed"
        next = f"put the former files back, or name the folder that holds them: {setting}=FOLDER"
    else:
        what = (
            f"the model in {escape(found.path)} is not the base of this adapter, which was in {escape(expected.path)}"
        )
        next = f"name the folder of that base, wherever it is now: {setting}=FOLDER"
    prints = f"its sha256 begins {found.sha256[:12]}, that of the base {expected.sha256[:12]}"
    raise ModelError(f"{what}: {prints}", where=where, next=next)
