"""Asks the CUDA driver what it sees, and prints JSON. A process of its own: a broken driver may hang or crash."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
from typing import Any

# CUdevice_attribute numbers of the driver's public API.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def probe() -> dict[str, Any]:
    """Device nodes, version of the kernel driver, CUDA version of the driver library, its devices; else the problem."""
    found: dict[str, Any] = {"device_nodes": sorted(glob.glob("/dev/nvidia[0-9]*")), "devices": [], "problem": ""}
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as file:
        found["kernel_driver"] = file.readline(500).strip()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {**found, "problem": "the driver library libcuda.so.1 is not on this machine"}
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        found["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return {**found, "problem": f"the CUDA driver does not start: {_error_name(cuda, status)}"}
    found["devices"] = [_device(cuda, index) for index in range(count.value)]
    return found


def _device(cuda: Any, index: int) -> dict[str, Any]:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    shown = name.value.decode("utf-8", "replace")
    return {"name": shown, "memory_bytes": memory.value, "capability": f"{major.value}.{minor.value}"}


def _error_name(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value:
        return f"{text.value.decode('ascii', 'replace')} ({status})"
    return str(status)


if __name__ == "__main__":
    print(json.dumps(probe()))
