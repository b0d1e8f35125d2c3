"""Single file-system calls: errors become DiskErrors with the figures a reader needs; short writes lose nothing."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from genesis.errors import DiskError
from genesis.files.filesystem import Call, FileSystem, check_room
from tests.files.faults import FailAt, Recorder, ShortWrites


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_full_disk_shows_needed_and_free_bytes(tmp_path: Path, code: int) -> None:
    fs = FileSystem(FailAt(2, code))
    with pytest.raises(DiskError) as caught, fs.create(tmp_path / "x\x1b[31m") as file:
        file.write(b"12345")
    error = caught.value
    assert (error.exit_code, error.errno) == (8, code)
    assert re.search(r"write of .*/x\\x1b\[31m failed: .* \(needed 5 bytes, free [1-9][\d,]+ bytes\)", error.what)
    assert "free space" in error.next
    assert str(error).isprintable()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the machine has no /dev/full")
def test_a_really_full_device() -> None:
    file = FileSystem().append(Path("/dev/full"))
    with pytest.raises(DiskError, match="needed 3 bytes"):
        file.write(b"abc")
    file.abandon()


@pytest.mark.parametrize("code, advice", [(errno.EACCES, "check the permissions"), (errno.EIO, "check the disk")])
def test_other_errors_say_what_to_do(tmp_path: Path, code: int, advice: str) -> None:
    with pytest.raises(DiskError, match=advice) as caught:
        FileSystem(FailAt(1, code)).mkdir(tmp_path / "x")
    assert os.strerror(code) in caught.value.what


def test_real_errors_of_every_call_become_disk_errors(tmp_path: Path) -> None:
    fs, nothing = FileSystem(), tmp_path / "nothing"
    (tmp_path / "file").write_bytes(b"")
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: fs.create(tmp_path / "file"),
        "rename": lambda: fs.rename(nothing, tmp_path / "x"),
        "unlink": lambda: fs.unlink(nothing),
        "rmdir": lambda: fs.rmdir(nothing),
        "mkdir": lambda: fs.mkdir(tmp_path),
        "fsync_dir": lambda: fs.fsync_dir(nothing),
        "list": lambda: fs.rmtree(nothing),
        "write": lambda: fs.write(1_000_000, nothing, b"x"),
        "fsync": lambda: fs.fsync(1_000_000, nothing),
        "close": lambda: fs.close(1_000_000, nothing),
    }
    for op, call in calls.items():
        with pytest.raises(DiskError, match=f"^{op} of ") as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_short_writes_are_completed(tmp_path: Path, limit: int) -> None:
    data = bytes(range(256)) * 4
    with FileSystem(ShortWrites(limit)).create(tmp_path / "x") as file:
        file.write(data)
        file.write(np.arange(6, dtype=np.int32).data)
    assert (tmp_path / "x").read_bytes() == data + np.arange(6, dtype=np.int32).tobytes()
    assert file.size == 1024 + 24


def test_a_write_that_places_nothing_is_an_error_not_a_loop(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="accepts no more bytes"):
        FileSystem(ShortWrites(0)).create(tmp_path / "x").write(b"abc")


def test_empty_writes_make_no_call(tmp_path: Path) -> None:
    recorder = Recorder()
    with FileSystem(recorder).create(tmp_path / "x") as file:
        file.write(b"")
        file.write(np.zeros((0, 3), np.uint8).data)
    assert [call.op for call in recorder.calls] == ["open", "fsync", "close"]


def test_writer_closes_its_descriptor_on_every_way_out(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    for n in (2, 3, 4):
        with pytest.raises(DiskError), FileSystem(FailAt(n)).create(tmp_path / f"{n}") as file:
            file.write(b"abc")
        assert file.closed
    with pytest.raises(KeyError), FileSystem().create(tmp_path / "x") as file:
        raise KeyError
    with pytest.raises(ValueError, match="is closed"):
        file.write(b"x")
    assert len(os.listdir("/dev/fd")) == before


def test_append_keeps_what_is_there(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        with FileSystem().append(tmp_path / "log") as file:
            file.write(text)
            file.sync()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_makedirs_flushes_each_new_name(tmp_path: Path) -> None:
    recorder = Recorder()
    FileSystem(recorder).makedirs(tmp_path / "a" / "b")
    assert recorder.calls == [
        Call("mkdir", tmp_path / "a"),
        Call("fsync_dir", tmp_path),
        Call("mkdir", tmp_path / "a" / "b"),
        Call("fsync_dir", tmp_path / "a"),
    ]
    FileSystem(FailAt(1)).makedirs(tmp_path / "a" / "b")


def test_makedirs_survives_another_process_making_the_folder(tmp_path: Path) -> None:
    def race(call: Call) -> None:
        if call.op == "mkdir":
            os.mkdir(call.path)

    FileSystem(race).makedirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_rmtree_follows_no_link_and_keeps_the_order(tmp_path: Path) -> None:
    outside, doomed = tmp_path / "outside", tmp_path / "doomed"
    (doomed / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").write_text("kept")
    for name in ("a", "b", "sub/c", "z"):
        (doomed / name).write_text("x")
    (doomed / "link").symlink_to(outside)
    recorder = Recorder()
    FileSystem(recorder).rmtree(doomed, last=("b", "a", "absent"))
    assert [call.path.name for call in recorder.calls] == ["link", "c", "sub", "z", "b", "a", "doomed"]
    assert (outside / "kept").read_text() == "kept"
    assert not doomed.exists()


def test_check_room(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(DiskError, match=r"needed 1,152,921,504,606,846,976 bytes, free [1-9][\d,]+ bytes"):
        check_room(tmp_path / "not" / "there", 1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems flush in another way")
def test_a_folder_that_cannot_be_flushed_is_accepted_only_where_the_system_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    code = errno.EINVAL
    FileSystem().fsync_dir(tmp_path)
    code = errno.EIO
    with pytest.raises(DiskError):
        FileSystem().fsync_dir(tmp_path)
