"""Launching kernels: a kernel, a grid and arguments become a launch of machine code, or of Triton's interpreter."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.backend.cuda.descriptor import is_descriptor
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.dry import DryDriver
from genesis.backend.cuda.interpreted import interpreted_step
from genesis.backend.cuda.native import native_step
from genesis.backend.cuda.recording import Step, submit
from genesis.backend.cuda.signature import is_array

if TYPE_CHECKING:
    from genesis.array import Array

__all__ = ["clear", "launch"]

_BLOCKING = os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0")  # CUDA's own setting, for debugging


def launch(kernel: Any, grid: int | tuple[int, ...], *args: Any, **keywords: Any) -> None:
    """Launch a Triton kernel on the device of its first array, on the current stream.

    Args:
        kernel: a function under `triton.jit`. Its constexpr parameters come last and are given by keyword.
        grid: programs, in up to three dimensions; nothing is launched where one is 0.
        args: arrays (passed as pointers), tensor descriptors, integers, floats (float32, or float64 as `Double`),
            numpy's scalars, None, and tuples of integers, in the kernel's order. At least one array.
        keywords: the constants, and Triton's options num_warps, num_stages, maxnreg.
    """
    from genesis.backend.cuda import backend_of

    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    if x == 0 or y == 0 or z == 0:
        return
    args = tuple([a.item() if isinstance(a, np.generic) else a for a in args])
    arrays = [a.array if is_descriptor(a) else a for a in args if is_array(a) or is_descriptor(a)]
    backend = backend_of(arrays[0].device)
    driver = backend.driver
    make = driver.step if isinstance(driver, DryDriver) else interpreted_step if is_interpreted() else native_step
    step = make(backend, kernel, (x, y, z), args, keywords)
    step.constants = keywords
    submit(step, arrays, driver, backend.stream)
    if _BLOCKING:
        driver.synchronize_stream(backend.stream)


def clear(array: Array) -> None:
    """Set every byte of a contiguous array to 0, in stream order."""
    from genesis.backend.cuda import backend_of

    driver, nbytes = backend_of(array.device).driver, array.nbytes
    if nbytes == 0:
        return

    def prepare(step: Step) -> None:
        step.words = words = (ctypes.c_uint64 * 1)()
        step.slots = (0,)
        step.run = lambda stream: driver.fill(words[0], 0, nbytes, stream)

    submit(Step(prepare, lambda: True), [array], driver, backend_of(array.device).stream)
