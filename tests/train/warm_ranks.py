"""The launcher's ranks as forks of the warm process that launches them, in a tenth of the time of new ones.

Only the start differs from `subprocess.Popen`: pipes, process groups, variables and descriptors are those of a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

from genesis.distributed import launch
from genesis_cli.main import _stop

__all__ = ["start_warm"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class _Fork:
    """What the launcher needs of `Popen`."""

    def __init__(self, command: Sequence[str], run: Callable[[list[str]], int], **options: Any) -> None:
        self.returncode: int | None = None
        self.stdout, out = _pipe(options["stdout"])
        self.stderr, err = _pipe(options["stderr"])
        # A signal that comes to the fork while it still has the launcher's handlers would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for end in (out, err):
                if end is not None:
                    os.close(end)
            with contextlib.suppress(OSError):
                os.setpgid(self.pid, self.pid)
            return
        code = 70
        try:
            code = _become_rank(command, run, out, err, options, mask)
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """As Popen's."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """As Popen's."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _pipe(wanted: int | None) -> tuple[IO[bytes] | None, int | None]:
    if wanted != subprocess.PIPE:
        return None, None
    read, write = os.pipe()
    return os.fdopen(read, "rb", 0), write


def _become_rank(
    command: Sequence[str],
    run: Callable[[list[str]], int],
    out: int | None,
    err: int | None,
    options: Mapping[str, Any],
    mask: set[signal.Signals],
) -> int:
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, _stop)
    os.setpgid(0, 0)
    options["preexec_fn"]()
    for target, descriptor in ((1, out), (2, err)):
        if descriptor is not None:
            os.dup2(descriptor, target)
    kept = {0, 1, 2, *options["pass_fds"]}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    os.environ.clear()
    os.environ.update(options["env"])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - set(_SIGNALS))
    return run(list(command[list(command).index("genesis_cli") + 1 :]))


def start_warm(run: Callable[[list[str]], int]) -> None:
    """From now on this process launches its ranks as forks, in which `run(words)` gives the exit code."""

    def popen(command: Sequence[str], **options: Any) -> _Fork:
        return _Fork(command, run, **options)

    module = __import__("sys").modules[launch.__module__]
    module.subprocess = SimpleNamespace(
        Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL, SubprocessError=subprocess.SubprocessError
    )
