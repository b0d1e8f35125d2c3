"""The optimizers, one file each: its rule, its settings and their defaults. New files are discovered automatically.

`genesis.optim` exports the classes, training runs select them by their lower-case names, and memory plans count their
states.
"""

from __future__ import annotations

import importlib
import pkgutil

from genesis.ops.optimizers import steps_of
from genesis.ops.rule import RULES
from genesis.optim.optimizer import Optimizer

__all__ = ["OPTIMIZERS"]


def _discover() -> dict[str, type[Optimizer]]:
    """Return the optimizers in the modules of this package, by their names in configurations."""
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    classes = [
        c for module in modules for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__
    ]
    return {
        c.__name__.lower(): c
        for c in classes
        if isinstance(c, type) and issubclass(c, Optimizer) and "__init__" in vars(c)
    }


OPTIMIZERS = _discover()
for each in RULES.values():
    steps_of(each)  # registers the ops of the rule
