"""Commits of files and folders: order, every call failing in turn, replacement, removal, sweeping."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from genesis.errors import DiskError, ModelError
from genesis.files import atomic as committing
from genesis.files.atomic import (
    AtomicFolder,
    FolderUpdate,
    read_manifest,
    remove_folder,
    sweep,
    verify_manifest,
    write_file,
)
from genesis.files.filesystem import FileSystem
from tests.files.faults import MANIFEST, MARKER, FailAt, Recorder, ShortWrites, check_power_loss_order

FILES = {"config.json": b"{}", "weights.bin": bytes(range(256)) * 64, "empty": b""}
TOKEN = "0123456789abcdef"


def save(target: Path, version: int, *, fs: FileSystem | None = None, replace: bool = False) -> None:
    """Commit a folder whose content tells its version."""
    with AtomicFolder(target, fs=fs or FileSystem(), replace=replace, metadata={"version": version}) as folder:
        for name, data in FILES.items():
            folder.write(name, data + str(version).encode())


def version_of(folder: Path) -> int:
    """The version of a committed folder, every byte of it checked."""
    manifest = verify_manifest(folder)
    version = manifest.metadata["version"]
    for name, data in FILES.items():
        assert (folder / name).read_bytes() == data + str(version).encode()
    assert sorted(os.listdir(folder)) == sorted([*FILES, MANIFEST])
    assert isinstance(version, int)
    return version


class Stubborn:
    """Lets no file be removed, as on a disk that was remounted read-only."""

    def __call__(self, call: committing.Call) -> None:
        if call.op == "unlink":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def count_calls(action: Callable[[FileSystem], None]) -> int:
    recorder = Recorder()
    action(FileSystem(recorder))
    return len(recorder.calls)


def test_a_folder_appears_whole_with_its_manifest(tmp_path: Path) -> None:
    target = tmp_path / "run" / "checkpoint-1"
    with AtomicFolder(target, metadata={"step": 1}) as folder:
        folder.write("a", b"abc")
        with folder.create("b") as file:
            file.write(b"12")
            file.write(b"34")
        folder.metadata["note"] = "é"
        assert folder.existing() == []
        assert not target.exists()
    manifest = verify_manifest(target)
    assert manifest.metadata == {"step": 1, "note": "é"}
    assert {name: record.size for name, record in manifest.files.items()} == {"a": 3, "b": 4}
    assert sorted(os.listdir(target)) == ["a", "b", MANIFEST]
    assert os.listdir(target.parent) == ["checkpoint-1"]


def test_the_exact_order_of_a_save(tmp_path: Path) -> None:
    recorder = Recorder()
    with AtomicFolder(tmp_path / "out", fs=FileSystem(recorder)) as folder:
        folder.write("a", b"abc")
        folder.write("b", b"")
    name = recorder.calls[0].path.name
    assert [(call.op, call.path.name) for call in recorder.calls] == [
        ("mkdir", name),
        *[(op, MARKER) for op in ("open", "write", "fsync", "close")],
        *[(op, "a") for op in ("open", "write", "fsync", "close")],
        *[(op, "b") for op in ("open", "fsync", "close")],
        *[(op, MANIFEST) for op in ("open", "write", "fsync", "close")],
        ("unlink", MARKER),
        ("fsync_dir", name),
        ("rename", name),
        ("fsync_dir", tmp_path.name),
    ]
    assert name.startswith(".tmp-out-")
    assert recorder.calls[-2].target == tmp_path / "out"


def test_an_old_version_goes_when_the_new_one_has_reached_the_disk(tmp_path: Path) -> None:
    """Each of the three renames is flushed before the next one: a power loss takes one step back, not two."""
    save(tmp_path / "out", 1)
    recorder = Recorder()
    save(tmp_path / "out", 2, fs=FileSystem(recorder), replace=True)
    renames = [call for call in recorder.calls if call.op == "rename"]
    old, new, doomed = renames
    assert (old.path, new.target, doomed.path) == (tmp_path / "out", tmp_path / "out", old.target)
    assert old.target is not None and old.target.name.startswith(".old-out-")
    assert doomed.target is not None and doomed.target.name.startswith(".del-out-")
    for rename in renames:
        following = recorder.calls[recorder.calls.index(rename) + 1]
        assert (following.op, following.path) == ("fsync_dir", tmp_path)


@pytest.mark.parametrize("replace", [False, True])
def test_the_order_survives_power_loss(tmp_path: Path, replace: bool) -> None:
    if replace:
        save(tmp_path / "out", 1)
    recorder = Recorder()
    save(tmp_path / "out", 2, fs=FileSystem(recorder), replace=replace)
    check_power_loss_order(recorder.calls, tmp_path / "out")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_every_call_of_a_save_failing_in_turn(tmp_path: Path, code: int) -> None:
    total = count_calls(lambda fs: save(tmp_path / "probe", 0, fs=fs))
    assert total > 20
    save(tmp_path / "older", 1)
    for n in range(1, total + 1):
        target = tmp_path / f"new-{n}"
        with pytest.raises(DiskError) as caught:
            save(target, 2, fs=FileSystem(FailAt(n, code)))
        assert caught.value.exit_code == 8
        assert ("needed" in caught.value.what) == (code == errno.ENOSPC)
        assert version_of(tmp_path / "older") == 1
        # Only the last call, the flush of the parent, comes after the commit.
        assert target.exists() == (n == total)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    save(tmp_path / "new-1", 3)
    assert version_of(tmp_path / "new-1") == 3


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
def test_every_call_of_a_replacement_failing_in_turn(tmp_path: Path, forever: bool) -> None:
    target = tmp_path / "out"
    save(target, 0)
    total = count_calls(lambda fs: save(target, 1, fs=fs, replace=True))
    assert total > 25
    for n in range(1, total + 1):
        before = version_of(target)
        with pytest.raises(DiskError):
            save(target, before + 1, fs=FileSystem(FailAt(n, errno.EIO, forever=forever)), replace=True)
        if not forever:
            assert version_of(target) in (before, before + 1)
        # Where the disk also refuses the way back, the next start finds it.
        sweep(tmp_path)
        assert version_of(target) in (before, before + 1)
        assert os.listdir(tmp_path) == ["out"]


def test_short_writes_change_nothing(tmp_path: Path) -> None:
    save(tmp_path / "out", 1, fs=FileSystem(ShortWrites(100)))
    assert version_of(tmp_path / "out") == 1


def test_an_error_of_the_caller_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with AtomicFolder(tmp_path / "out") as folder:
            folder.write("a", b"abc")
            folder.create("b").write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_misuse_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    def write_twice(name: str) -> None:
        with AtomicFolder(tmp_path / "out") as folder:
            folder.write("a", b"")
            folder.write(name, b"")

    for name in (MANIFEST, MARKER, "sub/sub/x", "a/x", "a"):
        with pytest.raises(ValueError, match=r"taken|too many folders"):
            write_twice(name)
    with pytest.raises(ModelError, match="absolute"), AtomicFolder(tmp_path / "out") as folder:
        folder.write("/etc/x", b"")
    with pytest.raises(ValueError, match="'a' is not finished"), AtomicFolder(tmp_path / "out") as folder:
        folder.create("a")
    with pytest.raises(ValueError, match="not in the new folder"), AtomicFolder(tmp_path / "out") as folder:
        folder.remove("a")
    with pytest.raises(TypeError, match="JSON"), AtomicFolder(tmp_path / "out", metadata={"x": {1}}):
        pass
    assert os.listdir(tmp_path) == []


def test_an_existing_target_is_an_error_unless_replacing(tmp_path: Path) -> None:
    save(tmp_path / "out", 1)
    with pytest.raises(DiskError, match="already exists"):
        save(tmp_path / "out", 2)
    assert version_of(tmp_path / "out") == 1
    save(tmp_path / "out", 2, replace=True)
    assert version_of(tmp_path / "out") == 2
    assert os.listdir(tmp_path) == ["out"]


def test_a_target_that_appears_during_the_save_is_not_overwritten(tmp_path: Path) -> None:
    def race() -> None:
        with AtomicFolder(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("theirs")

    with pytest.raises(DiskError, match="already exists"):
        race()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.mark.parametrize("kind", ["folder", "file", "link", "foreign manifest"])
def test_what_is_not_ours_is_neither_replaced_nor_removed(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    save(tmp_path / "ours", 1)
    if kind == "file":
        target.write_text("theirs")
    elif kind == "link":
        target.symlink_to(tmp_path / "ours")
    else:
        target.mkdir()
        (target / "theirs").write_text("theirs")
    if kind == "foreign manifest":
        (target / MANIFEST).write_text('{"files": {}}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ModelError):
        save(target, 2, replace=True)
    with pytest.raises(ModelError):
        remove_folder(target)
    assert sorted(tmp_path.rglob("*")) == before
    assert version_of(tmp_path / "ours") == 1


def test_removal_is_one_rename_then_the_rest(tmp_path: Path) -> None:
    save(tmp_path / "out", 1)
    recorder = Recorder()
    remove_folder(tmp_path / "out", fs=FileSystem(recorder))
    assert os.listdir(tmp_path) == []
    first, second, *unlinks, manifest, last = recorder.calls
    assert (first.op, first.path, second.op) == ("rename", tmp_path / "out", "fsync_dir")
    assert {call.op for call in unlinks} == {"unlink"}
    assert (manifest.op, manifest.path.name, last.op) == ("unlink", MANIFEST, "rmdir")


def test_every_call_of_a_removal_failing_in_turn(tmp_path: Path) -> None:
    save(tmp_path / "probe", 1)
    total = count_calls(lambda fs: remove_folder(tmp_path / "probe", fs=fs))
    for n in range(1, total + 1):
        save(tmp_path / "out", 1)
        with pytest.raises(DiskError):
            remove_folder(tmp_path / "out", fs=FileSystem(FailAt(n, errno.EIO)))
        if n <= 3:  # the rename, the flush of the parent, the first file: nothing is lost, and it has its name
            assert version_of(tmp_path / "out") == 1
            assert os.listdir(tmp_path) == ["out"]
            remove_folder(tmp_path / "out")
        sweep(tmp_path)
        assert os.listdir(tmp_path) == []


class TestWhatCannotBeRemoved:
    """It keeps its name and every byte, and the error says what is in the way."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        save(tmp_path / "out", 1)
        return tmp_path / "out"

    def refuse(self, out: Path, what: str) -> None:
        with pytest.raises(ModelError, match=what) as caught:
            remove_folder(out)
        assert caught.value.next == "remove it yourself"
        assert os.listdir(out.parent) == ["out"]

    @pytest.mark.parametrize("name", ["notes.txt", "plots"])
    def test_files_of_others(self, out: Path, name: str) -> None:
        if name == "plots":
            (out / name).mkdir()
        else:
            (out / name).write_text("mine")
        self.refuse(out, f"it contains '{name}', which was not saved with it")

    def test_a_link_in_place_of_a_file(self, out: Path) -> None:
        (out / "empty").unlink()
        (out / "empty").symlink_to("config.json")
        self.refuse(out, "'empty' is not a regular file")

    def test_a_read_only_folder(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `chmod -w` leaves it for all but root."""
        monkeypatch.setattr(committing.os, "access", lambda path, mode, **how: Path(path) != out)
        monkeypatch.setattr(committing.os, "supports_effective_ids", {committing.os.access})
        self.refuse(out, "it is not writable")

    def test_an_immutable_file(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `chattr +i` or `chflags uchg` leave it."""
        monkeypatch.setattr(committing, "_is_fixed", lambda path, found: path.name == "weights.bin")
        self.refuse(out, "'weights.bin' is immutable")

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="flags of Linux's file systems")
    def test_the_flags_of_a_file_are_read(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for flags, fixed in ((0x10, True), (0x20, True), (0x80000, False)):
            found = flags.to_bytes(8, sys.byteorder)
            monkeypatch.setattr(committing.fcntl, "ioctl", lambda *args, found=found: found)
            assert committing._is_fixed(out / "empty", (out / "empty").lstat()) == fixed

    def test_a_file_of_another_user_in_a_sticky_folder(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out.chmod(0o1777)
        monkeypatch.setattr(committing.os, "geteuid", lambda: os.getuid() + 1)
        self.refuse(out, "belongs to another user")
        out.chmod(0o777)
        remove_folder(out)


class TestSweep:
    """Leftovers of dead writers go, old versions come back, and nothing else is touched."""

    def test_temporary_folders_of_every_age_are_removed(self, tmp_path: Path) -> None:
        text = b"Genesis makes this folder while it writes, and removes it.\n"
        for name, files in {
            "just made": {},
            "marker cut": {MARKER: text[:10]},
            "marker empty": {MARKER: b""},
            "files": {MARKER: text, "weights": b"half", MANIFEST: b'{"files'},
        }.items():
            folder = tmp_path / f".tmp-{name}-{TOKEN}"
            folder.mkdir()
            for file, data in files.items():
                (folder / file).write_bytes(data)
        save(tmp_path / "x", 1)
        (tmp_path / "x").rename(tmp_path / f".tmp-x-{TOKEN}")
        save(tmp_path / "y", 1)
        (tmp_path / "y").rename(tmp_path / f".del-y-{TOKEN}")
        assert len(sweep(tmp_path)) == 6
        assert os.listdir(tmp_path) == []

    def test_the_old_version_comes_back_when_the_new_one_is_not_there(self, tmp_path: Path) -> None:
        save(tmp_path / "out", 1)
        (tmp_path / "out").rename(tmp_path / f".old-out-{TOKEN}")
        assert sweep(tmp_path) == [f".old-out-{TOKEN}"]
        assert version_of(tmp_path / "out") == 1

    def test_the_old_version_goes_when_the_new_one_is_there(self, tmp_path: Path) -> None:
        save(tmp_path / "out", 1)
        (tmp_path / "out").rename(tmp_path / f".old-out-{TOKEN}")
        save(tmp_path / "out", 2)
        sweep(tmp_path)
        assert os.listdir(tmp_path) == ["out"]
        assert version_of(tmp_path / "out") == 2

    def test_what_is_not_ours_stays(self, tmp_path: Path) -> None:
        save(tmp_path / "ours", 1)
        foreign = {
            f".tmp-full-{TOKEN}": {"theirs": "x"},
            f".tmp-othermarker-{TOKEN}": {MARKER: "another text", "theirs": "x"},
            f".tmp-longmarker-{TOKEN}": {MARKER: "Genesis" * 100},
            f".tmp-manifest-{TOKEN}": {MANIFEST: '{"genesis_manifest": 1}'},
            f".old-empty-{TOKEN}": {},
            f".old-marker-{TOKEN}": {MARKER: "Genesis makes this"},
            ".tmp-x": {MARKER: ""},
            f"tmp-x-{TOKEN}": {MARKER: ""},
            f".tmp-{TOKEN}": {MARKER: ""},
            ".tmp-x-0123456789ABCDEF": {MARKER: ""},
            "checkpoint-1": {"theirs": "x"},
        }
        for name, files in foreign.items():
            (tmp_path / name).mkdir()
            for file, text in files.items():
                (tmp_path / name / file).write_text(text)
        (tmp_path / f".tmp-link-{TOKEN}").symlink_to(tmp_path / "ours")
        (tmp_path / f".tmp-file-{TOKEN}").write_text("x")
        (tmp_path / f".tmp-linked-{TOKEN}").mkdir()
        (tmp_path / f".tmp-linked-{TOKEN}" / MARKER).symlink_to("/dev/null")
        before = sorted(tmp_path.rglob("*"))
        assert sweep(tmp_path) == []
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("kind", ["tmp", "del", "old"])
    def test_what_cannot_be_removed_stays_with_a_warning(self, tmp_path: Path, kind: str) -> None:
        save(tmp_path / "out", 1)
        leftover = tmp_path / f".{kind}-out-{TOKEN}"
        shutil.copytree(tmp_path / "out", leftover)
        before, warned = sorted(tmp_path.rglob("*")), list[str]()
        assert sweep(tmp_path, fs=FileSystem(Stubborn()), warn=warned.append) == []
        assert [f"{leftover} was left by a dead run and is not removed" in text for text in warned] == [True]
        assert sorted(tmp_path.rglob("*")) == before
        assert sweep(tmp_path) == [leftover.name]

    def test_a_missing_folder_has_no_leftovers(self, tmp_path: Path) -> None:
        assert sweep(tmp_path / "nothing") == []


class TestFolderUpdate:
    """Files added to a folder that also holds other things."""

    def test_new_files_replace_old_ones_and_leave_the_rest(self, tmp_path: Path) -> None:
        for name in ("config.json", "model.safetensors", "metrics.jsonl"):
            (tmp_path / name).write_text("old")
        with FolderUpdate(tmp_path) as update:
            assert update.existing() == ["config.json", "metrics.jsonl", "model.safetensors"]
            update.write("config.json", b"new")
            update.write("model-00001-of-00002.safetensors", b"new")
            update.remove("model.safetensors")
            update.remove("absent")
            assert (tmp_path / "config.json").read_text() == "old"
        found = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert found == {"config.json": "new", "model-00001-of-00002.safetensors": "new", "metrics.jsonl": "old"}

    def test_all_is_flushed_before_the_first_rename(self, tmp_path: Path) -> None:
        recorder = Recorder()
        with FolderUpdate(tmp_path, fs=FileSystem(recorder)) as update:
            update.write("a", b"1")
            update.write("b", b"2")
        ops = [(call.op, call.path.name) for call in recorder.calls]
        first = ops.index(("rename", "a"))
        assert ops.index(("fsync", "a")) < ops.index(("fsync", "b")) < first
        assert ops[first : first + 3] == [("rename", "a"), ("rename", "b"), ("fsync_dir", tmp_path.name)]

    def test_an_error_leaves_the_folder_as_it_was(self, tmp_path: Path) -> None:
        def broken() -> None:
            with FolderUpdate(tmp_path) as update:
                update.write("a", b"new")
                update.remove("a")
                raise KeyError

        (tmp_path / "a").write_text("old")
        with pytest.raises(KeyError):
            broken()
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}

    def test_unsafe_removals_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("kept")
        for name in ("../secret", "sub/x"):
            with pytest.raises(ValueError, match=r"'\.\.'|contains a folder"), FolderUpdate(tmp_path / "out") as update:
                update.remove(name)
        assert (tmp_path / "secret").read_text() == "kept"


def test_write_file_replaces_and_makes_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "name: with anything.json"
    for text in (b"one", b"two"):
        write_file(path, text)
        assert path.read_bytes() == text
        assert os.listdir(path.parent) == [path.name]


def test_every_call_of_write_file_failing_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_file(path, b"0")
    total = count_calls(lambda fs: write_file(path, b"1", fs=fs))
    assert total > 10
    raised = 0
    for n in range(1, total + 1):
        before = path.read_bytes()
        after = str(n).encode()
        try:
            write_file(path, after, fs=FileSystem(FailAt(n, errno.EIO)))
            assert path.read_bytes() == after
        except DiskError:
            raised += 1
            assert path.read_bytes() in (before, after)
        sweep(tmp_path)
        assert os.listdir(tmp_path) == ["x"]
    # Removing the emptied temporary folder, two calls, may fail without harm; all others must not.
    assert raised == total - 2


def test_read_manifest_looks_at_no_file(tmp_path: Path) -> None:
    save(tmp_path / "out", 7)
    (tmp_path / "out" / "weights.bin").write_bytes(b"damaged")
    assert read_manifest(tmp_path / "out").metadata == {"version": 7}
    with pytest.raises(ModelError, match=r"weights\.bin"):
        verify_manifest(tmp_path / "out")
