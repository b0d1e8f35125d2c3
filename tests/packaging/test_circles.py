"""The modules of the framework form no circle, imports for type checkers and inside functions included.

import-linter holds the layers, which are packages as a whole; this looks at single modules.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def prepare(imports: dict[str, set[str]]) -> None:
    """Raise CycleError, which names the modules, where some import each other in a circle."""
    TopologicalSorter(imports).prepare()


def test_the_framework_has_no_circle() -> None:
    graph = grimp.build_graph("genesis", cache_dir=None)
    assert {"genesis.backend.cuda.dispatch", "genesis.train.state"} <= graph.modules
    prepare({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        prepare({"a": {"b"}, "b": {"c"}, "c": {"a"}})
