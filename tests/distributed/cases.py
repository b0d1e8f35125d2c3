"""Training in ranks, case by case: state hashes, resumed runs and faults. The suite runs some, `full` all."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.train.runs import Ended, Forks, checkpoints, make, make_lora

SIZES = ("model.config.hidden_size=64", "train.accumulation_steps=8")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
BF16 = "model.dtype=bfloat16"
SETTINGS: dict[str, tuple[str, ...]] = {
    "float32": SIZES,
    "masters": (*SIZES, BF16),
    "stochastic": (*SIZES, BF16, "optim.low_precision=stochastic"),
    "bfloat16 moments": (*SIZES, BF16, "optim.state_dtype=bfloat16"),
    "muon": (*SIZES, "optim.name=muon"),
    "adafactor": (*SIZES, "optim.name=adafactor"),
    "lion, not clipped": (*SIZES, "optim.name=lion", "train.max_grad_norm=null"),
    "not sharded": (*SIZES, BF16, "train.zero=0"),
    "llama": (f"model.config={json.dumps(LLAMA)}", SIZES[1]),
    "checkpointing": (*SIZES, "train.activation_checkpointing=full"),
}
# Of the base that `make_lora` makes, whose shape is fixed.
OF_BASE: dict[str, tuple[str, ...]] = {
    "lora": (SIZES[1], "lora.r=16"),
    "lora with dropout": (SIZES[1], "lora.r=16", "lora.dropout=0.2", "model.dtype=bfloat16"),
    "full fine-tuning": (SIZES[1], "lora=null"),
}
SAVING = (*SIZES, "eval.every=null", "checkpoint.every=1", "train.steps=3")
# Of all calls where saves are waited for, by either rank, or not, and of those that the thread of saves makes.
KILLS = (("off", "kill_at", 0), ("off", "kill_at", 1), ("on", "kill_at", 0), ("on", "kill_in_save", 0))
OVER = "the run has fewer calls"
ENDS_S = 5.0
NO_STOPS = ("eval.every=null", "checkpoint.every=null")


def hash_of(done: Ended) -> str:
    """The state hash that a run printed."""
    assert done.code == 0, done
    return next(line for line in done.out.splitlines() if line.startswith("state hash: "))


@dataclass
class Runs:
    """Runs of one corpus and configuration."""

    forks: Forks
    folder: Path
    is_lora: bool = False
    recipe: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.recipe = make_lora(self.folder) if self.is_lora else make(self.folder)

    def words(self, name: str, ranks: int, *settings: str) -> list[str]:
        """The command of a run in the folder `name`."""
        words = ["train", str(self.recipe), f"train.output_dir={self.folder / name}", *settings]
        return [*words, "--nproc", str(ranks)]

    def saving(self, name: str, ranks: int, background: str) -> Ended:
        """A run that saves after each step."""
        return self.forks.run(*self.words(name, ranks, *SAVING, f"checkpoint.background={background}"))

    def hashes(self, name: str, settings: Sequence[str], ranks: Sequence[int], steps: int) -> dict[int, str]:
        """The state hash of a run at each number of ranks."""
        long = (f"train.steps={steps}", *NO_STOPS)
        return {
            n: hash_of(self.forks.run(*self.words(f"{name}-{n}".replace(" ", "-"), n, *settings, *long))) for n in ranks
        }

    def resumed(self, name: str, settings: Sequence[str], legs: Sequence[tuple[int, int]]) -> tuple[str, str]:
        """State hashes of a run at once, and of one whose (ranks, zero) change at every save, which is every step."""
        every, output = ("eval.every=null", "checkpoint.every=1"), f"{name}-legs"
        at_once = self.forks.run(*self.words(f"{name}-at-once", 1, *settings, *every, f"train.steps={len(legs)}"))
        for step, (ranks, zero) in enumerate(legs, 1):
            words = self.words(output, ranks, *settings, *every, f"train.steps={len(legs)}", f"train.zero={zero}")
            resume = ["--resume"] if step > 1 else []
            is_last = step == len(legs)
            # A signal in the step of the save stops the run right after it.
            fault = () if is_last else ("on_rank", ranks - 1, "signal_in", "step", signal.SIGTERM)
            if ranks == 1 and not is_last:
                fault = ("signal_in", "step", signal.SIGTERM)
            done = self.forks.run(*words, *resume, fault=fault)
            assert done.code == (0 if is_last else 143), done
            assert max(checkpoints(self.folder / output)) == step
        return hash_of(at_once), hash_of(done)


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and how the job must end.

    Attributes:
        rank: -1 for all.
        said: what stderr must say.
        within: seconds from the fault to the end, at most; the run up to it takes a second or two.
    """

    name: str
    rank: int
    fault: tuple[Any, ...]
    code: int
    said: tuple[str, ...] = ()
    within: float = 20.0
    ranks: int = 2


EARLY = {"start": (0, 1), "joining": (0, 1), "listening": (0,), "handshake": (1,)}  # before all ranks have met
PLACES = ("preparation", "model", "step", "evaluation", "sampling", "saving", "closing")
OF_MAIN = ("sampling", "closing")


def early_faults() -> list[Fault]:
    """What happens to a rank before all have met: nothing is saved, and no other rank waits for it."""
    found = []
    for place, ranks in EARLY.items():
        for rank in ranks:
            at = f"{place}, rank {rank}"
            killed = f"rank {rank} of 2 was killed by SIGKILL (signal 9)"
            found.append(Fault(f"SIGKILL: {at}", rank, ("signal_in", place, int(signal.SIGKILL)), 10, (killed,), 5.0))
            over = f"rank {rank} of 2 ended successfully"
            found.append(Fault(f"exit 0: {at}", rank, ("exit_in", place), 10, (over,), 9.0))
            found.append(Fault(f"bug: {at}", rank, ("raise_in", place, "bug"), 70, ("RuntimeError: planted",), 5.0))
            for number in (signal.SIGTERM, signal.SIGINT):
                stops, said = ("signal_in", place, int(number)), ("ended the run before all ranks had joined",)
                found.append(Fault(f"{number.name}: {at}", rank, stops, 128 + number, said, 5.0))
            if place != "start":
                missing = "rank 1 of 2 did not join" if rank else "rank 0 did not answer at"
                found.append(Fault(f"SIGSTOP: {at}", rank, ("hang_in", place), 10, (missing,)))
    return found


def faults() -> list[Fault]:
    """All of them but those of the single system calls of a save."""
    found = early_faults()
    for place in PLACES:
        for rank in (0,) if place in OF_MAIN else (0, 1):
            at = f"{place}, rank {rank}"
            said = (f"rank {rank} of 2 was killed by SIGKILL (signal 9)",)
            found.append(Fault(f"SIGKILL: {at}", rank, ("signal_in", place, int(signal.SIGKILL)), 10, said))
            early = (f"rank {rank} of 2 ended successfully while others were still running",)
            found.append(Fault(f"exit 0: {at}", rank, ("exit_in", place), 10, early))
            found.append(Fault(f"bug: {at}", rank, ("raise_in", place, "bug"), 70, ("RuntimeError: planted",)))
            if place == "step":
                found.append(Fault(f"memory: {at}", rank, ("raise_in", place, "memory"), 7, ("too little memory",)))
            if place in ("step", "saving"):
                found.append(Fault(f"disk: {at}", rank, ("raise_in", place, "disk"), 8, ("No space left on device",)))
            for number in (signal.SIGTERM, signal.SIGINT):
                later = () if place in ("preparation", "model", "closing") else ("ended the run after step",)
                found.append(
                    Fault(f"{number.name}: {at}", rank, ("signal_in", place, int(number)), 128 + number, later)
                )
            if place in ("step", "evaluation"):
                late = (f"rank {rank} did not answer rank {1 - rank} within", "training")
                stops = ("hang_in", place)
                found.append(Fault(f"SIGSTOP: {at}", rank, stops, 10, late if place == "step" else late[:1], 20.0))
            else:  # others wait for long there, and the launcher does not
                stopped = (f"rank {rank} of 2 was stopped for 3 s",)
                found.append(Fault(f"stopped: {at}", rank, ("hang_in", place), 10, stopped))
    found.append(Fault("NaN", -1, ("nan_at", 3), 9, ("in step 2; the weights are those after step 1",)))
    return found


def run_fault(runs: Runs, each: Fault, number: int) -> str | None:
    """Run one; what is wrong with how it ended, if anything."""
    name = f"fault-{number}"
    brief = ("several", ["limits", 2.0], list(each.fault)) if "SIGSTOP" in each.name else each.fault
    other = ("limits", 2.0) if "SIGSTOP" in each.name else None
    planted: tuple[Any, ...] = ("on_rank", each.rank, *brief)
    if "stopped" in each.name:
        planted = ("several", ["stopped_within", 3.0], list(planted))
    if other is not None:
        planted = ("several", ["on_rank", 1 - each.rank, *other], list(planted))
    began = time.monotonic()
    done = runs.forks.run(*runs.words(name, each.ranks, *SIZES), fault=planted)
    took = time.monotonic() - began
    blocks = [line for line in done.err.splitlines() if "error:" in line or "stopped:" in line]
    if done.code != each.code:
        return f"exit code {done.code}, expected {each.code}: {done.err}"
    if missing := [text for text in each.said if text not in done.err]:
        return f"does not say {missing}: {done.err}"
    if len(blocks) != 1:
        return f"{len(blocks)} blocks, expected one: {done.err}"
    if took > each.within:
        return f"took {took:.1f} s"
    if "Traceback" in done.err:
        return f"a traceback: {done.err}"
    checkpoints(runs.folder / name)  # all their bytes are those that were written
    return left_over(runs, name)


def run_killed(runs: Runs, background: str, fault: str, rank: int, call: int, expected: Ended) -> str | None:
    """What is wrong where one of 2 ranks is killed at a call of a run that saves after each step; `OVER` where none is.

    The job ends soon with the error of the launcher; the next run goes on from the newest checkpoint to the same end.

    Args:
        expected: the run of one process.
    """
    name = f"killed-{background}-{fault}-{rank}-{call}"
    folder, words = runs.folder / name, runs.words(name, 2, *SAVING, f"checkpoint.background={background}")
    done = runs.forks.run(*words, fault=("on_rank", rank, fault, call))
    ended = time.time()
    if done.code == 0:
        return OVER
    if done.code != 10 or f"rank {rank} of 2 was killed by SIGKILL" not in done.err:
        return f"exit code {done.code}: {done.err}"
    written = max((path.stat().st_mtime for path in folder.rglob("*")), default=ended)
    if ended - written > ENDS_S:
        return f"ended {ended - written:.1f} s after the last write"
    before = checkpoints(folder) if folder.is_dir() else {}
    again = runs.forks.run(*words, "--resume=allow")
    kept = checkpoints(folder)
    goes_on = again.code == 0 and hash_of(again) == hash_of(expected)
    goes_on &= all(kept.get(step, digest) == digest for step, digest in before.items())
    if not goes_on or (before and f"resumed at step {max(before)} " not in again.out):
        return f"does not go on from {before}: {again}"
    return left_over(runs, name)


def left_over(runs: Runs, name: str) -> str | None:
    """The processes of a run that are there still, half a second later."""
    until, mark = time.monotonic() + 0.5, f"train.output_dir={runs.folder / name}".encode()
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "cmdline").read_bytes():
                        found.append(entry.name)
                except OSError:
                    continue
        if not found or time.monotonic() > until:
            return f"processes {found} are left" if found else None
        time.sleep(0.02)
