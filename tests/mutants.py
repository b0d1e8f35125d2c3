"""A seeded sample of mistakes, planted one at a time in a copy of the tree: which of them the tests near it notice.

    make mutants
    make mutants MUTANTS="--count 16 --seed 7 --quarter data"

cosmic-ray makes most of them and is in an environment of its own; the tests run in that of Genesis. A survivor is a
mistake that nothing would notice: a test is missing, or the code does nothing.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPARE_S = 60  # what a run of tests may take beside three times the time that it takes without a mistake

# Quarter -> beginning of a file's path -> the tests that exercise it, as pytest takes them. The first one holds.
Areas = dict[str, dict[str, str]]
ENGINE = "tests/models/test_engine.py tests/models/test_device_engine.py"
GENERATE = "tests/models/test_generate.py tests/models/test_generate_texts.py tests/cli/test_generate_many.py"
CONFIG = "tests/train/test_config_file.py tests/train/test_config_schema.py tests/train/test_config_yaml.py"
TENSORS = "tests/core tests/functions tests/autograd tests/ops/test_conformance.py"
# What takes long and sees little of a single file, or has an area of its own.
LEFT_OUT = " ".join(
    f"--ignore=tests/train/test_{name}.py" for name in ("run_kill", "config_fuzz", "run_leaks", "signals")
)
AREAS: Areas = {
    "data": {
        "genesis/data/chat/": "tests/data/chat",
        "genesis/data/sources": "tests/data tests/cli/test_pull_data.py tests/train/test_run_inputs.py",
        "genesis/data/": "tests/data tests/train/test_run_inputs.py tests/cli/test_data_preview.py",
    },
    "engine": {  # and serving
        "models/engine/": f"{ENGINE} {GENERATE}",
        "cli/session/serving/": "tests/serving tests/cli/test_generate_chat.py",
    },
    "train": {  # and distributed
        "genesis/train/config": f"{CONFIG} tests/train/test_config_record.py tests/train/test_run_inputs.py",
        "genesis/train/strict_yaml": CONFIG,
        "genesis/train/report/": "tests/train/test_run_report.py",
        "genesis/train/signals": "tests/train/test_signals.py",
        "genesis/train/": f"tests/train {LEFT_OUT}",
        "genesis/distributed/": "tests/distributed",
    },
    "core": {
        "genesis/autograd/": "tests/autograd tests/nn",
        "genesis/functions/": "tests/functions tests/autograd",
        "genesis/nn/": "tests/nn tests/adapters/test_golden.py",
        "genesis/optim/": "tests/optim tests/train/test_run_resume.py",
        "genesis/ops/": "tests/ops tests/functions tests/nn tests/autograd",
        "genesis/files/": "tests/files tests/cli/test_pull.py",
        **{
            f"genesis/{name}.py": TENSORS
            for name in ("array", "dtypes", "indexing", "op", "random", "shapes", "tensor")
        },
        "genesis/saving.py": "tests/files/test_objects.py",
    },
}


class MutantsError(Exception):
    """What keeps the sample from meaning anything."""


@dataclass(frozen=True)
class Mutant:
    """A file with one mistake.

    Attributes:
        tests: pytest's arguments.
        near: those of the tests to run before them, which most mistakes of the file are seen by.
    """

    quarter: str
    file: str
    kind: str
    tests: str
    near: str
    source: str
    mutated: str

    def change(self) -> tuple[int, list[str]]:
        """The number of the first line that differs, and the lines that go and come."""
        before, after = self.source.splitlines(), self.mutated.splitlines()
        first = next(i for i, lines in enumerate(zip([*before, ""], [*after, ""], strict=False)) if len({*lines}) > 1)
        differences = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        return first + 1, [line for line in differences if not line.startswith("@@")]


# --- The draw ---------------------------------------------------------------------------------------------------------


def suite_of(file: str, areas: dict[str, str]) -> str | None:
    """The tests of a file of one quarter; None where it is in none of its areas."""
    return next((tests for begin, tests in areas.items() if file.startswith(begin)), None)


def places(source: str) -> Iterator[tuple[str, Any, int]]:
    """Kind, operator and occurrence of each mutation of a source that tests should see."""
    from cosmic_ray.ast import ast_nodes, get_ast

    from tests.mutant_operators import KINDS, is_silent

    counts: Counter[Any] = Counter()
    for node in ast_nodes(get_ast(source)):
        silent = None
        for kind, operators in KINDS.items():
            for operator in operators:
                for start, _ in operator().mutation_positions(node):
                    silent = is_silent(node) if silent is None else silent
                    at = node.get_leaf_for_position(start) if hasattr(node, "children") else node
                    if not silent and not (at is not None and is_silent(at)):
                        yield kind, operator, counts[operator]
                    counts[operator] += 1


def draw(root: Path, areas: Areas, count: int, seed: int) -> list[Mutant]:
    """So many mutants: equally many of each quarter and, as far as there are any, of each kind; one of a line."""
    rng, drawn = random.Random(seed), list[Mutant]()
    for number, quarter in enumerate(areas):
        wanted = count * (number + 1) // len(areas) - count * number // len(areas)
        of_quarter = mutants_of(root, quarter, areas[quarter], rng)
        lines = set[tuple[str, int]]()
        while len(lines) < wanted and (mutant := next(of_quarter, None)) is not None:
            line = (mutant.file, mutant.change()[0])
            if line not in lines:
                lines.add(line)
                drawn.append(mutant)
    return drawn


def mutants_of(root: Path, quarter: str, areas: dict[str, str], rng: random.Random) -> Iterator[Mutant]:
    """The mutants of a quarter in a random order, of one kind after the other."""
    from cosmic_ray.mutating import mutate_code

    by_kind: dict[str, list[tuple[str, Any, int]]] = {}
    sources: dict[str, str] = {}
    for file in sorted(tracked(root)):
        if file.endswith(".py") and not file.endswith("__init__.py") and suite_of(file, areas):
            sources[file] = (root / file).read_text()
            for kind, operator, occurrence in places(sources[file]):
                by_kind.setdefault(kind, []).append((file, operator, occurrence))
    kinds = sorted(by_kind)
    rng.shuffle(kinds)
    while kinds := [kind for kind in kinds if by_kind[kind]]:
        for kind in kinds:
            file, operator, occurrence = by_kind[kind].pop(rng.randrange(len(by_kind[kind])))
            mutated = mutate_code(sources[file], operator(), occurrence) or sources[file]
            tests = suite_of(file, areas) or ""
            mutant = Mutant(quarter, file, kind, tests, nearest(root, file, tests), sources[file], mutated)
            if differs(mutant):
                yield mutant


def differs(mutant: Mutant) -> bool:
    """Whether it is a program, and another one."""
    try:
        return ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(mutant.mutated))
    except SyntaxError:
        return False


def nearest(root: Path, file: str, tests: str) -> str:
    """The files among the tests that have the module's name."""
    folders = [word for word in tests.split() if not word.startswith("-") and (root / word).is_dir()]
    near = [path for folder in folders for path in (root / folder).glob(f"test_*{Path(file).stem}*.py")]
    return " ".join(str(path.relative_to(root)) for path in sorted(near))


def tracked(root: Path) -> list[str]:
    """The files that git knows or would take."""
    words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


# --- A copy of the tree -----------------------------------------------------------------------------------------------


class Copy:
    """A copy of the tree below `folder`, with an environment in which its packages are those of the copy.

    Args:
        python: of the environment whose libraries it has.
        packages: those that have to come from the copy.
    """

    def __init__(self, root: Path, folder: Path, python: Path, packages: Sequence[str]) -> None:
        self.tree, self._home, self._writes = folder / "tree", folder / "home", 0
        self._running: int | None = None
        self._home.mkdir(parents=True)
        for name in tracked(root):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.tree / name)
        self._python = self._environment(folder / "environment", root, python)
        for package in packages:
            code = f"import {package}; print({package}.__file__)"
            found = self._run([str(self._python), "-I", "-c", code], 60)[1].strip()
            if not Path(found).is_relative_to(self.tree):
                raise MutantsError(f"the copy would test another {package}: {found}")

    def _environment(self, folder: Path, root: Path, python: Path) -> Path:
        """An environment with the libraries of another one, whose editable packages are those of the copy."""
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        libraries, own = (
            Path(subprocess.run([each, "-I", "-c", where], check=True, capture_output=True, text=True).stdout.strip())
            for each in (python, folder / "bin" / "python")
        )
        (own / "libraries.pth").write_text(f"{libraries}\n")
        for path in libraries.glob("__editable__*"):
            if path.suffix in (".py", ".pth"):
                (own / path.name).write_text(path.read_text().replace(str(root), str(self.tree)))
        return folder / "bin" / "python"

    def write(self, file: str, text: str) -> None:
        """Write a file, never with the time of an earlier one, from which Python would take its bytecode."""
        self._writes += 1
        path = self.tree / file
        path.write_text(text)
        os.utime(path, (time.time(), time.time() + 2 * self._writes))

    def test(self, tests: str, limit: float) -> tuple[int | None, str]:
        """pytest's exit status, None at the limit, and what it printed."""
        words = [str(self._python), "-m", "pytest", "-x", "-q", "--tb=no", "-n0", "-p", "no:cacheprovider"]
        return self._run([*words, *tests.split()], limit)

    def _run(self, words: list[str], limit: float) -> tuple[int | None, str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
        environment |= {"HOME": str(self._home), "TMPDIR": str(self._home)}
        with subprocess.Popen(
            words, cwd=self.tree, env=environment, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            self._running, begun = process.pid, time.monotonic()
            timer = threading.Timer(limit, self.stop)
            timer.start()
            try:
                printed = process.communicate()[0]
            finally:
                timer.cancel()
                self._running = None
        return None if time.monotonic() - begun >= limit else process.returncode, printed

    def stop(self) -> None:
        """End the tests that run, with the processes that they started."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)

    def seconds_of(self, tests: str) -> float:
        """The time of the tests without a mistake. Raises: MutantsError where they fail."""
        begun = time.monotonic()
        status, printed = self.test(tests, 3600)
        if status != 0:
            raise MutantsError(f"{tests} fail without a mistake:\n{printed[-2000:]}")
        seconds = time.monotonic() - begun
        print(f"{seconds:.0f} s without a mistake: {tests}", flush=True)
        return seconds

    def verdict(self, mutant: Mutant, limit: float) -> str:
        """What became of a mutant: "caught", "caught by time" or "survived"."""
        self.write(mutant.file, mutant.mutated)
        try:
            status, printed = self.test(mutant.near, limit) if mutant.near else (0, "")
            if status == 0:
                status, printed = self.test(mutant.tests, limit)
        finally:
            self.write(mutant.file, mutant.source)
        if status in (4, 5):
            raise MutantsError(f"pytest finds no tests in {mutant.tests}:\n{printed[-2000:]}")
        return "survived" if status == 0 else "caught" if status is not None else "caught by time"


# --- The sample -------------------------------------------------------------------------------------------------------


def judged(
    root: Path, mutants: Sequence[Mutant], python: Path, workers: int, packages: Sequence[str] = ()
) -> Iterator[tuple[Mutant, str]]:
    """Each mutant and its verdict, as they come. Raises: MutantsError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)))
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(workers):
            copies.put(copy := Copy(root, folder / str(number), python, packages))
            stack.callback(copy.stop)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # where it ends early: before they are stopped

        def seconds(tests: str) -> float:
            copy = copies.get()
            try:
                return copy.seconds_of(tests)
            finally:
                copies.put(copy)

        def verdict(mutant: Mutant) -> tuple[Mutant, str]:
            copy = copies.get()
            try:
                return mutant, copy.verdict(mutant, SPARE_S + 3 * times[mutant.tests])
            finally:
                copies.put(copy)

        sets = sorted({mutant.tests for mutant in mutants})
        times = dict(zip(sets, pool.map(seconds, sets), strict=True))
        yield from pool.map(verdict, mutants)


def report(results: Iterator[tuple[Mutant, str]]) -> dict[str, Counter[str]]:
    """Print each verdict with its change; returns how many there are of each, by quarter."""
    counts: dict[str, Counter[str]] = {}
    for mutant, verdict in results:
        counts.setdefault(mutant.quarter, Counter())[verdict.split()[0]] += 1
        line, change = mutant.change()
        print(f"{verdict}: {mutant.file}:{line} ({mutant.kind})", *change, sep="\n    ", flush=True)
    return counts


TINY = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "tiny.py": "def clip(x, low):\n    if x < low:\n        return low\n    return x\n",
    "test_tiny.py": "from tiny import clip\n\n\ndef test_clip():\n    assert clip(0, 5) == 5 and clip(9, 5) == 9\n",
}


def tiny_project(root: Path) -> None:
    """Write a project, of which a test sees a swapped comparison, and none sees one whose boundary is moved."""
    for name, text in TINY.items():
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)


def check(python: Path) -> None:
    """See that all mutants of the tiny project are drawn and judged rightly. Raises: MutantsError."""
    with tempfile.TemporaryDirectory() as name:
        tiny_project(Path(name))
        areas = {"tiny": {"tiny.py": "test_tiny.py"}}
        drawn = [mutant for seed in range(20) for mutant in draw(Path(name), areas, 1, seed)]
        unique = {mutant.mutated: mutant for mutant in drawn}
        verdicts = {m.change()[1][1]: v for m, v in judged(Path(name), list(unique.values()), python, 1)}
    expected = {"+    if not x < low:": "caught", "+    if x > low:": "caught", "+    if x <= low:": "survived"}
    if verdicts != expected:
        raise MutantsError(f"the tiny project's verdicts are {verdicts}, not {expected}")


def main(words: Sequence[str] | None = None) -> int:
    """The command; 1 where a set of tests fails without a mistake."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=120, help="how many, in equal parts of the quarters")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--quarter", choices=sorted(AREAS), action="append", help="of these alone")
    parser.add_argument("--workers", type=int, default=2, help="copies of the tree that are tested at a time")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python", help="what runs the tests")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    parser.add_argument("--check", action="store_true", help="try the tool itself on a tiny project")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the tests that run end, too
    try:
        if given.check:
            check(given.python)
            return 0
        areas = {quarter: AREAS[quarter] for quarter in given.quarter or AREAS}
        mutants = draw(ROOT, areas, given.count, given.seed)
        if given.list:
            report((mutant, "drawn") for mutant in mutants)
            return 0
        counts = report(
            judged(ROOT, mutants, given.python, given.workers, ("genesis", "genesis_cli", "genesis_models"))
        )
    except MutantsError as error:
        print(error, file=sys.stderr)
        return 1
    total = sum(counts.values(), Counter())
    for name, found in [*counts.items(), (f"all, seed {given.seed}", total)]:
        print(f"{name}: {found['caught']} of {found.total()} caught, {found['caught'] / found.total():.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
