"""Tools for training: `genesis.utils.data` loads batches."""

import importlib
from typing import Any

__all__ = ["data"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded at first use
        return importlib.import_module(f"genesis.utils.{name}")
    raise AttributeError(f"module 'genesis.utils' has no attribute {name!r}")
