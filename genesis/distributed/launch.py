"""`--nproc N`: starts the ranks of one host and stays their parent until the last has ended. It is no rank itself.

Ranks get torchrun's variables and a key of their own job. The launcher opens the socket on which rank 0 listens and
hands it over, so that no other process can take the port in between; through a pipe rank 0 tells it that all have met.
A rank is the leader of a process group: a terminal's Ctrl-C reaches the launcher alone, which passes it on once. Its
program unblocks SIGINT, SIGTERM and SIGHUP, so that none is lost while it starts.
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

# How long others may take to end after a rank that failed; one that said nothing, or went before all had met, when
# there is nothing to save and nobody else may see it go; one that only saw another go; one that a signal stopped.
GRACE_S, KILLED_GRACE_S, ECHO_GRACE_S, STOPPED_GRACE_S = 5.0, 1.0, 2.5, 30.0
# How long a rank may be stopped, in any phase: a little longer than ranks at work wait for it, who know where it was.
STOPPED_S = 65.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = {128 + number for number in _PASSED_ON}
_TURN_S = 1.0
_SHORT_TURN_S = 0.05
_DRAIN_S = 1.0
_MAX_LINE = 1 << 16
_PR_SET_PDEATHSIG = 1


def launch(command: Sequence[str], count: int, *, environ: Mapping[str, str] | None = None) -> int:
    """Run `command` as `count` ranks of this host, and return the exit code of the job.

    That is 0 where all ranks end with 0; else the code of the first rank that failed by itself, and 10 where ranks
    only saw each other go. It must be called in the main thread, whose signal handlers are replaced meanwhile.

    Args:
        command: the program and its arguments; its standard input is empty, and it must unblock signals.
        environ: the variables of this process, by default `os.environ`.

    Raises:
        UsageError: this process is a rank already. DistributedError: a rank could not be started, or was killed.
        InterruptedRun: a signal ended a rank before all had met, which ranks leave to the launcher to say.
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
    """One process: `passed_on` counts the signals that it got, `code` is as `Popen.returncode`.

    `stopped_s` is how long it has been stopped, of the time in which the launcher was not.
    """

    rank: int
    process: subprocess.Popen[bytes]
    passed_on: int = 0
    code: int | None = None
    was_ended: bool = False
    stopped_s: float = 0.0


@dataclass
class _Lines:
    """Output of a rank on its way to ours: whole lines, each after the rank's name."""

    source: IO[bytes]
    target: int
    prefix: bytes
    pending: bytes = b""
    is_broken: bool = False

    def read(self) -> bool:
        """Pass on what has come; False at its end."""
        try:
            data = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self.pending = (self.pending + data).split(b"\n")
        if len(self.pending) > _MAX_LINE or (self.pending and not data):
            lines, self.pending = [*lines, self.pending], b""
        elif b"\r" in self.pending[:-1]:
            # A progress bar, drawn over and over: only what it shows at its line's end is worth a line.
            self.pending = self.pending[self.pending.rindex(b"\r", 0, -1) + 1 :]
        if lines:
            drawn = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]  # over and over: the last time
            self._write(b"".join(self.prefix + line + b"\n" for line in drawn))
        return bool(data)

    def _write(self, data: bytes) -> None:
        # Our reader may have gone (`| head`); the ranks go on.
        if self.is_broken:
            return
        with contextlib.suppress(OSError):
            if os.isatty(self.target) and os.environ.get("TERM", "") not in ("", "dumb"):
                data = b"\r\x1b[2K" + data  # rank 0 may have drawn a progress bar there
            while data:
                data = data[os.write(self.target, data) :]
            return
        self.is_broken = True


@dataclass
class _Job:
    """The processes of a job. Leaving it ends those that are left."""

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
    _is_passing_on: bool = False

    def __enter__(self) -> None:
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._meeting, self._met = os.pipe()  # read, and rank 0's end
        os.set_blocking(self._meeting, False)
        self._wakeup_before = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in _PASSED_ON:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: here and in the ranks
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
        """Start the ranks; rank 0 inherits the socket on which it will listen."""
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
                handed = {LISTENER: listener.fileno(), HAVE_MET: self._met} if rank == 0 else {}
                own |= {name: str(descriptor) for name, descriptor in handed.items()}
                self._start_rank(rank, own, tuple(handed.values()))
                self._pass_on()

    def _start_rank(self, rank: int, environ: dict[str, str], descriptors: tuple[int, ...]) -> None:
        pipe = subprocess.PIPE if rank else None
        # What comes before the program runs would be lost to our handlers, which a fork still has.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: numpy's, which hold no lock here
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
            what = f"there is no program {escape(self.command[0])}"
            raise UsageError(what, where="command line", next="give its path") from error
        except (OSError, subprocess.SubprocessError) as error:
            what = f"rank {rank} of {self.count} could not be started: {getattr(error, 'strerror', None) or error}"
            next = "start fewer ranks, or see what limits processes and memory: ulimit -a"
            raise DistributedError(what, where="launch", next=next) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.ranks.append(_Rank(rank, process))
        for source, target in ((process.stdout, 1), (process.stderr, 2)):
            if source is not None:
                os.set_blocking(source.fileno(), False)
                self.outputs.append(_Lines(source, target, f"rank {rank}: ".encode()))

    def wait(self) -> None:
        """Pass on output and signals until the last rank has ended, or is ended because one has failed."""
        while len(self.ended) < self.count:
            began = time.monotonic()
            self._turn(min(_TURN_S, self.kill_at - began))
            self._reap()
            took = min(_TURN_S, time.monotonic() - began)
            for each in self.ranks:
                is_stopped = each.code is None and _is_stopped(each.process.pid)
                each.stopped_s = each.stopped_s + took if is_stopped else 0.0
                if each.stopped_s >= STOPPED_S:
                    self.stopped, self.kill_at = each.rank, 0.0
            if time.monotonic() >= self.kill_at:
                self._end_all()

    def _turn(self, seconds: float) -> None:
        self._pass_on()
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
            self._kill(each)  # what it started; its number stays taken until it is waited for
            each.process.wait()
            self.ended.append(each)
            self.kill_at = min(self.kill_at, time.monotonic() + self._grace(code))

    def _grace(self, code: int) -> float:
        """How long the other ranks may take to end after one that ended with `code`."""
        if code == DistributedError.exit_code:
            return ECHO_GRACE_S
        if not self._have_met():
            return KILLED_GRACE_S if code else GRACE_S
        if not code:
            return math.inf
        if code in _INTERRUPTED:
            return STOPPED_GRACE_S
        return GRACE_S if code > 0 or -code in _PASSED_ON else KILLED_GRACE_S

    def _have_met(self) -> bool:
        """Whether all ranks have found each other: from then on each sees another one go."""
        if not self.have_met:
            with contextlib.suppress(BlockingIOError):
                self.have_met = os.read(self._meeting, 1) != b""
        return self.have_met

    def _kill(self, rank: _Rank) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Kill the ranks that are left, with the processes that they started, and hand on their last output."""
        self._reap()
        for each in self.ranks:
            if each.code is None:
                each.was_ended = True
                self._kill(each)
        while any(each.code is None for each in self.ranks):
            self._turn(_SHORT_TURN_S)
            self._reap()
        until = time.monotonic() + _DRAIN_S
        while self.outputs and time.monotonic() < until:
            self._turn(until - time.monotonic())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        """Send each rank the signals that it has not got; a handler may interrupt this and leaves the rest to it."""
        if self._is_passing_on:
            return
        self._is_passing_on = True
        try:
            while waiting := [each for each in self.ranks if each.passed_on < len(self.signals)]:
                for each in waiting:
                    number, each.passed_on = self.signals[each.passed_on], each.passed_on + 1
                    if each.code is None:
                        os.kill(each.process.pid, number)
        finally:
            self._is_passing_on = False

    def exit_code(self) -> int:
        """The code of the cause: of the first rank that ended by itself with neither 0 nor 10. Raises DistributedError
        where a signal killed it, or one was stopped for long; InterruptedRun where a signal ended it before all met.
        """
        echo = DistributedError.exit_code
        for each in self.ended:
            assert each.code is not None
            if each.was_ended or each.code in (0, echo):
                continue
            stop = 128 - each.code if -each.code in _PASSED_ON else each.code  # by the system, or by its handler
            if stop in _INTERRUPTED and not self.have_met:
                next = "start it again with the same command"
                what = f"{_signal_name(stop - 128)} ended the run before the ranks had met"
                raise InterruptedRun(what, signal=stop - 128, next=next)
            if stop > 0:
                return stop
            what = f"rank {each.rank} of {self.count} was killed by {_signal_name(-each.code)}"
            next = "see who killed it: the system's log says where memory ran out (dmesg)"
            raise DistributedError(what, where="launch", next=next)
        if self.stopped is not None:
            what = f"rank {self.stopped} of {self.count} was stopped, and did not go on within {STOPPED_S:g} s"
            next = "see who stopped it (SIGSTOP, a debugger, a scheduler that suspends), and go on with --resume"
            raise DistributedError(what, where="launch", next=next)
        if not any(each.code for each in self.ended):
            return 0
        for each in self.ended:  # it may be found after its echo, where both end at about the same time
            if not each.code:
                what = f"rank {each.rank} of {self.count} ended, as if all were done, while others went on"
                raise DistributedError(what, where="launch", next="report it as a bug in Genesis")
        return echo


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """As `Popen.poll`, but the process stays unwaited for, where the system can say so; None while it runs."""
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return process.poll()
    state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or its like holds the process, where the system can say so."""
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
    """What a rank does before its program: ask to be killed when the launcher dies, however that happens.

    Elsewhere than on Linux a rank only sees the closed connection of one that is gone.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(DistributedError.exit_code)

    return ask
