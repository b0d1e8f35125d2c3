"""Every system call of every command made to fail once: `make faults`.

    python -m tests.faults.sweep
    python -m tests.faults.sweep --commands train eval --errors EIO --every 10

A command is run once to count its calls on files of the user's (configuration, data, model, cache, output, home,
temporary files, stdout; not Python's and its libraries' own), then once for each call and each error with that call
failing. Each time: an exit code of a named class, no traceback, no "bug in Genesis", an end within 10 s, a truthful 0
(the output is that of the run without a fault), and nothing of the user's changed. A training run is then resumed
without a fault and must come to the state hash of the uninterrupted run. Prints a table and what failed; the exit code
is 1 if anything did.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.faults.clients import Answer
from tests.hub import Hub, served
from tests.train.chats import make_chats

__all__ = ["CASES", "ERRORS", "Case", "Fault", "Finding", "Shim", "Tally", "Worker", "World", "sweep"]

ROOT = Path(__file__).resolve().parents[2]
ERRORS = ("EACCES", "ENOENT", "EIO", "ENOSPC", "EMFILE")
ALLOWED = frozenset((0, 2, 3, 4, 5, 6, 8, 9, 11))
PATIENCE_SECONDS = 10.0
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LAST = 2  # the step of the last checkpoint
CONFIG = """
model:
  config:
    model_type: qwen3
    vocab_size: 272
    hidden_size: 32
    intermediate_size: 32
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 1
    head_dim: 16
    max_position_embeddings: 32
    tie_word_embeddings: true
data: {train: ["docs"], seq_len: 32, eval_fraction: 0.3, cache_dir: cache}
train: {output_dir: run, steps: 2, batch_size: 1, accumulation_steps: 1, threads: 1, device: cpu}
optim: {lr: 1e-2, warmup_steps: 1}
eval: {every: 2, max_batches: 1, prompts: ["alpha"], sample_tokens: 1}
checkpoint: {every: 1, save_total_limit: 2}
log: {every: 1}
"""
QUESTIONS = """\
{"prompt": "alpha"}
{"messages": [{"role": "user", "content": "beta?"}]}
"""
TASK = '{"prompt": "alpha", "choices": [" b", " c"], "answer": 0}\n{"prompt": "beta", "answer": "gamma"}\n'
SAID = "alpha\n/save talk.jsonl\n/reset\n/load talk.jsonl\n/tokens\nbeta\n"
PULLED = "team/base"  # the name of a model on the hub
MODEL_FILES = ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json")


@dataclass(frozen=True)
class Case:
    """A command and the state of the folder that it starts from.

    Attributes:
        start: fresh (no run), begun (stopped after the first checkpoint) or done.
        trains: it makes a run, which can be resumed.
        is_exact: its stdout is the same each time.
        made: files that it must have made when it ends with 0.
        stdin: the file that it reads as stdin; empty: nothing.
        client: of `tests.faults.clients`, whose requests it serves until SIGINT; empty: it serves nothing.
        pulls: it fetches the model `base` of a hub on loopback.
    """

    name: str
    words: tuple[str, ...]
    start: str = "done"
    trains: bool = False
    is_exact: bool = False
    made: tuple[str, ...] = ()
    stdin: str = ""
    client: str = ""
    pulls: bool = False

    @property
    def code(self) -> int:
        """The exit code without a fault."""
        return 130 if self.client else 0


_CPU = ("--device", "cpu")
_CHATS = ("chats.yaml", "train.output_dir=adapter", "train.steps=2", "checkpoint.every=1", "eval.prompts=[]")
_TUNED = ("model.config=null", "model.path=model", "train.output_dir=tuned", "data.tokenizer=null")
CASES = (
    Case("train", ("train", "config.yaml"), "fresh", trains=True),
    Case("train --resume", ("train", "config.yaml", "--resume"), "begun", trains=True),
    Case("train a folder", ("train", "config.yaml", *_TUNED), trains=True),
    Case("train an adapter", ("train", *_CHATS), "fresh", trains=True),
    Case("generate", ("generate", "run", "--prompt", "alpha", "--max-tokens", "2", "--device", "cpu"), is_exact=True),
    Case(
        "generate a file",
        ("generate", "base", "--prompts", "questions.jsonl", "--out", "answers.jsonl", "--max-tokens", "2", *_CPU),
        made=("answers.jsonl",),
    ),
    Case("eval", ("eval", "run", "--data", "docs", "--seq-len", "32", "--device", "cpu"), is_exact=True),
    Case(
        "export",
        ("export", "run", "--out", "exported", "--dtype", "bf16", "--check"),
        is_exact=True,
        made=("exported/config.json", "exported/model.safetensors", "exported/manifest.json"),
    ),
    Case(
        "export --merge",
        ("export", "adapter", "--base", "base", "--out", "exported", "--merge", "--check"),
        is_exact=True,
        made=("exported/config.json", "exported/model.safetensors", "exported/manifest.json"),
    ),
    Case("validate", ("validate", "config.yaml"), is_exact=True),
    Case("validate a folder", ("validate", "config.yaml", *_TUNED), is_exact=True),
    Case("data preview", ("data", "preview", "config.yaml"), is_exact=True),
    Case("data preview chats", ("data", "preview", *_CHATS), is_exact=True),
    Case("report", ("report", "run", "--out", "page.html"), is_exact=True, made=("page.html",)),
    Case("eval --task", ("eval", "run", "--task", "task.jsonl", "--max-tokens", "2", *_CPU), is_exact=True),
    Case("chat", ("chat", "base", "--temperature", "0", "--max-tokens", "2", *_CPU), stdin="said.txt"),
    Case("init", ("init", "new.yaml", "--model", "model", "--data", "docs", "--goal", "full"), made=("new.yaml",)),
    Case("recipes", ("recipes",), is_exact=True),
    Case("estimate", ("estimate", "config.yaml", "--gpu-memory", "24")),
    Case("schema", ("schema",), is_exact=True),
    Case("env", ("env", "--json")),
    Case("demo", ("demo", "fusion", "--fast", "--device", "cpu", "--json", "demo.json"), made=("demo.json",)),
    Case(
        "profile --op",
        ("profile", "--op", "add", "--shape", "8", "--device", "cpu", "--json", "op.json"),
        made=("op.json",),
    ),
    Case(
        "profile CONFIG",
        ("profile", "config.yaml", "--steps", "1", "--out", "profile", "--json", "profile.json"),
        made=("profile/trace.json", "profile/report.json", "profile.json"),
    ),
    Case(
        "bench-model",
        (
            "bench-model",
            "--size",
            "model",
            "--batch-size",
            "1",
            "--seq-len",
            "8",
            "--fast",
            *_CPU,
            "--json",
            "model.json",
        ),
        made=("model.json",),
    ),
    Case(
        "bench-ops",
        ("bench-ops", "--op", "add", "--fast", "--size", "small", *_CPU, "--out", "bench", "--json", "ops.json"),
        made=("ops.json",),
    ),
    Case("serve", ("serve", "base", "--port", "0", *_CPU), client="serve"),
    Case("watch", ("watch", "run", "--port", "0"), client="watch"),
    Case("pull", ("pull", f"{PULLED}@v1.0"), "fresh", pulls=True),
)


@dataclass(frozen=True)
class Fault:
    """The call that failed, and with what."""

    case: Case
    number: int
    error: str
    call: str = ""
    path: str = ""

    def __str__(self) -> str:
        return f"{self.case.name}, call {self.number} ({self.call} {self.path}) with {self.error}"


@dataclass(frozen=True)
class Finding:
    """What one fault came to: the exit code (None: no end in time), and what is wrong with it."""

    fault: Fault
    code: int | None
    problems: tuple[str, ...]
    told: str


@dataclass
class Tally:
    """The figures of one command and one error (or of all interleaved)."""

    case: Case
    calls: int = 0
    error: str = "interleaved"
    expected: int = 0
    faults: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Count a finding."""
        self.faults += 1
        self.codes["hung" if finding.code is None else str(finding.code)] += 1
        if finding.problems:
            self.failures.append(finding)


class Shim:
    """The compiled shim in a folder of its own; a context manager."""

    def __enter__(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="genesis-shim-")
        library = Path(self._folder.name) / "shim.so"
        source = Path(__file__).with_name("shim.c")
        line = ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(source), "-ldl"]
        subprocess.run(line, check=True, timeout=60)
        return library

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()


class World:
    """The folders that commands start from, made once; `fill` copies one."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self._hub = hub
        self.hashes: dict[str, str] = {}

    def make(self, worker: Worker) -> None:
        """Train the run that the others start from, and note the state hashes of runs without faults."""
        start = self.folder / "fresh"
        for name in ("docs", "home", "tmp", "streams"):
            (start / name).mkdir(parents=True)
        words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
        for number in range(4):
            text = " ".join(words[(number * 7 + i * i + i // 3) % len(words)] for i in range(40))
            (start / "docs" / f"{number}.txt").write_text(text + ".\n")
        (start / "questions.jsonl").write_text(QUESTIONS)
        (start / "task.jsonl").write_text(TASK)
        (start / "said.txt").write_text(SAID)
        recipe = make_chats(start)
        (start / "chats.yaml").write_text(recipe.read_text().replace(str(start), "."))
        (start / "config.yaml").write_text(CONFIG)
        self._hub.models[PULLED] = start / "base"
        done = self.folder / "done"
        shutil.copytree(start, done)
        train, tuned, adapter = (
            next(case for case in CASES if case.name == name)
            for name in ("train", "train a folder", "train an adapter")
        )
        self.hashes["run"] = worker.trained(done, train)
        self.hashes["adapter"] = worker.trained(done, adapter)
        (done / "model").mkdir()
        for name in MODEL_FILES:
            shutil.copy2(done / "run" / name, done / "model")
        begun = self.folder / "begun"
        shutil.copytree(done, begun)
        shutil.rmtree(begun / "run" / f"checkpoint-{LAST}")
        (begun / "run" / "loss.svg").unlink()
        for name in MODEL_FILES:
            (begun / "run" / name).unlink()
        trial = self.folder / "trial"
        shutil.copytree(done, trial)
        self.hashes["tuned"] = worker.trained(trial, tuned)
        shutil.rmtree(trial)

    def fill(self, case: Case, folder: Path) -> None:
        """`folder` as the case starts."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / case.start, folder)


class Worker:
    """A server of forks and the folder that its commands run in; a context manager."""

    def __init__(self, shim: Path, folder: Path, endpoint: str, patience: float = PATIENCE_SECONDS) -> None:
        self.folder, self.endpoint, self._shim, self._patience = folder, endpoint, shim, patience
        folder.mkdir()
        (folder / "home").mkdir()
        self._log, self._told = folder / "log", folder / "stderr"
        self.answers: list[Answer] = []  # to the requests of the last command's client

    def __enter__(self) -> Self:
        environment = {**os.environ, **ENVIRONMENT, "LD_PRELOAD": str(self._shim), "HOME": str(self.folder / "home")}
        environment |= {"HF_ENDPOINT": self.endpoint, "HF_HUB_CACHE": "hub", "HF_TOKEN_PATH": os.devnull}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate(timeout=60)

    def run(
        self,
        folder: Path,
        words: Sequence[str],
        number: int = 0,
        error: str = "EIO",
        stdin: str = "",
        client: str = "",
    ) -> int | None:
        """Run a command in `folder`, whose call `number` fails (0: none); returns its exit code."""
        request = {
            "folder": str(folder),
            "words": list(words),
            "nth": number,
            "code": getattr(errno, error),
            "log": str(self._log),
            "stdin": str(folder / stdin) if stdin else os.devnull,
            "streams": [str(folder / "streams" / "stdout"), str(self._told)],
            "roots": f"{folder}:{ROOT / 'configs'}",
            "environment": {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PWD": str(folder)},
            "patience": self._patience,
            "client": client,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._read()
        code, self.answers = answer["code"], answer["answers"]
        assert code is None or isinstance(code, int)
        return code

    @property
    def calls(self) -> list[tuple[int, str, str]]:
        """The calls of the last command, or the one that failed: number, call and path."""
        lines = (line.split(" ", 2) for line in self._log.read_text(errors="replace").splitlines())
        return [(int(number), call, path) for number, call, path in lines]

    @property
    def told(self) -> str:
        """What the last command wrote to stderr."""
        return self._told.read_text(errors="replace")

    def trained(self, folder: Path, case: Case) -> str:
        """The state hash that a training run comes to."""
        code = self.run(folder, case.words, stdin=case.stdin)
        assert code == 0, f"{case.name} without a fault: exit {code}\n{self.told}"
        found = state_hash(folder / output_of(case))
        assert found is not None
        return found

    def _read(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server of forks is gone"
        return json.loads(line)


def output_of(case: Case) -> str:
    """The folder of a training case's run."""
    given = (word.removeprefix("train.output_dir=") for word in case.words if word.startswith("train.output_dir="))
    return next(given, "run")


def state_hash(output: Path) -> str | None:
    """The state hash of a run's last checkpoint, None where it has none."""
    try:
        manifest = json.loads((output / f"checkpoint-{LAST}" / "manifest.json").read_bytes())
    except FileNotFoundError:
        return None
    return str(manifest["metadata"]["state_hash"])


def owned(folder: Path, case: Case) -> dict[str, str]:
    """The files that a command must leave as they are, and what is in them."""
    kept = ["config.yaml", "docs", "model", "chats.yaml", "chats.jsonl", "questions.jsonl", "base"]
    if not case.trains:
        kept += ["run", "adapter"]
    elif output_of(case) == "tuned":
        kept += [f"run/{name}" for name in ("config.resolved.yaml", "checkpoint-1", f"checkpoint-{LAST}")]
    paths = [below for name in kept for below in ((folder / name), *sorted((folder / name).rglob("*")))]
    files = (path for path in paths if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def problems_of(worker: Worker, world: World, fault: Fault, code: int | None, printed: str) -> Iterator[str]:
    """What is wrong with how a command ended; `printed` is what it prints without a fault."""
    folder, case, told = worker.folder / "here", fault.case, worker.told
    if code is None:
        yield f"no end within {PATIENCE_SECONDS:g} s"
    elif case.client and code == case.code:
        yield from problems_of_answers(fault, worker.answers)
    elif code not in ALLOWED or (case.client and code == 0):
        yield f"exit code {code}"
    if "Traceback" in told or "a bug in Genesis" in told:
        yield "a traceback or a bug report"
    if code and code != case.code:
        names = fault.path.split("/") if fault.path != "." else [folder.name]
        parts = [name for name in names if name not in ("", "tmp", "streams")]
        if fault.path == case.stdin:
            parts = ["stdin"]
        reason = os.strerror(getattr(errno, fault.error))
        said = told.replace("data.cache_dir", "")  # what to set is not where it failed
        if "error: " not in said or not any(part in said for part in (*parts, str(folder / fault.path))):
            yield "no word of the path"
        # A missing file may have a better name than that of its errno.
        is_python = fault.call == "lseek" and "not seekable" in told
        if reason not in told and fault.error != "ENOENT" and not is_python:
            yield "no word of the reason"
    if owned(folder, case) != owned(world.folder / case.start, case):
        yield "files of the user's are changed"
    if code == 0:
        found = (folder / "streams" / "stdout").read_text(errors="replace")
        if case.is_exact and found != printed:
            yield f"exit 0, and stdout is {found[:100]!r}"
        for name in case.made:
            if not (folder / name).is_file() or not (folder / name).stat().st_size:
                yield f"exit 0 without {name}"
        if case.trains and state_hash(folder / output_of(case)) != world.hashes[output_of(case)]:
            yield "exit 0 without the last checkpoint"


def problems_of_answers(fault: Fault, answers: Sequence[Answer]) -> Iterator[str]:
    """What is wrong with what a server answered that went on after the fault."""
    if not answers:
        yield "it ended by a signal that it was not sent"
        return
    reason = os.strerror(getattr(errno, fault.error))
    for what, status, body in answers:
        if status is None:
            yield f"{what} got no answer: {body}"
        elif status != 200 and (reason not in body and fault.error != "ENOENT"):
            yield f"{what} got {status} without the reason: {body[:300]}"
    if answers[-1][1] != 200:
        yield f"the last request got {answers[-1][1]}"


def pulled(folder: Path) -> dict[str, bytes]:
    """The files of the model that the cache gives by the revision's name."""
    cache = folder / "hub" / f"models--{PULLED.replace('/', '--')}"
    ref = cache / "refs" / "v1.0"
    snapshot = cache / "snapshots" / (ref.read_text() if ref.exists() else "none")
    return {path.name: path.read_bytes() for path in snapshot.rglob("*")}


def pulled_from(world: World) -> dict[str, bytes]:
    """The files of the model on the hub."""
    base = world.folder / "fresh" / "base"
    return {path.name: path.read_bytes() for path in base.iterdir() if path.name != "manifest.json"}


def resumed(worker: Worker, world: World, fault: Fault) -> Iterator[str]:
    """What is wrong with the run when it is continued without a fault."""
    case, folder = fault.case, worker.folder / "here"
    output = folder / output_of(case)
    words = [word for word in case.words if word != "--resume"]
    has_one = any(output.glob("checkpoint-*")) or any(output.glob(".old-checkpoint-*"))
    if not has_one and case.start == "begun":
        yield "no checkpoint is left"
    code = worker.run(folder, [*words, "--resume"] if has_one else words)
    found = state_hash(output)
    if code != 0:
        yield f"resumed: exit {code}: {worker.told}"
    elif found != world.hashes[output_of(case)]:
        yield f"resumed: the state hash is {found}"


def is_untouched(world: World, case: Case, folder: Path) -> bool:
    """Whether the run's folder is, byte for byte and name for name, what the command started from, or is not there."""

    def content(place: Path) -> dict[str, bytes | None]:
        paths = sorted(place.rglob("*")) if place.exists() else []
        return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else None for path in paths}

    return content(folder / output_of(case)) == content(world.folder / case.start / output_of(case))


def try_fault(worker: Worker, world: World, fault: Fault, printed: str) -> Finding:
    """Run a command with a fault, and look at everything it left."""
    folder = worker.folder / "here"
    world.fill(fault.case, folder)
    code = worker.run(folder, fault.case.words, fault.number, fault.error, fault.case.stdin, fault.case.client)
    hit = worker.calls
    told = worker.told
    if hit:
        path = hit[0][2].replace(str(folder), "").lstrip("/") or "."
        fault = Fault(fault.case, fault.number, fault.error, hit[0][1], path)
    wrong = list(problems_of(worker, world, fault, code, printed))
    if fault.case.trains and code != 0 and not is_untouched(world, fault.case, folder):
        wrong += resumed(worker, world, fault)
    if fault.case.pulls:
        if code != 0 and (again := worker.run(folder, fault.case.words)) != 0:
            wrong.append(f"once more: exit {again}: {worker.told}")
        if pulled(folder) != pulled_from(world):
            wrong.append("what was pulled is not what the hub has")
    return Finding(fault, code, tuple(wrong), told)


def count_calls(worker: Worker, world: World, case: Case) -> tuple[int, str]:
    """How many calls a command makes, and what it prints."""
    folder = worker.folder / "here"
    world.fill(case, folder)
    code = worker.run(folder, case.words, stdin=case.stdin, client=case.client)
    assert code == case.code, f"{case.name} without a fault: exit {code}\n{worker.told}"
    assert all(status == 200 for _, status, _ in worker.answers), worker.answers
    return len(worker.calls), (folder / "streams" / "stdout").read_text()


@contextmanager
def workers(count: int, patience: float) -> Iterator[tuple[World, list[Worker]]]:
    """Workers in a folder in memory, and the world that they share."""
    with ExitStack() as stack:
        shim = stack.enter_context(Shim())
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="genesis-faults-", dir=memory)))
        hub = stack.enter_context(served({}))
        made = [stack.enter_context(Worker(shim, base / f"worker{i}", hub.endpoint, patience)) for i in range(count)]
        world = World(base / "world", hub)
        world.make(made[0])
        yield world, made


def sweep(
    world: World,
    team: Sequence[Worker],
    cases: Sequence[Case],
    errors: Sequence[str] = ERRORS,
    every: int = 1,
    offset: int = 0,
    finished: Callable[[Tally], None] = lambda tally: None,
) -> list[Tally]:
    """Try every `every`-th call (from number `offset` + 1) of the cases with each error, the first error with all
    cases first; with `every` above 1, the calls take the errors interleaved.

    Args:
        finished: gets each tally that is complete.
    """
    tallies, jobs = [], queue.Queue[tuple[Tally, Fault, str]]()
    counted = [(case, *count_calls(team[0], world, case)) for case in cases]
    for error in errors if every == 1 else ("interleaved",):
        for case, calls, printed in counted:
            numbers = range(1 + offset, calls + 1, every)
            tally = Tally(case, calls, error, len(numbers))
            tallies.append(tally)
            for i, number in enumerate(numbers):
                jobs.put((tally, Fault(case, number, errors[i % len(errors)] if every > 1 else error), printed))
    broken: list[BaseException] = []
    guard = threading.Lock()

    def work(worker: Worker) -> None:
        while not broken:
            try:
                tally, fault, printed = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                finding = try_fault(worker, world, fault, printed)
                with guard:
                    tally.add(finding)
                    if tally.faults == tally.expected:
                        finished(tally)
            except BaseException as error:
                broken.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in team]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    return tallies


def row(tally: Tally) -> str:
    """The figures of one tally in a line."""
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(tally.codes.items()))
    failed = len(tally.failures)
    return f"{tally.case.name:<18} {tally.error:<8} {tally.calls:>6} {tally.faults:>7} {failed:>7}  {codes}"


def table(tallies: Sequence[Tally]) -> Iterator[str]:
    """The figures in lines."""
    yield f"{'command':<18} {'error':<8} {'calls':>6} {'faults':>7} {'failed':>7}  exit codes"
    yield from map(row, tallies)
    total = sum((tally.codes for tally in tallies), Counter[str]())
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(total.items()))
    calls = sum({tally.case.name: tally.calls for tally in tallies}.values())
    faults, failed = sum(tally.faults for tally in tallies), sum(len(tally.failures) for tally in tallies)
    yield f"{'all':<18} {'':<8} {calls:>6} {faults:>7} {failed:>7}  {codes}"


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commands", nargs="*", metavar="NAME", help="of: " + ", ".join(case.name for case in CASES))
    parser.add_argument("--errors", nargs="*", default=ERRORS, choices=ERRORS)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th call only")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="leave the first N calls out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, metavar="SECONDS")
    asked = parser.parse_args()
    cases = [case for case in CASES if not asked.commands or case.name in asked.commands]
    with workers(asked.workers, asked.patience) as (world, team):
        tallies = sweep(world, team, cases, asked.errors, asked.every, asked.offset, show)
    print("\n".join(table(tallies)))
    return 1 if any(tally.failures for tally in tallies) else 0


def show(tally: Tally) -> None:
    """Print what failed, and the figures, as soon as they are complete: what ends early has shown what it did."""
    for failure in tally.failures:
        print(f"{failure.fault}: exit {failure.code}: {'; '.join(failure.problems)}")
        print("    " + failure.told.strip().replace("\n", "\n    "))
    print(row(tally), flush=True)


if __name__ == "__main__":
    sys.exit(main())
