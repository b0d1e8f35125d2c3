"""Programs written for torch print the same numbers with Genesis, which `make programs` also checks against torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import running

STORED = running.stored()


LONG = {"language_model"}  # takes as long as all others


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in LONG)) for n in sorted(STORED)])
def test_a_program_prints_what_torch_prints(name: str) -> None:
    assert running.difference(STORED[name], running.output_of(running.FOLDER / f"{name}.py", genesis=True)) == ""


def test_every_program_is_stored_or_needs_a_gpu() -> None:
    assert {path.stem for path in running.programs()} == STORED.keys() | {p.stem for p in running.programs("cuda_")}


def test_only_imports_are_replaced(tmp_path: Path) -> None:
    source = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import Dataset\nx = torch.ones(2)  # torch\n"
    changed = running.for_genesis(source)
    assert changed == (
        "import genesis as torch\nimport genesis.nn as nn\nfrom genesis.utils.data import Dataset\n"
        "x = torch.ones(2)  # torch\n"
    )
    path = tmp_path / "program.py"
    path.write_text("import torch\nprint(torch.ones(2).sum().item(), torch.float32)\n")
    assert running.output_of(path, genesis=True) == "2.0 torch.float32\n"


@pytest.mark.parametrize("found", ["a 1.0 [2]\n", "a 1.1 2\n", "a 1.0 2\nmore\n", "b 1.0 2\n", "a nan 2\n"])
def test_differences_are_noticed(found: str) -> None:
    assert running.difference("a 1.0 2\n", "a 1.00001 2\n") == ""
    assert running.difference("a 1.0 2\n", found)
