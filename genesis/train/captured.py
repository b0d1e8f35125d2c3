"""A part of a training step that becomes a CUDA graph: it runs twice without a graph, then is captured and replayed."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from genesis import cuda, random
from genesis.backend import Device
from genesis.backend.cuda.graph import launches_block
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import DeviceError


class _Next(Enum):
    """Action of the next call."""

    FIRST = "run it and allocate what persists"
    WARM_UP = "run it with the memory of graphs"
    RECORD = "capture and replay it"
    REPLAY = "replay it"
    EAGER = "run it: it cannot be captured"


class Captured:
    """A function without arguments that reads and writes tensors at fixed addresses.

    Every call does the function's work exactly once, so calls can be the steps of a run. The results are identical to
    the function's own: the same kernels run on the same values. A call also advances the default generator as the
    function does. The function must draw random numbers only inside `Generator.positioned_by`.

    Args:
        function: launches the same work in every call; it neither blocks nor reads values on the host.
        note: called once with the reason if the function cannot be captured.
        agree: takes whether this rank can continue and returns whether all can. All ranks replay, or none does.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: Device,
        note: Callable[[str], None],
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._function, self._device, self._note, self._agree = function, device, note, agree
        self._graph = FunctionGraph(device)
        self._next = _Next.FIRST
        self._draws = 0  # counters that a call consumes

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a graph."""
        return self._next is _Next.REPLAY

    def __call__(self) -> None:
        if self._next is _Next.REPLAY:
            self._graph.replay()
            random.default_generator.offset += self._draws
        elif self._next is _Next.EAGER:
            self._function()
        elif self._next is _Next.FIRST:
            generator = random.default_generator
            fixed, start = generator.fixed_draws, generator.offset
            self._graph.first(self._function)
            self._next, self._draws = _Next.WARM_UP, generator.offset - start
            reason = None
            if generator.fixed_draws != fixed:
                reason = "they draw random numbers, whose position in the stream is kept on the host"
            elif launches_block():
                reason = "CUDA_LAUNCH_BLOCKING waits for every launch"
            if not self._agree(reason is None):
                self._give_up(reason)
        elif self._next is _Next.WARM_UP:
            cuda.empty_cache(self._device)  # the graphs' arena allocates the memory of the first run again
            self._graph.warm_up(self._function)
            self._next = _Next.RECORD
        else:
            self._record()

    def close(self) -> None:
        """Release the graph; the next call starts over."""
        self._graph.close()
        self._graph = FunctionGraph(self._device)
        if self._next is not _Next.EAGER:
            self._next = _Next.FIRST

    def _record(self) -> None:
        reason = None
        try:
            self._graph.record(self._function)
        except DeviceError as error:  # the work captured so far has not run
            reason = error.what
        if not self._agree(reason is None):
            self._graph.close()
            self._give_up(reason)
            self._function()
            return
        self._next = _Next.REPLAY
        self._graph.replay()

    def _give_up(self, reason: str | None) -> None:
        self._next = _Next.EAGER
        reason = reason or "another rank cannot"
        self._note(f"training steps are not captured in a CUDA graph and take longer: {reason}")
