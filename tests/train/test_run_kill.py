"""SIGKILL at the file-system calls of whole runs and at random instants: what was committed is never lost, and the
resumed run ends where the uninterrupted one ends."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from genesis.files.filesystem import Call
from tests.files.faults import Recorder
from tests.soak.kills import End, problems
from tests.train.chats import make_chats
from tests.train.preferences import make_pairs
from tests.train.runs import Forks, checkpoints, load, make, make_lora, memory_folder, observed, rows, train

pytestmark = pytest.mark.xdist_group("runs in forks")
# So that the calls of a run come in one order; `test_run_background` has those of saves in the background.
AT_ONCE = "checkpoint.background=off"
# Three saves, the last two with rotation.
THREE_SAVES = ("train.steps=3", "checkpoint.every=1", "checkpoint.save_total_limit=1", "eval.every=null", AT_ONCE)
# Between two of the other calls only a file that nobody looks at grows: a sample of them is enough for every day.
STRUCTURAL = {"rename", "fsync_dir"}
STRIDE = 50


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def committed(calls: list[Call], output: Path) -> list[int]:
    """For each call the step of the newest checkpoint whose commit came before it; 0 for none."""
    newest, steps = 0, []
    for call in calls:
        steps.append(newest)
        if call.op == "rename" and call.target is not None and call.target.name.startswith("checkpoint-"):
            assert call.target.parent == output
            newest = max(newest, int(call.target.name.partition("-")[2]))
    return steps


@pytest.mark.parametrize(
    ("recipe_of", "every"),
    [(make, 9), (make_lora, 48), pytest.param(make, 1, marks=pytest.mark.full)],
    ids=["model", "adapter", "model at every call"],
)
def test_killed_at_the_calls_of_a_run(
    forks: Forks, folder: Path, recipe_of: Callable[[Path], Path], every: int
) -> None:
    folder = folder / f"{recipe_of.__name__}-{every}"
    folder.mkdir()
    recipe, output = recipe_of(folder), folder / "run"
    train(load(recipe, "run", *THREE_SAVES))  # the first start makes the cache
    shutil.rmtree(output)
    output.mkdir()
    recorder = Recorder()
    with observed(recorder):
        expected = train(load(recipe, "run", *THREE_SAVES)).state_hash
    reported, before = rows(output), committed(recorder.calls, output)
    assert before[-1] == 3 and len(before) > 200
    numbers = [n for n, call in enumerate(recorder.calls) if call.op in STRUCTURAL or n % STRIDE == 0]
    for number in numbers[::every]:
        shutil.rmtree(output)
        output.mkdir()
        words = ("train", recipe, f"train.output_dir={output}", *THREE_SAVES)
        killed = forks.run(*words, fault=("kill_at", number + 1))
        at = f"call {number}: {recorder.calls[number]}"
        assert (killed.code, killed.err) == (-signal.SIGKILL, ""), at
        told = io.StringIO()
        assert train(load(recipe, "run", *THREE_SAVES), resume="allow", console=told).state_hash == expected, at
        # After the commit the rename is done, and nothing that was committed before may be missing.
        begun = f"resumed at step {before[number]} " if before[number] else "starting from the beginning"
        assert begun in told.getvalue(), at
        assert rows(output) == reported, at
        assert checkpoints(output) == {3: expected}, at
        assert not [path.name for path in output.glob(".*") if path.name != ".lock"], at


def test_the_check_of_the_long_version_sees_each_defect(folder: Path) -> None:
    """`tests.soak.kills` asks `problems` about every run that it ended."""
    config = load(make(folder), "checked", *THREE_SAVES)
    expected = End(train(config).state_hash, rows(config.train.output_dir))
    output = Path(config.train.output_dir)
    assert problems(output, expected, 3) == []
    for wrong, before, told in (
        (replace(expected, state_hash="0" * 64), 3, "H is"),
        (replace(expected, rows=expected.rows[1:]), 3, "metrics differ"),
        (expected, 4, "checkpoint-4 was there"),
    ):
        (found,) = problems(output, wrong, before)
        assert told in found
    (output / ".tmp-x").mkdir()
    assert problems(output, expected, 3) == ["leftovers: ['.tmp-x']"]


def test_killed_at_the_calls_that_make_the_cache(forks: Forks, folder: Path) -> None:
    recipe = make(folder)
    expected = train(load(recipe, "whole")).state_hash
    recorder, cache = Recorder(), folder / "fresh"
    own = ("train", recipe, f"data.cache_dir={cache}", f"train.output_dir={folder / 'cached'}")
    with observed(recorder):
        train(load(recipe, "other", f"data.cache_dir={cache}"))
    count = sum(cache in (call.path, *call.path.parents) for call in recorder.calls)
    assert count >= 25
    for number in range(2, count, 7):
        shutil.rmtree(cache)
        shutil.rmtree(folder / "cached", ignore_errors=True)
        assert forks.run(*own, fault=("kill_at", number)).code == -signal.SIGKILL
        assert f"state hash: {expected}\n" in forks.run(*own, "--resume=allow").out
        assert not list(cache.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("recipe_of", "kills", "steps"),
    # A kill comes at most 5 steps after the one before.
    [(make, 3, 20), (make_chats, 2, 13), (make_pairs, 1, 7), pytest.param(make_pairs, 10, 60, marks=pytest.mark.full)],
    ids=["model", "chats", "pairs", "pairs, ten times"],
)
def test_killed_at_random_instants(
    forks: Forks, folder: Path, recipe_of: Callable[[Path], Path], kills: int, steps: int
) -> None:
    """One run, killed again and again: it comes to its end, and to the same one; also one of adapters, on chats."""
    folder = folder / f"random {recipe_of.__name__} {kills}"
    folder.mkdir()
    recipe, output = recipe_of(folder), folder / "random"
    long = (f"train.steps={steps}", "checkpoint.every=1", "eval.every=null")
    begun = time.perf_counter()
    expected = train(load(recipe, "long", *long)).state_hash
    step = (time.perf_counter() - begun) / steps

    def newest() -> int:
        return max((int(path.name.partition("-")[2]) for path in output.glob("checkpoint-*")), default=0)

    generator, last = random.Random(11), 0
    for _ in range(kills):
        child = forks.start("train", recipe, "--resume=allow", f"train.output_dir={output}", *long)
        # counted in steps, because the machine may be faster or slower by now; between them by the clock
        reached, deadline = last + generator.randrange(5), time.monotonic() + 60
        while newest() < reached and time.monotonic() < deadline:
            time.sleep(0.001)
        instant = time.monotonic() + generator.uniform(0.02, 1.5) * step
        while time.monotonic() < instant and newest() <= reached:
            time.sleep(0.001)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait().code == -signal.SIGKILL
        assert newest() >= last, "a checkpoint was lost"
        last = newest()
    done = forks.run("train", recipe, "--resume=allow", f"train.output_dir={output}", *long)
    assert (done.code, done.err) == (0, "")
    assert f"state hash: {expected}\n" in done.out
    assert rows(output) == rows(folder / "long")
