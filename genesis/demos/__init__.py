"""Demos: one idea about speed or memory each, as code to read and a table of what it costs on this machine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genesis.demos.comparing import Setting
    from genesis.demos.schema import Section

__all__ = ["DEMOS", "sections_of"]

# By name, what a demo shows; its module has the same name.
DEMOS = {
    "fusion": "GELU by hand, fused, in CUDA C++ and in Triton; softmax in five passes and in one",
    "batched": "one product of many matrices against a loop over them",
    "memory": "results in new memory, in place, and in memory of your own",
    "access": "memory read in a row, with gaps, across, and in random order",
}


def sections_of(name: str, setting: Setting) -> Iterator[Section]:
    """Run the demo called `name`; a section for each of its tables."""
    found: Iterator[Section] = importlib.import_module(f"genesis.demos.{name}").sections(setting)
    return found
