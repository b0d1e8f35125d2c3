"""Measures the best rates of this machine once per process: a copy, a matmul, the smallest call.

It also has the peaks from GPU data sheets, because papers define MFU by them. The copy moves far more data than the
caches hold, so a call with a higher rate reads from a cache.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from genesis.array import Array, empty
from genesis.autograd import no_grad
from genesis.autograd.record import TensorBase, apply
from genesis.backend import CPU, Device, backend_for
from genesis.cuda import get_device_name
from genesis.dtypes import DType, bfloat16, float16, float32, uint8
from genesis.measure.record import Column
from genesis.measure.timing import Plan, Timing, graph_calls, measure, of_graph, of_wall
from genesis.op import registry

QUICK = Plan(seconds=0.5)
COPIED = {"cpu": (128 << 20,), "cuda": (256 << 20, 1 << 30), "interpreter": (1 << 12,)}  # bytes
WIDTHS = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192), "interpreter": (16,)}  # widths of the square matrices

# Dense peaks in TFLOP/s from NVIDIA's data sheets: (bf16 and fp16, TF32); float32 matmuls use TF32. Peaks stated with
# sparsity are halved. The longest key that occurs in the GPU's name applies.
DATA_SHEETS = {
    "A100": (312.0, 156.0),  # A100 80GB data sheet (SXM), June 2021
    "A10": (125.0, 62.5),  # A10 data sheet, March 2021
    "L4": (121.0, 60.0),  # L4 data sheet, 2023: 242 and 120 with sparsity
    "L40S": (362.05, 183.0),  # L40S data sheet, 2023
    "H100 PCIe": (756.0, 378.0),  # H100 data sheet, 2023: 1,513 and 756 with sparsity
    "H100": (989.4, 494.7),  # H100 data sheet (SXM), 2023: 1,979 and 989 with sparsity
    "H200": (989.4, 494.7),  # H200 data sheet (SXM), 2024: the same chip with faster memory
    "B200": (2250.0, 1100.0),  # Blackwell architecture brief, 2024: 4,500 and 2,200 with sparsity
}


def data_sheet_peak(name: str, dtype: DType) -> float | None:
    """The peak in FLOP/s for matmuls of a dtype from the data sheet of the GPU called `name`; None if unknown."""
    known = max((each for each in DATA_SHEETS if re.search(rf"\b{each}\b", name)), key=len, default=None)
    if known is None or not dtype.is_floating_point or dtype.itemsize > 4:
        return None
    return DATA_SHEETS[known][0 if dtype.itemsize == 2 else 1] * 1e12


@dataclass(frozen=True)
class Limits:
    """The best rates of a device for one dtype."""

    device: Device
    dtype: DType
    bytes_per_second: float  # bytes read and written by a copy
    flops_per_second: float | None  # of a large matmul; on the CPU float32's rate for 16-bit floats; None for integers
    call_seconds: float  # wall time of the smallest call
    kernel_seconds: float | None  # GPU time of the smallest kernel; None on the CPU
    data_sheet: float | None = None  # peak FLOP/s from the GPU's data sheet; None on the CPU and for unknown GPUs


COLUMNS = (
    Column("dtype", "dtype", "text", "Dtype of the matmuls.", "dtype.name"),
    Column("bytes_per_second", "copy", "byte/s", "Bytes read and written by a copy."),
    Column("flops_per_second", "matmul", "FLOP/s", "Rate of a large matmul."),
    Column("data_sheet", "data sheet", "FLOP/s", "The GPU's dense peak by its data sheet."),
    Column("call_seconds", "smallest call", "s", "Wall time of a call on one element."),
    Column("kernel_seconds", "smallest kernel", "s", "GPU time of that call."),
)


def _kind(device: Device) -> str:
    from genesis.backend.cuda.driver import is_interpreted

    return "cpu" if device == CPU else "interpreter" if is_interpreted() else "cuda"


def has_gpu_time(device: Device) -> bool:
    """Whether GPU time can be measured: false on the CPU and in Triton's interpreter."""
    return _kind(device) == "cuda"


def wait_for(device: Device) -> Callable[[], None]:
    """A function that waits until the device is idle; on the CPU it does nothing."""
    return (lambda: None) if device == CPU else cuda_backend(device).driver.synchronize


def cuda_backend(device: Device) -> Any:
    """The backend of a CUDA device."""
    return backend_for(device)


def time_on_gpu(call: Callable[[], object], device: Device, wall: float, plan: Plan) -> Timing:
    """GPU time of a call that takes `wall` seconds, by replays of a graph. Raises DeviceError: no graph can hold it."""
    with of_graph(call, cuda_backend(device), graph_calls(wall)) as sample:
        return measure(sample, plan)


@functools.cache
def limits_of(device: Device, dtype: DType) -> Limits:
    """The limits for one dtype, measured at the first call."""
    peak = data_sheet_peak(get_device_name(device), dtype) if has_gpu_time(device) else None
    return Limits(device, dtype, copy_rate(device), _product_rate(device, dtype), *_smallest_call(device), peak)


def _fastest(call: Callable[[], object], device: Device) -> float:
    """The shortest GPU time, or wall time on the CPU, because a limit is the best rate that was reached."""
    wall = measure(of_wall(call, wait_for(device)), QUICK)
    return (time_on_gpu(call, device, wall.seconds, QUICK) if has_gpu_time(device) else wall).fastest


@functools.cache
def copy_rate(device: Device) -> float:
    """Bytes per second, read and written, of the fastest copy: the op's, or on a GPU also the driver's."""
    rates = []
    for size in COPIED[_kind(device)]:
        source, target = (filled((size,), uint8, device) for _ in range(2))
        calls: list[Callable[[], object]] = [functools.partial(registry["copy"], source, out=target)]
        if device != CPU:
            calls.append(functools.partial(_driver_copy, cuda_backend(device), target, source))
        rates += [2 * size / _fastest(call, device) for call in calls]
    return max(rates)


def _driver_copy(backend: Any, target: Array, source: Array) -> None:
    # Read the stream here, because the backend uses a different one during a capture.
    backend.driver.copy(target.data_ptr(), source.data_ptr(), target.nbytes, backend.stream)


def filled(shape: tuple[int, ...], dtype: DType, device: Device = CPU) -> Array:
    """Memory that was written once, because the system does not back untouched pages with memory."""
    array = empty(shape, dtype, device)
    registry["fill"](out=array, value=1, shape=shape, dtype=dtype)
    return array


@functools.cache
def _product_rate(device: Device, dtype: DType) -> float | None:
    if not dtype.is_floating_point:
        return None
    if device == CPU and dtype in (bfloat16, float16):
        return _product_rate(device, float32)
    rng, rates = np.random.default_rng(0), []
    for width in WIDTHS[_kind(device)]:
        x, out = (empty((width, width), dtype, device) for _ in range(2))
        # Use random values: a GPU's power, and so its clock, depends on the values.
        backend_for(device).from_numpy(rng.uniform(-1, 1, (width, width)).astype(dtype.numpy), x)
        rates.append(2 * width**3 / _fastest(functools.partial(registry["matmul"], x, x, out=out), device))
    return max(rates)


@functools.cache
def _smallest_call(device: Device) -> tuple[float, float | None]:
    """Wall time of a call on one element, without recording, and its GPU time."""
    call = functools.partial(apply, registry["copy"], TensorBase.wrap(filled((1,), float32, device)))
    with no_grad():
        wall = measure(of_wall(call, wait_for(device)), QUICK).seconds
        return wall, time_on_gpu(call, device, wall, QUICK).seconds if has_gpu_time(device) else None
