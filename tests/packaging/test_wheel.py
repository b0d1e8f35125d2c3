"""The wheel holds the packages of the tree under their import names and nothing else; its metadata is as promised."""

from __future__ import annotations

import ast
import email
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import genesis
from tests.packaging.stubs import STUBS
from tests.packaging.tree import PACKAGES, REPOSITORY, build_wheel, copy_project, difference, package_files, statements

# One worker builds the wheel for all of these.
pytestmark = pytest.mark.xdist_group("wheel")

EVERYWHERE = {
    "huggingface-hub",
    "jinja2",
    "ml-dtypes",
    "numpy",
    "prompt-toolkit",
    "pydantic",
    "pyyaml",
    "rich",
    "safetensors",
    "threadpoolctl",
    "tokenizers",
    "typer",
}
LINUX = {"cuda-core", "cuda-python", "triton"}
BROUGHT_BY = {"cuda": "cuda-python", "nccl": "nccl4py", "pydantic_core": "pydantic", "yaml": "pyyaml"}
EXTRAS = {"bench", "dev", "docs", "distributed", "tensorboard", "wandb", "nvrtc", "parquet", "serve"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree as it is."""
    return build_wheel(copy_project(tmp_path_factory.mktemp("project")), tmp_path_factory.mktemp("wheel"))


def read(wheel: Path, name: str) -> str:
    """A file of the wheel's dist-info folder."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    return email.message_from_string(read(wheel, "METADATA"))


def test_the_wheel_holds_the_package_folders_and_nothing_else(wheel: Path) -> None:
    missing, extra = difference(REPOSITORY, wheel)
    assert not missing, f"not in the wheel; name their packages in pyproject.toml: {sorted(missing)}"
    assert not extra, f"in the wheel without a file in the tree: {sorted(extra)}"


@pytest.mark.full
def test_a_forgotten_package_and_a_stray_one_are_noticed(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    text = (project / "pyproject.toml").read_text()
    assert '    "genesis.ops",\n' in text
    (project / "pyproject.toml").write_text(text.replace('    "genesis.ops",\n', '    "tests",\n'))
    (project / "tests").mkdir()
    (project / "tests" / "__init__.py").touch()
    missing, extra = difference(project, build_wheel(project, tmp_path / "wheel"))
    assert missing == {f"genesis/ops/{path.name}" for path in (project / "genesis" / "ops").glob("*.py")}
    assert extra == {"tests/__init__.py"}


def test_type_marks_and_recipes_travel_with_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"{name}/py.typed" for name in PACKAGES.values()} <= names
    assert set(STUBS) <= names
    recipes = {f"genesis_configs/{path.name}" for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert "genesis_configs/quickstart.yaml" in recipes <= names


def test_the_wheel_imports_from_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import sys, importlib, importlib.resources\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]:\n"
        "    print(importlib.import_module(name).__file__)\n"
        "print(importlib.resources.files('genesis_configs').joinpath('quickstart.yaml'))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *PACKAGES.values(), "genesis_cli.main"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert len(paths) == len(PACKAGES) + 2
    assert all(path.is_relative_to(tmp_path) and path.is_file() for path in paths), paths


def test_identity(metadata: Message) -> None:
    assert metadata["Name"] == "genesis-lm"
    assert metadata["Version"] == genesis.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"


def core_requirements(metadata: Message, platform: str, machine: str) -> set[str]:
    """What an installation without extras brings on such a machine, by normalised name."""
    place = {"sys_platform": platform, "platform_machine": machine, "extra": ""}
    wanted = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return {canonicalize_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate(place)}


@pytest.mark.parametrize(
    ("platform", "machine", "expected"),
    [
        ("linux", "x86_64", EVERYWHERE | LINUX),
        ("linux", "aarch64", EVERYWHERE | LINUX),
        ("linux", "ppc64le", EVERYWHERE),
        ("darwin", "arm64", EVERYWHERE),
    ],
)
def test_core_requirements(metadata: Message, platform: str, machine: str, expected: set[str]) -> None:
    assert core_requirements(metadata, platform, machine) == expected


def test_extras(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    bare = {Requirement(text).name for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text}
    assert "torch" not in bare


def undeclared(sources: Iterable[str], distributions: set[str]) -> set[str]:
    """Third-party modules that `sources` import, in function bodies too, and that none of `distributions` brings."""
    imported: set[str] = set()
    for source in sources:
        for node in statements(source):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names - set(PACKAGES.values())
    return {name for name in foreign if BROUGHT_BY.get(name, canonicalize_name(name)) not in distributions}


def test_imported_libraries_are_declared(metadata: Message) -> None:
    wanted = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    product = {canonicalize_name(r.name) for r in wanted if not set(str(r.marker).split('"')) & {"dev", "bench"}}
    assert product > EVERYWHERE | LINUX
    sources = [path.read_text() for path, _ in package_files(REPOSITORY) if path.suffix == ".py"]
    assert sources and not undeclared(sources, product)


def test_undeclared_libraries_are_noticed() -> None:
    source = "import os, yaml, genesis.errors\ndef f():\n    from scipy.linalg import qr\n    import cuda.core"
    assert undeclared([source], {"pyyaml"}) == {"scipy", "cuda"}


def test_entry_point(wheel: Path) -> None:
    lines = read(wheel, "entry_points.txt").split("\n")
    assert [line for line in lines if line] == ["[console_scripts]", "genesis = genesis_cli.main:main"]
