"""The cache: made once, found again, made again when damaged, shared by processes, nothing half left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from genesis.data import cache as cache_module
from genesis.data.cache import Cache
from genesis.errors import DiskError
from genesis.io.files import FolderWriter
from genesis.io.lock import FolderLock

KEY = {"format": 1, "documents": "abc"}
FILES = {"tokens.bin": bytes(range(256)) * 40, "offsets.bin": b"\x01" * 16}
SHARED = """
import sys, time
from genesis.data.cache import Cache

def make(folder):
    time.sleep(0.3)
    folder.write("tokens.bin", b"x" * 100000)

sys.stdin.readline()
print(Cache(sys.argv[1]).get("tokens", {"format": 1}, make).state)
"""


class Maker:
    """Writes `FILES`, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: FolderWriter) -> None:
        self.calls += 1
        for name, data in FILES.items():
            folder.write(name, data)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    make = Maker()
    first = Cache(tmp_path / "deep/cache").get("tokens", KEY, make)
    second = Cache(tmp_path / "deep/cache").get("tokens", KEY, make)
    assert (first.state, second.state, make.calls) == ("made", "found", 1)
    assert first.folder == second.folder and content(first.folder) == FILES


def test_other_kinds_and_keys_are_other_entries(tmp_path: Path) -> None:
    make = Maker()
    entries = [("tokens", KEY), ("gzip", KEY), ("tokens", KEY | {"format": 2}), ("tokens", {**KEY, "more": None})]
    folders = {Cache(tmp_path).get(kind, key, make).folder for kind, key in entries}
    assert len(folders) == make.calls == 4


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda path: flip(path, path.stat().st_size // 2),
    "flipped last bit": lambda path: flip(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "removed": lambda path: path.unlink(),
    "a folder": replace_by_folder,
    "a link": replace_by_link,
}


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again_once(tmp_path: Path, name: str, damage: str) -> None:
    make = Maker()
    folder = Cache(tmp_path).get("tokens", KEY, make).folder
    DAMAGE[damage](folder / name)
    again = Cache(tmp_path).get("tokens", KEY, make)
    assert (again.state, again.folder, make.calls) == ("made again", folder, 2)
    assert content(folder) == FILES
    assert Cache(tmp_path).get("tokens", KEY, make).state == "found"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [".lock", folder.name, *(["elsewhere"] if damage == "a link" else [])]
    )


def test_every_byte_of_an_entry_is_watched(tmp_path: Path) -> None:
    make = Maker()
    folder = Cache(tmp_path).get("tokens", KEY, make).folder
    for name in ("offsets.bin", "manifest.json"):
        for place in range((folder / name).stat().st_size):
            flip(folder / name, place)
            assert not cache_module._is_whole(folder, KEY), (name, place)
            flip(folder / name, place)
    assert cache_module._is_whole(folder, KEY)


@pytest.mark.parametrize("stands_there", ["a file", "a link to a folder", "an empty folder", "another entry"])
def test_what_is_no_entry_gives_way(tmp_path: Path, stands_there: str) -> None:
    make = Maker()
    cache = tmp_path / "cache"
    folder = Cache(cache).get("tokens", KEY, make).folder
    other = Cache(cache).get("tokens", {"other": 1}, make).folder
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    shutil.rmtree(folder)
    put: dict[str, Callable[[], object]] = {
        "a file": lambda: folder.write_text("x"),
        "a link to a folder": lambda: folder.symlink_to(precious),
        "an empty folder": lambda: folder.mkdir(),
        "another entry": lambda: shutil.copytree(other, folder),
    }
    put[stands_there]()
    assert Cache(cache).get("tokens", KEY, make).state == "made again"
    assert content(folder) == FILES and not folder.is_symlink()
    assert (precious / "file").read_text() == "kept"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: FolderWriter) -> None:
        folder.write("tokens.bin", b"half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        Cache(tmp_path).get("tokens", KEY, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert Cache(tmp_path).get("tokens", KEY, Maker()).state == "made"


def test_leftovers_of_a_dead_process_are_swept(tmp_path: Path) -> None:
    leftover = tmp_path / ".tmp-tokens-abc-0123456789abcdef"
    leftover.mkdir()
    (leftover / ".genesis-temporary").write_bytes(b"")
    stranger = tmp_path / ".tmp-stranger-0123456789abcdef"
    stranger.mkdir()
    (stranger / "file").write_text("not ours")
    Cache(tmp_path).get("tokens", KEY, Maker())
    assert not leftover.exists() and (stranger / "file").exists()


def test_a_disk_that_gives_other_bytes_back_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    monkeypatch.setattr(cache_module, "_is_whole", lambda entry, key: False)
    with pytest.raises(DiskError, match="read back as other bytes") as caught:
        Cache(tmp_path).get("tokens", KEY, make)
    assert caught.value.exit_code == 8 and make.calls == 1


def test_a_folder_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError):
        Cache(tmp_path / "file/cache").get("tokens", KEY, Maker())


def test_a_finished_entry_is_used_without_the_lock(tmp_path: Path) -> None:
    make = Maker()
    Cache(tmp_path).get("tokens", KEY, make)
    with FolderLock(tmp_path):
        assert Cache(tmp_path).get("tokens", KEY, make).state == "found"


def test_who_waits_for_the_lock_finds_what_the_holder_made(tmp_path: Path) -> None:
    make, states = Maker(), []
    lock = FolderLock(tmp_path)
    lock.acquire()
    waiting = threading.Thread(target=lambda: states.append(Cache(tmp_path).get("tokens", KEY, make).state))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and make.calls == 0
    lock.release()
    waiting.join(30)
    assert (states, make.calls) == (["made"], 1)


def test_of_several_processes_one_makes_the_entry(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    states = sorted(process.communicate(timeout=60)[0].strip() for process in processes)
    assert states == ["found", "found", "found", "made"]
