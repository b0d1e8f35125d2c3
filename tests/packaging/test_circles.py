"""The modules of the core form no circle, imports for type checkers and inside functions included.

import-linter holds the layers, which are packages as a whole; this looks at single modules.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

CORE = {
    "array", "autograd", "backend", "cuda", "custom", "dtypes", "errors", "files", "functions", "indexing", "kernels",
    "nn", "op", "ops", "optim", "random", "shapes", "tensor",
}  # fmt: skip


def prepare(imports: dict[str, set[str]]) -> None:
    """Raise CycleError, which names the modules, where some import each other in a circle."""
    TopologicalSorter(imports).prepare()


def test_the_core_has_no_circle() -> None:
    graph = grimp.build_graph("genesis", cache_dir=None)
    core = {module for module in graph.modules if module.partition("genesis.")[2].partition(".")[0] in CORE}
    assert "genesis.backend.cuda.dispatch" in core
    prepare({module: graph.find_modules_directly_imported_by(module) & core for module in core})


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        prepare({"a": {"b"}, "b": {"c"}, "c": {"a"}})
