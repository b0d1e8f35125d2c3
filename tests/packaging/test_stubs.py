"""The generated stubs are those of the functions as they are, they are shipped, and they hold at run time."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import genesis
from genesis.errors import DTypeError, KeywordError
from genesis.functions.surface import functional, functions, methods
from genesis.op import registry
from tests.packaging import typed_program
from tests.packaging.stubs import STUBS, formatted, signature
from tests.packaging.tree import PACKAGES, REPOSITORY, copy_project


@pytest.mark.parametrize("path", STUBS)
def test_stubs_are_up_to_date(path: str) -> None:
    kept = (REPOSITORY / path).read_text(encoding="utf-8")
    assert formatted(STUBS[path](), path) == kept, f"{path} is not what the functions are now; run `make stubs`"


def test_a_function_that_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "genesis/__init__.pyi"
    monkeypatch.setitem(functions, "exp", genesis.add)
    with pytest.raises(AssertionError, match="run `make stubs`"):
        test_stubs_are_up_to_date(path)


def test_every_stub_is_made() -> None:
    found = {str(p.relative_to(REPOSITORY)) for folder in PACKAGES for p in (REPOSITORY / folder).rglob("*.pyi")}
    assert found == set(STUBS)


def test_signatures_have_torchs_names() -> None:
    assert signature(genesis.add) == (
        "(input: Tensor | float, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None) -> Tensor"
    )
    assert signature(genesis.mm) == "(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor"
    assert signature(genesis.Tensor.view, is_method=True) == "(self, *shape: Sizes, dtype: DTypeLike = None) -> Tensor"
    assert signature(genesis.exp, is_method=True) == "(self, *, out: Tensor | None = None) -> Tensor"


def test_no_public_function_takes_or_gives_anything() -> None:
    """`Any` is for data of all kinds, and for results whose form depends on arguments."""
    untyped = set()
    for name, function in functions.items():
        found = inspect.signature(function)
        first = [p.annotation for p in found.parameters.values()][:1]
        if any("Any" in str(annotation) for annotation in (found.return_annotation, *first)):
            untyped.add(name)
    assert untyped == {
        "arange", "as_tensor", "asarray", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_shapes",
        "broadcast_tensors", "bucketize", "cartesian_prod", "from_dlpack", "is_tensor", "isin", "max",
        "median", "meshgrid", "min", "nanmedian", "nonzero", "randint", "result_type", "scalar_tensor",
        "tensor", "unique", "unique_consecutive", "where",
    }  # fmt: skip


def test_every_public_function_says_what_it_does() -> None:
    tables = (functions, methods, functional)
    assert not [name for table in tables for name, function in table.items() if not (function.__doc__ or "").strip()]


def test_the_typed_program_runs() -> None:
    assert typed_program.main().shape == ()
    with pytest.raises(KeywordError):
        genesis.add(genesis.ones(1), genesis.ones(1), alpah=2)
    with pytest.raises(DTypeError):
        genesis.add("x", genesis.ones(1))


def test_types_are_checked_of_the_program() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests/packaging/typed_program.py" in settings["files"] and settings["strict"]


def test_names_of_the_records_are_unique() -> None:
    names = [op.public for op in registry.values() if op.public]
    assert len(names) == len(set(names)) > 50
    assert not [op.name for op in registry.values() if (op.method or op.in_place or op.module) and not op.public]


@pytest.mark.full
@pytest.mark.xdist_group("wheel")
def test_stubs_travel_with_the_source_distribution(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert set(STUBS) <= names
