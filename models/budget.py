"""Whether a model can be held at all: the bytes of its weights against the memory there is."""

from __future__ import annotations

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.backend.host_memory import host_memory
from genesis.dtypes import as_dtype
from genesis.errors import OutOfMemoryError


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


def _memory(device: Device) -> int | None:
    return host_memory() if device == CPU else cuda.mem_get_info(device)[1]


def _readable(size: int) -> str:
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB")):
        if size >= 1 << 10 * power:
            return f"{size / (1 << 10 * power):,.1f} {unit}"
    return f"{size / 2**20:.1f} MiB"
