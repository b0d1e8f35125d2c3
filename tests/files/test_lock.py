"""The lock on an output folder: one of many wins, the others learn who, and nothing that died holds it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from genesis.errors import BusyError, DiskError
from genesis.files.lock import LOCK_NAME, FolderLock

ROOT = Path(__file__).resolve().parents[2]


# A forked child of a process with threads could hang in a lock that one of them held.
ENV = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Holder:
    """A process that tries to hold a folder's lock; `answer` is how that went, for `fork` see lock_worker."""

    def __init__(self, folder: Path, mode: str) -> None:
        command = [sys.executable, "-m", "tests.files.lock_worker", str(folder), mode]
        self._process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.answer: dict[str, Any] = json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=30)

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(timeout=30)


Holders = Callable[[str], Holder]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holders]:
    """Makes holders of `tmp_path` and ends them all."""
    made: list[Holder] = []

    def make(mode: str) -> Holder:
        made.append(Holder(tmp_path, mode))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_one_of_twenty_at_once_wins(tmp_path: Path) -> None:
    # What a killed run left there must not be taken for the winner's name.
    (tmp_path / LOCK_NAME).write_text(json.dumps({"pid": 2**31 - 1, "host": socket.gethostname()}))
    command = [sys.executable, "-m", "tests.files.lock_worker", str(tmp_path), "crowd"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60, check=True)
    answers = json.loads(done.stdout)
    winners = [answer for answer in answers if answer["won"]]
    losers = [answer for answer in answers if not answer["won"]]
    assert (len(winners), len(losers)) == (1, 19)
    for answer in losers:
        assert answer["exit_code"] == 11
        assert f"process {winners[0]['pid']} on host {socket.gethostname()}" in answer["message"]
        assert str(tmp_path) in answer["message"]


def test_a_second_holder_in_this_process_is_refused(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as first:
        inside = first.held
        with pytest.raises(BusyError, match=f"process {os.getpid()} on host") as caught:
            FolderLock(tmp_path).acquire()
        assert caught.value.next
        with pytest.raises(ValueError, match="already held"):
            first.acquire()
    assert (inside, first.held) == (True, False)
    first.release()
    with FolderLock(tmp_path):
        pass
    assert (tmp_path / LOCK_NAME).read_bytes() == b""


def test_a_killed_holder_is_recovered_from_silently(
    tmp_path: Path, holder: Holders, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = holder("hold")
    pid = killed.answer["pid"]
    with pytest.raises(BusyError, match=f"process {pid}"):
        FolderLock(tmp_path).acquire()
    killed.kill()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == pid
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert capsys.readouterr() == ("", "")


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_holder(tmp_path: Path, holder: Holders) -> None:
    killed = holder("fork")
    assert killed.answer["won"]
    with pytest.raises(BusyError):
        FolderLock(tmp_path).acquire()
    killed.kill()
    end = time.monotonic() + 20  # on a busy machine the child may not have run yet, and lets go when it does
    while True:
        try:
            FolderLock(tmp_path).acquire()
            break
        except BusyError:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize("started", ["1970-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00", "", "\x1b[31m"])
def test_no_clock_and_no_content_decides(tmp_path: Path, started: str) -> None:
    """A left file of any age names this living process, and still does not lock."""
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started})
    (tmp_path / LOCK_NAME).write_text(text)
    with FolderLock(tmp_path):
        pass
    with open(tmp_path / LOCK_NAME, "r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(text)
        other.flush()
        with pytest.raises(BusyError) as caught:
            FolderLock(tmp_path).acquire()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": -1}', b'{"pid": true, "host": 1}', b"\xff" * 10_000])
def test_an_unreadable_holder_is_unknown(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.files.lock._PAUSE_S", 0)
    (tmp_path / LOCK_NAME).write_bytes(content)
    with open(tmp_path / LOCK_NAME) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match=re.escape(str(tmp_path))):
            FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("before", ["", "dead", "{"])
def test_a_holder_who_has_not_said_its_name_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Between taking the lock and writing its name, a holder's file still says what the one before it said."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    path = tmp_path / LOCK_NAME
    host = socket.gethostname()
    path.write_text(json.dumps({"pid": dead.pid, "host": host}) if before == "dead" else before)
    pauses: list[float] = []

    def holder_writes(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            path.write_text(json.dumps({"pid": 1, "host": host}))

    monkeypatch.setattr("time.sleep", holder_writes)
    with open(path) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match=f"process 1 on host {host}"):
            FolderLock(tmp_path).acquire()
    assert len(pauses) == 3


def test_a_removed_lock_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removes the file between our opening and locking: the lock would be on a file that nobody sees."""
    flock = fcntl.flock
    calls: list[int] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / LOCK_NAME).unlink()
        calls.append(operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with FolderLock(tmp_path):
        assert len(calls) == 2
        with pytest.raises(BusyError):
            FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES])
def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(DiskError, match="cannot lock files") as caught:
        FolderLock(tmp_path).acquire()
    assert caught.value.exit_code == 8
    assert "local disk" in caught.value.next
    assert len(os.listdir("/dev/fd")) == before


def test_the_folder_is_made_and_hostile_lock_files_are_refused(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_NAME).is_file()
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError):
        FolderLock(tmp_path / "file").acquire()
    for name, make in (("link", lambda path: path.symlink_to(tmp_path / "file")), ("fifo", os.mkfifo)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / LOCK_NAME)
        with pytest.raises(DiskError):
            FolderLock(tmp_path / name).acquire()
    assert (tmp_path / "file").read_text() == "x"
