"""Models and data sets of the Hugging Face hub: their names, their place in the cache of huggingface_hub, and `pull`.

models--ORG--NAME/, datasets--ORG--NAME/
    blobs/<hash>                     a file: sha256 of large files, git's sha1 of small ones
    snapshots/<commit>/config.json   links to blobs, under the files' names
    refs/main                        the commit that a branch or tag was at when it was pulled
    .genesis/<commit>                of data: the names of all files that were pulled, a line each; written last

`pull` alone uses a network, and runs when the user asks for it. Session, endpoint and token are huggingface_hub's; the
files are written here, since its own downloads (2.4) begin anew in a later process, compare no hashes, and take a part
at another place or a body without end for the file. A file grows under `<hash>.genesis.incomplete`, is hashed on
its way, and gets its name when it has the size and the hash that the hub lists. `config.json` is linked last, and the
revision after it: what a pull that ended early leaves is no model yet. Of data a list of the files is the last.
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

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_FILES = 10_000
TRIES, FIRST_TRIES = 5, 2  # in a row without a byte further, of a file and of the list of files
PAUSE_S = 1.0  # before the second one; it doubles
LONGEST_PAUSE_S = 120  # that a hub may ask for
SLOWEST, WINDOW_S = 1024, 60.0  # fewer bytes in so many seconds are a transfer that stands still
LISTING_S = 120.0  # for the whole list of files, which a slow answer would make endless
TIMEOUT_S = 30.0  # without a byte
_SPAN = re.compile(r"bytes ([0-9]{1,18})-[0-9]*/([0-9]{1,18}|\*)")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
BUSY = (408, 429, 500, 502, 503, 504)
AGAIN = "run the command again: it goes on where it stopped"


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
    """The names of the files that were pulled of a data set; none where that did not come to its end."""
    path = snapshot.parents[1] / ".genesis" / snapshot.name
    return read_limited(path, MAX_LIST_BYTES).decode("utf-8", "replace").splitlines() if exists(path) else []


@boundary(ModelError, "looking into the cache of huggingface_hub")
def cached_revisions(name: HubName) -> list[str]:
    """Branches, tags and commits that the cache has."""
    found = list_folder(name.folder / "refs") + list_folder(name.folder / "snapshots")
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


# --- Pulling ----------------------------------------------------------------------------------------------------------


Progress = Callable[[int, int], None]
Check = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it.
    Attributes: hash: the sha256 of a large file, else the hash that git gives it: sha1 of a header and the content.
    """

    name: str
    size: int
    hash: str

    def digest(self) -> Any:
        """A new hash of the kind that `hash` is."""
        if len(self.hash) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model or a data set that is in the cache.

    Attributes:
        fetched: bytes that came over the network.
        left_out: names of its files that are not pulled.
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
    """Fetch what of the model or data set is not in the cache, and compare all of it with the hub's hashes.

    Args:
        check: is given a model's `config.json` before any weights are fetched, to refuse it.
        is_data: whether a file of this name holds data; of data sets such files are pulled, and README.md.
        progress: is told the bytes that are there, and those of the whole.
        note: gets a line about each wait: what failed, and when it is tried again.

    Raises:
        DeviceError: the hub cannot be reached, or does not answer as one. ModelError: it has no such model or revision,
            or does not let this user have it; the model has no safetensors; a file has another hash. DataError: the
            data set has no file of data.
        DiskError: there is no room. BusyError: another process pulls the same.
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
    """One pull: the files of a commit, one after the other."""

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
                what = f"{self.hub.name} has no file of data that Genesis reads"
                next = "look for a version of it as Parquet: many have one at the revision refs/convert/parquet"
                raise DataError(what, where=self.hub.where, next=next)
            files = list(self.listed.values())
        else:
            files = self._wanted(check)
        self.total = sum(file.size for file in files)
        check_room(self.blobs, sum(file.size - self._present(file) for file in files))
        for file in files:
            self._fetch(file)
        # The config last: with it the snapshot is a model.
        for file in sorted(files, key=lambda file: file.name in (CONFIG, ADAPTER_CONFIG)):
            self._link(file)
        self._record(files)
        taken = {file.name for file in files}
        left = tuple(sorted(each for each in self.listed if each not in taken))
        return Pulled(self.snapshot, self.commit, tuple(files), self.fetched, left)

    def _wanted(self, check: Check) -> list[HubFile]:
        """Side files and weights. The config is fetched and checked on the way, and the index of weights."""
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
            kind = f", only pickles ({quote(pickled[0])}), which can run code when they are read" if pickled else ""
            raise self._no_model(f"has no {quote(missing[0])}{kind}")
        if config == CONFIG:
            check(read_json(self._fetch(self.listed[config])))
        return [*side, *(self.listed[name] for name in names)]

    def _no_model(self, lack: str) -> ModelError:
        what = f"{self.hub.name} {lack}; Genesis reads safetensors weights and {CONFIG}"
        return ModelError(what, where=self.hub.where, next="look for a version of the model with safetensors")

    def _is_side_file(self, file: HubFile) -> bool:
        limit = file_limit(file.name)
        if limit is not None and file.size > limit:
            what = f"{quote(file.name)} has {file.size:,} bytes, more than the {limit:,} that such a file may have"
            raise ModelError(what, where=self.hub.where, next="look for another version of the model")
        return limit is not None

    # --- One file ----------------------------------------------------------------------------------------------------

    def _present(self, file: HubFile) -> int:
        blob = _size(self.blobs / file.hash)
        return min(_size(self._incomplete(file)) or 0 if blob is None else blob, file.size)

    def _incomplete(self, file: HubFile) -> Path:
        return self.blobs / f"{file.hash}.genesis.incomplete"

    def _fetch(self, file: HubFile) -> Path:
        """The file's blob, compared with its hash, whether it was there or not."""
        blob, part = self.blobs / file.hash, self._incomplete(file)
        if _size(blob) is not None:
            if _size(blob) == file.size and self._hashed(blob, file).hexdigest() == file.hash:
                self._tell(file.size)
                return blob
            DEFAULT.unlink(blob)  # the disk has changed it
        if (_size(part) or 0) > file.size:
            DEFAULT.unlink(part)
        digest = self._hashed(part, file)
        start = _size(part) or 0
        self._tell(start)
        # Bytes of an earlier pull with a wrong one among them: once more, from the first.
        if not self._complete(file, part, digest) and (start == 0 or not self._complete(file, part, file.digest())):
            what = f"{quote(file.name)} came with another hash than the hub lists for it, {file.hash[:12]}…"
            next = "run the command again; if that changes nothing, the hub or a proxy on the way changes the file"
            raise ModelError(what, where=self.hub.where, next=next)
        DEFAULT.rename(part, blob)
        DEFAULT.fsync_dir(self.blobs)
        return blob

    def _complete(self, file: HubFile, part: Path, digest: Any) -> bool:
        """Fetch what is missing of a file; whether it then has its hash, else nothing is left of it."""
        for tries in _Tries(self.hub, TRIES, file):
            with tries.noticed(), DEFAULT.append(part) as out:
                start = _size(part) or 0
                tries.here = start
                if start == file.size:
                    break
                with self.hub.get(self.hub.url(self.commit, file.name), start, file) as (response, at):
                    begun, window = time.monotonic(), at
                    for piece in response.iter_raw():
                        if time.monotonic() - begun > WINDOW_S:
                            if at - window < SLOWEST:
                                raise _Slow(f"only {at - window:,} bytes came in {WINDOW_S:g} s")
                            begun, window = time.monotonic(), at
                        # A hub without ranges sends again what is here: only a byte further than ever is progress.
                        new, at = piece[max(0, start - at) :], at + len(piece)
                        if start + len(new) > file.size:
                            more = f"more than the {file.size:,} bytes that it lists"
                            raise self.hub.no_hub(f"it sends {quote(file.name)} with {more}")
                        out.write(new)
                        digest.update(new)
                        start += len(new)
                        self.fetched += len(new)
                        tries.failed = 0 if new else tries.failed
                        tries.here = start
                        self._tell(len(new))
                if start < file.size:
                    raise _Cut("the answer ended early")
        if digest.hexdigest() == file.hash:
            return True
        DEFAULT.unlink(part)
        return False

    def _hashed(self, path: Path, file: HubFile) -> Any:
        return file.digest() if _size(path) is None else add_file(file.digest(), path)

    def _tell(self, size: int) -> None:
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
        """Write which files were pulled, where they are data, and which commit the revision is now."""
        if self.hub.name.is_data:
            names = "".join(f"{file.name}\n" for file in files)
            write_file(self.hub.name.folder / ".genesis" / self.commit, names.encode())
        revision = self.hub.name.revision or MAIN
        if not COMMIT.fullmatch(revision):
            write_file(self.hub.name.folder / "refs" / revision, self.commit.encode())


class _Cut(Exception):
    """A transfer that ended early, or brought other bytes than were asked for."""


class _Slow(_Cut):
    """A transfer that stands still, though a byte comes now and then."""


class _Tries:
    """Attempts at one transfer: what passes is tried again after a pause, as long as each gets further.

    Attributes:
        failed: attempts in a row that got no byte further; whoever transfers sets it back.
        slow: attempts that stood still.
        here: bytes of the file that came by now.
    """

    def __init__(self, hub: _Hub, count: int, file: HubFile | None = None) -> None:
        self.hub, self.count, self.file, self.failed, self.slow, self.here = hub, count, file, 0, 0, 0
        self.errors: list[Exception] = []  # of the attempt in progress

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
                raise self.hub.unreachable(error, self.file, self.here) from None
            tried = f"in {pause:g} s, try {self.failed + 1} of {self.count}"
            self.hub.note(f"{_named(self.file)}: {_reason(error)}; trying again {tried}")
            time.sleep(pause)

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """A block whose end by the network is noted."""
        try:
            yield
        except DiskError:
            raise
        except (*self.hub.transport_errors, _Cut, _BusyHub) as error:
            self.errors.append(error)
            self.slow += isinstance(error, _Slow)
            self.failed += 1


class _BusyHub(Exception):
    """The hub asks for patience, and perhaps says for how many seconds."""

    def __init__(self, status: int, pause: str) -> None:
        self.pause = int(pause) if pause.isdecimal() and len(pause) < 10 else 0
        super().__init__(f"status {status}{f', and it asks to wait {self.pause:,} s' if self.pause else ''}")


class _Hub:
    """Requests about one model or data set."""

    def __init__(self, name: HubName, note: Callable[[str], None]) -> None:
        from importlib.metadata import version

        from huggingface_hub import constants, errors, get_session, get_token

        self.name, self.note, self.endpoint = name, note, constants.ENDPOINT.rstrip("/")
        self.where = f"{self.endpoint}/{'datasets/' * name.is_data}{name.id}"
        self._session: Any = get_session()
        # Sizes and hashes are those of the file itself: no compression on the way. The library's own headers would tell
        # of the machine, and ask the hub what to tell.
        self._headers = {"accept-encoding": "identity", "user-agent": f"genesis/{version('genesis-lm')}"}
        if token := get_token():
            self._headers["authorization"] = f"Bearer {token}"
        # httpx's, of either version.
        failed: type[Exception] = getattr(errors, "HTTPError")  # noqa: B009 - the library exports it without saying so
        invalid: type[Exception] = vars(sys.modules[failed.__module__.partition(".")[0]])["InvalidURL"]
        self.transport_errors = (failed, invalid)
        self._offline = errors.OfflineModeIsEnabled

    def listing(self, is_wanted: Callable[[str], bool]) -> tuple[str, dict[str, HubFile]]:
        """The commit that the revision is at, and those files of it whose names are wanted."""
        revision = percent(self.name.revision or MAIN, safe="")
        kind = "datasets" if self.name.is_data else "models"
        url = f"{self.endpoint}/api/{kind}/{self.name.id}/revision/{revision}?blobs=true"
        data, ends = b"", time.monotonic() + LISTING_S
        for tries in _Tries(self, FIRST_TRIES):
            with tries.noticed(), self.get(url) as (response, _):
                data = b""
                for piece in response.iter_raw():
                    data += piece
                    if len(data) > MAX_JSON_BYTES or time.monotonic() > ends:
                        raise self.no_hub("the list of files is too long, or comes too slowly")
        try:
            return self._parsed(parse_object(data, where=self.where), is_wanted)
        except (ModelError, KeyError, TypeError, AttributeError) as error:
            raise self.no_hub(f"its list of files cannot be read: {getattr(error, 'what', error)}") from error

    def _parsed(self, found: dict[str, Any], is_wanted: Callable[[str], bool]) -> tuple[str, dict[str, HubFile]]:
        commit, files = found["sha"], {}
        if not COMMIT.fullmatch(commit):
            raise KeyError("no commit")
        entries = [entry for entry in found["siblings"] if is_wanted(entry["rfilename"])]
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
        """The address of a file."""
        return f"{self.where}/resolve/{commit}/{percent(name)}"

    @contextmanager
    def get(self, url: str, start: int = 0, file: HubFile | None = None) -> Iterator[tuple[Any, int]]:
        """The answer to a request for what is at `url` from byte `start` on, and the byte that it begins with."""
        headers = {**self._headers, **({"range": f"bytes={start}-"} if start else {})}
        try:
            with self._session.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
                if response.status_code not in (200, 206):
                    raise self._refusal(response.status_code, response.headers, file)
                yield response, self._begin(response, start, file)
        except self._offline:
            what = "the hub is not asked: HF_HUB_OFFLINE is set"
            raise DeviceError(what, where=self.where, next="unset it, and run the command again") from None

    def _begin(self, response: Any, start: int, file: HubFile | None) -> int:
        """The byte that a body begins with, once its headers say that it is the file or a part of it."""
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise self.no_hub(
                f"it sends {_named(file)} encoded as {coding[:40]!r}, and was asked for the bytes as they are"
            )
        if file is None:
            return 0
        begins, size = 0, response.headers.get("content-length", "")
        if response.status_code == 206:
            span = _SPAN.fullmatch(response.headers.get("content-range", f"bytes {start}-/*").strip())
            begins, size = (int(span[1]), span[2]) if span else (start + 1, "")
            if begins > start:
                raise _Cut(f"it was asked for the bytes from {start:,} on, and sends others")
        if size.isdecimal() and int(size) != file.size:
            raise self.no_hub(f"it sends {_named(file)} with {int(size):,} bytes, and lists {file.size:,}")
        return begins

    def _refusal(self, status: int, headers: Any, file: HubFile | None) -> Exception:
        code = headers.get("x-error-code", "")
        if status in BUSY:
            return _BusyHub(status, headers.get("retry-after", "").strip())
        name, login = self.name, "`hf auth login`, or HF_TOKEN in the environment"
        if status in (401, 403) and code != "RepoNotFound":
            what = f"{name.id} is gated, and the hub gives it to no one without a token"
            next = f"ask for access at {self.where}, then name your token: {login}"
            if status == 403:
                what = f"the hub refuses {name.id} to the owner of this token"
                next = f"ask for access at {self.where}, or name another token: {login}"
            return ModelError(what, where=self.where, next=next)
        if status in (401, 404) and code in ("RepoNotFound", ""):
            what = f"the hub has no {name.noun} {name.id}, or it is private"
            next = f"check the name; for a private {name.noun} name a token: {login}"
            return ModelError(what, where=self.where, next=next)
        if code == "RevisionNotFound":
            what = f"{name.id} has no revision {quote(name.revision or MAIN)}"
            return ModelError(what, where=self.where, next=f"its branches and tags: {self.where}/tree/main")
        if status == 404:
            return ModelError(f"a file of {name} is gone", where=self.where, next="run the command again")
        return self.no_hub(f"it answers with status {status} when asked for {_named(file)}")

    def no_hub(self, why: str) -> GenesisError:
        """The error of an answer that no hub gives."""
        what = f"{escape(self.endpoint)} does not answer as a hub does: {escape(why)}"
        return DeviceError(what, where=self.where, next="check HF_ENDPOINT, and the proxies on the way")

    def unreachable(self, error: Exception, file: HubFile | None, here: int) -> GenesisError:
        """The error of a hub that did not answer, or not to the end."""
        what = "the hub cannot be reached"
        if file is not None:
            what = f"the end of {_named(file)} cannot be reached, {here:,} of {file.size:,} bytes are here"
        next = f"check the network and HF_ENDPOINT; {AGAIN}; a model folder on this machine needs no network"
        return DeviceError(f"{what}: {_reason(error)}", where=self.where, next=next)


def _reason(error: Exception) -> str:
    return escape(str(error) or type(error).__name__)[:200]


def _named(file: HubFile | None) -> str:
    return "the list of files" if file is None else quote(file.name)


def _size(path: Path) -> int | None:
    """Bytes of a regular file, None where there is none. Raises: ModelError where that cannot be seen."""
    with boundary(ModelError, "looking into the cache of huggingface_hub", path):
        return path.stat().st_size if exists(path) and path.is_file() else None
