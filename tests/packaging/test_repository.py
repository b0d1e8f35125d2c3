"""House rules that no linter knows: what the text files may not name, how long a function may be, how many arguments a
kernel may take, what is exported.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.packaging.tree import REPOSITORY, package_files, repository_files, statements

LONGEST_FUNCTION = 80
LONGEST_KERNEL = 150  # one function that reads top to bottom beats four that hand many values on
MOST_ARGUMENTS = 25  # of a kernel, and of each device function that it calls
SOMEONES_HOME = re.compile(r"/(?:home|Users)/[a-z]\w*/", re.IGNORECASE)


def private_paths(text: str, checkout: Path) -> list[str]:
    """Paths in `text` that exist on one machine only: the checkout's own, and home folders."""
    return [*re.findall(re.escape(str(checkout)) + r"\b", text), *SOMEONES_HOME.findall(text)]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is compiled by Triton or Gluon."""
    return any(ast.unparse(decorator).split("(")[0].endswith(".jit") for decorator in function.decorator_list)


def long_functions(source: str) -> list[str]:
    """Names of the functions in `source` that are longer than they may be."""
    functions = [n for n in statements(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    limits = [LONGEST_KERNEL if is_kernel(n) else LONGEST_FUNCTION for n in functions]
    lines = [(n.end_lineno or n.lineno) - n.lineno + 1 for n in functions]
    return [n.name for n, count, most in zip(functions, lines, limits, strict=True) if count > most]


def crowded_kernels(source: str) -> dict[str, int]:
    """Names of the kernels in `source` with too many arguments, and how many these are."""
    kernels = [n for n in statements(source) if isinstance(n, ast.FunctionDef) and is_kernel(n)]
    counts = {n.name: len([*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs]) for n in kernels}
    return {name: count for name, count in counts.items() if count > MOST_ARGUMENTS}


IMPORTED_BY_USERS = {
    "genesis.cuda.amp", "genesis.cuda.memory", "genesis.cuda.nvtx", "genesis.errors", "genesis.func", "genesis.linalg",
    "genesis.masked", "genesis.nn.functional", "genesis.nn.init", "genesis.nn.modules.module", "genesis.nn.utils",
    "genesis.nn.utils.parametrizations", "genesis.nn.utils.parametrize", "genesis.optim.lr_scheduler",
    "genesis.optim.swa_utils", "genesis.profiler", "genesis.random", "genesis.saving", "genesis.special",
    "genesis.testing",
}  # fmt: skip


def export_faults(module: ModuleType) -> list[str]:
    """What is wrong with the `__all__` of `module`."""
    exported = list(getattr(module, "__all__", ()))
    faults = [f"{name} is exported and not defined" for name in exported if not hasattr(module, name)]
    faults += [f"{name} is exported twice" for name in sorted(set(exported)) if exported.count(name) > 1]
    if exported and module.__name__ not in IMPORTED_BY_USERS and not hasattr(module, "__path__"):
        faults.append("a private module has an __all__")
    return faults


def test_files_that_nobody_committed_are_left_alone(tmp_path: Path) -> None:
    for name in ("code/kept.py", "code/run.log", "build/made.py", "code/__pycache__/kept.pyc", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    def names(*folders: str) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in repository_files(*folders, root=tmp_path)]

    # Without git what cannot be told apart counts.
    assert names() == ["code/kept.py", "code/run.log", "notes.txt"]
    assert names("code", "notes.txt", "absent") == ["code/kept.py", "code/run.log", "notes.txt"]
    if shutil.which("git") is None:
        pytest.skip("the rest needs git")
    for words in (["init", "-q"], ["add", "code/kept.py", "notes.txt"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert names() == ["code/kept.py", "notes.txt"] and names("code", "absent") == ["code/kept.py"]


def test_no_file_names_a_place_on_one_machine() -> None:
    files = repository_files()
    assert REPOSITORY / "pyproject.toml" in files
    found = {}
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if paths := private_paths(text, REPOSITORY):
            found[str(path.relative_to(REPOSITORY))] = paths
    assert not found


def test_private_paths_are_noticed() -> None:
    home = "/" + "home/someone/model"
    assert private_paths(f"load({home!r}) # and /srv/checkout/x, not /srv/checkouts", Path("/srv/checkout")) == [
        "/srv/checkout",
        "/" + "home/someone/",
    ]


def test_functions_fit_a_screen() -> None:
    found = {}
    for path in repository_files():
        if path.suffix == ".py" and (names := long_functions(path.read_text())):
            found[str(path.relative_to(REPOSITORY))] = names
    assert not found


def test_long_functions_are_noticed() -> None:
    body = "    pass\n"
    source = f"def fits():\n{body * 79}\ndef long():\n{body * 80}\nasync def too():\n{body * 80}"
    assert long_functions(source) == ["long", "too"]
    kernels = f"@triton.jit\ndef kernel():\n{body * 149}\n@triton.jit\ndef too_long():\n{body * 150}"
    assert long_functions(kernels) == ["too_long"]


def test_kernels_take_few_arguments() -> None:
    sources = {path: path.read_text() for path in repository_files("genesis/kernels") if path.suffix == ".py"}
    assert any("@triton.jit" in source for source in sources.values())
    found = {str(path.relative_to(REPOSITORY)): crowded_kernels(source) for path, source in sources.items()}
    assert not {path: names for path, names in found.items() if names}


def test_crowded_kernels_are_noticed() -> None:
    few, many = (", ".join(f"a{i}" for i in range(n)) for n in (25, 26))
    source = f"@triton.jit\ndef fits({few}): ...\ndef host({many}): ...\n"
    source += f"@triton.jit(do_not_specialize=['a0'])\ndef crowded({many}): ...\n@gluon.jit\ndef too({few}, *, B): ..."
    assert crowded_kernels(source) == {"crowded": 26, "too": 26}


def test_exported_names_exist() -> None:
    files = [wheel_path for _, wheel_path in package_files(REPOSITORY) if wheel_path.endswith(".py")]
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files]
    assert {"genesis", "genesis.errors", "genesis_cli", "genesis_models", "genesis_configs"} <= set(names)
    found = {name: export_faults(importlib.import_module(name)) for name in names if not name.endswith("__main__")}
    assert not {name: faults for name, faults in found.items() if faults}


def test_wrong_exports_are_noticed() -> None:
    def shown() -> None: ...

    module = ModuleType("wrong")
    shown.__module__ = "wrong"
    vars(module).update(shown=shown, _hidden=shown)
    assert export_faults(module) == []
    vars(module)["__all__"] = ["shown", "gone", "shown"]
    assert export_faults(module) == [
        "gone is exported and not defined",
        "shown is exported twice",
        "a private module has an __all__",
    ]
