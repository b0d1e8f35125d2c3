"""A warm process that runs commands in forked children, with a fault if asked for: a real run without a start-up.

Reads one JSON request a line from stdin and answers each with a line. It has no threads, so that a child cannot hang in
a lock that one of them held. The client is `tests.train.runs.Forks`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import typer

import genesis.data.pipeline
import genesis.distributed.rendezvous
import genesis.files.filesystem
import genesis.train.checkpoint
import genesis.train.loop
import genesis.train.ranks
from genesis.distributed import launch
from genesis.files.filesystem import DEFAULT, Call, Observer
from genesis.train.saving import SAVER
from genesis_cli import session
from genesis_cli.app import app
from genesis_cli.main import main
from genesis_models.blocks import CausalLM
from tests.files.faults import FailAt, KillAt, OfThread, ShortWrites
from tests.interpreter import hasten
from tests.train.warm_ranks import start_warm

PATIENCE_SECONDS = 60


def observe(observer: Observer) -> None:
    """Show it every file-system call, those of caches too."""
    DEFAULT._observer = observer


def kill_at(number: int) -> None:
    """SIGKILL just before file-system call `number`, half of whose bytes are written where it writes."""
    observe(KillAt(number))


def kill_in_save(number: int) -> None:
    """SIGKILL just before call `number` of those that a thread makes which saves in the background."""
    observe(OfThread(SAVER, KillAt(number)))


def fail_at(number: int, code: int, forever: bool) -> None:
    """An error instead of file-system call `number`."""
    observe(FailAt(number, code, forever=forever))


def short_writes(limit: int) -> None:
    """Writes that place only some bytes."""
    observe(ShortWrites(limit))


def signal_at_call(number: int, *signals: int) -> None:
    """Signals to itself just before file-system call `number`."""
    calls = iter(range(1, 1 << 30))

    def signalling(call: Call) -> None:
        if next(calls) == number:
            for one in signals:
                os.kill(os.getpid(), one)

    observe(signalling)


def signal_in(place: str, *signals: int) -> None:
    """Signals to itself when `place` (a function of a run) is first entered."""
    module, name = PLACES[place]
    before, pending = getattr(module, name), list(signals)

    def entered(*args: Any, **kwargs: Any) -> Any:
        while pending:
            os.kill(os.getpid(), pending.pop(0))
        return before(*args, **kwargs)

    setattr(module, name, entered)


def nan_at(step: int) -> None:
    """A loss that is NaN from `step` on."""
    before = CausalLM.loss
    calls = iter(range(1 << 30))

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        loss = before(*args, **kwargs)
        return loss if next(calls) // 2 + 1 < step else loss * float("nan")  # two micro-batches a step

    CausalLM.loss = poisoned  # type: ignore[method-assign]


def hang_in(place: str) -> None:
    """Stops itself when `place` is first entered, as SIGSTOP from outside does."""
    signal_in(place, signal.SIGSTOP)


def raise_in(place: str, kind: str) -> None:
    """An error of `kind` when `place` is first entered."""
    module, name = PLACES[place]

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ERRORS[kind]()

    setattr(module, name, failing)


def exit_in(place: str) -> None:
    """The end of the process, as if all were well, when `place` is first entered."""
    module, name = PLACES[place]
    setattr(module, name, lambda *args, **kwargs: os._exit(0))


def limits(seconds: float) -> None:
    """Ranks wait so long for each other, and the first steps take no longer."""
    ranks = genesis.train.ranks
    ranks.STEP_S = ranks.FIRST_STEPS_S = session.training.FIRST_STEPS_S = seconds
    session.ranks.JOIN_S = seconds


def stopped_within(seconds: float) -> None:
    """The launcher ends a rank that is stopped for so long."""
    sys.modules[launch.__module__].STOPPED_S = seconds  # type: ignore[attr-defined]


def slow_save(seconds: float) -> None:
    """Saving takes so long."""
    before = genesis.train.checkpoint.write_tensors

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return before(*args, **kwargs)

    genesis.train.checkpoint.write_tensors = slow  # type: ignore[assignment]


def several(*faults: Any) -> None:
    """Each of some faults."""
    for name, *arguments in faults:
        FAULTS[name](*arguments)


def on_rank(rank: int, *fault: Any) -> None:
    """A fault on one rank of those that this process launches; on all where `rank` is -1."""
    FAULTS_OF_RANKS[rank] = fault


def in_folder(path: str) -> None:
    """Relative paths are below `path`."""
    os.chdir(path)


def release(version: str) -> None:
    """Another release of Genesis."""
    session.ranks.__version__ = version  # type: ignore[attr-defined]


def interpreted() -> None:
    """Kernels run in Triton's interpreter, as in the suite."""
    hasten()


def beside(name: str, *arguments: Any) -> None:
    """A fault of `tests.cuda.stream_order`, which imports Triton."""
    getattr(importlib.import_module("tests.cuda.stream_order"), name)(*arguments)


def counted() -> None:
    """Runs learn the objective of `tests.train.counted`."""
    importlib.import_module("tests.train.counted").install()


ERRORS: dict[str, Callable[[], BaseException]] = {
    "bug": lambda: RuntimeError("planted"),
    "memory": lambda: MemoryError("planted"),
    "disk": lambda: OSError(28, "No space left on device"),
}
PLACES = {
    "start": (session.run_folder, "check_reads_back"),
    "joining": (session.ranks, "job_key"),
    "listening": (genesis.distributed.rendezvous, "wait"),
    "handshake": (genesis.distributed.rendezvous, "answer_challenge"),
    "preparation": (session.training, "prepare_data"),
    "reading": (genesis.data.pipeline, "index_documents"),
    "gzip": (genesis.data.pipeline, "gzip_bits_per_byte"),
    "model": (session.training, "make_model"),
    "loading": (session.training.Checkpoints, "load"),
    "picture": (session.training, "loss_picture"),
    "tokenizer": (genesis.data.pipeline, "train_bpe"),
    "tokens": (genesis.data.pipeline, "tokenize"),
    "step": (genesis.train.loop, "take_step"),
    "evaluation": (genesis.train.loop, "evaluate"),
    "sampling": (session.training, "sample_texts"),
    "saving": (genesis.train.checkpoint, "write_tensors"),
    "closing": (session.training, "_finish"),
}
FAULTS: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        *(kill_at, fail_at, short_writes, signal_at_call, signal_in, nan_at, hang_in, raise_in, exit_in, limits),
        *(kill_in_save, slow_save, stopped_within, several, on_rank, in_folder, release, interpreted, beside, counted),
    )
}
FAULTS_OF_RANKS: dict[int, tuple[Any, ...]] = {}


def child(request: dict[str, Any]) -> int:
    """Run the request's words as the command line does; returns the exit code."""
    for number, mode in ((1, os.O_WRONLY), (2, os.O_WRONLY)):
        descriptor = os.open(request["streams"][number - 1], mode | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(request["environment"])
    genesis.files.filesystem._flush = lambda descriptor: None  # a kill loses nothing that the kernel was given
    if not request["picture"]:
        session.training.loss_picture = lambda folder: None
    if request["fault"]:
        name, *arguments = request["fault"]
        FAULTS[name](*arguments)
    start_warm(rank)
    # A run that goes wild must not take the machine with it.
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE_SECONDS, PATIENCE_SECONDS))
    return main(request["words"])


def rank(words: list[str]) -> int:
    """A rank of what the child launches."""
    fault = FAULTS_OF_RANKS.get(int(os.environ["RANK"]), FAULTS_OF_RANKS.get(-1))
    if fault is not None:
        FAULTS[fault[0]](*fault[1:])
    return main(words)


def run_child(request: dict[str, Any]) -> int:
    """As `child`; a signal that comes before the command line is there ends it as it ends an interpreter."""
    try:
        return child(request)
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        return 130


def wait(pid: int) -> int | None:
    """The child's wait status; None if it had to be killed because it did not end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve() -> None:
    """Answer requests until stdin ends."""
    # The children's own standard streams must not be the ones that the client talks through.
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    running: set[int] = set()
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            answer: dict[str, Any] = {"status": wait(request["wait"])}
            running.discard(request["wait"])
        else:
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.close(answers.fileno())
                os._exit(run_child(request))
            running.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), file=answers, flush=True)
    for pid in running:  # of a test that failed before it waited
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    # What a first run imports and builds on its way, every child would import and build again.
    for name in ("genesis_models.qwen3", "threadpoolctl", "tokenizers", "numpy.random", "cuda.bindings.driver"):
        with suppress(ImportError):
            importlib.import_module(name)
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)
    serve()
