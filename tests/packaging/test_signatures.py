"""Every public name that torch has, too, takes torch's arguments: names, order and defaults."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genesis
from genesis.functions import surface
from tests.packaging.tree import REPOSITORY

TABLE: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("torch_signatures.json").read_text())

# Parameters that Genesis leaves out of every function.
LEFT_OUT = {
    "out_dtype": "CUDA only, in torch",
    "_stacklevel": "private",
    "size_average": "deprecated by torch for reduction",
    "reduce": "deprecated by torch for reduction",
    "names": "dimensions have no names",
}
# Names whose signature differs, by the reason.
_DIFFERENT = {
    "one parameter takes what two forms of torch's take": (
        "max min randint randint_like repeat_interleave std std_mean tensor_split var var_mean Tensor.max Tensor.min"
        " Tensor.random_ Tensor.std Tensor.tensor_split Tensor.var"
    ),
    "torch itself refuses the argument in this place": (
        "as_tensor rsub subtract tensor nn.functional.scaled_dot_product_attention Tensor.new_tensor"
        " Tensor.requires_grad_ Tensor.subtract Tensor.subtract_ set_num_interop_threads set_num_threads"
    ),
    "torch itself needs steps": "linspace logspace",
    "None stands for torch's default": "arange cumulative_trapezoid trapezoid trapz",
    "torch lists the form with padding as a text; 0 is the default of both": "conv1d",
    "the function of nn.functional": "group_norm layer_norm rrelu rrelu_ threshold",
    "out= and what follows it are keywords": "norm tensordot",
    "nothing is pickled": "load save",
    "takes no function: decorate with enable_grad()": "enable_grad autograd.enable_grad",
    "complex results have no out=": "complex polar",
    "one copy of the state": "nn.Module.state_dict",
    "Genesis raises it, programs catch it": "cuda.CudaError",
    "the ranks of a group do not change": "distributed.init_process_group",
    "torch lists no parameter": "cuda.CUDAGraph.register_generator_state",
    "checks and notes of torch's compiler": (
        "compile cuda.graph cuda.make_graphed_callables cuda.memory_snapshot cuda.CUDAGraph.capture_begin"
    ),
}
DIFFERENT = {name: reason for reason, names in _DIFFERENT.items() for name in names.split()}


def owner_of(path: str) -> Any:
    """Return Genesis' module or class under torch's path; None if there is none."""
    owner: Any = genesis
    for part in path.split(".")[1:]:
        try:
            owner = getattr(owner, part)
        except AttributeError:
            try:
                owner = importlib.import_module(f"{owner.__name__}.{part}")
            except (ImportError, AttributeError):
                return None
    return owner


def parameters(text: str) -> list[tuple[str, Any, str]]:
    """Return names, kinds and defaults (as code; empty if there is none) of a stored signature."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = ["", *[""] * (len(plain) - len(arguments.defaults) - 1)][: len(plain) - len(arguments.defaults)]
    defaults += [ast.unparse(d) for d in arguments.defaults]
    kind = inspect.Parameter
    found = [(a.arg, kind.POSITIONAL_OR_KEYWORD, d) for a, d in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        found.append((arguments.vararg.arg, kind.VAR_POSITIONAL, ""))
    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((a.arg, kind.KEYWORD_ONLY, "" if d is None else ast.unparse(d)))
    return found


def own_name(name: str, function: Callable[..., Any], own: dict[str, inspect.Parameter]) -> str | None:
    """Return the parameter that a keyword of torch reaches."""
    more = getattr(function, "keywords", None) or {}
    return next((n for n in (name, more.get(name, name), *surface._NAMES.get(name, ())) if n in own), None)


def same_default(stored: str, found: Any) -> bool:
    """Whether a default equals torch's; names of constants and functions are not compared."""
    if stored == "...":
        return True
    try:
        expected = ast.literal_eval(stored)
    except ValueError:
        expected = {"math.inf": math.inf, "inf": math.inf}.get(stored, found)
    if found is inspect.Parameter.empty:
        return False
    if isinstance(expected, list):
        expected = tuple(expected)
    if expected == () and found is None:  # all dimensions
        return True
    return bool(expected == (tuple(found) if isinstance(found, list) else found)) or str(found) == str(expected)


def faults(stored: str, function: Callable[..., Any], bound: bool) -> list[str]:
    """Return how a function differs from one stored signature; a bound one is a method, whose first one is self."""
    own = dict(inspect.signature(function).parameters)
    if bound:
        own.pop(next(iter(own), ""), None)
    kinds = inspect.Parameter
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in own.values())
    order = [n for n, p in own.items() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    various = any(p.kind is kinds.VAR_POSITIONAL for p in own.values())
    found, reached = [], set()
    for i, (name, kind, default) in enumerate(parameters(stored)):
        if name in LEFT_OUT:
            continue
        if kind is kinds.VAR_POSITIONAL:
            if not various:
                found.append(f"*{name} is missing")
            continue
        mine = own_name(name, function, own)
        if mine is None:
            if not takes_any and not (various and kind is not kinds.KEYWORD_ONLY):
                found.append(f"{name} is missing")
            continue
        reached.add(mine)
        if kind is kinds.POSITIONAL_OR_KEYWORD and order[i : i + 1] != [mine] and not (various and i >= len(order)):
            found.append(f"{name} is not number {i + 1}")
        if default and own[mine].kind is not kinds.VAR_POSITIONAL and not same_default(default, own[mine].default):
            found.append(f"{name} is {own[mine].default!r} by default, torch has {default}")
    return found


def differences(path: str, owner: Any) -> dict[str, list[str]]:
    """Return the names of a module or class whose signature differs from torch's, with how."""
    found = {}
    for name, forms in TABLE[path].items():
        try:
            value = getattr(owner, name)
            inspect.signature(value)
        except (AttributeError, TypeError, ValueError):
            continue
        bound = isinstance(owner, type) and not isinstance(
            inspect.getattr_static(owner, name), (staticmethod, classmethod)
        )
        wrong = [f"({form}): {fault}" for form in forms for fault in faults(form, value, bound)]
        if wrong:
            found[f"{path}.{name}".removeprefix("torch.")] = wrong
    return found


@pytest.mark.parametrize("path", TABLE)
def test_signatures_are_those_of_torch(path: str) -> None:
    owner = owner_of(path)
    if owner is None:
        pytest.skip("Genesis does not have it")
    found = differences(path, owner)
    assert not {name: wrong for name, wrong in found.items() if name not in DIFFERENT}


def test_every_listed_difference_exists() -> None:
    found = {name for path in TABLE if (owner := owner_of(path)) is not None for name in differences(path, owner)}
    assert found >= DIFFERENT.keys()


def test_the_page_lists_every_difference_that_conformance_allows() -> None:
    tree = ast.parse((REPOSITORY / "tests" / "peers" / "known.py").read_text())
    table = next(n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "DIFFERENT")
    allowed = [ast.literal_eval(key) for key in table.value.keys]  # type: ignore[attr-defined]
    page = (REPOSITORY / "docs" / "genesis-or-pytorch.md").read_text()
    assert 1 <= len(allowed) <= 25
    assert [name for name in allowed if f"\n| {name} |" not in page] == []


def test_the_table_of_torchs_databases_has_nothing_wrong() -> None:
    rows = [line.split("\t") for line in (REPOSITORY / "docs" / "conformance.tsv").read_text().splitlines()[2:]]
    entries = {status: {entry for entry, _, found, _ in rows if found == status} for _, _, status, _ in rows}
    assert entries.keys() <= {"ok", "differs", "excluded", "absent"}
    assert len(entries["absent"]) <= 40 and len(entries["ok"]) >= 550


@pytest.mark.parametrize(
    ("stored", "wrong"),
    [
        ("a, b=2, *, c=None", []),
        ("b, a", ["b is not number 1", "a is not number 2"]),
        ("a, b=3", ["b is 2 by default, torch has 3"]),
        ("a, d", ["d is missing"]),
        ("a, c", ["c is not number 2"]),
        ("*a", ["*a is missing"]),
    ],
)
def test_differences_are_noticed(stored: str, wrong: list[str]) -> None:
    def function(a: int, b: int = 2, *, c: None = None) -> None: ...

    assert faults(stored, function, False) == wrong
