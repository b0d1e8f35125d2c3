"""Compilation of kernels: each is loaded from the disk cache or compiled once, in parallel with others.

Each kernel has one entry in the cache (`genesis.files.cache`): the facts for its launches, and the machine code. If an
entry is damaged, or another user could have written it, the kernel is compiled again and the entry is replaced.

Triton's passes and the assembler release the GIL, but the code between them holds it. So threads that compile wait for
each other and delay the rest of the process. If many kernels are requested at once and there are enough cores, worker
processes compile them: a worker gets a kernel's name and signature and returns the machine code. The requesting process
compiles whatever a worker cannot take or fails to compile.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
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
OWN_PACKAGE = "genesis."  # a worker can import kernels of these modules without running code of the user
WORKER_THRESHOLD = 8  # unfinished requests that justify starting a worker
MIN_CORES = 4
MAX_WORKERS = 12
STOP_GRACE_S = 5.0  # grace period for the current job of a worker that is stopped
MAX_BYTES = 64 << 20  # of a kernel's cache entry


class _Worker:
    """One worker process."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
        # Triton and ptxas leave files behind when they are interrupted. The worker makes this folder: one that this
        # process made would stay if the process were killed before the worker starts.
        self.temporary = os.path.join(tempfile.gettempdir(), f"genesis-compile-{secrets.token_hex(8)}")
        # Not one BLAS thread per core.
        environment = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "TMPDIR": self.temporary}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()", self.temporary],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C must reach only the parent
        )

    def compile(self, job: bytes) -> Binary | None:
        """Compile a job; None if the worker fails. Raises OSError if the process has ended."""
        assert self.process.stdin and self.process.stdout
        _write(self.process.stdin, job)
        facts, image = _read(self.process.stdout), _read(self.process.stdout)
        if facts is None or image is None:
            raise BrokenPipeError
        return unpacked(facts, image)

    def wait_or_kill(self) -> None:
        """Wait for a process that was told to end; kill it if it takes longer than `STOP_GRACE_S`."""
        try:
            self.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


class Workers:
    """The workers of this process, started on demand; after one has failed or died, none is used again."""

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._ending = 0
        self._lock = threading.Lock()

    @functools.cached_property
    def most(self) -> int:
        """The most workers to run, given the cores that each rank of this host can use."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        cores = usable_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
        return min(MAX_WORKERS, cores - 1) if cores >= MIN_CORES and sys.executable else 0

    @property
    def running(self) -> int:
        """The number of processes that have not ended."""
        return len(self._all) + self._ending

    def compile(self, kernel: Any, signature: Signature, capability: tuple[int, int], *, waiting: int) -> Binary | None:
        """Compile a kernel in a worker, or return None; `waiting` counts unfinished kernels, including this one."""
        if not self.most:
            return None
        parts = (entry_name(kernel, signature, capability), kernel, signature, capability)
        try:
            job = json.dumps([_encode(each) for each in parts]).encode()
        except TypeError:
            return None
        worker = self._claim(waiting)
        if worker is None:
            return None
        binary = None
        with suppress(OSError, ValueError):  # the worker has died, or was stopped and has no pipes
            binary = worker.compile(job)
        with self._lock:
            if worker in self._all:  # not stopped
                self.most = 0 if binary is None else self.most
                self._idle.append(worker)
        return binary

    def _claim(self, waiting: int) -> _Worker | None:
        """A worker for the calling thread only; None if none is available or worth starting."""
        with self._lock:
            if self.most and self._idle:
                return self._idle.pop()
            if waiting < WORKER_THRESHOLD or len(self._all) >= self.most:
                return None
            try:
                worker = _Worker()
            except OSError:  # no processes or descriptors left
                self.most = 0
                return None
            self._all.append(worker)
            return worker

    def end(self) -> None:
        """Stop all workers. Their running jobs fail and are then compiled in this process."""
        with self._lock:
            ended, self._all, self._idle = self._all, [], []
            self._ending += len(ended)
        for worker in ended:
            worker.process.terminate()
        for worker in ended:
            worker.wait_or_kill()
            with self._lock:
                self._ending -= 1


class _Work:
    """The compilations of this process: they run in threads, which use workers when many kernels are requested."""

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
        self._notify()
        future = self.threads.submit(make)
        future.add_done_callback(self._finished)
        return future

    def _finished(self, future: Future[Binary]) -> None:
        """Count a compilation that has succeeded, failed or was cancelled."""
        with self.lock:
            self.done += 1
            is_last = self.done == self.asked
        self._notify()
        if is_last:
            self.workers.end()

    def cancel(self) -> None:
        """Cancel compilations that have not started."""
        if (threads := self.__dict__.pop("threads", None)) is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _notify(self) -> None:
        for listener in tuple(self.listeners):
            listener(self.done, self.asked)


_work = _Work()


@contextmanager
def progress(listener: Progress) -> Iterator[None]:
    """Call `listener(done, asked)` for every kernel requested or finished inside the block, from any thread."""
    _work.listeners.append(listener)
    try:
        yield
    finally:
        _work.listeners.remove(listener)


def is_compiling() -> bool:
    """Whether requested compilations are unfinished."""
    return _work.done < _work.asked


@contextmanager
def cancelled_on_error() -> Iterator[None]:
    """Cancel pending compilations if the block raises: the process would otherwise wait for them when it exits."""
    try:
        yield
    except BaseException:
        _work.cancel()
        raise


def compiling(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Future[Binary]:
    """Return the machine code of `kernel` for a signature, from the cache or from a compilation that starts now."""
    cache, name = _cache(cache_folder()), entry_name(kernel, signature, capability)
    binary = _cached_binary(cache, name)
    if binary is None:
        return _work.start(functools.partial(_compile_once, cache, name, kernel, signature, capability))
    ready: Future[Binary] = Future()
    ready.set_result(binary)
    return ready


def _compile_once(cache: Cache, name: str, kernel: Any, signature: Signature, capability: tuple[int, int]) -> Binary:
    """Compile under the entry's lock, because the ranks of a host request the same kernels at the same time."""
    with cache.alone(name):
        binary = _cached_binary(cache, name)
        if binary is None:
            binary = _work.workers.compile(kernel, signature, capability, waiting=_work.asked - _work.done)
            binary = compile_kernel(kernel, signature, capability) if binary is None else binary
            _store(cache, name, binary)
    return binary


# --- The cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of compiled kernels: XDG_CACHE_HOME/genesis/kernels, by default below ~/.cache."""
    return user_folder("kernels")


@functools.cache
def _cache(folder: Path) -> Cache:
    return Cache.of_user(folder)


def _cached_binary(cache: Cache, name: str) -> Binary | None:
    entry = cache.find(name, limit=MAX_BYTES)
    try:
        return None if entry is None else unpacked(bytes(entry.part("facts")), bytes(entry.part("image")))
    except KeyError:
        return None


def _store(cache: Cache, name: str, binary: Binary) -> None:
    facts, image = packed(binary)
    cache.put(name, {"facts": facts, "image": image})


# --- Messages to and from a worker ------------------------------------------------------------------------------------


def _encode(value: Any) -> Any:
    """A value as JSON; functions are encoded by name. Raises TypeError if another process could not import it."""
    import triton.language as tl

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encode(each) for each in value]}
    if type(value) is tl.dtype:
        return {"type": value.name}
    if type(value) is tl.constexpr:
        return {"constant": _encode(value.value)}
    function = getattr(value, "fn", None)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module.startswith(OWN_PACKAGE) or getattr(sys.modules.get(module), name, None) is not value:
        raise TypeError(f"{value!r} cannot be imported by its name")
    return {"function": [module, name]}


def _decode(plain: dict[str, Any]) -> Any:
    """The value that `_encode` turned into an object."""
    import triton.language as tl

    ((kind, content),) = plain.items()
    if kind == "function":
        return getattr(import_module(content[0]), content[1])
    if kind == "tuple":
        return tuple(content)
    return tl.dtype(content) if kind == "type" else tl.constexpr(content)


# Jobs and answers consist of parts, each preceded by its length. A job is one part of JSON. An answer is the facts as
# JSON and then the image, or two empty parts if the worker failed.


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Compile jobs until the input ends, so that no worker outlives its parent process."""
    while (job := _read(jobs)) is not None:
        facts, image = b"", b""
        with suppress(Exception):  # the parent compiles it again and gets the error
            name, kernel, signature, capability = json.loads(job, object_hook=_decode)
            signature = Signature(*signature)
            if entry_name(kernel, signature, capability) == name:  # both processes have the same source
                facts, image = packed(compile_kernel(kernel, signature, capability))
        for part in (facts, image):
            _write(answers, part)


def _write(stream: IO[bytes], part: bytes) -> None:
    stream.write(len(part).to_bytes(8, "little") + part)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    size = stream.read(8)
    part = stream.read(int.from_bytes(size, "little"))
    return None if len(size) < 8 or len(part) < int.from_bytes(size, "little") else part


def _exit_on_sigterm(*_: Any) -> None:
    """Exit, and remove temporary files undisturbed by another signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def main() -> None:
    """The main function of a worker process, which leaves no temporary file behind."""
    os.nice(5)  # the parent's own work has priority
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not reach the answers
    try:
        os.mkdir(sys.argv[1], 0o700)
        serve(sys.stdin.buffer, answers)
    finally:
        shutil.rmtree(sys.argv[1], ignore_errors=True)  # the parent may have been killed
