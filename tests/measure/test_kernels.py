"""Occupancy and waves by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from genesis.backend.cuda.driver import KernelFacts, SMFacts
from genesis.backend.cuda.launch import KernelLaunch
from genesis.measure.kernels import Resources, resources_of

HOPPER = SMFacts(threads=2048, registers=65536, blocks=32, shared=228 << 10, reserved=1 << 10)


def taken(resident: int = 8, programs: int = 1056, threads: int = 128) -> Resources:
    """The resources of a launch on a GPU with 132 SMs, which hold `resident` programs each."""
    driver: Any = SimpleNamespace(
        properties=SimpleNamespace(sm_count=132),
        kernel_facts=lambda function, threads, shared: KernelFacts(40, 16, 8, resident),
        sm_facts=lambda: HOPPER,
    )
    launched = KernelLaunch(lambda made: None, lambda: True, "fold", (programs, 1, 1))
    assert resources_of(launched, driver) is None  # memory that is set, say
    launched.loaded = SimpleNamespace(function=SimpleNamespace(handle="handle"), threads=threads, shared=2048)
    found = resources_of(launched, driver)
    assert found is not None
    assert (found.registers, found.shared, found.local, found.sm_count) == (40, 16 + 2048, 8, 132)
    return found


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


def test_a_kernel_that_does_not_fit_has_no_waves() -> None:
    assert (taken(resident=0).waves, taken(resident=0).idle, taken(resident=0).occupancy) == (0.0, 0.0, 0.0)
