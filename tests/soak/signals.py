"""Every command ended by SIGINT, SIGTERM and SIGHUP at random instants: `make signals`.

    python -m tests.soak.signals --times 8
    python -m tests.soak.signals --commands export generate --times 50 --seed 1

The commands are those of `make faults`, as processes of their own. Each time: the exit code of the signal (or that of a
command which was faster), no traceback, no "bug in Genesis", a word or the end within a second, and an end soon after;
nothing of the user's is changed, an output is whole or not there, and no process that the command started is left.
Prints what failed; the exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.sweep import CASES, ENVIRONMENT, ROOT, Case, Worker, World, owned, pulled, pulled_from, workers

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WORD_S = 1.0  # until something is said, or all is over
END_S = 20.0
LEFT_S = 10.0  # in which what a command started must end after it: its imports, at the most
SERVED_S = 0.5  # that a server runs before it is ended, at most
MARK = "GENESIS_SIGNALS_RUN"  # a variable by which what a command started is found


class Process:
    """A command as it runs, with what it has said."""

    def __init__(self, case: Case, folder: Path, environment: dict[str, str]) -> None:
        self.case, self.folder, self.mark = case, folder, f"{os.getpid()}-{time.monotonic_ns()}"
        self._err = folder / "streams" / "stderr"
        with (
            open(folder / case.stdin if case.stdin else os.devnull, "rb") as stdin,
            open(folder / "streams" / "stdout", "wb") as out,
            open(self._err, "wb") as err,
        ):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "genesis_cli.main", *case.words],
                cwd=folder,
                env={**os.environ, **ENVIRONMENT, **environment, MARK: self.mark, "PYTHONPATH": str(ROOT)},
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_listen,  # noqa: PLW1509
            )

    @property
    def told(self) -> str:
        """What it has written to stderr."""
        return self._err.read_text(errors="replace")

    def is_over(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def end(self, number: int) -> tuple[int | None, float, float]:
        """Send a signal; the exit code (None: it did not end), and the seconds until a word and until the end."""
        before, begin, word = self.told, time.monotonic(), None
        os.kill(self._process.pid, number)
        while not self.is_over(0.005) and time.monotonic() - begin < END_S:
            if word is None and self.told != before:
                word = time.monotonic() - begin
        took = time.monotonic() - begin
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return None, took if word is None else word, took
        return self._process.returncode, took if word is None else word, took

    def left(self) -> list[str]:
        """The processes that it started and that run on."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


def _listen() -> None:
    """Programs that a shell starts in the background ignore SIGINT, and so do their children: not these."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def problems(
    process: Process, world: World, number: int, end: tuple[int | None, float, float], whole: dict[str, bytes]
) -> Iterator[str]:
    """What is wrong with how a command ended; `whole` are its outputs when nobody ends it."""
    (code, word, took), case, folder = end, process.case, process.folder
    is_python = "init_import_site" in process.told  # which starts: there is nothing of ours yet
    if code is None:
        yield f"no end within {END_S:g} s"
    elif code not in (0, -number, 128 + number) and not is_python:
        yield f"exit code {code}"
    if number == signal.SIGINT and code == -number and not set(case.made) <= set(outputs(case, folder)):
        yield "ended by the signal itself, before its work was done"
    if word > WORD_S:
        yield f"silent for {word:.2f} s, and ended after {took:.2f} s"
    if not is_python and ("Traceback" in process.told or "a bug in Genesis" in process.told):
        yield "a traceback or a bug report"
    if owned(folder, case) != owned(world.folder / case.start, case):
        yield "files of the user's are changed"
    for name, content in outputs(case, folder).items():
        if not _is_whole(name, content, whole.get(name, b"")):
            yield f"{name} has {len(content)} bytes, not {len(whole[name])}, and they are no part of it"
        if code == 0 and not content:
            yield f"exit 0 with an empty {name}"
    if case.pulls and (found := pulled(folder)) and found != pulled_from(world):
        yield "the cache names a model that it has not"
    deadline = time.monotonic() + LEFT_S
    while (left := process.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        yield f"left running: {left}"


def _is_whole(name: str, content: bytes, whole: bytes) -> bool:
    """Whether a file holds all of an output, or of lines those that came."""
    if name.endswith(".json"):  # with times in it, which differ
        with contextlib.suppress(ValueError):
            return bool(json.loads(content))
        return False
    return len(content) == len(whole) or (name.endswith(".jsonl") and whole.startswith(content))


def outputs(case: Case, folder: Path) -> dict[str, bytes]:
    """The outputs of a case that are there."""
    return {name: (folder / name).read_bytes() for name in case.made if (folder / name).is_file()}


def seconds_of(case: Case, world: World, folder: Path, environment: dict[str, str]) -> tuple[float, dict[str, bytes]]:
    """How long a command takes (a server: until it answers, and a bit), and what it makes."""
    world.fill(case, folder)
    begin = time.monotonic()
    process = Process(case, folder, environment)
    if not case.client:
        assert process.is_over(120), f"{case.name} takes more than 120 s"
        return time.monotonic() - begin, outputs(case, folder)
    while not any("http://" in (folder / "streams" / name).read_text() for name in ("stdout", "stderr")):
        assert not process.is_over(0.05), process.told
    seconds = time.monotonic() - begin
    process.end(signal.SIGTERM)
    return seconds + SERVED_S, {}


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commands", nargs="*", metavar="NAME", help="of: " + ", ".join(case.name for case in CASES))
    parser.add_argument("--times", type=int, default=4, help="instants of each command and signal")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failed = total = 0
    with workers(1, 60) as (world, [worker]):
        environment = _environment(worker)
        folder = worker.folder / "here"
        for case in (case for case in CASES if not asked.commands or case.name in asked.commands):
            seconds, whole = seconds_of(case, world, folder, environment)
            chance, wrong = random.Random(f"{asked.seed} {case.name}"), 0
            slowest = 0.0
            for number in SIGNALS * asked.times:
                world.fill(case, folder)
                process, instant = Process(case, folder, environment), chance.uniform(0, seconds)
                if process.is_over(instant):
                    continue
                end = process.end(number)
                slowest, total = max(slowest, end[1]), total + 1
                found = list(problems(process, world, number, end, whole))
                if found:
                    wrong += 1
                    print(f"{case.name}, {signal.Signals(number).name} after {instant:.2f} s: exit {end[0]}: "
                          f"{'; '.join(found)}\n    " + process.told.strip().replace("\n", "\n    "))  # fmt: skip
            print(f"{case.name:<20} {seconds:5.1f} s, a word after {slowest:.2f} s at most; {wrong} wrong", flush=True)
            failed += wrong
    print(f"{total} ended, {failed} wrong")
    return int(failed > 0)


def _environment(worker: Worker) -> dict[str, str]:
    here = worker.folder / "here"
    return {
        "HOME": str(here / "home"), "TMPDIR": str(here / "tmp"), "HF_ENDPOINT": worker.endpoint,
        "HF_HUB_CACHE": "hub", "HF_TOKEN_PATH": os.devnull,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
