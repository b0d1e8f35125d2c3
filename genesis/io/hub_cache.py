"""The cache of huggingface_hub as folders: where a model of the hub lies on this machine. It reaches no network.

models--ORG--NAME/
    blobs/<hash>                     a file: sha256 of large files, git's sha1 of small ones
    snapshots/<commit>/config.json   links to blobs, under the files' names
    refs/main                        the commit that a branch or tag was at when it was pulled
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from genesis.errors import ModelError
from genesis.io.boundary import boundary
from genesis.io.paths import exists, is_folder, list_folder
from genesis.io.strict_json import read_limited

__all__ = [
    "ADAPTER_CONFIG",
    "COMMIT",
    "CONFIG",
    "MAIN",
    "HubName",
    "cache_folder",
    "cached_revisions",
    "hub_name",
    "in_cache",
    "local_path",
    "name_of",
    "pull_advice",
]

MAIN = "main"
# One of the two is linked last: a snapshot that has none is incomplete.
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_SNAPSHOT = re.compile(rf"/models--({_PART}--{_PART})/snapshots/([0-9a-f]{{40}})$", re.ASCII)
_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART}){{0,3}}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub.

    Attributes:
        id: owner and model, `Qwen/Qwen3-0.6B`.
        revision: a branch, a tag or a commit; None where none was named, which means `main`.
    """

    id: str
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """Where the cache has, or would have, all revisions of the model."""
        return cache_folder() / f"models--{self.id.replace('/', '--')}"

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    """`ORG/NAME` or `ORG/NAME@REV` as a name on the hub; None where it is something else.

    What lies below a folder that exists is taken for a path.
    """
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found[1] or Path(found[1]).parent.is_dir():
        return None
    return HubName(found[1], found[2])


def cache_folder() -> Path:
    """The cache's folder, as huggingface_hub finds it: the variables are its own."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


@boundary(ModelError, "looking into the cache of huggingface_hub")
def in_cache(name: HubName) -> Path | None:
    """The snapshot of a model, complete by its look; None where the cache has none."""
    revision = name.revision or MAIN
    commit = revision if COMMIT.fullmatch(revision) else _commit(name.folder / "refs" / revision)
    if commit is None:
        return None
    folder = name.folder / "snapshots" / commit
    return folder if any(exists(folder / config) for config in (CONFIG, ADAPTER_CONFIG)) else None


def _commit(ref: Path) -> str | None:
    """What a file of `refs` holds."""
    if not exists(ref) or is_folder(ref):
        return None
    found = read_limited(ref, 1024).decode("ascii", "replace").strip()
    return found if COMMIT.fullmatch(found) else None


@boundary(ModelError, "looking into the cache of huggingface_hub")
def cached_revisions(name: HubName) -> list[str]:
    """Branches, tags and commits of a model that the cache has."""
    refs, snapshots = name.folder / "refs", name.folder / "snapshots"
    found = sorted(list_folder(refs)) if is_folder(refs) else []
    found += sorted(list_folder(snapshots)) if is_folder(snapshots) else []
    return [each for each in found if in_cache(HubName(name.id, each)) is not None]


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
    """How to come by a model that is not in the cache, and which of its revisions are."""
    others = cached_revisions(name)
    have = f"; the cache has {', '.join(f'{name.id}@{each}' for each in others[:3])}" if others else ""
    return f"get it: genesis pull {name}{have}"
