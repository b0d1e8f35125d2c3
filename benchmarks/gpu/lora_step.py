"""A training step with adapters on one GPU, next to torch's recipes: milliseconds, memory, warm-up.

    python -m benchmarks.gpu.lora_step [--sizes 0.5B,qwen3-0.6B,llama-3.2-1B] [--shapes 8x1024,4x2048] [--ranks 16,64]
        [--kinds lora,dora] [--checkpointing none,selective,full] [--recipes lean-graphs,lean-chunk-compile,peft]
        [--steps 10] [--rounds 3] [--torch PYTHON] [--out JSON]

A step is forward, backward, clipping to norm 1 and AdamW of the adapters; base and adapters are bf16, on all seven
linears. All sides start from the same files (B is not 0) and see the same tokens, so their first losses must agree.
Each side is a process. The sides of a case take turns, a few steps at a time, and the median step is reported.
lora_torch.py explains torch's recipes; one whose name contains `ckpt` checkpoints all its blocks, the others none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.results import columns, rows_table, write_report
from genesis.backend import as_device

Job = dict[str, Any]
Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 3e-3  # relative, between first losses in bf16: the sides round in different places


class SideError(Exception):
    """A side ended, or did not answer in time."""


class Side:
    """A process that has a model and takes steps on request."""

    def __init__(self, python: str, module: str, job: Job, limit: float) -> None:
        self.limit, self._errors = limit, tempfile.TemporaryFile("w+")  # noqa: SIM115
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [python, "-m", f"benchmarks.gpu.{module}", json.dumps(job)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._errors, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answer(self) -> dict[str, Any]:
        """The next line of JSON that the process prints."""
        end = time.monotonic() + self.limit
        while True:
            try:
                line = self._lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                raise SideError(f"no answer in {self.limit:.0f} s") from None
            if line is None:
                self._lines.put(None)  # for later calls
                self._errors.seek(0)
                said = self._errors.read().strip()
                print(said[-3000:], file=sys.stderr)
                raise SideError((said.splitlines() or ["it ended"])[-1][:300])
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found

    def send(self, asked: Any) -> None:
        """Send a line of JSON to the process, such as the number of steps to take."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` reports that the process has ended
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()

    def ask(self, asked: Any) -> dict[str, Any]:
        """Send a line and return the answer."""
        self.send(asked)
        return self.answer()


def take_turns(opened: Iterable[tuple[Side, Row]], steps: int, rounds: int) -> None:
    """Let sides take steps in turns. Their rows get the answers, of which lists are joined, or the error."""
    opened = list(opened)
    for _ in range(rounds):
        for side, row in opened:
            if "error" in row:
                continue
            try:
                answer = side.ask(steps)
            except SideError as error:
                row["error"] = str(error)
                continue
            row.update({k: row.get(k, []) + v if isinstance(v, list) else v for k, v in answer.items()})


def _timed(opened: Any, count: int) -> dict[str, list[Any]]:
    """Take steps; return the seconds and the result of each."""
    seconds, counts = [], []
    for _ in range(count):
        begun = time.perf_counter()
        counts.append(opened.step())
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "counts": counts}


def serve(opened: Any, job: Job, started: float) -> None:
    """Run a side in its process: warm up, then take as many steps as each line of stdin says.

    Args:
        opened: an `OpenedSteps` of lora_genesis.py or lora_torch.py.
    """
    for _ in range(job["warm_up"]):
        opened.step()
    losses = opened.losses()
    opened.forget_peak()
    print(json.dumps({"loss": losses[0], "warm_s": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        seconds = _timed(opened, int(line))["seconds"]
        losses = [*losses, *opened.losses()]
        print(json.dumps({"seconds": seconds, "last_loss": losses[-1], **opened.facts()}), flush=True)


def serve_modes(make: Callable[[Job], Any]) -> None:
    """Open, step and close modes, as each line of stdin says."""
    opened: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            answer = _timed(opened, asked)
        elif "mode" in asked:
            opened = make(asked)
            tokens = [opened.step() for _ in range(asked["warm_up"])]
            answer = {"loss": opened.loss(), "tokens": tokens[0]}
        else:
            opened.close()
            answer, opened = {}, None
        print(json.dumps(answer), flush=True)


def tokens(job: Job) -> Any:
    """The token ids `[8, batch, length]` that steps take in turn, the same on all sides."""
    import numpy as np

    vocabulary = json.loads((Path(job["folder"]) / "base" / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(0).integers(0, vocabulary, (8, job["batch"], job["length"]))


COLUMNS = columns(
    size=("size", "text", "Model."),
    kind=("kind", "text", "LoRA or DoRA."),
    r=("r", "count", "Rank of the adapters."),
    shape=("tokens a step", "text", "Batch times length."),
    checkpointing=("checkpointing", "text", "Activation checkpointing: none, selective or full."),
    side=("side", "text", "Genesis, or a recipe of torch."),
    step=("step", "s", "Median step."),
    fastest=("fastest", "s", "Fastest step."),
    tokens_per_second=("tokens/s", "token/s", "Trained tokens a second."),
    ratio=("ratio", "ratio", "Time of a step / the first Genesis side's."),
    peak=("memory", "bytes", "Peak allocated memory."),
    reserved=("reserved", "bytes", "Peak memory reserved from the driver."),
    warm_s=("warm-up", "s", "Time from the start of the process to the end of the first steps."),
    loss=("first loss", "count", "Loss of the first step."),
    error=("error", "text", "Why the side has no figures."),
)

# --- Cases ------------------------------------------------------------------------------------------------------------


def sides_of(job: Job, modes: list[str], recipes: list[str]) -> list[tuple[str, str, Job]]:
    """Module, side and job of each process of a case: Genesis with each mode of checkpointing, then torch's recipes."""
    ours = [("lora_genesis", "genesis", {**job, "checkpointing": mode}) for mode in modes]
    return [*ours, *(("lora_torch", r, {**job, "checkpointing": "full" if "ckpt" in r else "none"}) for r in recipes)]


def case(job: Job, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all sides of a case in turns, and return their rows."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        opened: list[tuple[Side, Row]] = []
        for module, name, given in sides_of(job, listed(chosen.checkpointing), listed(chosen.recipes)):
            kept = ("size", "kind", "r", "checkpointing")
            given["side"] = name
            row = {"side": name, "shape": f"{job['batch']}x{job['length']}", **{key: given[key] for key in kept}}
            rows.append(row)
            python = sys.executable if module == "lora_genesis" else chosen.torch
            side = stack.enter_context(Side(python, module, given, chosen.limit))
            try:
                row.update(side.answer())
            except SideError as error:
                row["error"] = str(error)
                side.process.kill()
                continue
            opened.append((side, row))
        take_turns(opened, chosen.steps, chosen.rounds)
    for row in rows:
        seconds = row.pop("seconds", None)
        if seconds and "error" not in row:
            row["step"], row["fastest"] = statistics.median(seconds), min(seconds)
            row["tokens_per_second"] = job["batch"] * job["length"] / row["step"]
    first = next((row["step"] for row in rows if row["side"] == "genesis" and "step" in row), None)
    for row in rows:
        if first is not None and "step" in row:
            row["ratio"] = row["step"] / first
    return rows


def disagreements(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each side whose first loss differs from the first side's."""
    ran = [row for row in rows if "step" in row]
    return [
        f"{row['side']}: first loss {row['loss']:.5f}, that of {ran[0]['side']} is {ran[0]['loss']:.5f}"
        for row in ran[1:]
        if abs(row["loss"] - ran[0]["loss"]) > TOLERANCE * abs(ran[0]["loss"])
    ]


def listed(text: str) -> list[str]:
    """The parts of a list in an option."""
    return [part for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="0.5B", help="0.5B, qwen3-0.6B, llama-3.2-1B, tiny")
    parser.add_argument("--shapes", default="8x1024")
    parser.add_argument("--ranks", default="16")
    parser.add_argument("--kinds", default="lora", help="lora, dora")
    parser.add_argument("--checkpointing", default="none", help="modes of Genesis: none, selective, full")
    parser.add_argument("--recipes", default="", help="of torch: lean-graphs, lean-chunk-compile, peft, peft-ckpt, …")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter of an environment with torch")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one answer may take")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    options = map(listed, (chosen.sizes, chosen.kinds, chosen.ranks, chosen.shapes))
    for size, kind, r, shape in itertools.product(*options):
        batch, length = (int(x) for x in shape.split("x"))
        kept = {key: getattr(chosen, key) for key in ("warm_up", "device", "dtype")}
        with tempfile.TemporaryDirectory() as folder:
            job = {**kept, "size": size, "kind": kind, "r": int(r), "batch": batch, "length": length, "folder": folder}
            with Side(sys.executable, "lora_genesis", {**job, "prepare": True}, chosen.limit) as side:
                side.answer()
            found = case(job, chosen)
        wrong += [f"{size} {kind} r{r} {shape} {text}" for text in disagreements(found)]
        rows += found
    made = rows_table("steps", "Training steps with adapters", COLUMNS, rows)
    made.notes += wrong
    write_report(chosen.out, "lora-step", as_device(chosen.device), [made])
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
