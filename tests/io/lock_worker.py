"""A process that takes a folder's lock when told, says how that went, and holds on until its input ends.

Run as `python -m tests.io.lock_worker FOLDER [fork]`; `fork` leaves a child behind that lives as long as the input.
"""

from __future__ import annotations

import json
import os
import sys

from genesis.errors import BusyError
from genesis.io.lock import FolderLock


def main(folder: str, *options: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    lock = FolderLock(folder)
    try:
        lock.acquire()
        answer: dict[str, object] = {"won": True, "pid": os.getpid()}
    except BusyError as error:
        answer = {"won": False, "message": str(error), "exit_code": error.exit_code}
    if "fork" in options and os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    print(json.dumps(answer), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
