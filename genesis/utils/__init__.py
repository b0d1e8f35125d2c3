"""Tools for training: `genesis.utils.data` loads batches, `genesis.utils.checkpoint` saves memory."""

import importlib
from typing import Any

__all__ = ["checkpoint", "data"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded at first use
        return importlib.import_module(f"genesis.utils.{name}")
    raise AttributeError(f"module 'genesis.utils' has no attribute {name!r}")
