"""The kernels that a call launches on a GPU, with the resources of each, and the stages of its dispatch on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from genesis.autograd.record import TensorBase
from genesis.backend import Device
from genesis.measure.cases import Case
from genesis.measure.limits import cuda_backend, has_gpu_time, wait_for
from genesis.measure.record import Column
from genesis.measure.timing import Plan, measure, of_wall

if TYPE_CHECKING:
    from genesis.backend.cuda.driver import Driver, KernelFacts, SMFacts
    from genesis.backend.cuda.launch import KernelLaunch

WARP = 32
REGISTERS_AT_ONCE = 256  # allocated to a warp: CUDA's programming guide, "Technical specifications", since 3.5
QUEUE = 100  # calls that may wait for the GPU: the host would wait for a full queue


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel. A program is a CUDA block."""

    threads: int  # of a program
    registers: int  # of a thread
    shared: int  # bytes of shared memory of a program
    local: int  # bytes of local memory of a thread: spilled registers, and arrays indexed at run time
    resident: int  # programs that an SM holds at once
    occupancy: float  # their threads, as a share of those that an SM can hold
    bound_by: str  # the resource that keeps one more program from an SM
    sm_count: int  # of the GPU
    waves: float  # the grid over the programs that all SMs hold at once; at most 1 for a persistent kernel
    idle: float  # share of slots, over all waves, that the last wave leaves empty


class Launch(NamedTuple):
    """A kernel, or memory that is set ("fill")."""

    kernel: str
    grid: tuple[int, ...]  # programs in three dimensions; empty for a fill
    resources: Resources | None = None  # None for a fill, and in Triton's interpreter

    @property
    def programs(self) -> int:
        """Programs of the whole grid."""
        return math.prod(self.grid)


class Row(NamedTuple):
    """A launch under the case and the pass that it belongs to."""

    case: str
    step: str
    launch: Launch


TAKEN = "launch.resources"
COLUMNS = (
    Column("case", "case", "text", "Op and shape."),
    Column("pass", "pass", "text", "forward or backward.", "step"),
    Column("kernel", "kernel", "text", "Name of the kernel; fill where memory is set.", "launch.kernel"),
    Column("grid", "grid", "text", "Programs in each dimension.", lambda row: "x".join(map(str, row.launch.grid))),
    Column("threads", "threads", "count", "Threads of a program.", f"{TAKEN}.threads"),
    Column("registers", "registers", "count", "Registers of a thread.", f"{TAKEN}.registers"),
    Column("shared", "shared", "bytes", "Shared memory of a program.", f"{TAKEN}.shared"),
    Column("local", "local", "bytes", "Local memory of a thread: spilled registers.", f"{TAKEN}.local"),
    Column("resident", "per SM", "count", "Programs that an SM holds at once.", f"{TAKEN}.resident"),
    Column("occupancy", "occupancy", "share", "Threads on an SM, of those it can hold.", f"{TAKEN}.occupancy"),
    Column("bound_by", "bound by", "text", "The resource that keeps one more program away.", f"{TAKEN}.bound_by"),
    Column("waves", "waves", "count", "The grid over the programs that all SMs hold.", f"{TAKEN}.waves"),
    Column("idle", "idle", "share", "Slots that the last wave leaves empty.", f"{TAKEN}.idle"),
)


def resources(
    kernel: KernelFacts, processor: SMFacts, sm_count: int, grid: Sequence[int], threads: int, dynamic: int
) -> Resources:
    """The resources of a launch, from the driver's figures.

    Args:
        grid: programs, in up to three dimensions.
        threads: of a program.
        dynamic: bytes of shared memory that the launch asks for.
    """
    slots = kernel.resident * sm_count
    waves = math.prod(grid) / slots if slots else 0.0
    warps = -(-threads // WARP)
    registers = -(-kernel.registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE * warps
    room = {
        "threads": processor.threads // (warps * WARP),
        "programs": processor.blocks,
        "registers": processor.registers // max(registers, 1),
        "shared memory": processor.shared // max(kernel.shared + dynamic + processor.reserved, 1),
    }
    return Resources(
        threads=threads,
        registers=kernel.registers,
        shared=kernel.shared + dynamic,
        local=kernel.local,
        resident=kernel.resident,
        occupancy=kernel.resident * threads / processor.threads,
        bound_by=min(room, key=lambda name: room[name]),
        sm_count=sm_count,
        waves=waves,
        idle=1 - waves / math.ceil(waves) if waves else 0.0,
    )


def resources_of(launched: KernelLaunch, driver: Driver) -> Resources | None:
    """The resources of a launch that ran; None for memory that is set, and where no machine code runs."""
    if launched.loaded is None:
        return None
    function, threads, shared = launched.loaded.function, launched.loaded.threads, launched.loaded.shared
    facts = driver.kernel_facts(function.handle, threads, shared)
    return resources(facts, driver.sm_facts(), driver.properties.sm_count, launched.grid, threads, shared)


def launches_of(call: Callable[[], object], device: Device) -> list[Launch]:
    """The kernels and fills that a call launches on a CUDA device, in order."""
    from genesis.backend.cuda.launch import watching_launches

    driver = cuda_backend(device).driver
    found: list[KernelLaunch] = []

    def watch(launched: KernelLaunch, stream: int) -> None:
        found.append(launched)
        launched.run(stream)

    with watching_launches(watch):
        call()
        driver.synchronize()  # launches may wait for their kernels' compilation
    return [Launch(each.name, tuple(each.grid), resources_of(each, driver)) for each in found]


def stages_of(case: Case, plan: Plan) -> dict[str, float]:
    """Host seconds of a call by stage, once its launches are recorded; empty without a GPU.

    Three stages are timed alone: `lookup` finds the recorded launches, `allocate` takes memory for the outputs and
    returns it, `wrap` makes tensors of them. Two are differences, missing where noise makes them negative: `entry`
    leads from tensors to the op on arrays, `launch` packs parameters and calls the driver.
    """
    from genesis.backend.cuda.dispatch import call_key

    backend, op, attrs = cuda_backend(case.device), case.op, dict(case.attrs)
    inputs, attrs = op.join(case.inputs, attrs) if op.join else (case.inputs, attrs)
    made = backend.replay(op, inputs, attrs) if has_gpu_time(case.device) and case.arrays else None
    if made is None:
        return {}
    limited = Plan(plan.precision, plan.seconds / 5, plan.warm_up, plan.sample, QUEUE, plan.clock)
    calls: dict[str, Callable[[], object]] = {
        "lookup": partial(call_key, op, inputs, attrs),
        "allocate": lambda: [backend.allocate(a.nbytes) for a in made],
        "wrap": lambda: [TensorBase.wrap(a) for a in made],
        "replay": partial(backend.replay, op, inputs, attrs),
        "whole": case.call,
    }
    host = {
        name: measure(of_wall(call, wait_for(case.device), of_host=True), limited).seconds
        for name, call in calls.items()
    }
    replay, whole = host.pop("replay"), host.pop("whole")
    host |= {"entry": whole - replay - host["wrap"], "launch": replay - host["lookup"] - host["allocate"]}
    return {name: seconds for name, seconds in host.items() if seconds >= 0}
