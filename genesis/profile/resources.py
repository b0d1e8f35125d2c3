"""What a launched kernel takes of the GPU: registers and shared memory, how many programs fit at once, and in how many
waves its grid runs. Arithmetic on the driver's figures; nothing is launched.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from genesis.profile.schema import Launch, Resources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genesis.backend.cuda.driver import Driver, KernelFacts, SMFacts
    from genesis.backend.cuda.launch import KernelLaunch

WARP = 32
LOST = 0.2  # a share of all slots that is worth a word
REGISTERS_AT_ONCE = 256  # are given to a warp: CUDA's programming guide, "Technical specifications", since 3.5


def resources_of(launched: KernelLaunch, driver: Driver) -> Resources | None:
    """What a launch that ran takes; None for memory that is set, and where no machine code runs."""
    if launched.loaded is None:
        return None
    function, threads, shared = launched.loaded.function, launched.loaded.threads, launched.loaded.shared
    facts = driver.kernel_facts(function.handle, threads, shared)
    return resources(facts, driver.sm_facts(), driver.properties.sm_count, launched.grid, threads, shared)


def resources(
    kernel: KernelFacts, processor: SMFacts, sm_count: int, grid: Sequence[int], threads: int, dynamic: int
) -> Resources:
    """The same from figures.

    Args:
        grid: programs, in up to three dimensions.
        threads: of a program.
        dynamic: bytes of shared memory that its launch asks for.
    """
    slots = kernel.resident * sm_count
    waves = math.prod(grid) / slots if slots else 0.0
    return Resources(
        threads=threads,
        warps=-(-threads // WARP),
        registers=kernel.registers,
        shared_static=kernel.shared,
        shared_dynamic=dynamic,
        local=kernel.local,
        resident=kernel.resident,
        occupancy=kernel.resident * threads / processor.threads,
        bound_by=_bound(kernel, processor, threads, dynamic),
        slots=slots,
        waves=waves,
        idle=1 - waves / math.ceil(waves) if waves else 0.0,
    )


Bound = Literal["threads", "programs", "registers", "shared memory"]


def _bound(kernel: KernelFacts, processor: SMFacts, threads: int, dynamic: int) -> Bound:
    """What keeps one more program from an SM."""
    warps = -(-threads // WARP)
    registers = -(-kernel.registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE * warps
    room: dict[Bound, int] = {
        "threads": processor.threads // (warps * WARP),
        "programs": processor.blocks,
        "registers": processor.registers // max(registers, 1),
        "shared memory": processor.shared // max(kernel.shared + dynamic + processor.reserved, 1),
    }
    return min(room, key=lambda name: room[name])


def hint_of(launches: Sequence[Launch]) -> str:
    """What the kernels' resources say to someone who wants a call faster; empty where they say nothing.

    Few programs count where no kernel of the call has enough: next to larger ones they belong to a helper.
    """
    most = max((math.prod(launch.grid) for launch in launches), default=0)
    for launch in launches:
        taken = launch.resources
        if taken is None:
            continue
        programs, sm_count = math.prod(launch.grid), taken.slots // max(taken.resident, 1)
        if taken.local:
            return f"{launch.kernel} spills {taken.local} bytes a thread: hold fewer values at once, or use more warps"
        if programs == most < sm_count:
            count = f"{programs} program{'s' * (programs != 1)}"
            return f"{launch.kernel} has {count} for {sm_count} SMs: split its work further"
        if taken.waves > 1 and taken.idle > LOST:
            return (
                f"the last wave of {launch.kernel} leaves {taken.idle:.0%} of all slots empty:"
                " choose tiles with which the grid fills them"
            )
    return ""
