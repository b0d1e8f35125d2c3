"""The cache: made once, found again, rebuilt when damaged, shared by processes, nothing left half done."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from genesis.errors import DiskError
from genesis.files import cache as entry_module
from genesis.files import lock as lock_module
from genesis.files import trust as trust_module
from genesis.files.cache import Cache, Entry, EntryWriter
from genesis.files.filesystem import DEFAULT, Call
from genesis.files.lock import EntryLock, FolderLock
from genesis.files.trust import Refused, open_folder, private_folder

KEY = {"format": 1, "documents": "abc"}
PARTS = {"tokens.bin": bytes(range(256)) * 40, "offsets.bin": b"\x01" * 16, "empty": b""}
SHARED = """
import sys, time
from genesis.files.cache import Cache

def make(writer):
    time.sleep(0.3)
    writer.write("tokens.bin", b"x" * 100000)

sys.stdin.readline()
print(Cache(sys.argv[1]).get("tokens", {"format": 1}, make).state)
"""


class Builder:
    """Writes `PARTS`, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, writer: EntryWriter) -> None:
        self.calls += 1
        for name, data in PARTS.items():
            writer.write(name, data)


def content(entry: Entry) -> dict[str, bytes]:
    return {name: bytes(entry.part(name)) for name in entry.names()}


def put(folder: Path) -> Path:
    """A cache with one entry; its file."""
    Cache(folder).put("one", PARTS)
    return folder / "one"


def opened(folder: Path) -> Path:
    """The same with a file that an older version wrote for the key `KEY`."""
    Cache(folder).get("tokens", KEY, Builder())
    (file,) = folder.iterdir()
    return file


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    make = Builder()
    first = Cache(tmp_path / "deep/cache").get("tokens", KEY, make)
    second = Cache(tmp_path / "deep/cache").get("tokens", KEY, make)
    assert (first.state, second.state, make.calls) == ("made", "found", 1)
    assert content(first.entry) == content(second.entry) == PARTS


def test_modes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        put(tmp_path / "deep/cache")
    finally:
        os.umask(before)
    modes = {path: (tmp_path / path).stat().st_mode & 0o777 for path in ("deep", "deep/cache", "deep/cache/one")}
    assert modes == {"deep": 0o755, "deep/cache": 0o700, "deep/cache/one": 0o600}


def test_other_kinds_and_keys_are_other_entries(tmp_path: Path) -> None:
    make = Builder()
    for kind, key in [("tokens", KEY), ("gzip", KEY), ("tokens", KEY | {"format": 2}), ("tokens", {**KEY, "more": 0})]:
        Cache(tmp_path).get(kind, key, make)
    assert len(list(tmp_path.iterdir())) == make.calls == 4


def test_an_entry_under_another_name_is_none(tmp_path: Path) -> None:
    file = put(tmp_path)
    file.rename(tmp_path / "two")
    assert Cache(tmp_path).find("two") is None


def test_large_entries_are_mapped_and_outlive_their_file(tmp_path: Path) -> None:
    large = os.urandom(1 << 20) * 3
    cache = Cache(tmp_path)
    cache.put("one", {"a": large, "b": b"end"})
    entry = cache.find("one")
    assert entry is not None
    (tmp_path / "one").unlink()
    assert entry.part("a") == large and entry.part("b") == b"end" and entry.part("a").readonly


def test_every_flipped_bit_and_every_cut_is_seen(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("one", {"facts": b'{"warps": 4}', "image": b"code"})
    file = tmp_path / "one"
    data = file.read_bytes()
    with open(file, "r+b", buffering=0) as raw:
        for bit in range(8 * len(data)):
            at, right = bit // 8, data[bit // 8]
            os.pwrite(raw.fileno(), bytes([right ^ 1 << bit % 8]), at)
            assert cache.find("one") is None, bit
            os.pwrite(raw.fileno(), bytes([right]), at)
        assert cache.find("one") is not None
        for size in reversed(range(len(data))):
            raw.truncate(size)
            assert cache.find("one") is None, size
    for longer in (data + b"\0", data + data, b"\0" + data):
        file.write_bytes(longer)
        assert cache.find("one") is None
    file.write_bytes(data)
    assert cache.find("one") is not None
    assert cache.find("one", limit=len(data) - 1) is None


def test_a_checksum_alone_makes_no_entry(tmp_path: Path) -> None:
    """Files of right checksum whose index is not the one that their parts give."""
    import hashlib

    cache, pad = Cache(tmp_path), entry_module.MARK + bytes(48)
    good = b'{"entry":"one","parts":[["a",4]]}'
    indexes = [
        good.replace(b"4", b"-4"),
        good.replace(b"4", b"5000000000"),
        good.replace(b"4", b"true"),
        good.replace(b'"one"', b'"two"'),
        good.replace(b",", b", ", 1),
        b'{"entry":"one","parts":[["a",4],["a",4]]}',
        b'{"entry":"one","parts":' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"entry":"one"}',
        b"[]",
        b"\xff",
        b"",
    ]
    for index in [good, *indexes]:
        body = pad + b"code" + bytes(60) + index + entry_module.LENGTH.pack(len(index))
        (tmp_path / "one").write_bytes(body + hashlib.sha256(body).digest())
        (tmp_path / "one").chmod(0o600)
        assert (cache.find("one") is not None) == (index is good), index[:80]
    body = pad + entry_module.LENGTH.pack(1 << 63)
    (tmp_path / "one").write_bytes(body + hashlib.sha256(body).digest())
    assert cache.find("one") is None


def by_folder(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)


def by_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def by_hard_link(path: Path) -> None:
    os.link(path, path.parent.parent / "elsewhere")


def by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_socket(path: Path) -> None:
    path.unlink()
    before = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


BREAKS: dict[str, Callable[[Path], object]] = {
    "a folder": by_folder,
    "a link": by_link,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a hard link": by_hard_link,
    "a FIFO": by_fifo,
    "a socket": by_socket,
    "the group may write it": lambda path: path.chmod(0o620),
    "others may write it": lambda path: path.chmod(0o602),
    "another owner": lambda path: os.chown(path, 65534, -1),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_an_entry_that_breaks_the_rule_is_made_again_once(tmp_path: Path, broken: str) -> None:
    if broken == "another owner" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    make, cache = Builder(), tmp_path / "cache"
    Cache(cache).get("tokens", KEY, make)
    (file,) = cache.iterdir()
    BREAKS[broken](file)
    assert Cache(cache).find(file.name) is None
    again = Cache(cache).get("tokens", KEY, make)
    assert (again.state, make.calls, content(again.entry)) == ("rebuilt", 2, PARTS)
    assert Cache(cache).get("tokens", KEY, make).state == "found"
    assert list(cache.iterdir()) == [file]
    if (elsewhere := tmp_path / "elsewhere").exists():
        assert elsewhere.stat().st_size == file.stat().st_size


@pytest.mark.parametrize("broken", BREAKS)
def test_what_is_put_takes_the_place_of_such_an_entry(tmp_path: Path, broken: str) -> None:
    if broken == "another owner" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    file = put(tmp_path / "cache")
    BREAKS[broken](file)
    put(tmp_path / "cache")
    found = Cache(tmp_path / "cache").find("one")
    assert found is not None and content(found) == PARTS


def linked(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (linked, "is a symbolic link"),
    "the group may write it": (lambda path: path.chmod(0o770), "others may write"),
    "others may write it, sticky": (lambda path: path.chmod(0o1777), "others may write"),
    "another owner": (lambda path: os.chown(path, 65534, -1), "belongs to user 65534"),
    "a parent that others write": (lambda path: path.parent.chmod(0o777), "others may write"),
    "a parent that the group writes": (lambda path: path.parent.chmod(0o770), "others may write"),
    "a parent of another user": (lambda path: os.chown(path.parent, 65534, -1), "belongs to user 65534"),
}


@pytest.mark.parametrize("broken", FOLDERS)
def test_a_folder_that_breaks_the_rule_is_not_used(tmp_path: Path, broken: str) -> None:
    if "another" in broken and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder, make, told = tmp_path / "parent/cache", Builder(), list[str]()
    Cache(folder).get("tokens", KEY, make)
    change, reason = FOLDERS[broken]
    change(folder)
    before = sorted(os.listdir(folder))
    for _ in range(2):
        cache = Cache(folder, tell=told.append)
        assert content(cache.get("tokens", KEY, make).entry) == PARTS
        cache.put("one", PARTS)
        assert cache.find("one") is not None
    assert make.calls == 2, "what stands there is not used, and the private folder is one for the process"
    (line,) = told
    assert reason in line and "parent" in line and "data.cache_dir" in line
    assert sorted(os.listdir(folder)) == before
    assert private_folder().stat().st_mode & 0o777 == 0o700


def test_parents_may_be_links_and_sticky(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real").chmod(0o1777)
    (tmp_path / "relative").symlink_to("../" + tmp_path.name + "/real")
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    for name in ("relative", "absolute"):
        put(tmp_path / name / "cache")
    assert (tmp_path / "real/cache/one").is_file()
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        open_folder(tmp_path / "round/cache")


def test_a_group_of_this_user_alone_may_write_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group, and a umask that lets it write."""
    from types import SimpleNamespace

    user, members = SimpleNamespace(pw_name="me", pw_gid=77), list[str]()
    monkeypatch.setattr(trust_module.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(trust_module.grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=members))
    assert trust_module._is_private_group(77) == (os.geteuid() != 0), "root has no such habit"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert trust_module._is_private_group(77) and not trust_module._is_private_group(78)
    members.append("me")
    assert trust_module._is_private_group(77)
    members.append("you")
    assert not trust_module._is_private_group(77)


def test_two_folders_of_ours_may_neither_be_links(tmp_path: Path) -> None:
    put(tmp_path / "genesis/kernels")
    (tmp_path / "genesis").rename(tmp_path / "elsewhere")
    (tmp_path / "genesis").symlink_to("elsewhere")
    os.close(open_folder(tmp_path / "genesis/kernels", own=1))
    with pytest.raises(Refused, match="genesis is a symbolic link"):
        open_folder(tmp_path / "genesis/kernels", own=2)


def test_an_open_folder_is_the_one_that_was_checked(tmp_path: Path) -> None:
    """Exchanged after the check, in the very moment of the use, by whoever can rename: nothing of it is seen."""
    cache = Cache(tmp_path / "cache")
    cache.put("one", {"a": b"ours"})
    (tmp_path / "cache").rename(tmp_path / "gone")
    Cache(tmp_path / "cache").put("one", {"a": b"theirs"})
    found = cache.find("one")
    assert found is not None and found.part("a") == b"ours"


@pytest.mark.parametrize("bad", ["no safe one", "missing"])
def test_private_folders_are_made_where_nobody_can_exchange_them(tmp_path: Path, bad: str) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    place = {"no safe one": "open", "missing": "missing"}[bad]
    code = "from genesis.files.trust import private_folder; print(private_folder())"
    environment = {**os.environ, "TMPDIR": str(tmp_path / place)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert tmp_path not in folder.parents and not folder.exists(), "it ends with the process"
    assert not list((tmp_path / "open").iterdir())


def test_where_no_folder_is_safe_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> int:
        raise Refused(f"others may write {path.parent}")

    monkeypatch.setattr(trust_module, "_private", {})
    monkeypatch.setattr(trust_module, "open_folder", refuse)
    with pytest.raises(DiskError, match=r"no folder for temporary files is safe: /.*: others may write") as caught:
        private_folder()
    assert (caught.value.exit_code, caught.value.where) == (8, "TMPDIR")


def test_what_is_no_entry_gives_way(tmp_path: Path) -> None:
    """As the folders of older versions do; what a link leads to stays."""
    make, cache, precious = Builder(), tmp_path / "cache", tmp_path / "precious"
    Cache(cache).get("tokens", KEY, make)
    (file,) = cache.iterdir()
    file.unlink()
    shutil.copytree(tmp_path / "cache", precious)
    (precious / "file").write_text("kept")
    file.symlink_to(precious)
    assert Cache(cache).get("tokens", KEY, make).state == "rebuilt"
    assert (precious / "file").read_text() == "kept"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(writer: EntryWriter) -> None:
        writer.write("tokens.bin", b"half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        Cache(tmp_path).get("tokens", KEY, fail)
    assert not list(tmp_path.iterdir())
    assert Cache(tmp_path).get("tokens", KEY, Builder()).state == "made"


def test_an_error_of_what_is_read_stays_what_it_is(tmp_path: Path) -> None:
    def fail(writer: EntryWriter) -> None:
        raise FileNotFoundError(2, "gone", "corpus.txt")

    with pytest.raises(FileNotFoundError, match=r"corpus\.txt"):
        Cache(tmp_path).get("tokens", KEY, fail)


def test_leftovers_of_dead_writers_are_swept(tmp_path: Path) -> None:
    make = Builder()
    Cache(tmp_path).get("tokens", KEY, make)
    (file,) = tmp_path.iterdir()
    file.unlink()
    (tmp_path / f".tmp-{file.name}-0123456789abcdef").write_bytes(b"half")
    (tmp_path / ".tmp-stranger").mkdir()
    Cache(tmp_path).get("tokens", KEY, make)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-stranger", file.name]
    leftover = tmp_path / ".tmp-one-0123456789abcdef"
    leftover.write_bytes(b"half")
    living = os.open(leftover, os.O_WRONLY)
    import fcntl

    fcntl.flock(living, fcntl.LOCK_EX)
    Cache(tmp_path).put("one", PARTS)
    assert leftover.exists(), "its writer lives"
    os.close(living)
    Cache(tmp_path).put("one", PARTS)
    assert not leftover.exists()


def test_a_disk_that_gives_other_bytes_back_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Builder()
    monkeypatch.setattr(Cache, "_read", lambda self, name, limit: None)
    with pytest.raises(DiskError, match="differs when it is read back") as caught:
        Cache(tmp_path).get("tokens", KEY, make)
    assert caught.value.exit_code == 8 and make.calls == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError):
        Cache(tmp_path / "file/cache").get("tokens", KEY, Builder())
    told: list[str] = []
    optional = Cache(tmp_path / "file/cache", optional=True, tell=told.append)
    optional.put("one", PARTS)
    assert optional.find("one") is not None and len(told) == 1 and "Not a directory" in told[0]


@pytest.mark.parametrize("op", ["open", "write", "fsync", "rename"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    def observe(call: Call) -> None:
        if call.op == op and call.path != tmp_path:
            raise OSError(28, "No space left on device")

    Cache(tmp_path).put("other", PARTS)
    monkeypatch.setattr(DEFAULT, "_observer", observe)
    with pytest.raises(DiskError, match=r"No space left.*needed .* bytes, free ") as caught:
        Cache(tmp_path).get("tokens", KEY, Builder())
    assert (caught.value.exit_code, caught.value.errno) == (8, 28)
    Cache(tmp_path, optional=True).put("one", PARTS)
    monkeypatch.setattr(DEFAULT, "_observer", None)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"other", "one"} if op == "fsync" else {"other"}), "what is put is not flushed"


def test_too_many_open_files_cost_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, make = Cache(tmp_path), Builder()
    cache.get("tokens", KEY, make)

    def fail(folder: int, name: str) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("genesis.files.cache.open_file", fail)
        with pytest.raises(DiskError, match="Too many open files"):
            cache.get("tokens", KEY, make)
    assert cache.get("tokens", KEY, make).state == "found" and make.calls == 1


def test_the_lock_of_a_run_is_another_one(tmp_path: Path) -> None:
    """`data.cache_dir` may be `train.output_dir`: this waited for ever."""
    with FolderLock(tmp_path):
        assert Cache(tmp_path).get("tokens", KEY, Builder()).state == "made"


def test_who_waits_says_for_whom_and_finds_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE", 2)
    make, told = Builder(), list[str]()
    name = opened(tmp_path).name
    (tmp_path / name).unlink()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    begun = time.monotonic()
    waiting = threading.Thread(target=lambda: Cache(tmp_path, tell=told.append).get("tokens", KEY, make))
    waiting.start()
    while not told and time.monotonic() - begun < 30:
        time.sleep(0.01)
    assert len(told) == 1 and all(part in told[0] for part in (str(holder.pid), socket.gethostname(), str(tmp_path)))
    assert waiting.is_alive() and make.calls == 0
    holder.kill()  # whose death frees the lock
    holder.communicate()
    waiting.join(30)
    assert make.calls == 1 and [path.name for path in tmp_path.iterdir()] == [name]


HOLDER = """
import os, sys
from genesis.files.lock import EntryLock
EntryLock(os.open(sys.argv[1], os.O_RDONLY), sys.argv[2], "it", print).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "stands_there", ["a FIFO", "a link", "another owner", "a folder's link", "a hard link", "a folder"]
)
def test_a_lock_that_is_none_of_ours_gives_way(tmp_path: Path, stands_there: str) -> None:
    if stands_there == "another owner" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    precious, folder = tmp_path / "precious", tmp_path / "cache"
    precious.write_text("kept")
    folder.mkdir(mode=0o700)
    name = opened(folder).name
    (folder / name).unlink()
    lock = folder / f".lock-{name}"
    puts: dict[str, Callable[[], object]] = {
        "a FIFO": lambda: os.mkfifo(lock),
        "a link": lambda: lock.symlink_to(precious),
        "a folder": lambda: (lock / "deep").mkdir(parents=True),
        "a folder's link": lambda: lock.symlink_to(tmp_path),
        "another owner": lambda: (lock.write_text("x"), os.chown(lock, 65534, -1)),
        "a hard link": lambda: os.link(precious, lock),
    }
    puts[stands_there]()
    assert Cache(folder).get("tokens", KEY, Builder()).state == "made"
    assert precious.read_text() == "kept" and [path.name for path in folder.iterdir()] == [name]


def test_a_thread_that_holds_a_lock_does_not_wait_for_itself(tmp_path: Path) -> None:
    def nested(writer: EntryWriter) -> None:
        Cache(tmp_path).get("tokens", KEY, make)
        make(writer)

    make = Builder()
    assert Cache(tmp_path).get("tokens", KEY, nested).state == "made"
    assert make.calls == 2 and len(list(tmp_path.iterdir())) == 1


def test_threads_of_one_process_make_an_entry_once(tmp_path: Path) -> None:
    make, states = Builder(), list[str]()

    def slow(writer: EntryWriter) -> None:
        time.sleep(0.1)
        make(writer)

    cache = Cache(tmp_path)
    threads = [threading.Thread(target=lambda: states.append(cache.get("tokens", KEY, slow).state)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(states) == ["found", "found", "found", "made"] and make.calls == 1


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EACCES])
def test_a_file_system_without_locks_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def cannot(descriptor: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", cannot)
    assert Cache(tmp_path).get("tokens", KEY, Builder()).state == "made"
    assert Cache(tmp_path).get("tokens", KEY, Builder()).state == "found"


def test_who_has_waited_long_goes_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock stays with who took it first."""
    monkeypatch.setattr("genesis.files.cache._MAX_POLLS", 2)
    cache, pauses = Cache(tmp_path), list[float]()
    monkeypatch.setattr("genesis.files.lock.time.sleep", pauses.append)

    def other() -> None:
        with cache.alone("kernel"):
            pauses.append(-1.0)

    with cache.alone("kernel"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        assert pauses == [0.05, 0.05, -1.0]
        assert [path.name for path in tmp_path.iterdir()] == [".lock-kernel"]
    assert not list(tmp_path.iterdir())


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


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    lock = EntryLock(folder, "one", "it", print)
    lock.acquire()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    lock.release()
    other = EntryLock(folder, "one", "it", lambda line: pytest.fail(line))
    other.acquire()
    other.release()
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)
    os.close(folder)


def test_writers_of_one_entry_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Kernels are compiled by whoever needs them first; the entry is always one of those that were put, whole."""
    contents = [{"image": bytes([n]) * 50000} for n in range(4)]
    Cache(tmp_path).put("one", contents[0])
    over = threading.Event()

    def writer(parts: dict[str, bytes]) -> None:
        while not over.is_set():
            Cache(tmp_path).put("one", parts)

    threads = [threading.Thread(target=writer, args=(parts,)) for parts in contents]
    for thread in threads:
        thread.start()
    reader = Cache(tmp_path)
    for _ in range(100):
        found = reader.find("one")
        assert found is not None and content(found) in contents
    over.set()
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path) == ["one"]


def test_a_close_that_fails_costs_only_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that reports an error has closed all the same: closing again would hit another file."""
    real, failing = os.close, set[str]()

    def close(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)
        if "written" in failing if path.name.startswith("tokens-") else "read" in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def opened() -> list[str]:
        folder = Path("/proc/self/fd")
        return [os.readlink(path) for path in folder.iterdir() if path.is_symlink()]

    monkeypatch.setattr(os, "close", close)
    make = Builder()
    failing.add("read")
    cache = Cache(tmp_path / "cache")
    assert [cache.get("tokens", KEY, make).state for _ in range(2)] == ["made", "found"]
    assert private_folder().is_dir()
    del cache  # its descriptor is closed here
    assert not [path for path in opened() if path.startswith(str(tmp_path))]
    failing.add("written")
    with pytest.raises(DiskError, match=f"close of {tmp_path}/cache/tokens-.* failed: {os.strerror(errno.EIO)}"):
        Cache(tmp_path / "cache").get("tokens", {"format": 2}, make)
    assert Cache(tmp_path / "cache").get("tokens", {"format": 2}, make).state == "found"


def test_an_entry_that_is_replaced_while_it_is_opened_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path)
    real = os.open

    def replaced(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = real(path, flags, mode, dir_fd=dir_fd)
        if path == "one":
            monkeypatch.setattr(os, "open", real)
            put(tmp_path)
        return descriptor

    monkeypatch.setattr(os, "open", replaced)
    found = Cache(tmp_path).find("one")
    assert found is not None and content(found) == PARTS


@pytest.mark.parametrize("name", ["cache", "tokens-1"])
def test_an_error_of_the_cache_names_the_first_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not that the folder, which could not be opened, is not there, nor that an unreadable entry has other bytes."""
    real = os.open

    def failing(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_entry = str(path).startswith("tokens-") and name != "cache"
        if path == name or is_entry:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(DiskError, match=os.strerror(errno.EIO)) as caught:
        Cache(tmp_path / "cache").get("tokens", KEY, Builder())
    assert str(tmp_path / "cache") in caught.value.where
