"""Plans: the launches of an op, recorded once and replayed with other addresses.

A CUDA implementation of an op (in `genesis.kernels`) is plain Python that calls `launch`. What it does may depend on
shapes, strides, dtypes, attributes and numbers, never on values in memory. So its launches are recorded the first time
and kept as a `Plan` under exactly those; the next call with the same key packs addresses into the recorded parameters
and goes straight to the driver. A CUDA implementation that reads memory back (a count, say) is not kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from genesis.array import Array
    from genesis.backend.cuda.driver import Driver

__all__ = [
    "Plan",
    "Recorder",
    "Source",
    "Step",
    "record",
    "recorders",
    "recording",
    "submit",
    "watches",
    "watching_launches",
]


class _Recording(threading.local):
    """Of each thread, the recorder of the op that is running, if any."""

    recorder: Recorder | None = None


_current = _Recording()
recorders: list[Recorder] = []  # of all threads; what runs for every op asks this first, which takes less time


class Source(NamedTuple):
    """Where a recorded address comes from: operand or temporary number `operand`, `delta` bytes further."""

    operand: int
    delta: int


class Step:
    """One launch with its parameters in place but for addresses.

    Attributes:
        prepare: sets `run`, `words` and `slots`, waiting for the kernel's compilation; None once that is done.
        is_compiled: whether `prepare` would not wait.
        run: `run(stream)` launches with the addresses that were set.
        words: the parameter buffer as 8-byte words.
        slots: where `words` takes the address of each array, in the order of the kernel's arguments.
        places: of a recorded launch, the slots that change from call to call, each with its source: (slot, operand,
            delta).
        name, grid: the kernel's name and its programs in three dimensions; "fill" and none for memory that is set.
        loaded: once prepared, the kernel on the device (`native.Loaded`); None for what is no machine code.
        constants: of a Triton kernel, what its code is compiled for by name, tiles for example.
    """

    __slots__ = (
        "constants", "grid", "is_compiled", "loaded", "name", "places", "prepare", "run", "slots", "sources", "words"
    )  # fmt: skip

    def __init__(
        self,
        prepare: Callable[[Step], None],
        is_compiled: Callable[[], bool],
        name: str = "fill",
        grid: tuple[int, ...] = (),
    ) -> None:
        self.name, self.grid = name, grid
        self.prepare: Callable[[Step], None] | None = prepare
        self.is_compiled = is_compiled
        self.loaded: Any = None
        self.constants: Mapping[str, Any] = {}
        self.run: Callable[[int], None]
        self.words: Any = None
        self.slots: tuple[int, ...] = ()
        self.sources: list[Source | None] = []
        self.places: tuple[tuple[int, int, int], ...] = ()

    def launch(self, pointers: list[int], stream: int) -> None:
        """Launch on arrays at these addresses, the first time after preparing it."""
        self.make_ready()
        for slot, pointer in zip(self.slots, pointers, strict=True):
            self.words[slot] = pointer
        _launched(self, stream)

    def make_ready(self) -> None:
        """Prepare the launch, where that was not done; may wait for the kernel."""
        if self.prepare is not None:
            self.prepare(self)
            self.prepare = None
            pairs = zip(self.slots, self.sources, strict=True) if self.sources else ()
            self.places = tuple((slot, *source) for slot, source in pairs if source is not None)


LaunchWatch = Callable[[Step, int], None]
watches: list[LaunchWatch] = []


@contextmanager
def watching_launches(watch: LaunchWatch) -> Iterator[None]:
    """Call `watch(step, stream)` in the place of every launch inside the block; it calls `step.run(stream)` itself."""
    watches.append(watch)
    try:
        yield
    finally:
        watches.remove(watch)


def _launched(step: Step, stream: int) -> None:
    if watches:
        watches[-1](step, stream)
    else:
        step.run(stream)


class Recorder:
    """Collects the launches of one op, tracing each address back to an operand or a temporary."""

    def __init__(self, operands: tuple[Array, ...]) -> None:
        self.operands = operands
        self.temporaries: list[Any] = []  # storages allocated meanwhile
        self.steps: list[Step] = []
        self.kept: list[Any] = []  # constant memory that launches read
        self.cacheable = True

    def source(self, array: Array) -> Source | None:
        """Where the address of `array` comes from; None for constant memory, which is kept alive."""
        for i, operand in enumerate(self.operands):
            if operand is array:
                return Source(i, 0)
        storage = array.storage
        shared = [i for i, operand in enumerate(self.operands) if operand.storage is storage]
        if shared:
            if len(shared) > 1:  # which of them it is a window of may differ in the next call
                self.cacheable = False
            return Source(shared[0], array.data_ptr() - self.operands[shared[0]].data_ptr())
        for i, temporary in enumerate(self.temporaries):
            if temporary is storage:
                return Source(len(self.operands) + i, array.data_ptr() - storage.pointer)
        self.kept.append(storage)
        return None


def recording() -> Recorder | None:
    """The recorder of the op that is running in this thread, if any."""
    return _current.recorder


Allocate = Callable[[int, str], Any]


class Plan:
    """The launches of one call of an op, to be repeated on other operands of the same layout."""

    __slots__ = ("allocate", "driver", "kept", "lock", "owner", "sizes", "steps")

    def __init__(self, recorder: Recorder, driver: Driver, allocate: Allocate, owner: str) -> None:
        self.steps = tuple(recorder.steps)
        self.sizes = tuple(s.nbytes for s in recorder.temporaries)
        self.kept = recorder.kept
        self.driver, self.allocate, self.owner = driver, allocate, owner
        self.lock = threading.Lock()  # the parameter buffers are shared

    @property
    def is_prepared(self) -> bool:
        """Whether no launch waits for its kernel."""
        return not any(step.prepare for step in self.steps)

    def run(self, operands: tuple[Array, ...], stream: int) -> None:
        """Launch everything on these operands."""
        pointers = [x.storage.pointer + x.offset * x.dtype.itemsize for x in operands]
        if self.sizes:
            temporaries = [self.allocate(n, self.owner) for n in self.sizes]  # freed at the end, reused in stream order
            pointers += [storage.pointer for storage in temporaries]
        if self.driver.pending:
            self.driver.pending.append(lambda: self._launch(pointers, stream))
        else:
            self._launch(pointers, stream)

    def _launch(self, pointers: list[int], stream: int) -> None:
        with self.lock:
            for step in self.steps:
                step.make_ready()  # was done, unless compiling failed when it was first asked for
                words = step.words
                for slot, operand, delta in step.places:
                    words[slot] = pointers[operand] + delta
                _launched(step, stream)


def record(
    operands: tuple[Array, ...], cuda_impl: Callable[[], None], driver: Driver, allocate: Allocate, owner: str
) -> Plan | None:
    """Run a CUDA implementation and record it; None where its launches cannot be repeated.

    Args:
        allocate: `allocate(nbytes, owner)` gives temporaries of later runs.
        owner: the op, for memory that the plan takes.
    """
    recorder = Recorder(operands)
    _current.recorder = recorder
    recorders.append(recorder)
    try:
        cuda_impl()
    finally:
        recorders.remove(recorder)
        _current.recorder = None
    return Plan(recorder, driver, allocate, owner) if recorder.cacheable else None


def submit(step: Step, arrays: list[Array], driver: Driver, stream: int) -> None:
    """Launch a step on these arrays, and record it where an op is being recorded.

    While kernels are being compiled, launches wait in the driver's queue, and all that come after them: so a program
    asks for all its kernels at once, and they are compiled side by side.
    """
    recorder = recording()
    if recorder is not None:
        step.sources = [recorder.source(array) for array in arrays]
        recorder.steps.append(step)
    pointers = [array.data_ptr() for array in arrays]
    if (driver.pending or not step.is_compiled()) and not driver.capturing:
        driver.pending.append(lambda: step.launch(pointers, stream))
    else:
        step.launch(pointers, stream)
