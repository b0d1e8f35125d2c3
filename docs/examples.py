"""The examples of the API reference: docs/examples.txt, an expression for each public name, and what it gives.

`python -m docs.generate` runs every expression again and writes the results; a test fails if one has changed.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import genesis
import genesis.nn.functional

FILE = Path(__file__).with_name("examples.txt")
# What the short names of the examples stand for: modules, and values, by the class whose methods they show.
ROOTS = {
    "F": "nn.functional",
    "nn": "nn",
    "optim": "optim",
    "data": "utils.data",
    "net": "nn.Module",
    "sgd": "optim.Optimizer",
}
SETUP = """\
x = genesis.tensor([[1.0, 2.0], [3.0, 4.0]])
v = genesis.tensor([3.0, 1.0, 2.0])
i = genesis.tensor([0, 2, 1])
b = genesis.tensor([True, False, True])
spd = genesis.tensor([[2.0, 1.0], [1.0, 3.0]])
net = nn.Linear(3, 2)
p = nn.Parameter(genesis.ones(2))
p.grad = genesis.ones(2)
sgd = optim.SGD([p], lr=0.1)
"""


def examples() -> dict[str, tuple[str, str]]:
    """Return an expression and its result by the name that it shows, such as nn.Linear or Tensor.view."""
    found: dict[str, tuple[str, str]] = {}
    for expression, result in _pairs(FILE.read_text()):
        for name in names_of(expression):
            found.setdefault(name, (expression, result))
    return found


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for block in text.split("\n>>> ")[1:]:
        expression, _, result = block.partition("\n")
        yield expression, result.split("\n\n")[0].strip("\n")


def names_of(expression: str) -> list[str]:
    """Return the public names that an expression shows, the outermost first."""
    return [
        path for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Attribute) and (path := _path(node))
    ]


def _path(node: ast.Attribute) -> str:
    owner = node.value
    if isinstance(owner, ast.Name):
        if owner.id == "genesis":
            return node.attr
        return f"{ROOTS.get(owner.id, 'Tensor')}.{node.attr}"
    if (
        isinstance(owner, ast.Attribute)
        and (parent := _path(owner))
        and not parent.startswith(("Tensor", "nn.Module."))
    ):
        return f"{parent}.{node.attr}"
    return f"Tensor.{node.attr}"


def result_of(expression: str, library: Any = genesis) -> Any:
    """Return the value of an expression."""
    space = {"genesis": library, "nn": library.nn, "optim": library.optim, "F": library.nn.functional, "np": np}
    if "data." in expression:
        space["data"] = library.utils.data
    library.manual_seed(0)
    exec(SETUP, space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return eval(expression, space)


def page() -> str:
    """Return the file with the results of this version."""
    lines: list[str] = []
    for line in FILE.read_text().splitlines():
        if line.startswith("#"):
            lines += ["", line] if lines else [line]
        elif line.startswith(">>> "):
            value = result_of(line[4:])
            lines += ["", line, *([] if value is None else repr(value).splitlines())]
    return "\n".join(lines) + "\n"
