"""The cache of huggingface_hub as folders: where what was pulled is on this machine. It reaches no network.

models--ORG--NAME/, datasets--ORG--NAME/
    blobs/<hash>                     a file: sha256 of large files, git's sha1 of small ones
    snapshots/<commit>/config.json   links to blobs, under the files' names
    refs/main                        the commit that a branch or tag was at when it was pulled
    .genesis/<commit>                of data: the names of all files that were pulled, a line each; written last
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from genesis.errors import ModelError
from genesis.files.boundary import boundary
from genesis.files.paths import exists, is_folder, list_folder
from genesis.files.strict_json import read_limited

MAIN = "main"
# One of the two is linked last: a snapshot that has none is incomplete.
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_SNAPSHOT = re.compile(rf"/models--({_PART}--{_PART})/snapshots/([0-9a-f]{{40}})$", re.ASCII)
_REVISION = rf"(?:@({_PART}(?:/{_PART}){{0,3}}))?"
_NAME = re.compile(rf"({_PART}/{_PART}){_REVISION}", re.ASCII)
# A source of data: id, configuration, revision, split.
DATA_SOURCE = re.compile(rf"hf:({_PART}/{_PART})(?:/({_PART}))?{_REVISION}(?::({_PART}))?", re.ASCII)
MAX_LIST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class HubName:
    """A model or a data set of the hub.

    Attributes:
        id: owner and name, `Qwen/Qwen3-0.6B`.
        revision: a branch, a tag or a commit; None where none was named, which means `main`.
        is_data: it is a data set.
    """

    id: str
    revision: str | None = None
    is_data: bool = False

    @property
    def folder(self) -> Path:
        """Where the cache has, or would have, all its revisions."""
        return cache_folder() / f"{'datasets' if self.is_data else 'models'}--{self.id.replace('/', '--')}"

    @property
    def noun(self) -> str:
        """What it is, for messages."""
        return "data set" if self.is_data else "model"

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def hub_name(text: str, *, is_data: bool = False) -> HubName | None:
    """`ORG/NAME` or `ORG/NAME@REV` as a name on the hub; None where it is something else.

    What lies below a folder that exists is taken for a path, unless a data set is meant.
    """
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found[1] or (not is_data and Path(found[1]).parent.is_dir()):
        return None
    return HubName(found[1], found[2], is_data)


def cache_folder() -> Path:
    """The cache's folder, as huggingface_hub finds it: the variables are its own."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


@boundary(ModelError, "looking into the cache of huggingface_hub")
def in_cache(name: HubName) -> Path | None:
    """The snapshot of a model or a data set, complete by its look; None where the cache has none."""
    revision = name.revision or MAIN
    commit = revision if COMMIT.fullmatch(revision) else _commit(name.folder / "refs" / revision)
    if commit is None:
        return None
    folder = name.folder / "snapshots" / commit
    if name.is_data:
        names = pulled_data(folder)
        return folder if names and all(exists(folder / each) for each in names) else None
    return folder if any(exists(folder / config) for config in (CONFIG, ADAPTER_CONFIG)) else None


def pulled_data(snapshot: Path) -> list[str]:
    """The names of the files that were pulled of a data set; none where that did not come to its end."""
    path = snapshot.parents[1] / ".genesis" / snapshot.name
    return read_limited(path, MAX_LIST_BYTES).decode("utf-8", "replace").splitlines() if exists(path) else []


def _commit(ref: Path) -> str | None:
    """What a file of `refs` holds."""
    if not exists(ref) or is_folder(ref):
        return None
    found = read_limited(ref, 1024).decode("ascii", "replace").strip()
    return found if COMMIT.fullmatch(found) else None


@boundary(ModelError, "looking into the cache of huggingface_hub")
def cached_revisions(name: HubName) -> list[str]:
    """Branches, tags and commits that the cache has."""
    refs, snapshots = name.folder / "refs", name.folder / "snapshots"
    found = sorted(list_folder(refs)) if is_folder(refs) else []
    found += sorted(list_folder(snapshots)) if is_folder(snapshots) else []
    return [each for each in found if in_cache(HubName(name.id, each, name.is_data)) is not None]


def local_path(path: str | os.PathLike[str]) -> str:
    """The folder that a name on the hub has in the cache; `path` itself for all else, and where the cache lacks it."""
    text = os.fspath(path)
    name = None if "\0" in text or os.path.lexists(text) else hub_name(text)
    found = None if name is None else in_cache(name)
    return text if found is None else str(found)


def name_of(folder: str | os.PathLike[str]) -> HubName | None:
    """The model and commit whose snapshot a folder of the cache is; None for any other folder."""
    found = _SNAPSHOT.search(os.path.abspath(folder))
    return None if found is None else HubName(found[1].replace("--", "/"), found[2])


def pull_advice(name: HubName) -> str:
    """How to come by what is not in the cache, and which of its revisions are."""
    others = cached_revisions(name)
    have = f"; the cache has {', '.join(f'{name.id}@{each}' for each in others[:3])}" if others else ""
    return f"get it: genesis pull {'--data ' * name.is_data}{name}{have}"
