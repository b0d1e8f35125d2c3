"""A launcher in a fork, with its output in files; finds its ranks, what they listen on, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from genesis.distributed import launch
from tests.distributed.forks import Fork, ended, fork

ROOT = Path(__file__).parents[2]
TOKEN = "GENESIS_TEST_JOB"
RANKS = [sys.executable, "-m", "tests.distributed.rank_program"]


@dataclass
class Job:
    """A launcher in a fork, its output in files, and a mark by which its ranks are found."""

    fork: Fork
    out: Path
    err: Path
    token: str

    def processes(self) -> list[int]:
        """All processes of the job but the launcher, by the mark in their variables."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.token.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        mark = f"\0RANK={number}\0".encode()
        for pid in self.processes():
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == self.fork.pid and mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
                return pid
        raise AssertionError(f"there is no rank {number}")

    def first(self) -> int:
        """The process id of the rank that is started first, as soon as there is one."""
        children = Path(f"/proc/{self.fork.pid}/task/{self.fork.pid}/children")
        until = time.monotonic() + 20
        while not (found := children.read_text().split()):
            assert time.monotonic() < until
        return int(found[0])

    def wait_for(self, text: str, count: int = 1) -> None:
        """Until `text` has been printed `count` times."""
        until = time.monotonic() + 20
        while self.out.read_text().count(text) < count:
            assert time.monotonic() < until, (self.out.read_text(), self.err.read_text())
            time.sleep(0.005)

    def end(self) -> int:
        ended([self.fork])
        assert self.fork.code is not None
        return self.fork.code

    def left(self, within: float) -> list[int]:
        """The processes that are there still `within` seconds from now."""
        until = time.monotonic() + within
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.01)
        return left


def start(folder: Path, command: Sequence[str], count: int, **variables: str) -> Job:
    """`launch(command, count)` in a fork that leads a process group."""
    token = uuid.uuid4().hex
    out, err = folder / f"{token}.out", folder / f"{token}.err"
    out.touch()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, TOKEN: token, "PYTHONPATH": path, **variables}

    def run() -> None:
        os.setpgid(0, 0)
        for path, descriptor in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os._exit(launch(command, count, environ=environ))

    return Job(fork(run, folder / f"{token}.json"), out, err, token)


def listening(pids: Sequence[int]) -> set[str]:
    """The local addresses of the sockets on which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # a process or descriptor that goes meanwhile
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found
