"""How many files a reader opens to follow one training step on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOST = 45  # 15 of them are references of ops and their helpers; lower it where fewer are entered


def test_a_training_step_enters_few_files() -> None:
    command = [sys.executable, "-m", "benchmarks.step_files"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=True)
    *lines, total = done.stdout.splitlines()
    paths = [line.split()[1] for line in lines]
    assert total.startswith(f"{len(paths)} files, ")
    assert {"models/blocks.py", "models/fuse.py", "genesis/train/step.py", "genesis/tensor.py"} <= set(paths)
    assert all((root / path).is_file() for path in paths)
    assert len(paths) <= MOST, done.stdout
