"""The guides for contributors do what they say: each is applied to a copy of the repository and tried there."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.tree import PACKAGES, REPOSITORY

STEP = re.compile(r"^(At the end of|Write) `([\w./]+)`:\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages under the names by which they are imported, and the tests: one copy in which all guides are done."""
    folder, ignored = tmp_path_factory.mktemp("guides") / "copy", shutil.ignore_patterns("fixtures")
    for source, name in PACKAGES.items():
        shutil.copytree(REPOSITORY / source, folder / name, ignore=ignored)
    for part in ("ops", "kernels", "optim"):
        shutil.copytree(REPOSITORY / "tests" / part, folder / "tests" / part, ignore=ignored)
    for path in (REPOSITORY / "pyproject.toml", *(REPOSITORY / "tests").glob("*.py")):
        shutil.copy(path, folder / path.relative_to(REPOSITORY))
    return folder


def applied(page: str, folder: Path) -> list[str]:
    """The steps of a guide done in `folder`; the files that it adds to or writes."""
    steps = STEP.findall((REPOSITORY / "docs" / page).read_text())
    for how, name, code in steps:
        top, rest = name.split("/", 1)
        path = folder / PACKAGES.get(top, top) / rest
        assert path.exists() == (how == "At the end of"), name
        path.write_text((path.read_text() + "\n\n" if path.exists() else "") + code)
    return [name for _, name, _ in steps]


def run(folder: Path, *arguments: str) -> str:
    """Python in a copy, whose packages come before the installed ones."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def check_conforms(folder: Path, op: str, *files: str) -> None:
    """These files of a copy's suite have tests of the op, and they pass."""
    told = run(folder, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "-k", op, *files)
    assert all(re.search(rf"^{file}::\S+ PASSED", told, re.MULTILINE) for file in files), told


USER_OF_THE_OP = """
import genesis
x = genesis.tensor([-4.0, 0.0, 1.5, 4.0], requires_grad=True)
y = genesis.squared_relu(x)
assert y.tolist() == [0.0, 0.0, 2.25, 16.0] == x.squared_relu().tolist()
assert genesis.nn.SquaredReLU()(x).tolist() == genesis.nn.functional.squared_relu(x).tolist() == y.tolist()
y.sum().backward()
assert x.grad.tolist() == [0.0, 0.0, 3.0, 8.0], x.grad
print(genesis.__file__)
"""


@pytest.mark.slow
def test_adding_an_op(folder: Path) -> None:
    assert applied("adding-an-op.md", folder) == ["genesis/ops/activation.py", "tests/ops/samples/fused.py"]
    shown = doctest.DocTestParser().get_examples((REPOSITORY / "docs" / "adding-an-op.md").read_text())
    printed = run(folder, "-c", "import genesis\n" + "".join(each.source for each in shown) + USER_OF_THE_OP)
    assert printed.startswith(shown[-1].want + "\n" + str(folder))
    check_conforms(folder, "squared_relu", "tests/ops/test_registry.py")


def patched(page: str, folder: Path) -> None:
    """The diffs of a guide done: each added line comes after the line that is shown before it, or in its place."""
    diffs = re.findall(r"^In `([\w./]+)`:\n\n```diff\n(.*?)^```", (REPOSITORY / "docs" / page).read_text(), re.S | re.M)
    assert diffs
    for name, diff in diffs:
        top, rest = name.split("/", 1)
        path = folder / PACKAGES.get(top, top) / rest
        text, before, is_replaced = path.read_text(), "", False
        for line in diff.splitlines():
            if line.startswith("+"):
                assert text.count(f"{before}\n") == 1, before
                kept = "" if is_replaced else f"{before}\n"
                text = text.replace(f"{before}\n", f"{kept}{line[1:]}\n")
            before, is_replaced = line[1:], line.startswith("-")
        path.write_text(text)


def checks(page: str) -> str:
    """The Python that a guide gives to check its result."""
    text = (REPOSITORY / "docs" / page).read_text().split("## Check it")[1]
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
def test_adding_a_model(folder: Path) -> None:
    assert applied("adding-a-model.md", folder) == ["models/parallel.py"]
    patched("adding-a-model.md", folder)
    printed = run(folder, "-c", checks("adding-a-model.md") + "\nprint(genesis_models.__file__)")
    assert printed.startswith(str(folder))


CONFIGURED = """
from genesis.train.config import OptimConfig
from genesis.train.optimizer import build_optimizer
config = OptimConfig(name="adagradw")
assert (config.lr, config.eps) == (1e-2, 1e-10)
built = build_optimizer(config, [("w", genesis.nn.Parameter(genesis.ones(3)))], seed=0)
assert type(built).__name__ == "AdagradW"
print(genesis.__file__)
"""


@pytest.mark.full
@pytest.mark.slow
def test_adding_an_optimizer(folder: Path) -> None:
    assert len(applied("adding-an-optimizer.md", folder)) == 2
    assert run(folder, "-c", checks("adding-an-optimizer.md") + CONFIGURED).startswith(str(folder))
    check_conforms(folder, "adagradw", "tests/ops/test_registry.py", "tests/kernels/test_registry_on_cuda.py")


@pytest.mark.slow
def test_adding_a_data_format_and_a_command(folder: Path) -> None:
    written = []
    pages = ("adding-a-data-format.md", "adding-a-command.md")
    for page in pages:
        written += applied(page, folder)
        patched(page, folder)
    package = "\nimport genesis, genesis_cli\nprint(genesis.__file__, genesis_cli.__file__)"
    assert run(folder, "-c", "\n".join(map(checks, pages)) + package).count(str(folder)) == 2
    assert written == ["genesis/data/readers/psv.py", "cli/count.py"]


@pytest.mark.slow
def test_adding_an_objective(folder: Path) -> None:
    assert applied("adding-an-objective.md", folder) == ["genesis/train/z_loss.py"]
    printed = run(folder, "-c", checks("adding-an-objective.md") + "\nimport genesis\nprint(genesis.__file__)")
    assert printed.startswith(str(folder))


@pytest.mark.slow
def test_adding_a_second_kernel(folder: Path) -> None:
    assert applied("adding-a-kernel.md", folder) == ["genesis/kernels/pointwise/activation.py"]
    interpreted = "import os\nos.environ['TRITON_INTERPRET'] = '1'\n"
    printed = run(folder, "-c", interpreted + checks("adding-a-kernel.md") + "\nprint(genesis.__file__)")
    assert printed.startswith(str(folder))
