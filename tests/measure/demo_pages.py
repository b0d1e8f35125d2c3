"""The programs of docs/demos: `python -m tests.measure.demo_pages --gpu` runs the four, and prints a line for each.

Without --gpu they run on the CPU, where kernels are numpy references. --full prints all that they print.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import genesis

DEMOS = Path(__file__).resolve().parents[2] / "docs" / "demos"


def code_blocks(text: str) -> list[str]:
    """The Python blocks of a page, top to bottom."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def page_as_module(page: Path, folder: Path) -> Any:
    """The blocks of a page as one file in `folder`, which Triton reads kernels from, imported."""
    blocks = code_blocks(page.read_text("utf-8"))
    assert blocks, page
    file = folder / f"page_{page.stem.replace('-', '_')}.py"
    file.write_text("\n".join(blocks), "utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def times_of(printed: str) -> list[str]:
    """What a page printed of times: its benchmarks, and the sums of its profiles."""
    lines = [re.sub(r"\s+", " ", line) for line in printed.splitlines() if "%" not in line]
    return [line for line in lines if re.search(r"\d ms|time total: ", line)]


def main(words: list[str]) -> int:
    """Run the pages that are named, or all; 1 where one fails."""
    if "--gpu" in words and not (genesis.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"):
        print("there is no GPU, or TRITON_INTERPRET is set")
        return 1
    failed = 0
    names = [word for word in words if not word.startswith("--")] or ["mlp", "profiling", "gelu", "softmax"]
    for name in names:
        printed, started = io.StringIO(), time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(printed):
                page_as_module(DEMOS / f"{name}.md", Path(folder))
            outcome = "ok"
        except Exception as error:  # the others run
            failed, outcome = 1, f"FAILED: {error!r}"
        if "--full" in words:
            print(printed.getvalue())
        seconds, times = time.perf_counter() - started, "; ".join(times_of(printed.getvalue()))
        print(f"{name:<10} {outcome}  {seconds:5.1f} s  {times}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
