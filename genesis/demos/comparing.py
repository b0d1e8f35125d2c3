"""Ways of doing the same work, compared: that they agree, what each launches and moves, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from genesis.array import Array
from genesis.autograd import no_grad
from genesis.backend import CPU, Device, backend_for
from genesis.demos.schema import DemoRow
from genesis.errors import NumericError
from genesis.measure.limits import copy_rate, has_gpu_time, time_on_gpu, wait_for
from genesis.measure.timing import Plan, measure, of_wall
from genesis.op import Op, observe
from genesis.profile.call_memory import peak_bytes
from genesis.profile.format import format_share
from genesis.profile.schema import Time

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend
    from genesis.backend.cuda.launch import KernelLaunch

FAST = Plan(precision=0.1, seconds=0.06, warm_up=0.02)
CLOSE = 0.15  # ratios that differ by less are called equal
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Where a demo runs, and how hard it tries.

    Attributes:
        is_fast: on little data, for a look.
        plan: for each time.
    """

    device: Device
    is_fast: bool = False
    plan: Plan = field(default_factory=Plan)

    def size(self, *, gpu: T, cpu: T, fast: T, tiny: T) -> T:
        """The size for this device; `tiny` is for Triton's interpreter."""
        if self.device != CPU and not has_gpu_time(self.device):
            return tiny
        return fast if self.is_fast else cpu if self.device == CPU else gpu

    def square(self) -> int:
        """The side of a square of float32 that is larger than the caches, a dozen of which fit into a GPU's memory."""
        side = self.size(gpu=16384, cpu=4096, fast=1024 if self.device == CPU else 4096, tiny=32)
        if has_gpu_time(self.device):
            free, _ = cast("CudaBackend", backend_for(self.device)).driver.memory_info()
            while 12 * 4 * side * side > free:
                side //= 2
        return side


class Way(NamedTuple):
    """One way of doing the work: a call that gives a tensor."""

    name: str
    call: Callable[[], Any]


def compare(
    ways: Sequence[Way], setting: Setting, *, tolerance: float | None = 1e-4, with_memory: bool = False
) -> list[DemoRow]:
    """A row for each way.

    Args:
        tolerance: the difference from the first way's result that is allowed; None where the results differ.
        with_memory: measure the peak of memory, too.

    Raises:
        NumericError: two ways do not do the same.
    """
    with no_grad():
        if tolerance is not None:
            _check_agreement(ways, tolerance)
        return [_row(way, setting, with_memory) for way in ways]


def _check_agreement(ways: Sequence[Way], tolerance: float) -> None:
    first = ways[0].call()
    for way in ways[1:]:
        difference = (way.call() - first).abs().amax().item()
        if not difference <= tolerance:
            raise NumericError(f"{way.name} differs from {ways[0].name} by {difference:.3g}, {tolerance:g} is allowed")


def _row(way: Way, setting: Setting, with_memory: bool) -> DemoRow:
    device = setting.device
    way.call()  # compiles, and fills what is filled once
    launches, moved, flops = _counted(way.call, device)
    wall = measure(of_wall(way.call, wait_for(device)), setting.plan)
    gpu = time_on_gpu(way.call, device, wall.seconds, setting.plan) if has_gpu_time(device) else None
    rate = moved / (gpu or wall).seconds
    return DemoRow(
        name=way.name,
        launches=launches,
        bytes=moved,
        flops=flops,
        wall=Time.of(wall),
        gpu=None if gpu is None else Time.of(gpu),
        bytes_per_second=rate,
        share=rate / copy_rate(device),
        peak_bytes=peak_bytes(way.call, device) if with_memory else None,
    )


def _counted(call: Callable[[], object], device: Device) -> tuple[int, int, int]:
    """What a call launches, the bytes that its ops touch, and their arithmetic."""
    ops, moved, flops, launches = 0, 0, 0, 0

    def add(op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], _: float) -> None:
        nonlocal ops, moved, flops
        cost = op.cost(inputs, outputs, attrs)
        ops, moved, flops = ops + (cost.bytes > 0), moved + cost.bytes, flops + cost.flops

    def launch(launched: KernelLaunch, stream: int) -> None:
        nonlocal launches
        launches += 1
        launched.run(stream)

    if device == CPU:
        with observe(add):
            call()
        return ops, moved, flops
    from genesis.backend.cuda.launch import watching_launches

    wait_for(device)()
    with observe(add), watching_launches(launch):
        call()
    wait_for(device)()
    return launches, moved, flops


# --- Sentences --------------------------------------------------------------------------------------------------------


def factor(ratio: float) -> str:
    """A ratio for people: "10.8 times"."""
    return f"{ratio:.{1 if ratio >= 2 else 2}f} times"


def passes(slow: DemoRow, quick: DemoRow) -> str:
    """What more passes over memory cost: launches, bytes and time next to those of fewer passes, and what that says."""
    moved, time = slow.bytes / quick.bytes, slow.seconds / quick.seconds
    return (
        f"{slow.name.capitalize()} there are {slow.launches} passes, {quick.name} {quick.launches}; that is"
        f" {factor(moved)} the bytes and {factor(time)} the time{_cause(slow, quick, time / moved)}."
    )


def _cause(slow: DemoRow, quick: DemoRow, gap: float) -> str:
    """Why the time is what the bytes are, or `gap` times that."""
    if abs(gap - 1) <= CLOSE:
        return ": the time follows the bytes"
    if gap > 1:
        return f". Bytes alone do not explain it: {slow.name} runs at {format_share(slow.share)} of a copy's rate"
    if quick.share < 1 - CLOSE:
        return f". Memory is not all that counts: {quick.name} runs at {format_share(quick.share)} of a copy's rate"
    return f". Much is read while it is in a cache: {slow.name} runs at {format_share(slow.share)} of a copy's rate"
