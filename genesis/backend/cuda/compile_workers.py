"""Processes that compile kernels, for when many are asked for at once and there are cores for them.

Triton's passes and the assembler run outside Python's lock, what lies between them inside it: threads alone make about
four kernels at a time of one, and whatever else the process does waits for its turn among them. A worker is given a
kernel's name and signature, and leaves the machine code in the cache, where the process that asked finds it. What a
worker cannot take, or fails at, is compiled where it was asked for.

    python -m genesis.backend.cuda.compile_workers < jobs > answers

A job is eight bytes that give its length, and JSON; an answer one byte, 1 where the entry was written. A worker ends
with its input, so that none outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Workers", "encoded", "serve"]

OWN = "genesis."  # modules whose kernels a worker can import without running anything of a user's
MANY = 8  # kernels that are asked for and not done, from which on a worker's start pays
FEWEST_CORES = 4
MOST = 12
LAST_JOB_S = 5.0  # which a worker may take to end


def encoded(*job: Any) -> bytes | None:
    """A job for a worker as JSON; None where it has a part that another process could not find."""
    try:
        return json.dumps([_plain(each) for each in job]).encode()
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """A value as JSON has it: tuples, types, and kernels with their functions, which go by their names, as objects."""
    import triton.language as tl

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if type(value) is tl.dtype:
        return {"type": value.name}
    if type(value) is tl.constexpr:
        return {"constant": _plain(value.value)}
    function = getattr(value, "fn", None)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module.startswith(OWN) or getattr(sys.modules.get(module), name, None) is not value:
        raise TypeError(f"{value!r} is not found by its name")
    return {"function": [module, name]}


def _value(plain: Any) -> Any:
    """What `_plain` was made from."""
    import triton.language as tl

    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "function":
        return getattr(import_module(content[0]), content[1])
    if kind == "tuple":
        return tuple(_value(each) for each in content)
    return tl.dtype(content) if kind == "type" else tl.constexpr(_value(content))


class _Worker:
    """One process."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "genesis.backend.cuda.compile_workers"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the process that asks
        )

    def take(self, job: bytes) -> bool:
        """Whether the job was done. Raises: OSError where the process has ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(len(job).to_bytes(8, "little") + job)
        self.process.stdin.flush()
        answer = self.process.stdout.read(1)
        if not answer:
            raise BrokenPipeError
        return answer == b"\1"

    def end(self) -> None:
        """Stop it, soon where it has a job."""
        self.process.terminate()
        try:
            self.process.wait(LAST_JOB_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()


class Workers:
    """The workers of a process, which start as they are needed.

    Attributes:
        most: how many there may be. None are used any more once one has failed at a job or ended by itself.
    """

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        self.most = min(MOST, cores - 1) if cores >= FEWEST_CORES else 0
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def made(self, encode: Callable[[], bytes | None], waiting: int) -> bool:
        """Whether a worker has done a job, for which the thread waits here.

        Args:
            encode: see `encoded`.
            waiting: jobs that are not done, this one included.
        """
        worker = self._taken(waiting)
        if worker is None:
            return False
        job, is_done = encode(), False
        with suppress(OSError):
            is_done = job is not None and worker.take(job)
        with self._lock:
            if not is_done and job is not None:
                self.most = 0
            self._idle.append(worker)
        return is_done

    def _taken(self, waiting: int) -> _Worker | None:
        """A worker for the thread alone; None where there is none to have."""
        with self._lock:
            if self.most and self._idle:
                return self._idle.pop()
            if waiting < MANY or len(self._all) >= self.most:
                return None
            try:
                worker = _Worker()
            except OSError:  # no more processes or descriptors
                self.most = 0
                return None
            self._all.append(worker)
            return worker

    def end(self) -> None:
        """Stop all. Jobs that run fail, and are done where they were asked for."""
        with self._lock:
            ended, self._all, self._idle = self._all, [], []
        for worker in ended:
            worker.end()


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Do jobs until there are no more."""
    from genesis.backend.cuda.compile import Signature, compiled_into

    while len(size := jobs.read(8)) == 8:
        job, is_done = jobs.read(int.from_bytes(size, "little")), False
        with suppress(Exception):  # it is compiled again where it was asked for, and fails there
            folder, name, kernel, signature, capability = (_value(each) for each in json.loads(job))
            is_done = compiled_into(Path(folder), name, kernel, Signature(*signature), capability)
        answers.write(b"\1" if is_done else b"\0")
        answers.flush()


def main() -> None:
    """A worker's process, which leaves no temporary file behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
