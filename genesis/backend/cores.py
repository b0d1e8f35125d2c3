"""How many cores of the host a process may use."""

from __future__ import annotations

import os
from collections.abc import Callable


def usable_cores() -> int:
    """Those of the process's affinity, where the system has such a thing."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
