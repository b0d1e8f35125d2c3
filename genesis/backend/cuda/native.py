"""Launches of machine code: signature, compilation in the background, parameters packed as the kernel takes them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend.cuda.compile import Binary, compiling
from genesis.backend.cuda.descriptor import MAP_BYTES, Facts, encoder, is_descriptor
from genesis.backend.cuda.driver import Driver, Function
from genesis.backend.cuda.recording import Step
from genesis.backend.cuda.signature import Signature, describe, is_array
from genesis.shapes import Shape

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

__all__ = ["OPTIONS", "native_step", "signature_of"]

Grid = tuple[int, int, int]
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Loaded(NamedTuple):
    """A kernel on the device: the function and its launch's fixed facts."""

    function: Function
    threads: int
    shared: int
    descriptors: tuple[Facts, ...]


class Region(NamedTuple):
    """A descriptor without its array."""

    shape: Shape
    strides: Shape
    tf32: bool


ADDRESS = object()  # stands for an array
_compiling: dict[Any, Future[Binary]] = {}
_loaded: dict[Any, Loaded] = {}


@functools.lru_cache(4096)
def _fixed(kernel: Any) -> frozenset[int]:
    """Positions of arguments that the kernel asks not to specialize."""
    return frozenset(p.num for p in kernel.params if p.do_not_specialize)


def signature_of(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Signature:
    """What a kernel is compiled for when it is launched with these arguments."""
    fixed = _fixed(kernel)
    types = tuple(describe(a, specialize=i not in fixed) for i, a in enumerate(args))
    options = tuple((name, keywords[name]) for name in OPTIONS if name in keywords)
    constants = tuple(sorted((k, v) for k, v in keywords.items() if k not in OPTIONS))
    return Signature(types, constants, options)


def native_step(backend: CudaBackend, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]) -> Step:
    """A launch of machine code, whose compilation starts now where it is needed."""
    driver, signature = backend.driver, signature_of(kernel, args, keywords)
    # The text tells constants of 2 and 2.0 apart; they are equal otherwise.
    key, values = (driver.index, kernel, signature, repr(signature)), list(_flatten(args, signature.types))
    if key in _loaded:
        return Step(lambda step: _pack(step, driver, _loaded[key], grid, values), lambda: True, kernel.__name__, grid)
    future = _compiling.get(key)
    if future is None:
        future = _compiling[key] = compiling(kernel, signature, driver.properties.capability)

    def prepare(step: Step) -> None:
        if key not in _loaded:
            made = future.result()
            function = backend.pool.with_room(
                f"the code of {made.name}", lambda: driver.load(made.image, made.name, made.shared, made.parameters)
            )
            _loaded[key] = Loaded(function, 32 * made.warps, made.shared, made.descriptors)
        _pack(step, driver, _loaded[key], grid, values)

    return Step(prepare, future.done, kernel.__name__, grid)


def _pack(step: Step, driver: Driver, kernel: Loaded, grid: Grid, values: list[Any]) -> None:
    """Give a launch its parameters, in a buffer of its own; addresses follow."""
    function, threads, shared, facts = kernel
    extent = -(-max((at + size for at, size in function.parameters), default=8) // 8)
    pointers = extent + len(facts)  # behind the parameters lie the address of each descriptor, then of each parameter
    words, base = _aligned_words(pointers + len(function.parameters))
    for i, (at, _) in enumerate(function.parameters):
        words[pointers + i] = base + at
    slots: list[int] = []
    maps: list[tuple[int, int, Any]] = []
    for (at, size), value in zip(function.parameters, values, strict=False):  # Triton's own scratch pointers follow: 0
        if isinstance(value, Region):
            slots.append(extent + len(maps))
            maps.append((slots[-1], base + at, encoder(facts[len(maps)], value.shape, value.strides, value.tf32).map))
        elif value is ADDRESS:
            slots.append(at // 8)
        else:
            _put(base + at, size, value)
    run = driver.launcher(function.handle, grid, threads, shared, base + 8 * pointers)

    def run_with_maps(stream: int) -> None:
        for where, target, made in maps:
            ctypes.memmove(target, made(words[where]), MAP_BYTES)
        run(stream)

    step.words, step.slots, step.run = words, tuple(slots), run_with_maps if maps else run
    step.loaded = kernel


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


def _flatten(args: Any, types: Any) -> Iterator[Any]:
    """The arguments that reach the device, in order: no constants, tuples opened, and nothing that keeps memory alive,
    because a launch may wait for its kernel's compilation.
    """
    for value, entry in zip(args, types, strict=True):
        if isinstance(value, tuple):
            yield from _flatten(value, entry)
        elif isinstance(entry, str):
            if is_descriptor(value):  # its sizes and strides are parameters, too
                yield Region(value.shape, value.strides, value.tf32)
                yield from value.values
            else:
                yield ADDRESS if is_array(value) else value
