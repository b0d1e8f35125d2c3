"""The base model of an adapter: what it is called and what it holds, so that nothing goes on from another one.

An adapter is shared, so its files say nothing about the machine. `adapter_config.json` has the base's name on the hub,
or its path from the adapter's folder. `base.json`, next to an adapter that a run saved, has the sha256 of the base's
config and weight files. To read gigabytes again whenever a run is resumed would be slow, so the user's cache keeps what
the system says of each file: device, inode, size and both times. Where all of these are as before, the contents are,
too: nobody sets a file's time of change (ctime), which every write moves.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from genesis.errors import ModelError, escape
from genesis.files.boundary import boundary
from genesis.files.cache import Cache, user_folder
from genesis.files.hashing import sha256_file
from genesis.files.hf import WeightFolder, read_json
from genesis.files.hub import ADAPTER_CONFIG, hub_name, name_of
from genesis.files.paths import exists, safe_join
from genesis.files.strict_json import canonical_bytes, indented_bytes

BASE_NAME = "base.json"
MAX_ENTRY = 1 << 20  # bytes of a cache entry


@dataclass(frozen=True)
class Base:
    """A base model as an adapter was trained on it.

    Attributes:
        path: its folder, absolute, or its name on the hub; for errors.
        sha256: of the names and contents of its config and weight files.
    """

    path: str
    sha256: str

    def to_json(self) -> bytes:
        """What `base.json` holds."""
        return indented_bytes({"sha256": self.sha256})


@cache
def _hashed_bases() -> Cache:
    """What the system said of the files of bases when the user's processes hashed them."""
    return Cache.of_user(user_folder("bases"))


@boundary(ModelError, "reading the base model")
def base_of(folder: str | os.PathLike[str], known: Base | None = None) -> Base:
    """The base model in `folder`.

    Args:
        known: one whose sha256 is taken if its files, as the user's cache has them, are those of `folder`, unchanged.

    Raises:
        ModelError: it is not a model folder, or cannot be read.
    """
    with WeightFolder(folder) as weights:
        names = sorted(["config.json", *weights.files])
    paths = {name: safe_join(folder, name, where=escape(folder)) for name in names}
    identities = {name: _identity(path) for name, path in paths.items()}
    files, place = canonical_bytes(identities), "{:x}-{:x}".format(*identities["config.json"])  # copies have their own
    entry = None if known is None else _hashed_bases().find(f"{known.sha256}-{place}.base", limit=MAX_ENTRY)
    if known is not None and entry is not None and bytes(entry.part("files")) == files:
        return Base(os.path.realpath(folder), known.sha256)
    digest = hashlib.sha256(canonical_bytes({name: sha256_file(path) for name, path in paths.items()})).hexdigest()
    _hashed_bases().put(f"{digest}-{place}.base", {"files": files})
    return Base(os.path.realpath(folder), digest)


def _identity(path: Path) -> list[int]:
    found = os.stat(path)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def base_name(base: str | os.PathLike[str], adapter: str | os.PathLike[str]) -> str:
    """What the adapter in the folder `adapter` calls the base in another folder: as in the module's docstring.

    The path is that of real folders, because the system follows links before it goes up.
    """
    pulled = name_of(base)
    return pulled.id if pulled is not None else os.path.relpath(os.path.realpath(base), os.path.realpath(adapter))


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
    path, digest = raw.get("path"), raw.get("sha256")  # older versions wrote the whole path
    if path is None:
        named = read_json(safe_join(folder, ADAPTER_CONFIG)).get("base_model_name_or_path")
        is_hub = isinstance(named, str) and hub_name(named) is not None
        path = named if is_hub else os.path.realpath(Path(folder) / str(named))
    if isinstance(path, str) and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest):
        return Base(path, digest)
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
        own = escape(expected.path)
        what = f"the model in {escape(found.path)} is not the base of this adapter, which was in {own}"
        next = f"name the folder of that base, wherever it is now: {setting}=FOLDER"
    prints = f"its sha256 begins {found.sha256[:12]}, that of the base {expected.sha256[:12]}"
    raise ModelError(f"{what}: {prints}", where=where, next=next)
