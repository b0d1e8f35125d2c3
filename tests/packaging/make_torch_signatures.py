"""Write torch_signatures.json: the parameters of torch's public functions, methods and classes, without their types.

    .venv-peers/bin/python -m tests.packaging.make_torch_signatures

Python functions are inspected. Functions written in C++ are read from torch's own type stubs, and those of torch.linalg
from the first line of their documentation. Forms that torch deprecates or that take named dimensions are left out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch

TARGET = Path(__file__).with_name("torch_signatures.json")
MODULES = """
Tensor nn nn.functional nn.init nn.utils nn.utils.rnn nn.utils.parametrize nn.utils.parametrizations nn.Module
linalg optim optim.Optimizer optim.lr_scheduler optim.swa_utils autograd autograd.graph func amp cuda cuda.nvtx
cuda.amp random utils.data utils.checkpoint distributions distributed Generator cuda.CUDAGraph cuda.Stream
cuda.Event distributions.Distribution testing special
"""


def stub_signatures(file: str, class_name: str = "") -> dict[str, list[str]]:
    """Return the signatures of the functions of a stub file, or of the methods of one of its classes."""
    tree = ast.parse((Path(torch.__file__).parent / "_C" / file).read_text(encoding="utf-8"))
    body: list[Any] = tree.body
    if class_name:
        body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    found: dict[str, list[str]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and not _is_left_out(node, bool(class_name)):
            node.args.args = [a for a in node.args.args if not (class_name and a.arg == "self")]
            text = _plain(node.args)
            if text not in found.setdefault(node.name, []):
                found[node.name].append(text)
    return found


def _is_left_out(node: ast.FunctionDef, is_method: bool) -> bool:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    types = " ".join(ast.unparse(a.annotation) for a in node.args.args if a.annotation)
    is_old = ("self" in names and not is_method) or names[0:1] in (["alpha"], ["beta"])
    return is_old or "beta" in names or bool(re.search(r"EllipsisType|DimnameList", types)) or "out_dtype" in names


def _plain(arguments: ast.arguments) -> str:
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    for each in (arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(arguments)


def inspected(value: Any) -> list[str]:
    """Return the signature of a Python function, or of a class's constructor; empty if it has none."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    parameters = [p.replace(annotation=p.empty, default=Shown(p.default)) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))[1:-1]
    return [re.sub(r"(^|, )/(, |$)", r"\1", text).strip(", ")] if "<" not in text else []


class Shown:
    """A default that prints as code."""

    def __new__(cls, value: Any) -> Any:
        if value is inspect.Parameter.empty or isinstance(value, (int, float, str, bool, type(None), tuple, list)):
            return value
        shown = object.__new__(cls)
        shown.text = getattr(value, "__name__", str(value))
        return shown

    def __repr__(self) -> str:
        return self.text if re.fullmatch(r"[\w.]+", self.text) else "..."


def documented(value: Any) -> list[str]:
    """Return the signature that begins a function's documentation."""
    found = re.match(r"\s*(?:[\w.]+)\((.*?)\)\s*->", str(value.__doc__ or ""), re.S)
    text = re.sub(r"\s+", " ", found.group(1)).replace("\\*", "*") if found else ""
    try:
        return [_plain(ast.parse(f"def f({text}): ...").body[0].args)] if text else []  # type: ignore[attr-defined]
    except SyntaxError:
        return []


def signatures() -> dict[str, dict[str, list[str]]]:
    """Return all signatures, by module and name."""
    functions, neural = stub_signatures("_VariableFunctions.pyi"), stub_signatures("_nn.pyi")
    methods = stub_signatures("__init__.pyi", "TensorBase")
    result: dict[str, dict[str, list[str]]] = {}
    for path in ("torch", *(f"torch.{name}" for name in MODULES.split())):
        try:
            owner = importlib.import_module(path)
        except ModuleNotFoundError:
            parent, _, name = path.rpartition(".")
            owner = getattr(importlib.import_module(parent), name)
        is_class = isinstance(owner, type)
        table = result.setdefault(path, {})
        for name in sorted(getattr(owner, "__all__", None) or dir(owner)):
            value = getattr(owner, name, None)
            if name[0] == "_" or not callable(value) or inspect.ismodule(value):
                continue
            stubs = {"torch": functions, "torch.Tensor": methods, "torch.nn.functional": neural}.get(path, {})
            of_python = inspected(value)
            if (
                is_class
                and of_python
                and not isinstance(inspect.getattr_static(owner, name), (staticmethod, classmethod))
            ):
                of_python = [re.sub(r"^self(, )?", "", text) for text in of_python]
            found = of_python or stubs.get(name) or documented(value)
            if found and found != ["*args, **kwargs"]:
                table[name] = found
    return result


def main() -> None:
    """Write the table."""
    table = signatures()
    lines = [
        f"{json.dumps(path)}: {{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(s)}" for n, s in names.items()) + "\n}"
        for path, names in table.items()
    ]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print({path: len(names) for path, names in table.items()})


if __name__ == "__main__":
    main()
