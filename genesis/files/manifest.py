"""The manifest of a committed folder: sha256 and size of each file, the caller's metadata. It writes no file itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genesis.errors import ModelError, escape
from genesis.files.boundary import boundary
from genesis.files.hashing import sha256_file
from genesis.files.paths import check_name, quote, safe_join
from genesis.files.strict_json import canonical_bytes, parse_object, read_limited

MANIFEST_NAME = "manifest.json"
VERSION = 1
MAX_BYTES = 16 << 20

_NEXT = "this copy is damaged: use another checkpoint, or restore the folder from where it came"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be: its size in bytes and its sha256 as 64 hex digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a committed folder and the metadata that was given with them (plain JSON values)."""

    files: Mapping[str, FileRecord]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The one text of this manifest; it carries a hash of its own content, so that bit rot in it is seen too."""
        content: dict[str, Any] = {
            "files": {name: {"bytes": r.size, "sha256": r.sha256} for name, r in self.files.items()},
            "genesis_manifest": VERSION,
            "metadata": dict(self.metadata),
        }
        content["manifest_sha256"] = hashlib.sha256(canonical_bytes(content)).hexdigest()
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of `folder`, itself checked, the files not looked at.

    Raises:
        ModelError: there is none (the folder was never committed), or it is damaged.
    """
    path = Path(folder) / MANIFEST_NAME
    where = escape(path)
    data = read_limited(safe_join(folder, MANIFEST_NAME, where=where), MAX_BYTES)
    content = parse_object(data, where=where)
    if content.get("genesis_manifest") != VERSION:
        raise ModelError(
            f"{MANIFEST_NAME} has no format version {VERSION}", where=where, next="use the Genesis that wrote it"
        )
    manifest = _from_content(content)
    # Whatever differs from the one text that the writer makes of this content was changed after writing.
    if manifest is None or manifest.to_bytes() != data:
        raise ModelError(f"{MANIFEST_NAME} is damaged: its content and its own hash disagree", where=where, next=_NEXT)
    return manifest


@boundary(ModelError, "checking the files of a folder")
def verify_manifest(folder: str | os.PathLike[str], without: Collection[str] = ()) -> Manifest:
    """The manifest of `folder` after every file was compared with it, byte by byte through its hash.

    Args:
        without: files of which only the size is compared.

    Raises:
        ModelError: naming the first file that is missing, extra, of another size, or of another content.
    """
    manifest = read_manifest(folder)
    paths = {name: safe_join(folder, name, where=escape(folder)) for name in manifest.files}
    extra = sorted(_present(folder, manifest) - set(manifest.files) - {MANIFEST_NAME})
    if extra:
        raise ModelError(
            f"the file {quote(extra[0])} is not in {MANIFEST_NAME}", where=escape(folder), next="move it elsewhere"
        )
    for name, record in manifest.files.items():
        size = os.stat(paths[name]).st_size
        if size != record.size:
            what = f"the file {quote(name)} has {size:,} bytes where {MANIFEST_NAME} says {record.size:,}"
            raise ModelError(what, where=escape(folder), next=_NEXT)
    for name, record in manifest.files.items():
        if name not in without and sha256_file(paths[name]) != record.sha256:
            what = f"the file {quote(name)} is damaged: its sha256 is not the one in {MANIFEST_NAME}"
            raise ModelError(what, where=escape(folder), next=_NEXT)
    return manifest


def _present(folder: str | os.PathLike[str], manifest: Manifest) -> set[str]:
    """The names in `folder`, and in the folders inside it that the manifest names."""
    inside = {name.rpartition("/")[0] for name in manifest.files} - {""}
    found = set(os.listdir(folder)) - inside
    return found | {f"{name}/{entry}" for name in inside for entry in os.listdir(Path(folder) / name)}


def _from_content(content: dict[str, Any]) -> Manifest | None:
    """The manifest in parsed JSON, or None where parts are missing or of another type."""
    try:
        files = {check_name(n): FileRecord(int(r["bytes"]), str(r["sha256"])) for n, r in content["files"].items()}
        return Manifest(files, dict(content["metadata"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
