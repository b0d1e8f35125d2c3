"""What this host or container has for a process: cores, memory, and how much of it is free."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Files of a container's memory, of cgroups 2 and 1: limit, use, and the file cache in it that the kernel takes back.
CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
MEMINFO = "/proc/meminfo"


def usable_cores() -> int:
    """How many cores this process may use: those of its affinity, where the system has such a thing."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def host_memory() -> int | None:
    """Bytes of memory that this host or container has; None where it is not known."""
    found = [_number(Path(folder, limit)) for folder, limit, _, _ in CGROUPS]
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        pass
    return min((size for size in found if size is not None and size > 0), default=None)


def free_host_memory() -> int | None:
    """Bytes that this process may still take without swapping, the file cache included; None where it is not known."""
    found = []
    available = _field(Path(MEMINFO), "MemAvailable:")
    if available is not None:
        found.append(available << 10)
    for folder, limit, used, cached in CGROUPS:
        most, now = _number(Path(folder, limit)), _number(Path(folder, used))
        if most is not None and now is not None:
            found.append(most - now + (_field(Path(folder, "memory.stat"), cached) or 0))
    return max(0, min(found)) if found else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _field(path: Path, name: str) -> int | None:
    """The number in the line of a file that begins with `name`."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return next((int(row[1]) for row in rows if row and row[0] == name), None)
    except (OSError, ValueError, IndexError):
        return None
