"""Shared memory of kernels that the driver loads: what it asks for, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from genesis.backend.cuda import driver as drivers
from genesis.backend.cuda.driver import Driver, Properties
from genesis.errors import DeviceError

MOST = 163 << 10  # of an A100's block


class Cuda:
    """Loads one kernel, whose code declares `static` bytes of shared memory; notes what its launches may have."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic"
    )

    def __init__(self, static: int) -> None:
        self.allowed = 0
        self.cuCtxSetCurrent = lambda context: (0,)
        self.cuModuleLoadData = lambda image: (0, "module")
        self.cuModuleGetFunction = lambda module, name: (0, "function")
        self.cuFuncGetAttribute = lambda attribute, function: (0, {"static": static}[attribute])
        self.cuFuncSetAttribute = self.allow
        self.cuFuncGetParamInfo = lambda function, i: (0, 8 * i, 8)

    def allow(self, function: str, attribute: str, value: int) -> tuple[int]:
        assert attribute == "dynamic"
        self.allowed = value
        return (0,)


def load(static: int, shared: int) -> Cuda:
    driver: Any = object.__new__(Driver)
    driver._cuda, driver._success, driver._context, driver.index = Cuda(static), 0, 1, 0
    driver._modules = {}
    driver.properties = Properties("NVIDIA A100", (8, 0), 40 << 30, 108, MOST, 40 << 20)
    try:
        assert driver.load(b"", "product", shared, 2).parameters == ((0, 8), (8, 8))
    finally:
        drivers._current.driver = None
    made: Cuda = driver._cuda
    return made


def test_more_shared_memory_than_a_launch_has_is_asked_for() -> None:
    """48 KiB in all: what the code declares counts, too."""
    assert [load(*of).allowed for of in ((0, 48 << 10), (8 << 10, 40 << 10))] == [0, 0]
    # More is the most that the device has: launches of the same function may take other amounts.
    assert [load(*of).allowed for of in ((0, 49 << 10), (44 << 10, 8 << 10))] == [MOST, MOST - (44 << 10)]


def test_a_kernel_that_takes_too_much_shared_memory_is_named() -> None:
    load(1 << 10, MOST - (1 << 10))
    with pytest.raises(DeviceError, match=r"product needs 166913 bytes .* cuda:0 has 166912") as caught:
        load(1 << 10, MOST + 1 - (1 << 10))
    assert caught.value.exit_code == 6
