"""The fault helpers themselves: each must do what it says, and the order check must fail on every wrong order."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from genesis.errors import DiskError
from genesis.files.filesystem import Call, FileSystem
from tests.files.faults import FailAt, Recorder, ShortWrites, check_power_loss_order

ROOT = Path(__file__).resolve().parents[2]
TMP, OUT = Path("/out/.tmp-a-00"), Path("/out/a")


def file_calls(name: str) -> list[Call]:
    return [Call(op, TMP / name, size=4 * (op == "write")) for op in ("open", "write", "fsync", "close")]


def good_order() -> list[Call]:
    return [
        Call("mkdir", TMP),
        *file_calls("x"),
        *file_calls("y"),
        *file_calls("manifest.json"),
        Call("fsync_dir", TMP),
        Call("rename", TMP, OUT),
        Call("fsync_dir", OUT.parent),
    ]


def find(calls: list[Call], op: str, name: str) -> int:
    return next(i for i, call in enumerate(calls) if call.op == op and call.path.name == name)


def test_order_check_accepts_the_right_order() -> None:
    check_power_loss_order(good_order(), OUT)


@pytest.mark.parametrize(
    "op, name, message",
    [
        ("fsync", "x", "x was never flushed"),
        ("fsync", "manifest.json", "manifest.json was never flushed"),
        ("fsync_dir", TMP.name, "folder was not flushed"),
        ("fsync_dir", "out", "parent was not flushed"),
        ("rename", TMP.name, "renamed to 0 times"),
    ],
)
def test_order_check_fails_when_a_call_is_missing(op: str, name: str, message: str) -> None:
    calls = good_order()
    del calls[find(calls, op, name)]
    with pytest.raises(AssertionError, match=message):
        check_power_loss_order(calls, OUT)


@pytest.mark.parametrize(
    "op, name, after, message",
    [
        ("fsync", "x", ("open", "manifest.json"), "x was flushed after the manifest was begun"),
        ("write", "x", ("fsync", "x"), "x was written after its flush"),
        ("write", "manifest.json", ("fsync", "manifest.json"), "manifest.json was written after its flush"),
        ("fsync_dir", TMP.name, ("rename", TMP.name), "folder was not flushed"),
        ("rename", TMP.name, ("fsync_dir", "out"), "parent was not flushed"),
    ],
)
def test_order_check_fails_when_a_call_comes_late(op: str, name: str, after: tuple[str, str], message: str) -> None:
    calls = good_order()
    late = calls.pop(find(calls, op, name))
    calls.insert(find(calls, *after) + 1, late)
    with pytest.raises(AssertionError, match=message):
        check_power_loss_order(calls, OUT)


def test_order_check_fails_without_a_manifest_and_on_a_change_after_the_flush() -> None:
    without = [call for call in good_order() if call.path.name != "manifest.json"]
    with pytest.raises(AssertionError, match="no manifest"):
        check_power_loss_order(without, OUT)
    changed = good_order()
    changed.insert(find(changed, "rename", TMP.name), Call("unlink", TMP / "x"))
    with pytest.raises(AssertionError, match="changed after its flush"):
        check_power_loss_order(changed, OUT)


def test_recorder_sees_calls_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    with FileSystem(recorder).create(tmp_path / "x") as file:
        file.write(b"1234")
    assert [(call.op, call.size) for call in recorder.calls] == [("open", 0), ("write", 4), ("fsync", 0), ("close", 0)]


def test_fail_at_fails_once_or_for_ever(tmp_path: Path) -> None:
    fs = FileSystem(once := FailAt(2, errno.EIO))
    fs.mkdir(tmp_path / "a")
    with pytest.raises(DiskError) as caught:
        fs.mkdir(tmp_path / "b")
    assert caught.value.errno == errno.EIO
    assert once.failed is not None and once.failed.path == tmp_path / "b"
    fs.mkdir(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]
    lasting = FileSystem(FailAt(1, forever=True))
    for _ in range(2):
        with pytest.raises(DiskError):
            lasting.mkdir(tmp_path / "d")


def test_short_writes_are_short_and_still_complete(tmp_path: Path) -> None:
    recorder, short = Recorder(), ShortWrites(3)
    fs = FileSystem(lambda call: (recorder(call), short(call))[1])
    with fs.create(tmp_path / "x") as file:
        file.write(b"0123456789")
    assert [call.size for call in recorder.calls if call.op == "write"] == [10, 7, 4, 1]
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_kill_at_leaves_half_a_write(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from genesis.files.filesystem import FileSystem
        from tests.files.faults import KillAt
        with FileSystem(KillAt(2)).create(Path(sys.argv[1])) as file:
            file.write(b"0123456789")
        print("survived")
    """
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x"], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
    assert (tmp_path / "x").read_bytes() == b"01234"
