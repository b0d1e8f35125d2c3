"""The long version of the kill and signal tests: real `genesis train` processes, ended at random instants and resumed.

    python -m tests.soak.kills --kills 50 --terms 20
    python -m tests.soak.kills --kills 0 --terms 0 --every-call
    python -m tests.soak.kills --kills 20 --terms 0 --lora
    python -m tests.soak.kills --kills 0 --terms 0 --saves 20

Every run that was ended must resume to the state hash and the metrics of the uninterrupted one, and no committed
checkpoint may be lost. Prints what failed and how many of how many passed; the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.files.faults import Recorder
from tests.train.chats import make_chats
from tests.train.runs import (
    ENVIRONMENT,
    ROOT,
    Forks,
    checkpoints,
    load,
    make,
    memory_folder,
    observed,
    rows,
    train,
)

__all__ = ["End", "problems"]

LONG = ("train.steps=30", "checkpoint.every=2", "eval.every=10", "log.every=1")
# Where calls are counted, training waits for them, so that they come in one order.
SHORT = (
    *("train.steps=3", "checkpoint.every=1", "checkpoint.save_total_limit=1", "eval.every=null"),
    "checkpoint.background=off",
)
# Of saves in the background, each of which takes as long as some steps.
SAVING = (
    *("train.steps=8", "checkpoint.every=2", "eval.every=null", "log.every=1", "checkpoint.background=on"),
    *("model.config.hidden_size=512", "model.config.intermediate_size=2048", "model.config.num_hidden_layers=2"),
)
PATIENCE_SECONDS = 300


@dataclass(frozen=True)
class End:
    """What a run came to: H and the metrics."""

    state_hash: str
    rows: list[dict[str, Any]]


def newest(output: Path) -> int:
    """The step of the newest checkpoint that stands in a run's folder; 0 for none."""
    return max((int(path.name.partition("-")[2]) for path in output.glob("checkpoint-*")), default=0)


def problems(output: Path, expected: End, before: int) -> list[str]:
    """What is wrong with a run that was resumed to its end.

    Args:
        before: the newest checkpoint that stood when it was resumed.
    """
    found = checkpoints(output)
    wrong = []
    if expected.state_hash not in found.values():
        wrong.append(f"H is {list(found.values())[-1:]}, expected {expected.state_hash}")
    if rows(output) != expected.rows:
        wrong.append("the metrics differ")
    if max(found, default=0) < before:
        wrong.append(f"checkpoint-{before} was there, and now the newest is {max(found, default=0)}")
    leftovers = [path.name for path in output.glob(".*") if path.name != ".lock"]
    if leftovers:
        wrong.append(f"leftovers: {leftovers}")
    return wrong


def start(recipe: Path, output: Path, *words: str) -> subprocess.Popen[str]:
    """`genesis train` as a user starts it."""
    command = [sys.executable, "-m", "genesis_cli.main", "train", str(recipe), f"train.output_dir={output}", *words]
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr of a process, which is killed if it does not end."""
    try:
        told = process.communicate(timeout=PATIENCE_SECONDS)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(), "it did not end"
    return process.returncode, told


def interrupt(
    recipe: Path, output: Path, expected: End, seconds: float, number: int, chance: random.Random
) -> tuple[str, list[str]]:
    """End a run with signal `number` within its first `seconds`, perhaps again, and resume it.

    Returns:
        how far it was when it was last ended, and the problems.
    """
    allowed = {0, -number} | ({128 + number} if number != signal.SIGKILL else set())
    last, stages, wrong = 0, [], []
    for _ in range(chance.choice((1, 1, 1, 2))):
        process = start(recipe, output, "--resume=allow", *LONG)
        time.sleep(chance.uniform(0, seconds))
        process.send_signal(number)
        code, told = ended(process)
        stages.append("finished" if code == 0 else f"step {newest(output)}" if newest(output) else "before a save")
        # Python itself reports an interruption that comes while it starts, before any of our code can.
        if code not in allowed or ("Traceback" in told and code != -number):
            wrong.append(f"it ended with {code}: {told}")
        if newest(output) < last:
            wrong.append(f"checkpoint-{last} is gone")
        last = newest(output)
    code, told = ended(start(recipe, output, "--resume=allow", *LONG))
    if (code, told) != (0, ""):
        return stages[-1], [*wrong, f"the resumed run ended with {code}: {told}"]
    return stages[-1], wrong + problems(output, expected, last)


def at_random(folder: Path, recipe: Path, kills: int, terms: int, seed: int) -> Iterator[list[str]]:
    """The problems of each run that was killed or signalled."""
    whole, seconds = folder / "whole", 0.0
    for _ in range(2):  # the first makes the cache
        shutil.rmtree(whole, ignore_errors=True)
        begun = time.monotonic()
        code, told = ended(start(recipe, whole, *LONG))
        seconds = time.monotonic() - begun
        assert code == 0, told
    expected = End(checkpoints(whole)[30], rows(whole))
    chance, stages = random.Random(seed), Counter[str]()
    numbers = [signal.SIGKILL] * kills + [(signal.SIGTERM, signal.SIGINT)[i % 2] for i in range(terms)]
    for turn, number in enumerate(numbers):
        output = folder / f"run-{turn}"
        within = seconds
        stage, wrong = interrupt(recipe, output, expected, within, number, chance)
        while stage == "finished" and not wrong:  # too late to end anything: the machine is faster now
            shutil.rmtree(output)
            within *= 0.7
            stage, wrong = interrupt(recipe, output, expected, within, number, chance)
        stages[stage.split()[0]] += 1
        if not wrong:
            shutil.rmtree(output)
        yield [f"{signal.Signals(number).name} of run {turn}: {one}" for one in wrong]
    print(f"last ended: {dict(stages)}; an uninterrupted run takes {seconds:.1f} s")


def at_every_call(folder: Path, recipe: Path) -> Iterator[list[str]]:
    """The problems after SIGKILL at each file-system call of a run with three saves and rotation."""
    output = folder / "calls"
    train(load(recipe, "first", *SHORT))
    output.mkdir()
    recorder = Recorder()
    with observed(recorder):
        train(load(recipe, "calls", *SHORT))
    expected = End(checkpoints(output)[3], rows(output))
    words = ("train", recipe, f"train.output_dir={output}", *SHORT)
    with Forks() as forks:
        for number, call in enumerate(recorder.calls, start=1):
            shutil.rmtree(output)
            output.mkdir()
            killed = forks.run(*words, fault=("kill_at", number))
            before = newest(output)
            resumed = forks.run(*words, "--resume=allow")
            wrong = [] if killed.code == -signal.SIGKILL else [f"it was not killed: {killed}"]
            wrong += problems(output, expected, before) if resumed.code == 0 else [f"not resumed: {resumed.err}"]
            yield [f"call {number} ({call.op} {call.path.name}): {one}" for one in wrong]


def in_background_saves(folder: Path, recipe: Path, kills: int, seed: int) -> Iterator[list[str]]:
    """The problems of each run that was killed while a thread wrote a checkpoint."""
    train(load(recipe, "waited-for", *SAVING, "checkpoint.background=off"))
    expected = End(checkpoints(folder / "waited-for")[8], rows(folder / "waited-for"))
    chance, steps = random.Random(seed), Counter[int]()
    with Forks() as forks:
        for turn in range(kills):
            output, step, words = folder / f"save-{turn}", 0, list[str]()
            while not step:  # else it had ended before
                shutil.rmtree(output, ignore_errors=True)
                words = ["train", str(recipe), f"train.output_dir={output}", *SAVING]
                step = killed_in_save(forks, words, output, chance.choice((2, 4, 6)), chance.uniform(0, 0.3))
            steps[step] += 1
            before = newest(output)
            wrong = [] if before == step - 2 else [f"the newest checkpoint is {before}"]
            resumed = forks.run(*words, "--resume=allow")
            wrong += problems(output, expected, before) if resumed.code == 0 else [f"not resumed: {resumed}"]
            if not wrong:
                shutil.rmtree(output)
            yield [f"SIGKILL in the save of step {step}, run {turn}: {one}" for one in wrong]
    print(f"killed in the saves of steps {dict(sorted(steps.items()))}")


def killed_in_save(forks: Forks, words: Sequence[str], output: Path, step: int, after: float) -> int:
    """Start a run and kill it `after` seconds of the save of `step`, which is returned; 0 where that had ended."""
    child, pattern = forks.start(*words), f".tmp-checkpoint-{step}-*"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(output.glob(pattern)) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    child.wait()
    return step if list(output.glob(pattern)) else 0


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="End runs at random instants and resume them.")
    parser.add_argument("--kills", type=int, default=50, help="runs ended by SIGKILL")
    parser.add_argument("--terms", type=int, default=20, help="runs ended by SIGTERM and SIGINT in turn")
    parser.add_argument("--saves", type=int, default=0, help="runs ended by SIGKILL in a save in the background")
    parser.add_argument("--every-call", action="store_true", help="also SIGKILL at each file-system call of a run")
    parser.add_argument("--lora", action="store_true", help="of runs that train adapters on chats, with dropout")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    given = parser.parse_args()
    failed = False
    with memory_folder() as folder:
        recipe = make_chats(folder) if given.lora else make(folder)
        if given.lora:
            recipe.write_text(recipe.read_text().replace("lora: {r: 4}", "lora: {r: 4, dropout: 0.1}"))
            assert "dropout" in recipe.read_text()
        parts = {}
        if given.kills or given.terms:
            parts["random instants"] = at_random(folder, recipe, given.kills, given.terms, given.seed)
        if given.saves:
            parts["saves in the background"] = in_background_saves(folder, recipe, given.saves, given.seed)
        if given.every_call:
            parts["file-system calls"] = at_every_call(folder, recipe)
        for name, results in parts.items():
            count = passed = 0
            for wrong in results:
                count, passed = count + 1, passed + (not wrong)
                print(*wrong, sep="\n", end="\n" if wrong else "", flush=True)
            print(f"{name}: {passed} of {count} runs were ended and resumed to the same end", flush=True)
            failed |= passed < count
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
