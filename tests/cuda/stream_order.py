"""Ranks on the interpreter's device as on GPUs: NCCL's collectives, over a fake, and streams in any order.

Replays of a graph run its work in an order that its streams and events allow, and that favours or holds back one of the
streams as far as they do: what is not waited for is not there yet, or is overwritten already.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from genesis.backend.cuda.graph import RawGraph
from genesis.backend.cuda.simulated import HostDriver, drivers
from genesis.backend.cuda.stream import HIGHEST
from genesis.distributed import nccl as groups
from genesis.errors import DeviceError
from genesis.kernels.optim import gradients as kernels
from genesis.ops import gradients as ops
from genesis.optim import shared
from genesis.train.device_steps import DeviceSteps, OverlappedSteps
from tests.distributed.nccl_ranks import fake_group

__all__ = [
    "ORDERS",
    "OrderedDriver",
    "cannot_capture",
    "install",
    "nan_on_rank",
    "small_spans",
    "weights_stay",
    "without_wait",
]

LINE = "collectives: a fake of NCCL"
STAGING = 1024  # bytes: a bucket travels in pieces
CAPTURED_BY = 4  # steps of a process, the last of which captures what it is made of

# By priority: the comm stream, the main stream of a capture, its side stream. Those before go first where they may.
COMM, MAIN, SIDE = HIGHEST, -1, 0
ORDERS = {
    "comm stream last": (SIDE, MAIN, COMM),
    "comm stream first": (COMM, SIDE, MAIN),
    "side stream last": (COMM, MAIN, SIDE),
}


class Work(NamedTuple):
    """A piece of captured work, and which pieces before it come first."""

    stream: int
    call: Callable[[], Any]
    after: frozenset[int]

    def __call__(self) -> None:
        self.call()


class OrderedDriver(HostDriver):
    """A device of the interpreter that replays graphs in an order of `ORDERS`; outside graphs all is done at once.

    Attributes:
        deviations: how often a piece of work has run before one that was captured earlier.
    """

    def __init__(self, index: int, order: str) -> None:
        super().__init__(0)
        self.index, self.order, self.deviations = index, ORDERS[order], 0
        self.priorities: dict[int, int] = {}
        self.behind: dict[int, set[int]] = {}  # by stream of a capture, the pieces that its next one follows
        self.events: dict[int, set[int]] = {}

    def create_stream(self, priority: int = 0) -> int:
        stream = super().create_stream(priority)
        self.priorities[stream] = priority
        return stream

    def begin_capture(self, stream: int) -> None:
        super().begin_capture(stream)
        self.behind, self.events = {stream: set()}, {}

    def run_or_capture(self, stream: int, work: Callable[[], Any]) -> None:
        capture = self._captures.get(stream)
        if capture is None:
            work()
            return
        behind = self.behind[stream]
        self.behind[stream] = {len(capture)}
        super().run_or_capture(stream, Work(stream, work, frozenset(behind)))

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        if stream in self._captures:
            self.events[event] = set(self.behind[stream])

    def wait_event(self, stream: int, event: int) -> None:
        super().wait_event(stream, event)
        if event in self._recorded:
            self.behind.setdefault(stream, set()).update(self.events[event])

    def launch_graph(self, executable: int, stream: int) -> None:
        work: Any = self.graphs[executable]
        ranked = [self.order.index(self.priorities[piece.stream]) for piece in work]
        left, done = set(range(len(work))), set[int]()
        while left:
            ready = [i for i in left if work[i].after <= done]
            chosen = min(ready, key=lambda i: (ranked[i], i))
            self.deviations += chosen != min(left)
            work[chosen]()
            left.remove(chosen)
            done.add(chosen)


# --- What a run is given ----------------------------------------------------------------------------------------------


def install(order: str, *more: str) -> None:
    """Give this process such a device, and NCCL's group over a fake of NCCL, whose ranks meet in the folder `more[-1]`.

    Gradients and weights lie in memory that ranks have mapped, unless `more` says "plain". The fake checks that
    all make the same calls in one order; and steps that are replayed must wait for nothing.
    """
    folder, is_mapped = Path(more[-1]), "plain" not in more
    groups.group_for = lambda peers, device, *, one_host: (
        fake_group(peers, folder, STAGING, is_mapped=is_mapped),
        LINE,
    )
    drivers[0] = driver = OrderedDriver(0, order)
    launch, calls, taken = OverlappedSteps._launch, list[str](), itertools.count(1)

    def noted(name: str, original: Any) -> Any:
        return lambda *args: (calls.append(name), original(*args))[1]

    def checked(self: OverlappedSteps, batches: Sequence[Any], *rest: Any) -> None:
        calls.clear()
        launch(self, batches, *rest)
        if self.device.index:  # of a plan of memory
            return
        if next(taken) > CAPTURED_BY and (self._first.is_captured or self._whole.is_captured):
            own = len(batches) // self.state.ranks.size
            # The feed makes sure that the batch before the last has left the pinned memory, and copies from it.
            expected = ["synchronize_event", "copy", "launch_graph"] * own + ["launch_graph"] * (own > 1)
            assert calls == expected, calls
            assert driver.deviations > 0 or driver.order[0] == COMM, "work ran in the order of one stream"

    for name in ("synchronize", "synchronize_stream", "synchronize_event", "copy", "launch_graph"):
        setattr(driver, name, noted(name, getattr(driver, name)))
    OverlappedSteps._launch = checked  # type: ignore[method-assign]


def small_spans() -> None:
    """Cut small models into several buckets, and these into parts of several ranks."""
    kernels.NORM_SPAN = kernels.BLOCK = ops.NORM_SPAN = shared.NORM_SPAN = 256
    shared.BUCKET = 1024


def weights_stay(step: int) -> None:
    """The weights at a NumericError must be those after `step`."""
    take, explain, kept = DeviceSteps.take, DeviceSteps.explain, dict[str, bytes]()

    def weights(self: DeviceSteps) -> dict[str, bytes]:
        return {name: p.detach().cpu().numpy().tobytes() for name, p in self.state.model.named_parameters()}

    def noted(self: DeviceSteps, *rest: Any) -> None:
        take(self, *rest)
        if self.state.step == step:
            kept.update(weights(self))

    def compared(self: DeviceSteps, *rest: Any) -> Any:
        assert self.state.step > step + 1 and weights(self) == kept
        return explain(self, *rest)

    DeviceSteps.take, DeviceSteps.explain = noted, compared  # type: ignore[method-assign]


def nan_on_rank(rank: int, step: int) -> None:
    """That rank's loss is NaN from `step` on."""
    run = OverlappedSteps._run

    def poisoned(self: OverlappedSteps) -> Any:
        loss = run(self)
        return loss * float("nan") if self.state.ranks.rank == rank and self.state.step + 1 >= step else loss

    OverlappedSteps._run = poisoned  # type: ignore[method-assign]


def cannot_capture(rank: int) -> None:
    """Captures fail on that rank."""
    if int(os.environ.get("RANK", "-1")) == rank:

        def failing(*args: Any) -> None:
            raise DeviceError("planted")

        RawGraph.record = failing  # type: ignore[method-assign]


def without_wait(missing: str) -> None:
    """The comm stream does not wait for the main or the side stream, or the main stream does not wait for it."""
    ends = {"main": (COMM, MAIN), "side stream": (COMM, SIDE), "join": (MAIN, COMM)}[missing]
    wait = OrderedDriver.wait_event

    def forgetful(self: OrderedDriver, stream: int, event: int) -> None:
        earlier = self._recorded.get(event)
        if earlier is None or (self.priorities[stream], self.priorities[earlier]) != ends:
            wait(self, stream, event)
            return
        HostDriver.wait_event(self, stream, event)  # the capture ends as it should
        self.behind.setdefault(stream, set())

    OrderedDriver.wait_event = forgetful  # type: ignore[method-assign]
