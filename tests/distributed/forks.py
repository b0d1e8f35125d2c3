"""Ranks as forks of the test's process, in a tenth of the time of new ones: what each returned or raised, and when."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genesis.distributed import Peers, World
from genesis.errors import GenesisError

KEY = b"the key of this job, and of no other"
VERSION = "1.2.3"
WAIT_S = 20.0
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Fork:
    """One process, and after `ended` its exit code, value and error."""

    pid: int
    path: Path
    code: int | None = None
    value: Any = None
    error: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)


def fork(work: Callable[[], Any], path: Path) -> Fork:
    """Run `work` in a child; a `GenesisError` ends it with its exit code, anything else with 70."""
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until the child has the system's handlers for them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return Fork(pid, path)
    code, said = 70, {}
    atexit._clear()  # a command that ends the child would remove the parent's temporary folders
    try:
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        said, code = {"value": work()}, 0
    except GenesisError as error:
        said = {"kind": type(error).__name__, "what": error.what, "where": error.where, "next": error.next}
        said["rank"] = getattr(error, "rank", None)
        code = error.exit_code
    except BaseException as error:
        said = {"kind": type(error).__name__, "what": repr(error)}
    finally:
        path.write_text(json.dumps(said))
        os._exit(code)


def ended(forks: list[Fork], within: float = WAIT_S) -> list[Fork]:
    """Wait for all; kills those that do not end in time, and says so by the code -9."""
    began = time.monotonic()
    left = list(forks)
    while left:
        for each in list(left):
            pid, status = os.waitpid(each.pid, os.WNOHANG)
            if not pid:
                continue
            left.remove(each)
            each.code, each.seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began
            said = json.loads(each.path.read_text()) if each.path.is_file() else {}
            each.value, each.error = said.get("value"), said if "kind" in said else {}
        if left and time.monotonic() - began > within:
            for each in left:
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(0.002)
    return forks


def free_port() -> int:
    """A port of loopback on which nobody listens just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def world(rank: int, size: int, port: int, **other: Any) -> World:
    return World(rank, size, rank, size, "127.0.0.1", port, "a test", **other)


def start_ranks(
    size: int, work: Callable[[Peers], Any], folder: Path, *, limit_s: float = 10.0, ranks: list[int] | None = None
) -> list[Fork]:
    """Start `work(peers)` on ranks (all of `size`, or those given) that find each other on a free port."""
    port = free_port()

    def on(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            with Peers.connect(world(rank, size, port), KEY, version=VERSION, limit_s=limit_s) as peers:
                return work(peers)

        return run

    return [fork(on(rank), folder / f"rank-{rank}.json") for rank in (range(size) if ranks is None else ranks)]


def run_ranks(size: int, work: Callable[[Peers], Any], folder: Path, **options: Any) -> list[Fork]:
    """As `start_ranks`, until all have ended."""
    return ended(start_ranks(size, work, folder, **options))
