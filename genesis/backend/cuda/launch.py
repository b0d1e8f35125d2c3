"""Launching kernels, and plans: an op's launches recorded once and replayed with other addresses.

A twin (the CUDA side of an op, in `genesis.kernels`) is plain Python that calls `launch`. What it does may depend on
shapes, strides, dtypes, attributes and numbers, never on values in memory. So its launches are recorded the first time
and kept as a `Plan` under exactly those; the next call with the same key packs addresses into the recorded parameters
and goes straight to the driver. A twin that reads memory back (a count, say) is not kept.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend.cuda.compile import binary
from genesis.backend.cuda.descriptor import MAP_BYTES, Facts, encoder, is_descriptor
from genesis.backend.cuda.driver import Driver, Function, is_interpreted
from genesis.backend.cuda.signature import Signature, describe, is_array

if TYPE_CHECKING:
    from genesis.array import Array

__all__ = ["Plan", "Recorder", "clear", "launch", "record", "recording"]

Grid = tuple[int, int, int]


class Compiled(NamedTuple):
    """A kernel ready to launch: the loaded function and its launch's fixed facts."""

    function: Function
    threads: int
    shared: int
    descriptors: tuple[Facts, ...]


_compiled: dict[Any, Compiled] = {}
_state = threading.local()
_BLOCKING = bool(os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0"))


class Source(NamedTuple):
    """Where a recorded address comes from: operand or temporary number `index`, `delta` bytes further."""

    index: int
    delta: int


class Step(NamedTuple):
    """One recorded launch.

    Attributes:
        run: `run(stream)` launches with the addresses that were set.
        places: per address, where `addresses` takes it, and its source.
        addresses: the parameter buffer as 8-byte words.
    """

    run: Callable[[int], None]
    places: tuple[tuple[int, Source], ...]
    addresses: Any


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
    return getattr(_state, "recorder", None)


class Plan:
    """The launches of one call of an op, to be repeated on other operands of the same layout."""

    def __init__(self, recorder: Recorder, allocate: Callable[[int], Any]) -> None:
        self.steps = tuple(recorder.steps)
        self.sizes = tuple(s.nbytes for s in recorder.temporaries)
        self.kept = recorder.kept
        self.allocate = allocate
        self.lock = threading.Lock()  # the parameter buffers are shared

    def run(self, operands: tuple[Array, ...], stream: int) -> None:
        """Launch everything on these operands."""
        pointers = [x.storage.pointer + x.offset * x.dtype.itemsize for x in operands]
        temporaries = [self.allocate(n) for n in self.sizes]  # freed at the end, reused in stream order
        for storage in temporaries:
            pointers.append(storage.pointer)
        with self.lock:
            for run, places, addresses in self.steps:
                for at, (index, delta) in places:
                    addresses[at] = pointers[index] + delta
                run(stream)


def record(operands: tuple[Array, ...], twin: Callable[[], None], allocate: Callable[[int], Any]) -> Plan | None:
    """Run a twin and record it; None where its launches cannot be repeated."""
    recorder = Recorder(operands)
    _state.recorder = recorder
    try:
        twin()
    finally:
        _state.recorder = None
    return Plan(recorder, allocate) if recorder.cacheable else None


def launch(kernel: Any, grid: int | tuple[int, ...], *args: Any, **keywords: Any) -> None:
    """Launch a Triton kernel on the device of its first array, on the current stream.

    Args:
        kernel: a function under `triton.jit`. Its constexpr parameters come last and are given by keyword.
        grid: programs, in up to three dimensions; nothing is launched where one is 0.
        args: arrays (passed as pointers), tensor descriptors, integers, floats (float32, or float64 as `Double`),
            None, and tuples of integers, in the kernel's order. At least one array.
        keywords: the constants, and Triton's options num_warps, num_stages, maxnreg.
    """
    from genesis.backend.cuda import backend_of

    whole: Grid = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]  # type: ignore[assignment]
    if 0 in whole:
        return
    backend = backend_of(next(a for a in args if is_array(a)).device)
    make = _interpreted if is_interpreted() else _native
    step, arrays = make(backend.driver, kernel, whole, args, keywords)
    recorder = recording()
    if recorder is not None:
        sources = [recorder.source(array) for array in arrays]
        placed = zip(step.places, sources, strict=True)
        recorder.steps.append(step._replace(places=tuple((at, s) for (at, _), s in placed if s is not None)))
    step.run(backend.stream)
    if _BLOCKING:
        backend.driver.synchronize_stream(backend.stream)


def clear(array: Array) -> None:
    """Set every byte of a contiguous array to 0, in stream order."""
    from genesis.backend.cuda import backend_of

    backend = backend_of(array.device)
    driver, nbytes = backend.driver, array.nbytes
    if nbytes == 0:
        return
    address = (ctypes.c_uint64 * 1)(array.data_ptr())

    def run(stream: int) -> None:
        driver.fill(address[0], 0, nbytes, stream)

    recorder = recording()
    if recorder is not None:
        source = recorder.source(array)
        recorder.steps.append(Step(run, () if source is None else ((0, source),), address))
    run(backend.stream)


_OPTIONS = ("num_warps", "num_stages", "maxnreg")


@functools.lru_cache(4096)
def _fixed(kernel: Any) -> frozenset[int]:
    """Positions of arguments that the kernel asks not to specialize."""
    return frozenset(p.num for p in kernel.params if p.do_not_specialize)


def _signature(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Signature:
    fixed = _fixed(kernel)
    types = tuple(describe(a, specialize=i not in fixed) for i, a in enumerate(args))
    options = tuple((name, keywords[name]) for name in _OPTIONS if name in keywords)
    constants = tuple(sorted((k, v) for k, v in keywords.items() if k not in _OPTIONS))
    return Signature(types, constants, options)


def _native(
    driver: Driver, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Step, list[Array]]:
    """A launch of machine code: parameters in a buffer of their own, and the arrays in the order of `places`."""
    signature = _signature(kernel, args, keywords)
    key = (driver.index, kernel, signature)
    found = _compiled.get(key)
    if found is None:
        made = binary(kernel, signature, driver.properties.capability)
        function = driver.load(made.image, made.name, made.shared)
        found = _compiled[key] = Compiled(function, 32 * made.warps, made.shared, made.descriptors)
    function, threads, shared, facts = found
    values = list(_flatten(args, signature.types))
    extent = -(-max((at + size for at, size in function.parameters), default=8) // 8)
    words, base = _aligned_words(extent + len(facts))  # behind the parameters: the address of each descriptor
    pointers = (ctypes.c_uint64 * max(len(function.parameters), 1))(*(base + at for at, _ in function.parameters))
    places, arrays, maps = [], [], []
    for (at, size), value in zip(function.parameters, values, strict=False):  # Triton's own scratch pointers follow: 0
        if is_descriptor(value):
            where = extent + len(maps)
            words[where] = value.array.data_ptr()
            places.append((where, Source(0, 0)))
            arrays.append(value.array)
            maps.append((where, base + at, encoder(facts[len(maps)], value.shape, value.strides, value.tf32).map))
        elif is_array(value):
            words[at // 8] = value.data_ptr()
            places.append((at // 8, Source(0, 0)))
            arrays.append(value)
        else:
            _put(base + at, size, value)
    handle, array = function.handle, ctypes.addressof(pointers)

    def run(stream: int, alive: Any = pointers) -> None:
        driver.launch(handle, grid, threads, shared, stream, array)

    def run_with_maps(stream: int) -> None:
        for where, target, made in maps:
            ctypes.memmove(target, made(words[where]), MAP_BYTES)
        run(stream)

    return Step(run_with_maps if maps else run, tuple(places), words), arrays


def _aligned_words(count: int) -> tuple[Any, int]:
    """`count` words of 8 bytes that start at a multiple of 64, as tensor maps among the parameters must; and where."""
    room = (ctypes.c_uint64 * (count + 7))()
    skip = -ctypes.addressof(room) % 64
    return (ctypes.c_uint64 * count).from_buffer(room, skip), ctypes.addressof(room) + skip


def _put(address: int, size: int, value: Any) -> None:
    """Write a number as the parameter of `size` bytes at `address`."""
    kinds: dict[int, Any] = (
        {4: ctypes.c_float, 8: ctypes.c_double}
        if isinstance(value, float)
        else {1: ctypes.c_int8, 4: ctypes.c_int32, 8: ctypes.c_int64}
    )
    kinds[size].from_address(address).value = value


def _flatten(args: Any, types: Any) -> Any:
    """The arguments that reach the device, in order: no constants, tuples opened."""
    for value, entry in zip(args, types, strict=True):
        if isinstance(value, tuple):
            yield from _flatten(value, entry)
        elif isinstance(entry, str):
            yield value
            if is_descriptor(value):  # its sizes and strides are parameters, too
                yield from value.values


class _Pointer:
    """An address with a dtype, as Triton's interpreter takes it; memory is the host's, so nothing is copied."""

    def __init__(self, words: Any, at: int, dtype: Any) -> None:
        self.words, self.at, self.dtype = words, at, dtype

    def data_ptr(self) -> int:
        return int(self.words[self.at])

    def untyped_storage(self) -> _Pointer:
        return self

    cpu = untyped_storage

    def new_empty(self, *args: Any, **keywords: Any) -> _Pointer:
        return self

    def set_(self, *args: Any) -> None: ...
    def copy_(self, *args: Any) -> None: ...
    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    stride = size


def _interpreted(
    driver: Driver, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Step, list[Array]]:
    """A launch in Triton's interpreter."""
    arrays = [a.array if is_descriptor(a) else a for a in args if is_array(a) or is_descriptor(a)]
    words = (ctypes.c_uint64 * max(len(arrays), 1))(*(a.data_ptr() for a in arrays))
    numbers = iter(range(len(arrays)))

    def value(a: Any) -> Any:
        if is_descriptor(a):
            return a.interpreted(_Pointer(words, next(numbers), a.array.dtype))
        return _Pointer(words, next(numbers), a.dtype) if is_array(a) else a

    values = [value(a) for a in args]
    constants = {k: v for k, v in keywords.items() if k not in _OPTIONS}
    describe(args)  # the same arguments are refused

    def run(stream: int) -> None:
        driver.launch(lambda whole: kernel[whole](*values, **constants), grid, 0, 0, stream, 0)

    return Step(run, tuple((i, Source(0, 0)) for i in range(len(arrays))), words), arrays
