"""docs/profiler.md is true: its code runs, in one module from top to bottom, on both devices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import genesis

PAGE = Path(__file__).resolve().parents[2] / "docs" / "profiler.md"


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "cuda"])
def test_the_page_runs(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if not has_gpu:
        monkeypatch.setattr(genesis.cuda, "is_available", lambda: False)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    code = compile("\n".join(blocks), "page.py", "exec")
    exec(code, {"__name__": "page"})
    printed = capsys.readouterr().out
    assert printed.count("twice the") == 3
    assert printed.count("Self CPU time total") == 4 + 2 + 1
    assert printed.count("Self CUDA time total") == (6 if has_gpu else 0)  # a sleep has no kernels
    assert "up to step 4" in printed
    phases = {event["ph"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert phases == {"M", "X", "C"}
    stacks = Path("stacks.txt").read_text()
    assert re.search(r"^page.py\(\d+\):_<module>;.*;gelu \d+$", stacks, re.MULTILINE)
    assert all(Path(name).stat().st_size for name in ("flame.svg", "var/stacks_mlp.txt", "var/stacks_mlp.svg"))
