"""docs/user-kernels.md is true: its code runs, in one module from top to bottom."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.custom import UserOp, cdiv
from genesis.measure import op as measuring
from genesis_cli import environment
from genesis_cli.main import main
from tests.kernels.compiler import runs_cuda
from tests.measure.quick import PLAN, small_limits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "user-kernels.md"


def page_as_module(folder: Path) -> Any:
    """The page's Python in a file, which Triton reads kernels from, imported."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    file = folder / "mykernels.py"
    file.write_text("\n".join(blocks))
    spec = importlib.util.spec_from_file_location("mykernels", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not runs_cuda(), reason="NVRTC is not installed")
def test_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = page_as_module(tmp_path)
    ops = [value.name for value in vars(module).values() if isinstance(value, UserOp)]
    assert sorted(ops) == ["extent", "scaled", "squared", "squared_backward"]
    printed = capsys.readouterr().out
    assert printed.startswith("[1.0, 4.0, 9.0]\nsquared: ")
    assert "\nextent: " in printed


def test_its_command_measures_an_op_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ones_own.py").write_text(
        "import genesis\n"
        'SOURCE = "__global__ void half(float* out, const float* x, long long n) {}"\n'
        'rule = {"inputs": ("x",), "out": lambda x: x, "reference": lambda x: x / 2, "vjp": lambda g, x: g / 2}\n'
        f"halved = genesis.cuda_op('halved', SOURCE, grid={cdiv(3, 2)}, block=1, **rule)\n"
    )
    monkeypatch.chdir(tmp_path)
    facts = mock.patch.object(environment, "facts", return_value={"cpu": {"name": "an SM"}, "genesis": "0.0"})
    quick = mock.patch.object(measuring, "Settings", functools.partial(measuring.Settings, plan=PLAN))
    words = ["profile", "--op", "ones_own:halved", "--shape", "4,5", "--device", "cpu"]
    with small_limits(), facts, quick:
        assert main([*words, "--backward"]) == 0
        said = capsys.readouterr().out
        assert "ones_own:halved" in said and "4x5" in said
        assert main(["profile", "--op", "ones_own:doubled", "--device", "cpu"]) == 2
        assert "ones_own has no op doubled" in capsys.readouterr().err
        assert main(["profile", "--op", "nobodys:op", "--device", "cpu"]) == 2
        assert "the module nobodys cannot be imported" in capsys.readouterr().err
