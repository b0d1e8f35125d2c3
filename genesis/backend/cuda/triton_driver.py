"""Launches through Triton itself, `kernel[grid](x, y, BLOCK=64)`, on our tensors and streams, without torch."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from genesis.backend import Device, current_cuda


def install(backend_of: Callable[[Device], Any]) -> None:
    """Give Triton a driver that takes devices and streams from our backends; its own takes them from torch."""
    try:
        from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
        from triton.runtime import driver
    except ImportError:
        return

    def backend(index: int | None = None) -> Any:
        return backend_of(Device("cuda", index))

    class GenesisDriver(CudaDriver):  # type: ignore[misc]  # the class has type Any
        launcher_cls = CudaLauncher
        utils = functools.cached_property(lambda self: CudaUtils())  # calls a C compiler, once

        def __init__(self) -> None: ...  # the parent's may import torch

        def get_current_device(self) -> int:
            backend().driver.enter()
            return current_cuda.index

        def set_current_device(self, device: int) -> None:
            current_cuda.index = device

        def get_device_capability(self, device: int) -> tuple[int, int]:
            return backend(device).driver.properties.capability  # type: ignore[no-any-return]

        def get_current_stream(self, device: int) -> int:
            """Return the stream of our ops, after the launches that wait for their kernels to compile."""
            present = backend(device)
            present.driver.flush()
            torch = sys.modules.get("torch")  # a program that uses both has its own streams for torch's tensors
            if present.stream == 0 and torch is not None and torch.cuda.is_initialized():
                return int(torch.cuda.current_stream(device).cuda_stream)
            return int(present.stream)

        # --- For `triton.autotune` and `triton.testing.do_bench` ------------------------------------------------------

        def get_active_torch_device(self) -> Device:
            return Device("cuda")

        def get_device_interface(self) -> Any:
            return importlib.import_module("genesis.cuda")  # in a layer above, for its events

        def get_empty_cache_for_benchmark(self) -> Any:
            return backend().allocate(256 << 20)

        def clear_cache(self, cache: Any) -> None:
            cache.backend.driver.fill(cache.pointer, 0, cache.nbytes, cache.backend.stream)

    driver.set_active(GenesisDriver())
