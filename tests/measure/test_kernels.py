"""Occupancy and waves by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from genesis.backend.cuda.driver import KernelFacts, SMFacts
from genesis.backend.cuda.launch import KernelLaunch
from genesis.measure.kernels import Resources, resources, resources_of

HOPPER = SMFacts(threads=2048, registers=65536, blocks=32, shared=228 << 10, reserved=1 << 10)


def taken(
    registers: int = 32, resident: int = 8, programs: int = 1056, threads: int = 128, shared: int = 0
) -> Resources:
    return resources(KernelFacts(registers, 0, 0, resident), HOPPER, 132, (programs, 1, 1), threads, shared)


def test_occupancy_is_the_share_of_threads() -> None:
    assert taken(resident=8).occupancy == 0.5
    assert taken(resident=16).occupancy == 1.0
    assert taken(resident=2, threads=96).occupancy == pytest.approx(192 / 2048)


@pytest.mark.parametrize(
    ("programs", "waves", "idle"),
    [
        (1056, 1.0, 0.0),  # a persistent kernel: as many programs as fit at once
        (528, 0.5, 0.5),
        (1057, 1057 / 1056, 1 - 1057 / 2112),
        (3 * 1056, 3.0, 0.0),
        (2640, 2.5, 1 / 6),
    ],
)
def test_waves_fill_the_slots_of_all_processors(programs: int, waves: float, idle: float) -> None:
    found = taken(programs=programs)
    assert found.waves == pytest.approx(waves)
    assert found.idle == pytest.approx(idle)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "bound_by"),
    [
        (32, 1024, 0, "threads"),
        (16, 32, 0, "programs"),  # 64 warps fit, 32 programs do
        (128, 128, 0, "registers"),  # 4 programs of 128·128
        (168, 128, 100 << 10, "shared memory"),  # 2 of 101 KiB, 3 by registers
    ],
)
def test_what_keeps_one_more_program_out(registers: int, threads: int, shared: int, bound_by: str) -> None:
    assert taken(registers=registers, threads=threads, shared=shared).bound_by == bound_by


def test_registers_are_given_to_warps_256_at_once() -> None:
    # 33 registers count as 40: 65536 / (40·32·8) is 6 programs of 8 warps, while 8 would fit by threads.
    assert taken(registers=33, threads=256).bound_by == "registers"
    assert taken(registers=32, threads=256).bound_by == "threads"


def test_a_kernel_that_does_not_fit_has_no_waves() -> None:
    assert (taken(resident=0).waves, taken(resident=0).idle, taken(resident=0).occupancy) == (0.0, 0.0, 0.0)


class FakeDriver:
    """Knows one kernel."""

    properties = SimpleNamespace(sm_count=132)

    def kernel_facts(self, function: Any, threads: int, shared: int) -> KernelFacts:
        assert (function, threads, shared) == ("handle", 128, 2048)
        return KernelFacts(40, 16, 8, 4)

    def sm_facts(self) -> SMFacts:
        return HOPPER


def test_a_launch_asks_the_driver() -> None:
    launched = KernelLaunch(lambda made: None, lambda: True, "fold", (4, 33, 1))
    driver: Any = FakeDriver()
    assert resources_of(launched, driver) is None  # memory that is set, say
    launched.loaded = SimpleNamespace(function=SimpleNamespace(handle="handle"), threads=128, shared=2048)
    found = resources_of(launched, driver)
    assert found is not None
    assert (found.registers, found.shared, found.local, found.sm_count) == (40, 16 + 2048, 8, 132)
    assert (found.resident, found.waves) == (4, 0.25)
