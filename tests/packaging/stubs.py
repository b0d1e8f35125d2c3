"""The stubs of modules whose names are made at import; `make stubs` runs `python -m tests.packaging.stubs`.

They are generated from `genesis.functions.surface`, the op records and the optimizers that are found. Editors and mypy
read them instead of the modules; nothing reads them when a program runs.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import genesis
from genesis import nn, optim
from genesis.functions import methods as methods_module
from genesis.functions.surface import functional, functions, methods
from genesis.nn.applied import applied
from tests.packaging.tree import REPOSITORY

HEADER = '''"""{about}

Made by `make stubs`: do not edit.
"""

'''
IMPORTS = {
    "builtins": "import builtins",
    "Sequence": "from collections.abc import Sequence",
    "Any": "from typing import Any",
    "Self": "from typing import Self",
    "np": "import numpy as np",
    "DType": "from genesis.dtypes import DType",
    "Layout": "from genesis.dtypes import Layout",
    "MemoryFormat": "from genesis.dtypes import MemoryFormat",
    "Generator": "from genesis.random import Generator",
    "IndexPlan": "from genesis.functions.index import IndexPlan",
    "LowRankPairs": "from genesis.functions.linalg import LowRankPairs",
    "Tensor": "from genesis.tensor import Tensor",
    "MinAndMax": "from genesis.functions.statistics import MinAndMax",
    "types": "from genesis.functions.surface import DeviceLike, Dims, DTypeLike, Sizes",
    "ValuesAndIndices": "from genesis.functions.reduce import ValuesAndIndices",
}
SHADOWED = ("float", "int", "bool")  # which `genesis` has as element types
COMPARISONS = ("__eq__", "__ne__")


def _annotation(text: Any) -> str:
    """An annotation as a stub has it."""
    if not isinstance(text, str):
        text = "None" if text is None else "Any" if text is inspect.Parameter.empty else text.__name__
    words = text.replace("builtins.", "").replace("Distance |", "Any |").replace("OldReduction", "bool | None")
    return _replaced(words, "Operand", "Tensor | float")


def _replaced(text: str, word: str, by: str) -> str:
    return re.sub(rf"\b{word}\b", by, text)


def _qualified(text: str) -> str:
    """A signature with Python's own types, where `genesis` has element types of their names."""
    for name in SHADOWED:
        text = _replaced(text, name, f"builtins.{name}")
    return text


def _default(value: Any) -> str:
    return repr(value) if value is None or type(value) in (bool, int, float, str, tuple) else "..."


def signature(function: Callable[..., Any], *, is_method: bool = False) -> str:
    """Parameters and result of a public function, under the names that torch has for its operands."""
    spelled = {"x": "input", "y": "other"} | {own: name for name, own in getattr(function, "keywords", {}).items()}
    found = inspect.signature(function)
    shown, is_after_star = ["self"] if is_method else [], False
    for i, parameter in enumerate(found.parameters.values()):
        if is_method and i == 0:
            continue
        kind = parameter.kind
        if kind is inspect.Parameter.KEYWORD_ONLY and not is_after_star:
            shown.append("*")
        is_after_star = is_after_star or kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        name = spelled[parameter.name] if parameter.name in ("x", "y") else parameter.name
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(kind, "")
        default = "" if parameter.default is inspect.Parameter.empty else f" = {_default(parameter.default)}"
        shown.append(f"{stars}{name}: {_annotation(parameter.annotation)}{default}")
    return f"({', '.join(shown)}) -> {_annotation(found.return_annotation)}"


def _summary(documented: Any) -> str:
    """The first paragraph of a docstring, in lines that fit below a method."""
    paragraph = inspect.cleandoc(documented.__doc__ or "").partition("\n\n")[0]
    return "\n".join(textwrap.wrap(paragraph, 105))


def _function(name: str, function: Callable[..., Any], head: str) -> str:
    return f"def {name}{head}:\n" + _indented(f'"""{_summary(function)}"""')


def _method(name: str, function: Callable[..., Any]) -> str:
    head = signature(function, is_method=True)
    return _indented(_function(name, function, head.replace("-> Tensor", "-> Self") if name[-1] == "_" else head))


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ") + ("" if text.endswith("\n") else "\n")


def _imported(name: str, value: Any, module: ModuleType) -> str:
    """The line that exports a name which is defined elsewhere."""
    if isinstance(value, genesis.DType):
        return f"{name}: DType\n"
    if isinstance(value, (genesis.Layout, genesis.Generator, float, type(None))):
        return f"{name}: {_qualified('None' if value is None else type(value).__name__)}\n"
    if isinstance(value, ModuleType):
        return f"from {module.__name__} import {name} as {name}\n"
    return f"from {value.__module__} import {value.__name__} as {name}\n"


def _begun(module: ModuleType, others: Iterable[str] = ()) -> str:
    """The start of a module's stub: imports, those of the `others` that it exports too, and `__all__`."""
    lines = [_imported(name, getattr(module, name), module) for name in others]
    imports = [line for line in lines if line.startswith("from")]
    imports += [line + "\n" for name, line in IMPORTS.items() if name not in others]
    declared = [line for line in lines if not line.startswith("from")]
    exported = getattr(module, "__all__", None)
    names = "" if exported is None else "__all__ = [" + "".join(f'"{name}", ' for name in exported) + "]\n"
    return f"{HEADER.format(about=_summary(module))}{''.join(imports)}\n{names}{''.join(declared)}"


def package_stub() -> str:
    """`genesis/__init__.pyi`."""
    text = _begun(genesis, [name for name in genesis.__all__ if name not in functions]) + "__version__: str\n"
    return text + "".join(_function(name, f, _qualified(signature(f))) for name, f in sorted(functions.items()))


def functional_stub() -> str:
    """`genesis/nn/functional.pyi`."""
    return _begun(nn.functional) + "".join(_function(name, f, signature(f)) for name, f in sorted(functional.items()))


def modules_stub() -> str:
    """`genesis/nn/__init__.pyi`."""
    text = _begun(nn, [name for name in nn.__all__ if name not in applied])
    for name, module in sorted(applied.items()):
        text += f"class {name}(Module):\n" + _indented(f'"""{_summary(module)}"""')
        head = signature(module.__init__, is_method=True).rpartition(" -> ")[0]
        text += f"    def __init__{head} -> None: ...\n"
        text += "    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor: ...\n"
    return text


def optimizers_stub() -> str:
    """`genesis/optim/__init__.pyi`."""
    found = _begun(optim, [name for name in optim.__all__ if name != "OPTIMIZERS"])
    return found + "OPTIMIZERS: dict[str, type[Optimizer]]\n"


def methods_stub() -> str:
    """`genesis/functions/methods.pyi`."""
    text = _begun(methods_module)
    text += f'class Methods:\n    """{_summary(methods_module.Methods)}"""\n'
    text += "".join(_method(name, f) for name, f in sorted(methods.items()))
    return text + "".join(_indented(line) for line in _operators())


def _operators() -> Iterable[str]:
    for name, function in sorted(vars(methods_module.Methods).items()):
        if name in ("__getitem__", "__setitem__"):
            yield f"def {name}{signature(function, is_method=True)}: ..."
        elif name in COMPARISONS:
            yield f"def {name}(self, other: object) -> Tensor: ...  # type: ignore[override]"
        elif inspect.isfunction(function) and name.startswith("__"):
            positional = [
                p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
            ]
            operand = "" if len(positional) == 1 else f", other: {_annotation(positional[1].annotation)}"
            result = "Self" if name.startswith("__i") and name != "__invert__" else "Tensor"
            yield f"def {name}(self{operand}) -> {result}: ..."


STUBS: dict[str, Callable[[], str]] = {
    "genesis/__init__.pyi": package_stub,
    "genesis/functions/methods.pyi": methods_stub,
    "genesis/nn/__init__.pyi": modules_stub,
    "genesis/nn/functional.pyi": functional_stub,
    "genesis/optim/__init__.pyi": optimizers_stub,
}


def formatted(text: str, path: str) -> str:
    """A stub without imports that it does not use, as `ruff format` leaves it."""
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check", "--quiet", "--fix", "--exit-zero", "--select", "F401,I,RUF022"], ["format", "--quiet"]):
        line = [ruff, *command, "--stdin-filename", REPOSITORY / path, "-"]
        text = subprocess.run(line, input=text, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    return text


def main() -> None:
    """Write the stubs."""
    for path, made in STUBS.items():
        (REPOSITORY / path).write_text(formatted(made(), path), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
