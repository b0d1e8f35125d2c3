"""The host resources that a process may use: cores, memory, and free memory, within the limits of its container."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Memory files of a container under cgroups 2 and 1: limit, usage, and the reclaimable file cache within the usage.
CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
MEMINFO = "/proc/meminfo"


def usable_cores() -> int:
    """The number of cores that this process may use, within its CPU affinity where the system supports one."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def host_memory() -> int | None:
    """Bytes of memory of this host or container, or None if unknown."""
    limits = [_number(Path(folder, limit)) for folder, limit, _, _ in CGROUPS]
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        pass
    return min((size for size in limits if size is not None and size > 0), default=None)


def free_host_memory() -> int | None:
    """Bytes that this process can still allocate without swapping, file cache included, or None if unknown."""
    candidates = []
    available = _field(Path(MEMINFO), "MemAvailable:")
    if available is not None:
        candidates.append(available << 10)
    for folder, limit, used, cached in CGROUPS:
        most, now = _number(Path(folder, limit)), _number(Path(folder, used))
        if most is not None and now is not None:
            candidates.append(most - now + (_field(Path(folder, "memory.stat"), cached) or 0))
    return max(0, min(candidates)) if candidates else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # the file is missing or contains "max"
        return None


def _field(path: Path, name: str) -> int | None:
    """The number in the line of a file that starts with `name`, or None."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return next((int(row[1]) for row in rows if row and row[0] == name), None)
    except (OSError, ValueError, IndexError):
        return None
