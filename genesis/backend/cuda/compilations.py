"""Compilations: kernels from the cache on disk, or made side by side, each once.

Each kernel has one entry in the cache (`genesis.files.cache`): what a launch needs, and the machine code. An entry that
is damaged, or that somebody else could have written, is compiled again and replaced.

Triton's passes and the assembler run outside Python's lock, what lies between them inside it: threads wait for each
other there, and whatever else the process does waits among them. So where many kernels are asked for at once, and there
are cores for them, workers compile them: processes that are given a kernel's name and signature, and answer with the
machine code. What a worker cannot take, or fails at, is compiled where it was asked for.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, BinaryIO

from genesis.backend.cuda.compile import Binary, Signature, compile_kernel, entry_name, packed, unpacked
from genesis.backend.host import usable_cores
from genesis.files.cache import Cache, user_folder

Progress = Callable[[int, int], None]
OWN = "genesis."  # modules whose kernels a worker can import without running anything of a user's
MANY = 8  # kernels that are asked for and not done, from which on a worker's start pays
FEWEST_CORES = 4
MOST = 12
LAST_JOB_S = 5.0  # which a worker may take to end
MAX_BYTES = 64 << 20  # of a kernel's entry in the cache


class _Worker:
    """One process."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},  # not one for each core
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the process that asks
        )

    def take(self, job: bytes) -> Binary | None:
        """What it makes; None where it fails, or gives no answer. Raises: OSError where the process has ended."""
        assert self.process.stdin and self.process.stdout
        _write(self.process.stdin, job)
        facts, image = _read(self.process.stdout), _read(self.process.stdout)
        if facts is None or image is None:
            raise BrokenPipeError
        return unpacked(facts, image)

    def ended(self) -> None:
        """Wait until it has ended, soon after it was told to, where it has a job, too."""
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
    """The workers of a process, which start as they are needed; none any more once one has failed or ended itself."""

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._ending = 0
        self._lock = threading.Lock()

    @functools.cached_property
    def most(self) -> int:
        """As the cores allow, which the ranks of a host share."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        cores = usable_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
        return min(MOST, cores - 1) if cores >= FEWEST_CORES and sys.executable else 0

    @property
    def running(self) -> int:
        """Processes that have not ended."""
        return len(self._all) + self._ending

    def made(self, kernel: Any, signature: Signature, capability: tuple[int, int], *, waiting: int) -> Binary | None:
        """What a worker makes of a kernel; None without a worker. `waiting` kernels are not done, this one included."""
        if not self.most:
            return None
        parts = (entry_name(kernel, signature, capability), kernel, signature, capability)
        try:
            job = json.dumps([_plain(each) for each in parts]).encode()
        except TypeError:
            return None
        worker = self._taken(waiting)
        if worker is None:
            return None
        found = None
        with suppress(OSError):  # it has ended
            found = worker.take(job)
        with self._lock:
            if found is None:
                self.most = 0
            self._idle.append(worker)
        return found

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
            self._ending += len(ended)
        for worker in ended:
            worker.process.terminate()
        for worker in ended:
            worker.ended()
            with self._lock:
                self._ending -= 1


class _Work:
    """The compilations of this process, side by side in threads, which wait for workers where many are asked for."""

    def __init__(self) -> None:
        self.asked = self.done = 0
        self.workers = Workers()
        self.listeners: list[Progress] = []
        self.lock = threading.Lock()

    @functools.cached_property
    def threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(usable_cores(), 16), thread_name_prefix="genesis-compile")

    def start(self, make: Callable[[], Binary]) -> Future[Binary]:
        with self.lock:
            self.asked += 1
        self._tell()
        future = self.threads.submit(make)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Binary]) -> None:
        """It is done, has failed, or was given up."""
        with self.lock:
            self.done += 1
            is_last = self.done == self.asked
        self._tell()
        if is_last:
            self.workers.end()

    def cancel(self) -> None:
        """Give up what has not begun."""
        if (threads := self.__dict__.pop("threads", None)) is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener(self.done, self.asked)


_work = _Work()


@contextmanager
def progress(listener: Progress) -> Iterator[None]:
    """Call `listener(done, asked)` at every kernel that is asked for or done inside the block, from any thread."""
    _work.listeners.append(listener)
    try:
        yield
    finally:
        _work.listeners.remove(listener)


def is_compiling() -> bool:
    """Whether compilations that were asked for have not ended."""
    return _work.done < _work.asked


@contextmanager
def given_up_on_error() -> Iterator[None]:
    """Where the block ends by an error, give up compilations that have not begun: the process's end waits for all."""
    try:
        yield
    except BaseException:
        _work.cancel()
        raise


def compiling(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Future[Binary]:
    """The machine code of `kernel` for a signature: from the cache, or from a compilation that starts now."""
    cache, name = _cache(cache_folder()), entry_name(kernel, signature, capability)
    found = _found(cache, name)
    if found is None:
        return _work.start(functools.partial(_made_once, cache, name, kernel, signature, capability))
    ready: Future[Binary] = Future()
    ready.set_result(found)
    return ready


def _made_once(cache: Cache, name: str, kernel: Any, signature: Signature, capability: tuple[int, int]) -> Binary:
    """Compile where no other process does: ranks of one host ask for the same kernels at the same time."""
    with cache.alone(name):
        found = _found(cache, name)
        if found is None:
            found = _work.workers.made(kernel, signature, capability, waiting=_work.asked - _work.done)
            found = compile_kernel(kernel, signature, capability) if found is None else found
            _keep(cache, name, found)
    return found


# --- The cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept: XDG_CACHE_HOME/genesis/kernels, by default below ~/.cache."""
    return user_folder("kernels")


@functools.cache
def _cache(folder: Path) -> Cache:
    return Cache.of_user(folder)


def _found(cache: Cache, name: str) -> Binary | None:
    entry = cache.find(name, limit=MAX_BYTES)
    try:
        return None if entry is None else unpacked(bytes(entry.part("facts")), bytes(entry.part("image")))
    except KeyError:
        return None


def _keep(cache: Cache, name: str, made: Binary) -> None:
    facts, image = packed(made)
    cache.put(name, {"facts": facts, "image": image})


# --- What a worker is told, and answers -------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A value as JSON. Raises TypeError where another process could not find it: functions go by their names."""
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


def _value(plain: dict[str, Any]) -> Any:
    """What `_plain` made an object of."""
    import triton.language as tl

    ((kind, content),) = plain.items()
    if kind == "function":
        return getattr(import_module(content[0]), content[1])
    if kind == "tuple":
        return tuple(content)
    return tl.dtype(content) if kind == "type" else tl.constexpr(content)


# Jobs and answers are parts of bytes, each behind its length: a job is one part of JSON, an answer the facts as
# JSON and then the image, or two empty parts where the worker failed.


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Do jobs until there are no more: a worker ends with its input, so that none outlives the process that asks."""
    while (job := _read(jobs)) is not None:
        facts, image = b"", b""
        with suppress(Exception):  # it is compiled again where it was asked for, and fails there
            name, kernel, signature, capability = json.loads(job, object_hook=_value)
            signature = Signature(*signature)
            if entry_name(kernel, signature, capability) == name:  # of the same source
                facts, image = packed(compile_kernel(kernel, signature, capability))
        for part in (facts, image):
            _write(answers, part)


def _write(stream: IO[bytes], part: bytes) -> None:
    stream.write(len(part).to_bytes(8, "little") + part)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """The next part; None at the stream's end."""
    size = stream.read(8)
    part = stream.read(int.from_bytes(size, "little"))
    return None if len(size) < 8 or len(part) < int.from_bytes(size, "little") else part


def _end(*_: Any) -> None:
    """Leave, and remove temporary files undisturbed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def main() -> None:
    """A worker's process, which leaves no temporary file behind."""
    os.nice(5)  # what the process that asked does meanwhile goes first
    signal.signal(signal.SIGTERM, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    serve(sys.stdin.buffer, answers)
