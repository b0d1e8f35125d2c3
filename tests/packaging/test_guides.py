"""The guides in docs/ and the README are true: pages are current, their code runs, their figures are measured."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.performance import training_steps
from benchmarks.result_files import read_results, result_files
from docs.generate import PAGES, api_page, is_current
from genesis import errors
from genesis_models import ARCHITECTURES
from tests.packaging.tree import REPOSITORY

DOCS = REPOSITORY / "docs"
README = (REPOSITORY / "README.md").read_text()


def code_blocks(text: str) -> list[str]:
    """The Python blocks of a page, top to bottom."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_configuration_page_is_current() -> None:
    assert is_current("docs/configuration.md"), "run `make docs`"
    assert "docs/configuration.md" in PAGES


def test_every_public_name_says_what_it_is() -> None:
    entries = re.findall(r"^- `([^`(]+)[^`]*`: (.*)$", api_page(), re.MULTILINE)
    assert len(entries) > 300
    assert not [name for name, sentence in entries if not sentence]


@pytest.mark.parametrize("page", ["cuda.md", "data.md"])
def test_code_of_guides_runs(page: str) -> None:
    blocks = code_blocks((DOCS / page).read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": page})


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
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900


def test_the_families_that_the_readme_names_exist() -> None:
    (line,) = re.findall(r"Families: (.*)\.$", README, re.MULTILINE)
    assert set(line.replace(" and ", ", ").split(", ")) <= set(ARCHITECTURES)


def speed_rows(text: str) -> list[tuple[str, ...]]:
    """Size, shape, milliseconds of Genesis and of the peer, and their ratio, of the README's table."""
    row = r"^\| (\S+), ([\d x]+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) \|$"
    return re.findall(row, text, re.MULTILINE)


def measured(results: Any) -> set[tuple[str, ...]]:
    """The same of all steps beside torch.compile in docs/performance.md."""
    return {
        (
            step.row["size"],
            str(step.row["shape"]).replace("x", " x "),
            f"{step.row['ms']:.1f}",
            f"{step.peer['ms']:.1f}",
            f"{step.peer['ms'] / step.row['ms']:.2f}",
        )
        for step in training_steps(results)
        if str(step.peer.get("side", "")).startswith("lean")
    }


def test_the_readme_s_figures_are_measured() -> None:
    rows = speed_rows(README)
    assert len(rows) == 5
    assert set(rows) <= measured(read_results(result_files()))
