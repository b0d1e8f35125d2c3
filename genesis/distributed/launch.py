"""`--nproc N`: starts the ranks of one host and waits until the last has ended. The launcher itself is not a rank.

Ranks get torchrun's variables and the key of their job. The launcher opens the socket on which rank 0 listens and
passes it on, so that no other process can take the port meanwhile. Through a pipe, rank 0 reports that all have joined.
Each rank leads its own process group, so Ctrl-C in a terminal reaches only the launcher, which forwards it once. The
program of a rank unblocks SIGINT, SIGTERM and SIGHUP, so that no signal is lost while it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import FrameType
from typing import IO, Any

from genesis.distributed.environment import HAVE_MET, JOB_KEY, LAUNCHER, LISTENER, LOOPBACK, refuse_ranks
from genesis.errors import DistributedError, InterruptedRun, UsageError, escape

# How long the other ranks may take to end after a rank that failed.
GRACE_S = 5.0
# After a rank that was killed, or ended before all had joined: nothing can be saved, and others may not detect it.
KILLED_GRACE_S = 1.0
# After a rank that ended because it saw another rank end.
ECHO_GRACE_S = 2.5
# After a rank that a signal ended.
STOPPED_GRACE_S = 30.0
# How long a rank may be stopped (SIGSTOP) in any phase. Working ranks wait a little less, and their error says more.
STOPPED_S = 65.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = {128 + number for number in _FORWARDED}
_POLL_S = 1.0
_SHORT_POLL_S = 0.05
_DRAIN_S = 1.0
_MAX_LINE = 1 << 16
_PR_SET_PDEATHSIG = 1


def launch(command: Sequence[str], count: int, *, environ: Mapping[str, str] | None = None) -> int:
    """Run `command` as `count` ranks of this host, and return the exit code of the job.

    The code is 0 if all ranks end with 0. Otherwise it is the code of the first rank that failed on its own, or 10 if
    all only saw another rank end. Must be called in the main thread, whose signal handlers it replaces meanwhile.

    Args:
        command: program and arguments. Its standard input is empty, and it must unblock signals.
        environ: environment variables of the ranks; `os.environ` by default.

    Raises:
        UsageError: if this process is already a rank.
        DistributedError: if a rank could not be started or was killed.
        InterruptedRun: if a signal ended a rank before all had joined.
    """
    environ = os.environ if environ is None else environ
    refuse_ranks(environ)
    job = _Job(list(command), count, dict(environ))
    with job:
        job.start()
        job.wait()
    return job.exit_code()


@dataclass
class _Rank:
    """The process of a rank.

    `forwarded` counts the signals forwarded to it. `code` has the format of `Popen.returncode`. `stopped_s` is the time
    for which it has been stopped while the launcher was running.
    """

    rank: int
    process: subprocess.Popen[bytes]
    forwarded: int = 0
    code: int | None = None
    was_ended: bool = False
    stopped_s: float = 0.0


@dataclass
class _Lines:
    """Copies the output of a rank to ours line by line, with the rank as a prefix."""

    source: IO[bytes]
    target: int
    prefix: bytes
    pending: bytes = b""
    is_broken: bool = False

    def read(self) -> bool:
        """Copy the available output. Returns False at its end."""
        try:
            data = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self.pending = (self.pending + data).split(b"\n")
        if len(self.pending) > _MAX_LINE or (self.pending and not data):
            lines, self.pending = [*lines, self.pending], b""
        elif b"\r" in self.pending[:-1]:
            # Of a progress bar that redraws its line, copy only the last state.
            self.pending = self.pending[self.pending.rindex(b"\r", 0, -1) + 1 :]
        if lines:
            drawn = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]  # the last state of a redrawn line
            self._write(b"".join(self.prefix + line + b"\n" for line in drawn))
        return bool(data)

    def _write(self, data: bytes) -> None:
        # If our reader has closed the pipe (`| head`), the ranks continue.
        if self.is_broken:
            return
        with contextlib.suppress(OSError):
            if os.isatty(self.target) and os.environ.get("TERM", "") not in ("", "dumb"):
                data = b"\r\x1b[2K" + data  # clear a progress bar that rank 0 may have drawn on this line
            while data:
                data = data[os.write(self.target, data) :]
            return
        self.is_broken = True


@dataclass
class _Job:
    """The processes of a job. Leaving the context ends the remaining ones."""

    command: list[str]
    count: int
    environ: dict[str, str]
    ranks: list[_Rank] = field(default_factory=list)
    ended: list[_Rank] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    outputs: list[_Lines] = field(default_factory=list)
    kill_at: float = math.inf
    have_met: bool = False
    stopped: int | None = None
    _before: dict[int, Any] = field(default_factory=dict)
    _is_forwarding: bool = False

    def __enter__(self) -> None:
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._meeting, self._met = os.pipe()  # the end that we read, and rank 0's end
        os.set_blocking(self._meeting, False)
        self._wakeup_before = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in _FORWARDED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._on_signal)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def __exit__(self, *error: object) -> None:
        self._end_all()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._wake.close()
        self._woken.close()
        os.close(self._meeting)
        os.close(self._met)
        for lines in self.outputs:
            lines.source.close()

    def start(self) -> None:
        """Start the ranks. Rank 0 inherits its listening socket."""
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            listener.listen(min(self.count, 1024))
            common = {
                **self.environ,
                "WORLD_SIZE": str(self.count),
                "LOCAL_WORLD_SIZE": str(self.count),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(listener.getsockname()[1]),
                JOB_KEY: secrets.token_hex(32),
                LAUNCHER: str(os.getpid()),
            }
            for rank in range(self.count):
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                inherited = {LISTENER: listener.fileno(), HAVE_MET: self._met} if rank == 0 else {}
                own |= {name: str(descriptor) for name, descriptor in inherited.items()}
                self._start_rank(rank, own, tuple(inherited.values()))
                self._forward_signals()

    def _start_rank(self, rank: int, environ: dict[str, str], descriptors: tuple[int, ...]) -> None:
        pipe = subprocess.PIPE if rank else None
        # Block signals: between fork and exec, the child still has our handlers, which would swallow them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: numpy holds no lock
                process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    env=environ,
                    pass_fds=descriptors,
                    process_group=0,
                    preexec_fn=_die_with_parent(),  # noqa: PLW1509  the launcher has no threads of Python's
                )
        except FileNotFoundError as error:
            what = f"the program {escape(self.command[0])} was not found"
            raise UsageError(what, where="command line", next="pass the path of the program") from error
        except (OSError, subprocess.SubprocessError) as error:
            what = f"rank {rank} of {self.count} could not be started: {getattr(error, 'strerror', None) or error}"
            next = "start fewer ranks, or check the limits with ulimit -a"
            raise DistributedError(what, where="launch", next=next) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.ranks.append(_Rank(rank, process))
        # Rank 0 writes to our own output; the output of the others is copied with a prefix.
        for source, target in ((process.stdout, 1), (process.stderr, 2)):
            if source is not None:
                os.set_blocking(source.fileno(), False)
                self.outputs.append(_Lines(source, target, f"rank {rank}: ".encode()))

    def wait(self) -> None:
        """Forward output and signals until all ranks have ended. Kill those that outlive a failed rank's grace time."""
        while len(self.ended) < self.count:
            began = time.monotonic()
            self._poll(min(_POLL_S, self.kill_at - began))
            self._reap()
            took = min(_POLL_S, time.monotonic() - began)
            for each in self.ranks:
                is_stopped = each.code is None and _is_stopped(each.process.pid)
                each.stopped_s = each.stopped_s + took if is_stopped else 0.0
                if each.stopped_s >= STOPPED_S:
                    self.stopped, self.kill_at = each.rank, 0.0
            if time.monotonic() >= self.kill_at:
                self._end_all()

    def _poll(self, seconds: float) -> None:
        self._forward_signals()
        ready = wait([self._wake, *(each.source.fileno() for each in self.outputs)], max(0.0, seconds))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
        for lines in [each for each in self.outputs if each.source.fileno() in ready]:
            if not lines.read():
                lines.source.close()
                self.outputs.remove(lines)

    def _reap(self) -> None:
        for each in self.ranks:
            if each.code is not None or (code := _code(each.process)) is None:
                continue
            each.code = code
            self._kill(each)  # kill the processes that it started; the pid is not reused before the wait below
            each.process.wait()
            self.ended.append(each)
            self.kill_at = min(self.kill_at, time.monotonic() + self._grace(code))

    def _grace(self, code: int) -> float:
        """The time for the other ranks to end after one that ended with `code`."""
        if code == DistributedError.exit_code:
            return ECHO_GRACE_S
        if not self._have_met():
            return KILLED_GRACE_S if code else GRACE_S
        if not code:
            return math.inf
        if code in _INTERRUPTED:
            return STOPPED_GRACE_S
        return GRACE_S if code > 0 or -code in _FORWARDED else KILLED_GRACE_S

    def _have_met(self) -> bool:
        """Whether all ranks have joined. From then on each rank detects the end of another."""
        if not self.have_met:
            with contextlib.suppress(BlockingIOError):
                self.have_met = os.read(self._meeting, 1) != b""
        return self.have_met

    def _kill(self, rank: _Rank) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Kill the remaining ranks with their child processes, and copy their last output."""
        self._reap()
        for each in self.ranks:
            if each.code is None:
                each.was_ended = True
                self._kill(each)
        while any(each.code is None for each in self.ranks):
            self._poll(_SHORT_POLL_S)
            self._reap()
        until = time.monotonic() + _DRAIN_S
        while self.outputs and time.monotonic() < until:
            self._poll(until - time.monotonic())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self._forward_signals()

    def _forward_signals(self) -> None:
        """Forward to each rank the signals it has not received. A nested call from a signal handler returns at once."""
        if self._is_forwarding:
            return
        self._is_forwarding = True
        try:
            while waiting := [each for each in self.ranks if each.forwarded < len(self.signals)]:
                for each in waiting:
                    number, each.forwarded = self.signals[each.forwarded], each.forwarded + 1
                    if each.code is None:
                        os.kill(each.process.pid, number)
        finally:
            self._is_forwarding = False

    def exit_code(self) -> int:
        """Return the exit code of the job, as `launch` does. Raises DistributedError if a rank was killed or stopped
        for too long, and InterruptedRun if a signal ended one before all had joined.
        """
        echo = DistributedError.exit_code
        # A rank that failed on its own is the cause.
        for each in self.ended:
            assert each.code is not None
            if each.was_ended or each.code in (0, echo):
                continue
            stop = 128 - each.code if -each.code in _FORWARDED else each.code  # ended by the kernel, or by its handler
            if stop in _INTERRUPTED and not self.have_met:
                next = "start it again with the same command"
                what = f"{_signal_name(stop - 128)} ended the run before all ranks had joined"
                raise InterruptedRun(what, signal=stop - 128, next=next)
            if stop > 0:
                return stop
            what = f"rank {each.rank} of {self.count} was killed by {_signal_name(-each.code)}"
            next = "check with dmesg whether memory ran out"
            raise DistributedError(what, where="launch", next=next)
        # So is a rank that was stopped, or that ended successfully while others were running.
        if self.stopped is not None:
            what = f"rank {self.stopped} of {self.count} was stopped for {STOPPED_S:g} s"
            next = "find out what stopped it (SIGSTOP, a debugger, a scheduler), and continue with --resume"
            raise DistributedError(what, where="launch", next=next)
        if not any(each.code for each in self.ended):
            return 0
        for each in self.ended:  # the cause may be reaped after a rank that saw it end
            if not each.code:
                what = f"rank {each.rank} of {self.count} ended successfully while others were still running"
                raise DistributedError(what, where="launch", next="report it as a bug in Genesis")
        return echo


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the code of `Popen.poll`, but leave the process unreaped if the system supports it."""
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return process.poll()
    state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped the process. False if the system cannot tell."""
    if not hasattr(os, "waitid"):
        return False
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)  # it may have just ended
    return state is not None and state.si_code == os.CLD_STOPPED


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def _die_with_parent() -> Callable[[], None] | None:
    """Return the function that a rank runs before its program, so that it is killed when the launcher dies.

    On systems other than Linux it is None: ranks then only detect closed connections.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the launcher died before the call
            os._exit(DistributedError.exit_code)

    return ask
