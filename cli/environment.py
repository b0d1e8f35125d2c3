"""Facts about the machine and the installation that decide what Genesis can do here, without environment variables.

As a program it queries the CUDA driver and prints JSON: a broken driver may hang or crash, so it runs in its own
process. At its top it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PROBE_SECONDS = 20
MIN_CAPABILITY = (8,)  # in the form of `_numbers`
MIN_CUDA = "12.0"
# Extras for developers of Genesis.
_HIDDEN_EXTRAS = frozenset(("dev",))
_COMPILERS = ("cc", "gcc", "clang")  # Triton builds its launchers with one of them
_CUDA_PACKAGES = ("cuda-core", "cuda-python", "triton")
# CUdevice_attribute numbers of the driver's public API.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def facts() -> dict[str, Any]:
    """Return all facts as plain data: versions, processor, memory, packages, GPU, and what is missing for CUDA."""
    from genesis import __version__

    installed = packages()
    cuda = _probe_cuda()
    return {
        "genesis": __version__,
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "system": {"name": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "cpu": _cpu(),
        "memory": _memory(),
        "numpy_blas": _blas(),
        "packages": installed,
        "cuda": cuda,
        "missing_for_cuda": missing_for_cuda(cuda, installed, compiler=any(map(shutil.which, _COMPILERS))),
    }


def packages() -> list[dict[str, Any]]:
    """Return each required or optional package: name, extra, installed version or None, and the command to add it."""
    rows, required = [], list[str]()
    with contextlib.suppress(metadata.PackageNotFoundError):  # a source tree that is not installed
        required = metadata.requires("genesis-lm") or []
    for text in required:
        requirement, _, marker = text.partition(";")
        name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        linux_only = re.search(r"sys_platform\s*==\s*['\"]linux['\"]", marker) is not None
        elsewhere = linux_only and not sys.platform.startswith("linux")
        if name is None or elsewhere or (extra and extra[1] in _HIDDEN_EXTRAS) or name[0] == "genesis-lm":
            continue
        wanted, version = requirement.strip()[len(name[0]) :].strip(), None
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(name[0])
        least = re.search(r">=\s*([0-9.]+)", wanted)  # pip checks other conditions
        fits = version is not None and (least is None or _numbers(version) >= _numbers(least[1]))
        add = "" if fits else f"pip install --upgrade '{name[0]}{wanted}'"
        group = extra[1] if extra else ""
        rows.append({"name": name[0], "extra": group, "wanted": wanted, "version": version, "fits": fits, "add": add})
    return rows


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version without trailing zeros: 12.0 and 12 are equal."""
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _cpu() -> dict[str, Any]:
    from genesis.backend.host import usable_cores

    name = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    quota, _, period = _cgroup("cpu.max").partition(" ")
    limit = int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
    return {"name": name, "cores": os.cpu_count(), "usable_cores": usable_cores(), "quota_cores": limit}


def _cgroup(name: str) -> str:
    """Return the first line of a control-group file; an empty string if it does not exist."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    return ""


def _memory() -> dict[str, int | None]:
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            key, _, rest = line.partition(":")
            sizes[key] = int(rest.split()[0]) * 1024
    limit = _cgroup("memory.max")
    found = {"total_bytes": sizes.get("MemTotal"), "available_bytes": sizes.get("MemAvailable")}
    return {**found, "limit_bytes": int(limit) if limit.isdigit() else None}


def _blas() -> str:
    """Return the name and version of the BLAS that numpy was built with."""
    try:
        import numpy as np

        found: Any = np.show_config(mode="dicts")
        blas = found["Build Dependencies"]["blas"]
        return f"{blas.get('name', '?')} {blas.get('version', '')}".strip()
    except (ImportError, KeyError, TypeError):
        return "unknown"


def _probe_cuda() -> dict[str, Any]:
    if not sys.platform.startswith("linux"):
        return {"device_nodes": [], "devices": [], "problem": "CUDA is supported on Linux only"}
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    except subprocess.TimeoutExpired:
        problem = f"the CUDA driver did not answer within {PROBE_SECONDS} s"
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        problem = f"querying the CUDA driver failed: {type(error).__name__}"
    return {"device_nodes": [], "devices": [], "problem": problem}


def missing_for_cuda(cuda: dict[str, Any], installed: list[dict[str, Any]], *, compiler: bool) -> list[str]:
    """Return what this machine lacks for training on a GPU, one phrase each; empty if nothing is missing."""
    missing = []
    if cuda["problem"]:
        missing.append(f"a working NVIDIA driver: {cuda['problem']}")
    elif not cuda["devices"]:
        missing.append("a GPU: the driver sees none")
    version = _numbers(cuda.get("cuda", ""))
    if version and version < _numbers(MIN_CUDA):
        missing.append(f"a newer NVIDIA driver: this one supports CUDA {cuda['cuda']}, Genesis needs {MIN_CUDA}")
    if cuda["devices"] and all(_numbers(device["capability"]) < MIN_CAPABILITY for device in cuda["devices"]):
        seen = ", ".join(f"{device['name']} has {device['capability']}" for device in cuda["devices"])
        missing.append(f"a GPU of compute capability 8.0 or above: {seen}")
    missing += [
        f"{row['name']}: {row['add']}" for row in installed if row["name"] in _CUDA_PACKAGES and not row["fits"]
    ]
    if not compiler:
        missing.append("a C compiler for Triton (cc, gcc or clang)")
    return missing


def probe() -> dict[str, Any]:
    """Return device nodes, kernel driver version, CUDA version of the driver library, and devices, or the problem."""
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
        text, name = ctypes.c_char_p(), str(status)
        if cuda.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value:
            name = f"{text.value.decode('ascii', 'replace')} ({status})"
        return {**found, "problem": f"initializing the CUDA driver failed: {name}"}
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


if __name__ == "__main__":
    print(json.dumps(probe()))
