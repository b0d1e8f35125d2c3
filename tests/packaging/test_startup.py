"""`import genesis` and `genesis --help` start fast and leave the heavy libraries alone."""

from __future__ import annotations

import functools
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import genesis_models
from genesis.data.tokenizer import train_bpe
from tests.models.golden import golden
from tests.train.runs import make

LIMIT_SECONDS = 0.5  # of processor time
FIRST_TOKEN_SECONDS = 2.0
YARDSTICK, YARDSTICK_SECONDS = "import numpy", 0.15
HEAVY = {
    "cuda",
    "hypothesis",
    "jinja2",
    "pyarrow",
    "pydantic",
    "pytest",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "triton",
}

IMPORT = "import genesis"
HELP = "import sys; sys.argv = ['genesis', '--help']; from genesis_cli.main import main; main()"

# One at a time: two of these side by side would slow each other down.
pytestmark = pytest.mark.xdist_group("startup")


@pytest.fixture(scope="module", autouse=True)
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Children find bytecode, as after an installation, whatever this environment says of it."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.dont_write_bytecode:
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("bytecode")))
        yield


def run(script: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def once(script: str) -> float:
    """Seconds of processor time, of the program and of the system for it, of `script` in a fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(script)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def startup(script: str, runs: int = 2) -> float:
    """The median of some runs, after one that leaves the bytecode behind. The clock would also tell what else runs.

    Where the yardstick takes longer than its time, the machine is slower or busy, and the result less in proportion.
    """
    loaded(script)
    pairs = [(once(script), once(YARDSTICK)) for _ in range(runs)]
    seconds, yardstick = (statistics.median(column) for column in zip(*pairs, strict=True))
    return seconds / max(1.0, yardstick / YARDSTICK_SECONDS)


@functools.cache
def traced(script: str) -> subprocess.CompletedProcess[str]:
    """Run `script`, which then writes the top-level packages in `sys.modules` to stderr, also after a `SystemExit`."""
    wrapped = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('\\n'.join({m.partition('.')[0] for m in sys.modules}), file=sys.stderr))\n"
    )
    return run(wrapped + script)


def loaded(script: str) -> set[str]:
    """Top-level packages that `script` loads."""
    return set(traced(script).stderr.split())


@pytest.mark.parametrize("script", [IMPORT, HELP], ids=["import", "help"])
def test_startup_time(script: str) -> None:
    assert startup(script) < LIMIT_SECONDS


@pytest.mark.parametrize("script", [IMPORT, HELP], ids=["import", "help"])
def test_startup_leaves_heavy_libraries_alone(script: str) -> None:
    names = loaded(script)
    assert names & {"genesis", "genesis_cli"}
    assert not names & (HEAVY | ({"click", "typer"} if script == IMPORT else set()))


def test_a_command_has_its_first_token_soon(tmp_path: Path) -> None:
    """Imports, loading and a token of a tiny model, without what other commands need."""
    tokenizer = train_bpe(["some words to learn"], vocab_size=262)
    genesis_models.save(genesis_models.load(golden("qwen3-tied").folder), tmp_path, tokenizer=tokenizer)
    words = ["genesis", "generate", str(tmp_path), "--prompt", "words", "--max-tokens", "1", "--device", "cpu"]
    script = f"import sys; sys.argv = {words}; from genesis_cli.main import main; main()"
    assert startup(script, 1) < FIRST_TOKEN_SECONDS
    assert not loaded(script) & (HEAVY - {"pydantic", "tokenizers"})


def test_slow_starts_are_noticed() -> None:
    assert once("import time\nwhile time.process_time() < 0.6: pass") > LIMIT_SECONDS


@pytest.mark.parametrize(("slowness", "seconds"), [(0.5, 0.3), (1, 0.6), (5, 0.6)])
def test_the_machine_does_not_count(slowness: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"pass": 0.6, YARDSTICK: YARDSTICK_SECONDS}
    monkeypatch.setattr(sys.modules[__name__], "once", lambda script: slowness * taken[script])
    assert startup("pass") == pytest.approx(seconds)


def test_what_else_the_machine_does_does_not_count() -> None:
    assert once("import time; time.sleep(0.6)") < LIMIT_SECONDS


def test_heavy_imports_are_noticed() -> None:
    assert loaded("import sys, tokenizers; sys.exit()") & HEAVY == {"tokenizers"}


def test_help_prints_usage() -> None:
    assert "Usage" in traced(HELP).stdout


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("genesis")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


WITHOUT_GPU_LIBRARIES = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "cuda", "nvidia"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from genesis_cli.main import main
sys.exit(any([main(words) for words in json.loads(sys.argv[1])]))
"""


def test_a_cpu_needs_no_library_of_gpus(tmp_path: Path) -> None:
    """As on a Mac, where they are not installed: a run, and a measurement, whose plans of memory have their rules."""
    words = (
        ["train", str(make(tmp_path)), "train.steps=2", "train.device=cpu"],
        ["bench-model", "--size", "quickstart", "--batch-size", "1", "--seq-len", "16", "--fast", "--device", "cpu"],
    )
    command = [sys.executable, "-c", WITHOUT_GPU_LIBRARIES, json.dumps(words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tokens/s" in done.stdout
