"""Models and data sets of the Hugging Face hub: their names, their folders in huggingface_hub's cache, and `pull`.

models--ORG--NAME/, datasets--ORG--NAME/
    blobs/<hash>                     a file: sha256 of large files, git's sha1 of small ones
    snapshots/<commit>/config.json   links to blobs, under the files' names
    refs/main                        the commit of a branch or tag when it was pulled
    .genesis/<commit>                for data: the names of all pulled files, one per line; written last

Only `pull` uses a network, and it runs only when the user asks for it. Session, endpoint and token come from
huggingface_hub, but this module writes the files. The library's own downloads (2.4) restart in a new process, compare
no hashes, and accept a range from another offset or a body without an end. Here a file grows as
`<hash>.genesis.incomplete`, is hashed meanwhile, and is renamed once the hub lists the same size and hash.
`config.json` is linked last and the revision is written after it, so an interrupted pull does not look like a model.
For data, the list of files is written last.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote as percent

from genesis.errors import BusyError, DataError, DeviceError, DiskError, GenesisError, ModelError, escape
from genesis.files.atomic import write_file
from genesis.files.boundary import boundary
from genesis.files.filesystem import DEFAULT, check_room
from genesis.files.hashing import add_file
from genesis.files.hf import INDEX_NAME, MAX_JSON_BYTES, README, WEIGHTS_NAME, file_limit, read_json, read_weight_map
from genesis.files.lock import FolderLock
from genesis.files.paths import check_name, exists, is_folder, list_folder, quote
from genesis.files.strict_json import parse_object, read_limited

MAIN = "main"
# One of these is linked last; a snapshot without either is incomplete.
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_SNAPSHOT = re.compile(rf"/models--({_PART}--{_PART})/snapshots/([0-9a-f]{{40}})$", re.ASCII)
_REVISION = rf"(?:@({_PART}(?:/{_PART}){{0,3}}))?"
_NAME = re.compile(rf"({_PART}/{_PART}){_REVISION}", re.ASCII)
# A data source: id, configuration, revision, split.
DATA_SOURCE = re.compile(rf"hf:({_PART}/{_PART})(?:/({_PART}))?{_REVISION}(?::({_PART}))?", re.ASCII)
MAX_LIST_BYTES = 16 << 20

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_FILES = 10_000
TRIES, FIRST_TRIES = 5, 2  # consecutive attempts without progress, for a file and for the list of files
PAUSE_S = 1.0  # pause before the second attempt; doubles each time
LONGEST_PAUSE_S = 120  # the longest wait that a hub may request
MIN_WINDOW_BYTES, WINDOW_S = 1024, 60.0  # a transfer with fewer bytes in this many seconds has stalled
LISTING_S = 120.0  # limit for the complete list of files, however slowly it arrives
TIMEOUT_S = 30.0  # longest wait for the next byte
_SPAN = re.compile(r"bytes ([0-9]{1,18})-[0-9]*/([0-9]{1,18}|\*)")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
BUSY = (408, 429, 500, 502, 503, 504)
AGAIN = "run the command again to continue"


@dataclass(frozen=True, slots=True)
class HubName:
    """A model or a data set of the hub.

    Attributes:
        id: owner and name, such as `Qwen/Qwen3-0.6B`.
        revision: a branch, a tag or a commit; None means `main`.
        is_data: whether it is a data set.
    """

    id: str
    revision: str | None = None
    is_data: bool = False

    @property
    def folder(self) -> Path:
        """The folder of all its revisions in the cache, whether it exists or not."""
        return cache_folder() / f"{'datasets' if self.is_data else 'models'}--{self.id.replace('/', '--')}"

    @property
    def noun(self) -> str:
        """What it is called in messages."""
        return "data set" if self.is_data else "model"

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def hub_name(text: str, *, is_data: bool = False) -> HubName | None:
    """Parse `ORG/NAME` or `ORG/NAME@REV` as a name on the hub; None if the text is something else.

    If a folder named ORG exists, the text is taken for a path, unless a data set is meant.
    """
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1] or (not is_data and Path(match[1]).parent.is_dir()):
        return None
    return HubName(match[1], match[2], is_data)


def cache_folder() -> Path:
    """The cache folder, which huggingface_hub's own environment variables choose."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


@boundary(ModelError, "looking into the cache of huggingface_hub")
def in_cache(name: HubName) -> Path | None:
    """The snapshot of a model or data set that looks complete, or None if the cache does not have it."""
    commit = name.revision or MAIN
    if not COMMIT.fullmatch(commit):
        ref = name.folder / "refs" / commit
        is_file = exists(ref) and not is_folder(ref)
        commit = read_limited(ref, 1024).decode("ascii", "replace").strip() if is_file else ""
    if not COMMIT.fullmatch(commit):
        return None
    folder = name.folder / "snapshots" / commit
    if name.is_data:
        names = pulled_data(folder)
        return folder if names and all(exists(folder / each) for each in names) else None
    return folder if any(exists(folder / config) for config in (CONFIG, ADAPTER_CONFIG)) else None


def pulled_data(snapshot: Path) -> list[str]:
    """The names of the pulled files of a data set; empty if the pull was not completed."""
    path = snapshot.parents[1] / ".genesis" / snapshot.name
    return read_limited(path, MAX_LIST_BYTES).decode("utf-8", "replace").splitlines() if exists(path) else []


@boundary(ModelError, "looking into the cache of huggingface_hub")
def cached_revisions(name: HubName) -> list[str]:
    """The branches, tags and commits in the cache."""
    revisions = list_folder(name.folder / "refs") + list_folder(name.folder / "snapshots")
    return [each for each in revisions if in_cache(HubName(name.id, each, name.is_data)) is not None]


def local_path(path: str | os.PathLike[str]) -> str:
    """The cache folder of a name on the hub; other paths, and names that are not cached, are returned unchanged."""
    text = os.fspath(path)
    name = None if "\0" in text or os.path.lexists(text) else hub_name(text)
    snapshot = None if name is None else in_cache(name)
    return text if snapshot is None else str(snapshot)


def name_of(folder: str | os.PathLike[str]) -> HubName | None:
    """The model and commit of a snapshot folder in the cache; None for any other folder."""
    match = _SNAPSHOT.search(os.path.abspath(folder))
    return None if match is None else HubName(match[1].replace("--", "/"), match[2])


def pull_advice(name: HubName) -> str:
    """The command that gets a name into the cache, and the revisions that the cache already has."""
    others = cached_revisions(name)
    have = f"; the cache has {', '.join(f'{name.id}@{each}' for each in others[:3])}" if others else ""
    return f"run genesis pull {'--data ' * name.is_data}{name}{have}"


# --- Pulling ----------------------------------------------------------------------------------------------------------


Progress = Callable[[int, int], None]
Check = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it.

    Attributes:
        hash: sha256 of a large file; for others git's hash, the sha1 of a header and the content.
    """

    name: str
    size: int
    hash: str

    def digest(self) -> Any:
        """A new hash object of the same kind as `hash`."""
        if len(self.hash) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull.

    Attributes:
        folder: the snapshot in the cache.
        files: the files of the snapshot.
        fetched: bytes received over the network.
        left_out: names of files on the hub that were not pulled.
    """

    folder: Path
    commit: str
    files: tuple[HubFile, ...]
    fetched: int
    left_out: tuple[str, ...]


def pull(
    name: HubName,
    *,
    check: Check = lambda config: None,
    is_data: Callable[[str], bool] = lambda name: True,
    progress: Progress = lambda done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> Pulled:
    """Fetch the missing files of a model or data set, and compare all files with the hub's hashes.

    Args:
        check: called with a model's `config.json` before weights are fetched; it raises to refuse the model.
        is_data: whether a file name belongs to data; of data sets only such files and README.md are pulled.
        progress: called with the bytes present and the total.
        note: called with a line about each wait: the failure and the time of the next attempt.

    Raises:
        DeviceError: the hub cannot be reached, or does not answer like a hub.
        ModelError: the model or revision does not exist or is not accessible, the model has no safetensors, or a file
            has another hash.
        DataError: the data set has no data files.
        DiskError: the disk has not enough free space.
        BusyError: another process is pulling the same name.
    """
    hub = _Hub(name, note)
    commit, listed = hub.listing(lambda file: not name.is_data or is_data(file) or file == README)
    lock = FolderLock(cache_folder() / ".locks" / name.folder.name)
    try:
        lock.acquire()
    except BusyError as error:
        next = "wait until that pull ends, and run the command again"
        raise BusyError(error.what, where=error.where, next=next) from None
    try:
        return _Fetch(hub, commit, listed, progress).run(check, is_data)
    finally:
        lock.release()


class _Fetch:
    """One pull, which fetches the files of a commit one after the other."""

    def __init__(self, hub: _Hub, commit: str, listed: dict[str, HubFile], progress: Progress) -> None:
        self.hub, self.commit, self.listed = hub, commit, listed
        self.blobs = hub.name.folder / "blobs"
        self.snapshot = hub.name.folder / "snapshots" / commit
        self.progress = progress
        self.done = self.total = self.fetched = 0

    def run(self, check: Check, is_data: Callable[[str], bool]) -> Pulled:
        DEFAULT.makedirs(self.blobs)
        DEFAULT.makedirs(self.snapshot)
        if self.hub.name.is_data:
            if not any(map(is_data, self.listed)):
                what = f"{self.hub.name} has no data file that Genesis can read"
                next = "try the revision refs/convert/parquet, where many data sets have Parquet files"
                raise DataError(what, where=self.hub.where, next=next)
            files = list(self.listed.values())
        else:
            files = self._wanted(check)
        self.total = sum(file.size for file in files)
        check_room(self.blobs, sum(file.size - self._present(file) for file in files))
        # Fetch all blobs before any of them gets a name in the snapshot.
        for file in files:
            self._fetch(file)
        # The config is last, because a snapshot with a config counts as a model.
        for file in sorted(files, key=lambda file: file.name in (CONFIG, ADAPTER_CONFIG)):
            self._link(file)
        self._record(files)
        taken = {file.name for file in files}
        left_out = tuple(sorted(each for each in self.listed if each not in taken))
        return Pulled(self.snapshot, self.commit, tuple(files), self.fetched, left_out)

    def _wanted(self, check: Check) -> list[HubFile]:
        """The side files and weights to pull. Fetches and checks the config and the index of weights."""
        config = next((name for name in (CONFIG, ADAPTER_CONFIG) if name in self.listed), None)
        if config is None:
            raise self._no_model(f"has no {CONFIG}")
        side = [file for name, file in self.listed.items() if self._is_side_file(file) or name == config]
        names = [WEIGHTS_NAME] if config == CONFIG else [ADAPTER_WEIGHTS]
        if config == CONFIG and WEIGHTS_NAME not in self.listed and INDEX_NAME in self.listed:
            index = self.listed[INDEX_NAME]
            side.append(index)
            weight_map = read_weight_map(self._fetch(index), f"{self.hub.where}/{INDEX_NAME}")
            names = sorted(set(weight_map.values()))
        missing = [name for name in names if name not in self.listed]
        if missing:
            pickled = [name for name in self.listed if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
            kind = f", only pickles ({quote(pickled[0])}), which can run code when they are loaded" if pickled else ""
            raise self._no_model(f"has no {quote(missing[0])}{kind}")
        if config == CONFIG:
            check(read_json(self._fetch(self.listed[config])))
        return [*side, *(self.listed[name] for name in names)]

    def _no_model(self, lack: str) -> ModelError:
        what = f"{self.hub.name} {lack}; Genesis reads safetensors weights and {CONFIG}"
        return ModelError(what, where=self.hub.where, next="use a version of the model with safetensors")

    def _is_side_file(self, file: HubFile) -> bool:
        limit = file_limit(file.name)
        if limit is not None and file.size > limit:
            what = f"{quote(file.name)} has {file.size:,} bytes, more than the {limit:,} allowed for this file"
            raise ModelError(what, where=self.hub.where, next="use another version of the model")
        return limit is not None

    # --- One file ----------------------------------------------------------------------------------------------------

    def _present(self, file: HubFile) -> int:
        blob = _size(self.blobs / file.hash)
        return min(_size(self._incomplete(file)) or 0 if blob is None else blob, file.size)

    def _incomplete(self, file: HubFile) -> Path:
        return self.blobs / f"{file.hash}.genesis.incomplete"

    def _fetch(self, file: HubFile) -> Path:
        """The blob of a file, fetched if it is missing; its hash is checked in either case."""
        blob, part = self.blobs / file.hash, self._incomplete(file)
        if _size(blob) is not None:
            if _size(blob) == file.size and self._hashed(blob, file).hexdigest() == file.hash:
                self._report(file.size)
                return blob
            DEFAULT.unlink(blob)  # the file was changed on the disk
        if (_size(part) or 0) > file.size:
            DEFAULT.unlink(part)
        digest = self._hashed(part, file)
        start = _size(part) or 0
        self._report(start)
        # If an earlier pull left wrong bytes, fetch the file again from the start.
        if not self._complete(file, part, digest) and (start == 0 or not self._complete(file, part, file.digest())):
            what = f"{quote(file.name)} does not have the hash that the hub lists, {file.hash[:12]}…"
            next = "run the command again; if this repeats, the hub or a proxy changes the file"
            raise ModelError(what, where=self.hub.where, next=next)
        DEFAULT.rename(part, blob)
        DEFAULT.fsync_dir(self.blobs)
        return blob

    def _complete(self, file: HubFile, part: Path, digest: Any) -> bool:
        """Fetch the missing bytes of a file and return whether its hash is right; if not, the part is removed."""
        for tries in _Tries(self.hub, TRIES, file):
            with tries.recorded(), DEFAULT.append(part) as out:
                start = _size(part) or 0
                tries.received = start
                if start == file.size:
                    break
                with self.hub.get(self.hub.url(self.commit, file.name), start, file) as (response, at):
                    begun, window = time.monotonic(), at
                    # Append each piece, ending a transfer that has stalled.
                    for piece in response.iter_raw():
                        if time.monotonic() - begun > WINDOW_S:
                            if at - window < MIN_WINDOW_BYTES:
                                raise _Slow(f"only {at - window:,} bytes came in {WINDOW_S:g} s")
                            begun, window = time.monotonic(), at
                        # A hub without range support sends known bytes again; only new bytes are progress.
                        new, at = piece[max(0, start - at) :], at + len(piece)
                        if start + len(new) > file.size:
                            more = f"more than the {file.size:,} bytes that it lists"
                            raise self.hub.no_hub(f"it sent {quote(file.name)} with {more}")
                        out.write(new)
                        digest.update(new)
                        start += len(new)
                        self.fetched += len(new)
                        tries.failed = 0 if new else tries.failed
                        tries.received = start
                        self._report(len(new))
                if start < file.size:
                    raise _Cut("the answer ended early")
        if digest.hexdigest() == file.hash:
            return True
        DEFAULT.unlink(part)
        return False

    def _hashed(self, path: Path, file: HubFile) -> Any:
        return file.digest() if _size(path) is None else add_file(file.digest(), path)

    def _report(self, size: int) -> None:
        if self.total:
            self.done += size
            self.progress(min(self.done, self.total), self.total)

    # --- The snapshot ------------------------------------------------------------------------------------------------

    def _link(self, file: HubFile) -> None:
        link = self.snapshot / file.name
        target = os.path.relpath(self.blobs / file.hash, link.parent)
        with DEFAULT.errors("symlink", link):
            if os.path.lexists(link):
                if os.path.islink(link) and os.readlink(link) == target:
                    return
                os.unlink(link)
            DEFAULT.makedirs(link.parent)
            os.symlink(target, link)
        DEFAULT.fsync_dir(link.parent)

    def _record(self, files: Sequence[HubFile]) -> None:
        """Write the list of files of a data set, and the commit of the revision."""
        if self.hub.name.is_data:
            names = "".join(f"{file.name}\n" for file in files)
            write_file(self.hub.name.folder / ".genesis" / self.commit, names.encode())
        revision = self.hub.name.revision or MAIN
        if not COMMIT.fullmatch(revision):
            write_file(self.hub.name.folder / "refs" / revision, self.commit.encode())


class _Cut(Exception):
    """A transfer that ended early or returned other bytes than requested."""


class _Slow(_Cut):
    """A transfer that has stalled, although single bytes still arrive."""


class _Tries:
    """Attempts at one transfer: temporary errors are retried after a pause, as long as there is progress.

    Attributes:
        failed: consecutive attempts without progress; the caller resets it.
        slow: attempts that stalled.
        received: bytes of the file that have arrived.
    """

    def __init__(self, hub: _Hub, count: int, file: HubFile | None = None) -> None:
        self.hub, self.count, self.file, self.failed, self.slow, self.received = hub, count, file, 0, 0, 0
        self.errors: list[Exception] = []  # of the current attempt

    def __iter__(self) -> Iterator[_Tries]:
        while True:
            self.errors.clear()
            yield self
            if not self.errors:
                return
            (error,), pause = self.errors, PAUSE_S * 2 ** (self.failed - 1)
            if isinstance(error, _BusyHub):
                pause = max(pause, error.pause)
            if max(self.failed, self.slow) >= self.count or pause > LONGEST_PAUSE_S:
                raise self.hub.unreachable(error, self.file, self.received) from None
            retry = f"in {pause:g} s, attempt {self.failed + 1} of {self.count}"
            self.hub.note(f"{_named(self.file)}: {_reason(error)}; trying again {retry}")
            time.sleep(pause)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record errors of the network inside the block, which ends the attempt."""
        try:
            yield
        except DiskError:
            raise
        except (*self.hub.transport_errors, _Cut, _BusyHub) as error:
            self.errors.append(error)
            self.slow += isinstance(error, _Slow)
            self.failed += 1


class _BusyHub(Exception):
    """The hub is busy, and may say for how many seconds."""

    def __init__(self, status: int, pause: str) -> None:
        self.pause = int(pause) if pause.isdecimal() and len(pause) < 10 else 0
        super().__init__(f"status {status}{f', and the hub asks to wait {self.pause:,} s' if self.pause else ''}")


class _Hub:
    """Requests for one model or data set."""

    def __init__(self, name: HubName, note: Callable[[str], None]) -> None:
        from importlib.metadata import version

        from huggingface_hub import constants, errors, get_session, get_token

        self.name, self.note, self.endpoint = name, note, constants.ENDPOINT.rstrip("/")
        self.where = f"{self.endpoint}/{'datasets/' * name.is_data}{name.id}"
        self._session: Any = get_session()
        # Without compression, sizes and hashes refer to the file itself. The library's own headers would reveal details
        # of this machine.
        self._headers = {"accept-encoding": "identity", "user-agent": f"genesis/{version('genesis-lm')}"}
        if token := get_token():
            self._headers["authorization"] = f"Bearer {token}"
        # The classes of httpx, in either version.
        failed: type[Exception] = getattr(errors, "HTTPError")  # noqa: B009 - the library exports it without saying so
        invalid: type[Exception] = vars(sys.modules[failed.__module__.partition(".")[0]])["InvalidURL"]
        self.transport_errors = (failed, invalid)
        self._offline = errors.OfflineModeIsEnabled

    def listing(self, is_wanted: Callable[[str], bool]) -> tuple[str, dict[str, HubFile]]:
        """The commit of the revision, and its files whose names are wanted."""
        revision = percent(self.name.revision or MAIN, safe="")
        kind = "datasets" if self.name.is_data else "models"
        url = f"{self.endpoint}/api/{kind}/{self.name.id}/revision/{revision}?blobs=true"
        data, ends = b"", time.monotonic() + LISTING_S
        for tries in _Tries(self, FIRST_TRIES):
            with tries.recorded(), self.get(url) as (response, _):
                data = b""
                for piece in response.iter_raw():
                    data += piece
                    if len(data) > MAX_JSON_BYTES or time.monotonic() > ends:
                        raise self.no_hub("the list of files is too long, or arrives too slowly")
        try:
            return self._parsed(parse_object(data, where=self.where), is_wanted)
        except (ModelError, KeyError, TypeError, AttributeError) as error:
            raise self.no_hub(f"its list of files is invalid: {getattr(error, 'what', error)}") from error

    def _parsed(self, answer: dict[str, Any], is_wanted: Callable[[str], bool]) -> tuple[str, dict[str, HubFile]]:
        commit, files = answer["sha"], {}
        if not COMMIT.fullmatch(commit):
            raise KeyError("no commit")
        entries = [entry for entry in answer["siblings"] if is_wanted(entry["rfilename"])]
        if len(entries) > MAX_FILES:
            raise KeyError(f"it lists {len(entries):,} files, more than {MAX_FILES:,}")
        for entry in entries:
            name = check_name(entry["rfilename"])
            lfs = entry.get("lfs") or {}
            size, digest = entry.get("size", lfs.get("size")), lfs.get("sha256") or entry.get("blobId")
            if not isinstance(size, int) or size < 0 or not (isinstance(digest, str) and _HASH.fullmatch(digest)):
                raise KeyError(f"no size or hash of {quote(name)}")
            files[name] = HubFile(name, size, digest)
        return commit, files

    def url(self, commit: str, name: str) -> str:
        """The URL of a file."""
        return f"{self.where}/resolve/{commit}/{percent(name)}"

    @contextmanager
    def get(self, url: str, start: int = 0, file: HubFile | None = None) -> Iterator[tuple[Any, int]]:
        """Request `url` from byte `start` on; yield the response and the byte that its body starts with."""
        headers = {**self._headers, **({"range": f"bytes={start}-"} if start else {})}
        try:
            with self._session.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
                if response.status_code not in (200, 206):
                    raise self._refusal(response.status_code, response.headers, file)
                yield response, self._begin(response, start, file)
        except self._offline:
            what = "HF_HUB_OFFLINE is set, so the hub is not used"
            raise DeviceError(what, where=self.where, next="unset HF_HUB_OFFLINE, and run the command again") from None

    def _begin(self, response: Any, start: int, file: HubFile | None) -> int:
        """The byte that a body starts with, after checking that the body is the file or a part of it."""
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise self.no_hub(f"it sent {_named(file)} encoded as {coding[:40]!r}, but was asked for plain bytes")
        if file is None:
            return 0
        begins, size = 0, response.headers.get("content-length", "")
        if response.status_code == 206:
            span = _SPAN.fullmatch(response.headers.get("content-range", f"bytes {start}-/*").strip())
            begins, size = (int(span[1]), span[2]) if span else (start + 1, "")
            if begins > start:
                raise _Cut(f"it was asked for the bytes from {start:,} on, but sent others")
        if size.isdecimal() and int(size) != file.size:
            raise self.no_hub(f"it sent {_named(file)} with {int(size):,} bytes, but lists {file.size:,}")
        return begins

    def _refusal(self, status: int, headers: Any, file: HubFile | None) -> Exception:
        code = headers.get("x-error-code", "")
        if status in BUSY:
            return _BusyHub(status, headers.get("retry-after", "").strip())
        name, login = self.name, "`hf auth login`, or HF_TOKEN in the environment"
        if status in (401, 403) and code != "RepoNotFound":
            what = f"{name.id} is gated, and requires a token"
            next = f"ask for access at {self.where}, then set your token: {login}"
            if status == 403:
                what = f"your token has no access to {name.id}"
                next = f"ask for access at {self.where}, or set another token: {login}"
            return ModelError(what, where=self.where, next=next)
        if status in (401, 404) and code in ("RepoNotFound", ""):
            what = f"the hub has no {name.noun} {name.id}, or it is private"
            next = f"check the name; for a private {name.noun} set a token: {login}"
            return ModelError(what, where=self.where, next=next)
        if code == "RevisionNotFound":
            what = f"{name.id} has no revision {quote(name.revision or MAIN)}"
            return ModelError(what, where=self.where, next=f"choose one from {self.where}/tree/main")
        if status == 404:
            return ModelError(f"a file of {name} no longer exists", where=self.where, next="run the command again")
        return self.no_hub(f"it answered with status {status} to a request for {_named(file)}")

    def no_hub(self, why: str) -> GenesisError:
        """The error for an answer that no hub would give."""
        what = f"{escape(self.endpoint)} does not answer like a hub: {escape(why)}"
        return DeviceError(what, where=self.where, next="check HF_ENDPOINT and your proxies")

    def unreachable(self, error: Exception, file: HubFile | None, received: int) -> GenesisError:
        """The error for a hub that did not answer, or whose answer ended early."""
        what = "the hub cannot be reached"
        if file is not None:
            what = f"{_named(file)} is incomplete, {received:,} of {file.size:,} bytes have arrived"
        next = f"check the network and HF_ENDPOINT; {AGAIN}"
        return DeviceError(f"{what}: {_reason(error)}", where=self.where, next=next)


def _reason(error: Exception) -> str:
    return escape(str(error) or type(error).__name__)[:200]


def _named(file: HubFile | None) -> str:
    return "the list of files" if file is None else quote(file.name)


def _size(path: Path) -> int | None:
    with boundary(ModelError, "looking into the cache of huggingface_hub", path):
        return path.stat().st_size if exists(path) and path.is_file() else None
