"""`--nproc`: output, exit codes, signals, and that no process is left, whatever ends the launcher or a rank."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from genesis.distributed import launch
from tests.distributed.forks import ended, fork
from tests.distributed.jobs import RANKS, Job, listening, start

QUICK = [sys.executable, "-I", "-S", "-c"]
UNBLOCKED = "import signal\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, (2, 15))\n"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes and sockets in /proc")

# Waits for a signal, and says how often it got which. Its child waits too, and would outlive it.
WAITS = """
import os, signal, sys, time
got = []
for number in (2, 15):
    signal.signal(number, lambda number, frame: got.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (2, 15))
if os.fork() == 0:
    time.sleep(60)
print("ready", flush=True)
while not got:
    time.sleep(0.005)
time.sleep(0.1)
print("got", got, flush=True)
sys.exit(128 + got[0])
"""


def run(folder: Path, program: str, count: int, *, meet: bool = True) -> Job:
    """Such a launcher, once it has ended; nothing of it is left."""
    met = "if rank == 0: os.write(int(os.environ['GENESIS_HAVE_MET']), b'1')\n" if meet else ""
    start_up = f"{UNBLOCKED}import os, sys, time\nrank = int(os.environ['RANK'])\n{met}"
    job = start(folder, [*QUICK, start_up + program], count)
    job.end()
    assert not job.left(1.0)
    return job


def test_output(tmp_path: Path) -> None:
    """Rank 0's as it is; of others whole lines after their name, of progress bars what they showed last."""
    program = """
if rank == 0:
    os.write(1, b"bar 1\\rbar 2\\rdone")
elif rank == 1:
    os.write(1, b"one\\ntw"); os.write(2, b"problem\\n"); time.sleep(0.1); os.write(1, b"o\\r\\n")
    os.write(1, b"bar 1\\r"); time.sleep(0.05); os.write(1, b"bar 2\\r"); os.write(1, b"bar 3\\nlast")
    os.write(2, b"10 %\\r20 %\\r")
"""
    job = run(tmp_path, program, 2)
    assert job.fork.code == 0
    lines = job.out.read_bytes().replace(b"bar 1\rbar 2\rdone", b"", 1)
    assert lines == b"rank 1: one\nrank 1: two\nrank 1: bar 3\nrank 1: last\n"
    assert job.err.read_bytes() == b"rank 1: problem\nrank 1: 20 %\n"


def test_much_output(tmp_path: Path) -> None:
    """None is lost, also where a rank ends right after it, and long lines come in pieces."""
    program = "os.write(1, b'')\nif rank: sys.stdout.write('x' * 300_000 + '\\n' + 'line\\n' * 20_000)"
    job = run(tmp_path, program, 3)
    text = job.out.read_text()
    for rank in (1, 2):
        mine = [line.removeprefix(f"rank {rank}: ") for line in text.splitlines() if line.startswith(f"rank {rank}: ")]
        assert "".join(mine).startswith("x" * 300_000) and mine.count("line") == 20_000


def test_variables(tmp_path: Path) -> None:
    """Each rank's own, one key for all, and the listening socket for rank 0 alone."""
    names = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    program = f"""
print([os.environ[name] for name in {names}], len(os.environ['GENESIS_JOB_KEY']), 'GENESIS_LISTENER' in os.environ)
print(sys.stdin.read() == '', sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[3:-1] if rank else '')
"""
    job = run(tmp_path, program, 2)
    assert "['2', '0', '0', '2', '127.0.0.1'] 64 True\nTrue" in job.out.read_text()
    assert "rank 1: ['2', '1', '1', '2', '127.0.0.1'] 64 False\nrank 1: True" in job.out.read_text()


CODES: dict[str, tuple[str, int, str]] = {
    "all well": ("sys.exit(0)", 0, ""),
    "all alike": ("sys.exit(3)", 3, ""),
    "a cause and its echo": ("time.sleep(0.3 * (rank == 2)); sys.exit(7 if rank == 2 else 10)", 7, ""),
    "the first cause": ("time.sleep(0.3 * rank); sys.exit(7 + rank)", 7, ""),
    "only echoes": ("sys.exit(10)", 10, ""),
    "too early": ("time.sleep(0.3 * rank); sys.exit(10 if rank else 0)", 10, "rank 0 of 3 ended successfully"),
    "too early, and found later": ("time.sleep(0.3 * rank); sys.exit(0 if rank == 1 else 10)", 10, "rank 1 of 3 ended"),
    "killed": ("os.kill(os.getpid(), 9) if rank == 1 else sys.exit(10)", 10, "rank 1 of 3 was killed by SIGKILL"),
    "crashed": ("os.kill(os.getpid(), 11) if rank == 1 else sys.exit(10)", 10, "rank 1 of 3 was killed by SIGSEGV"),
    "no handler yet": ("os.kill(os.getpid(), 15) if rank == 1 else sys.exit(10)", 143, ""),
    "late to save": ("time.sleep(0.8 * (rank == 0)); sys.exit(143)", 143, ""),
    "hangs": ("sys.exit(9) if rank == 1 else time.sleep(60)", 9, ""),
}


@pytest.mark.sample(cases=5)
@pytest.mark.parametrize("case", CODES)
def test_exit_codes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is the cause's. Ranks that outlive it by the grace period are killed."""
    for name in ("GRACE_S", "STOPPED_GRACE_S"):
        monkeypatch.setattr(sys.modules[launch.__module__], name, 0.5 if name == "GRACE_S" else 2.0)
    program, code, text = CODES[case]
    job = run(tmp_path, program, 3)
    assert job.fork.code == code
    assert text in job.fork.error.get("what", "")


BEFORE = {
    "handled": ("sys.exit(130) if rank == 1 else time.sleep(60)", 130, "ended the run before all ranks had joined"),
    "by the system": (
        "os.kill(os.getpid(), 15 if rank == 1 else 19)",
        143,
        "ended the run before all ranks had joined",
    ),
    "killed": ("os.kill(os.getpid(), 9 if rank == 0 else 19)", 10, "rank 0 of 3 was killed by SIGKILL"),
    "failed": ("sys.exit(3) if rank == 2 else time.sleep(60)", 3, ""),
}


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("case", BEFORE)
def test_before_ranks_have_met(case: str, tmp_path: Path) -> None:
    """None waits for one that is gone: there is nothing to save, and none but the launcher can see it."""
    began, (program, code, text) = time.monotonic(), BEFORE[case]
    job = run(tmp_path, program, 3, meet=False)
    assert job.fork.code == code and time.monotonic() - began < 2.5
    assert text in job.fork.error.get("what", "")


def test_a_rank_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended whatever the others do meanwhile."""
    monkeypatch.setattr(sys.modules[launch.__module__], "STOPPED_S", 1.0)
    began = time.monotonic()
    job = run(tmp_path, "os.kill(os.getpid(), 19) if rank == 1 else time.sleep(60)", 3)
    assert job.fork.code == 10 and 1.0 < time.monotonic() - began < 4
    assert job.fork.error["what"] == "rank 1 of 3 was stopped for 1 s"


def test_a_rank_that_ends_is_not_stopped() -> None:
    """Not even between its end and when it is waited for."""
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    found = []
    for event, number in ((os.WSTOPPED, signal.SIGCONT), (os.WEXITED, 0)):
        os.waitid(os.P_PID, pid, event | os.WNOWAIT)
        found.append(sys.modules[launch.__module__]._is_stopped(pid))
        os.kill(pid, number)
    os.waitpid(pid, 0)
    assert found == [True, False]


@pytest.mark.full
def test_a_rank_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped several times, each time for less than the limit."""
    monkeypatch.setattr(sys.modules[launch.__module__], "STOPPED_S", 1.4)
    job = start(tmp_path, [*QUICK, WAITS.replace("os.fork()", "1")], 2)
    job.wait_for("ready", 2)
    for number in (signal.SIGSTOP, signal.SIGCONT) * 4:
        os.kill(job.rank(1), number)
        time.sleep(0.4 if number == signal.SIGSTOP else 0.05)
    job.fork.kill(signal.SIGTERM)
    assert job.end() == 143


def test_usage(tmp_path: Path) -> None:
    """No ranks of ranks, no program that does not exist, none that cannot run."""
    (tmp_path / "text").write_text("text")
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for command, variables, code, text in (
        (["true"], rank, 2, "rank 0 of 2"),
        (["/no/such/program"], {}, 2, "/no/such/program was not found"),
        ([str(tmp_path / "text")], {}, 10, "rank 0 of 2 could not be started: Permission denied"),
    ):
        job = start(tmp_path, command, 2, **variables)
        assert job.end() == code and text in job.fork.error["what"]


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_signals_come_once(number: signal.Signals, to_group: bool, tmp_path: Path) -> None:
    """Each rank gets it once, also where a terminal sends it to the launcher's whole process group."""
    job = start(tmp_path, [*QUICK, WAITS], 3)
    job.wait_for("ready", 3)
    (os.killpg if to_group else os.kill)(job.fork.pid, number)
    assert job.end() == 128 + number
    assert job.out.read_text().count(f"got [{int(number)}]\n") == 3
    assert not job.left(1.0)  # nor what the ranks started


def test_a_terminal(tmp_path: Path) -> None:
    """Rank 0 has the terminal for its output, and Ctrl-C there reaches each rank once."""
    ours, theirs = os.openpty()

    def work() -> None:
        os.login_tty(theirs)
        program = WAITS.replace('print("ready"', 'print("ready", os.isatty(1)').replace("os.fork()", "1")
        os._exit(launch([*QUICK, program], 2))

    job, text, until = fork(work, tmp_path / "terminal.json"), b"", time.monotonic() + 20
    os.close(theirs)
    while text.count(b"ready") < 2 and time.monotonic() < until:
        text += os.read(ours, 4096)
    os.write(ours, b"\x03")
    while text.count(b"got [2]") < 2 and time.monotonic() < until:
        text += os.read(ours, 4096)
    ended([job])
    os.close(ours)
    assert job.code == 130 and text.count(b"got [2]\r\n") == 2, text
    assert b"rank 1: ready False" in text and b"ready True" in text


def test_every_signal_is_passed_on(tmp_path: Path) -> None:
    """A second one, which means "stop now", too."""
    job = start(tmp_path, [*QUICK, WAITS.replace("while not got", "while len(got) < 2")], 2)
    job.wait_for("ready", 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        job.fork.kill(number)
        time.sleep(0.05)
    assert job.end() == 130
    assert job.out.read_text().count("got [2, 15]\n") == 2


def test_a_signal_while_python_starts(tmp_path: Path) -> None:
    """It waits until the program takes it, also where it comes to one rank alone."""
    job = start(tmp_path, [*QUICK, WAITS.replace("os.fork()", "1")], 2)
    os.kill(job.first(), signal.SIGINT)
    assert job.end() == 130
    assert "got [2]" in job.out.read_text() and job.err.read_text() == ""


def test_no_rank_outlives_the_launcher(tmp_path: Path) -> None:
    job = start(tmp_path, [*QUICK, WAITS.replace("os.fork()", "1")], 3)
    job.wait_for("ready", 3)
    job.fork.kill(signal.SIGKILL)
    assert job.end() == -9
    assert not job.left(1.0)


def instants(count: int) -> list[tuple[str, float]]:
    """Who is hit by what, and when; the first few while the ranks are being started."""
    draw = random.Random(22)
    whats = ["SIGTERM", "SIGINT", "SIGKILL", "rank"]
    return [(whats[each % len(whats)], draw.uniform(0, 0.12)) for each in range(count)]


@pytest.mark.sample(cases=3)
@pytest.mark.parametrize(("what", "after"), instants(8))
def test_random_instants(what: str, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to the launcher or SIGKILL to a rank, also while ranks start: a known code, and nothing is left."""
    monkeypatch.setattr(sys.modules[launch.__module__], "GRACE_S", 0.3)
    job = start(tmp_path, [*QUICK, WAITS.replace("os.fork()", "1")], 3)
    time.sleep(after)
    if what == "rank":
        job.wait_for("ready", 3)
        os.kill(job.rank(1), signal.SIGKILL)
    else:
        job.fork.kill(signal.Signals[what])
    code = job.end()
    # Before the launcher's handlers are there, the signal ends it, and nothing has been started.
    expected = {"SIGTERM": {143, -15}, "SIGINT": {130, -2}, "SIGKILL": {-9}, "rank": {10}}[what]
    assert code in expected
    assert not job.left(1.0)


def test_real_ranks_save_at_one_step(tmp_path: Path) -> None:
    """SIGTERM to one rank: all save at one step, 143. Nothing listens but on loopback, and then nothing."""
    job = start(tmp_path, [*RANKS, "100000"], 2)
    seen: set[str] = set()
    until = time.monotonic() + 30
    while "ready" not in job.out.read_text():
        assert time.monotonic() < until, job.err.read_text()
        seen |= listening([*job.processes(), job.fork.pid])
        time.sleep(0.02)
    assert seen == {"0100007F"}
    assert not listening([*job.processes(), job.fork.pid])
    os.kill(job.rank(1), signal.SIGTERM)
    assert job.end() == 143
    saved = [line.removeprefix("rank 1: ") for line in job.out.read_text().splitlines() if "saved at" in line]
    assert len(saved) == 2 and saved[0] == saved[1]
    assert not job.left(1.0)


def test_real_ranks_that_die(tmp_path: Path) -> None:
    """SIGKILL of a rank: the launcher names rank and signal, the other rank says at once which one went; 10."""
    job = start(tmp_path, [*RANKS, "100000", "kill:1:3"], 2)
    job.wait_for("ready")
    began = time.monotonic()
    assert job.end() == 10 and job.fork.error["what"] == "rank 1 of 2 was killed by SIGKILL (signal 9)"
    assert time.monotonic() - began < 2
    assert "error: rank 1 is gone" in job.err.read_text()
    assert not job.left(1.0)


def test_the_search_for_processes_finds_them(tmp_path: Path) -> None:
    """What says that nothing is left sees what is."""
    job = start(tmp_path, [*QUICK, WAITS], 2)
    job.wait_for("ready", 2)
    assert len(job.processes()) >= 4 and job.rank(0) != job.rank(1)
    job.fork.kill(signal.SIGTERM)
    job.end()
