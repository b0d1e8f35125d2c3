"""Every case of training in ranks, of which the suite runs a sample: `make ranks-faults`.

State hashes on 1, 2 and 4 ranks, resumed runs, a fault in each phase, SIGKILL at every system call of a save, and
signals at random instants of a run whose saves take 3 s. Arguments name the parts to run; none means all.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.distributed.cases import (
    KILLS,
    OF_BASE,
    OVER,
    SETTINGS,
    SIZES,
    Runs,
    faults,
    hash_of,
    left_over,
    run_fault,
    run_killed,
)
from tests.train.runs import ROOT, Ended, Forks, checkpoints, memory_folder

ALL = (1, 2, 4)
STEPS = 20
LEGS = [(1, 1), (2, 1), (4, 1), (1, 1), (2, 1), (2, 0), (2, 1), (1, 0)]
SAVE_S = 3.0
EARLY_S = 3.0  # until when ranks may still be starting, on a busy machine
ENDS_S = 4.0  # how long a job may take to end that has nothing to save

Found = Iterator[tuple[str, str | None]]


def state_hashes(runs: Runs, lora: Runs) -> Found:
    """Of every setting, each rank number once."""
    for of, table in ((runs, SETTINGS), (lora, OF_BASE)):
        for name, settings in table.items():
            found = of.hashes(name, settings, ALL, STEPS)
            yield f"state hash: {name}, {STEPS} steps", None if len(set(found.values())) == 1 else str(found)


def quickstart(runs: Runs, lora: Runs) -> Found:
    """The recipe that ships, with 8 batches a step, in real processes; the tokenizer is trained once."""
    settings = ("accumulation_steps=8", "steps=3", "threads=1", "batch_size=2")
    words = ["train", "quickstart", *(f"train.{each}" for each in settings), "checkpoint.every=null"]
    words += ["eval.max_batches=4", "eval.prompts=[]", f"data.cache_dir={runs.folder / 'cache'}"]
    found = {}
    for n in ALL:
        line = [sys.executable, "-m", "genesis_cli", *words]
        line += [f"train.output_dir={runs.folder / f'quickstart-{n}'}", "--nproc", str(n)]
        done = subprocess.run(line, cwd=ROOT, text=True, capture_output=True, timeout=900, check=False)
        found[n] = hash_of(Ended(done.returncode, done.stdout, done.stderr))
    yield "state hash: quickstart, 3 steps", None if len(set(found.values())) == 1 else str(found)


def resumed(runs: Runs, lora: Runs) -> Found:
    """Other ranks at every save."""
    for of, name, settings in (
        (runs, "float32", SETTINGS["float32"]),
        (runs, "masters", SETTINGS["masters"]),
        (lora, "lora", OF_BASE["lora with dropout"]),
    ):
        at_once, in_legs = of.resumed(name, settings, LEGS)
        yield f"resumed: {name}", None if at_once == in_legs else f"{at_once}, {in_legs}"


def each_fault(runs: Runs, lora: Runs) -> Found:
    for number, fault in enumerate(faults()):
        yield fault.name, run_fault(runs, fault, number)


def kills(runs: Runs, lora: Runs) -> Found:
    """SIGKILL of a rank at every file-system call of a run, and at every one of its saves in the background."""
    expected = runs.saving("kills-alone", 1, "off")
    for background, fault, rank in KILLS:
        for call in range(1, 10_000):
            wrong = run_killed(runs, background, fault, rank, call, expected)
            if wrong == OVER:
                break
            yield f"SIGKILL: rank {rank}, background {background}, {fault} {call}", wrong


def instants(runs: Runs, lora: Runs) -> Found:
    """SIGTERM or SIGINT at a random instant, to the launcher, to one rank or to all at once."""
    draw = random.Random(22)
    for number in range(200):
        which = draw.choice(("launcher", "rank 0", "rank 1", "all"))
        what, after = draw.choice((signal.SIGTERM, signal.SIGINT)), draw.uniform(0.3, 6.0)
        yield f"{what.name} to {which} after {after:.2f} s", at_instant(runs, f"instant-{number}", which, what, after)


def at_instant(runs: Runs, name: str, which: str, what: signal.Signals, after: float) -> str | None:
    """What is wrong with how a job ends that gets this signal, if anything."""
    long = ("eval.every=null", "checkpoint.every=3", "train.steps=100000", "eval.prompts=[]")
    job = runs.forks.start(*runs.words(name, 2, *SIZES, *long), fault=("on_rank", 0, "slow_save", SAVE_S))
    time.sleep(after)
    ranks = children(job.pid)
    targets = {"launcher": [job.pid], "rank 0": ranks[:1], "rank 1": ranks[1:2], "all": [job.pid, *ranks]}[which]
    for pid in targets or [job.pid]:  # ranks may not be there yet
        os.kill(pid, what)
    began = time.monotonic()
    done = job.wait()
    took = time.monotonic() - began
    saved = checkpoints(runs.folder / name) if (runs.folder / name).is_dir() else {}
    is_saved = "which is saved" in done.err
    early = after < EARLY_S and not is_saved
    blocks = [line for line in done.err.splitlines() if "stopped:" in line or "error:" in line or "interrupted" in line]
    # Before the launcher has handlers, a signal ends it as the system does, without a word.
    by_system = early and done.code == -what
    if done.code != 128 + what and not by_system:
        return f"exit code {done.code}: {done.err}"
    if took > (ENDS_S if early else 2 * SAVE_S + 5):
        return f"ended after {took:.1f} s: {done.err}"
    if is_saved and f"after step {max(saved, default=0)}, which is saved" not in done.err:
        return f"the step is not saved: {done.err}"
    if len(blocks) != (0 if by_system else 1) or "Traceback" in done.err:
        return f"{len(blocks)} blocks: {done.err}"
    return left_over(runs, name)


def children(pid: int) -> list[int]:
    """The processes that a launcher has started, in their order."""
    return sorted(int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


PARTS: dict[str, Callable[[Runs, Runs], Found]] = {
    "hashes": state_hashes,
    "quickstart": quickstart,
    "resumed": resumed,
    "faults": each_fault,
    "kills": kills,
    "instants": instants,
}


def main() -> int:
    """Run the parts; 1 where a case went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--verbose", action="store_true", help="print what went well, too")
    options = parser.parse_args()
    wrong = 0
    with memory_folder() as folder, Forks() as forks:
        for name in options.parts or PARTS:
            began, count = time.monotonic(), 0
            runs, lora = Runs(forks, folder / name), Runs(forks, folder / f"{name}-lora", is_lora=True)
            for what, fault in PARTS[name](runs, lora):
                count += 1
                wrong += fault is not None
                if fault is not None or options.verbose:
                    print(f"{what}: {fault or 'well'}", flush=True)
            print(f"{name}: {count} cases in {time.monotonic() - began:.0f} s, {wrong} wrong so far", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
