"""Sample rows of all op families: every module of this folder defines `ROWS`, and this package collects them."""

from __future__ import annotations

import importlib
import pkgutil

from tests.ops.sampling import Rows

__all__ = ["all_rows"]


def all_rows() -> list[Rows]:
    """The rows of all modules in this folder, in order of module name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return [row for name in names for row in importlib.import_module(f"{__name__}.{name}").ROWS]
