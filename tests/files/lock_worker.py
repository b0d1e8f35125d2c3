"""Processes that take a folder's lock: one that holds it until its input ends, or a crowd that tries at one moment.

Run as `python -m tests.files.lock_worker FOLDER hold|fork|crowd`. `fork` also leaves a child behind that lives as long
as the input; `crowd` forks `CROWD` processes and prints all their answers.
"""

from __future__ import annotations

import json
import os
import sys

from genesis.errors import BusyError
from genesis.files.lock import FolderLock

CROWD = 20


def attempt(lock: FolderLock) -> dict[str, object]:
    """Take the lock; how that went."""
    try:
        lock.acquire()
    except BusyError as error:
        return {"won": False, "message": str(error), "exit_code": error.exit_code}
    return {"won": True, "pid": os.getpid()}


def crowd(folder: str) -> list[dict[str, object]]:
    """The answers of `CROWD` processes that wait at a gate, try together, and stay until all have answered."""
    gate, gate_open = os.pipe()
    end, end_reached = os.pipe()
    answers, answer = os.pipe()
    children = []
    for _ in range(CROWD):
        pid = os.fork()
        if pid == 0:
            os.close(gate_open)
            os.close(end_reached)
            os.read(gate, 1)
            lock = FolderLock(folder)
            os.write(answer, json.dumps(attempt(lock)).encode() + b"\n")
            os.read(end, 1)
            os._exit(0)
        children.append(pid)
    os.close(answer)
    os.close(gate_open)
    with os.fdopen(answers) as lines:
        said = [json.loads(lines.readline()) for _ in children]
    os.close(end_reached)
    for pid in children:
        os.waitpid(pid, 0)
    return said


def hold(folder: str, *, fork: bool) -> None:
    """Take the lock, say so, and keep it until the input ends."""
    lock = FolderLock(folder)
    print(json.dumps(attempt(lock)), flush=True)
    if fork and os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[2] == "crowd":
        print(json.dumps(crowd(sys.argv[1])))
    else:
        hold(sys.argv[1], fork=sys.argv[2] == "fork")
