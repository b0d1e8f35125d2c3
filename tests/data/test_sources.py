"""Which files a source means, in which order, under which names."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from genesis.data.corpus import Corpus
from genesis.data.sources import expand
from genesis.errors import DataError
from genesis.train.config import WeightedSource


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts at several depths, which is also the working directory."""
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.jsonl", "sub/e.txt.gz", ".hidden/f.txt", "sub/.g.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "sources,names",
    [
        (["a.txt"], ["a.txt"]),
        (["*.txt"], ["a.txt", "b.txt"]),
        (["**/*.txt"], ["a.txt", "b.txt", "sub/c.txt"]),
        (["sub/*"], ["sub/c.txt", "sub/e.txt.gz"]),
        (["sub"], ["sub/c.txt", "sub/deep/d.jsonl", "sub/e.txt.gz"]),
        (["./sub/", "b.txt"], ["./sub/c.txt", "./sub/deep/d.jsonl", "./sub/e.txt.gz", "b.txt"]),
        (["b.txt", "*.txt", "./b.txt"], ["b.txt", "a.txt"]),
        ([".hidden/*"], [".hidden/f.txt"]),
    ],
)
def test_a_source_names_files_in_a_fixed_order_each_once(tree: Path, sources: list[str], names: list[str]) -> None:
    assert [file.name for file in expand(sources)] == names


def test_the_name_decides_the_format(tree: Path) -> None:
    names = ["x.txt", "x.jsonl", "x.JSONL.GZ", "x.gz", "x", "x.ndjson", "x.json", "x.csv.gz", "x.PARQUET", "x.pq"]
    for name in names:
        Path(name).write_text("x")
    formats = {file.name: (file.format.name, file.gzip) for file in expand(names)}
    assert formats == {
        "x.txt": ("text", False),
        "x.jsonl": ("jsonl", False),
        "x.JSONL.GZ": ("jsonl", True),
        "x.gz": ("text", True),
        "x": ("text", False),
        "x.ndjson": ("jsonl", False),
        "x.json": ("json", False),
        "x.csv.gz": ("csv", True),
        "x.PARQUET": ("parquet", False),
        "x.pq": ("parquet", False),
    }


def test_a_file_has_the_weight_of_the_last_source_that_matches_it(tree: Path) -> None:
    sources = ["sub", WeightedSource(path="*.txt", weight=2.5), WeightedSource(path="sub/c.txt", weight=0.5), "b.txt"]
    weights = {"sub/c.txt": 0.5, "sub/deep/d.jsonl": 1.0, "sub/e.txt.gz": 1.0, "a.txt": 2.5, "b.txt": 1.0}
    assert {file.name: file.weight for file in expand(sources)} == weights
    assert Corpus(sources, on_error="fail", max_line_bytes=1024).weights == weights


def test_a_file_whose_name_looks_like_a_glob_is_meant_literally(tree: Path) -> None:
    Path("a[1].txt").write_text("x")
    Path("a1.txt").write_text("x")
    assert [file.name for file in expand(["a[1].txt"])] == ["a[1].txt"]


def test_a_link_to_a_folder_inside_a_folder_is_not_followed(tree: Path) -> None:
    os.symlink(tree, tree / "sub/loop")
    assert [file.name for file in expand(["sub"])] == ["sub/c.txt", "sub/deep/d.jsonl", "sub/e.txt.gz"]


def test_a_broken_link_is_found_so_that_reading_it_can_fail(tree: Path) -> None:
    os.symlink("nowhere", "broken.txt")
    assert [file.name for file in expand(["broken.txt"])] == ["broken.txt"]


def test_a_folder_that_cannot_be_listed_is_an_error_not_less_data(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def denied(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match="looking for the data failed: Permission denied") as caught:
        expand(["sub"])
    assert caught.value.where == "sub/deep"


def test_the_tilde_of_a_source_is_the_home_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    assert [file.name for file in expand(["~/*.txt"])] == [f"{tree}/a.txt", f"{tree}/b.txt"]


def test_the_standard_library_without_tests() -> None:
    files = expand(["stdlib:"])
    names = [file.name for file in files]
    assert len(names) > 400
    assert names == sorted(names)
    assert {"stdlib:os.py", "stdlib:json/decoder.py"} <= set(names)
    assert not [name for name in names if "/test" in name or "site-packages" in name or "idlelib" in name]
    assert files[0].path.is_relative_to(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize(
    "source,message",
    [
        ("missing.txt", "tried as a file, a folder and a glob from"),
        ("sub/*.md", "tried as a glob from"),
        ("stdlib:json", "write `stdlib:` alone"),
        ("https://example.org/a.txt", "is an address"),
        ("", "matches no file"),
        ("bad\x1b[2Jname", r"bad\x1b[2Jname"),
    ],
)
def test_a_source_that_matches_nothing_is_an_error_that_says_what_was_tried(
    tree: Path, source: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        expand(["a.txt", source])
    assert message in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_an_empty_folder_matches_nothing(tree: Path) -> None:
    Path("empty").mkdir()
    with pytest.raises(DataError, match="'empty' matches no file"):
        expand(["empty"])
