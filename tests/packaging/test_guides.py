"""The guides in docs/ and the README are true: pages are current, their code runs, their figures are measured."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genesis
from benchmarks.performance import PAGE, page_of
from benchmarks.results import newest, result_files
from docs.generate import PAGES, api_pages, is_current
from genesis import errors
from genesis_models import ARCHITECTURES
from tests.measure.demo_pages import code_blocks, page_as_module
from tests.packaging.tree import REPOSITORY

DOCS = REPOSITORY / "docs"
README = (REPOSITORY / "README.md").read_text()


def test_the_configuration_page_is_current() -> None:
    assert is_current("docs/configuration.md"), "run `make docs`"
    assert "docs/configuration.md" in PAGES


def test_every_public_name_says_what_it_is() -> None:
    entries = re.findall(r"^## (.+)\n\n```python\n[^`]*\n```\n\n(.*)$", "".join(api_pages().values()), re.MULTILINE)
    assert len(entries) > 300
    assert not [name for name, sentence in entries if not sentence]


ON_CPU = ("demos/mlp.md", "demos/profiling.md", "performance-tips.md")
IN_TRITON = ("demos/gelu.md", "demos/softmax.md")


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("page", ["compile.md", "cuda.md", "data.md", "ranks.md", *ON_CPU, *IN_TRITON])
def test_code_of_guides_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in ON_CPU + IN_TRITON:  # its blocks are one program
        monkeypatch.chdir(tmp_path)
        if page in ON_CPU:
            monkeypatch.setattr(genesis.cuda, "is_available", lambda: False)
        else:
            pytest.importorskip("triton")
        page_as_module(DOCS / page, tmp_path)
        return
    blocks = code_blocks((DOCS / page).read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": page})


@pytest.mark.full
@pytest.mark.host
def test_the_pages_show_ptx_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.measure.demo_pages", "gelu", "softmax", "--full"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=REPOSITORY)
    assert len(re.findall(r"ld\.global\.v4.*\n.*ld\.global\.v4", done.stdout)) == 1
    assert re.search(r"^ex2\.approx +[1-9]", done.stdout, re.MULTILINE)
    assert [line.split()[:2] for line in done.stdout.splitlines() if " ok " in line] == [
        ["gelu", "ok"],
        ["softmax", "ok"],
    ]


def exit_codes() -> dict[str, int]:
    """Every class of errors that has an exit code of its own."""
    found = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    return {
        name: value.exit_code
        for name, value in found.items()
        if issubclass(value, errors.GenesisError) and "exit_code" in vars(value) and value is not errors.GenesisError
    }


def test_troubleshooting_lists_every_exit_code() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", text, re.MULTILINE)
    named = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == exit_codes()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100
    assert len(README.split()) <= 900


def test_the_pictures_of_the_readme_are_on_the_website() -> None:
    website = pytest.importorskip("docs.website", exc_type=ImportError, reason="needs mkdocs")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    files = SimpleNamespace(get_file_from_path=lambda name: name if (DOCS / name).is_file() else None)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", website.on_page_markdown(README, page, None, files))
    assert len(pictures) == README.count("![") > 0
    assert all((DOCS / name).is_file() for name in pictures)


def test_the_families_that_the_readme_names_exist() -> None:
    (line,) = re.findall(r"Families: (.*)\.$", README, re.MULTILINE)
    assert set(line.replace(" and ", ", ").split(", ")) <= set(ARCHITECTURES)


def speed_rows(text: str) -> list[tuple[str, ...]]:
    """Size, shape, milliseconds of Genesis and of the peer, and their ratio, of the README's table."""
    row = r"^\| (\S+), ([\d x]+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) \|$"
    return re.findall(row, text, re.MULTILINE)


def measured(rows: Any) -> set[tuple[str, ...]]:
    """The same of the newest report of steps beside torch.compile."""
    return {
        (
            row["size"],
            row["shape"],
            f"{row['step'] * 1e3:.1f}",
            f"{row['peer_step'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in rows
        if row["recipe"].startswith("torch.compile")
    }


def test_the_readme_s_figures_are_measured() -> None:
    found = newest("training-step", result_files())
    assert found is not None
    rows = speed_rows(README)
    assert len(rows) == 5
    assert set(rows) <= measured(found[1]["tables"][0]["rows"])


def test_the_page_of_figures_is_that_of_the_newest_reports_and_short() -> None:
    assert page_of(result_files()) == PAGE.read_text(), "run `make performance`"
    assert len(PAGE.read_text().splitlines()) <= 150


def test_results_are_the_newest_of_their_kind_and_small() -> None:
    files = result_files()
    kinds = [json.loads(path.read_text())["kind"] for path in files]
    assert len(set(kinds)) == len(kinds) >= 8
    assert all(path.stat().st_size <= 200_000 for path in files)


def test_a_row_below_one_is_named_with_its_reason(tmp_path: Path) -> None:
    columns = [
        {"key": key, "title": key, "unit": unit, "about": "."}
        for key, unit in (
            ("side", "text"), ("token", "s"), ("first", "s"), ("tokens_per_second", "token/s"), ("peak", "bytes"),
            ("ratio", "ratio"), ("first_ratio", "ratio"), ("memory_ratio", "ratio"), ("version", "text"),
        )
    ]  # fmt: skip
    report = {"kind": "cpu-generation", "date": "2026-01-01", "command": "c", "device_name": "cpu", "machine": {}}
    for date, ratio in (("2026-01-01", 0.9), ("2026-01-02", 1.1)):
        rows = [{"side": "theirs", "token": 0.1, "ratio": ratio}]
        table = {"name": "sides", "columns": columns, "rows": rows}
        (tmp_path / f"{date}.json").write_text(json.dumps({**report, "date": date, "tables": [table]}))
    older, newer = (tmp_path / f"2026-01-0{day}.json" for day in (1, 2))
    assert "0.90x" in page_of([older]) and "Below 1 (theirs" in page_of([older])
    assert "1.10x" in page_of([older, newer]) and "Below 1" not in page_of([older, newer])


def functions_of(page: str) -> dict[tuple[str, str], int]:
    """The lines of each function or class that the page names as `path` `name`."""
    lines = {}
    for path, name in re.findall(r"`([\w/]+\.py)` `([\w.]+)`", page):
        node: ast.AST = ast.parse((REPOSITORY / path).read_text())
        for part in name.split("."):
            body = getattr(node, "body", [])
            node = next(child for child in body if getattr(child, "name", None) == part)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        lines[path, name] = (node.end_lineno or 0) - node.lineno + 1
    return lines


def test_the_reading_path_exists_and_is_short() -> None:
    lines = functions_of((REPOSITORY / "docs/reading-path.md").read_text())
    assert len(lines) > 40
    assert sum(lines.values()) <= 1_500


def test_a_function_that_is_gone_is_noticed() -> None:
    with pytest.raises(StopIteration):
        functions_of("`genesis/op.py` `no_such_function`")
