"""The optimizers, a file each: its rule, its settings and their defaults. A file that is put here is found.

`genesis.optim` exports the classes, training runs choose them by their names in small letters, and their states are
counted in the memory of a run.
"""

from __future__ import annotations

import importlib
import pkgutil

from genesis.ops.optimizers import steps_of
from genesis.ops.rule import RULES
from genesis.optim.optimizer import Optimizer

__all__ = ["OPTIMIZERS"]


def _found() -> dict[str, type[Optimizer]]:
    """The optimizers in the modules of this package, by the names that configurations have for them."""
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    classes = [
        c for module in modules for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__
    ]
    return {c.__name__.lower(): c for c in classes if isinstance(c, type) and issubclass(c, Optimizer)}


OPTIMIZERS = _found()
for each in RULES.values():
    steps_of(each)  # which registers its ops
