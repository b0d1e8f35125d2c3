"""Another library compared with Genesis: started in a process of its own and timed in interleaved rounds.

The peer's process runs `peers/child.py` with this interpreter or another environment's. It gets the same shapes,
dtypes, strides and values; its results are looked at for their shape alone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any, cast

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import threads
from genesis.dtypes import DType
from genesis.errors import DeviceError, UsageError, escape
from genesis.files.paths import quote
from genesis.measure.cases import Case
from genesis.measure.limits import has_gpu_time, wait_for
from genesis.measure.peers.torch_ops import CALLS
from genesis.measure.timing import Plan, Sampler, Timing, graph_calls, measure, of_graph, of_wall, summarize

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

SCRIPT = Path(__file__).parent / "peers" / "child.py"
START, ANSWER = 180.0, 900.0  # seconds that the peer may take: torch's import; a compilation
ROUNDS = 3
NOISY = 0.2  # rounds whose ratios lie further apart
FLOATS, INTEGERS = 1 << 16, 1 << 22  # so many values of an input are sent; they are repeated from there on
PEERS = ("torch",)
RATIO_BANDS = ((1.05, "faster"), (0.95, "level"), (0.8, "near"), (0.5, "slower"), (0.0, "far"))


@dataclass(frozen=True)
class Ratio:
    """The same work here and there, measured interleaved.

    Attributes:
        seconds, peer_seconds: the median of the rounds' medians.
        ratio: the peer's time over ours, the median of the rounds: above 1 we are faster.
        spread: the largest ratio of a round over the smallest, less 1.
    """

    seconds: float
    peer_seconds: float
    ratio: float
    spread: float
    rounds: int

    @property
    def is_noisy(self) -> bool:
        """Whether the rounds disagree so much that the ratio says little."""
        return self.spread > NOISY

    @property
    def band(self) -> str:
        """How far we are ahead or behind, or that the difference is noise."""
        if self.is_noisy or abs(self.ratio - 1) <= self.spread:
            return "noise" if self.is_noisy else "level"
        return next(name for least, name in RATIO_BANDS if self.ratio >= least)


@dataclass(frozen=True)
class Peer:
    """An op against the same of another library, which ran in a process of its own.

    Attributes:
        version: of the library.
        clock: "GPU" for replays of a CUDA graph, "wall" for eager calls.
        threads: that both may use on the CPU; None on a GPU.
        backward: None unless gradients were asked for.
    """

    version: str
    clock: str
    threads: int | None
    forward: Ratio
    backward: Ratio | None


class PeerError(DeviceError):
    """The peer could not do what it was asked for."""


class PeerLacks(PeerError):
    """The peer's environment has no library that this needs."""


class Child:
    """A peer's process.

    Attributes:
        version: of the library.
        device: where it works, as Genesis calls it.
    """

    def __init__(self, work: str, device: Device, python: str | None = None) -> None:
        self.device, self.version = device, ""
        self._rest = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `close`
        settings = {"work": work, "device": str(device), "threads": threads() if device == CPU else None}
        # Genesis's choice of Triton's interpreter is not the peer's.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, str(SCRIPT), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise UsageError(
                f"{escape(python)} cannot be run: {error.strerror}",
                where="--torch-python",
                next="give the interpreter of an environment with torch: path/to/bin/python",
            ) from error
        try:
            self.version = self._hello()
        except BaseException:
            self.close()
            raise

    def _hello(self) -> str:
        said = self._read(START)
        if "missing" in said:
            raise DeviceError(
                str(said["missing"]),
                where="--vs torch",
                next="pip install torch, or name an interpreter that has torch: --torch-python PATH",
            )
        return str(said["version"])

    def ask(self, what: str, /, **request: Any) -> dict[str, Any]:
        """The answer to one request: see `peers/child.py`.

        Raises:
            PeerError: it failed there, or the process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ask": what, **request}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        said = self._read(ANSWER)
        if "error" in said:
            raise (PeerLacks if "lacks" in said else PeerError)(str(said["error"]))
        return said

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next line, parsed as a dictionary."""
        assert self._process.stdout is not None
        out, end = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([out], [], [], max(end - time.monotonic(), 0.0))
            if not ready:
                raise PeerError(f"the peer's process did not answer within {seconds:.0f} s")
            piece = os.read(out, 1 << 16)
            if not piece:
                raise self._ended()
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return cast("dict[str, Any]", json.loads(line))

    def _ended(self) -> PeerError:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return PeerError(f"the peer's process ended with {code}: {escape(lines[-1][:300]) if lines else 'no words'}")

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


@contextmanager
def started(work: str, device: Device, name: str = "torch", python: str | None = None) -> Iterator[Child]:
    """A peer's process inside the block.

    Args:
        work: "ops" or "steps".
        name: of the peer.
        python: the interpreter that has it; None means this one.

    Raises:
        UsageError: there is no such peer or interpreter, or the device is only pretended. DeviceError: it is missing.
    """
    if name not in PEERS:
        raise UsageError(f"{quote(name)} is no peer", where="--vs", next=f"use {', '.join(PEERS)}")
    if device != CPU and not has_gpu_time(device):
        raise UsageError("Triton's interpreter is compared with nothing", where="--vs", next="use --device cpu")
    child = Child(work, device, python)
    try:
        yield child
    finally:
        child.close()


# --- Interleaved ------------------------------------------------------------------------------------------------------


def compared(
    ours: Callable[[], Timing], theirs: Callable[[], Timing], rounds: int = ROUNDS
) -> list[tuple[float, float]]:
    """The medians of both in each round, one after the other, so that what slows the machine slows both."""
    return [(ours().seconds, theirs().seconds) for _ in range(rounds)]


def ratio_of(rounds: list[tuple[float, float]]) -> Ratio:
    """What the rounds say together."""
    ratios = [theirs / ours for ours, theirs in rounds]
    return Ratio(
        seconds=median(ours for ours, _ in rounds),
        peer_seconds=median(theirs for _, theirs in rounds),
        ratio=median(ratios),
        spread=max(ratios) / min(ratios) - 1,
        rounds=len(rounds),
    )


def versus(
    case: Case,
    child: Child,
    plan: Plan,
    call: Callable[[], object],
    backward_call: Callable[[], object] | None,
    shape: tuple[int, ...],
    notes: list[str],
) -> Peer | None:
    """An op against torch's; None with a note where there is none, or where it fails.

    Args:
        call, backward_call: ours, forward and (where it is asked for) backward.
        shape: of our (first) result, which torch's must have.
    """
    if not case.op.torch and case.op.name not in CALLS:
        notes.append(f"torch has nothing like {case.op.name}")
        return None
    clock = "GPU" if has_gpu_time(case.device) else "wall"
    inputs = [_described(x) if isinstance(x, Array) else x for x in case.inputs]
    attrs = {name: _plain(value) for name, value in case.attrs.items() if name != "device"}
    try:
        facts = child.ask("open", op=case.op.name, path=case.op.torch, inputs=inputs, attrs=attrs, clock=clock)
        if tuple(facts["shape"]) != shape:
            raise PeerError(f"its result has the shape {tuple(facts['shape'])}, ours {shape}")
        forward = _rounds(call, "forward", child, case.device, plan)
        backward = None if backward_call is None else _rounds(backward_call, "backward", child, case.device, plan)
        child.ask("close")
    except DeviceError as error:
        notes.append(f"not compared with torch: {error.what}")
        return None
    return Peer(child.version, clock, threads() if case.device == CPU else None, forward, backward)


def _rounds(call: Callable[[], object], what: str, child: Child, device: Device, plan: Plan) -> Ratio:
    """Both interleaved, with half of the plan's time for each."""
    seconds = plan.seconds / (2 * ROUNDS)
    each = Plan(plan.precision, seconds, 0.0, plan.sample, plan.most_calls, plan.clock)

    def theirs() -> Timing:
        return summarize(child.ask("measure", what=what, seconds=seconds)["samples"])

    with _sampler(call, device) as sample:
        return ratio_of(compared(lambda: measure(sample, each), theirs))


@contextmanager
def _sampler(call: Callable[[], object], device: Device) -> Iterator[Sampler]:
    """Ours: by the replay of a graph, or by the clock on the wall."""
    wall = of_wall(call, wait_for(device))
    with ExitStack() as stack:
        if has_gpu_time(device):
            held = graph_calls(wall(3) / 3)
            yield stack.enter_context(of_graph(call, cast("CudaBackend", backend_for(device)), held))
        else:
            yield wall


def _described(x: Array) -> dict[str, Any]:
    """An input for the peer: its layout, and the first of its values in the order of memory."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True))
    count = min(extent, FLOATS if x.dtype.is_floating_point else INTEGERS)
    values = x.view((count,), (1,)).numpy()
    return {
        "dtype": x.dtype.name,
        "shape": list(x.shape),
        "strides": list(x.strides),
        "values": base64.b64encode(values.tobytes()).decode(),
    }


def _plain(value: Any) -> Any:
    """An attribute as JSON has it."""
    return value.name if isinstance(value, DType) else value
