"""What the driver refuses to load: kernels that want more shared memory than the device has."""

from __future__ import annotations

import pytest

from genesis.backend.cuda.driver import Driver, Properties
from genesis.errors import DeviceError


def test_a_kernel_that_takes_too_much_shared_memory_is_named() -> None:
    driver = object.__new__(Driver)  # without a GPU: the check comes before the first call
    driver.index = 0
    driver.properties = Properties("NVIDIA A100", (8, 0), 40 << 30, 108, 163 << 10, 40 << 20)
    with pytest.raises(
        DeviceError, match=r"kernel product takes 166913 bytes .* cuda:0 has 166912 for a block"
    ) as caught:
        driver.load(b"", "product", (163 << 10) + 1, 3)
    assert caught.value.exit_code == 6
    with pytest.raises(AttributeError):  # what fits goes on to the driver, which is not there
        driver.load(b"", "product", 163 << 10, 3)
