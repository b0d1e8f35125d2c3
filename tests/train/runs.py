"""Tiny training runs for tests: a corpus and its configuration, and ways to run it: here, in a fork, as a command."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import pytest

import genesis_models
from genesis.data.tokenizer import train_bpe
from genesis.files.atomic import verify_manifest
from genesis.files.filesystem import DEFAULT, Observer
from genesis.train.config import Config
from genesis.train.config_file import load_config
from genesis.train.loop import Summary, Training
from genesis.train.metrics import read_metrics
from genesis.train.output import Output
from genesis_cli import session
from genesis_cli.session.run_folder import Resume

__all__ = [
    "ENVIRONMENT",
    "ROOT",
    "Child",
    "Ended",
    "Forks",
    "assembled",
    "checkpoints",
    "command",
    "load",
    "make",
    "make_base",
    "make_lora",
    "memory_folder",
    "no_waiting",
    "observed",
    "picture",
    "rows",
    "signal_in_step",
    "steps",
    "train",
]

ROOT = Path(__file__).resolve().parents[2]
# A forked child of a process with threads could hang in a lock that one of them held.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
CONFIG = """
model:
  config:
    model_type: qwen3
    vocab_size: 272
    hidden_size: 32
    intermediate_size: 32
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 1
    head_dim: 16
    max_position_embeddings: 32
    tie_word_embeddings: true
data: {{train: ["{folder}/doc*.txt"], seq_len: 32, eval_fraction: 0.2, cache_dir: "{folder}/cache"}}
train: {{output_dir: "{folder}/run", steps: 6, batch_size: 2, accumulation_steps: 2, threads: 1}}
optim: {{lr: 1e-2, warmup_steps: 2}}
eval: {{every: 3, max_batches: 2, prompts: ["alpha beta"], sample_tokens: 2}}
checkpoint: {{every: 2, save_total_limit: 2}}
log: {{every: 1}}
"""


def make(folder: Path, documents: int = 12) -> Path:
    """A corpus of short documents in `folder`, and the path of a configuration that trains on it."""
    for number in range(documents):
        text = " ".join(WORDS[(number * 7 + i * i + i // 3) % len(WORDS)] for i in range(20 + 5 * (number % 4)))
        (folder / f"doc{number:02}.txt").write_text(text + ".\n")
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


def load(path: Path, output: str, *overrides: str) -> Config:
    """The configuration at `path` whose run stands in `output` beside it."""
    return load_config(path, [f"train.output_dir={path.parent / output}", *overrides])


def train(config: Config, *, resume: Resume = False, resume_from: str | None = None, console: Any = None) -> Summary:
    """`genesis train` in this process, without the loss picture, which costs more than the run."""
    with mock.patch("genesis_cli.session.training.loss_picture"), no_waiting():
        return session.train(config, resume=resume, resume_from=resume_from, console=Output(console))


def assembled(config: Config) -> Training:
    """The run that `config` asks for, at step 0 and with nothing written but its folder."""
    found: list[Training] = []

    def stop(training: Training) -> Summary:
        found.append(training)
        raise InterruptedError

    with mock.patch.object(Training, "run", stop), pytest.raises(InterruptedError):
        train(config)
    return found[0]


def steps(training: Training, count: int) -> None:
    """Makes `count` steps of an assembled run, without reporting or saving."""
    for _ in range(count):
        training._step(training._batches())


def rows(output: Path | str) -> list[dict[str, Any]]:
    """The metrics of a run but for those that time the machine."""
    found = read_metrics(Path(output) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))} for row in found]


def checkpoints(output: Path | str) -> dict[int, str]:
    """The H of each checkpoint of a run after all its bytes were checked."""
    folders = Path(output).glob("checkpoint-*")
    manifests = {int(folder.name.partition("-")[2]): verify_manifest(folder) for folder in folders}
    return {step: str(manifests[step].metadata["state_hash"]) for step in sorted(manifests)}


def picture(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and time of change of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: a kill loses nothing that the kernel was given, flushed or not."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def no_waiting() -> Any:
    """A context in which nobody waits for the disk: no test cuts the power, and calls are observed all the same."""
    return mock.patch("genesis.files.filesystem._flush")


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Shows every file-system call of runs in this process to `observer`, those of caches too."""
    with mock.patch.object(DEFAULT, "_observer", observer):
        yield


@contextmanager
def signal_in_step(step: int, number: int = signal.SIGTERM) -> Iterator[None]:
    """Sends this process a signal while `step` (from 1) is made."""
    from genesis.train import loop

    take_step = loop.take_step

    def interrupted(state: Any, *args: Any) -> Any:
        if state.step + 1 == step:
            os.kill(os.getpid(), number)
        return take_step(state, *args)

    with mock.patch.object(loop, "take_step", interrupted):
        yield


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`genesis words…` in a process of its own, as a user starts it."""
    environment = {**os.environ, **ENVIRONMENT, **options.pop("env", {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    line = [sys.executable, "-m", "genesis_cli.main", *words]
    return subprocess.run(line, text=True, timeout=120, check=False, cwd=ROOT, env=environment, **streams)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus the signal that killed it) and what it wrote."""

    code: int
    out: str
    err: str


class Child:
    """A command that runs in a fork."""

    def __init__(self, forks: Forks, pid: int, out: Path, err: Path) -> None:
        self.pid, self._forks, self._out, self._err = pid, forks, out, err

    def wait(self) -> Ended:
        """Waits until it ends.

        Raises:
            TimeoutError: it did not, and was killed.
        """
        status = self._forks.ask({"wait": self.pid})["status"]
        if status is None:
            raise TimeoutError(f"the command did not end; stderr: {self._err.read_text()}")
        out = self._out.read_text() if self._out.is_file() else ""
        return Ended(os.waitstatus_to_exitcode(status), out, self._err.read_text())


class Forks:
    """Runs commands in forks of a warm process, in a tenth of the time of a new one; a context manager.

    Faults are those of `tests.train.run_server`: a name and its arguments.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.train.run_server"],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
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
        self._folder.cleanup()

    def ask(self, request: dict[str, Any]) -> Any:
        """The server's answer to a request."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server of forks is gone"
        return json.loads(line)

    def start(
        self,
        *words: str | Path,
        fault: Sequence[Any] = (),
        out: str | None = None,
        environment: dict[str, str] | None = None,
        picture: bool = False,
    ) -> Child:
        """Starts `genesis words…`; its stdout goes to `out` if that is given."""
        self._count += 1
        streams = [Path(self._folder.name) / f"{self._count}.{name}" for name in ("out", "err")]
        streams[1].touch()  # a signal may end the child before it opens it
        if out is not None:
            streams[0] = Path(out)
        request = {
            "words": [str(word) for word in words],
            "fault": list(fault),
            "streams": [str(stream) for stream in streams],
            "environment": environment or {},
            "picture": picture,
        }
        return Child(self, self.ask(request)["pid"], *streams)

    def run(self, *words: str | Path, **options: Any) -> Ended:
        """Starts a command and waits until it ends."""
        return self.start(*words, **options).wait()


def make_base(folder: Path, path: Path, *, name: str = "base", seed: int = 0) -> Path:
    """A model folder that a run with the configuration at `path` may go on from: its model, and a tokenizer."""
    config = load(path, "unused")
    texts = [file.read_text() for file in sorted(folder.glob("doc*.txt"))]
    tokenizer = train_bpe(texts, vocab_size=272)
    raw = {**(config.model.config or {}), "eos_token_id": tokenizer.eos_id}
    genesis_models.save(genesis_models.build(raw, seed), folder / name, tokenizer=tokenizer)
    return folder / name


def make_lora(folder: Path) -> Path:
    """As `make`, with adapters of a model in `folder / "base"`."""
    path = make(folder)
    base = make_base(folder, path)
    lines = path.read_text().split("\n")
    start, end = lines.index("  config:"), next(n for n, line in enumerate(lines) if line.startswith("data:"))
    path.write_text("\n".join([*lines[:start], f"  path: {base}", *lines[end:], "lora: {r: 4}"]))
    return path
