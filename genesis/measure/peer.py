"""Compares Genesis with torch, which runs in a separate process and is timed in interleaved rounds.

The process runs `torch_peer.py` with this interpreter or the one of another environment. It gets the same shapes,
dtypes, strides and values. Only the shape of its results is checked.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple, cast

from genesis.array import Array
from genesis.backend import CPU, Device
from genesis.backend.cpu import threads
from genesis.dtypes import DType
from genesis.errors import DeviceError, UsageError, escape
from genesis.measure.cases import Case
from genesis.measure.limits import cuda_backend, has_gpu_time, wait_for
from genesis.measure.timing import Plan, graph_calls, measure, of_graph, of_wall, summarize
from genesis.measure.torch_peer import CALLS

SCRIPT = Path(__file__).parent / "torch_peer.py"
ROUNDS = 3
NOISY = 0.2  # spread of the rounds above which a ratio is noise
FLOATS, INTEGERS = 1 << 16, 1 << 22  # values of an input that are sent; the peer repeats them
RATIO_BANDS = ((1.05, "faster"), (0.95, "level"), (0.8, "near"), (0.5, "slower"), (0.0, "far"))


class Ratio(NamedTuple):
    """The same work in both libraries; times are the median of the medians of interleaved rounds."""

    seconds: float
    peer_seconds: float
    ratio: float  # the peer's time over ours, median of the rounds; above 1 Genesis is faster
    spread: float  # the largest ratio of a round over the smallest, minus 1

    @property
    def is_noisy(self) -> bool:
        return self.spread > NOISY

    @property
    def is_slower(self) -> bool:
        """Whether the peer is faster by more than the rounds differ."""
        return self.ratio < 1 - self.spread

    @property
    def band(self) -> str:
        """The word for the ratio; "level" within the spread of the rounds, "noise" if that is too large."""
        if self.is_noisy or abs(self.ratio - 1) <= self.spread:
            return "noise" if self.is_noisy else "level"
        return next(name for least, name in RATIO_BANDS if self.ratio >= least)


def ratio_of(rounds: list[tuple[float, float]]) -> Ratio:
    """The ratio over all rounds."""
    ratios = [theirs / ours for ours, theirs in rounds]
    ours, theirs = (median(column) for column in zip(*rounds, strict=True))
    return Ratio(ours, theirs, median(ratios), max(ratios) / min(ratios) - 1)


class PeerError(DeviceError):
    """The peer failed at a request."""


class Child:
    """A peer's process; `version` is the library's."""

    version = ""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors

    def ask(self, what: str, /, **request: Any) -> dict[str, Any]:
        """The answer to one request: see `torch_peer.py`. Raises PeerError, as `read` does."""
        with contextlib.suppress(OSError):  # a process that ended answers nothing
            stdin = cast("IO[bytes]", self._process.stdin)
            stdin.write(json.dumps({"ask": what, **request}).encode() + b"\n")
            stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next answer. Raises PeerError: it is an error, or the process ended."""
        if not (line := cast("IO[bytes]", self._process.stdout).readline()):
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise PeerError(f"the peer's process ended with {code}: {escape(lines[-1][:300])}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise PeerError(str(said["error"]))
        return said

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast("IO[bytes]", pipe).close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def started(work: str, device: Device, python: str | None = None) -> Iterator[Child]:
    """torch's process inside the block, by the interpreter `python` or this one. Raises UsageError or DeviceError."""
    if device != CPU and not has_gpu_time(device):
        raise UsageError("Triton's interpreter cannot be compared", where="--vs", next="use --device cpu")
    settings = {"work": work, "device": str(device), "threads": threads() if device == CPU else None}
    # The peer runs on the GPU even where Genesis uses Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, pipe = [python or sys.executable, str(SCRIPT), json.dumps(settings)], subprocess.PIPE
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)
        except OSError as error:
            what, next = f"{escape(python)} cannot be run: {error.strerror}", "name a Python that has torch"
            raise UsageError(what, where="--torch-python", next=next) from error
        with contextlib.closing(Child(process, errors)) as child:
            said = child.read()
            if "missing" in said:
                how = "pip install torch, or name an interpreter that has torch: --torch-python PATH"
                raise DeviceError(str(said["missing"]), where="--vs torch", next=how)
            child.version = str(said["version"])
            yield child


def versus(case: Case, child: Child, plan: Plan, shape: tuple[int, ...]) -> Ratio | str:
    """An op against torch's, in graphs on a GPU, or why it was not compared; `shape` is our first result's."""
    if not case.op.torch and case.op.name not in CALLS:
        return f"torch has nothing like {case.op.name}"
    on_gpu, each = has_gpu_time(case.device), replace(plan, seconds=plan.seconds / (2 * ROUNDS), warm_up=0.0)
    inputs = [_described(x) if isinstance(x, Array) else x for x in case.inputs]
    attrs = {n: v.name if isinstance(v, DType) else v for n, v in case.attrs.items() if n != "device"}
    rounds, wall = list[tuple[float, float]](), of_wall(case.call, wait_for(case.device))
    try:
        facts = child.ask("open", op=case.op.name, path=case.op.torch, inputs=inputs, attrs=attrs, in_graph=on_gpu)
        if tuple(facts["shape"]) != shape:
            raise PeerError(f"its result has the shape {tuple(facts['shape'])}, ours {shape}")
        with ExitStack() as stack:
            sample = wall
            if on_gpu:
                graph = of_graph(case.call, cuda_backend(case.device), graph_calls(wall(3) / 3))
                sample = stack.enter_context(graph)
            for _ in range(ROUNDS):
                theirs = child.ask("measure", seconds=each.seconds)["samples"]
                rounds.append((measure(sample, each).seconds, summarize(theirs).seconds))
        child.ask("close")
    except DeviceError as error:
        return f"not compared with torch: {error.what}"
    return ratio_of(rounds)


def _described(x: Array) -> dict[str, Any]:
    """The layout of an input, and the first of its values in memory order."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True))
    count = min(extent, FLOATS if x.dtype.is_floating_point else INTEGERS)
    values = base64.b64encode(x.view((count,), (1,)).numpy().tobytes()).decode()
    return {"dtype": x.dtype.name, "shape": list(x.shape), "strides": list(x.strides), "values": values}
