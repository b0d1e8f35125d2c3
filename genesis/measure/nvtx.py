"""Ranges of NVIDIA's profilers (NVTX), through the library that comes with CUDA or with a package; no dependency."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genesis.errors import DeviceError

NAMES = ("nvToolsExt", "nvtx3interop")


class Nvtx:
    """Ranges that Nsight Systems and Nsight Compute show.

    Raises:
        DeviceError: the library is not there.
    """

    def __init__(self) -> None:
        self._library = _loaded()
        self._library.nvtxRangePushA.argtypes = [ctypes.c_char_p]

    def push(self, name: str) -> None:
        """A range begins."""
        self._library.nvtxRangePushA(name.encode())

    def pop(self) -> None:
        """The innermost range of this thread ends."""
        self._library.nvtxRangePop()


def _loaded() -> Any:
    """The first library found that has the two functions."""
    for path in _places():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(library, "nvtxRangePushA") and hasattr(library, "nvtxRangePop"):
            return library
    raise DeviceError(
        f"NVTX ranges were asked for, and neither lib{NAMES[0]} nor lib{NAMES[1]} was found",
        where="--nvtx",
        next="pip install nvidia-nvtx-cu12, or put the folder of CUDA's libraries into LD_LIBRARY_PATH",
    )


def _places() -> Iterator[str]:
    """Where the library may be: known to the linker, or in the package nvidia-nvtx."""
    for name in NAMES:
        yield from filter(None, (ctypes.util.find_library(name), f"lib{name}.so.1", f"lib{name}.so"))
    try:
        package = importlib.util.find_spec("nvidia.nvtx")
    except ModuleNotFoundError:
        return
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        yield from (str(path) for name in NAMES for path in sorted(Path(folder).glob(f"lib/lib{name}*.so*")))
