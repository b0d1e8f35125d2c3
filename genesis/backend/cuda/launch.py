"""Launches: a kernel, a grid and arguments become a launch of machine code that can be repeated with other addresses.

A `KernelLaunch` is prepared once: its signature is derived, its kernel compiles in the background, and its parameters
are packed into the launch buffer. While an op's CUDA implementation runs, a `Recorder` collects its launches for the
op's plan (dispatch.py).
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from genesis.backend import ArrayLike
from genesis.backend.cuda.compilations import compiling
from genesis.backend.cuda.compile import Binary, Signature, describe, is_array
from genesis.backend.cuda.driver import Driver, Function, Grid
from genesis.backend.cuda.stream import Runtime
from genesis.backend.cuda.tma import MAP_BYTES, Facts, encoder, is_descriptor
from genesis.shapes import Shape

OPTIONS = ("num_warps", "num_stages", "maxnreg")
_BLOCKING = os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0")  # CUDA's own setting, for debugging


def launch(kernel: Any, grid: int | tuple[int, ...], *args: Any, cluster: int = 1, **keywords: Any) -> None:
    """Launch a Triton kernel on the device of its first array, in the current stream.

    Args:
        kernel: a `triton.jit` function. Its constexpr parameters come last and are given by keyword.
        grid: programs in up to three dimensions; if one is 0, nothing is launched.
        args: arrays (passed as pointers), tensor descriptors, integers, floats (float32, or float64 as `Double`),
            numpy's scalars, None, and tuples of integers or arrays, in the kernel's order. At least one array.
        cluster: size of a cluster: neighbouring programs of the first dimension that run at once and can access each
            other's shared memory. It divides that dimension; values above 1 need Hopper or newer.
        keywords: the constexpr parameters, and Triton's options num_warps, num_stages, maxnreg.
    """
    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    if x == 0 or y == 0 or z == 0:
        return
    args = tuple([a.item() if isinstance(a, np.generic) else a for a in args])
    arrays = [a.array if is_descriptor(a) else a for a in memory_of(args)]
    backend = arrays[0].storage.backend
    driver = backend.driver
    if driver.prepare is not None:
        kernel_launch = driver.prepare(backend, kernel, (x, y, z), args, keywords)
    else:
        kernel_launch = native_launch(backend, kernel, (x, y, z), args, keywords, cluster)
    kernel_launch.constants = keywords
    submit(kernel_launch, arrays, driver, backend.stream)
    if _BLOCKING:
        driver.synchronize_stream(backend.stream)


def memory_of(args: Sequence[Any]) -> list[Any]:
    """Return the arrays and descriptors among a kernel's arguments, also inside tuples."""
    values = [x for a in args for x in (a if isinstance(a, tuple) else (a,))]
    return [x for x in values if is_array(x) or is_descriptor(x)]


def clear(array: ArrayLike) -> None:
    """Set every byte of a contiguous array to 0, in stream order."""
    backend, nbytes = array.storage.backend, array.nbytes
    driver = backend.driver
    if nbytes == 0:
        return

    words = (ctypes.c_uint64 * 1)()
    kernel_launch = plain_launch(lambda stream: driver.fill(words[0], 0, nbytes, stream), words, 1)
    submit(kernel_launch, [array], driver, backend.stream)


# --- A launch and its recorder ----------------------------------------------------------------------------------------


class Source(NamedTuple):
    """The origin of a recorded address: operand or temporary number `operand`, plus `delta` bytes."""

    operand: int
    delta: int


@dataclass(slots=True, eq=False)
class KernelLaunch:
    """One launch, complete except for the addresses of its arrays."""

    # waits for the kernel to compile and sets `run`, `words` and `slots`; None once that is done
    prepare: Callable[[KernelLaunch], None] | None
    is_compiled: Callable[[], bool]  # whether `prepare` would return without waiting
    name: str = "fill"  # of the kernel; "fill" for a memset
    grid: tuple[int, ...] = ()  # programs in three dimensions; empty for a memset
    loaded: Loaded | None = None  # the kernel on the device, once prepared; None without machine code
    constants: Mapping[str, Any] = field(default_factory=dict)  # constexpr parameters of a Triton kernel
    run: Callable[[int], None] = field(init=False)  # `run(stream)` launches with the addresses in `words`
    words: Any = None  # the parameter buffer as 8-byte words
    slots: tuple[int, ...] = ()  # the word of each array's address, in the order of the kernel's arguments
    # the origin of each of these addresses in a recorded launch; None for constant memory
    sources: list[Source | None] = field(default_factory=list)
    # (slot, operand, delta) of the addresses that change between calls, once prepared
    addresses: tuple[tuple[int, int, int], ...] = ()

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Launch on arrays at these addresses, preparing the launch first if necessary."""
        self.make_ready()
        for slot, pointer in zip(self.slots, pointers, strict=True):
            self.words[slot] = pointer
        self.go(stream)

    def go(self, stream: int) -> None:
        """Launch with the addresses in `words`, through the innermost watch if there is one."""
        if watches:
            watches[-1](self, stream)
        else:
            self.run(stream)

    def make_ready(self) -> None:
        """Prepare the launch if that was not done yet; may wait for the kernel to compile."""
        if self.prepare is not None:
            self.prepare(self)
            self.prepare = None
            pairs = zip(self.slots, self.sources, strict=True) if self.sources else ()
            self.addresses = tuple((slot, *source) for slot, source in pairs if source is not None)


def plain_launch(
    run: Callable[[int], None], words: Any, count: int, name: str = "fill", grid: tuple[int, ...] = ()
) -> KernelLaunch:
    """A launch without machine code: `run(stream)` reads addresses from the first `count` of `words`."""

    def prepare(launch: KernelLaunch) -> None:
        launch.words, launch.slots, launch.run = words, tuple(range(count)), run

    return KernelLaunch(prepare, lambda: True, name, grid)


LaunchWatch = Callable[[KernelLaunch, int], None]
watches: list[LaunchWatch] = []


@contextmanager
def watching_launches(watch: LaunchWatch) -> Iterator[None]:
    """Call `watch(launch, stream)` instead of every launch inside the block; the watch calls `launch.run(stream)`."""
    watches.append(watch)
    try:
        yield
    finally:
        watches.remove(watch)


@dataclass(eq=False)
class Recorder:
    """Collects the launches of one op and traces each address back to an operand or a temporary."""

    operands: tuple[ArrayLike, ...]
    temporaries: list[Any] = field(default_factory=list)  # storages allocated while recording
    launches: list[KernelLaunch] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # constant memory that launches read
    cacheable: bool = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the launches of this thread inside the block."""
        _current.recorder = self
        recorders.append(self)
        try:
            yield
        finally:
            recorders.remove(self)
            _current.recorder = None

    def source(self, array: ArrayLike) -> Source | None:
        """The origin of the address of `array`; None for constant memory, which the recorder keeps alive."""
        for i, operand in enumerate(self.operands):
            if operand is array:
                return Source(i, 0)
        storage = array.storage
        shared = [i for i, operand in enumerate(self.operands) if operand.storage is storage]
        if len(shared) > 1:  # the same array given twice; the call's key distinguishes this
            shared = list({id(self.operands[i]): i for i in shared}.values())
        if len(shared) > 1:  # all weights of a model may share one storage
            first, last = _extent(array)
            spans = {i: _extent(self.operands[i]) for i in shared}
            shared = [i for i, (begin, end) in spans.items() if begin <= first and last <= end] or shared
            if len(shared) > 1:  # ambiguous: in another call the array may be a view of another operand
                self.cacheable = False
        if shared:
            return Source(shared[0], array.data_ptr() - self.operands[shared[0]].data_ptr())
        for i, temporary in enumerate(self.temporaries):
            if temporary is storage:
                return Source(len(self.operands) + i, array.data_ptr() - storage.pointer)
        self.kept.append(storage)
        return None


def _extent(array: ArrayLike) -> tuple[int, int]:
    """The lowest address of an array and the address behind its last byte."""
    address, size = array.data_ptr(), array.dtype.itemsize
    if 0 in array.shape:
        return address, address
    steps = [(count - 1) * stride * size for count, stride in zip(array.shape, array.strides, strict=True)]
    return address + sum(min(x, 0) for x in steps), address + sum(max(x, 0) for x in steps) + size


class _Recording(threading.local):
    """The recorder of the running op in each thread, if any."""

    recorder: Recorder | None = None


_current = _Recording()
recorders: list[Recorder] = []  # of all threads; a faster check for every op than the thread-local


def recording() -> Recorder | None:
    """The recorder of the running op in this thread, if any."""
    return _current.recorder


def forget_plan() -> None:
    """Keep no plan of the running op, because its launches depend on more than its key contains."""
    if _current.recorder is not None:
        _current.recorder.cacheable = False


def submit(launch: KernelLaunch, arrays: Sequence[ArrayLike], driver: Driver, stream: int) -> None:
    """Launch on these arrays, and record the launch if an op is being recorded.

    While a kernel compiles, its launch and all later ones wait in the driver's queue. So a program requests all its
    kernels without waiting, and they compile in parallel.
    """
    recorder = recording()
    if recorder is not None:
        launch.sources = [recorder.source(array) for array in arrays]
        recorder.launches.append(launch)
    pointers = [array.data_ptr() for array in arrays]
    if (driver.pending or not launch.is_compiled()) and not driver.capturing:
        driver.pending.append(lambda: launch.launch(pointers, stream))
    else:
        launch.launch(pointers, stream)


# --- Machine code -----------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A kernel on the device: the function and the fixed facts of its launch."""

    function: Function
    block: Grid  # threads, in up to three dimensions
    shared: int  # bytes of dynamic shared memory
    descriptors: tuple[Facts, ...] = ()  # how to encode the tensor map of each descriptor argument
    waits: bool = True  # whether the code waits for the preceding kernel in a graph, see `compile.dependent`

    @property
    def threads(self) -> int:
        """Threads per block."""
        return math.prod(self.block)


class Region(NamedTuple):
    """A descriptor without its array."""

    shape: Shape
    strides: Shape
    tf32: bool


ADDRESS = object()  # stands for the address of an array
_compiling: dict[Any, Future[Binary]] = {}
_loaded: dict[Any, Loaded] = {}


@functools.lru_cache(4096)
def _unspecialized(kernel: Any) -> frozenset[int]:
    """The positions of arguments that the kernel declares `do_not_specialize`."""
    return frozenset(p.num for p in kernel.params if p.do_not_specialize)


def signature_of(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Signature:
    """The signature that a kernel is compiled for when it is launched with these arguments."""
    fixed = _unspecialized(kernel)
    types = tuple(describe(a, specialize=i not in fixed) for i, a in enumerate(args))
    options = tuple((name, keywords[name]) for name in OPTIONS if name in keywords)
    constants = tuple(sorted((k, v) for k, v in keywords.items() if k not in OPTIONS))
    return Signature(types, constants, options)


def native_launch(
    backend: Runtime, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any], cluster: int = 1
) -> KernelLaunch:
    """A launch of a Triton kernel's machine code; starts the compilation if it is needed."""
    driver, signature = backend.driver, signature_of(kernel, args, keywords)
    key, values = _key(driver, kernel, signature), list(_flatten(args, signature.types))
    if key in _loaded:
        return loaded_launch(driver, kernel.__name__, _loaded[key], grid, values, cluster)
    future = compile_ahead(driver, kernel, signature)

    def prepare(launch: KernelLaunch) -> None:
        if key not in _loaded:
            code = future.result()
            function = load(backend, code.image, code.name, code.shared, code.parameters)
            _loaded[key] = Loaded(function, (32 * code.warps, 1, 1), code.shared, code.descriptors)
        _pack(launch, driver, _loaded[key], grid, values, cluster)

    return KernelLaunch(prepare, future.done, kernel.__name__, grid)


def compile_ahead(driver: Driver, kernel: Any, signature: Signature) -> Future[Binary]:
    """Start a compilation for a device, or return the one that was started."""
    key = _key(driver, kernel, signature)
    future = _compiling.get(key)
    if future is None or future.cancelled():
        future = _compiling[key] = compiling(kernel, signature, driver.properties.capability)
    return future


def _key(driver: Driver, kernel: Any, signature: Signature) -> Any:
    # The repr distinguishes constants such as 2 and 2.0, which are equal.
    return driver.index, kernel, signature, repr(signature)


def load(backend: Runtime, image: bytes, name: str, shared: int, parameters: int) -> Function:
    """Load a kernel's machine code onto the device; the driver allocates memory for it."""
    return backend.pool.with_room(f"the code of {name}", lambda: backend.driver.load(image, name, shared, parameters))


def loaded_launch(
    driver: Driver, name: str, kernel: Loaded, grid: Grid, values: list[Any], cluster: int = 1
) -> KernelLaunch:
    """A launch of loaded code.

    Args:
        values: numbers, `ADDRESS` for arrays, and regions for descriptors, in the kernel's order.
    """
    return KernelLaunch(lambda launch: _pack(launch, driver, kernel, grid, values, cluster), lambda: True, name, grid)


def _pack(launch: KernelLaunch, driver: Driver, kernel: Loaded, grid: Grid, values: list[Any], cluster: int) -> None:
    """Pack the parameters of a launch into its own buffer; the addresses are set later."""
    function, facts = kernel.function, kernel.descriptors
    extent = -(-max((at + size for at, size in function.parameters), default=8) // 8)
    # The buffer contains the parameters, the address of each descriptor, and the address of each parameter.
    pointers = extent + len(facts)
    count = pointers + len(function.parameters)
    room = (ctypes.c_uint64 * (count + 7))()  # padding, because tensor maps start at a multiple of 64 bytes
    skip = -ctypes.addressof(room) % 64
    words, base = (ctypes.c_uint64 * count).from_buffer(room, skip), ctypes.addressof(room) + skip
    # The driver reads each parameter through a pointer to it.
    for i, (at, _) in enumerate(function.parameters):
        words[pointers + i] = base + at
    slots: list[int] = []
    maps: list[tuple[int, int, Any]] = []
    for (at, size), value in zip(function.parameters, values, strict=False):  # scratch pointers follow and are 0
        if isinstance(value, Region):
            slots.append(extent + len(maps))
            maps.append((slots[-1], base + at, encoder(facts[len(maps)], value.shape, value.strides, value.tf32).map))
        elif value is ADDRESS:
            slots.append(at // 8)
        else:
            kinds: Mapping[int, Any] = _FLOATS if isinstance(value, float) else _INTEGERS
            kinds[size].from_address(base + at).value = value
    run = driver.launcher(function.handle, grid, kernel.block, kernel.shared, base + 8 * pointers, cluster)

    # Tensor maps contain addresses, so they are encoded at each launch.
    def run_with_maps(stream: int) -> None:
        for where, target, encoded in maps:
            ctypes.memmove(target, encoded(words[where]), MAP_BYTES)
        run(stream)

    # Code without a wait must not start early.
    def run_in_order(stream: int) -> None:
        if driver.capturing:
            driver.serialize_next_launch()
        run(stream)

    launch.words, launch.slots, launch.loaded = words, tuple(slots), kernel
    launch.run = run_with_maps if maps else run if kernel.waits else run_in_order


_INTEGERS = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}
_FLOATS = {4: ctypes.c_float, 8: ctypes.c_double}


def _flatten(args: Any, types: Any) -> Iterator[Any]:
    """The arguments that reach the device, in order, without constants and with tuples flattened.

    They keep no memory alive, because a launch may wait for its kernel to compile.
    """
    for value, entry in zip(args, types, strict=True):
        if isinstance(value, tuple):
            yield from _flatten(value, entry)
        elif isinstance(entry, str):
            if is_descriptor(value):  # its sizes and strides are parameters too
                yield Region(value.shape, value.strides, value.tf32)
                yield from value.values
            else:
                yield ADDRESS if is_array(value) else value
