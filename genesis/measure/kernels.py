"""What a call launches on a GPU, what each kernel takes of it, and the stages of the call's dispatch on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from genesis.array import Array
from genesis.autograd.record import TensorBase, apply
from genesis.backend import Device, backend_for
from genesis.measure.cases import Case
from genesis.measure.limits import has_gpu_time, wait_for
from genesis.measure.record import Column
from genesis.measure.timing import Plan, measure, of_wall

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend
    from genesis.backend.cuda.driver import Driver, KernelFacts, SMFacts
    from genesis.backend.cuda.launch import KernelLaunch

WARP = 32
REGISTERS_AT_ONCE = 256  # are given to a warp: CUDA's programming guide, "Technical specifications", since 3.5
QUEUE = 100  # calls that may wait for the GPU at once: a full queue would make the host wait


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of the GPU. A program is what CUDA calls a block.

    Attributes:
        threads: of a program.
        registers: of a thread.
        shared: bytes of shared memory of a program.
        local: bytes of local memory of a thread: spilled registers, and arrays that are indexed at run time.
        resident: programs that an SM holds at once.
        occupancy: their threads, as a share of those that an SM can hold.
        bound_by: what keeps one more program from an SM.
        sm_count: of the GPU.
        waves: the grid over the programs that all SMs hold at once. A persistent kernel takes one wave or less.
        idle: the share of slots that stay empty because the last wave does not fill them, over all waves.
    """

    threads: int
    registers: int
    shared: int
    local: int
    resident: int
    occupancy: float
    bound_by: str
    sm_count: int
    waves: float
    idle: float


@dataclass(frozen=True)
class Launch:
    """A kernel, or memory that is set ("fill").

    Attributes:
        grid: programs in three dimensions; empty for a fill.
        resources: None for a fill, and where no machine code runs.
    """

    kernel: str
    grid: tuple[int, ...]
    resources: Resources | None = None

    @property
    def programs(self) -> int:
        """Of the grid."""
        return math.prod(self.grid)


def resources(
    kernel: KernelFacts, processor: SMFacts, sm_count: int, grid: Sequence[int], threads: int, dynamic: int
) -> Resources:
    """What a kernel takes, from the driver's figures.

    Args:
        grid: programs, in up to three dimensions.
        threads: of a program.
        dynamic: bytes of shared memory that its launch asks for.
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


def _resources_of(launched: KernelLaunch, driver: Driver) -> Resources | None:
    """What a launch that ran takes; None for memory that is set, and where no machine code runs."""
    if launched.loaded is None:
        return None
    function, threads, shared = launched.loaded.function, launched.loaded.threads, launched.loaded.shared
    facts = driver.kernel_facts(function.handle, threads, shared)
    return resources(facts, driver.sm_facts(), driver.properties.sm_count, launched.grid, threads, shared)


def launches_of(call: Callable[[], object], device: Device) -> list[Launch]:
    """The kernels and fills that a call launches on a CUDA device, in order."""
    driver = cast("CudaBackend", backend_for(device)).driver
    found = kernel_launches_of(call, device)
    return [Launch(each.name, tuple(each.grid), _resources_of(each, driver)) for each in found]


def kernel_launches_of(call: Callable[[], object], device: Device) -> list[KernelLaunch]:
    """What a call launches on a CUDA device, in order, as the backend has it."""
    from genesis.backend.cuda.launch import watching_launches

    driver = cast("CudaBackend", backend_for(device)).driver
    found: list[KernelLaunch] = []

    def watch(launched: KernelLaunch, stream: int) -> None:
        found.append(launched)
        launched.run(stream)

    with watching_launches(watch):
        call()
        driver.synchronize()  # launches may wait for their kernels' compilation
    return found


Of = Callable[[Resources], Any]


def _taken(of: Of) -> Callable[[tuple[str, str, Launch]], Any]:
    return lambda row: None if row[2].resources is None else of(row[2].resources)


# Rows are (case, pass, launch).
COLUMNS = (
    Column("case", "case", "text", "Op and shape.", lambda row: row[0]),
    Column("pass", "pass", "text", "forward or backward.", lambda row: row[1]),
    Column("kernel", "kernel", "text", "Name of the kernel; fill where memory is set.", lambda row: row[2].kernel),
    Column("grid", "grid", "text", "Programs in each dimension.", lambda row: "x".join(map(str, row[2].grid))),
    Column("threads", "threads", "count", "Threads of a program.", _taken(lambda r: r.threads)),
    Column("registers", "registers", "count", "Registers of a thread.", _taken(lambda r: r.registers)),
    Column("shared", "shared", "bytes", "Shared memory of a program.", _taken(lambda r: r.shared)),
    Column("local", "local", "bytes", "Local memory of a thread: spilled registers.", _taken(lambda r: r.local)),
    Column("resident", "per SM", "count", "Programs that an SM holds at once.", _taken(lambda r: r.resident)),
    Column("occupancy", "occupancy", "share", "Threads on an SM, of those it can hold.", _taken(lambda r: r.occupancy)),
    Column("bound_by", "bound by", "text", "What keeps one more program from an SM.", _taken(lambda r: r.bound_by)),
    Column("waves", "waves", "count", "The grid over the programs that all SMs hold.", _taken(lambda r: r.waves)),
    Column("idle", "idle", "share", "Slots that the last wave leaves empty.", _taken(lambda r: r.idle)),
)


# --- Dispatch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """Host seconds of a call on CUDA by stage. `lookup`, `allocate` and `wrap` are timed by themselves; `entry` and
    `launch` are differences of times, and None where noise makes them negative.

    Attributes:
        entry: from the call on tensors to the op on arrays.
        lookup: the key under which the call's launches were recorded.
        allocate: memory for the outputs, taken and given back.
        launch: addresses packed into parameters, and the driver's launches.
        wrap: tensors around the outputs.
    """

    entry: float | None
    lookup: float
    allocate: float
    launch: float | None
    wrap: float


def stages_of(case: Case, plan: Plan) -> Dispatch | None:
    """The stages of a call whose launches are recorded, as they are after its first run; None without a GPU."""
    from genesis.backend.cuda.dispatch import call_key

    backend, op = cast("CudaBackend", backend_for(case.device)), case.op
    inputs, attrs = op.join(case.inputs, dict(case.attrs)) if op.join else (case.inputs, dict(case.attrs))
    outputs = backend.replay(op, inputs, attrs) if has_gpu_time(case.device) and case.arrays else None
    if outputs is None:
        return None
    made, tensors = outputs, [TensorBase.wrap(x) if isinstance(x, Array) else x for x in case.inputs]
    limited = Plan(plan.precision, plan.seconds / 5, plan.warm_up, plan.sample, QUEUE, plan.clock)

    def seconds(call: Callable[[], object]) -> float:
        return measure(of_wall(call, wait_for(case.device), of_host=True), limited).seconds

    lookup = seconds(lambda: call_key(op, inputs, attrs))
    allocate = seconds(lambda: [backend.allocate(a.nbytes) for a in made])
    wrap = seconds(lambda: [TensorBase.wrap(a) for a in made])
    replay = seconds(lambda: backend.replay(op, inputs, attrs))
    whole = seconds(lambda: apply(op, *tensors, **case.attrs))
    entry, launch = whole - replay - wrap, replay - lookup - allocate
    return Dispatch(entry if entry >= 0 else None, lookup, allocate, launch if launch >= 0 else None, wrap)
