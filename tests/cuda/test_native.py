"""Launches of machine code, on a driver that only notes what it is given: parameters in their places, and no memory
held by a launch that waits for its kernel's compilation.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from genesis import cuda
from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import CudaBackend, backend_of, launch
from genesis.backend.cuda.compile import Binary, Double
from genesis.backend.cuda.driver import Function, is_interpreted
from genesis.backend.cuda.tma import MAP_BYTES, Descriptor, Facts
from genesis.dtypes import bfloat16, float32

CUDA = Device("cuda", 0)
GRID = (3, 2, 1)
# A pointer; a region's map, two sizes and two strides; an int32; an int64; two floats; a pointer inside a tuple and an
# int32 beside it; Triton's scratch pointer.
PLACES = (
    (0, 8), (64, 128), (192, 4), (196, 4), (200, 8), (208, 8), (216, 4), (224, 8), (232, 4), (240, 8), (248, 8),
    (256, 4), (264, 8),
)  # fmt: skip
pytestmark = pytest.mark.skipif(not is_interpreted(), reason="a real driver takes no kernel that is not there")


class Kernel:
    """What a launch reads of a kernel."""

    __name__ = "kernel"
    params = tuple(SimpleNamespace(num=i, do_not_specialize=False) for i in range(7))


class Maps:
    """Tensor maps that say where they were made for."""

    def map(self, address: int) -> bytes:
        return address.to_bytes(8, "little") * (MAP_BYTES // 8)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """A device that loads any kernel, and has none loaded."""
    made = backend_of(CUDA)
    monkeypatch.setattr(made.driver, "load", lambda *given: Function(7, PLACES))
    monkeypatch.setattr(launch, "encoder", lambda *layout: Maps())
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "_compiling", {})
    return made


def compiling(monkeypatch: pytest.MonkeyPatch) -> Future[Binary]:
    """The compilation that launches wait for from now on."""
    future: Future[Binary] = Future()
    monkeypatch.setattr(launch, "compiling", lambda *asked: future)
    return future


def arguments(array: Array) -> tuple[Any, ...]:
    region = Descriptor(array, (32, 64), (64, 1), (16, 64))
    return (array, region, 5, 1 << 40, 0.5, Double(0.25), (array, 9))


BINARY = Binary(b"", "kernel", 1024, 4, len(PLACES), (Facts(3, 9, 2, (16, 64)),))


def test_parameters_lie_where_the_kernel_takes_them(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def launcher(
        handle: Any, grid: Any, block: Any, shared: int, parameters: int, cluster: int
    ) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            addresses = (ctypes.c_uint64 * len(PLACES)).from_address(parameters)
            kinds = [*(ctypes.c_uint64,) * 2, *(ctypes.c_int32,) * 2, *(ctypes.c_int64,) * 2, ctypes.c_int32]
            kinds += [ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64]
            seen.append((handle, grid, block, shared, stream, cluster))
            seen.append([kind.from_address(at).value for kind, at in zip(kinds, addresses, strict=True)])
            seen.append((addresses[1] % 64, ctypes.string_at(addresses[1], MAP_BYTES)))

        return launch

    monkeypatch.setattr(backend.driver, "launcher", launcher)
    compiling(monkeypatch).set_result(BINARY)
    array = empty((32, 64), bfloat16, CUDA)
    for _ in range(2):  # compiled now, and found loaded
        step = launch.native_launch(backend, Kernel, GRID, arguments(array), {"BLOCK": 4}, cluster=2)
        assert step.is_compiled()
        for pointer in (array.data_ptr(), 4096):
            seen.clear()
            step.launch([pointer] * 3, 11)
            assert seen[0] == (7, GRID, (128, 1, 1), 1024, 11, 2)
            assert seen[1] == [pointer, pointer, 32, 64, 64, 1, 5, 1 << 40, 0.5, 0.25, pointer, 9, 0]
            assert seen[2] == (0, Maps().map(pointer))


def test_a_launch_that_waits_for_its_kernel_holds_no_memory(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = compiling(monkeypatch)
    before = cuda.memory_allocated()
    array = empty((1024, 1024), float32, CUDA)
    assert cuda.memory_allocated() == before + array.nbytes
    steps = [launch.native_launch(backend, Kernel, GRID, arguments(array), {"BLOCK": 4}) for _ in range(2)]
    pointer = array.data_ptr()
    del array
    gc.collect()
    assert cuda.memory_allocated() == before
    assert not steps[0].is_compiled()
    future.set_result(BINARY)
    monkeypatch.setattr(backend.driver, "launcher", lambda *given: lambda stream: None)
    for step in steps:
        step.launch([pointer] * 3, 0)
        assert step.words[0] == pointer
