"""Whether a model can be held at all: the bytes of its weights against the memory there is."""

from __future__ import annotations

import os
from pathlib import Path

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.dtypes import as_dtype
from genesis.errors import OutOfMemoryError

__all__ = ["check_fits", "host_memory"]

# Files with a container's limit, of cgroups 2 and 1.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_fits(count: int, dtype: str, device: Device, *, where: str) -> None:
    """Raises: OutOfMemoryError, where `count` weights alone need more than all memory of `device`."""
    needed, total = count * as_dtype(dtype).itemsize, _memory(device)
    if total is not None and needed > total:
        raise OutOfMemoryError(
            f"the model of this config has {count:,} parameters, {_readable(needed)} in {dtype}, and"
            f" {'this host' if device == CPU else device} has {_readable(total)} of memory",
            where=where,
            next="check hidden_size, intermediate_size, num_hidden_layers and vocab_size, or take a smaller model",
        )


def host_memory() -> int | None:
    """Bytes of memory that this host or container has; None where it is not known."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        pass
    for path in LIMITS:
        try:
            found.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min((size for size in found if size > 0), default=None)


def _memory(device: Device) -> int | None:
    return host_memory() if device == CPU else cuda.mem_get_info(device)[1]


def _readable(size: int) -> str:
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB")):
        if size >= 1 << 10 * power:
            return f"{size / (1 << 10 * power):,.1f} {unit}"
    return f"{size / 2**20:.1f} MiB"
