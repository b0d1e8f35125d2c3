"""Devices that are no GPU, behind the driver's contract: host memory with Triton's interpreter, and a fake.

Tests run every kernel in the interpreter. Nothing runs on the fake device: `genesis profile --show` compiles for it,
and memory plans are counted on it.
"""

from __future__ import annotations

from genesis.backend.cuda.driver import Driver

__all__ = ["drivers"]

drivers: dict[int, Driver] = {}  # of fake devices, by indices that no machine has
