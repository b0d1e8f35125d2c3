"""What this machine does at best, measured here and once a process: a copy, a matrix product, the smallest call.

Beside them stand the peaks of data sheets, for MFU as papers give it. A copy reads and writes memory far larger than
the caches, so that figures above its rate mean data that came out of a cache.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

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

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

QUICK = Plan(seconds=0.5)
COPIED = {"cpu": (128 << 20,), "cuda": (256 << 20, 1 << 30), "interpreter": (1 << 12,)}  # bytes
WIDTHS = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192), "interpreter": (16,)}  # of the square matrices


# Dense peaks in FLOP/s from NVIDIA's data sheets (SXM parts), without sparsity: (bf16 and fp16, TF32 or fp32 in tensor
# cores). The longest name among the words of the GPU's name counts.
DATA_SHEETS = {
    "A100": (312e12, 156e12),  # A100 data sheet, 2021
    "A10": (125e12, 62.5e12),  # A10 data sheet, 2021
    "L4": (121e12, 60e12),  # L4 data sheet, 2023; half of what it states with sparsity
    "L40S": (362e12, 183e12),  # L40S data sheet, 2023
    "H100 PCIe": (756e12, 378e12),  # H100 data sheet, 2023; half of what it states with sparsity
    "H100": (989e12, 494e12),
    "H200": (989e12, 494e12),  # H200 data sheet, 2024
    "B200": (2250e12, 1100e12),  # Blackwell architecture brief, 2024
}


def data_sheet_peak(name: str, dtype: DType) -> float | None:
    """FLOPs a second that the data sheet of the GPU called `name` states for products of a dtype; None if unknown."""
    known = max((each for each in DATA_SHEETS if re.search(rf"\b{each}\b", name)), key=len, default=None)
    if known is None or not dtype.is_floating_point or dtype.itemsize > 4:
        return None
    return DATA_SHEETS[known][0 if dtype.itemsize == 2 else 1]


@dataclass(frozen=True)
class Limits:
    """The best rates of a device, for one dtype.

    Attributes:
        bytes_per_second: read and written by a copy.
        flops_per_second: of a product of two large matrices of `dtype`; None where it takes no products. On the CPU
            float32 stands for narrower floats, because they are multiplied in it.
        call_seconds: wall time of the smallest call, which does nearly nothing.
        kernel_seconds: time on the GPU of the smallest kernel; None on the CPU.
        data_sheet: FLOPs a second by the GPU's data sheet; None on the CPU, and where it is not known.
    """

    device: Device
    dtype: DType
    bytes_per_second: float
    flops_per_second: float | None
    call_seconds: float
    kernel_seconds: float | None
    data_sheet: float | None = None


COLUMNS = (
    Column("dtype", "dtype", "text", "Of the products.", lambda limits: limits.dtype.name),
    Column("bytes_per_second", "copy", "byte/s", "Read and written by a copy.", lambda limits: limits.bytes_per_second),
    Column("flops_per_second", "matmul", "FLOP/s", "Of a large product.", lambda limits: limits.flops_per_second),
    Column("data_sheet", "data sheet", "FLOP/s", "The GPU's dense peak as sold.", lambda limits: limits.data_sheet),
    Column("call_seconds", "smallest call", "s", "On one element, by the wall.", lambda limits: limits.call_seconds),
    Column("kernel_seconds", "smallest kernel", "s", "On the GPU alone.", lambda limits: limits.kernel_seconds),
)


def has_gpu_time(device: Device) -> bool:
    """Whether a GPU's time can be separated from the host's: not on the CPU nor in Triton's interpreter."""
    return _kind(device) == "cuda"


def _kind(device: Device) -> str:
    from genesis.backend.cuda.driver import is_interpreted

    if device == CPU:
        return "cpu"
    return "interpreter" if is_interpreted() else "cuda"


def wait_for(device: Device) -> Callable[[], None]:
    """What waits until the device is done; nothing on the CPU."""
    return (lambda: None) if device == CPU else _cuda(device).driver.synchronize


def _cuda(device: Device) -> CudaBackend:
    return cast("CudaBackend", backend_for(device))


def time_on_gpu(call: Callable[[], object], device: Device, wall: float, plan: Plan) -> Timing:
    """GPU time of a call that takes `wall` seconds eagerly, by the replay of a graph.

    Raises:
        DeviceError: a graph cannot hold the call.
    """
    with of_graph(call, _cuda(device), graph_calls(wall)) as sample:
        return measure(sample, plan)


@functools.cache
def limits_of(device: Device, dtype: DType) -> Limits:
    """The limits for one dtype, measured at the first call."""
    copied, (smallest, kernel) = copy_rate(device), _smallest_call(device)
    peak = data_sheet_peak(get_device_name(device), dtype) if has_gpu_time(device) else None
    return Limits(device, dtype, copied, _product_rate(device, dtype), smallest, kernel, peak)


def _fastest(call: Callable[[], object], device: Device) -> float:
    """Seconds of the device's work, on the GPU where there is one. A limit is what was reached, so not the median."""
    wall = measure(of_wall(call, wait_for(device)), QUICK)
    return (time_on_gpu(call, device, wall.seconds, QUICK) if has_gpu_time(device) else wall).fastest


@functools.cache
def copy_rate(device: Device) -> float:
    """Bytes a second that the fastest copy reads and writes: the op's, or on a GPU the driver's."""
    rates = []
    for size in COPIED[_kind(device)]:
        source, target = (_filled((size,), uint8, device) for _ in range(2))
        calls: list[Callable[[], object]] = [functools.partial(registry["copy"], source, out=target)]
        if device != CPU:
            calls.append(functools.partial(_driver_copy, _cuda(device), target, source))
        rates += [2 * size / _fastest(call, device) for call in calls]
    return max(rates)


def _driver_copy(backend: CudaBackend, target: Array, source: Array) -> None:
    backend.driver.copy(target.data_ptr(), source.data_ptr(), target.nbytes, backend.stream)


def _filled(shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
    """Memory that was written once: pages that nobody touched are read from nowhere."""
    array = empty(shape, dtype, device)
    registry["fill"](out=array, value=1, shape=shape, dtype=dtype)
    return array


@functools.cache
def _product_rate(device: Device, dtype: DType) -> float | None:
    """FLOPs a second of the fastest square product."""
    if not dtype.is_floating_point:
        return None
    if device == CPU and dtype in (bfloat16, float16):
        return _product_rate(device, float32)
    rng, rates = np.random.default_rng(0), []
    for width in WIDTHS[_kind(device)]:
        x = _filled((width, width), dtype, device)
        # Not all alike: the power that a GPU draws, and so its clock, depends on the values.
        backend_for(device).from_numpy(rng.uniform(-1, 1, (width, width)).astype(dtype.numpy), x)
        out = empty((width, width), dtype, device)
        rates.append(2 * width**3 / _fastest(functools.partial(registry["matmul"], x, x, out=out), device))
    return max(rates)


@functools.cache
def _smallest_call(device: Device) -> tuple[float, float | None]:
    """Wall time of a call on one element, without recording, and its time on the GPU."""
    x = TensorBase.wrap(_filled((1,), float32, device))

    def call() -> object:
        return apply(registry["copy"], x)

    with no_grad():
        wall = measure(of_wall(call, wait_for(device)), QUICK).seconds
        return wall, time_on_gpu(call, device, wall, QUICK).seconds if has_gpu_time(device) else None
