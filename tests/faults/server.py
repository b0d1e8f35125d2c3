"""A warm process that runs commands in forked children in which one system call fails: see `shim.c`.

Reads one JSON request a line from stdin and answers each with a line: the exit code (None: it did not end in time) and
how long it took; where the request names a client, also what that was answered. The shim must be preloaded. The
client is `tests.faults.sweep`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

import genesis.files.hub
import genesis.measure.limits
import genesis.measure.timing
import genesis_cli.environment
from genesis.measure.timing import Timing, summarize
from genesis_cli.app import app
from genesis_cli.main import main
from genesis_cli.session.serving import http_process, process
from tests.faults.clients import ask

# What a command imports on its way, every child would import again; and imports are no files of the user's.
PACKAGES = ("genesis", "genesis_cli", "genesis_configs", "genesis_models")
LEFT_OUT = (
    "genesis.kernels",
    "genesis.backend.cuda",
    "genesis.cuda",
    "genesis_cli.environment",
)
LIBRARIES = (
    "threadpoolctl",
    "tokenizers",
    "jinja2.sandbox",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.loops.auto",
    "httpx",
)
CLOSE_RANGE = 436  # the system call's number, on every architecture
LOG_DESCRIPTOR = 900  # of the shim


def warm_up() -> None:
    """Import what commands import, and let measuring take no time: how fast it is here does not matter."""
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, package + "."):
            if not module.name.startswith(LEFT_OUT) and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in LIBRARIES:
        importlib.import_module(name)
    genesis.measure.limits.COPIED["cpu"] = (1 << 12,)
    genesis.measure.limits.WIDTHS["cpu"] = (16,)
    genesis.measure.timing.LEAST_SAMPLES = 1

    def settled(samples: Any, *rest: Any) -> Timing:
        return summarize(samples, *rest)._replace(half_width=0.0)

    genesis.measure.timing.summarize = settled
    # Building the command line takes longer than all the rest, and makes no calls.
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)
    process.subprocess = ForkedHttp
    genesis.files.hub.PAUSE_S = 0.0
    nothing = {"device_nodes": [], "devices": [], "problem": "not asked"}
    genesis_cli.environment._probe_cuda = lambda: nothing


def child(request: dict[str, Any]) -> int:
    """Run the request's words as the command line does, with its fault; returns the exit code."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # of jobs in the background it is ignored
    tempfile.tempdir = None
    descriptor = os.open(request["stdin"], os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    for number, path in enumerate(request["streams"], start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    warnings.simplefilter("default")
    shim = ctypes.CDLL(None)
    shim.faults_arm(request["roots"].encode(), ctypes.c_long(request["nth"]), request["code"], request["log"].encode())
    try:
        return main(request["words"])
    finally:
        shim.faults_disarm()


class ForkedChild:
    """A forked process, as `subprocess.Popen` shows one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, patience: float = 60.0) -> int | None:
        """Its exit code; None if it had to be killed."""
        if self.poll() is None:
            self.returncode = wait(self.pid, patience)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedHttp:
    """The process of HTTP of `genesis serve` as a fork, which has imported everything, and in which calls fail too."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    @staticmethod
    def Popen(words: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> Any:  # noqa: N802 - as subprocess
        """Start it; what it raises is shown as by an interpreter of its own."""
        pid = os.fork()
        if pid:
            return ForkedChild(pid)
        os.setsid()
        sys.stderr.flush()
        kept, libc = [2, *sorted(pass_fds), LOG_DESCRIPTOR], ctypes.CDLL(None)
        for first, last in zip([0, *(each + 1 for each in kept)], [*(each - 1 for each in kept), 1 << 20], strict=True):
            if first <= last:  # as an exec does: with no call of the C library, which would be counted
                libc.syscall(CLOSE_RANGE, first, last, 0)
        for _ in range(2):
            os.open(os.devnull, os.O_RDWR)
        code = 1
        try:
            http_process.main(*(int(word) for word in words[3:]))
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)


def wait(pid: int, patience: float) -> int | None:
    """The child's exit code, minus the signal that ended it; None if it had to be killed."""
    descriptor = os.pidfd_open(pid)
    try:
        is_over, _, _ = select.select([descriptor], [], [], patience)
    finally:
        os.close(descriptor)
    if not is_over:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if is_over else None


def serve() -> None:
    """Answer requests until stdin ends."""
    # The children's own standard streams must not be the ones that the client talks through.
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        start = time.monotonic()
        for path in request["streams"]:
            Path(path).unlink(missing_ok=True)  # a client looks into them for an address
        pid = os.fork()
        if pid == 0:
            requests.close()
            os.close(answers.fileno())
            code = 99
            try:
                code = child(request)
            except BaseException as error:
                # No exception leaves `main`: what comes here is one.
                os.write(2, f"Traceback (out of main): {error!r}\n".encode())
            finally:
                os._exit(code)
        answered = []
        if request["client"]:
            folder, told = Path(request["folder"]), request["streams"]
            answered = ask(request["client"], pid, folder, told, request["patience"])
        code = wait(pid, request["patience"])
        told = {"code": code, "seconds": time.monotonic() - start, "answers": answered}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    sys.stderr.flush()
    warm_up()
    gc.freeze()  # what is here stays, in memory that forks share
    serve()
