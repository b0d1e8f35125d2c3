"""What one call launches, as it is stored with its time: kernels, their grids, and the tiles of matmuls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from genesis.backend import Device, backend_for
from genesis.profile.dispatch import kernel_launches_of
from genesis.profile.resources import resources_of

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend
    from genesis.backend.cuda.driver import Driver
    from genesis.backend.cuda.launch import KernelLaunch

__all__ = ["kernels_of"]


def kernels_of(call: Callable[[], object], device: Device) -> list[dict[str, Any]]:
    """What a call launches on a CUDA device, in order. It is run once, and should have run before.

    Returns:
        for each launch its `name`, its `grid` of programs (empty where memory is set), and the device's `sm_count`;
        on a GPU how many programs are `resident` on an SM at once; of a kernel that multiplies matrices the
        `tile` of a program, [rows and columns of the result, steps along k at once], and whether tiles that fill no
        whole round are `split` along k.
    """
    driver = cast("CudaBackend", backend_for(device)).driver
    return [_kernel(launched, driver) for launched in kernel_launches_of(call, device)]


def _kernel(launched: KernelLaunch, driver: Driver) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": launched.name,
        "grid": list(launched.grid),
        "sm_count": driver.properties.sm_count,
    }
    taken, constants = resources_of(launched, driver), launched.constants
    if taken is not None:
        found["resident"] = taken.resident
    tile = constants.get("TILE") if "EPILOGUE" in constants else tuple(map(constants.get, ("BM", "BN", "BK")))
    if tile and None not in tile:
        rows, columns, depth = tile
        if constants.get("OUT_LAYOUT", ("",))[0] == "columns":  # the transposed GEMM
            rows, columns = columns, rows
        is_split = constants.get("SCHEDULE") == "split_k" or bool(constants.get("SPLIT"))
        found |= {"tile": [rows, columns, depth], "split": is_split}
    return found
